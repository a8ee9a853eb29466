"""A transformer's size on paper against published models, formulas of papers, and what PyTorch really holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.gpt import GPT, GPTConfig
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.memory import device_footprint
from perfmodel.planner.question import Question
from perfmodel.planner.transformer import Transformer
from tests.support.planner import LLAMA_2_7B
from tests.support.ranks import TORCH_2_6

LLAMA_3_8B = {**LLAMA_2_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
MISTRAL_7B = {**LLAMA_3_8B, "model_type": "mistral", "vocab_size": 32000}
QWEN_2_5_7B = {
    **LLAMA_2_7B,
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
GEMMA_2B = {
    "model_type": "gemma",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 256000,
}
GPT_2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


@pytest.mark.parametrize(
    ("config", "numel"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_3_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN_2_5_7B, 7_615_616_512),
        (GEMMA_2B, 2_506_172_416),
        (GPT_2, 124_439_808),
    ],
    ids=["Llama 2 7B", "Llama 3 8B", "Mistral 7B", "Qwen 2.5 7B", "Gemma 2B", "GPT-2"],
)
def test_parameters_of_published_models(config: dict[str, Any], numel: int) -> None:
    model = Transformer.from_config(config)
    assert model.numel == numel
    assert model.assumed == ""


def test_only_the_number_of_parameters_known() -> None:
    model = Transformer.of_size(7 * 10**9)
    assert model.numel == 7 * 10**9
    assert 12 * model.layers * model.width**2 == pytest.approx(7e9, rel=0.01)
    assert "layers" in model.assumed
    assert (
        "'phi3' is counted as if it were Llama" in Transformer.from_config({**LLAMA_2_7B, "model_type": "phi3"}).assumed
    )


def test_activations_of_a_gpt_block_are_those_of_korthikanti_et_al() -> None:
    """34 sbh without attention's matrices, 34 sbh + 5 as^2 b with them; sbh with checkpointing, in 16-bit values."""
    sequence, batch, heads, width = 1024, 4, 12, 768
    model = Transformer.from_config(GPT_2)
    assert model.block_bytes(sequence, 2) == 34 * width
    assert model.block_bytes(sequence, 2, eager_attention=True) == 34 * width + 5 * heads * sequence
    settings: dict[str, Any] = {"batch": batch, "sequence": sequence, "checkpointing": True}
    kept = device_footprint(Question(model, HardwareProfile.builtin("h100"), 10**12, **settings)).activations
    assert kept == (12 * 2 + 5) * sequence * batch * width


def test_logits_and_their_loss() -> None:
    """In the model's dtype; in float32 log-probabilities, their gradients and those of upcast logits."""
    model, tokens = Transformer.from_config(LLAMA_3_8B), 8192
    assert model.logit_bytes(tokens, 2) == tokens * 128256 * (2 + 3 * 4)
    # Liger-Kernel: inc_factor 32, so chunks of 256 tokens; the whole gradients of input and weights.
    assert model.logit_bytes(tokens, 2, fused=True) == 2 * (256 * 128256 + (tokens + 128256) * 4096)


def test_arithmetic() -> None:
    model = Transformer.of_size(10**9)
    assert sum(model.flops(2048)) == 6e9 * 2048
    assert sum(model.flops(2048, checkpointing=True)) == 8e9 * 2048


