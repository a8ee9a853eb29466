"""A process group whose collectives return at once, as if the other ranks were there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed


@contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """This process is rank 0 of so many; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
