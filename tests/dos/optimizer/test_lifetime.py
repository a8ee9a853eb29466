"""An optimizer to which no reference is left goes at once, without the garbage collector: memory, threads, hooks."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dos import DOSAdam, EmulatedDevice
from dos.machine import host_memory
from dos.state.arena import Arena
from perfmodel import Plan
from tests.support.clock import eventually
from tests.support.disk import files
from tests.support.processes import python
from tests.support.training import FAST, mlp, on, train

pytestmark = pytest.mark.usefixtures("one_kernel_thread")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What is freed is freed because nothing refers to it."""
    model = mlp()
    train(model, DOSAdam(model.parameters()), 1)  # what torch imports at the first use holds on to the frames it is in
    del model
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def state_memory() -> list[weakref.ref[Tensor]]:
    """All arenas there are."""
    return [weakref.ref(o) for o in gc.get_objects() if type(o) is Arena]


@pytest.mark.parametrize("place", ["host", "cpu", "stride:2", 0.0, "adaptive"])
@pytest.mark.parametrize(("offload", "attached"), [(False, True), (True, False)])
def test_state_and_threads_go_with_the_optimizer(place: str | float, offload: bool, attached: bool) -> None:
    """And the device, with its threads."""
    others = state_memory()  # of optimizers that other tests have left
    settings = on(place, 10**7)
    device = settings.get("device")
    model = mlp(torch.bfloat16)
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    before = threading.active_count()
    optimizer = DOSAdam(model.parameters(), subgroup_size=300, offload_gradients=offload, **settings)
    if attached:
        optimizer.attach(model)
    train(model, optimizer, 3)
    optimizer.state_dict()
    optimizer.explain()
    train(model, optimizer, 2)
    memory = [weakref.ref(t) for entry in optimizer.state.values() for t in entry.values()]
    arenas = [reference for reference in state_memory() if reference not in others]
    assert arenas
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    assert all(reference() is None for reference in (*memory, *arenas))
    assert [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()] == hooks
    if device is not None:
        assert device.usage().held == 0
        gone = weakref.ref(device)
    del device, settings
    assert eventually(lambda: gone() is None)  # a thread of its own may be at its last line
    assert eventually(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("offload", [False, True])
def test_plans_and_steps_leave_nothing_to_the_collector(offload: bool) -> None:
    """A thousand objects an iteration would let it run often, each time for a tenth of a second."""
    free, plans = [4000], set[Plan | None]()
    model = mlp(torch.bfloat16)
    settings = on("adaptive", 10**7, memory_budget=lambda: free[0], offload_gradients=offload)
    optimizer = DOSAdam(model.parameters(), subgroup_size=50, **settings)
    train(model, optimizer, 3)
    gc.collect()
    for free[0] in (3000, 2000, 1000):
        train(model, optimizer, 1)
        plans.add(optimizer.plan())
    assert len(plans) == 3
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = [type(each).__name__ for each in gc.garbage if type(each).__module__.startswith(("dos.", "perfmodel."))]
    gc.garbage.clear()
    assert not found


def test_a_step_in_flight_ends_before_its_optimizer_goes() -> None:
    model, twin = mlp(), mlp()
    optimizer = DOSAdam(model.parameters(), policy="cpu", device=EmulatedDevice(FAST, capacity=10**7))
    optimizer.attach(model)
    train(model, optimizer, 2)
    del optimizer
    train(twin, DOSAdam(twin.parameters()), 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_memory_is_collected_before_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    garbage = weakref.ref(Cycle())
    assert garbage() is not None
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 100 if garbage() is not None else 1000)
    host_memory.check_host_memory(500)
    assert garbage() is None
    with pytest.raises(MemoryError):
        host_memory.check_host_memory(5000)


AT_EXIT = """
import atexit, sys
from pathlib import Path
from tests.support.disk import bytes_on_disk, dos_adam, wide
from tests.support.training import everything, train
twin, folder = wide(), Path(sys.argv[1])
other = dos_adam(twin.parameters(), None)
train(twin, other, 2)
expected = everything(twin, other)
for policy in ("cpu", "stride:2", 0.5, "adaptive"):
    for disk in (None, folder):
        model = wide()
        optimizer = dos_adam(model.parameters(), disk, policy=policy)
        optimizer.attach(model)
        atexit.register(lambda model=model, optimizer=optimizer: print(everything(model, optimizer) == expected))
        train(model, optimizer, 2)
print(bytes_on_disk(folder) > 0)
"""


@pytest.mark.slow
def test_state_can_be_saved_when_the_interpreter_ends_and_files_go(tmp_path: Path) -> None:
    assert python("-c", AT_EXIT, tmp_path) == 9 * "True\n"
    assert not files(tmp_path)