class LlamaNorm(nn.Module):
    """As Hugging Face's LlamaRMSNorm computes it."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class LlamaBlock(nn.Module):
    """Grouped keys and a gated network; rotary embeddings, of which autograd keeps nothing, are left out."""

    def __init__(self, width: int, inner: int, heads: int, key_heads: int, dtype: torch.dtype) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        self.heads, self.key_heads = heads, key_heads
        self.norm1, self.norm2 = LlamaNorm(width, dtype), LlamaNorm(width, dtype)
        key = width // heads * key_heads
        self.q, self.k, self.v, self.o = (
            linear(width, width),
            linear(width, key),
            linear(width, key),
            linear(width, width),
        )
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        split = [(self.q(y), self.heads), (self.k(y), self.key_heads), (self.v(y), self.key_heads)]
        q, k, v = (t.unflatten(2, (n, -1)).transpose(1, 2) for t, n in split)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        shape = width, config["intermediate_size"], config["num_attention_heads"], config["num_key_value_heads"]
        self.tokens = nn.Embedding(vocabulary, width, dtype=dtype)
        self.blocks = nn.Sequential(*(LlamaBlock(*shape, dtype) for _ in range(config["num_hidden_layers"])))
        self.norm = LlamaNorm(width, dtype)
        self.output = nn.Linear(width, vocabulary, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.output(self.norm(self.blocks(self.tokens(tokens))))
        self.logits = logits  # which the output object of Transformers' models keeps
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


SMALL_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 600,
}


LATER = pytest.mark.skipif(TORCH_2_6, reason="torch 2.6 counts more memory for a Llama on CPUs")


@LATER
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_memory_of_a_loss_of_transformers_is_what_pytorch_counts(dtype: str) -> None:
    """Of its own Llama, with a vocabulary that takes most of the memory; all but weights to 1%."""
    transformers = pytest.importorskip("transformers")
    tracker_module = pytest.importorskip("torch.distributed._tools.mem_tracker")
    config = {**SMALL_LLAMA, "vocab_size": 4000}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, attn_implementation="sdpa"))
    model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    tokens = torch.randint(0, 4000, (4, 128), generator=torch.Generator().manual_seed(0))
    tracker = tracker_module.MemTracker()
    tracker.track_external(model)
    with tracker:
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    profile = HardwareProfile.builtin("h100")
    settings: dict[str, Any] = {"dtype": dtype, "batch": 4, "sequence": 128, "reserved": 0}
    found = device_footprint(Question(Transformer.from_config(config), profile, 10**12, **settings))
    assert found.logits > 0.5 * (peak - found.weights)
    assert found.peak - found.weights == pytest.approx(peak - found.weights, rel=0.01)


def small_gpt(layers: int, checkpointing: bool) -> tuple[GPTConfig, dict[str, Any]]:
    """A GPT without dropout, for torch and as a configuration."""
    shape = GPTConfig(layers, width=128, heads=2, context=128, vocabulary=500, checkpointing=checkpointing)
    config = {"n_embd": 128, "n_layer": layers, "n_head": 2, "vocab_size": 500, "n_positions": 128}
    return shape, {**config, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}


@pytest.mark.parametrize(
    ("kind", "dtype", "batch"),
    [
        ("gpt", "bf16", 8),
        ("checkpointed gpt", "bf16", 1),
        pytest.param("llama", "bf16", 8, marks=LATER),
        pytest.param("llama", "fp32", 1, marks=LATER),
    ],
)
def test_peak_of_forward_and_backward_is_what_pytorch_counts(kind: str, dtype: str, batch: int) -> None:
    """Peak memory of a real forward and backward, counted by PyTorch; all but weights to 10%."""
    tracker_module = pytest.importorskip("torch.distributed._tools.mem_tracker")
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    checkpointing = kind == "checkpointed gpt"
    if kind == "llama":
        config, sequence = SMALL_LLAMA, 128
        model: nn.Module = Llama(SMALL_LLAMA, torch_dtype)
    else:
        shape, config = small_gpt(layers=6 if checkpointing else 3, checkpointing=checkpointing)
        sequence, model = shape.context, GPT(shape, dtype=torch_dtype)
    paper = Transformer.from_config(config)
    assert paper.numel == sum(p.numel() for p in model.parameters())
    tokens = torch.randint(0, 500, (batch, sequence), generator=torch.Generator().manual_seed(0))
    tracker = tracker_module.MemTracker()
    tracker.track_external(model)
    with tracker:
        model(tokens, tokens).backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    question = Question(
        paper,
        HardwareProfile.builtin("h100"),
        device_bytes=10**12,
        dtype=dtype,
        batch=batch,
        sequence=sequence,
        checkpointing=checkpointing,
        reserved=0,
    )
    found = device_footprint(question)
    assert found.peak - found.weights == pytest.approx(peak - found.weights, rel=0.10)
