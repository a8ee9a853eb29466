"""The example for 24 GB: its loop and Trainer have AdamW's losses, go on where they were, and read state once."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from dos import DOSAdam, EmulatedDevice
from perfmodel import Placement, Plan, Workload
from perfmodel.adaptive import adaptive
from tests.support import ROOT
from tests.support.installed import needs
from tests.support.processes import python
from tests.support.training import FAST

pytestmark = [
    needs("transformers", "accelerate"),
    pytest.mark.usefixtures("one_core"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
LOOP, TRAINER = [], ["--trainer"]
STREAM = ["--weights", "auto"]
WAYS = pytest.mark.parametrize(
    "way",
    [
        pytest.param(LOOP, id="loop"),
        pytest.param(TRAINER, id="trainer"),
        pytest.param(STREAM, id="loop, streams", marks=pytest.mark.slow),
        pytest.param([*STREAM, *TRAINER], id="trainer, streams", marks=pytest.mark.slow),
    ],
)
"""Of those that stream, test_weights_stream has a fast one."""
LOOP_FIRST = pytest.mark.parametrize(
    "way", [pytest.param(LOOP, id="loop"), pytest.param(TRAINER, id="trainer", marks=pytest.mark.slow)]
)
Example = dict[str, Any]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Its names. `main` writes to the test's folder."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "full_finetune_24gb", raising=False)
    return dict(vars(importlib.import_module("full_finetune_24gb")))


class AdamWithMasters(AdamW):
    """torch's AdamW on float32 copies of bfloat16 parameters, whose gradients autograd adds up."""

    def __init__(self, params: Iterable[nn.Parameter], max_grad_norm: float, **settings: Any) -> None:
        self.low = list(params)
        self.max_grad_norm = max_grad_norm
        super().__init__([nn.Parameter(p.detach().float()) for p in self.low], lr=settings["lr"])

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        masters = self.param_groups[0]["params"]
        for p, master in zip(self.low, masters, strict=True):
            master.grad, p.grad = None if p.grad is None else p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, self.max_grad_norm)
        super().step()
        for p, master in zip(self.low, masters, strict=True):
            p.copy_(master)

    def attach(self, model: nn.Module, activations: str, weights: None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def explain(self) -> str:
        return ""


def test_there_is_nothing_to_resume(example: Example, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example["main"](["--tiny", "--resume", "--output", str(tmp_path)])
    assert f"there is no checkpoint in {tmp_path}" in capsys.readouterr().err


@LOOP_FIRST
def test_it_fits_where_nothing_else_does(way: list[str], example: Example) -> None:
    """Weights, gradients, what autograd saves and state count: neither AdamW fits, nor all gradients."""
    names = example["main"].__globals__
    devices: list[EmulatedDevice] = []

    def watched(numel: int) -> EmulatedDevice:
        devices.append(example["tiny_gpu"](numel))
        return devices[-1]

    names["tiny_gpu"] = watched
    losses = example["main"](["--tiny", "--steps", "6", *way])
    assert devices[0].occupied < devices[0].peak_bytes <= devices[0].capacity
    for settings in ({"policy": "resident"}, {"offload_gradients": False}):

        class Other(DOSAdam):
            def __init__(self, *args: Any, **given: Any) -> None:
                super().__init__(*args, **{**given, **settings})  # noqa: B023

        names["DOSAdam"] = Other
        with pytest.raises(torch.OutOfMemoryError):
            example["main"](["--tiny", "--steps", "6", *way])
    names["DOSAdam"] = DOSAdam
    names["tiny_gpu"] = lambda numel: EmulatedDevice(FAST, capacity=100 * numel)
    assert example["main"](["--tiny", "--steps", "6", *way]) == losses, "as on a device where all fits"
    if way is LOOP:
        names["DOSAdam"] = AdamWithMasters
        assert losses == pytest.approx(example["main"](["--tiny", "--steps", "6"]), rel=1e-3)
        assert sum(losses[-2:]) < sum(losses[:2])


def test_the_plan_of_tiny_keeps_streams_and_leaves_state_to_the_cpu(
    example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    """With forward and backward as long as on an idle machine: longer ones hide the update wherever it is done."""
    names = example["main"].__globals__
    plans: list[Plan] = []

    class Idle(DOSAdam):
        def __init__(self, *args: Any, device: EmulatedDevice, **given: Any) -> None:
            def decide(workload: Workload) -> Plan:
                plans.append(adaptive(dataclasses.replace(workload, forward_s=8e-3, backward_s=12e-3), device.profile))
                return plans[-1]

            super().__init__(*args, device=device, policy=decide, **given)

    names["DOSAdam"] = Idle
    example["main"](["--tiny", "--steps", "6"])
    assert set(plans[-1].placements) == set(Placement)
    assert "Nothing fits" not in capsys.readouterr().out


@LOOP_FIRST
def test_weights_stream_with_the_same_losses_where_they_do_not_fit(way: list[str], example: Example) -> None:
    names = example["main"].__globals__
    devices: list[EmulatedDevice] = []
    blocks: list[int] = []

    def watched(numel: int) -> EmulatedDevice:
        devices.append(example["tiny_gpu_for_streaming"](numel))
        assert devices[-1].capacity < 2 * numel, "of weights"
        return devices[-1]

    class Watched(DOSAdam):
        def explain(self) -> str:
            blocks.append(self.metrics()["blocks_on_device"])
            return super().explain()

    names["tiny_gpu_for_streaming"], names["DOSAdam"] = watched, Watched
    arguments = ["--tiny", "--steps", "3", "--batch", "2", *way]
    losses = example["main"]([*arguments, *STREAM])
    assert devices[0].peak_bytes <= devices[0].capacity
    assert blocks[0] < 6
    names["DOSAdam"] = DOSAdam
    names["tiny_model"] = lambda: example["tiny_model"](layers=6)
    names["tiny_gpu"] = lambda numel: EmulatedDevice(FAST, capacity=100 * numel)
    assert example["main"](arguments) == losses


@LOOP_FIRST
def test_state_that_the_host_has_no_room_for_is_on_disk(way: list[str], example: Example, tmp_path: Path) -> None:
    """With the same losses. The host has 6 of the 14 bytes that a parameter takes, 8 where 2 are the weights."""
    names, on_disk = example["main"].__globals__, []
    model = example["tiny_model"](layers=6) if STREAM[0] in way else example["tiny_model"]()
    host_memory = (8 if STREAM[0] in way else 6) * sum(p.numel() for p in model.parameters())

    class Small(DOSAdam):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given, host_memory=host_memory)

        def explain(self) -> str:
            on_disk.append(self.metrics()["disk_held_bytes"])
            return super().explain()

    arguments = ["--tiny", "--steps", "3", *way]
    expected = example["main"](arguments)
    names["DOSAdam"] = Small
    assert example["main"]([*arguments, "--disk", str(tmp_path / "state")]) == expected
    assert on_disk[0] > 0


def test_tiny_computes_in_one_thread(example: Example) -> None:
    """Threads of OpenMP that spin between operations would take the cores of the optimizer's threads."""
    torch.set_num_threads(2)
    example["main"](["--tiny", "--steps", "1"])
    assert torch.get_num_threads() == 1


@WAYS
def test_what_was_saved_goes_on_with_the_same_losses(
    way: list[str], example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example["main"].__globals__["SHARD"] = "200KB"
    arguments = ["--tiny", "--steps", "5", *way]
    whole = example["main"]([*arguments, "--save-every", "3"])
    assert TRAINER[0] not in way or len(list((tmp_path / "out" / "checkpoint-3").glob("*.safetensors"))) > 1
    shutil.rmtree(tmp_path / "out" / "checkpoint-5", ignore_errors=True)  # Trainer's, of the end
    load, mapped = torch.load, set()

    def noted(file: Any, *given: Any, mmap: bool | None = None, **options: Any) -> Any:
        mapped.update({Path(file).name} if mmap else ())
        return load(file, *given, mmap=mmap, **options)

    monkeypatch.setattr(torch, "load", noted)
    resumed = example["main"]([*arguments, "--resume"])
    # Else all state is in memory twice: test_resuming_takes_the_memory_of_training, which is slow, measures that.
    assert mapped == {"optimizer.pt" if TRAINER[0] in way else "checkpoint.pt"}
    assert resumed[-2:] == whole[-2:]
    assert len(resumed) == (5 if TRAINER[0] in way else 2)  # of which Trainer's log has the earlier ones


def test_the_loss_in_chunks_is_that_of_the_model(example: Example) -> None:
    model = example["tiny_model"]().float()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=tokens, labels=tokens).loss
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
    example["main"].__globals__["CHUNK"] = 7
    loss = example["WithLoss"](model)(tokens)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), expected_gradients)


