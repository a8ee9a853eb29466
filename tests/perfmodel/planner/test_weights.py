"""The planner with weights that stream: memory, times and the best batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from experiments.paper.arithmetic import MODELS
from perfmodel.answers import MOST_PLACED, MOST_SIMULATED
from perfmodel.plan import Placement
from perfmodel.planner.fastest import fastest_batch
from perfmodel.planner.memory import WEIGHT_WINDOW, host_bytes
from perfmodel.planner.outcome import FUSED, adaptive_outcome, outcomes
from perfmodel.planner.question import MARGIN, Question
from perfmodel.planner.situation import DEVICE, Situation
from perfmodel.planner.transformer import Transformer
from perfmodel.planner.whatif import most, remedies
from tests.support import blocks, planner
from tests.support.devices import Pinning
from tests.support.planner import answer, text

GIB = 2**30
LLAMA, QWEN = (Transformer.from_config(MODELS[name]) for name in ("Llama 3.1 8B", "Qwen2.5 14B"))
LINE = "--params 8e9 --machine rtx-4090 --checkpointing --offload-gradients --fused-loss --subgroup-size 280M"


def question(weights: str = "stream", model: Transformer = LLAMA, **settings: Any) -> Question:
    """Llama 3.1 8B on a desktop, one micro-batch in each step."""
    usual = {"weights": weights, "accumulation": False, "offload_gradients": True, "fused_loss": True}
    usual["chosen_size"] = 140_000_000  # searched faster than by many
    return planner.question(1e9, "rtx_4090_desktop", **{**usual, **settings}).replace(model=model)


def test_the_device_has_a_window_of_blocks_and_the_weights_outside_blocks() -> None:
    stay, stream = (Situation(question(weights)) for weights in ("stay", "stream"))
    block = 2 * LLAMA.block_numel
    assert LLAMA.outer + LLAMA.layers * LLAMA.block_numel == LLAMA.numel
    assert stream.device.weights == 2 * LLAMA.outer + WEIGHT_WINDOW * block
    assert stay.peak - stream.peak == (LLAMA.layers - WEIGHT_WINDOW) * block
    assert stream.room - stay.room == stay.peak - stream.peak
    work = stream.update_workload
    assert [load.nbytes for load in work.blocks] == [block] * LLAMA.layers
    assert work.numel == LLAMA.numel
    for load in work.blocks:
        assert sum(each.numel for each in work.subgroups[load.start : load.stop]) == LLAMA.block_numel
    assert work.blocks[0].start > 0, "the embedding"
    assert work.blocks[-1].stop < len(work.subgroups), "the output layer"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("state_format", [None, "float32"])
def test_host_memory_is_that_of_an_optimizer_with_such_weights(dtype: str, state_format: str | None) -> None:
    """To the byte, with all state on the host; and where it is elsewhere that of weights and gradients alone."""
    model = blocks.net({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    numel, streamed = (sum(p.numel() for p in part.parameters()) for part in (model, model.blocks))
    expected = question(dtype=dtype, state_format=state_format)
    for policy, state_numel in (("cpu", numel), ("resident", 0)):
        device = Pinning()
        optimizer = blocks.start(model, 0, device=device, policy=policy, state_format=state_format)
        for seed in range(2):
            blocks.loss(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        whole = dataclasses.replace(LLAMA, numel=numel)
        found = host_bytes(expected.replace(model=whole, chosen_size=0), state_numel).total
        outer = 0 if state_numel else (numel - streamed) * expected.value_bytes  # the planner counts all alike
        assert device.made == found - outer
        model = blocks.net(next(model.parameters()).dtype)


@pytest.mark.parametrize(("dtype", "state_format", "each"), [("bf16", None, 14), ("fp32", None, 16)])
def test_with_a_disk_weights_that_stream_and_gradients_take_host_memory(
    dtype: str, state_format: str | None, each: int
) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "state_format": state_format, "device_bytes": 40 * GIB}
    free = question(**settings, host_bytes=1024 * GIB)
    assert Situation(free).host_needed == each * LLAMA.numel == Situation(free.replace(weights="stay")).host_needed
    small = Situation(free.replace(host_bytes=int(each * LLAMA.numel * 0.7), disk_bytes=10**12))
    assert small.fits
    assert small.host_needed <= small.question.host_bytes - small.question.reserved_on_host  # type: ignore[operator]
    on_host = small.spill.numel * small.question.format.state_bytes + small.spill.window_bytes
    assert small.host_needed == on_host + 2 * LLAMA.numel * small.question.value_bytes


def test_frozen_weights_are_on_the_host_as_they_are() -> None:
    found = Situation(question(trainable=0.01))
    assert found.host_model == pytest.approx(2 * 0.99 * LLAMA.layers * LLAMA.block_numel, rel=1e-6)
    assert found.fits
    assert adaptive_outcome(found).fits


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("batch", [1, 6, 11])
def test_auto_is_no_slower_than_all_or_none(batch: int, micro_batches: int) -> None:
    ways = ("stay", "stream", "auto")
    settings = {"batch": batch, "micro_batches": micro_batches, "accumulation": micro_batches > 1}
    found = [adaptive_outcome(Situation(question(way, **settings))) for way in ways]
    *others, best = (each.seconds for each in found)
    assert best <= 1.01 * min(others)
    assert [bool(each.plan and each.plan.blocks_on_device) for each in found[:2]] == [False, False]


def test_weights_of_many_subgroups_are_planned_as_well_as_by_fixed_policies() -> None:
    asked = planner.question(34e9, weights="auto", offload_gradients=True, sequence=1)
    situation = Situation(asked)
    assert MOST_SIMULATED < len(situation.update_workload.subgroups) <= MOST_PLACED
    *others, best = outcomes(situation)
    assert best.seconds <= 1.01 * min(each.seconds for each in others)


def test_all_weights_stay_where_everything_fits() -> None:
    found = Situation(question("auto", device_bytes=140 * GIB))
    rows = {row.policy: row for row in outcomes(found)}
    best = rows["adaptive"]
    assert best.plan is not None
    assert len(best.plan.blocks_on_device) == LLAMA.layers
    assert best.shares[Placement.GPU_STREAMED] == 0
    assert rows[FUSED].fits
    assert best.seconds <= 1.002 * adaptive_outcome(Situation(found.question.replace(weights="stay"))).seconds
    assert not outcomes(Situation(found.question.replace(weights="stream")))[0].fits, "AdamW does not stream weights"


def test_micro_batches_fetch_all_weights_each() -> None:
    one, four = (Situation(question(micro_batches=count, accumulation=True)) for count in (1, 4))
    plan = adaptive_outcome(one).plan
    assert plan is not None
    more = four.busy_s(plan)["PCIe to the GPU"] - one.busy_s(plan)["PCIe to the GPU"]
    streamed = 2 * LLAMA.layers * LLAMA.block_numel
    assert more == pytest.approx(3 * 2 * streamed / one.profile.h2d_bandwidth, rel=0.1)


def test_larger_batches_fit_and_train_more_tokens() -> None:
    stay, auto = question("stay"), question("auto")
    assert most(auto, "batch") > 2.5 * most(stay, "batch")
    best = [fastest_batch(each) for each in (stay, auto)]
    assert best[0]
    assert best[1]
    rates = [asked.step_tokens / outcome.seconds for asked, outcome in best]
    assert rates[1] > 1.1 * rates[0]
    assert best[1][0].batch > most(stay, "batch")


def test_streaming_is_a_remedy_that_changes_no_result() -> None:
    found = remedies(Situation(question("stay", QWEN, host_bytes=256 * GIB, fused_loss=False, offload_gradients=False)))
    assert found[0].change == "with --offload-gradients --weights auto"
    assert not any(remedy.effect for remedy in found)
    assert all(remedy.outcome.fits for remedy in found)
    assert Situation(question("stay", QWEN)).lacking == [DEVICE]


def test_no_plan_has_more_than_the_device() -> None:
    for model in (LLAMA, QWEN):
        situation = Situation(question("auto", model, device_bytes=12 * GIB))
        plan, work = adaptive_outcome(situation).plan, situation.update_workload
        assert plan is not None
        there = situation.peak - work.weight_bytes(()) + work.weight_bytes(plan.blocks_on_device)
        there += work.state_bytes_of(plan.served(Placement.GPU_RESIDENT)) + plan.slots * work.slot_bytes
        assert there <= (1 - MARGIN) * 12 * GIB


def test_the_answer_has_the_weights_that_stream(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(f"{LINE} --host 128GB --weights auto")
    blocks_bytes = 2 * 8e9
    window = found["device"]["weights"]
    assert found["settings"]["weights"] == "auto"
    assert found["job"]["streamed_weight_bytes"] + found["device"]["weights_staying"] == pytest.approx(
        blocks_bytes - window, abs=window
    )
    shown = text(f"{LINE} --host 128GB --weights stream", capsys)
    assert "14.9 GiB of weights come from the host in each forward and each backward: attach(weights=...)." in shown
    assert "weights that may stream" in shown
    assert "weights that stream are on the GPU while their layer computes, 2 layers at a time" in shown
    stays = answer(f"{LINE} --host 128GB")
    assert stays["job"]["streamed_weight_bytes"] == 0
    lever = next(each for each in stays["levers"] if each["change"] == "--weights auto")
    assert lever["largest_batch"] > 2 * stays["largest_batch"]
