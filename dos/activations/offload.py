"""Decides which tensors leave that autograd saves, and when they come back: hooks around a forward."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dos.activations.pool import HostPool
from dos.activations.saved import MOST, Kept, Node, Packed, Range, Saved, SavedByForward, Travelling
from dos.devices import Device, Job, Mark, memory_of
from dos.guard import exclusive
from dos.machine.host_memory import available_bytes
from dos.machine.process import local_ranks
from dos.planning.forecast import Room
from dos.sharding.local import is_sharded, local
from dos.torch_internals.modes import next_node
from dos.torch_internals.tensors import base_of, storage_address, unwrapped
from perfmodel import Plan
from perfmodel.workload import SavedTensors, peak_room

Amount = float | int | Literal["auto"]
"""The part of all saved tensors that moves: a share (a float), bytes, or as the plan says."""

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: a transfer would take longer to issue than to run."""
_SCALE = 16
"""On an emulated device as small a share of its memory as that is of 64 GiB: so many bits."""
_AT_ONCE = 2
"""Tensors that may be on their way to the host, or back ahead of their use, at least at a time."""
MOST_STALLS = 1000
"""Waits and transfers that are remembered if no optimizer's step asks for them."""
REMEMBERED = 16
"""Forwards of which the largest counts."""


class StreamedWeights(Protocol):
    """Weights that are on the device only while a block computes."""

    def all_copies(self) -> Sequence[Tensor]:
        """The device's copies, with or without memory."""

    def on_saving(self, tensor: Tensor) -> None:
        """Called when autograd saves a tensor. Raises RuntimeError if it would keep streamed weights on the device."""

    def before_use(self, tensor: Tensor) -> None:
        """Called before backward reads a saved tensor that stays, which may be of these weights."""


