"""A plugin of pytest: what needs a GPU runs on the simulated accelerator. ``pytest -p tests.simdev.plugin tests/cuda``.

pytest loads it before it imports a test, so that all of `dos` finds the accelerator where torch.cuda was.
"""

from __future__ import annotations

from tests.simdev import as_cuda
from tests.simdev.accelerator import KIND

as_cuda.install()

from dos.activations import offload  # noqa: E402
from dos.devices import cuda  # noqa: E402

cuda.TYPE = KIND

from tests.support.gpu import SHRINK  # noqa: E402

offload.LEAST_BYTES //= SHRINK  # as the models are smaller
