"""Programs that save and load checkpoints look at which tensors share a storage: of a streamed model, none do."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.blocks import loss, net, start
from tests.support.training import bits

safetensors = pytest.importorskip("safetensors.torch")

WEIGHTS = [0, 2, 4]


def trained(weights: Any) -> tuple[nn.Module, Any]:
    model = net(torch.float32, blocks=4)
    optimizer = start(model, weights)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_safetensors(weights: Any, tmp_path: Path) -> None:
    model, optimizer = trained(weights)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    before = bits(model.state_dict().values())
    step(model, optimizer)
    assert bits(model.state_dict().values()) != before
    safetensors.load_model(model, str(tmp_path / "model.safetensors"))
    assert bits(model.state_dict().values()) == before
    step(model, optimizer)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_accelerate(weights: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, optimizer = trained(weights)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator._models.append(model)
    accelerator._optimizers.append(optimizer)
    accelerator.save_state(str(tmp_path))
    saved = safetensors.load_file(str(tmp_path / "model.safetensors"))
    assert saved.keys() == model.state_dict().keys()
    before = bits(model.state_dict().values())
    step(model, optimizer)
    accelerator.load_state(str(tmp_path))
    assert bits(model.state_dict().values()) == before
    step(model, optimizer)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_hub_writes_shards_without_copies(weights: Any, tmp_path: Path) -> None:
    """Transformers' `save_pretrained` and diffusers' split in the same way."""
    hub = pytest.importorskip("huggingface_hub")
    model, _ = trained(weights)
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


@pytest.mark.parametrize("weights", WEIGHTS)
def test_torch_saves_one_weight_alone(weights: Any, tmp_path: Path) -> None:
    model, _ = trained(weights)
    plain = net(torch.float32, blocks=4)
    assert pickled(model.blocks[0].out.bias) == pickled(plain.blocks[0].out.bias)
    assert abs(pickled(model.state_dict()) - pickled(plain.state_dict())) < 1000
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert bits(torch.load(tmp_path / "model.pt").values()) == bits(model.state_dict().values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained(2)
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
