"""A GPT over bytes or tokens, of any size, and a text as bytes, on which it is trained.

The GPT has pre-norm blocks, causal attention, and an embedding tied to the output.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT; it has about `12 * layers * width**2` parameters.

    3 x 512 is 9.6M, 12 x 768 is 85M, 24 x 2048 is 1.2B, 36 x 4800 is 10B.

    heads: of attention; they divide the width.
    context: the longest sequence, in tokens.
    checkpointing: recompute each block's activations in the backward pass instead of keeping them.

    Raises ValueError for a size below 1 or heads that do not divide the width.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256
    checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, found {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide the width, found {self.heads} heads and width {self.width}")


class GPT(nn.Module):
    """The model, made directly on `device` in `dtype`."""

    def __init__(
        self, config: GPTConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width, device=device, dtype=dtype)
        self.positions = nn.Embedding(config.context, config.width, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(config, device, dtype) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, device=device, dtype=dtype)
        self._initialise()

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy in nats. tokens, targets: int64 (batch, time), time at most the context."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.config.checkpointing else block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.no_grad()
    def _initialise(self) -> None:
        """GPT-2's: deviation 0.02, less where blocks add to the residual stream, biases 0."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                adds = name.endswith(("project.weight", "down.weight"))
                parameter.normal_(std=0.02 / math.sqrt(2 * self.config.layers) if adds else 0.02)
            elif name.endswith("bias"):
                parameter.zero_()


class Block(nn.Module):
    """Attention and a GELU network, each normed before and added to the stream."""

    def __init__(self, config: GPTConfig, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        width = config.width

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, device=device, dtype=dtype)

        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width, device=device, dtype=dtype)
        self.qkv = linear(width, 3 * width)
        self.project = linear(width, width)
        self.norm2 = nn.LayerNorm(width, device=device, dtype=dtype)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Corpus:
    """A text as bytes. Raises ValueError if it is too short for one sequence of `context` bytes and its targets."""

    def __init__(self, text: bytes, context: int, name: str = "the text") -> None:
        if len(text) < context + 1:
            raise ValueError(f"{name} has {len(text)} bytes; a context of {context} needs {context + 1} or more")
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return len(self._bytes)

    def batches(self, count: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """`count` batches of (bytes, the bytes that follow each), int64 (size, context); the same for the same seed."""
        starts = len(self._bytes) - self._context
        drawn = torch.randint(starts, (count, size, 1), generator=torch.Generator().manual_seed(seed))
        text = self._bytes[drawn + torch.arange(self._context + 1)].long()
        return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in text]


def standard_library() -> bytes:
    """The sources of the top-level modules of this Python's standard library, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
