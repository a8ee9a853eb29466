"""A plugin of pytest: what needs a GPU runs on the simulated accelerator. ``pytest -p tests.simdev.plugin tests/cuda``.

pytest loads it before it imports a test, so that all of `dos` finds the accelerator where torch.cuda was.
"""

from __future__ import annotations

import pytest

from experiments.simdev import as_cuda
from experiments.simdev.accelerator import FUNCTIONS, KIND, QUERY

as_cuda.install()

from dos.activations import offload  # noqa: E402
from dos.devices import Device, cuda  # noqa: E402
from dos.devices.runtime import runtime_of  # noqa: E402

cuda.TYPE, cuda.HANDLE, cuda.STREAM = KIND, "event_id", "stream_id"
cuda.event_query = lambda: QUERY
cuda.runtime = lambda: runtime_of(FUNCTIONS)

from dos.kernels.gpu_update import GpuBatch  # noqa: E402
from dos.planning import decisions  # noqa: E402
from dos.state import bit_sums  # noqa: E402
from perfmodel.hardware import HardwareProfile  # noqa: E402
from tests.simdev import kernel  # noqa: E402
from tests.support.gpu import SHRINK  # noqa: E402

offload.LEAST_BYTES //= SHRINK  # as the models are smaller

_measure, _measured = decisions.measure_minimum, list[HardwareProfile]()


def measure_once(device: Device | None) -> HardwareProfile:
    """What the first optimizer has measured: two cores take 2 s for that."""
    if not _measured:
        _measured.append(_measure(device))
    return _measured[0]


decisions.measure_minimum = measure_once

bit_sums.bits_kernel = lambda device: kernel.Bits
_by_torch = GpuBatch.prepare


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One launch of the CPU's kernel updates, but in the tests of the GPU's, which are there by torch operations."""
    GpuBatch.prepare = _by_torch if item.path.name == "test_gpu_kernels.py" else kernel.prepare  # type: ignore[method-assign]
