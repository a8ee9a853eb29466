"""A transformer's size on paper against published models, formulas of papers, and memory that PyTorch holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from experiments.gpt import GPT, GPTConfig
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.memory import DeviceBytes, device_footprint
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


SMALL_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 600,
}


TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def peaks(
    model: nn.Module, config: dict[str, Any], step: Callable[[], None], **settings: Any
) -> tuple[int, DeviceBytes]:
    """The most memory at once in forward and backward as PyTorch counts it, and as it is on paper."""
    tracker_module = pytest.importorskip("torch.distributed._tools.mem_tracker")
    paper = Transformer.from_config(config)
    assert paper.numel == sum(p.numel() for p in model.parameters())
    tracker = tracker_module.MemTracker()
    tracker.track_external(model)
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    asked = Question(paper, HardwareProfile.builtin("h100"), 10**12, reserved=0, **settings)
    return peak, device_footprint(asked)


def test_operations_of_llama_3_8b() -> None:
    """By hand: queries, outputs, keys and values, three matrices of the network, the output layer."""
    model, tokens = Transformer.from_config(LLAMA_3_8B), 32 * 1024
    blocks, head = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336), 128256 * 4096
    forward, backward = model.flops(tokens, 1024, checkpointing=True)
    seen = 4 * 32 * 4096 * 1025 / 2  # of the products of attention: half of the positions and a token itself
    assert forward == tokens * (2 * (blocks + head) + seen)
    assert backward == tokens * (4 * (blocks + head) + 2.5 * seen + 2 * blocks + seen)
    frozen = model.flops(tokens, 1024, trainable=0.0)
    assert frozen == (forward, tokens * (2 * (blocks + head) + 2.5 * seen))
    long = sum(model.flops(1, 22_000)) / sum(model.flops(1, 1))
    assert long == pytest.approx(1.44, abs=0.01), "of 22,000 tokens attention takes nearly a third"


def test_operations_where_only_the_number_of_parameters_is_known() -> None:
    """6 per parameter and token, 8 with checkpointing (Kaplan et al. 2020, Narayanan et al. 2021), and attention."""
    model = Transformer.of_size(10**9)
    attention, back = model.attention_flops(2048)
    assert sum(model.flops(2048, 2048)) == (6e9 + attention + back) * 2048
    assert sum(model.flops(2048, 2048, checkpointing=True)) == (8e9 + 2 * attention + back) * 2048


@pytest.mark.parametrize(("reentrant", "tied"), [(None, False), (None, True), (True, False), (False, False)])
def test_operations_are_those_that_pytorch_counts(reentrant: bool | None, tied: bool) -> None:
    """Of Transformers' Llama. Without reentrance the last product of a block is not repeated."""
    transformers = pytest.importorskip("transformers")
    values = {**SMALL_LLAMA, "tie_word_embeddings": tied}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, attn_implementation="eager")).train()
    tokens = torch.zeros(4, 128, dtype=torch.long)
    if reentrant is not None:
        name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": reentrant})
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        forward = counter.get_total_flops()
        loss.backward()
    settings = {"checkpointing": reentrant is not None, "eager_attention": True}
    expected, backward = Transformer.from_config(values).flops(4 * 128, 128, **settings)
    last = 2 * 3 * 128 * 352 * 4 * 128 if reentrant is False else 0
    angles = (
        2 * (128 // 4 // 2) * 128
    )  # a matrix product of frequencies and positions in Transformers 5.17, not in 5.24
    multiplied = "inv_freq_expanded" in inspect.getsource(type(model.model.rotary_emb).forward)
    assert (forward, counter.get_total_flops() - forward) == (expected + multiplied * angles, backward - last)


@pytest.mark.skipif(TORCH_2_6, reason="torch 2.6 counts more memory for a Llama on CPUs")
@pytest.mark.parametrize(
    ("dtype", "batch", "vocabulary", "tolerance"),
    [("bf16", 8, 600, 0.10), ("fp32", 1, 600, 0.10), ("bf16", 4, 4000, 0.01)],
)
def test_peak_of_transformers_llama_is_the_one_that_pytorch_counts(
    dtype: str, batch: int, vocabulary: int, tolerance: float
) -> None:
    """All but weights; closer where the vocabulary takes most of the memory, as logits and their loss then do."""
    transformers = pytest.importorskip("transformers")
    config = {**SMALL_LLAMA, "vocab_size": vocabulary}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, attn_implementation="sdpa"))
    model.to(TYPES[dtype])
    tokens = torch.randint(0, vocabulary, (batch, 128), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        output = model(input_ids=tokens, labels=tokens)  # which keeps the logits
        output.loss.backward()

    peak, found = peaks(model, config, step, dtype=dtype, batch=batch, sequence=128)
    assert vocabulary < 4000 or found.logits > 0.5 * (peak - found.weights)
    assert found.peak_bytes() - found.weights == pytest.approx(peak - found.weights, rel=tolerance)


@pytest.mark.parametrize(("layers", "checkpointing", "batch"), [(3, False, 8), (6, True, 1)])
def test_peak_of_a_gpt_is_the_one_that_pytorch_counts(layers: int, checkpointing: bool, batch: int) -> None:
    """All but weights to 10%."""
    shape = GPTConfig(layers, width=128, heads=2, context=128, vocabulary=500, checkpointing=checkpointing)
    config = {"n_embd": 128, "n_layer": layers, "n_head": 2, "vocab_size": 500, "n_positions": 128}
    without_dropout = {**config, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT(shape, dtype=torch.bfloat16)
    tokens = torch.randint(0, 500, (batch, 128), generator=torch.Generator().manual_seed(0))
    settings = {"batch": batch, "sequence": 128, "checkpointing": checkpointing}
    peak, found = peaks(model, without_dropout, lambda: model(tokens, tokens).backward(), **settings)
    assert found.peak_bytes() - found.weights == pytest.approx(peak - found.weights, rel=0.10)
