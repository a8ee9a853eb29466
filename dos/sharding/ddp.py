"""DistributedDataParallel: hooks for reduced buckets of gradients, and for broadcasts of parameters."""

from __future__ import annotations

import collections
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dos.torch_internals.live_objects import objects_of
from dos.torch_internals.module_parameters import parameters_of
from dos.torch_internals.patches import call_before_broadcasts, call_when_built

CommHook = Callable[[Any, Any], "torch.futures.Future[Any]"]
"""The hook of `DistributedDataParallel.register_comm_hook`: (state, bucket) -> a future of the reduced bucket."""


def several_ranks() -> bool:
    """Return whether there are other ranks, with which user code may reduce gradients after our hooks.

    No version counts what collectives write. A single rank's are copies of what it has.
    """
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


reduced: frozenset[int] = frozenset()
"""The ids of the parameters of all models in DistributedDataParallel that exist.

It writes to their gradients after our hooks, in its buckets; with one rank, too, where `grad` was set to None.
Replaced as a whole, because any thread may read it, and may collect a model: read it as `ddp.reduced`.
"""
_parameters_of: dict[int, frozenset[int]] = {}
"""The ids of each model's parameters, which its reducer keeps alive, by a number of the model."""
_numbers = itertools.count()


def _follow(model: torch.nn.Module) -> None:
    number = next(_numbers)
    weakref.finalize(model, _forget, number).atexit = False
    _parameters_of[number] = frozenset(map(id, parameters_of(model)))
    _unite()


def _forget(number: int) -> None:
    _parameters_of.pop(number, None)
    _unite()


def _unite() -> None:
    global reduced
    reduced = frozenset().union(*_parameters_of.values())


call_when_built(DistributedDataParallel, _follow)
if torch.distributed.is_available() and torch.distributed.is_initialized():
    collections.deque(map(_follow, objects_of(DistributedDataParallel)), 0)  # built before this was imported

_watchers: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""The watchers of each model's buckets; weak, because DDP keeps its hook, which must keep no optimizer alive."""


def watch_buckets(model: DistributedDataParallel, watcher: Any, hook: CommHook | None, state: Any) -> None:
    """Call `watcher.gradients_reduced(parameters, gradients)` for each bucket of `model` that has been reduced.

    DDP sets these gradients as `grad` later. The call may come on any thread.
    hook, state: reduce the bucket; None: DDP's own all-reduce. DDP takes only one hook, which is set here.
    Raises RuntimeError if the model has a hook already.
    """
    known = _watchers.get(model)
    if known is not None and hook is None:  # another optimizer has set our hook
        known.add(watcher)
        return
    watchers = weakref.WeakSet([watcher])
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


_waiting: weakref.WeakSet[Any] = weakref.WeakSet()
"""The objects that wait before broadcasts of any model, because torch's function is replaced once for all."""


def wait_before_broadcasts(waits: Any) -> None:
    """Call `waits.finish(parameters)` before DDP broadcasts a model: when built, and at the end of `join()`.

    No hook of the model runs then. It lasts until `waits` is collected.
    """
    _watch_broadcasts()
    _waiting.add(waits)


@functools.cache
def _watch_broadcasts() -> None:
    call_before_broadcasts(_finish)


def _finish(model: torch.nn.Module) -> None:
    for waits in list(_waiting):
        waits.finish(parameters_of(model))


def _all_reduce(group: Any, bucket: Any) -> torch.futures.Future[Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(group, bucket)


def _reduced(future: torch.futures.Future[Any], bucket: Any, watchers: Iterable[Any]) -> torch.futures.Future[Any]:
    parameters, buffer = bucket.parameters(), bucket.buffer()
    places = [(g.size(), g.stride(), g.storage_offset() - buffer.storage_offset()) for g in bucket.gradients()]

    def done(future: torch.futures.Future[Any]) -> Any:
        value = future.value()
        result = value[0] if isinstance(value, (list, tuple)) else value
        if result.dtype == buffer.dtype and result.numel() == buffer.numel() and result.is_contiguous():
            first = result.storage_offset()
            gradients = [result.as_strided(size, stride, first + offset) for size, stride, offset in places]
            # Over a copy: this runs on any thread, while another thread may collect an optimizer.
            for watcher in list(watchers):
                watcher.gradients.gradients_reduced(parameters, gradients)
        return value

    return future.then(done)
