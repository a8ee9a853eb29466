"""Gradients on the host: backward moves each there, and adds those of further micro-batches to it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from dos.devices import Device, EmulatedDevice, Job
from dos.gradients.other_steps import NOT_FOUND, steps_of_all, watch_steps
from dos.guard import warn
from dos.sharding.local import local
from dos.state.arena import aligned
from dos.state.host_store import HostStore
from dos.state.host_tensor import HostTensor
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.host_lane import HostLane
from dos.step.ledger import Ledger
from dos.step.transit import Transit, wait_for_all
from dos.torch_internals.modes import backward_number, writes_gradient

MOST_IN_TRANSIT = 256 << 20
"""The most bytes of gradients in transit to the host at once, or one gradient if that alone is larger."""
_SCALE = 8
"""A shift by this many bits gives the share that MOST_IN_TRANSIT is of 64 GiB, for the memory of an emulated device."""
PASSAGE_BYTES, PASSAGES = 32 << 20, 8
"""The size and the number of passages: host memory through which gradients pass that are added to others."""
_PASSAGES_SHARE = 10
"""All passages together take one part in this number of a limited host memory at most, in addition to the limit."""

_INCOMPLETE = (
    "moving a gradient to the host was interrupted or failed, so the gradients are not complete; call "
    "optimizer.zero_grad() and run backward again"
)

_UNUSED = (
    "a gradient was added to one of an earlier backward, which this optimizer has not used in a step while another one "
    "has made a step; if the earlier one was to be dropped, call optimizer.zero_grad() or module.zero_grad() before: "
    "with offload_gradients=True gradients are on the host, where p.grad = None does not drop them"
)


class _Total(NamedTuple):
    """A parameter's gradient so far: in `values`, complete once `arrived` is done.

    dtype: the dtype that `p.grad` would have; `values` are wider where another parameter's gradients are.
    thread: the thread whose backward wrote it; None: it was not taken in a backward.
    steps: the steps that optimizers had made when the last part came.
    backward: the number of the backward that wrote that; -1: it was not taken in one.
    """

    arrived: Future[None]
    values: Tensor
    dtype: torch.dtype
    thread: int | None
    steps: int
    backward: int


class _Held(NamedTuple):
    """The gradient of a weight that streams, or of its copy, while the same backward has yet to write the other one's.

    Autograd adds up all that a backward writes to a parameter before it adds that to `p.grad`.

    values: 1-D, on the host, complete once `arrived` is done.
    """

    arrived: Future[None]
    values: Tensor


def _add_arrived(
    job: Job,
    incoming: Tensor,
    target: Tensor,
    dtype: torch.dtype,
    before: Sequence[Future[None]],
    addend: Tensor | None,
) -> None:
    """Add a part of a gradient to `target`, once it has arrived; the rest is as in `_add`."""
    job.wait()
    _add(incoming, target, dtype, before, addend)


def _copy(values: Tensor, gradient: Tensor) -> None:
    values.copy_(gradient)


def _add(
    incoming: Tensor, target: Tensor, dtype: torch.dtype, before: Sequence[Future[None]], addend: Tensor | None = None
) -> None:
    """Add a part of a gradient on the host to `target`. addend: what is added to it first.

    before: what has written `target` and `addend`, and may have failed.
    """
    for each in before:
        each.result()
    if addend is not None:
        incoming = addend + incoming
    # Rounded to `dtype` as autograd rounds, also where `target` is wider.
    target.copy_(target.to(dtype).add_(incoming))


class OffloadedGradients:
    """The gradients of accelerated parameters on the host, summed over the micro-batches since the last step.

    `take` moves a gradient from the accelerator: `p.grad` is None afterwards. Further gradients are added to it where
    it was staged, in its dtype: the sum has the bits that autograd gives `p.grad`.

    enabled: whether gradients are offloaded; else there are none here.
    left: the records of parameters of which a hook has seen the gradient that backward wrote, and has left it in
        `p.grad`, as under DistributedDataParallel. Any other gradient beside one that is here is user code's.
    """

    # A gradient's way: backward's thread takes it and issues the copy (`take`), and the CPU lane adds it to the sum
    # (`_add_arrived`); `arrived` is done when the addition is. The step reads the sum where it is, and `forget_all`
    # forgets it. From the first change until the total is stored it is `_torn`: after an exception none may be used.
    def __init__(self, store: HostStore, *, enabled: bool) -> None:
        self.enabled = enabled
        self._store = store
        self._passages: deque[tuple[HostTensor, Future[None]]] = deque()
        """The passages in the order of use, each with the addition that reads from it last."""
        self._leaving: deque[Transit] = deque()
        """The transits whose gradients only the copy keeps on the device."""
        self._leaving_bytes = 0
        self._totals: dict[ParameterRecord, _Total] = {}
        self._held: dict[int, dict[ParameterRecord, _Held]] = {}
        """By the number of the backward, and the record."""
        self._torn: set[ParameterRecord] = set()
        self._used = set[ParameterRecord]()
        """The records whose gradients our last step has used, and nothing has dropped since."""
        self._given = set[ParameterRecord]()
        """The records whose gradients backward has used for the step to come."""
        self.left: set[ParameterRecord] = set()
        self._warned = self._told = False
        if enabled:
            watch_steps(self)

    def take(
        self,
        record: ParameterRecord,
        leaf: Tensor,
        subgroups: Sequence[Subgroup],
        index: int,
        ledger: Ledger,
        *,
        in_backward: bool,
    ) -> bool:
        """Add a gradient of the parameter to its sum on the host, and release it on the accelerator behind the copy.

        Returns whether this is the first one that is held instead, until `end_backward` at the latest: the backward
        that runs has yet to write another one of the parameter, which is added to it first.

        leaf: the tensor whose `grad` it is, the record's leaf or its parameter. subgroups: the subgroups in which the
        parameter lies; index: the position of the first one. Where ranks divide the parameter, no memory is pinned in
        backward: pinning may wait for the device, whose collectives wait for other ranks; the first gradients are then
        copied more slowly.
        If this is interrupted or fails, it is not known which parts were added, and all are refused until it is
        forgotten.
        """
        assert leaf.grad is not None, "it is taken from there"
        gradient, arena = local(leaf.grad), record.arena
        self.check()
        steps = steps_of_all()
        before, pin = self._totals.get(record), not (in_backward and record.sharded)
        if before is not None and before.steps != steps and not self._warned:
            self._warned = True
            warn(_UNUSED)
        if pin:
            self._store.stage(subgroups)
        self._hold_back(gradient.nbytes, ledger.device)
        # After an exception from here on it is not known whether the gradient was added.
        self._torn.add(record)
        subgroup = subgroups[0] if subgroups else None
        flat = record.flat_gradient(gradient)
        at_home = arena.streams and leaf is not record.leaf
        number, first = backward_number() if in_backward else -1, False
        thread = threading.get_ident() if in_backward and not record.sharded else None
        if leaf is not record.leaf:  # written by another thread where it is on another device
            thread = None if before is None else before.thread
        if before is None:
            values = arena.incoming.tensor[record.offset : record.offset + record.numel]
            if at_home:
                arrived = ledger.lane.add(partial(_copy, values, flat))
            else:
                arrived = ledger.lane.add(self._send(values, flat, index, subgroup, ledger).wait)
            total = _Total(arrived, values, gradient.dtype, thread, steps, number)
        elif self._comes_first(record, leaf, before, number):
            values, arrived = flat, before.arrived
            if not at_home:
                values = torch.empty(flat.shape, dtype=flat.dtype, device="cpu")
                arrived = ledger.lane.add(self._send(values, flat, index, subgroup, ledger).wait)
            first = number not in self._held
            self._held.setdefault(number, {})[record] = _Held(arrived, values)
            total = before
        else:
            held = self._held.get(number, {}).pop(record, None)
            after, addend = [before.arrived, *([held.arrived] if held else [])], held.values if held else None
            if at_home:
                arrived = ledger.lane.add(partial(_add, flat, before.values, before.dtype, after, addend))
            else:
                arrived = self._add(before, flat, index, subgroup, ledger, after, addend, pin=pin)
            total = before._replace(arrived=arrived, thread=thread, steps=steps, backward=number)
        leaf.grad = None
        self._totals[record] = total
        self._torn.discard(record)
        self.left.discard(record)
        return first

    def _hold_back(self, nbytes: int, device: Device) -> None:
        """Block while gradients in transit, with `nbytes` more, are too many bytes.

        Else backward, which is faster than the link, would fill the device with gradients that wait for their copy.
        """
        most = MOST_IN_TRANSIT
        if isinstance(device, EmulatedDevice):
            most = min(most, device.capacity >> _SCALE)
        # The first copy ends first, because the stream is in order. Its end releases the gradient's memory.
        while self._leaving and self._leaving_bytes + nbytes > most:
            wait_for_all([self._leaving[0]])
            self._leaving_bytes -= self._leaving.popleft().nbytes

    def _comes_first(self, record: ParameterRecord, leaf: Tensor, before: _Total, number: int) -> bool:
        """Return whether the backward of this number has yet to write the other gradient of a weight that streams."""
        if number == -1 or record.leaf is record.parameter or before.backward == number:
            return False
        other = record.parameter if leaf is record.leaf else record.leaf
        return record not in self._held.get(number, {}) and writes_gradient(other)

    def end_backward(self, number: int, lane: HostLane) -> None:
        """Add the gradients that a backward wrote and that are held for others, which it did not write."""
        for record, held in self._held.pop(number, {}).items():
            before = self._totals[record]
            add = partial(_add, held.values, before.values, before.dtype, [before.arrived, held.arrived])
            self._totals[record] = before._replace(arrived=lane.add(add), backward=number)

    def forget_interrupted(self) -> None:
        """Forget what was held for the rest of a backward that has raised; autograd drops it, too. None may run."""
        forgotten, self._held = self._held, {}
        for held in forgotten.values():
            for each in held.values():
                each.arrived.exception()  # the copy may still write there

    def _send(
        self, destination: Tensor, gradient: Tensor, index: int, subgroup: Subgroup | None, ledger: Ledger
    ) -> Job:
        transit = ledger.transits.send(index, subgroup, [(destination, gradient)], freed=True)
        self._leaving.append(transit)
        self._leaving_bytes += transit.nbytes
        return transit.job

    def _add(
        self,
        before: _Total,
        gradient: Tensor,
        index: int,
        subgroup: Subgroup | None,
        ledger: Ledger,
        after: Sequence[Future[None]],
        addend: Tensor | None,
        *,
        pin: bool,
    ) -> Future[None]:
        """Add a gradient to the parameter's total, part by part; return the future of the last addition.

        after, addend: as in `_add_arrived`.
        """
        arrived = before.arrived
        each = self._passage_bytes // gradient.itemsize
        parts = before.values.split(each)
        of_others = [None] * len(parts) if addend is None else addend.split(each)
        for target, source, other in zip(parts, gradient.split(each), of_others, strict=True):
            passage = self._free_passage(ledger.device)
            if pin and not passage.nbytes:
                self._store.reserve_whole(passage)
            incoming = passage.tensor[: source.nbytes].view(source.dtype)
            job = self._send(incoming, source, index, subgroup, ledger)
            # One thread adds, in the order of backward: sums have the same bits each time.
            arrived = ledger.lane.add(partial(_add_arrived, job, incoming, target, before.dtype, after, other))
            after = [arrived]
            # With its last reader: the next gradient must not be copied over a part that the lane has yet to add.
            self._passages.append((passage, arrived))
        return arrived

    def pin(self) -> None:
        """Pin the passages that backward could not pin. Raises as `HostStore.stage`."""
        for passage, _ in self._passages:
            if not passage.nbytes:
                self._store.reserve_whole(passage)

    @property
    def _passage_bytes(self) -> int:
        limit = self._store.limit
        return PASSAGE_BYTES if limit is None else min(PASSAGE_BYTES, aligned(limit // (_PASSAGES_SHARE * PASSAGES)))

    def _free_passage(self, device: Device) -> HostTensor:
        """Return a passage that no addition reads any more. Blocks if all are in use."""
        if len(self._passages) < PASSAGES and all(not reader.done() for _, reader in self._passages):
            return HostTensor(self._passage_bytes, torch.uint8, device, self._passage_bytes)
        passage, reader = self._passages.popleft()
        reader.exception()  # waits for the addition; a failure is raised where its own gradient is read
        return passage

    def refuse_second_thread(self, record: ParameterRecord | None) -> None:
        """Raise RuntimeError if a backward in another thread has written the parameter's gradient so far.

        The other thread may have been adding to `p.grad` while this one took it away, so that a gradient would be lost
        or counted twice.
        """
        total = None if record is None else self._totals.get(record)
        if record is None or total is None or total.thread in (None, threading.get_ident()):
            return
        self._torn.add(record)
        raise RuntimeError(
            f"backward ran in two threads since the last step and has added to the gradient of one parameter, of shape "
            f"{tuple(record.parameter.shape)}, in both; DOSAdam(offload_gradients=True) takes it away while the other "
            "thread may be adding to it; run backward in one thread, or build the optimizer with "
            "offload_gradients=False"
        )

    def stepped(self, optimizer: Optimizer) -> None:
        """Warn once if an optimizer that is not ours has made a step without the gradients that are here."""
        # Ours refuse a second optimizer, and reading their groups would wait for their updates.
        if self._told or not (self._totals or self._used) or hasattr(optimizer, "edit_gradients"):
            return
        without = [p for group in optimizer.param_groups for p in group["params"] if p.grad is None]
        here = {id(record.parameter) for record in (*list(self._totals), *self._used)} if without else set()
        found = [p for p in without if id(p) in here]
        if found:
            self._told = True
            how = "DOSAdam(offload_gradients=True)"
            warn(NOT_FOUND.format(type(optimizer).__name__, len(found), tuple(found[0].shape), how))

    def check(self) -> None:
        """Raise RuntimeError if a gradient was taken in part, so that the sums are not those of backward."""
        if self._torn:
            raise RuntimeError(_INCOMPLETE)

    @property
    def records(self) -> Collection[ParameterRecord]:
        """The records of the parameters whose gradients are here."""
        return self._totals.keys()

    def flat(self, record: ParameterRecord) -> Tensor:
        """Return the parameter's gradient so far: 1-D, on the host, in the order of `record.flat`. Blocks.

        Raises RuntimeError with the cause if a part of it did not arrive.
        """
        self.check()
        total = self._totals[record]
        try:
            # The caller reads `values`, to which the copy or the CPU lane may still write.
            total.arrived.result()
        except Exception as error:
            self._torn.add(record)
            raise RuntimeError(_INCOMPLETE) from error
        return total.values

    def dtype(self, record: ParameterRecord) -> torch.dtype:
        """Return the dtype that `p.grad` would have; `flat` is wider where another parameter's gradients are."""
        return self._totals[record].dtype

    def handle(self, record: ParameterRecord) -> Future[Any] | None:
        """Return a handle of the parameter's gradient, another object after each change; None: it has no gradient."""
        total = self._totals.get(record)
        return None if total is None else total.arrived

    def coming(self, record: ParameterRecord) -> Tensor | None:
        """Return where the parameter's gradient is once its `handle` is done, as `flat`; None if it has none.

        None, too, if the backward that runs has yet to add to it.
        """
        total = self._totals.get(record)
        held = self._held and any(record in each for each in self._held.values())
        return None if total is None or held else total.values

    def give(self, record: ParameterRecord) -> None:
        """Leave the parameter's gradient to an update in backward, which waits for the additions."""
        self._totals.pop(record, None)
        self._given.add(record)

    def gradients(self, parameters: Collection[int] | None = None) -> list[tuple[ParameterRecord, Future[None]]]:
        """Return the records of gradients here, each with its handle; only of parameters with these ids, if given."""
        chosen = [r for r in self._totals if parameters is None or id(r.parameter) in parameters]
        return [(record, self._totals[record].arrived) for record in chosen]

    def forget(self, records: Iterable[ParameterRecord]) -> None:
        """Forget the gradients of these, once no addition writes to them."""
        records = list(records)
        self._used -= set(records)
        for record in records:
            self._torn.discard(record)
            self.left.discard(record)
            for each in [self._totals.pop(record, None), *(held.pop(record, None) for held in self._held.values())]:
                if each is not None:
                    # The next gradient is copied there, or the memory is released, and the copy or the CPU lane may
                    # still write there. A failure does not matter for a gradient that no step uses.
                    each.arrived.exception()

    def forget_all(self, *, used: bool = False) -> None:
        """Forget all gradients, once no addition writes to them. used: because a step has used them."""
        self._used, self._given = {*self._given, *self._totals} if used else set(), set()
        self.forget_interrupted()
        self._leaving.clear()
        self._leaving_bytes = 0
        forgotten, self._totals, self._torn, self.left = self._totals, {}, set(), set()
        for total in forgotten.values():
            total.arrived.exception()  # waits; a failure does not matter for gradients that no step uses