def test_rows_of_tokens_are_whole_sequences_of_the_text(example: Example, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvw"
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(str(tmp_path / "model"))
    (tmp_path / "text").write_text(" ".join(letters))
    options = example["parse"](["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text"), "--length", "5"])
    assert torch.equal(example["rows_of_tokens"](options), torch.arange(20).view(4, 5))


PEAK = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
import torch
import full_finetune_24gb as example
from transformers import LlamaConfig, LlamaForCausalLM, Trainer
from tests.support.training import FAST

how, layers, arguments = sys.argv[2], int(sys.argv[3]), sys.argv[4:]

def model():
    torch.manual_seed(0)
    shape = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=8)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, dtype="bfloat16", **shape)).bfloat16()

def anonymous():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon:")).split()[1])

def watch():
    while True:
        peaks.append(anonymous())
        time.sleep(0.002)

if how == "whole":
    example.LargeModelTrainer._load_optimizer_and_scheduler = Trainer._load_optimizer_and_scheduler
    load = torch.load
    torch.load = lambda *a, mmap=None, **k: load(*a, **k)
built = model()
example.tiny_model = lambda: built
example.tiny_gpu = lambda numel: example.EmulatedDevice(FAST, capacity=3 * numel, occupied=2 * numel)
numel = sum(p.numel() for p in built.parameters())
peaks = [anonymous()]
threading.Thread(target=watch, daemon=True).start()
example.main(["--tiny", "--accumulation", "1", *arguments])
print("\\nPEAK", numel, max(peaks) - peaks[0], flush=True)
os._exit(0)
"""


def host_peak(how: str, layers: int, *arguments: str) -> tuple[int, int]:
    """A process trains; how many parameters, and its most host memory beside the model, without pages of files.

    how: "mmap" as the example reads checkpoints, "whole" as Trainer does.
    """
    said = python("-c", PEAK, ROOT / "examples", how, str(layers), *arguments)
    _, numel, peak = said.splitlines()[-1].split()
    return int(numel), int(peak)


@pytest.mark.slow
def test_resuming_takes_the_memory_of_training(tmp_path: Path) -> None:
    """And not that of a second copy of state, of 10 bytes per parameter."""
    settings = ["--output", str(tmp_path / "out"), "--trainer"]
    numel, fresh = host_peak("mmap", 1, "--steps", "2", "--save-every", "2", *settings)
    _, resumed = host_peak("mmap", 1, "--steps", "3", "--resume", *settings)
    assert resumed < fresh + numel


@pytest.mark.slow
def test_resuming_as_trainer_does_takes_twice_the_memory(tmp_path: Path) -> None:
    """So that the test above would see it."""
    settings = ["--output", str(tmp_path / "out"), "--trainer"]
    numel, fresh = host_peak("mmap", 1, "--steps", "2", "--save-every", "2", *settings)
    _, twice = host_peak("whole", 1, "--steps", "3", "--resume", *settings)
    assert twice > fresh + 6 * numel


if __name__ == "__main__":  # what docs/any-size.md says: python -m tests.project.test_full_finetune_example FOLDER
    for way in (LOOP, TRAINER):
        settings = ["--output", str(Path(sys.argv[1]) / "-".join(["out", *way])), *way]
        print(way, "fresh", host_peak("mmap", 6, "--steps", "2", "--save-every", "2", *settings))
        for how in ("mmap", "whole"):
            print(way, how, host_peak(how, 6, "--steps", "3", "--resume", *settings))
