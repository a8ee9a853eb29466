"""Updates of moments in codes have the bits of their definition, whoever does them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dos.kernels.adam import AdamStep
from dos.kernels.gpu_update import _adam_update_torch
from tests.support.arrays import FLOATS, KERNELS, STEPS
from tests.support.coded import PARAMETERS, assert_same_bytes, cloned, coded_arrays


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


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "torch"])
def test_an_infinite_scale_that_was_loaded_is_the_same_to_all(kernel: str) -> None:
    expected = coded_arrays(1 << 10, torch.float32, torch.float32, None, False, 0)
    assert expected.exp_avg_sq_scale is not None
    expected.exp_avg_sq_scale.fill_(torch.inf)
    expected.exp_avg_sq.zero_()
    ours = cloned(expected)
    KERNELS[kernel](ours, STEPS[0])
    _adam_update_torch(expected, STEPS[0])
    assert_same_bytes(ours, expected)
