"""Code of Python that runs, or raises, as a function of ours is called: way x mode x moment, against a quiet run."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import dos
from dos import DOSAdam, EmulatedDevice, signals
from dos.planning.policies import resolve_policy
from dos.step.ledger import Ledger
from dos.step.turns import Turns
from tests.support import blocks
from tests.support.crossings import crossed
from tests.support.races import allowed
from tests.support.training import FAST, bits

pytestmark = pytest.mark.usefixtures("one_core")

CASES = int(os.environ.get("DOS_SIGNALS", "1"))
STEPS = 3
OURS = f"{Path(dos.__file__).parent}/"
WITHIN = "was called within another call of the same optimizer"


class Mode(NamedTuple):
    """How a model of three blocks is trained. settings: of the optimizer. weights: None, not streamed."""

    settings: dict[str, Any]
    attached: bool = False
    weights: Any = None
    disk: bool = False


ON_DEVICE = {"policy": "stride:2", "subgroup_size": 400}
MODES = {
    "host": Mode({}),
    "plain": Mode(ON_DEVICE),
    "attached": Mode(ON_DEVICE, attached=True),
    "int8": Mode({**ON_DEVICE, "state_format": "int8"}, attached=True),
    "offloaded": Mode({**ON_DEVICE, "offload_gradients": True}, attached=True),
    "disk": Mode(ON_DEVICE, disk=True),
    "none stays": Mode({**ON_DEVICE, "offload_gradients": True}, attached=True, weights=0),
    "some stay": Mode({**ON_DEVICE, "offload_gradients": True, "state_format": "float32"}, attached=True, weights=1),
    "all stay": Mode({**ON_DEVICE, "offload_gradients": True}, attached=True, weights=3),
    "auto": Mode(
        {"policy": "adaptive", "subgroup_size": 400, "offload_gradients": True}, attached=True, weights="auto"
    ),
}


class Run:
    def __init__(self, mode: str, folder: Path) -> None:
        settings, attached, weights, disk = MODES[mode]
        self.model = blocks.net(blocks=3, width=blocks.WIDE if disk else 16)
        if settings:
            settings = {**settings, "device": EmulatedDevice(FAST, 10**8)}
        if disk:
            settings = {**settings, "disk": folder, "host_memory": 120_000}
        self.optimizer = DOSAdam(self.model.parameters(), lr=1e-2, **settings)
        if attached:
            self.optimizer.attach(self.model, weights=weights)

    def step(self, step: int) -> None:
        blocks.loss(self.model, step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def saved(self) -> list[bytes]:
        """What a checkpoint has."""
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), file)
        file.seek(0)
        weights, states = torch.load(file)
        return bits([*weights.values(), *(entry[k] for entry in states["state"].values() for k in sorted(entry))])


@functools.cache
def undisturbed(mode: str) -> list[list[bytes]]:
    """What is saved before the first step and after each."""
    with TemporaryDirectory() as folder:
        found = []
        run = Run(mode, Path(folder))
        for step in range(STEPS):
            found.append(run.saved())
            run.step(step)
        return [*found, run.saved()]


@contextlib.contextmanager
def called(at: int, act: Callable[[], object]) -> Iterator[list[str]]:
    """Act as the function of this number of ours is called in this thread; the names of all until then."""
    names: list[str] = []

    def trace(frame: Any, event: str, _: Any) -> None:
        if frame.f_code.co_filename.startswith(OURS):
            names.append(frame.f_code.co_name)
            if len(names) == at:
                sys.settrace(None)
                act()

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield names
    finally:
        sys.settrace(before)


@functools.cache
def calls_of(mode: str) -> int:
    """The number of functions of ours that a step calls, with its forward and backward."""
    with TemporaryDirectory() as folder:
        run = Run(mode, Path(folder))
        run.step(0)
        with called(0, lambda: None) as names:
            run.step(1)
        return len(names)


class StopError(Exception): ...


def saves(run: Run, found: list[Any]) -> None:
    found.append(run.saved())


def reads(run: Run, found: list[Any]) -> None:
    assert all(p.isfinite().all() for _, p in run.model.named_parameters())


def evaluates(run: Run, found: list[Any]) -> None:
    with torch.no_grad():
        assert blocks.loss(run.model, 9).isfinite()


def raises(run: Run, found: list[Any]) -> None:
    raise StopError


def moments(mode: str, way: str) -> list[int]:
    """The numbers of the calls at which something happens, drawn anew for each mode and way."""
    draw = random.Random(f"{mode} {way}")
    return [draw.randint(1, calls_of(mode)) for _ in range(CASES)]


def go_on(run: Run, mode: str) -> None:
    """Train to the end from the last complete step, as after any exception."""
    whole = undisturbed(mode)
    found = run.saved()
    assert found in whole, "torn"
    run.optimizer.zero_grad()
    for step in range(whole.index(found), STEPS):
        run.step(step)


@pytest.mark.parametrize(("mode", "way"), crossed(MODES, [saves, reads, evaluates, raises]))
def test_a_handler_of_a_signal_runs_when_the_call_has_ended(
    mode: str, way: Callable[[Run, list[Any]], None], tmp_path: Path
) -> None:
    for number, at in enumerate(moments(mode, way.__name__)):
        run, found, seen = Run(mode, tmp_path / str(number)), [], []

        def handler(*_: Any) -> None:
            seen.append(1)  # noqa: B023
            way(run, found)  # noqa: B023

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            run.step(0)
            with called(at, lambda: signal.raise_signal(signal.SIGUSR1)) as names:
                run.step(1)
            run.step(2)
        except StopError:
            go_on(run, mode)
        finally:
            restored = signal.signal(signal.SIGUSR1, before)
        assert seen == ([1] if len(names) >= at else []), f"case {at}"  # the number of calls follows the clock
        assert run.saved() == undisturbed(mode)[STEPS], f"case {at}"
        assert all(saved in undisturbed(mode) for saved in found), f"case {at}: what was saved is torn"
        assert restored is handler


@pytest.mark.filterwarnings("ignore:module forward hook with")
@pytest.mark.parametrize("way", [saves, reads, evaluates])
@pytest.mark.parametrize("mode", ["plain", "attached", "offloaded", "disk", "none stays", "some stay"])
def test_a_call_within_another_one_raises_or_finds_all_whole(
    mode: str, way: Callable[[Run, list[Any]], None], tmp_path: Path
) -> None:
    """As of a callback of gc, whose exceptions Python ignores."""
    for number, at in enumerate(moments(mode, f"{way.__name__} within")):
        run, found, errors = Run(mode, tmp_path / str(number)), list[Any](), list[Exception]()

        def act() -> None:
            try:
                with allowed():
                    way(run, found)  # noqa: B023
            except RuntimeError as error:
                errors.append(error)  # noqa: B023

        run.step(0)
        with called(at, act):
            run.step(1)
        run.step(2)
        assert all(WITHIN in str(error) for error in errors), f"case {at}: {errors}"
        assert run.saved() == undisturbed(mode)[STEPS], f"case {at}"
        assert all(saved in undisturbed(mode) for saved in found), f"case {at}: what was saved is torn"


@pytest.mark.filterwarnings("ignore:DOSAdam takes free device memory from no source")
@pytest.mark.parametrize("mode", MODES)
def test_an_exception_of_another_thread_leaves_what_a_failed_change_leaves(mode: str, tmp_path: Path) -> None:
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    for number, at in enumerate(moments(mode, "exception")):
        run = Run(mode, tmp_path / str(number))
        run.step(0)
        raised: Exception | None = None
        try:
            with called(at, lambda: raise_in(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(StopError))):
                run.step(1)
            run.step(2)
        except (StopError, RuntimeError) as error:
            raised = error
        assert isinstance(raised, StopError | None) or isinstance(raised.__cause__, StopError), f"case {at}"
        if raised is not None:
            try:
                go_on(run, mode)
            except RuntimeError as error:
                raised = error
        if "undefined state: step" not in str(raised):
            assert run.saved() == undisturbed(mode)[STEPS], f"case {at}"


def test_each_signal_is_handled_once_in_order_and_one_that_raises_hides_no_other() -> None:
    """Of several that come within a call, in which user code sets another handler, too."""
    seen = list[str]()

    def first(number: int, frame: Any) -> None:
        seen.append(signal.Signals(number).name)
        raise StopError

    def second(number: int, frame: Any) -> None:
        seen.append(signal.Signals(number).name)

    def other(number: int, frame: Any) -> None: ...

    def within() -> int:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD, signal.SIGXCPU):
            signal.raise_signal(number)
        signal.signal(signal.SIGALRM, other)
        assert seen == []
        return 10**6

    handlers = {signal.SIGTERM: first, signal.SIGUSR1: second, signal.SIGCHLD: second, signal.SIGXCPU: second}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, second)
    try:
        model = nn.Linear(3, 3)
        device = EmulatedDevice(FAST, 10**8)
        optimizer = DOSAdam(model.parameters(), device=device, policy=lambda load: (within(), made(load))[1])
        made = resolve_policy("cpu")
        model(torch.ones(1, 3)).sum().backward()
        seen.clear()
        with pytest.raises(StopError):
            optimizer.step()
        found = {number: signal.getsignal(number) for number in before}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == ["SIGTERM", "SIGUSR1", "SIGCHLD", "SIGXCPU"]
    assert found == {**handlers, signal.SIGALRM: other}


def test_a_handler_that_runs_as_a_call_begins_leaves_all_others_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a call of ours, at whose end the program's handlers are put back."""
    setting, seen = signals._signal.signal, list[int]()

    def handler(number: int, frame: Any) -> None:
        seen.append(number)
        signals.hold()
        signals.held.inside = False
        signals.let_go(restore=True)

    def interrupted(number: int, replacement: Any) -> Any:
        before = setting(number, replacement)
        if number == signal.SIGUSR2 and not seen:
            signal.raise_signal(signal.SIGUSR1)
        return before

    numbers = signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        monkeypatch.setattr(signals._signal, "signal", interrupted)
        signals.hold()
        for number in numbers:
            signal.raise_signal(number)
        assert seen == [signal.SIGUSR1]
    finally:
        signals.held.inside = False
        signals.let_go(restore=True)
        for number, each in before.items():
            signal.signal(number, each)
    assert seen == [signal.SIGUSR1, *numbers]


