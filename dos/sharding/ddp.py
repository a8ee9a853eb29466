"""DistributedDataParallel: when the gradients of a bucket have been reduced, and when it broadcasts parameters."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

CommHook = Callable[[Any, Any], "torch.futures.Future[Any]"]
"""As `DistributedDataParallel.register_comm_hook` takes it: (state, bucket) -> a future of the reduced bucket."""


class Reduced(Protocol):
    """What is told of buckets."""

    def gradients_reduced(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """These are the parameters' gradients, which DDP puts with them later. On any thread."""


_watchers: weakref.WeakKeyDictionary[DistributedDataParallel, list[weakref.ref[Reduced]]] = weakref.WeakKeyDictionary()


def watch_buckets(model: DistributedDataParallel, watcher: Reduced, hook: CommHook | None, state: Any) -> None:
    """Tell `watcher` of each bucket of `model` that has been reduced.

    hook, state: what reduces it; None: DDP's own all-reduce. DDP takes one hook for good, so that is set here.
    Raises RuntimeError if the model has a hook already.
    """
    known = _watchers.get(model)
    if known is not None and hook is None:  # of another optimizer
        known.append(weakref.ref(watcher))
        return
    watchers = [weakref.ref(watcher)]
    reduce = _all_reduce if hook is None else hook
    try:
        model.register_comm_hook(
            model.process_group if hook is None else state,
            lambda state, bucket: _reduced(reduce(state, bucket), bucket, watchers),
        )
    except RuntimeError as error:
        raise RuntimeError(
            "DistributedDataParallel takes one communication hook, and this model has one already; do not register it, "
            f"but pass it on: optimizer.register_ddp(model, comm_hook, comm_state) ({error})"
        ) from error
    _watchers[model] = watchers


class Waits(Protocol):
    """What is asked to wait."""

    def before_broadcast(self, parameters: Iterable[Tensor]) -> None:
        """Return when these parameters may be read and overwritten."""


_waiting: weakref.WeakSet[Waits] = weakref.WeakSet()


def wait_before_broadcasts(waits: Waits) -> Callable[[], None]:
    """Ask it to wait whenever DDP broadcasts a model: when one is wrapped, and at the end of `join()`.

    It passes no hook of the model then. Returns what ends that.
    """
    _wrap_broadcast()
    _waiting.add(waits)
    return lambda: _waiting.discard(waits)


@functools.cache
def _wrap_broadcast() -> None:
    implementation = torch.nn.parallel.distributed
    broadcast = getattr(implementation, "_sync_module_states", None)
    if broadcast is None:  # torch without torch.distributed
        return

    @functools.wraps(broadcast)
    def waiting(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for waits in list(_waiting):
            waits.before_broadcast(module.parameters())
        return broadcast(module, *args, **kwargs)

    implementation._sync_module_states = waiting


def _all_reduce(group: Any, bucket: Any) -> torch.futures.Future[Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(group, bucket)


def _reduced(
    future: torch.futures.Future[Any], bucket: Any, watchers: Sequence[weakref.ref[Reduced]]
) -> torch.futures.Future[Any]:
    parameters, buffer = bucket.parameters(), bucket.buffer()
    places = [(g.size(), g.stride(), g.storage_offset() - buffer.storage_offset()) for g in bucket.gradients()]

    def done(future: torch.futures.Future[Any]) -> Any:
        value = future.value()
        result = value[0] if isinstance(value, (list, tuple)) else value
        if result.dtype == buffer.dtype and result.numel() == buffer.numel() and result.is_contiguous():
            first = result.storage_offset()
            gradients = [result.as_strided(size, stride, first + offset) for size, stride, offset in places]
            for reference in watchers:
                watcher = reference()
                if watcher is not None:
                    watcher.gradients_reduced(parameters, gradients)
        return value

    return future.then(done)
