"""`python -m perfmodel`: its output for one GPU and for jobs of several."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfmodel.bounds import lower_bound
from perfmodel.hardware import HardwareProfile
from perfmodel.planner.machine import ALIASES, CARDS, GPUS, LINKS, find_machine
from perfmodel.planner.main import main
from perfmodel.planner.outcome import outcomes
from perfmodel.planner.situation import Situation
from perfmodel.subgroups import automatic_subgroup_size
from tests.support import ROOT
from tests.support.planner import LLAMA_2_7B, answer, asked, parsed, text, typed

JOB = "--params 13e9 --machine h100 --ranks 8"


def test_a_7b_model_on_a_desktop() -> None:
    """Full fine-tuning on a GPU of 24 GB: exactly with a host of 128 GiB, with moments in codes on one of 64."""
    desktop = "--params 7e9 --machine rtx_4090_desktop --checkpointing --offload-gradients --host"
    for settings, most in (("128GiB", 14), ("64GiB --state-format int8", 8.5)):
        situation = Situation(asked(*f"{desktop} {settings}".split())[0])
        assert situation.fits
        assert situation.host_per_rank <= most * 7e9


@pytest.mark.parametrize(
    "settings",
    ["--params 7.99e9 --state-format int8 --host 64", "--params 9.794e9 --host 128"],
    ids=["60 of 64 GiB", "127.7 of 128 GiB"],
)
def test_state_that_the_constructor_would_refuse_does_not_fit(settings: str) -> None:
    """The system and the process take some, too. Memory without a unit is in GB: no machine has 128 bytes."""
    question, _ = asked(*settings.split(), *["--offload-gradients", "--machine", "a100-80", "--checkpointing"])
    situation = Situation(question)
    assert question.host_bytes == int(settings.split()[-1]) * 2**30
    assert situation.host_needed < question.host_bytes < situation.host_needed + question.reserved_on_host
    assert not situation.fits


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *[(name, "RTX 4090") for name in ("4090", "rtx4090", "RTX 4090", "RTX_4090", "NVIDIA GeForce RTX 4090")],
        *[(name, "A100 80 GB") for name in ("A100 80GB", "a100-80gb", "NVIDIA A100-SXM4-80GB", "A100_80")],
        *[("H100", "H100 80 GB"), ("NVIDIA H100 80GB HBM3", "H100 80 GB"), ("Tesla T4", "T4")],
        ("RTX A6000", "RTX A6000"),
        *[("RTX 3060 12GB", "RTX 3060 12 GB"), ("RTX 4070 Ti SUPER", "RTX 4070 Ti Super"), ("L40S", "L40S 48 GB")],
    ],
)
def test_machines_have_the_names_that_drivers_and_people_give_to_gpus(name: str, gpu: str) -> None:
    assert getattr(find_machine(name, None).gpu, "name", None) == gpu


def test_a_gpu_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text("--params 7e9 --machine rtx_4090_desktop --host 48GiB --checkpointing", capsys)
    assert "DOES NOT FIT. Without any optimizer state the GPU needs 28.5 GiB, 4.9 GiB more than it has." in shown
    remedy = "It fits with --offload-gradients --weights auto --host 128GB"
    assert f"{remedy}: the GPU then needs 3.2 GiB, the host 91.3 GiB" in shown
    assert "need 91.3 GiB of host memory, 49.3 GiB more than there is beside the 6.0 GiB of the system" in shown
    assert "The largest model of the usual shape that fits with these settings: about 3.22B parameters." in shown


def test_a_host_too_small_where_fused_adamw_needs_none(capsys: pytest.CaptureFixture[str]) -> None:
    short = "--params 1e9 --machine h100 --host 8GiB"
    shown = text(short, capsys)
    assert "11.0 GiB more than there is" in shown
    assert "The state of fused AdamW fits on the GPU, which needs none of that on the host." in shown
    assert answer(short)["alternative"] == {"policy": "fused AdamW", "speedup": None}
    whole = answer("--params 1e9 --machine h100")
    assert whole["alternative"] == {"policy": "fused AdamW", "speedup": pytest.approx(1.0, abs=0.03)}


def test_the_best_batch_that_fits_comes_before_the_one_that_was_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where the one that was asked for does not fit."""
    line = "--params 3e9 --machine rtx-4090 --checkpointing --subgroup-size 3e8"
    best, job = answer(line)["best_batch"], answer(line)["job"]
    _, _, first, assumed, second, *_ = text(line, capsys).splitlines()
    told = f"{best['tokens_per_s']:,.0f} tokens/s at the best batch that fits, {best['batch']} x 2,048 tokens ("
    assert first.startswith(f"3B parameters in bf16, rtx_4090_desktop: fits; {told}")
    assert assumed.startswith("That assumes that forward and backward reach 148 TFLOP/s per GPU: 90% of the RTX 4090's")
    assert second.startswith("The batch asked for, 1 x 2,048 tokens, takes ")
    assert f"{job['tokens_per_s']:,.0f} tokens/s, with policy" in second
    _, _, first, _, third, *_ = text(f"{line} --batch 100", capsys).splitlines()
    assert "DOES NOT FIT. Without any optimizer state the GPU needs" in first
    assert third.startswith(f"At a smaller batch it does: {told}")
    shown = text(f"{line} --seq 200000 --eager-attention", capsys)
    assert "tokens/s" not in shown
    assert "not even a small model fits, for lack of memory on the device: lower --batch or --seq." in shown
    shown = text(f"{line} --host 6.001GB", capsys)
    assert "not even a small model fits, for lack of host memory: choose a larger --host." in shown


