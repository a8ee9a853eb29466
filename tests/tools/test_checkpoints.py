"""Programs that save and load checkpoints look at which tensors share a storage: of a streamed model, none do."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dos import DOSAdam
from tests.support.blocks import WIDE, loss, net, start
from tests.support.disk import bytes_on_disk
from tests.support.training import assert_close_ulp, bits

safetensors = pytest.importorskip("safetensors.torch")

MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "none stays": (torch.float32, {"weights": 0}),
    "some stay": (torch.bfloat16, {"weights": 2, "policy": "stride:2"}),
    "all stay": (torch.bfloat16, {"weights": 4, "policy": 0.5, "state_format": "float32"}),
    "auto": (torch.float32, {"weights": "auto", "policy": "adaptive", "capacity": 30_000}),
    "codes": (torch.float32, {"weights": 0, "policy": "resident", "state_format": "int8"}),
    "disk": (torch.float32, {"weights": 2, "host_memory": 400_000}),
    "attached": (torch.bfloat16, {"weights": None, "policy": "stride:2", "offload_gradients": False}),
}


def new_model(mode: str) -> Any:
    return net(MODES[mode][0], blocks=4, width=WIDE if mode == "disk" else 16)


def trained(mode: str, folder: Path) -> tuple[Any, Any]:
    model, settings = new_model(mode), MODES[mode][1]
    optimizer = start(model, **settings, **({"disk": folder} if mode == "disk" else {}))
    step(model, optimizer)
    assert mode != "disk" or bytes_on_disk(folder)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_safetensors(mode: str, tmp_path: Path) -> None:
    model, optimizer = trained(mode, tmp_path / "disk")
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    before = bits(model.state_dict().values())
    step(model, optimizer)
    assert bits(model.state_dict().values()) != before
    safetensors.load_model(model, str(tmp_path / "model.safetensors"))
    assert bits(model.state_dict().values()) == before
    step(model, optimizer)


def resumed(model: nn.Module, optimizer: Any, folder: Path) -> list[torch.Tensor]:
    """The parameters after steps of which `load_state` undoes two, and writes of user code; all by Accelerate."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, device_placement=False)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(number: int) -> None:
        accelerator.backward(loss(model, number))
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1)
    accelerator.save_state(str(folder))
    saved = safetensors.load_file(str(folder / "model.safetensors"))
    assert saved.keys() == model.state_dict().keys()
    step(2)
    step(3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    accelerator.load_state(str(folder))
    assert bits(model.state_dict()[name] for name in saved) == bits(saved.values())
    step(4)
    step(5)
    return list(model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_accelerate(mode: str, tmp_path: Path) -> None:
    """As AdamW, where it computes the same; as on the host, in all."""
    dtype, settings = MODES[mode]
    model, plain = new_model(mode), new_model(mode)
    optimizer = start(model, **settings, **({"disk": tmp_path / "disk"} if mode == "disk" else {}))
    ours = resumed(model, optimizer, tmp_path / "ours")
    on_host = DOSAdam(plain.parameters(), lr=1e-2, state_format=settings.get("state_format"))
    assert bits(ours) == bits(resumed(plain, on_host, tmp_path / "host"))
    if dtype is torch.float32 and "state_format" not in settings:
        model = new_model(mode)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert_close_ulp(ours, resumed(model, adamw, tmp_path / "adamw"))


@pytest.mark.parametrize("mode", MODES)
def test_hub_writes_shards_without_copies(mode: str, tmp_path: Path) -> None:
    """Transformers' `save_pretrained` and diffusers' split in the same way."""
    hub = pytest.importorskip("huggingface_hub")
    model, _ = trained(mode, tmp_path / "disk")
    hub.save_torch_state_dict(model.state_dict(), tmp_path, max_shard_size=3000, safe_serialization=True)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3
    found = {name: value for shard in shards for name, value in safetensors.load_file(str(shard)).items()}
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in expected.values())


def pickled(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@pytest.mark.parametrize("mode", MODES)
def test_torch_saves_one_weight_alone(mode: str, tmp_path: Path) -> None:
    model, _ = trained(mode, tmp_path / "disk")
    plain = new_model(mode)
    assert pickled(model.blocks[0].out.bias) == pickled(plain.blocks[0].out.bias)
    assert abs(pickled(model.state_dict()) - pickled(plain.state_dict())) < 1000
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert bits(torch.load(tmp_path / "model.pt").values()) == bits(model.state_dict().values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained("some stay", tmp_path / "disk")
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    before = bits(model.state_dict().values())
    step(model, optimizer)
    found = {"model": model.state_dict()}
    dcp.load(found, checkpoint_id=tmp_path)
    model.load_state_dict(found["model"])
    assert bits(model.state_dict().values()) == before


def test_weights_that_user_code_has_tied_are_written_once(tmp_path: Path) -> None:
    model = net(torch.float32, blocks=4)
    model.blocks[1].out.weight = model.blocks[0].out.weight
    optimizer = start(model, 0)
    step(model, optimizer)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    saved = safetensors.load_file(str(tmp_path / "model.safetensors"))
    assert len(saved) == len(model.state_dict()) - 1