class ActivationOffload:
    """The saved tensors of one optimizer's models.

    lock: the optimizer's. pool: their memory on the host.
    state_to_come: gives the bytes of the host's memory that state will take yet.
    sample: looks at the device's memory, when most is saved. runs_short: whether little of it is free; None where no
        plan moves saved tensors. give_way: takes all state off the device, for so many bytes that come back.
    in_use: whether anything was asked to leave.
    share: of what a forward saves, that leaves where the plan decides.
    last_offloaded: of the last, and of all that may, bytes.
    """

    weights: StreamedWeights | None = None
    sample: weakref.WeakMethod[Callable[..., None]]
    runs_short: weakref.WeakMethod[Callable[[], bool]] | None = None
    give_way: weakref.WeakMethod[Callable[[int], None]]

    def __init__(self, device: Device, lock: Any, state_to_come: Callable[[], int]) -> None:
        self.device = device
        self.pool = HostPool(device)
        self.in_use = self._follows_plan = False
        self.share = 0.0
        self.last_offloaded: tuple[int, int] | None = None
        self._lock = lock
        self._state_to_come = state_to_come
        self._of_thread = threading.local()
        self._last: Sequence[int] = ()
        """The sizes of what the last forward saved, in order."""
        self._recent: weakref.WeakSet[SavedByForward] = weakref.WeakSet()
        """Of the forwards whose share the plan decides."""
        self._timed: SavedByForward | None = None
        """The last forward whose times are asked for; not the very first, which is slow."""
        self._groups: tuple[SavedTensors, ...] = ()
        self._told = False
        self._stalls: deque[tuple[Mark, Mark]] = deque(maxlen=MOST_STALLS)
        self._given, self._moves = deque[Job](), deque[Job](maxlen=MOST_STALLS)
        self._totals: deque[int] = deque(maxlen=REMEMBERED)
        self._planned = 0.0
        self._restored: Job | None = None
        """The last transfer to the device, after which all blocks that were given back are free."""
        self._denied: weakref.WeakSet[Saved] = weakref.WeakSet()
        """For which there was no room on the host."""
        self._travelling = Travelling()
        self._wanted = 0
        """The most bytes on the host that there would have been at a time, if the pool had been as large."""
        total = device.memory().total
        self.least_bytes = LEAST_BYTES if device.known_profile is None else min(LEAST_BYTES, total >> _SCALE)

    def prepare(self, amount: Amount) -> None:
        """Make room on the host before the first forward, of which nothing is known.

        What is given as bytes is what there can be; of a share, the same share of the device's memory.
        """
        self.in_use, self._follows_plan = True, self._follows_plan or amount == "auto"
        if not self.pool.nbytes and amount != "auto":
            guess = int(amount * self.device.memory().total) if isinstance(amount, float) else amount
            self.pool.resize(min(guess, self._left_on_host() // 2))

    def follow_plan(self, plan: Plan | None) -> None:
        """Follow the plan, and size the room on the host; called between iterations.

        Pinning takes long, and must not hold up ranks.
        """
        self._travelling.let_go_of_lost(self.device)
        if self._timed is not None and not self._groups:
            self._groups = self._timed.groups()
        if plan is not None and self._told:
            planned = min(1.0, plan.activation_bytes / self._total)
            # Where it falls, state that has to make room leaves first: in this step.
            self.share, self._planned = max(planned, self._planned), planned
        self._wanted = max(self._wanted, int(self.share * self._total))
        wanted = self._wanted + self._wanted // 8
        if self._last and not self._wanted <= self.pool.nbytes <= 2 * wanted:
            size = min(wanted, self._left_on_host() + self.pool.nbytes)
            if not self.pool.nbytes <= size <= self.pool.nbytes + self.pool.nbytes // 8:
                if self._restored is not None:
                    # The device is done with the present memory then, which can go before there is other.
                    self._restored.wait()
                    self._restored = None
                    for jobs in (self._given, self._moves):  # which have it, too
                        jobs.clear()
                self.pool.resize(size)

    def ran_out(self) -> None:
        """The user's own code ran out of the device's memory: all that can leave does, until the next plan is made."""
        if self._follows_plan:
            self.share = self._planned = 1.0
            self.follow_plan(None)

    def away(self) -> int:
        """Bytes that are not on the device as the plan has said."""
        return sum(forward.away_bytes for forward in list(self._recent))

    @property
    def leaving(self) -> int:
        """Bytes that have left in this forward, or are to, where the plan decides."""
        return int(self.share * self._total) + 1  # as the share was rounded

    def recorded(self, room: Room, ran_out_again: bool) -> dict[str, Any]:
        """The fields of a workload about saved tensors, where the plan decides how much of them moves.

        room: of the device, for state. ran_out_again: whether the user's code ran out of memory, and again at once.
        """
        if not self._groups:
            return {}
        self._told = True
        total = self._total
        scaled = sum(group.nbytes for group in self._groups)
        groups = tuple(group._replace(nbytes=group.nbytes * total // scaled) for group in self._groups)
        step = -(-total // MOST)  # so that noise changes no plan
        short = total if ran_out_again else -(-room.short // step) * step
        least = next((n for n in accumulate(g.nbytes for g in groups) if peak_room(groups, n) >= short), total)
        least = least if short else 0
        # More makes no room: when backward ends there are all gradients beside state, and what is coming back.
        useful = least + max(0, room.more - (total - peak_room(groups, total)))
        most = min((self._left_on_host() + self.pool.nbytes) * 8 // 9, useful)
        return {
            "activations": groups,
            "activation_host_bytes": math.inf if most >= total else most // step * step,
            "activation_least_bytes": least,
        }

    @property
    def _total(self) -> int:
        """Bytes that a forward saves at most."""
        return max(self._totals, default=0)

    def _left_on_host(self) -> int:
        available = available_bytes()
        if available is None:
            return self.device.memory().total
        return max(0, available // local_ranks() - self._state_to_come())

    @exclusive
    def begin(self, key: object, amount: Amount, known: Iterable[Tensor]) -> None:
        """A forward begins in this thread; nothing leaves if no graph is made, or all that runs is recorded.

        known: parameters and buffers, which stay.
        """
        self.end(key)  # after Ctrl-C in a forward torch calls no hook at its end
        if not torch.is_grad_enabled() or self._is_recorded():
            return
        forward = SavedByForward(self._chosen(amount), timed=amount == "auto" and bool(self._last) and not self._groups)
        if amount == "auto":
            self._recent.add(forward)
        if forward.timed:
            forward.marks.append(self.device.mark())
            self._timed = forward
        known = [*known, *(() if self.weights is None else self.weights.all_copies())]
        memory = (memory_of(local(unwrapped(p))) for p in known if not is_lazy(p))
        lasting = frozenset(storage_address(storage) for storage in memory if storage is not None)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self._pack(tensor, forward, lasting), self._unpack
        )
        hooks.__enter__()
        self._stack.append((key, hooks, forward, amount))

    @exclusive
    def end(self, key: object) -> None:
        """The forward has ended, however it did; nothing if it has not begun."""
        stack = self._stack
        if all(other is not key for other, *_ in stack):
            return
        ended = None
        # Forwards that began within this one and did not come to their hook end with it.
        while ended is not key:
            ended, hooks, forward, amount = stack.pop()
            hooks.__exit__()
            if forward.timed:
                forward.marks.append(self.device.mark())
            # The last operation has run, and no later one comes that would say so.
            self._send_waiting(forward)
            self.last_offloaded = forward.offloaded_bytes, forward.nbytes
            if forward.offloaded_bytes:  # callers still have what they gave, which may have left in vain
                self._look()
            if forward.sizes:
                if not self._last and isinstance(amount, float):  # nothing was known, and all that could has left
                    self._wanted = sum(forward.sizes[: _leaving(amount, forward.sizes)])
                self._last = forward.sizes
                self._totals.append(forward.nbytes)

    @property
    def _stack(self) -> list[Any]:
        """The forwards that run in this thread."""
        return self._of_thread.__dict__.setdefault("stack", [])

    def _chosen(self, amount: Amount) -> Callable[[SavedByForward], bool]:
        """Whether the last born may leave: those saved first do, until it is as much as asked for."""
        if amount == "auto":
            if not self._told:
                return self._short()
            amount = self.share
        if not isinstance(amount, float):
            return lambda forward: forward.leaving_bytes + forward.sizes[-1] <= amount
        # By place, not by bytes, so that batches of other lengths are divided alike.
        count = _leaving(amount, self._last)
        return lambda forward: amount > 0 and (not self._last or len(forward.sizes) <= count)

    def _short(self) -> Callable[[SavedByForward], bool]:
        """Whether the last born leaves as long as there is no plan: all do once the device's memory runs short."""
        short = self.share > 0  # the user's code ran out of it

        def leaves(_: SavedByForward) -> bool:
            nonlocal short
            runs_short = None if short or self.runs_short is None else self.runs_short()
            if runs_short is not None and runs_short():
                short = True
                if not self.pool.nbytes:  # how much a forward saves is known once it has ended
                    self.pool.resize(min(self.device.memory().total, self._left_on_host() // 2))
            return short

        return leaves

    def _pack(self, tensor: Any, forward: SavedByForward, lasting: frozenset[int]) -> Kept:
        """The stand-in that autograd keeps for a tensor that it saves."""
        part = local(tensor)
        if self.weights is not None:
            self.weights.on_saving(tensor)
        if self._is_eligible(tensor, part, lasting):
            return self._save(tensor, part, forward)
        if forward.waiting:
            self._send_waiting(forward, _node())
        return Kept(tensor)

    def _is_eligible(self, tensor: Any, part: Tensor, lasting: frozenset[int]) -> bool:
        """Whether the tensor may leave: not so parameters and buffers, nor views of them, which leaving would not free.

        Under FSDP2 gathered parameters are such. While a part of the forward is recorded, none may.
        """
        plain = type(tensor) is Tensor or is_sharded(tensor)
        if not plain or part.layout is not torch.strided or not self.device.owns(part) or self._is_recorded():
            return False
        if part.is_complex() or part.is_quantized or part.is_neg() or part.is_nested:
            return False
        if any(isinstance(base_of(each), nn.Parameter) for each in (tensor, part)):
            return False
        storage = memory_of(part)
        if storage is None or storage_address(storage) in lasting:
            return False
        self.device.count(part)
        return min(part.nbytes, storage.nbytes()) >= self.least_bytes

    def _is_recorded(self) -> bool:
        """Whether what runs now will run again without its hooks: of a CUDA graph, or of a graph of torch.fx."""
        return self.device.capturing() or _is_traced()

    @torch.no_grad()
    @exclusive
    def _save(self, tensor: Any, part: Tensor, forward: SavedByForward) -> Packed:
        where, node = _range(part), _node()
        saved = forward.find(where, tensor)
        if saved is None:
            saved = Saved(self.device, part, where, self._travelling)
            forward.add(saved)
            if forward.timed:
                forward.marks.append(self.device.mark())
            if forward.backward_began:
                # Backward reads this forward already: what left now would have to come back at once.
                pass
            elif forward.may_leave(forward):
                forward.waiting[saved] = node
            else:  # what stays takes the memory of what has left last
                forward.kept_bytes += forward.sizes[saved.number]
                self._let_go(forward)
        else:
            forward.add(saved)
            if saved in forward.waiting:
                forward.waiting[saved] = node
        saved.note(tensor)
        self._send_waiting(forward, node)
        # The operation on this stream may still read the memory when the tensor has left and it is freed. The allocator
        # knows only the stream that the memory was taken for, so this one is recorded.
        self.device.keep(part)
        return Packed(tensor, part, saved)

    @exclusive
    def _send_waiting(self, forward: SavedByForward, saving: Node | None = None) -> None:
        """Start the copies for operations that have run: for all but `saving`, which packs a tensor now.

        An operation may fill what it has saved, as rrelu does with its noise, and no counter shows that.
        """
        if self._is_recorded():
            return
        for saved, node in list(forward.waiting.items()):
            if node != saving:
                del forward.waiting[saved]
                if not saved.emptied:
                    self._send(saved, forward)

    def _send(self, saved: Saved, forward: SavedByForward) -> None:
        """Start its way to the host, if there is room, and let go of what has arrived there."""
        block = self.pool.take(saved.nbytes)
        if block is None:
            self._denied.add(saved)
        else:
            # On another stream a backward may still run, which has given this block back.
            self._moves.append(saved.leave(block, () if self._restored is None else (self._restored,)))
            # Weak: autograd alone decides how long a saved tensor lives.
            forward.under_way.append(weakref.ref(saved))
            forward.offloaded_bytes += forward.sizes[saved.number]
        self._wanted = max(self._wanted, self.pool.used + sum(each.nbytes for each in self._denied))
        self._let_go(forward)

    def _let_go(self, forward: SavedByForward) -> None:
        """Free what has left, but for what may be on its way beside what stays."""
        under_way = [each for each in (reference() for reference in forward.under_way) if each is not None]
        kept = forward.kept_bytes
        least = 0 if kept else _AT_ONCE
        while len(under_way) > least and kept + sum(each.nbytes for each in under_way[1:]) >= forward.window:
            with self._stall(forward):
                under_way.pop(0).free()
        forward.under_way = list(map(weakref.ref, under_way))

    @contextlib.contextmanager
    def _stall(self, forward: SavedByForward) -> Iterator[None]:
        """Surrounds what may wait for a saved tensor. The plan counts such waits itself, if it says what leaves."""
        if forward not in self._recent:
            yield
            return
        before = self.device.mark()
        yield
        self._stalls.append((before, self.device.mark()))

    def stalls(self) -> Sequence[tuple[Mark, Mark]]:
        """Where each wait began and ended since this was asked last."""
        found, self._stalls = self._stalls, deque(maxlen=MOST_STALLS)
        return found

    def moves(self) -> deque[Job]:
        """The transfers since this was asked last, in the order of their issue."""
        self._given, self._moves = self._moves, deque(maxlen=MOST_STALLS)
        return self._given

    def _look(self) -> None:
        """Take a sample of the device's memory, of which there is little."""
        sample = self.sample()
        if sample is not None:
            sample(always=True)

    def _unpack(self, packed: Kept) -> Tensor:
        """The tensor, when backward needs it. Raises RuntimeError if it was written to."""
        packed.check()
        if isinstance(packed, Packed):
            return self._fetch(packed)
        if self.weights is not None:
            self.weights.before_use(packed.tensor)
        return packed.tensor

    @torch.no_grad()
    @exclusive
    def _fetch(self, packed: Packed) -> Tensor:
        saved = packed.saved
        forward = saved.forward
        if not forward.backward_began:
            self._look()
        forward.backward_began = True
        if forward.timed and saved.number not in forward.due:
            forward.due[saved.number] = self.device.mark()
        if saved.away:
            try:
                self._bring_back(saved)
            except torch.OutOfMemoryError:
                give_way = self.give_way()
                if give_way is None:
                    raise
                give_way(saved.nbytes)  # backward cannot wait, state can
                self._bring_back(saved)
        if saved.spent:  # another backward begins
            for other in forward.before():
                other.spent = False
        with self._stall(forward) if saved.returns else contextlib.nullcontext():
            found = saved.read(packed)
        ahead = 0
        for count, other in enumerate(each for each in forward.before(saved) if not each.spent):
            if count >= _AT_ONCE and ahead >= forward.window:
                break
            ahead += other.nbytes
            if other.away:
                try:
                    self._bring_back(other)
                except torch.OutOfMemoryError:
                    break  # there may be memory when it is needed
        return found

    def _bring_back(self, saved: Saved) -> None:
        """Start its way back. Raises torch.OutOfMemoryError."""
        self._restored = saved.bring_back()
        self._moves.append(self._restored)


class Surrounding(contextlib.AbstractContextManager[None]):
    """Surrounds forwards, one after another. amount: of what each saves leaves. known: as in `begin`."""

    def __init__(self, offload: ActivationOffload, amount: Amount, known: Iterable[Tensor]) -> None:
        self._offload, self._amount, self._known = offload, amount, known

    def __enter__(self) -> None:
        self._offload.begin(self, self._amount, self._known)

    def __exit__(self, *_: object) -> None:
        self._offload.end(self)


def _leaving(share: float, sizes: Sequence[int]) -> int:
    """How many of tensors of these sizes make up a share of the bytes, from the first one on."""
    sums = [*accumulate(sizes, initial=0)]
    return bisect_right(sums, sums[bisect_left(sums, round(share * sums[-1]))]) - 1


def _range(part: Tensor) -> Range:
    """The bytes of its storage that leave with a tensor: all of them where it is a large part."""
    extent = 1 + sum(int((size - 1) * stride) for size, stride in zip(part.size(), part.stride(), strict=True))
    first, nbytes = int(part.storage_offset()) * part.itemsize, extent * part.itemsize
    storage = part.untyped_storage()
    address, whole = storage_address(storage), storage.nbytes()
    return (address, 0, whole) if 2 * nbytes >= whole else (address, first, first + nbytes)


def _node() -> Node:
    """The last autograd node that this thread has made: while a tensor is packed, the one that saves it."""
    return threading.get_ident(), next_node()


def _is_traced() -> bool:
    """Whether torch.fx makes a graph of what runs."""
    # Before this module is imported, which takes a second, there is no such mode.
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and tracing.get_proxy_mode() is not None


def checked_amount(value: object) -> Amount | None:
    """How much leaves: a share from 0 to 1 as a float, bytes as an int, "auto", or None. 0 and 1 are shares.

    Raises TypeError or ValueError for anything else.
    """
    if value is None:
        return None
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"activations must be a share from 0 to 1, bytes as an int, 'auto' or None, found {value!r}")
    if not value >= 0 or (isinstance(value, float) and value > 1):
        raise ValueError(f"activations must be a share from 0 to 1, or bytes as an int, found {value}")
    return float(value) if value <= 1 else value