def test_no_table_is_cut_where_the_output_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in a terminal that is narrower than they are, which wraps them."""
    monkeypatch.setenv("COLUMNS", "40")
    shown = text("--params 3e9 --machine h100 --ranks 8 --fsdp --checkpointing --host 1TiB", capsys)
    assert "\u2026" not in shown
    assert "resident" in shown
    assert max(map(len, shown.splitlines())) > 60


def test_options_may_be_written_in_several_ways() -> None:
    """`split` is the default by name, dtypes are torch's, too, and shares may be percentages."""
    line = "--params", "1e9", "--machine", "h100"
    plain, *named = (
        Situation(asked(*line, *more.split())[0])
        for more in ("", "--state-format split", "--dtype bfloat16", "--dtype bfloat16 --state-format split")
    )
    assert [each.host for each in named] == [plain.host] * 3
    assert [asked(*line, "--dtype", name)[0].dtype for name in ("float16", "float32")] == ["fp16", "fp32"]
    assert [asked(*line, "--utilisation", text)[0].flops_rate for text in ("0.4", "40%")] == [0.4 * 989e12] * 2
    assert asked(*line, "--offload-activations", "50%")[0].offload_activations == 0.5


@pytest.mark.parametrize("nested", [False, True], ids=["as saved", "within a configuration"])
def test_the_folder_of_a_model(nested: bool, tmp_path: Path) -> None:
    """As `save_pretrained` writes it; of models that also see, the part that reads and writes text."""
    seeing = {"model_type": "llava", "text_config": LLAMA_2_7B, "vision_config": {"hidden_size": 1024}}
    (tmp_path / "config.json").write_text(json.dumps(seeing if nested else LLAMA_2_7B))
    question, _ = asked(str(tmp_path), "--machine", "h100", "--trainable", "1%")
    assert question.model.numel == 6_738_415_616
    assert question.trained == pytest.approx(0.01 * 6_738_415_616, rel=1e-6)
    assert ("text_config" in question.model.assumed) is nested


@pytest.mark.parametrize(
    "line",
    [
        "--params 7e9 --machine rtx-4090 --checkpointing --host 70GB",
        pytest.param("--params 7e9 --machine a100-40 --batch 32 --host 128GB", marks=pytest.mark.slow),
        "--params 60e9 --machine h100 --ranks 8 --host 1024GB",
        "--params 70e9 --machine h100 --fsdp --offload-gradients --accumulation 4",
    ],
)
def test_proposals_can_be_typed(line: str) -> None:
    """As it is written, behind the options of the question, without those that it leaves out."""
    found = typed(line).remedies
    assert found
    for remedy in found:
        added, *left_out = remedy.change.removeprefix("with ").split(", without ")
        words = [word for word in line.split() if word not in left_out]
        assert asked(*words, *added.split())[0] == remedy.situation.question


def commands(page: str) -> list[list[str]]:
    """The planner's command lines in a page that need no file."""
    found = re.findall(r"python -m perfmodel( --[^`\n]*)", (ROOT / page).read_text().replace("\\\n", ""))
    return [line.split() for line in found]


