"""Gradients on the host: backward moves each there, and adds those of further micro-batches to it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dos.devices import Device, EmulatedDevice, Job
from dos.state.arena import aligned
from dos.state.host_store import HostStore
from dos.state.host_tensor import HostTensor
from dos.state.record import ParameterRecord
from dos.state.subgroup import Subgroup
from dos.step.ledger import Ledger

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


class _Total(NamedTuple):
    """A parameter's gradient so far: in `values`, complete once `arrived` is done.

    dtype: the dtype that `p.grad` would have; `values` are wider where another parameter's gradients are.
    thread: the thread whose backward wrote it; None: it was not taken in a backward.
    """

    arrived: Future[None]
    values: Tensor
    dtype: torch.dtype
    thread: int | None


def _add_arrived(job: Job, incoming: Tensor, target: Tensor, dtype: torch.dtype, before: Future[None]) -> None:
    """Add a part of a gradient to `target`, once it has arrived. before: the addition before, which may have failed."""
    # The copy writes `incoming`, and the addition before writes `target`: both must have ended, and succeeded.
    job.wait()
    before.result()
    # Rounded to `dtype` as autograd rounds, also where `target` is wider.
    target.copy_(target.to(dtype).add_(incoming))


class OffloadedGradients:
    """The gradients of accelerated parameters on the host, summed over the micro-batches since the last step.

    `take` moves a gradient from the accelerator: `p.grad` is None afterwards. Further gradients are added to it where
    it was staged, in its dtype: the sum has the bits that autograd gives `p.grad`.

    enabled: whether gradients are offloaded; else there are none here.
    """

    # A gradient's way: backward's thread takes it and issues the copy (`take`), and the CPU lane adds it to the sum
    # (`_add_arrived`); `arrived` is done when the addition is. The step reads the sum where it is, and `forget_all`
    # forgets it. From the first change until the total is stored all are `_torn`: after an exception none may be used.
    def __init__(self, store: HostStore, *, enabled: bool) -> None:
        self.enabled = enabled
        self._store = store
        self._passages: deque[tuple[HostTensor, Future[None]]] = deque()
        """The passages in the order of use, each with the addition that reads from it last."""
        self._totals: dict[ParameterRecord, _Total] = {}
        self._torn = False

    def take(
        self, record: ParameterRecord, subgroups: Sequence[Subgroup], index: int, ledger: Ledger, *, in_backward: bool
    ) -> None:
        """Add the parameter's gradient to its sum on the host, and release it on the accelerator behind the copy.

        subgroups: the subgroups in which the parameter lies; index: the position of the first one. Where ranks divide
        the parameter, no memory is pinned in backward: pinning may wait for the device, whose collectives wait for
        other ranks; the first gradients are then copied more slowly.
        If this is interrupted or fails, it is not known which parts were added, and all are refused until `forget_all`.
        """
        gradient = record.gradient
        assert gradient is not None
        arena = record.arena
        self.check()
        before, pin = self._totals.get(record), not (in_backward and record.sharded)
        if pin:
            self._store.stage(subgroups)
        most = MOST_IN_TRANSIT
        if isinstance(ledger.device, EmulatedDevice):
            most = min(most, ledger.device.capacity >> _SCALE)
        ledger.hold_back(gradient.nbytes, most)
        # After an exception from here on it is not known whether the gradient was added.
        self._torn = True
        subgroup = subgroups[0] if subgroups else None
        flat = record.flat_gradient(gradient)
        thread = threading.get_ident() if in_backward and not record.sharded else None
        if before is None:
            values = arena.gradient[record.offset : record.offset + record.numel]
            job = self._send(values, flat, index, subgroup, ledger)
            total = _Total(ledger.lane.submit(job.wait), values, gradient.dtype, thread)
        else:
            arrived = self._add(before, flat, index, subgroup, ledger, pin=pin)
            total = before._replace(arrived=arrived, thread=thread)
        record.leaf.grad = None
        self._totals[record] = total
        self._torn = False

    def _send(
        self, destination: Tensor, gradient: Tensor, index: int, subgroup: Subgroup | None, ledger: Ledger
    ) -> Job:
        return ledger.send(index, subgroup, [(destination, gradient)], freed=True).job

    def _add(
        self, before: _Total, gradient: Tensor, index: int, subgroup: Subgroup | None, ledger: Ledger, *, pin: bool
    ) -> Future[None]:
        """Add a gradient to the parameter's total, part by part; return the future of the last addition."""
        arrived = before.arrived
        each = self._passage_bytes // gradient.itemsize
        for target, source in zip(before.values.split(each), gradient.split(each), strict=True):
            passage = self._free_passage(ledger.device)
            if pin and not passage.nbytes:
                self._store.reserve_whole(passage)
            incoming = passage.tensor[: source.nbytes].view(source.dtype)
            job = self._send(incoming, source, index, subgroup, ledger)
            # The CPU lane is one thread, and adds in the order of backward: sums have the same bits each time.
            arrived = ledger.lane.submit(partial(_add_arrived, job, incoming, target, before.dtype, arrived))
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
        self._torn = True
        raise RuntimeError(
            f"backward ran in two threads since the last step and has added to the gradient of one parameter, of shape "
            f"{tuple(record.parameter.shape)}, in both; DOSAdam(offload_gradients=True) takes it away while the other "
            "thread may be adding to it; run backward in one thread, or build the optimizer with "
            "offload_gradients=False"
        )

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
            self._torn = True
            raise RuntimeError(_INCOMPLETE) from error
        return total.values

    def handle(self, record: ParameterRecord) -> Future[None] | None:
        """Return a handle of the parameter's gradient, another object after each change; None: it has no gradient."""
        total = self._totals.get(record)
        return None if total is None else total.arrived

    def gradients(self, parameters: Collection[int] | None = None) -> list[tuple[ParameterRecord, Future[None]]]:
        """Return the records of gradients here, each with its handle; only of parameters with these ids, if given."""
        chosen = [r for r in self._totals if parameters is None or id(r.parameter) in parameters]
        return [(record, self._totals[record].arrived) for record in chosen]

    def forget(self, records: Iterable[ParameterRecord]) -> None:
        """Forget the gradients of these, once no addition writes to them: their memory is released with the arenas."""
        for total in [self._totals.pop(record) for record in records if record in self._totals]:
            # The arenas are released next, and the copy or the CPU lane may still write there. A failure is of no use.
            total.arrived.exception()

    def forget_all(self) -> None:
        """Forget all gradients, once no addition writes to them."""
        forgotten, self._totals, self._torn = self._totals, {}, False
        for total in forgotten.values():
            total.arrived.exception()  # waits; a failure does not matter for gradients that no step uses
