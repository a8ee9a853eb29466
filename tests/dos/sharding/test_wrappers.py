"""Parameters that wrap one dense tensor, as torchao's for training in low precision, train as with AdamW.

Others are refused: one tensor among several, or of another dtype, has not the parameter's values.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_map_only

from dos import DOSAdam, EmulatedDevice
from tests.support.ranks import Ranks
from tests.support.training import FAST

aten = torch.ops.aten
KEPT = {
    aten.t.default, aten.detach.default, aten.empty_like.default, aten.new_zeros.default, aten.slice.Tensor,
    aten.view.default, aten.as_strided.default, aten._to_copy.default, aten.clone.default,
}  # fmt: skip


class Low(Tensor):
    """As torchao's BitNetTrainingLinearWeight: operations see the tensor within, some results are wrapped again."""

    @staticmethod
    def __new__(cls, data: Tensor, *others: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=cls.dtype_of(data), device=data.device)

    @classmethod
    def dtype_of(cls, data: Tensor) -> torch.dtype:
        return data.dtype

    def __init__(self, data: Tensor, *others: Tensor) -> None:
        self._data = data
        self._others = others

    def __tensor_flatten__(self) -> tuple[list[str], list[object]]:
        return ["_data"], []

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: object) -> Any:
        return cls(inner["_data"])

    def __repr__(self, **_: object) -> str:
        return f"Low({self._data})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each._data, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return tree_map_only(Tensor, cls, out) if func in KEPT else out


class Quantised(Low):
    """Codes of another dtype."""

    @classmethod
    def dtype_of(cls, data: Tensor) -> torch.dtype:
        return torch.float32


class Scaled(Low):
    """A scale beside the tensor."""

    _scale: Tensor

    def __init__(self, data: Tensor, *others: Tensor) -> None:
        super().__init__(data)
        self._scale = torch.ones(())

    def __tensor_flatten__(self) -> tuple[list[str], list[object]]:
        return ["_data", "_scale"], []


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(dtype)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Low(layer.weight.detach()))
    return model


def values(model: nn.Module) -> list[Tensor]:
    return [(p._data if isinstance(p, Low) else p).detach().clone() for p in model.parameters()]


def backward(model: nn.Module, seed: int) -> None:
    dtype = model[0].bias.dtype  # type: ignore[index, union-attr]
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(x).float().square().mean().backward()


def trained(
    kind: Callable[..., Optimizer],
    *,
    dtype: torch.dtype = torch.float32,
    attach: bool = False,
    write: Callable[[Any], object] | None = None,
    **settings: Any,
) -> list[Tensor]:
    model = build(dtype)
    optimizer = kind(model.parameters(), lr=1e-2, **settings)
    if attach:
        optimizer.attach(model)  # type: ignore[attr-defined]
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if write is not None and step == 1:
            write(model[0].weight)
    if attach:
        optimizer.synchronize()  # type: ignore[attr-defined]
    return values(model)


def on(policy: Any, **more: Any) -> dict[str, Any]:
    return {"device": EmulatedDevice(FAST, capacity=10**7), "policy": policy, "subgroup_size": 100, **more}