def test_code_that_runs_while_a_device_is_locked_is_refused() -> None:
    """As a callback of gc: a thread of ours for which its call waits would wait for the device."""
    errors = list[str]()

    def read() -> int:
        for optimizer in made:
            try:
                optimizer.synchronize()
            except RuntimeError as error:
                errors.append(str(error))
        return 0

    model, made = nn.Linear(3, 3), list[DOSAdam]()
    optimizer = DOSAdam(model.parameters(), device=EmulatedDevice(FAST, 10**8, occupied=read))
    made.append(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert errors
    assert all(WITHIN in each for each in errors)


@pytest.mark.parametrize("mode", ["attached", "none stays"])
def test_a_call_on_a_thread_of_ours_raises(mode: str, tmp_path: Path) -> None:
    """There gc runs callbacks, too, and the thread that has the lock waits for this one."""
    run, errors = Run(mode, tmp_path), list[str]()
    plain = Turns.check

    def check(turns: Turns) -> None:
        for use in (run.optimizer.state_dict, run.optimizer.synchronize, run.optimizer.zero_grad, run.model.state_dict):
            with pytest.raises(RuntimeError, match=WITHIN):
                use()
            errors.append(threading.current_thread().name)
        plain(turns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turns, "check", check)
        for step in range(STEPS):
            run.step(step)
        run.optimizer.synchronize()
    assert errors
    assert all(name.startswith("dos-cpu") for name in errors)
    assert run.saved() == undisturbed(mode)[STEPS]


def test_a_call_on_a_thread_of_ours_that_starts_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that has started it waits for it, perhaps within a call, and Python does not list it yet."""
    start: Any = threading.Thread._set_tstate_lock  # type: ignore[attr-defined]  # the first that runs on a thread
    ours = list[bool]()

    def starting(thread: threading.Thread) -> None:
        if thread.name.startswith("dos-"):
            ours.append(signals.thread.ours)
        start(thread)

    monkeypatch.setattr(threading.Thread, "_set_tstate_lock", starting)
    run = Run("attached", tmp_path)
    for step in range(STEPS):
        run.step(step)
    run.optimizer.synchronize()
    assert ours
    assert all(ours)


def test_another_thread_that_reads_state_meanwhile_waits(tmp_path: Path) -> None:
    """A change that runs is none that has failed."""
    run, read = Run("plain", tmp_path), list[Tensor]()
    run.step(0)
    parameter = next(run.model.parameters())
    thread = threading.Thread(target=lambda: read.append(run.optimizer.state[parameter]["step"].clone()))
    plain = Ledger.issue

    def issue(ledger: Ledger, *arguments: Any) -> None:
        thread.start()
        thread.join(0.1)
        plain(ledger, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "issue", issue)
        run.step(1)
    thread.join()
    assert read == [torch.tensor(2.0)]
