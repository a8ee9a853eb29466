"""A batch of runs against the same runs one by one, to the bit, however it is run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dos.kernels.adam import taken
from dos.kernels.gpu_update import MOST_TABLES, GpuBatch, SentTable
from dos.kernels.update import AdamArrays, AdamBatch, adam_update, instruction_sets
from tests.support.arrays import (
    FLOATS,
    STEP,
    STEPS,
    assert_alike,
    assert_same_bits,
    clone,
    mixed_arrays,
    random_arrays,
    random_bits,
    splitting,
    update_batch,
)
from tests.support.coded import coded_arrays

Run = list[Tensor | None]
AMSGRAD = replace(STEP, amsgrad=True)

SPLIT = torch.bfloat16, torch.int16
kinds = st.tuples(
    st.sampled_from([0, 1, 15, 16, 31, 33, 63, 64, 65, 300, 17_000, 40_001]),
    st.sampled_from(FLOATS),
    st.sampled_from(
        [(torch.float32, out) for out in (None, *FLOATS)] + [(torch.bfloat16, None), (torch.float16, None), SPLIT]
    ),
    st.sampled_from(range(len(STEPS))),
    st.booleans(),
)


def made(
    numel: int, grad: torch.dtype, param: torch.dtype, out: torch.dtype | None, seed: int, amsgrad: bool = True
) -> Run:
    """A run, with room for amsgrad by default."""
    return random_arrays(numel, AMSGRAD if amsgrad else STEP, grad, param, out, seed)


def arrays(runs: list[Run]) -> list[AdamArrays]:
    return [AdamArrays(*run) for run in runs]


@settings(max_examples=60)
@given(
    drawn=st.lists(kinds, max_size=9),
    threads=st.integers(1, 3),
    shift=st.integers(0, 3),
    where=st.sampled_from([*instruction_sets(), "torch"]),
    seed=st.integers(0, 1000),
)
def test_a_batch_has_the_bits_of_its_runs(
    drawn: list[tuple[int, torch.dtype, tuple[torch.dtype, torch.dtype | None], int, bool]],
    threads: int,
    shift: int,
    where: str,
    seed: int,
) -> None:
    """Of those with whole masters, where they are split. At any alignment, by any number of threads."""
    which = [number for *_, number, _ in drawn]
    whole = [
        mixed_arrays(numel + shift, AMSGRAD, grad, seed + i)
        if output == SPLIT
        else AdamArrays(*made(numel + shift, grad, *output, seed + i))
        for i, (numel, grad, output, _, _) in enumerate(drawn)
    ]
    copies = [
        splitting(run) if output == SPLIT else AdamArrays(*clone(list(run)))
        for run, (_, _, output, _, _) in zip(whole, drawn, strict=True)
    ]
    runs, expected = ([run.slice(shift, len(run.param)) for run in of] for of in (copies, whole))
    batch = AdamBatch(runs)
    for repeat in range(2):
        for run, (*_, number, skipped) in zip(expected, drawn, strict=True):
            if not (skipped and repeat):
                adam_update(run, step=STEPS[number], threads=1, isa="portable")
        # The second time gradients are elsewhere, of another type, or missing.
        addresses = [
            0 if repeat and skipped else run.grad.data_ptr() for run, (*_, skipped) in zip(runs, drawn, strict=True)
        ]
        batch.point(addresses, [run.grad.dtype for run in runs])
        update_batch(batch, where, threads, which)
        for ours, theirs in zip(runs, expected, strict=True):
            if ours.rest is None:
                assert_same_bits(list(ours), list(theirs))
            else:
                assert_alike(ours, theirs)
        gradients = [torch.cat([torch.zeros(3), torch.ones(len(run.param))])[3:] for run in runs]
        runs, expected = (
            [run._replace(grad=grad) for run, grad in zip(of, gradients, strict=True)] for of in (runs, expected)
        )


@pytest.mark.parametrize("where", [*instruction_sets(), "torch"])
@pytest.mark.parametrize("out", FLOATS)
def test_masters_take_over_what_user_code_has_written(out: torch.dtype, where: str) -> None:
    """And those that are the parameter, once rounded, stay; of the runs that do not take over, all do."""
    runs = [mixed_arrays(numel, STEP, torch.bfloat16, seed) for seed, numel in enumerate((300, 17_000, 64))]
    runs += [coded_arrays(8 * 128, torch.bfloat16, torch.float32, out, False, seed) for seed in (4, 5)]
    runs = [run._replace(out=run.param.to(out, copy=True)) for run in runs]
    for run in runs:
        assert run.out is not None
        run.out[::3] = random_bits(len(run.out[::3]), out, torch.Generator().manual_seed(len(run.out)))
    takes = [True, True, False, True, False]
    expected = [AdamArrays(*clone(list(run))) for run in runs]
    for run, takes_over in zip(expected, takes, strict=True):
        if takes_over and run.out is not None:
            master = taken(run.param, run.out)
            assert 0.25 < float((master != run.param).float().mean()) < 0.4
            run.param.copy_(master)
        adam_update(run, step=STEP, isa="portable")
    batch = AdamBatch(runs)
    batch.take_written(takes)
    update_batch(batch, where, 2, [0] * len(runs))
    for ours, theirs in zip(runs, expected, strict=True):
        assert_same_bits(list(ours), list(theirs))


def test_which_masters_take_over_lasts_until_it_is_said_anew() -> None:
    master, grad, copy = torch.zeros(128), torch.zeros(128), torch.zeros(128, dtype=torch.float16)
    run = AdamArrays(grad, master, torch.zeros(128), torch.zeros(128), out=copy)
    batch = AdamBatch([run])
    for takes, found in ((None, 1.0), ([False], 2.0), (None, 3.0), (None, 4.0)):
        batch.take_written(takes)
        copy.fill_(found)
        batch.update(STEP)
        assert (takes is None) == bool((master - found).abs().max() < 0.5)


def clone_all(runs: list[Run]) -> list[Run]:
    return [clone(run) for run in runs]


def test_settings_of_the_step_before_are_forgotten() -> None:
    runs = [made(70, torch.float32, torch.float32, None, seed) for seed in range(2)]
    expected, batch = clone_all(runs), AdamBatch(arrays(runs))
    batch.update([STEP, AMSGRAD], [1, 1])
    batch.update(STEP)
    for ours, theirs in zip(runs, expected, strict=True):
        adam_update(AdamArrays(*theirs), step=AMSGRAD)
        adam_update(AdamArrays(*theirs[:4]), step=STEP)
        assert_same_bits(ours, theirs)


def test_a_table_is_sent_where_it_changed() -> None:
    sent, rows = SentTable(torch.device("cpu")), np.arange(22).reshape(2, 11)
    first = sent.send(rows)
    assert sent.send(rows.copy()) is first
    assert sent.send(rows + 1).tolist() == (rows + 1).tolist()
    assert first.tolist() == rows.tolist(), "what may still be read was written"


def test_a_table_is_not_sent_again_while_state_alternates_between_slots() -> None:
    sent, rows = SentTable(torch.device("cpu")), np.arange(22).reshape(2, 11)
    first, *others = [sent.send(rows + slot) for slot in range(MOST_TABLES)]
    for _ in range(3):
        assert sent.send(rows) is first
        again = [sent.send(rows + slot) for slot in range(1, MOST_TABLES)]
        assert list(map(id, again)) == list(map(id, others))
    sent.send(rows - 1)
    assert sent.send(rows + 1) is others[0]
    assert sent.send(rows) is not first, "the one that was used longest ago gives way"


def test_a_table_is_sent_again_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which does not wait for what was sent on the first one."""
    streams = iter([SimpleNamespace(cuda_stream=number) for number in (1, 1, 2)])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: next(streams))
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    monkeypatch.setattr(Tensor, "to", lambda tensor, *where, non_blocking: tensor.clone())
    sent, rows = SentTable(torch.device("cuda")), np.arange(22)
    first = sent.send(rows)
    assert sent.send(rows) is first
    assert sent.send(rows) is not first


