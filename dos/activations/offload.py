"""Decides which tensors that autograd saves move to the host, and when they return: hooks around a forward."""

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
from dos.activations.saved import AT_ONCE, MOST, CopiesInFlight, Kept, Node, Packed, Range, Saved, SavedByForward
from dos.arguments import is_number, share_or_count
from dos.devices import Device, Job, Mark, memory_of
from dos.guard import outer_hook
from dos.machine.host_memory import available_bytes
from dos.machine.process import local_ranks
from dos.planning.forecast import Room
from dos.sharding.local import holds_wrapper, is_sharded, local
from dos.torch_internals.modes import check_saved_tensors_hooks, keep_untraced, next_node
from dos.torch_internals.tensors import base_of, storage_address, unwrapped
from perfmodel import Plan
from perfmodel.workload import SavedTensors, peak_room

Amount = float | int | Literal["auto"]
"""The part of all saved tensors that moves: a share (a float), bytes, or as the plan says."""

LEAST_BYTES = 1 << 20
"""Smaller tensors stay: a transfer would take longer to issue than to run."""
_SCALE = 16
"""A shift by this many bits gives the share that LEAST_BYTES is of 64 GiB, for the memory of an emulated device."""
MOST_STALLS = 1000
"""The most waits and transfers that are remembered if no optimizer's step asks for them."""
REMEMBERED = 16
"""The number of last forwards of which the largest counts."""


class StreamedWeights(Protocol):
    """Weights that are on the device only while a block computes."""

    def all_copies(self) -> Sequence[Tensor]:
        """Return the device's copies, with or without memory."""

    def on_saving(self, tensor: Tensor) -> None:
        """Raise RuntimeError if the tensor, which autograd saves, would keep streamed weights on the device."""

    def before_use(self, tensor: Tensor) -> None:
        """Fetch the weight, if the tensor is one: a saved tensor that stays, which backward is about to read."""


