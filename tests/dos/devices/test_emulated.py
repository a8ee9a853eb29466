"""The emulated device keeps the simulator's order, and counts memory as a caching allocator does."""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dos.devices.base import Job
from dos.devices.emulated import EmulatedDevice
from perfmodel import Lane, Op
from perfmodel.lanes import LANES, Stream, run_tasks
from tests.support.clock import compares_with_a_clock, eventually
from tests.support.machines import machine
from tests.support.training import FAST


def assert_near(measured: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    """All begin and end when the simulator says, in seconds."""
    gap = max(abs(a - b) for a, b in zip(itertools.chain(*measured), itertools.chain(*expected), strict=True))
    assert gap < 0.02, f"needed within 0.02 s: {expected}, found up to {gap:.3f} s from it: {measured}"


@compares_with_a_clock
def test_saved_tensors_interrupt_state_on_their_link() -> None:
    rates = machine(**dict.fromkeys(("h2d_bandwidth", "h2d_bandwidth_duplex"), 1e6))
    device = EmulatedDevice(rates, 2**20)
    state = ((Stream.COMPUTE, 0.1), (Stream.PREFETCH, 0.3), (Stream.PARAMETER, 0.1))
    saved = [(Stream.RESTORE, 0.05, 0.0, after) for after in ((0,), ())]
    starts, ends = run_tasks([*((stream, seconds, 0.0, ()) for stream, seconds in state), *saved], rates)

    prefetched, updated, *restored = (torch.zeros(1000 * n, dtype=torch.uint8) for n in (300, 100, 50, 50))

    def copy(op: Op, to: torch.Tensor) -> Job:
        return device.copy(op, 0, [(to, torch.ones_like(to))])

    origin = time.perf_counter()
    jobs = [copy(Op.PREFETCH, prefetched)]
    assert eventually(prefetched.any), "the link serves it first, whichever stream's thread is faster"
    jobs += [copy(Op.PARAMETER, updated)]
    time.sleep(max(0.0, origin + 0.1 - time.perf_counter()))
    jobs += [copy(Op.RESTORE, to) for to in restored]
    measured = [(job.wait().start - origin, job.wait().end - origin) for job in jobs]
    assert_near(measured, list(zip(starts[1:], ends[1:], strict=True)))


@compares_with_a_clock
def test_disk_lanes_last_as_the_simulator_says() -> None:
    """Two reads and a write beside the first: each slows the other, as one drive does, and they share host DRAM."""
    rates = machine(
        **dict.fromkeys(("disk_read_bandwidth", "disk_write_bandwidth"), 1e6),
        **dict.fromkeys(("disk_read_bandwidth_duplex", "disk_write_bandwidth_duplex"), 5e5),
        host_bandwidth=8e5,
        disk_latency_s=0.01,
    )
    device, asked = EmulatedDevice(rates, 2**20), {Lane.READ: (190_000, 190_000), Lane.WRITE: (40_000,)}
    tasks = [
        (LANES[lane].streams[0], seconds, nbytes / seconds, ())
        for lane, sizes in asked.items()
        for nbytes in sizes
        if (seconds := LANES[lane].seconds(nbytes, rates))
    ]

    def transfer(lane: Lane) -> list[tuple[float, float]]:
        spans = []
        for nbytes in asked[lane]:
            with device.disk_io(lane, nbytes) as start:
                pass
            spans.append((start - origin, time.perf_counter() - origin))
        return spans

    origin = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        measured = [span for spans in pool.map(transfer, asked) for span in spans]
    assert_near(measured, list(zip(*run_tasks(tasks, rates), strict=True)))


def test_a_tensor_waits_for_the_memory_of_those_that_queued_work_still_reads() -> None:
    device = EmulatedDevice(FAST, capacity=1500)
    read, fits, not_at_all = (torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (1000, 600, 1000))
    device.count(read)
    may_end = threading.Event()
    device.launch(0, may_end.wait, 0)
    device.copy(Op.GRADIENT, 0, [(torch.zeros_like(read), read)], [device.launch(0, lambda: None, 0), *device.fence()])
    del read
    threading.Timer(0.05, may_end.set).start()
    device.count(fits)
    with pytest.raises(torch.OutOfMemoryError, match="a tensor of 1000 bytes was made, 900 of 1500 free"):
        device.count(not_at_all)