def test_documented_commands_are_understood_and_the_readmes_fit() -> None:
    assert all([asked(*line) for line in commands(page)] for page in ("README.md", "docs/planning.md"))
    for line in commands("README.md"):
        assert any(outcome.fits for outcome in outcomes(Situation(asked(*line)[0])))


def test_documented_output_is_the_command_s(capsys: pytest.CaptureFixture[str]) -> None:
    """If it is not, run the command and paste its output, or the first lines of it and `...`."""
    page = (ROOT / "docs/planning.md").read_text()
    examples = re.findall(r"```\n\$ python -m perfmodel (.*)\n((?:.*\n)*?)```", page)
    assert examples
    for line, output in examples:
        assert main(line.split()) == 0
        printed = capsys.readouterr().out
        rows = [row.rstrip() for row in printed.splitlines()]
        shown = [row.rstrip() for row in output.splitlines()]
        assert rows[: len(shown) - 1] == shown[:-1] if shown[-1] == "..." else rows == shown
        assert max(len(row) for row in rows if "  " in row.strip()) <= 80, "tables fit a terminal"


def test_a_job_of_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    shown = text(f"{JOB} --fsdp --interconnect 40Gb --host 1TiB", capsys)
    assert "interconnect, at work for" in shown
    assert "reduce-scatter of gradients, backward" in shown
    assert "collectives reach 4 GB/s per GPU: 80% of the 5 GB/s given (--interconnect)" in shown
    shown = text(f"{JOB} --fsdp --offload-parameters --host 64GiB", capsys)
    assert "DOES NOT FIT. Parameters, gradients and optimizer state need 169.5 GiB of host memory, " in shown
    assert "copies of weights, forward" in shown
    assert "whose gradients add up on the host (--no-accumulation: one)" in shown


def test_json_of_a_job() -> None:
    found = answer(f"{JOB} --fsdp --offload-parameters --interconnect 100GB/s --checkpointing")
    job, (policy,) = found["job"], found["policies"]
    assert job["ranks"] == 8
    assert job["tokens_per_s"] == pytest.approx(8 * 2048 / policy["iteration_s"])
    assert job["tokens_per_s"] == pytest.approx(8 * job["tokens_per_s_per_gpu"])
    assert job["limit"] == max(job["busy_s"], key=job["busy_s"].__getitem__)
    assert job["interconnect"] == 80e9
    assert [(each["what"], each["part"]) for each in job["collectives"]] == [
        ("all-gather of weights", "forward"),
        ("all-gather of weights", "backward"),
        ("reduce-scatter of gradients", "backward"),
    ]
    assert all(each["bytes"] == 7 / 8 * 26e9 for each in job["collectives"])
    assert job["copied_bytes"] == 26e9 / 8
    assert answer("--params 1e9 --machine h100")["job"]["collectives"] == []
    assert found["host"]["per_node"] == 8 * found["host"]["per_rank"]
    assert found["host"]["per_rank"] == 14 * 13e9 / 8
    trained = job["forward_s"] + job["backward_s"]
    assert trained == pytest.approx(found["compute_s"] + job["exposed_communication_s"])
    assert found["device"]["all_resident_total"] is None
    assert found["settings"]["fabric"]["interconnect"] == 100e9


