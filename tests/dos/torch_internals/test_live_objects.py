"""What dos/torch_internals/live_objects.py assumes of torch, and why no public interface serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dos.torch_internals.live_objects import parameters_of_all_modules
from tests.support.ranks import on_pair
from tests.support.sharded import mesh_of, model, shard

CHANGED = "torch has changed what dos/torch_internals/live_objects.py relies on"


def test_parameters_of_modules_are_found_wherever_these_are() -> None:
    linear, begun = nn.Linear(2, 2), nn.Linear.__new__(nn.Linear)  # of the other the constructor has not run
    alone = nn.Parameter(torch.ones(2))
    found = {id(p) for p in parameters_of_all_modules()}
    assert found.issuperset(map(id, linear.parameters())), CHANGED
    assert id(alone) not in found
    assert "_parameters" not in vars(begun), CHANGED


@on_pair
def test_no_hook_tells_that_fully_shard_replaces_parameters() -> None:
    whole, told = model(), []
    before = {id(p) for p in whole.parameters()}
    with_hook = register_module_parameter_registration_hook(lambda *args: told.append(args))
    try:
        divided = shard(whole, mesh_of())
    finally:
        with_hook.remove()
    assert before.isdisjoint(map(id, divided.parameters())), CHANGED
    assert told == [], "a hook on registration can take the place of live_objects.py"


def test_tuples_that_other_threads_make_meanwhile_do_not_fail() -> None:
    """CPython refuses to shorten a tuple under way to which anything else refers, as a list of all objects does."""

    def slowly() -> Iterator[int]:
        for number in range(5):
            time.sleep(1e-4)
            yield number

    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            parameters_of_all_modules()

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        try:
            for _ in range(3):
                assert tuple(slowly()) == tuple(range(5))
        finally:
            ended.set()
        looking.result()