MODES: list[Callable[[], dict[str, Any]]] = [
    dict,
    lambda: on("cpu"),
    lambda: on("resident"),
    lambda: on("stride:1", attach=True),
    lambda: on(0.5, offload_gradients=True, attach=True),
    lambda: {"state_format": "float32"},
    lambda: on("cpu", state_format="float32", attach=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_train_as_with_adamw_with_the_same_bits_wherever_state_is(dtype: torch.dtype) -> None:
    first, *others = (trained(DOSAdam, dtype=dtype, **mode()) for mode in MODES)
    for other in others:
        assert all(map(torch.equal, other, first))
    if dtype is torch.float32:
        torch.testing.assert_close(first, trained(AdamW), rtol=1e-5, atol=1e-7)


def test_they_train_with_the_same_bits_with_state_in_codes_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dos.rules.adamw.LEAST_CODED", 128)
    on_disk = on("cpu", disk=tmp_path, host_memory=70_000, attach=True)
    assert all(map(torch.equal, trained(DOSAdam, **on_disk), trained(DOSAdam)))
    first, *others = (
        trained(DOSAdam, state_format="int8", **mode)
        for mode in ({}, on("cpu"), on("resident"), on(0.5, offload_gradients=True, attach=True), on_disk)
    )
    assert any(not torch.equal(*each) for each in zip(first, trained(DOSAdam), strict=True))
    assert all(all(map(torch.equal, other, first)) for other in others)


WRITES: dict[str, Callable[[Any], object]] = {
    "detach": lambda p: p.detach().mul_(2),
    "data": lambda p: p.data.mul_(2),
    "within": lambda p: p._data.mul_(2),
    "foreach": lambda p: torch._foreach_mul_([p.detach()], 2),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", ["cpu", "resident"])
def test_writes_are_taken_over(write: str, policy: str) -> None:
    expected = trained(AdamW, write=WRITES["within"])
    torch.testing.assert_close(trained(DOSAdam, write=WRITES[write], **on(policy)), expected, rtol=1e-5, atol=1e-7)


def test_state_consists_of_plain_tensors_as_adamws_and_goes_on() -> None:
    """`torch.zeros_like` of such a parameter gives a plain tensor, too."""
    model, optimizer = build(), None
    for number in range(2):
        before, optimizer = optimizer, DOSAdam(model.parameters(), lr=1e-2, **on("cpu"))
        if before is not None:
            saved = io.BytesIO()
            torch.save(before.state_dict(), saved)
            saved.seek(0)
            optimizer.load_state_dict(torch.load(saved))
        for step in (2 * number, 2 * number + 1):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    assert optimizer is not None
    entry = optimizer.state[model[0].weight]
    assert {type(value) for value in entry.values()} == {Tensor}
    assert entry["exp_avg"].shape == (32, 16)
    assert optimizer.adamw_state(model[0].weight)["exp_avg"].shape == (32, 16)
    assert all(map(torch.equal, values(model), trained(DOSAdam)))
    theirs = AdamW(copy.deepcopy(model).parameters(), lr=1e-2)
    theirs.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", [Quantised, Scaled])
def test_others_are_refused_before_anything_changes(kind: type[Low]) -> None:
    data = torch.ones(4, 4, dtype=torch.int8 if kind is Quantised else torch.float32)
    wrapped = nn.Parameter(kind(data))
    with pytest.raises(
        TypeError, match=f"a wrapper of one dense tensor of the same shape and dtype, found {kind.__name__}"
    ):
        DOSAdam([wrapped])


@pytest.mark.parametrize("weights", [0, 1, 2, "auto"])
@pytest.mark.parametrize("after", [0, 2])
def test_their_weights_do_not_stream(after: int, weights: Any) -> None:
    """Torch gives a wrapper no other memory: `data` leaves what it holds, and its device is the one it was made with.

    after: steps. Training goes on as if nothing had been asked.
    """
    model = build()
    optimizer = DOSAdam(model.parameters(), lr=1e-2, offload_gradients=True, **on("cpu"))
    for step in range(4):
        if step == after:
            with pytest.raises(ValueError, match="weights= is for plain parameters, found wrappers of tensors"):
                optimizer.attach(model, weights=weights, blocks=[model[0], model[2]])
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert all(map(torch.equal, values(model), trained(DOSAdam)))
    weight: Any = model[0].weight
    held = weight._data.clone()
    weight.data = Low(torch.zeros(32, 16))
    assert torch.equal(weight._data, held)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        weight.data = Low(torch.zeros(32, 16, device="meta"))


def shards(steps: int, folder: str) -> list[tuple[str, Tensor, Tensor, type]]:
    """On a rank: its part of a DTensor of such a wrapper in several modes, AdamW's, and the kind of state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from dos.rules import adamw

    adamw.LEAST_CODED = 128
    mesh = init_device_mesh("cpu", (2,))
    part = torch.randn(2400, 128, generator=torch.Generator().manual_seed(mesh.get_rank()))
    own = f"{folder}/{mesh.get_rank()}"
    large = {"subgroup_size": 100_000}
    modes: dict[str, dict[str, Any]] = {
        "plain": on("cpu", **large),
        "disk": on("cpu", disk=own, host_memory=3_300_000, **large),
        "int8": on("cpu", state_format="int8", **large),
        "int8 on the device": on("resident", state_format="int8", **large),
        "int8 on disk": on("stride:1", state_format="int8", disk=own, host_memory=2_700_000, **large),
    }
    found = []
    for name, settings in modes.items():
        parameter = nn.Parameter(DTensor.from_local(Low(part.clone()), mesh, [Shard(0)], run_check=False))
        plain = nn.Parameter(part.clone())
        ours, theirs = DOSAdam([parameter], lr=0.1, **settings), AdamW([plain], lr=0.1)
        for step in range(steps):
            gradient = part.cos() * (step + 1)
            parameter.grad = DTensor.from_local(gradient.clone(), mesh, [Shard(0)], run_check=False)
            plain.grad = gradient
            ours.step()
            theirs.step()
        keys = {key: type(value) for key, value in ours.state[parameter].items() if key.startswith("exp_avg")}
        assert name.startswith("int8") == any("codes" in key for key in keys), keys
        assert (ours.metrics().get("disk_held_bytes", 0) > 0) == ("disk" in name)
        weight: Any = parameter
        found.append((name, weight._local_tensor._data.detach(), plain.detach(), *set(keys.values())))
    return found


def test_dtensors_of_them(pair: Ranks, tmp_path: Path) -> None:
    for found in pair.run(shards, 3, str(tmp_path)):
        coded = [mine for name, mine, *_ in found if name.startswith("int8")]
        assert all(torch.equal(mine, coded[0]) for mine in coded)
        for name, mine, expected, kind in found:
            if name.startswith("int8"):
                assert ((mine - expected).abs() > 0.02 + 0.1 * expected.abs()).float().mean() < 1e-3
            else:
                torch.testing.assert_close(mine, expected)
            assert kind.__name__ == "DTensor"
