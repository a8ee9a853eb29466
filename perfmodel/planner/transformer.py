"""A transformer's size on paper: parameters, activations and arithmetic, from its shape."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ASPECT_RATIO = 128
"""Width over layers of a model of which only the size is known: Llama 7B and 13B and GPT-3 175B have it."""
VOCABULARY = 32_000
"""Tokens that such a model knows: Llama 2's."""
LOSS_BYTES = 12
"""Per logit when backward begins: log-probabilities in float32 (4), which PyTorch's cross-entropy
keeps, and the gradients of them and of the logits upcast to float32 (8). Transformers upcasts them in
`ForCausalLMLoss` (src/transformers/loss/loss_utils.py)."""


@dataclass(frozen=True)
class Transformer:
    """The shape of a decoder-only transformer.

    numel: parameters. layers, width: blocks, and the size of the residual stream.
    query_width, key_width: heads times their size, of queries and of keys (or values).
    heads: of queries. inner: width of the feed-forward network; gated: whether it has a gate (SwiGLU) beside `up`.
    block_weights, head_weights: parameters of the matrices by which each token is multiplied once in a forward, of all
        blocks and of the output layer, tied or not. Where only the number of parameters is known, blocks have all.
    dropout: whether dropout's masks are kept. upcast_norm: whether norms compute in float32, by separate operations, as
    Hugging Face's RMSNorm does. longest: the longest sequence it takes; None for no limit.
    outer: parameters beside blocks, such as the embedding's; 0 where only their number is known.
    assumed: facts that were not given but assumed, for people.
    """

    numel: int
    layers: int
    width: int
    query_width: int
    key_width: int
    heads: int
    inner: int
    gated: bool
    vocabulary: int
    block_weights: int
    head_weights: int
    dropout: bool = False
    upcast_norm: bool = False
    longest: int | None = None
    outer: int = 0
    assumed: str = ""

    @classmethod
    def of_size(cls, numel: int) -> Transformer:
        """A transformer of which only the number of parameters is known, with the usual proportions.

        numel = 12 layers width**2 (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1), width
        = ASPECT_RATIO layers, heads of 128, a feed-forward network of 4 widths; loss depends little on them (ibid.,
        section 3.1).
        """
        layers = max(1, round((numel / (12 * ASPECT_RATIO**2)) ** (1 / 3)))
        width = max(1, round((numel / (12 * layers)) ** 0.5))
        return cls(
            numel=numel,
            layers=layers,
            width=width,
            query_width=width,
            key_width=width,
            heads=max(1, width // 128),
            inner=4 * width,
            gated=False,
            vocabulary=VOCABULARY,
            block_weights=numel,
            head_weights=0,
            assumed=f"shape: {layers} layers of width {width}, {VOCABULARY} tokens; a config.json would tell",
        )

    @classmethod
    def load(cls, name: str) -> Transformer:
        """The transformer that a Hugging Face config.json describes: a file, a folder's, or that of a model on the hub.

        Raises OSError when the file cannot be read, ValueError naming it when it describes no known transformer, and
        for a name whose configuration is not in the hub's cache.
        """
        path = _config_path(name)
        try:
            values = json.loads(path.read_text())
            if not isinstance(values, dict):
                raise ValueError(f"a model's configuration is a JSON object, found {type(values).__name__}")
            return cls.from_config(values)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_config(cls, values: Mapping[str, Any]) -> Transformer:
        """The transformer that a configuration's values describe: GPT-2-like (`n_embd`), or Llama-like (`hidden_size`).

        Raises ValueError for missing keys and impossible values.
        """
        if isinstance(text := values.get("text_config"), Mapping) and not {"n_embd", "hidden_size"} & values.keys():
            note = "parameters: of text_config alone; what encodes images or sound is not counted"
            return dataclasses.replace(cls.from_config(text), assumed=note)
        experts = [key for key in ("num_local_experts", "num_experts", "n_routed_experts") if values.get(key)]
        if experts:
            raise ValueError(f"mixtures of experts are not supported, found {experts[0]}; pass --params instead")
        return _gpt2(values) if "n_embd" in values else _llama(values)

    @property
    def block_numel(self) -> int:
        """Parameters of one block; the remainder of the division is left over."""
        return (self.numel - self.outer) // self.layers

    def block_bytes(self, sequence: int, value_bytes: int, *, eager_attention: bool = False) -> int:
        """Bytes per token that one block keeps for its backward, in sequences of that length.

        Counted as in Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
        section 4.1, which is for GPT: 34 bytes per token and width of 16-bit values, and 5 per head and position if
        attention is not recomputed. Per token: the inputs of both norms, of attention and of the network; queries and
        attention's result, keys and values; of the network, input and output of the activation function, and with
        a gate, the gate and the product as well.

        eager_attention: whether attention's matrices are kept, which FlashAttention and PyTorch's
            scaled_dot_product_attention recompute.
        """
        values = 2 * self.width + 2 * self.query_width + 2 * self.key_width + (4 if self.gated else 2) * self.inner
        nbytes = values * value_bytes + 2 * self._norm_bytes(value_bytes) + (2 * self.width if self.dropout else 0)
        if eager_attention:
            # Softmax's output; with dropout its output and mask, too.
            kept = 2 * value_bytes + 1 if self.dropout else value_bytes
            nbytes += kept * self.heads * sequence
        return nbytes

    def outer_bytes(self, value_bytes: int) -> int:
        """Bytes kept per token beside blocks: inputs of the last norm and the output layer, the embedding's mask."""
        return self.width * value_bytes + self._norm_bytes(value_bytes) + (self.width if self.dropout else 0)

    def logit_bytes(self, tokens: int, value_bytes: int, *, fused: bool = False) -> int:
        """Bytes that logits and their loss hold when backward begins.

        A logit for each token and entry of the vocabulary, in the model's dtype, which the output
        object of Transformers' models keeps, and LOSS_BYTES beside it.

        fused: the loss makes logits a chunk at a time and gradients at once, as Liger-Kernel 0.8.5
        does (src/liger_kernel/ops/fused_linear_cross_entropy.py): tokens * width / vocabulary
        tokens to a chunk, rounded up to a power of two; and the gradients of the output layer's
        input and weights.
        """
        if not fused:
            return tokens * self.vocabulary * (value_bytes + LOSS_BYTES)
        of_a_chunk = -(-tokens // -(-self.vocabulary // self.width))
        chunk = min(tokens, 1 << (of_a_chunk - 1).bit_length())
        return value_bytes * (chunk * self.vocabulary + (tokens + self.vocabulary) * self.width)

    def flops(
        self,
        tokens: int,
        sequence: int,
        *,
        checkpointing: bool = False,
        eager_attention: bool = False,
        trainable: float = 1.0,
    ) -> tuple[float, float]:
        """Floating-point operations of forward and of backward, of `tokens` in sequences of that length.

        Each weight of a matrix takes 2 per token in forward and 4 in backward, half of which are its own gradient's and
        not needed where it is frozen (Kaplan et al. 2020, section 2.1). Embeddings are looked up, which takes none.
        Checkpointing computes each block once more, and the output layer not (Narayanan et al. 2021, "Efficient
        Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", appendix). All of a block: PyTorch's
        checkpointing without reentrance leaves out its last product. torch.utils.flop_counter counts the same.
        """
        attention, attention_back = self.attention_flops(sequence, eager=eager_attention)
        weights = 2.0 * (self.block_weights + self.head_weights)
        again = checkpointing * (2.0 * self.block_weights + attention)
        return tokens * (weights + attention), tokens * (weights * (1 + trainable) + attention_back + again)

    def attention_flops(self, sequence: int, *, eager: bool = False) -> tuple[float, float]:
        """Operations per token of attention's products of queries with keys, and of scores with values, in all blocks.

        Forward and backward. Kernels like FlashAttention leave out positions that a causal mask hides, half of them,
        and compute scores once more in backward: 5 products to forward's 2 (Dao 2023, "FlashAttention-2", section 4.1).
        Sliding windows are not taken into account.

        eager: all positions, whether hidden or not, and 4 products in backward.
        """
        forward = 4.0 * self.layers * self.query_width * (sequence if eager else (sequence + 1) / 2)
        return forward, forward * (2 if eager else 2.5)

    def _norm_bytes(self, value_bytes: int) -> int:
        """Bytes that a norm keeps per token: its input; or that in float32, and its normalised values."""
        return self.width * (4 + value_bytes if self.upcast_norm else value_bytes)


def _config_path(given: str) -> Path:
    """The file of a configuration: a path, a folder with one, or a hub name such as `meta-llama/Llama-3.1-8B`.

    Nothing is downloaded: huggingface_hub keeps models in HF_HUB_CACHE, else `hub` in HF_HOME, else in the user's
    cache. Raises ValueError for a name whose configuration is not there.
    """
    path, environment = Path(given), os.environ
    if path.is_dir():
        return path / "config.json"
    if path.exists() or path.suffix == ".json" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", given):
        return path
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or Path(home, "hub")
    cache = Path(hub).expanduser()
    model = cache / f"models--{given.replace('/', '--')}"
    reference = model / "refs" / "main"
    current = reference.read_text().strip() if reference.is_file() else "*"
    found = list(model.glob(f"snapshots/{current}/config.json")) or list(model.glob("snapshots/*/config.json"))
    if not found:
        raise ValueError(
            f"no file {given!r}, and no configuration of a model of that name in {cache}; get it with "
            f"hf download {given} config.json (older: huggingface-cli download), or pass the file from "
            f"https://huggingface.co/{given}/blob/main/config.json"
        )
    return max(found, key=lambda each: each.stat().st_mtime)


def _gpt2(values: Mapping[str, Any]) -> Transformer:
    """GPT-2: learned positions, biases everywhere, embedding tied to the output unless it is said not to be."""
    width, layers, heads, vocabulary = _sizes(values, "n_embd", "n_layer", "n_head", "vocab_size")
    positions = _size(values, "n_positions" if "n_positions" in values else "n_ctx")
    inner = _size(values, "n_inner", 4 * width)
    _check_divides(heads, width, "n_head", "n_embd")
    attention, norms = 4 * width * width + 4 * width, 4 * width
    network = 2 * width * inner + inner + width
    tied = values.get("tie_word_embeddings", True)
    outer = (vocabulary + positions) * width + 2 * width + (0 if tied else vocabulary * width)
    return Transformer(
        numel=outer + layers * (attention + network + norms),
        layers=layers,
        width=width,
        query_width=width,
        key_width=width,
        heads=heads,
        inner=inner,
        gated=False,
        vocabulary=vocabulary,
        block_weights=layers * (4 * width * width + 2 * width * inner),
        head_weights=vocabulary * width,
        dropout=any(values.get(key, 0.1) for key in ("resid_pdrop", "attn_pdrop", "embd_pdrop")),
        longest=positions,
        outer=outer,
    )


def _llama(values: Mapping[str, Any]) -> Transformer:
    """Llama: rotary positions, RMSNorm, a gated network, grouped keys; Qwen 2's and Gemma's defaults are known."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    width, inner, layers, heads, vocabulary = _sizes(values, *keys)
    kind = str(values.get("model_type", "llama"))
    key_heads = _size(values, "num_key_value_heads", heads)
    if values.get("head_dim") is None:
        _check_divides(heads, width, "num_attention_heads", "hidden_size")
    head = _size(values, "head_dim", width // heads)
    _check_divides(key_heads, heads, "num_key_value_heads", "num_attention_heads")
    query, key = heads * head, key_heads * head
    biases = query + 2 * key if values.get("attention_bias") or kind == "qwen2" else 0
    biases += width if values.get("attention_bias") else 0
    biases += 2 * inner + width if values.get("mlp_bias") else 0
    matrices = 2 * width * (query + key) + 3 * width * inner
    block = matrices + 2 * width + biases
    tied = values.get("tie_word_embeddings", kind == "gemma")
    outer = (1 if tied else 2) * vocabulary * width + width
    known = kind in ("llama", "mistral", "qwen2", "gemma")
    return Transformer(
        numel=outer + layers * block,
        layers=layers,
        width=width,
        query_width=query,
        key_width=key,
        heads=heads,
        inner=inner,
        gated=True,
        vocabulary=vocabulary,
        block_weights=layers * matrices,
        head_weights=vocabulary * width,
        upcast_norm=True,
        outer=outer,
        assumed="" if known else f"parameters: model_type {kind!r} is counted as if it were Llama",
    )


def _sizes(values: Mapping[str, Any], *keys: str) -> tuple[int, ...]:
    """The values of keys that must be there. Raises ValueError naming those that are not."""
    missing = [key for key in keys if values.get(key) is None]
    if missing:
        raise ValueError(
            f"missing {', '.join(missing)}; expected the config.json of a Llama-like or GPT-2-like model "
            "(or pass --params)"
        )
    return tuple(_size(values, key) for key in keys)


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a whole number of 1 or more, found {value!r}")
    return value


def _check_divides(part: int, whole: int, part_key: str, whole_key: str) -> None:
    if whole % part:
        raise ValueError(f"{part_key} must divide {whole_key}, found {part} and {whole}")
