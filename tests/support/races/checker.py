"""Notes accesses by each thread and queue, and what orders them."""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from dos.devices import Job, memory_of, pinned
from dos.torch_internals.tensors import storage_address
from tests.support.races.names import DISK, places_now, text_of
from tests.support.races.shadow import Access, Actor, Clock, Place, Race, Shadow

_SKIPPED = {"aten::" + name for name in ("set_", "resize_", "_unsafe_view", "record_stream", "lift_fresh")}
_EMPTY = ("aten::empty", "aten::new_empty")
_WAITING = {"aten::" + name for name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item")}
"""Operations with a result that the host has."""
_CHECK = "_amp_foreach_non_finite_check_and_unscale_"
OURS = "dos-"
"""Threads of this prefix are queues of ours."""


class Here(threading.local):
    """What this thread does.

    actor: see `Checker.this`. into: what comes behind what the thread waits for. watched: whether its operations are
        told of.
    answered: whether the values that it reads are on the host, on a GPU. sends: what its jobs copy in forward or
        backward. allowed: see `allowed`.
    """

    checker: Checker | None = None
    actor: Actor
    ours = False
    into: Actor | None = None
    job = 0
    what = ""
    places: tuple[Place, ...] = ()
    watched = answered = allowed = False
    sends: list[Tensor] | None = None


here = Here()


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Surround accesses by a test's user code that nothing is meant to order: what comes of them is tested."""
    here.allowed = True
    try:
        yield
    finally:
        here.allowed = False


class Checker:
    """active: the one that watches now. races: what was found, one for each cause.

    misses_order: whether a CUDA device was made, whose order the checker does not know.
    """

    active: Checker | None = None

    def __init__(self, most_named: int) -> None:
        """most_named: of so many races the report says what the bytes are, which takes a tenth of a second each."""
        self._most_named = most_named
        self.misses_order = False
        self.races: dict[tuple[object, ...], str] = {}
        self._unused: dict[int, list[Race]] = {}
        """The races of copies that nothing has used so far, by job."""
        self._sent: dict[int, list[tuple[int, int]]] = {}
        self._again: dict[int, list[tuple[int, int]]] = {}
        """Bytes of which a job's copy is replaced by a later one, by job."""
        self._numbers = itertools.count()
        self.jobs, self.numbers = 0, itertools.count(1)
        self.queue = self._actor("the caller's queue")
        self.shadow = Shadow()
        self._lock = threading.Lock()
        self._within: int | None = None
        self._later: deque[Callable[[], None]] = deque()
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._dead: deque[tuple[int, int]] = deque()
        self._kept: list[tuple[int, int, int, int]] = []
        self._of_executor: weakref.WeakKeyDictionary[Any, Actor] = weakref.WeakKeyDictionary()
        self._issued: dict[int, tuple[int, int]] = {}
        self._files: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._file_numbers = itertools.count()

    def report(self) -> str:
        """All races, as text."""
        return "\n".join([f"{len(self.races)} races:", *self.races.values()])

    def _actor(self, name: str) -> Actor:
        return Actor(next(self._numbers), name)

    @property
    def this(self) -> Actor:
        """This thread, as far as it accesses memory of the host, or waits."""
        if here.checker is not self:
            here.checker, thread = self, threading.current_thread()
            here.actor, here.ours = self._actor(f"thread {thread.name}"), thread.name.startswith(OURS)
            here.job, here.what, here.places = 0, "", ()
        return here.actor

    def of(self, executor: ThreadPoolExecutor) -> Actor:
        """The one thread of an executor."""
        if executor not in self._of_executor:
            self._of_executor[executor] = self._actor(executor._thread_name_prefix)
        return self._of_executor[executor]

    # What orders.

    def receive(self, clock: Clock | None) -> None:
        """This thread, or what it lets come behind it, has waited."""
        if clock is not None:
            this = self.this
            (this if here.into is None else here.into).receive(clock)

    def issue(self) -> Actor:
        """The caller's queue, for work that this thread queues now."""
        this = self.this
        state = this.time, this.changes
        if self._issued.get(this.number) != state:
            self.queue.receive(this.clock)
            self._issued[this.number] = state
        return self.queue

    def fence(self) -> Clock:
        """What the caller has queued so far."""
        self.queue.receive(self.this.send())
        return self.queue.send()

    def wait_for_queue(self) -> None:
        """This thread waits for all that the caller has queued."""
        self.this.receive(self.fence())

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Waits in it order nothing."""
        with self.into(self._actor("nobody")):
            yield

    @contextlib.contextmanager
    def into(self, actor: Actor) -> Iterator[None]:
        """What is waited for comes before this actor's later work, not before this thread's."""
        before, here.into = here.into, actor
        try:
            yield
        finally:
            here.into = before

    # What is accessed.

    def access(self, ranges: Iterable[tuple[int, int, bool]], what: str, actor: Actor, known: Clock) -> None:
        """Bytes from the first to the end, and whether they are written."""
        self._note(list(ranges), what, actor, known, {})

    def _note(
        self,
        ranges: list[tuple[int, int, bool]],
        what: str,
        actor: Actor,
        known: Clock,
        spared: dict[int, int],
        *,
        releases: bool = False,
    ) -> None:
        if not ranges:
            return
        what = f"{here.what} ({what})" if here.what else what
        places, time, job = here.places or places_now(), actor.time, here.job
        known = dict(known) if self._within == threading.get_ident() else known

        def note() -> None:
            for first, end, writes in ranges:
                access = Access(actor, time, what, writes, places, job, spared, releases)
                for race in self.shadow.access(first, end, access, known):
                    self._add(race)

        self._do(note)

    def _add(self, race: Race) -> None:
        for access, other in ((race.before, race.after), (race.after, race.before)):
            job = access.job
            # What such a job writes is memory of ours, whoever uses the copy; so is what another job of ours writes.
            if job in self._unused and not (access.writes or other.job or other.releases):
                self._unused[job].append(race)
                return
            if any(race.first < end and first < race.end for first, end in self._again.get(job, ())):
                return
        if race.key not in self.races:
            self.races[race.key] = text_of(race, named=len(self.races) < self._most_named)

    def use(self, jobs: Sequence[Job], late: Iterable[Tensor]) -> None:
        """A step uses these copies of gradients that left in backward, and copies others again.

        late: what it copies again. A gradient that was written to after it had left has left anew or is among these.
        """
        numbers = sorted(number for job in jobs if (number := _number_of(job)))
        again = [each for each in map(self.range_of, late) if each is not None]
        for number in reversed(numbers):
            self._again[number] = list(again)
            again += self._sent.pop(number, ())
        for number in numbers:
            for race in self._unused.pop(number, ()):
                self._add(race)

    def use_saved(self, job: Job) -> None:
        """Backward uses the copy that this job has made of a saved tensor: no version shows a write since."""
        number = _number_of(job)
        self._sent.pop(number, None)
        for race in self._unused.pop(number, ()):
            self._add(race)

    def _do(self, work: Callable[[], None]) -> None:
        """One thread at a time. A finaliser that runs within has its turn afterwards."""
        if self._within == threading.get_ident():
            self._later.append(work)
            return
        with self._lock:
            self._within, collects = threading.get_ident(), gc.isenabled()
            gc.disable()  # a callback of the collector may wait for a thread that waits for this lock
            try:
                self._forget_dead()
                work()
                while self._later:
                    self._later.popleft()()
            finally:
                self._within = None
                if collects:
                    gc.enable()

    def _forget_dead(self) -> None:
        while self._dead:
            first, end = self._dead.popleft()
            if not on_host(first):
                self.shadow.forget(first, end)

    def range_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """The bytes of a tensor; None without any."""
        storage = memory_of(tensor)
        if storage is None or not tensor.numel() or not storage.nbytes():
            return None
        address, base = storage_address(storage), storage.data_ptr()
        known = self._storages.get(address)
        if known is None or known[1] != base:
            self._register(storage, address, base)
        first = tensor.data_ptr()
        if tensor.is_contiguous():
            return first, first + tensor.numel() * tensor.itemsize
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        return first, first + (last + 1) * tensor.itemsize

    def share(self, tensor: Tensor) -> Tensor:
        """A tensor whose storage has memory of another one, which lasts."""
        storage = tensor.untyped_storage()
        self._register(storage, storage_address(storage), storage.data_ptr(), shared=True)
        return tensor

    def _register(self, storage: Any, address: int, base: int, *, shared: bool = False) -> None:
        end = base + storage.nbytes()

        def died(reference: weakref.ref[Any]) -> None:
            found = self._storages.get(address)
            if found is not None and found[0] is reference:
                del self._storages[address]
            if not shared:
                self._dead.append((base, end))

        self._storages[address] = weakref.ref(storage, died), base

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """An operation of torch in this thread."""
        name, writes, named, is_new, waits = _signature(func)
        if name is None or here.allowed:
            return
        ranges, host, device = [], False, False
        inputs = [*zip(args, writes, strict=False), *((value, named.get(key, False)) for key, value in kwargs.items())]
        if is_new:
            inputs.append((result, True))
        for value, written in inputs:
            for tensor in value if isinstance(value, list | tuple) else (value,):
                found = self.range_of(tensor) if isinstance(tensor, Tensor) else None
                if found is not None:
                    ranges.append((*found, written))
                    if on_host(found[0]):
                        host = True
                    else:
                        device = True
        this = self.this
        if name == _CHECK and float(args[2]) == 1:  # GradScaler looks for inf: each value stays as it is
            ranges = [(first, end, False) for first, end, _ in ranges]
        if here.ours or not device:
            self.access(ranges, name, this, this.clock)
            return
        self.access_in_queue(ranges, name)
        if (host or waits) and not here.answered:  # a copy between host and device that returns when it is done
            self.wait_for_queue()

    def access_in_queue(self, ranges: list[tuple[int, int, bool]], what: str) -> None:
        """Work that this thread queues on the device."""
        queue = self.issue()
        self.access(ranges, what, queue, queue.clock)
        if not self.jobs:  # before the first job there need be no device
            self.wait_for_queue()

    def touch(self, tensors: Iterable[Tensor], what: str, *, writes: bool = True) -> None:
        """This thread reads or writes memory of the host."""
        this = self.this
        found = (self.range_of(tensor) for tensor in tensors)
        self.access([(*each, writes) for each in found if each is not None], what, this, this.clock)

    def allocate(self, buffer: Tensor) -> None:
        """Memory of the device, whose former contents the caller's queue may still use."""
        found = self.range_of(buffer)
        if found is not None:
            self._do(lambda: self.shadow.forget(*found))
            self._note([(*found, True)], "allocation", self.queue, self.queue.clock, {})

    def file_address(self, file: Any) -> int:
        """Where the bytes of a file begin among addresses; never those of one that is gone."""
        if file not in self._files:
            self._files[file] = next(self._file_numbers)
        return DISK + (self._files[file] << 48)

    def keep(self, tensor: Tensor, executor: ThreadPoolExecutor) -> None:
        """Memory that is released only when all jobs so far of this thread have ended."""
        found = self.range_of(tensor)
        if found is not None:
            self._kept.append((*found, self.of(executor).number, self.jobs))

    def release(self, found: tuple[int, int] | None) -> None:
        """Memory of the device that the caller's next work may get."""
        if found is None:
            return
        first, end = found
        spared: dict[int, int] = {}
        for each in [each for each in self._kept if each[0] < end and first < each[1]]:
            spared[each[2]] = each[3]
            self._kept.remove(each)
        this = self.this
        known = dict(this.clock)
        for number, time in self.queue.clock.items():
            known[number] = max(time, known.get(number, 0))
        self._note([(first, end, True)], "release", this, known, spared, releases=True)


def _number_of(job: Job) -> int:
    """0 for a job of another device, or of before."""
    found: int = getattr(getattr(job, "future", None), "_number", 0)
    return found


def _is_mapped(address: int) -> bool:
    place = bisect.bisect_right(pinned._starts, address) - 1
    mapped = pinned._mapped.get(pinned._starts[place]) if place >= 0 else None
    return mapped is not None and address < mapped.end


def on_host(address: int) -> bool:
    """Whether it is host memory of the optimizer: on an emulated device all else counts as the device's."""
    return address >= DISK or _is_mapped(address)


@functools.cache
def _signature(func: Any) -> tuple[str | None, tuple[bool, ...], dict[str, bool], bool, bool]:
    """Its name, None if it accesses no memory; which arguments it writes; whether it returns new ones, and waits."""
    schema = func._schema
    written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
    new = not all(each.alias_info is not None for each in schema.returns)
    skipped = schema.name in _SKIPPED or schema.name.startswith(_EMPTY)
    views = schema.returns and not new and not any(written.values())
    name = None if skipped or views else f"{schema.name.removeprefix('aten::')}"
    return name, tuple(written.values()), written, new, schema.name in _WAITING


class Mode(TorchDispatchMode):
    """Tells of each operation in a thread."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; true would import the compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper has no memory: it is asked, and its operations come here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.name.startswith("aten::_foreach_") and func._schema.name.endswith("_"):
            increment_version(args[0])  # which torch leaves out where a mode is on
        if Checker.active is not None:
            Checker.active.operation(func, args, kwargs, result)
        return result


def other_modes() -> int:
    """How many modes of torch there are but ours, under which versions count all writes."""
    return sum(not isinstance(mode, Mode) for mode in _get_current_dispatch_mode_stack())