class ActivationOffload:
    """The saved tensors of one optimizer's models.

    lock: the optimizer's. pool: their memory on the host.
    state_to_come: returns the bytes of host memory that state will take in addition.
    sample: samples the device's memory when most tensors are saved. runs_short: whether little of it is free; None
        where no plan moves saved tensors. give_way: moves all state off the device for a tensor of this many bytes.
    in_use: whether user code asked that saved tensors move.
    share: the share of a forward's saved bytes that moves where the plan decides.
    last_offloaded: bytes of the last forward that moved, and all bytes that it saved.
    """

    weights: StreamedWeights | None = None
    sample: weakref.WeakMethod[Callable[..., None]]
    runs_short: weakref.WeakMethod[Callable[[], bool]] | None = None
    give_way: weakref.WeakMethod[Callable[[int], None]]

    def __init__(self, device: Device, lock: Any, state_to_come: Callable[[], int]) -> None:
        keep_untraced("dos")  # blocks that are compiled run the hooks on saved tensors
        self.device = device
        self.pool = HostPool(device)
        self.in_use = self._follows_plan = False
        self.share = 0.0
        self.last_offloaded: tuple[int, int] | None = None
        self._lock = lock
        self._state_to_come = state_to_come
        self._of_thread = threading.local()
        self._last: Sequence[int] = ()
        """The sizes of the tensors that the last forward saved, in order."""
        self._recent: weakref.WeakSet[SavedByForward] = weakref.WeakSet()
        """The forwards whose share the plan decides."""
        self._timed: SavedByForward | None = None
        """The last forward that is timed; not the very first one, which is slow."""
        self._groups: tuple[SavedTensors, ...] = ()
        self._told = False
        self._stalls: deque[tuple[Mark, Mark]] = deque(maxlen=MOST_STALLS)
        self._given, self._moves = deque[Job](), deque[Job](maxlen=MOST_STALLS)
        self._totals: deque[int] = deque(maxlen=REMEMBERED)
        self._planned = 0.0
        self._restored: Job | None = None
        """The last transfer to the device; no released block is read after it."""
        self._denied_bytes = 0
        """Bytes of tensors for which the pool had no block, until they are collected."""
        self._collected: deque[int] = deque()
        """Bytes of those that were collected since; by any thread, so that only appending is safe there."""
        self._in_flight = CopiesInFlight()
        self._wanted = 0
        """The most bytes that would have been on the host at a time with a pool large enough."""
        total = device.memory().total
        self.least_bytes = LEAST_BYTES if device.known_profile is None else min(LEAST_BYTES, total >> _SCALE)

    def size_pool(self, amount: Amount) -> None:
        """Pin a pool on the host before the first forward, whose size is not known.

        An amount in bytes is the most that moves; for a share, the pool is that share of the device's memory.
        """
        self.in_use, self._follows_plan = True, self._follows_plan or amount == "auto"
        if not self.pool.nbytes and amount != "auto":
            guess = int(amount * self.device.memory().total) if isinstance(amount, float) else amount
            self.pool.resize(min(guess, self._left_on_host() // 2))

    def follow_plan(self, plan: Plan | None) -> None:
        """Follow the plan, and resize the pool. Called between iterations: pinning takes long, and other ranks wait."""
        self._in_flight.release_lost(self.device)
        if self._timed is not None and not self._groups:
            self._groups = self._timed.groups()
        if plan is not None and self._told:
            planned = min(1.0, plan.activation_bytes / self._total)
            # A share that falls takes effect an iteration later: this step first moves the state off the device whose
            # memory the tensors that stay will take.
            self.share, self._planned = max(planned, self._planned), planned
        self._wanted = max(self._wanted, int(self.share * self._total))
        wanted = self._wanted + self._wanted // 8
        if self._last and not self._wanted <= self.pool.nbytes <= 2 * wanted:
            size = min(wanted, self._left_on_host() + self.pool.nbytes)
            if not self.pool.nbytes <= size <= self.pool.nbytes + self.pool.nbytes // 8:
                if self._restored is not None:
                    # The device reads the present region until then. It is released before another is pinned, so that
                    # the host never holds both.
                    self._restored.wait()
                    self._restored = None
                    for jobs in (self._given, self._moves):  # jobs refer to the memory that they copy
                        jobs.clear()
                self.pool.resize(size)

    def ran_out(self) -> None:
        """Move all saved tensors until the next plan, because user code ran out of device memory."""
        if self._follows_plan:
            self.share = self._planned = 1.0
            self.follow_plan(None)

    def away(self) -> int:
        """Return the bytes of saved tensors that are not on the device, as the plan wants."""
        return sum(forward.away_bytes for forward in list(self._recent))

    @property
    def moving_bytes(self) -> int:
        """Bytes of this forward that have moved or will move, where the plan decides."""
        return int(self.share * self._total) + 1  # as the share was rounded

    def recorded(self, room: Room, ran_out_again: bool) -> dict[str, Any]:
        """Return the fields of a workload about saved tensors, where the plan decides how many of them move.

        room: bytes of the device for state. ran_out_again: whether user code ran out of memory, and again at once.
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
        # Moving more gives state no room: when backward ends, all gradients are on the device beside the state, and the
        # tensors that are being restored.
        useful = least + max(0, room.more - (total - peak_room(groups, total)))
        most = min((self._left_on_host() + self.pool.nbytes) * 8 // 9, useful)
        return {
            "activations": groups,
            "activation_host_bytes": math.inf if most >= total else most // step * step,
            "activation_least_bytes": least,
        }

    @property
    def _total(self) -> int:
        """The most bytes that one of the last forwards saved."""
        return max(self._totals, default=0)

    def _left_on_host(self) -> int:
        available = available_bytes()
        if available is None:
            return self.device.memory().total
        return max(0, available // local_ranks() - self._state_to_come())

    @outer_hook
    def begin(self, key: object, amount: Amount, known: Iterable[Tensor]) -> None:
        """Begin a forward in this thread. No tensor moves if autograd makes no graph, or if a graph is captured.

        known: parameters and buffers, which stay.
        """
        self.end(key)  # after Ctrl-C in a forward torch calls no hook at its end
        if not torch.is_grad_enabled() or self._is_recorded():
            return
        check_saved_tensors_hooks()
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

    @outer_hook
    def end(self, key: object) -> None:
        """End the forward, even one that raised; do nothing if it has not begun."""
        stack = self._stack
        if all(other is not key for other, *_ in stack):
            return
        ended = None
        # Forwards that began within this one and raised, so that torch ran no hook at their end, end with it.
        while ended is not key:
            ended, hooks, forward, amount = stack.pop()
            hooks.__exit__()
            if forward.timed:
                forward.marks.append(self.device.mark())
            # The last operation has run, and no later one shows that.
            self._send_waiting(forward)
            self.last_offloaded = forward.offloaded_bytes, forward.nbytes
            if forward.offloaded_bytes:  # callers may still refer to their tensors, whose memory is then not released
                self._look()
            if forward.sizes:
                if not self._last and isinstance(amount, float):  # no size was known, and all tensors have moved
                    self._wanted = sum(forward.sizes[: _count_moving(amount, forward.sizes)])
                self._last = forward.sizes
                self._totals.append(forward.nbytes)

    @property
    def _stack(self) -> list[Any]:
        """The forwards that run in this thread."""
        return self._of_thread.__dict__.setdefault("stack", [])

    def _chosen(self, amount: Amount) -> Callable[[SavedByForward], bool]:
        """Return whether the tensor saved last moves; the first ones do, until as much moves as was asked for."""
        if amount == "auto":
            if not self._told:
                return self._short()
            amount = self.share
        if not isinstance(amount, float):
            return lambda forward: forward.moving_bytes + forward.sizes[-1] <= amount
        # By place, not by bytes, so that the same layers' tensors move in batches of other lengths.
        count = _count_moving(amount, self._last)
        return lambda forward: amount > 0 and (not self._last or len(forward.sizes) <= count)

    def _short(self) -> Callable[[SavedByForward], bool]:
        """Return whether the tensor saved last moves before there is a plan: all do once device memory runs short."""
        short = self.share > 0  # user code ran out of memory

        def moves(_: SavedByForward) -> bool:
            nonlocal short
            runs_short = None if short or self.runs_short is None else self.runs_short()
            if runs_short is not None and runs_short():
                short = True
                if not self.pool.nbytes:  # the bytes that a forward saves are known only when it has ended
                    self.pool.resize(min(self.device.memory().total, self._left_on_host() // 2))
            return short

        return moves

    def _pack(self, tensor: Any, forward: SavedByForward, lasting: frozenset[int]) -> Kept:
        """Return the stand-in that autograd keeps for a tensor that it saves."""
        part = local(tensor)
        if self.weights is not None:
            self.weights.on_saving(tensor)
        if self._is_eligible(tensor, part, lasting):
            return self._save(tensor, part, forward)
        if forward.waiting:
            self._send_waiting(forward, _node())
        return Kept(tensor)

    def _is_eligible(self, tensor: Any, part: Tensor, lasting: frozenset[int]) -> bool:
        """Return whether the tensor may move.

        Parameters and buffers, views of them, and parameters that FSDP2 has gathered stay, because moving would release
        no memory. While a graph is captured, all tensors stay.
        """
        plain = type(tensor) is Tensor or (is_sharded(tensor) and not holds_wrapper(tensor))
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
        """Return whether operations are captured in a CUDA graph or by torch.fx, which replay them without hooks."""
        return self.device.capturing() or _is_traced()

    @torch.no_grad()
    @outer_hook
    def _save(self, tensor: Any, part: Tensor, forward: SavedByForward) -> Packed:
        where, node = _range(part), _node()
        saved = forward.find(where, tensor)
        if saved is None:
            saved = Saved(self.device, part, where, self._in_flight)
            forward.add(saved)
            if forward.timed:
                forward.marks.append(self.device.mark())
            if forward.backward_began:
                # Backward reads this forward already: a tensor that moved now would have to be restored at once.
                pass
            elif forward.moves(forward):
                forward.waiting[saved] = node
            else:  # a tensor that stays needs the memory of tensors that have moved
                forward.kept_bytes += forward.sizes[saved.number]
                self._release_saved(forward)
        else:
            forward.add(saved)
            if saved in forward.waiting:
                forward.waiting[saved] = node
        saved.note(tensor)
        self._send_waiting(forward, node)
        # The operation on this stream may still read the memory when the tensor has moved and the memory is released.
        # The allocator knows only the stream that allocated it, so this stream is recorded.
        self.device.keep(part)
        return Packed(tensor, part, saved)

    @outer_hook
    def _send_waiting(self, forward: SavedByForward, saving: Node | None = None) -> None:
        """Start the copies for operations that have run: for all but `saving`, which packs a tensor now.

        An operation may fill a tensor after saving it, as rrelu does with its noise, and no counter shows that.
        """
        if self._is_recorded():
            return
        for saved, node in list(forward.waiting.items()):
            if node != saving:
                del forward.waiting[saved]
                if not saved.emptied:
                    self._send(saved, forward)

    def _send(self, saved: Saved, forward: SavedByForward) -> None:
        """Start the copy to the host, if the pool has a block, and release tensors that have arrived there."""
        block = self.pool.take(saved.nbytes)
        if block is None:
            self._denied_bytes += saved.nbytes
            weakref.finalize(saved, self._collected.append, saved.nbytes).atexit = False
        else:
            # Behind the last restore: a backward that runs on another stream may still read the released block.
            self._moves.append(saved.save(block, () if self._restored is None else (self._restored,)))
            # Weak: autograd alone decides how long a saved tensor lives.
            forward.under_way.append((weakref.ref(saved), saved.nbytes))
            forward.under_way_bytes += saved.nbytes
            forward.offloaded_bytes += forward.sizes[saved.number]
        while self._collected:
            self._denied_bytes -= self._collected.popleft()
        self._wanted = max(self._wanted, self.pool.used + self._denied_bytes)
        self._release_saved(forward)

    def _release_saved(self, forward: SavedByForward) -> None:
        """Release device memory of tensors that move, except of the last ones, whose copies may run on."""
        kept, under_way = forward.kept_bytes, forward.under_way
        least = 0 if kept else AT_ONCE
        while len(under_way) > least and kept + forward.under_way_bytes - under_way[0][1] >= forward.part_bytes:
            reference, nbytes = under_way.popleft()
            forward.under_way_bytes -= nbytes
            saved = reference()
            if saved is not None:
                with self._stall(forward):
                    saved.release()

    @contextlib.contextmanager
    def _stall(self, forward: SavedByForward) -> Iterator[None]:
        """Surround a wait for a saved tensor, and mark it where the plan decides: the plan counts such waits itself."""
        if forward not in self._recent:
            yield
            return
        before = self.device.mark()
        yield
        self._stalls.append((before, self.device.mark()))

    def stalls(self) -> Sequence[tuple[Mark, Mark]]:
        """Return where each wait began and ended since the last call of this."""
        found, self._stalls = self._stalls, deque(maxlen=MOST_STALLS)
        return found

    def moves(self) -> deque[Job]:
        """Return the transfers since the last call of this, in the order of their issue."""
        self._given, self._moves = self._moves, deque(maxlen=MOST_STALLS)
        return self._given

    def _look(self) -> None:
        """Sample the device's memory at a peak."""
        sample = self.sample()
        if sample is not None:
            sample(always=True)

    def _unpack(self, packed: Kept) -> Tensor:
        """Return the tensor, which backward needs now. Raises RuntimeError if it was written to."""
        packed.check()
        if isinstance(packed, Packed):
            return self._fetch(packed)
        if self.weights is not None:
            self.weights.before_use(packed.tensor)
        return packed.tensor

    @torch.no_grad()
    @outer_hook
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
                self._restore(saved)
            except torch.OutOfMemoryError:
                give_way = self.give_way()
                if give_way is None:
                    raise
                give_way(saved.nbytes)  # backward cannot wait, state can
                self._restore(saved)
        if saved.spent:  # another backward begins
            for other in forward.ranges():
                other.spent = False
        with self._stall(forward) if saved.returns else contextlib.nullcontext():
            found = saved.read(packed)
        for other in forward.next_after(saved):
            if other.away:
                try:
                    self._restore(other)
                except torch.OutOfMemoryError:
                    break  # there may be memory when backward needs it
        return found

    def _restore(self, saved: Saved) -> None:
        """Start the copy back to the device. Raises torch.OutOfMemoryError."""
        self._restored = saved.restore()
        self._moves.append(self._restored)


class Surrounding(contextlib.AbstractContextManager[None]):
    """A context for forwards, one after another. amount: how much of each one's tensors moves. known: as in `begin`."""

    def __init__(self, offload: ActivationOffload, amount: Amount, known: Iterable[Tensor]) -> None:
        self._offload, self._amount, self._known = offload, amount, known

    def __enter__(self) -> None:
        self._offload.begin(self, self._amount, self._known)

    def __exit__(self, *_: object) -> None:
        self._offload.end(self)


def _count_moving(share: float, sizes: Sequence[int]) -> int:
    """Return the number of tensors of these sizes, from the first one on, that make up a share of the bytes."""
    sums = [*accumulate(sizes, initial=0)]
    return bisect_right(sums, sums[bisect_left(sums, round(share * sums[-1]))]) - 1


def _range(part: Tensor) -> Range:
    """Return the bytes of the storage that move with a tensor: all of them where the tensor has half or more."""
    extent = 1 + sum(int((size - 1) * stride) for size, stride in zip(part.size(), part.stride(), strict=True))
    first, nbytes = int(part.storage_offset()) * part.itemsize, extent * part.itemsize
    storage = part.untyped_storage()
    address, whole = storage_address(storage), storage.nbytes()
    return (address, 0, whole) if 2 * nbytes >= whole else (address, first, first + nbytes)


def _node() -> Node:
    """Return the last autograd node that this thread has made: while a tensor is packed, the node that saves it."""
    return threading.get_ident(), next_node()


def _is_traced() -> bool:
    """Return whether torch.fx traces the operations that run."""
    # Not imported here, which takes a second: before user code imports the module, there is no such mode.
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and tracing.get_proxy_mode() is not None


def checked_amount(value: object) -> Amount | None:
    """Return how much moves: a share from 0 to 1 as a float, bytes as an int, "auto", or None. 0 and 1 are shares.

    Raises TypeError or ValueError for anything else.
    """
    if value is None:
        return None
    if isinstance(value, str) and value == "auto":
        return "auto"
    if not is_number(value):
        raise TypeError(f"activations must be a share from 0 to 1, bytes as an int, 'auto' or None, found {value!r}")
    amount = share_or_count(value)
    if amount is None:
        raise ValueError(f"activations must be a share from 0 to 1, or bytes as an int, found {value}")
    return float(amount) if amount <= 1 else amount
