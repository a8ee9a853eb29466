"""Updates of moments in codes have the bits of their definition, whoever does them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from coded import PARAMETERS, assert_same_bytes, cloned, coded_arrays
from test_split import KERNELS
from test_update import FLOATS, STEPS

from dos.kernels.adam import AdamStep
from dos.kernels.gpu_update import _adam_update_torch


@pytest.mark.parametrize("grad", FLOATS)
@pytest.mark.parametrize("step", [step for step in STEPS if not step.amsgrad])
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "torch"])
def test_kernels_write_the_same_codes(kernel: str, step: AdamStep, grad: torch.dtype) -> None:
    for seed, kind in enumerate(PARAMETERS):
        expected = coded_arrays(1 << 15, grad, *kind, seed)
        ours = cloned(expected)
        for count in range(3):  # also on what came of infinities and of the largest floats
            now = replace(step, step=step.step + count)
            KERNELS[kernel](ours, now)
            _adam_update_torch(expected, now)
            assert_same_bytes(ours, expected)
