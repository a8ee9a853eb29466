"""Which compiled kernels native code may launch in the place of Triton's launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dos.kernels.native import Entry, Launched, entry_of

TYPES = "u64", "u32", "u64"


def compiled(*parameters: str, **metadata: Any) -> Any:
    """As Triton 3.5 returns it from a launch."""
    backend = metadata.pop("backend", "cuda")
    listed = ",\n".join(f"\t.param .{kind} .ptr .global .align 1 kernel_param_{n}" for n, kind in enumerate(parameters))
    known = {"num_ctas": 1, "num_warps": 4, "shared": 32, "launch_pdl": False, "global_scratch_size": 0, **metadata}
    text = f".version 8.7\n.visible .entry kernel(\n{listed}\n)\n.reqntid 128\n{{\n\t.param .b32 inner;\n}}"
    target = SimpleNamespace(backend=backend, warp_size=32)
    return SimpleNamespace(function=77, metadata=SimpleNamespace(target=target, **known), asm={"ptx": text})


@pytest.mark.parametrize("added", [0, 1, 2])
def test_a_plain_kernel_is_launched(added: int) -> None:
    """Versions of Triton add up to two addresses of memory that it does not need."""
    entry = entry_of(compiled(*TYPES, *["u64"] * added), TYPES)
    assert entry == Entry(77, 128, 32)
    assert Launched(entry, 5, (1, 2, 3), ()).kernel()


@pytest.mark.parametrize(
    "found",
    [
        compiled("u64", "u64", "u64"),
        compiled("u64", "u32"),
        compiled(*TYPES, "u32"),
        compiled(*TYPES, "u64", "u64", "u64"),
        compiled(*TYPES, num_ctas=2),
        compiled(*TYPES, "u64", global_scratch_size=64),
        compiled(*TYPES, launch_pdl=True),
        compiled(*TYPES, backend="hip"),
        None,
    ],
    ids=["other type", "too few", "another", "too many", "clusters", "scratch", "dependent", "AMD", "interpreted"],
)
def test_others_are_left_to_triton(found: Any) -> None:
    assert entry_of(found, TYPES) is None