def test_json_has_it_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_2_7B))
    asked_for = [str(path), "--machine", "h100", "--batch", "2", "--seq", "1024", "--checkpointing"]
    assert main([*asked_for, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = parsed(line)
    numel = 6_738_415_616
    assert found["fits"] is True
    assert found["model"]["numel"] == numel
    assert found["settings"]["batch"] == 2
    assert found["settings"]["subgroup_size"] == automatic_subgroup_size(numel, found["settings"]["device_bytes"])
    assert found["host"]["per_rank"] == found["host"]["per_node"] == 14 * numel
    assert found["host"]["available"] is None
    assert found["device"]["weights"] == 2 * numel
    assert 0 < found["device"]["resident_state"] <= found["device"]["room_for_state"] < found["device"]["state"]
    policies = {row["policy"].split(",")[0].split()[0]: row for row in found["policies"]}
    assert list(policies) == ["fused", "CPU", "best", "stride", "adaptive"]
    assert policies["fused"]["update_s"] is None
    assert found["compute_s"] == pytest.approx(sum(asked(*asked_for)[0].flops) / (0.6 * 989e12))
    assert policies["adaptive"]["iteration_s"] == pytest.approx(found["compute_s"] + policies["adaptive"]["exposed_s"])
    assert any("60% of the H100 80 GB's peak of 989, by a published run" in line for line in found["assumptions"])
    assert found["smallest_lacks"] == []
    best = found["best_batch"]
    assert best["tokens_per_s"] == best["tokens_per_s_per_gpu"] >= found["job"]["tokens_per_s"]
    assert best["tokens_per_s"] == pytest.approx(best["batch"] * 1024 / best["iteration_s"])
    assert 2 < best["batch"] <= found["largest_batch"]


def test_a_machine_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    HardwareProfile.builtin("h100").save(path)
    mine = ("--params", "1B", "--machine", str(path), "--gpu", "16GiB")
    assumed, notes = asked(*mine)
    assert assumed.flops_rate == 0.9 * 44.1e12
    assert any("90% of the RTX 4060 Ti 16 GB's peak of 44.1, by a published run" in line for line in notes)
    assert any("no GPU was named, so that is the slowest known one of about its memory" in line for line in notes)
    assert asked(*mine, "--tflops", "100")[0].flops_rate == 100e12
    assert asked(*mine, "--tflops", "100", "--utilisation", "0.5")[0].flops_rate == 50e12
    assert asked("--params", "1e8", "--gpu", "4GiB")[0].profile.name == "unknown"


@pytest.mark.parametrize(
    ("machine", "profile", "device_gib"),
    [
        ("--machine a100-40", "a100_bound", 39.4),
        ("--machine a100-80", "a100_pcie_server", 79.1),
        ("--machine h100", "h100", 79.6),
        ("--machine rtx_4090_desktop --gpu 24GB", "rtx_4090_desktop", 23.6),
        ("--machine rtx-4090 --gpu 20GiB", "rtx_4090_desktop", 20),
        ("--machine rtx-5090", "RTX 5090", 31.3),
        ("--gpu 24GB", "unknown", 0.98 * 24),
        ("--gpu 24e9", "unknown", 24e9 / 2**30),
    ],
)
def test_names_of_machines(machine: str, profile: str, device_gib: float) -> None:
    """A GPU by its name; `24GB` of one as its data sheet says."""
    question, notes = asked("--params", "1e9", "--host", "64GB", *machine.split())
    assert question.profile.name == profile
    assert question.device_bytes == int(device_gib * 2**30)
    assert question.host_bytes == 64 * 2**30
    assert "--host 64GB: 64.0 GiB, as memory modules are sold" in notes
    assert any(line.startswith("--gpu 24GB") for line in notes) == ("24GB" in machine)


def test_gpus_of_a_data_sheet_alone() -> None:
    """Their own links and memory; of the host, assumptions, or the figures of a like machine."""
    guesses = HardwareProfile.builtin("unknown")
    for name, card in CARDS.items():
        question, notes = asked("--params", "1e8", "--machine", name, "--dtype", "fp16")
        rates = question.profile
        alone, duplex = LINKS[card.pcie]
        assert (rates.h2d_bandwidth, rates.h2d_bandwidth_duplex) == (alone * card.lanes / 16, duplex * card.lanes / 16)
        assert rates.gpu_update_rate == 0.8 * card.bandwidth / 28
        host = HardwareProfile.builtin("rtx_4090_desktop") if name == "rtx-5090" else guesses
        assert (rates.host_bandwidth, rates.cpu_update_rate) == (host.host_bandwidth, host.cpu_update_rate)
        said = "the host is that of rtx_4090_desktop" if name == "rtx-5090" else "the host's are cautious guesses"
        assert any(said in line for line in notes)
        assert 0.9 * card.gpu.nominal_gib < card.gpu.memory_gib < card.gpu.nominal_gib


@pytest.mark.parametrize(
    ("gpu", "dtype", "machine"),
    [("12GB", "bf16", "rtx-3060"), ("80GB", "bf16", "a100-80"), ("200GB", "bf16", "b200"), ("32GB", "fp16", "v100-32")],
)
def test_a_gpu_of_which_the_memory_is_known_computes_and_updates_as_one(gpu: str, dtype: str, machine: str) -> None:
    """Not an arithmetic of 2026 beside a memory of 2016."""
    known, named = (
        asked("--params", "1e8", "--dtype", dtype, *words)[0] for words in (("--gpu", gpu), ("--machine", machine))
    )
    assert known.flops_rate == named.flops_rate
    assert known.profile.gpu_update_rate == named.profile.gpu_update_rate


def test_gpus_of_the_page_are_those_that_are_known() -> None:
    page = (ROOT / "docs/planning.md").read_text()
    assert all(f"`{name}`" in page for name in CARDS)
    assert all(f"`{name}`" in page for name in ALIASES)
    for gpu in (*GPUS.values(), *(card.gpu for card in CARDS.values())):
        assert re.search(rf"{gpu.memory_gib}\b", page), f"memory of {gpu.name}"


@pytest.mark.parametrize("reference", [True, False])
def test_a_model_by_its_name_on_the_hub(reference: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From huggingface_hub's cache, of which the commit of `main` is the current one."""
    model = tmp_path / "hub" / "models--meta-llama--Llama-2-7b-hf"
    for commit, values in (("1111", {**LLAMA_2_7B, "vocab_size": 1000}), ("2222", LLAMA_2_7B)):
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").write_text(json.dumps(values))
    os.utime(model / "snapshots" / "1111" / "config.json", (0, 0) if not reference else None)
    if reference:
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("2222")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    name = "meta-llama/Llama-2-7b-hf"
    assert asked(name, "--machine", "h100")[0].model.numel == 6_738_415_616
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    elsewhere = re.escape(f"in {tmp_path / 'elsewhere'}; get it with hf download {name} config.json")
    with pytest.raises(ValueError, match=elsewhere):
        asked(name, "--machine", "h100")


@pytest.mark.slow
def test_assumptions_about_accumulation_and_the_loss() -> None:
    several, one, fused = (
        answer(f"--params 1e9 --gpu 24GB{more}") for more in ("", " --no-accumulation", " --fused-loss")
    )
    assert several["device"]["peak"] > one["device"]["peak"]
    assert any(line.startswith("gradient accumulation: steps of several") for line in several["assumptions"])
    assert any(line.startswith("one micro-batch in each step") for line in one["assumptions"])
    assert several["device"]["logits"] == 2048 * 32000 * 14 > 3 * fused["device"]["logits"]
    assert several["largest_sequence"] < fused["largest_sequence"]


@pytest.mark.parametrize(
    "gpu", [pytest.param("79GiB", marks=pytest.mark.slow), "24GiB", "79GiB --fsdp --offload-parameters"]
)
def test_a_picture(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = pytest.importorskip("perfmodel.planner.picture")
    monkeypatch.setattr(picture, "POINTS", 3)
    path = tmp_path / "plan.png"
    line = f"--params 7e9 --machine h100 --subgroup-size 350M --gpu {gpu} --plot {path}"
    assert main(line.split()) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_only_the_text_needs_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "perfmodel.planner.text", None)
    line = "--params 1e8 --machine h100"
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert "rich is needed to print the answer: pip install rich" in capsys.readouterr().err
    assert main([*line.split(), "--json"]) == 0
    assert parsed(capsys.readouterr().out)["fits"]


def test_without_numpy_the_command_says_what_to_install() -> None:
    """As in a new environment: -S leaves out all that is installed."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "perfmodel"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "python -m perfmodel: numpy is needed to plan: pip install numpy rich\n",
    )


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    """As a user runs it, with a torch that cannot be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('the planner must not need torch')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "perfmodel", "--params", "1e8", "--machine", "rtx_3090_desktop"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert re.match(r"Fastest with AdamW's results: [^\n]* [\d,]+ tokens/s", done.stdout)


@pytest.mark.parametrize(
    "line",
    [
        "--params 1.5e9 --gpu 16GB --host 64GB",
        "--params 8e9 --machine h100-80",
        "--params 3e9 --machine rtx-4090",
        "--params 3e9 --machine rtx-4090 --state-format int8",
    ],
)
def test_adaptive_is_ahead_and_no_update_is_shorter_than_the_bound_with_offloaded_gradients(line: str) -> None:
    question, _ = asked(*f"{line} --checkpointing --offload-gradients --fused-loss".split())
    situation = Situation(question)
    fitting = [each for each in outcomes(situation) if each.fits]
    *others, adaptive = fitting
    assert adaptive.policy == "adaptive"
    assert adaptive.seconds <= min(each.seconds for each in others)
    bound_s = lower_bound(situation.update_workload, situation.profile).seconds
    assert bound_s <= (1 + 1e-6) * min(each.update_s for each in fitting)
