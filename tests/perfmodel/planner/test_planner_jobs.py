"""`python -m perfmodel` about jobs of several GPUs and nodes: what it prints, and what a user can get wrong."""

from __future__ import annotations

import re

import pytest

from perfmodel.planner.main import main
from tests.support.planner import answer, refused

JOB = ("--params", "13e9", "--machine", "h100", "--ranks", "8", "--nodes", "2")


def test_a_job_of_several_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--hsdp", "--network", "400Gb", "--host", "1TiB"]) == 0
    text = capsys.readouterr().out
    assert "13B parameters in bf16 on 8 GPUs of 2 nodes, h100: fits; " in text
    assert re.search(r"[\d,]+ tokens/s of the job, [\d,]+ per GPU. What limits the job is network", text)
    assert "needed by a node" in text
    assert re.search(r"all-gather of weights, backward +within", text)
    assert re.search(r"all-reduce between replicas, backward +between", text)
    assert "collectives reach 40 GB/s per node between nodes: 80% of the 50 GB/s given (--network)" in text
    assert "collectives reach 360 GB/s per GPU within a node: 80% of NVLink 4 (--interconnect)" in text
    assert max(len(line.rstrip()) for line in text.splitlines() if "  " in line.strip()) <= 80, "tables fit a terminal"
    assert main([*JOB, "--fsdp", "--offload-parameters", "--host", "64GiB"]) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT. Parameters, gradients and optimizer state need 84.8 GiB of host memory on each node" in text
    assert "copies of weights, forward" in text
    assert "whose gradients add up on the host (--no-accumulation: one)" in text


def test_json_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *JOB, "--fsdp", "--offload-parameters", "--interconnect", "100GB/s", "--checkpointing")
    job, (policy,) = found["job"], found["policies"]
    assert (job["ranks"], job["nodes"], job["ranks_per_node"], job["replicas"]) == (8, 2, 4, 1)
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
    assert found["host"]["per_node"] == 4 * found["host"]["per_rank"] == found["host"]["all_ranks"] / 2
    assert found["host"]["per_rank"] == 14 * 13e9 / 8
    trained = job["forward_s"] + job["backward_s"]
    assert trained == pytest.approx(found["compute_s"] + job["exposed_communication_s"])
    assert found["device"]["all_resident_total"] is None
    assert found["settings"]["fabric"]["interconnect"] == 100e9


def test_one_rank_has_nothing_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    """What FSDP2, nodes and networks add is seen only where they are."""
    plain = answer(capsys, "--params", "1e9", "--machine", "h100")
    assert plain["job"]["collectives"] == []
    assert plain["device"]["gathered"] == plain["host"]["model"] == 0
    assert plain["job"]["forward_s"] + plain["job"]["backward_s"] == plain["compute_s"]
    assert main(["--params", "1e9", "--machine", "h100"]) == 0
    text = capsys.readouterr().out
    assert "collectives" not in text
    assert "tokens/s of the job" not in text
    assert answer(capsys, "--params", "1e9", "--machine", "h100", "--network", "1Gb")["policies"] == plain["policies"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--params 7e9 --machine h100 --ranks 8 --nodes 3", "--ranks 8 cannot be divided equally over 3 nodes"),
        (
            "--params 7e9 --machine h100 --nodes 2",
            "--ranks 1 cannot be divided equally over 2 nodes: it counts the GPUs of all",
        ),
        ("--params 7e9 --machine h100 --ranks 8 --fsdp --replicas 3", "--ranks 8 cannot be divided equally over 3 rep"),
        (
            "--params 7e9 --machine h100 --ranks 12 --nodes 3 --fsdp --replicas 2",
            "a replica on 6 GPUs does not fill nodes of 4 GPUs, nor do several fill one; choose --replicas such that",
        ),
        ("--params 7e9 --machine h100 --ranks 8 --replicas 2", "several replicas are FSDP2's (HSDP), found 2 without"),
        ("--params 7e9 --machine h100 --ranks 8 --hsdp", "on each of several nodes, found 1 node; add --nodes"),
        (
            "--params 7e9 --machine h100 --ranks 8 --nodes 2 --hsdp --replicas 4",
            "--hsdp keeps a replica of the model on each node, found --replicas 4 as well; choose one of them",
        ),
        ("--params 7e9 --machine h100 --ranks 8 --fsdp --zero 2", "found --fsdp with --zero 2; choose one of them"),
        ("--params 7e9 --machine h100 --offload-parameters", "is FSDP2's CPUOffloadPolicy, found without --fsdp; add"),
        (
            "--params 7e9 --machine h100 --fsdp --offload-parameters --offload-gradients",
            "gradients go to the host by themselves, found --offload-gradients as well; leave it out",
        ),
        (
            "--params 7e9 --machine rtx_4090_desktop --ranks 2 --nodes 2",
            "how fast the network between 2 nodes of rtx_4090_desktop is is not known: pass --network, such as 400Gb",
        ),
        (
            "--params 7e9 --machine h100 --network 400",
            "argument --network: expected a bandwidth per second such as 400Gb (bits) or 50GB (bytes), found '400'",
        ),
        ("--params 7e9 --machine h100 --interconnect=-9GB", "argument --interconnect: expected a bandwidth"),
        ("--params 7e9 --machine h100 --nodes 0", "argument --nodes: expected a number of 1 or more"),
        ("--params 7e9 --machine h100 --fsdp --replicas 0", "argument --replicas: expected a number of 1 or more"),
    ],
)
def test_what_a_user_can_get_wrong_about_jobs(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, arguments, message)
