"""One line with exit status 2 for whatever a user can get wrong about `python -m perfmodel`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfmodel.hardware import HardwareProfile
from perfmodel.planner.main import main
from tests.support.planner import LLAMA_2_7B

FILES = {
    "torn": '{"hidden_size": 4096, ',
    "list": "[1]",
    "empty": "{}",
    "half": '{"n_embd": 768}',
    "experts": json.dumps({**LLAMA_2_7B, "num_local_experts": 8}),
    "negative": json.dumps({**LLAMA_2_7B, "num_hidden_layers": -1}),
    "text": json.dumps({**LLAMA_2_7B, "vocab_size": "many"}),
    "heads": json.dumps({**LLAMA_2_7B, "num_attention_heads": 33}),
    "gpt2": json.dumps({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}),
    "rates": json.dumps({**HardwareProfile.builtin("h100").to_json(), "h2d_bandwidth": -1.0}),
}
MISTAKES = """
 > expected a model: --params 7e9, or a Hugging Face config.json or name such as
gpt2.json --params 7e9 > expected one model, found --params and 'gpt2.json'; leave one out, and write units without a
--params 7e9 --gpu 24 GB > expected one model, found --params and 'GB'; leave one out, and write units without a space:
7e9 --gpu 24GB > expected a configuration, found '7e9'; for a size write --params 7e9
none.json > cannot read none.json: No such file or directory
. > cannot read config.json: No such file or directory
torn.json --gpu 9GiB > torn.json: Expecting property name
list.json --gpu 9GiB > list.json: a model's configuration is a JSON object, found list
empty.json --gpu 9GiB > empty.json: missing hidden_size, intermediate_size, num_hidden_layers
half.json --gpu 9GiB > half.json: missing n_layer, n_head, vocab_size; expected the config.json of
binary.json --gpu 9GiB > binary.json:
experts.json --gpu 9GiB > mixtures of experts are not supported, found num_local_experts
negative.json --gpu 9GiB > num_hidden_layers must be a whole number of 1 or more, found -1
text.json --gpu 9GiB > vocab_size must be a whole number of 1 or more, found 'many'
heads.json --gpu 9GiB > num_attention_heads must divide hidden_size, found 33 and 4096
gpt2.json --gpu 9GiB --seq 4096 > the model takes 1024 tokens at most, found sequences of 4096
org/no-model --gpu 24GB > no file 'org/no-model', and no configuration of a model of that name in
--params 7e9 > no GPU is named; pass --machine, such as rtx-4090, or its memory: --gpu 24GB
--params 7e9 --machine abacus > no machine 'abacus'; there are a100-40, a100-80
--params 7e9 --gpu H100 > argument --gpu: expected a size such as 24GiB, of 1 byte or more
--params 7e9 --machine A100 > no machine 'A100'; did you mean a100-40 or a100-80? For another GPU pass its memory (--gpu
--params 7e9 --machine v100 > no machine 'v100'; did you mean v100-16 or v100-32?
--params 7e9 --machine M3 > rtx-pro-6000, a10, b200, a6000, l4, t4, v100-16, v100-32. For another GPU pass its memory
--params 7e9 --machine rtx-4095 > no machine 'rtx-4095'; did you mean rtx-4090
--params 7e9 --machine 4090_desk > no machine '4090_desk'; did you mean rtx_4090_desktop
--params 7e9 --machine none.json > cannot read none.json: No such file or directory
--params 7e9 --machine torn.json > torn.json: Expecting property name
--params 7e9 --machine empty.json > empty.json: hardware profile of version None
--params 7e9 --machine rates.json > rates.json: profile 'h100': h2d_bandwidth must be a positive number
--params 7e9 --machine binary.json > binary.json: 'utf-8' codec can't decode
--params 8 --gpu 9GiB > argument --params: expected 10,000 parameters or more, found '8'; did you mean 8B, or 8M?
--params seven --gpu 9GiB > argument --params: expected a number such as 7e9, 7B or 350M, of 1 or more
--params 7e9 --gpu=-24GiB > argument --gpu: expected a size such as 24GiB, of 1 byte or more (and 1e+18 at most), found
--params 7e9 --gpu 1000GiB --machine h100 > --gpu 1000GiB is more than the H100 80 GB has, 79.6 GiB; for another GPU
--params 7e9 --machine h100 --host 12XB > argument --host: expected a size
--params 7e9 --gpu 1GB > 1.0 GiB of device memory are reserved, and there are 1003.5 MiB
--params 7e9 --gpu 24MiB > argument --gpu: expected 1GB or more, found '24MiB'; did you mean 24GiB?
--params 7e9 --machine h100 --host 128MB > argument --host: expected 1GB or more, found '128MB'; did you mean 128GB?
--params 7e9 --machine h100 --host 5GB > --host 5GB leaves nothing to the optimizer: the system and the processes
--params 7e9 --machine h100 --batch=-1 > argument --batch: expected a number
--params 7e9 --machine h100 --ranks 0 > argument --ranks: expected a number
--params 7e9 --machine h100 --dtype fp8 > argument --dtype: invalid choice: 'fp8'
--params 7e9 --machine h100 --tflops=-3 > argument --tflops: expected a number above 0 (1e-6 to 1e9), found '-3'
--params 7e9 --machine h100 --utilisation 1.5 > expected a share such as 0.4 or 40%, above 0 and up to 1, found '1.5'
--params 7e9 --machine h100 --utilisation 40 > expected a share such as 0.4 or 40%, above 0 and up to 1, found '40'
--params 7e9 --machine t4 > the T4 does not compute in bfloat16; choose --dtype fp16 or fp32
--params 7e9 --machine h100 --subgroup-size 1e4 > make 700,000 of them, more than 5,000; choose 1.4M or more
--params 1e8 --machine h100 --plot none/plan.png > cannot write none/plan.png: No such file or directory
--params 1e8 --machine h100 --plot plan.xyz > cannot write plan.xyz: Format 'xyz' is not supported
--params 7e9 --machine h100 --trainable 0% > --trainable takes parameters such as 40M, or their share such as 0.5%
--params 7e9 --machine h100 --trainable 0.5 > or their share such as 0.5%: expected a number such as 7e9
--params 7e9 --machine h100 --trainable 8B > --trainable 8B is more than the model's 7B parameters
--params 7e9 --machine h100 --frobnicate > unrecognized arguments: --frobnicate
--params 7e9 --machine h100 --offload-parameters > is FSDP2's CPUOffloadPolicy, found without --fsdp; add
--params 7e9 --machine h100 --fsdp --offload-parameters --offload-gradients > as well; leave it out
--params 7e9 --machine h100 --fsdp --offload-parameters --offload-activations 0.5 > as well; leave it out
--params 7e9 --machine h100 --fsdp --offload-parameters --disk 2TB --host 64GB > as well; leave it out
--params 7e9 --machine h100 --interconnect 400 > argument --interconnect: expected a bandwidth per second such as 400Gb
--params 7e9 --machine h100 --interconnect=-9GB > argument --interconnect: expected a bandwidth
--params 8e9 --machine rtx-4090 --weights auto > without --offload-gradients; add it
--params 8e9 --machine rtx-4090 --weights auto --offload-gradients --no-attach > with --no-attach; leave that out
--params 8e9 --machine rtx-4090 --weights auto --offload-gradients --ranks 2 > for one GPU without FSDP2
--params 8e9 --machine rtx-4090 --weights auto --fsdp --offload-parameters > --fsdp --offload-parameters
--params 7e9 --machine h100 --updates backward --ranks 2 > found it with --ranks; leave one of them out
--params 7e9 --machine h100 --updates backward --dtype fp16 --no-attach > found it with --dtype fp16 and --no-attach
--params 7e9 --machine h100 --disk 2TB > found --disk without --host; add it, such as 128GB
--params 7e9 --machine h100 --disk-read 3GB > of disks that state is on; add --disk, such as 2TB
--params 7e9 --machine h100 --disk 2TB --host 64GB --disk-read 7e9 > argument --disk-read: expected a bandwidth per
--params 7e9 --machine h100 --disk 2 --host 64GB > argument --disk: 2 would be 2 bytes; write the unit
"""


@pytest.mark.parametrize("line", MISTAKES.strip("\n").splitlines())
def test_mistakes_of_users(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = line.split(" > ")
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    for name, text in FILES.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m perfmodel: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err
