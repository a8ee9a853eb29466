"""Callers in several threads: backward in many at once, and a fork in one while another trains."""

from __future__ import annotations

import copy
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from dos import DOSAdam, EmulatedDevice
from tests.support.training import FAST, SLOW, backward, bits, everything, mlp, on

pytestmark = pytest.mark.usefixtures("one_kernel_thread")

THREADS = 4


class Branches(nn.Module):
    """A network for each thread, and an integer-valued shared one, so that the order of sums changes no bit."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(mlp(seed=i) for i in range(THREADS))
        self.shared = nn.Parameter(torch.zeros(50))


def backward_of(model: Branches, step: int, thread: int) -> None:
    for micro_batch in range(3):
        generator = torch.Generator().manual_seed(1000 * step + 10 * thread + micro_batch)
        inputs = torch.randn(8, 24, generator=generator)
        weights = torch.randint(-4, 5, (50,), generator=generator).float()
        loss = model.branches[thread](inputs).square().mean() + (model.shared * weights).sum()
        loss.backward()


def run_all(work: Sequence[Callable[[], None]], threaded: bool) -> None:
    """Do all, each in a thread of its own or one after the other."""
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        if threaded:
            thread.start()
        else:
            thread.run()
    for thread in threads:
        if threaded:
            thread.join()


def train(threaded: bool, **settings: object) -> list[bytes]:
    model = Branches()
    optimizer = DOSAdam(model.parameters(), lr=0.01, subgroup_size=300, **settings)
    for step in range(4):
        optimizer.zero_grad()
        run_all([partial(backward_of, model, step, i) for i in range(THREADS)], threaded)
        optimizer.step()
    return everything(model, optimizer)


@pytest.mark.parametrize("policy", ["cpu", "stride:2", 0.0])
def test_backward_in_several_threads(policy: str | float) -> None:
    expected = train(threaded=False)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            device = EmulatedDevice(FAST, capacity=10**7)
            assert train(threaded=True, policy=policy, device=device) == expected
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("at_once", [True, False])
def test_offloaded_gradients_of_two_threads_are_refused(at_once: bool) -> None:
    """Of one parameter. The step says so, too, for the thread's error may end with the thread."""
    model, refused = Branches(), []
    optimizer = DOSAdam(model.parameters(), offload_gradients=True, device=EmulatedDevice(FAST, capacity=10**7))
    ended = [threading.Event() for _ in range(2)]

    def go(thread: int) -> None:
        if thread and not at_once:
            ended[0].wait()
        try:
            backward_of(model, 0, thread)
        except RuntimeError as error:
            refused.append(str(error))
        ended[thread].set()
        ended[1 - thread].wait()  # so that they are two, and not one after the other under one number

    run_all([partial(go, i) for i in range(2)], threaded=True)
    assert refused
    assert all("backward ran in two threads" in each or "not complete" in each for each in refused)
    before = bits([*model.parameters()])
    with pytest.raises(RuntimeError, match=r"the gradients are not complete; call optimizer\.zero_grad"):
        optimizer.step()
    assert bits([*model.parameters()]) == before
    optimizer.zero_grad()
    backward_of(model, 0, 0)
    optimizer.step()
    assert bits([*model.parameters()]) != before


def test_offloaded_gradients_of_threads_that_share_no_parameter() -> None:
    def train(threaded: bool) -> list[bytes]:
        models = [mlp(seed=i) for i in range(THREADS)]
        parameters = [p for model in models for p in model.parameters()]
        device = EmulatedDevice(FAST, capacity=10**7)
        optimizer = DOSAdam(parameters, subgroup_size=300, offload_gradients=True, device=device)
        for _ in range(3):
            run_all([lambda m=m: m(torch.ones(8, 24)).square().mean().backward() for m in models], threaded)
            optimizer.step()
        return bits(parameters)

    assert train(threaded=True) == train(threaded=False)


@pytest.mark.parametrize(("place", "attached"), [("host", False), ("cpu", True), ("stride:2", False), (0.5, True)])
def test_forks_in_other_threads_change_nothing(place: str | float, attached: bool) -> None:
    """As data loaders started from helper threads fork their workers, two at once. A child can use its optimizer."""

    def run(forks: int) -> list[bytes]:
        model = mlp(torch.bfloat16)
        optimizer = DOSAdam(model.parameters(), lr=0.01, subgroup_size=200, **on(place, machine=SLOW))
        if attached:
            optimizer.attach(model)
        done = threading.Event()
        children: list[int] = []

        def fork() -> None:
            while not done.is_set():
                child = os.fork()
                if child == 0:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the timeout of tests
                    signal.alarm(60)
                    optimizer.zero_grad()
                    os._exit(0)
                children.append(os.waitpid(child, 0)[1])
                time.sleep(5e-3)

        forking = [threading.Thread(target=fork) for _ in range(forks)]
        for thread in forking:
            thread.start()
        try:
            for step in range(10):
                time.sleep(2e-3)
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        finally:
            done.set()
            for thread in forking:
                thread.join()
        assert bool(children) == bool(forks)
        assert not any(children)
        return everything(model, optimizer)

    assert run(forks=2) == run(forks=0)


@pytest.mark.parametrize("policy", ["cpu", "stride:2"])
def test_a_child_forked_with_a_step_in_flight_has_what_the_step_makes_and_trains_on(policy: str) -> None:
    model = mlp()
    device = EmulatedDevice(SLOW, capacity=10**7)
    optimizer = DOSAdam(model.parameters(), lr=0.01, policy=policy, subgroup_size=200, device=device)
    optimizer.attach(model)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(8, 24)).square().mean().backward()
        optimizer.step()

    def digest() -> bytes:
        return hashlib.sha256(
            b"".join(bits([*model.state_dict().values(), *copy.deepcopy(model).parameters()]))
        ).digest()

    for _ in range(3):
        step()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # not that of the timeout of tests
        signal.alarm(60)
        os.write(writes, digest())
        step()
        optimizer.synchronize()
        os.write(writes, digest())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    optimizer.synchronize()
    assert os.read(reads, 32) == digest()
    step()
    optimizer.synchronize()
    assert os.read(reads, 32) == digest()
