"""What the optimizer says of itself: explain(), metrics() and the log."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from conftest import mlp, profile, train
from torch.optim import AdamW

from dos import DOSAdam, EmulatedDevice

pytestmark = pytest.mark.usefixtures("one_kernel_thread")

CAPACITY = 10**6
STATE = 12 * sum(p.numel() for p in mlp().parameters())


SLOW = profile(
    cpu_update_rate=1e6, h2d_bandwidth=2e6, d2h_bandwidth=2e6, h2d_bandwidth_duplex=2e6, d2h_bandwidth_duplex=2e6
)
"""An update takes long enough to be seen, and streaming does not pay."""


def slow(**options: object) -> tuple[torch.nn.Module, DOSAdam, EmulatedDevice]:
    """On a slow machine."""
    device = EmulatedDevice(SLOW, capacity=CAPACITY)
    model = mlp()
    return model, DOSAdam(model.parameters(), subgroup_size=300, device=device, **options), device  # type: ignore[arg-type]


def test_explain_names_plan_memory_prediction_measurement_and_bound() -> None:
    model, optimizer, _ = slow(memory_budget=STATE // 2)
    train(model, optimizer, 3)
    text = optimizer.explain()
    for expected in ("Plan:", "gpu_resident", "Memory:", "the device itself", "Measured:", "Predicted:", "Bound:"):
        assert expected in text
    assert "is the bottleneck" in text
    assert "Formats: 100.0% float32; 12 bytes of state per parameter" in text


def test_explain_without_an_accelerator_or_a_step() -> None:
    model = mlp()
    optimizer = DOSAdam(model.parameters())
    assert "No step" in optimizer.explain()
    train(model, optimizer, 1)
    assert "on the host" in optimizer.explain()
    assert optimizer.metrics() == {}


def test_metrics_are_plain_numbers_that_add_up() -> None:
    model, optimizer, _ = slow(memory_budget=STATE // 2)
    train(model, optimizer, 3)
    metrics = optimizer.metrics()
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
    shares = [metrics[f"share_{placement}"] for placement in ("cpu", "gpu_streamed", "gpu_resident")]
    assert sum(shares) == pytest.approx(1.0)
    assert 0.4 < metrics["share_gpu_resident"] <= 0.5
    assert metrics["memory_total_bytes"] == CAPACITY
    assert metrics["memory_held_bytes"] >= metrics["share_gpu_resident"] * STATE
    assert metrics["memory_free_bytes"] + metrics["memory_held_bytes"] <= CAPACITY
    assert metrics["bound_s"] <= metrics["predicted_s"] * 1.001
    assert metrics["exposed_s"] > 0
    assert metrics["update_s"] > 0


def test_policies_without_a_profile_predict_nothing() -> None:
    model, optimizer, _ = slow(policy="cpu")
    train(model, optimizer, 1)
    assert "predicted_s" not in optimizer.metrics()
    assert "Predicted: nothing" in optimizer.explain()
    n = sum(p.numel() for p in model.parameters())
    assert optimizer.metrics()["d2h_bytes"] == optimizer.metrics()["h2d_bytes"] == 4 * n


def test_the_log_has_a_line_for_each_change_of_plan_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    demand = [0]
    model = mlp()
    device = EmulatedDevice(SLOW, capacity=int(1.5 * STATE), neighbour=lambda: demand[0])
    optimizer = DOSAdam(model.parameters(), subgroup_size=300, device=device)
    with caplog.at_level(logging.INFO, logger="dos.accelerator"):
        train(model, optimizer, 8)
        quiet = [r for r in caplog.records if r.name == "dos.accelerator"]
        assert len(quiet) == 1
        demand[0] = STATE
        train(model, optimizer, 12)
    lines = [r for r in caplog.records if r.name == "dos.accelerator"]
    assert len(quiet) < len(lines) <= len(quiet) + 12
    assert "plan changed: memory for state" in lines[-1].getMessage()
    assert lines[-1].metrics["memory_total_bytes"] == device.capacity  # type: ignore[attr-defined]


def test_explaining_changes_nothing() -> None:
    model, optimizer, _ = slow()
    other = mlp()
    reference = AdamW(other.parameters())
    for step in range(4):
        train(model, optimizer, 1, first_step=step)
        train(other, reference, 1, first_step=step)
        optimizer.explain()
        optimizer.metrics()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
