"""The host memory that weights at home and gradients take, which `host_memory` has to allow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from dos.parameters.registry import Registry
from dos.state.arena import aligned
from dos.state.windows import window_bytes


def check_host_room(registry: Registry, trained: Iterable[Tensor], at_home: Sequence[Tensor], *, moves: bool) -> None:
    """Raise MemoryError if `host_memory` is too little for these, before the first backward or step would.

    trained: all parameters of the optimizer that require gradients. at_home: parameters whose weights are to be on the
    host; those that are trained are enrolled. moves: whether plans may move them to the device, and home again.
    """
    store = registry.host_store
    store.lower_share()
    if store.limit is None:
        return
    streams = {s.arena for s in registry.subgroups_of(at_home)}
    weights = sum(arena.weights_at_home().tensor.nbytes for arena in streams)
    weights += sum(aligned(p.nbytes) for p in at_home if registry.record(p) is None)
    gradients = sum(arena.incoming.tensor.nbytes for arena in {s.arena for s in registry.accelerated})
    gradients += sum(p.nbytes for p in trained if registry.record(p) is None)
    windows = 0
    if registry.homes.disk is not None and gradients + sum(load.host_bytes for load in registry.loads()) > store.limit:
        each = (window_bytes([s], streams=s.arena in streams and not moves) for s in registry.accelerated)
        windows = 2 * max(each, default=0)
    least = weights + gradients + windows
    if least > store.limit:
        through = f", and windows through which state on disk passes {windows}" if windows else ""
        raise MemoryError(
            f"weights that stream take {weights} bytes of host memory, gradients {gradients}{through}, found "
            f"host_memory={store.limit}; build the optimizer with host_memory={least} or more, or let more blocks stay "
            "on the device"
        )