def test_a_batch_follows_its_arrays_to_other_memory() -> None:
    """Each goes to where the next one was, as when state passes through a slot that begins elsewhere."""
    expected = random_arrays(64, STEP, torch.float32, torch.float32, None, seed=0)[:4]
    memory = torch.zeros(5, 64)
    batch = AdamBatch([AdamArrays(*memory[:4])])
    batch.follow([(memory[i].data_ptr(), memory[i + 1].data_ptr(), memory[i].nbytes) for i in range(4)])
    torch.stack(expected, out=memory[1:])
    batch.point([memory[1].data_ptr()])
    for _ in range(2):
        batch.update(STEP)
        adam_update(AdamArrays(*expected), step=STEP)
    assert_same_bits(list(memory), [torch.zeros(64), *expected])


@pytest.mark.parametrize("on_device", [False, True])
def test_memory_is_not_held(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that a subgroup keeps would keep the slot from being freed through which its state has passed."""
    run = made(8, torch.float32, torch.float32, None, seed=0)
    batch = AdamBatch(arrays([run]))
    if on_device:
        monkeypatch.setattr(batch, "_gpu", GpuBatch(torch.device("cpu")))
    batch.update(STEP)
    assert [array._use_count() for array in run if array is not None] == [1] * 5


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda batch: batch.point([0]), ValueError, "addresses: expected 2, found 1"),
        (lambda batch: batch.point([0, 0], [torch.float32]), ValueError, "dtypes: expected 2, found 1"),
        (lambda batch: batch.point([0, 0], [torch.float64] * 2), TypeError, "grad: expected .*, found torch.float64"),
        (lambda batch: batch.update(STEP, [0]), ValueError, "which: expected 2, found 1"),
        (lambda batch: batch.update([STEP], [0, 1]), ValueError, "which: expected 0 to 0, found 0 to 1"),
        (lambda batch: batch.update([STEP], [-1, 0]), ValueError, "which: expected 0 to 0, found -1 to 0"),
        (lambda batch: batch.update([]), ValueError, "which: expected 0 to -1, found 0 to 0"),
        (lambda batch: batch.update([STEP, AMSGRAD], [0, 1]), ValueError, "expected a tensor with amsgrad=True"),
        (lambda batch: batch.update(STEP, threads=-1), ValueError, "threads: expected at least 1, or 0"),
    ],
)
def test_bad_input(call, error: type[Exception], message: str) -> None:
    runs = [made(8, torch.float32, torch.float32, None, seed, amsgrad=False) for seed in range(2)]
    before = clone_all(runs)
    with pytest.raises(error, match=message):
        call(AdamBatch(arrays(runs)))
    for run, untouched in zip(runs, before, strict=True):
        assert_same_bits(run, untouched)


def test_runs_of_a_batch_are_on_one_device() -> None:
    here, there = ([torch.zeros(8, device=device) for _ in range(4)] for device in ("cpu", "meta"))
    with pytest.raises(ValueError, match="param: expected device cpu, found meta"):
        AdamBatch([AdamArrays(*here), AdamArrays(*there)])
