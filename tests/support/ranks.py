"""Processes with a gloo rank each, started once for all tests that need them."""

from __future__ import annotations

import faulthandler
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch

TIMEOUT_S = 120.0
PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "dos"]
"""Imported once for all ranks, because that takes seconds."""

DIED = "died"
"""What `run` has of a rank that ends without an answer."""


class Ranks:
    """Processes of one gloo group; started when first used, and again after `stop`."""

    started: ClassVar[WeakSet[Ranks]] = WeakSet()

    def __init__(self, world: int) -> None:
        self._world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `work`, a function of a module, on each rank, and return what each gave, in order.

        Raises AssertionError with a rank's traceback if one raised, or did not answer in time.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((work, args))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        answers: dict[int, Any] = {}
        while len(answers) < self._world:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            failed = next((f"rank {rank}: no answer in {TIMEOUT_S} s" for rank in waiting.values()), "")
            for pipe in ready:
                try:
                    good, answer = pipe.recv()
                except EOFError:
                    good, answer = True, DIED
                answers[waiting[pipe]] = answer
                failed = "" if good else f"rank {waiting[pipe]}:\n{answer}"
            if failed:
                self.stop()  # others may wait for it
                raise AssertionError(failed)
        return [answers[rank] for rank in range(self._world)]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        folder = tempfile.mkdtemp(prefix="ranks")
        for rank in range(self._world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._world, f"{folder}/store", theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        self.started.add(self)

    def stop(self) -> None:
        """End them; the next `run` starts others."""
        self.started.discard(self)
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    import torch.distributed as dist

    faulthandler.enable()  # a crash says where
    gc.freeze()  # as in tests/conftest.py
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    while True:
        work, args = pickle.loads(pipe.recv_bytes())
        try:
            pipe.send((True, getattr(work, "on_rank", work)(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def on_pair(work: Callable[..., None]) -> Callable[..., None]:
    """A test that each of two ranks runs."""
    return _test(work, "pair")


def on_ranks(work: Callable[..., None]) -> Callable[..., None]:
    """A test that each of four ranks runs."""
    return _test(work, "ranks")


def _test(work: Callable[..., None], fixture: str) -> Callable[..., None]:
    arguments = inspect.signature(work)

    @functools.wraps(work)
    def test(**given: Any) -> None:
        given[fixture].run(test, *(given[name] for name in arguments.parameters))

    asked = [inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY), *arguments.parameters.values()]
    asked = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in asked]
    test.__signature__ = arguments.replace(parameters=asked)
    test.on_rank = work
    return test


TORCH_2_6 = torch.__version__.startswith("2.6.")
needs_fsdp2 = pytest.mark.skipif(TORCH_2_6, reason="FSDP2 of torch 2.6 does not run on CPUs")
