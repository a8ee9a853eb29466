"""What must not change once a parameter has state: amsgrad and the memory format, until that is saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam
from tests.support.crossings import crossed
from tests.support.disk import SMALL, TWO_WINDOWS, bytes_on_disk
from tests.support.training import assert_close_ulp, bits, everything, on

pytestmark = [pytest.mark.usefixtures("one_core"), pytest.mark.filterwarnings("ignore:grad and param do not obey")]

PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "cpu": on("cpu"),
    "streamed": on("stride:1"),
    "resident": on(0.0),
    "never leaves": on("resident"),
    "half": on(0.5),
    "gradients on the host": on("cpu", offload_gradients=True),
    "gradients on the host, streamed": on("stride:1", offload_gradients=True),
    "disk": on("cpu", host_memory=TWO_WINDOWS + 20_000, disk=True),
    "disk, streamed": on("stride:2", host_memory=2 * TWO_WINDOWS - 14_000, disk=True, offload_gradients=True),
}
"""DOSAdam's settings; disk: whether there is one."""


class Run:
    """A model of which most is one convolution, and an optimizer of it."""

    def __init__(self, make: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Conv2d(16, 32, 4), nn.Linear(90, 30)).to(dtype)
        self.optimizer = make(self.model.parameters())

    def backward(self, seed: int) -> None:
        """Gradients that are the same to the bit in every memory format."""
        for p in self.model.parameters():
            factors = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)
            (p * factors).sum().backward()

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            for micro_batch in range(2):
                self.backward(10 * step + micro_batch)
            self.optimizer.step()

    def set_amsgrad(self, on: bool) -> None:
        self.optimizer.param_groups[0]["amsgrad"] = on

    def set_format(self, last: bool) -> None:
        self.model[0].to(memory_format=torch.channels_last if last else torch.contiguous_format)

    def relay(self, transposed: bool) -> None:
        """As `set_format`, with a matrix and by hand."""
        weight = self.model[1].weight
        weight.data = weight.data.t().contiguous().t() if transposed else weight.data.contiguous()

    def state(self) -> list[Tensor]:
        entries = [self.optimizer.state[p] for p in self.model.parameters()]
        return [entry[key] for entry in entries for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")]


def made(place: str, folder: Path, **more: Any) -> Callable[[Any], DOSAdam]:
    settings = {"lr": 0.01, "subgroup_size": SMALL, **PLACES[place], **more}
    if settings.pop("disk", False):
        settings["disk"] = folder
    return lambda parameters: DOSAdam(parameters, **settings)


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.01)


AMSGRAD = (
    r"parameter 0 of shape \(32, 16, 4, 4\): found amsgrad=True, set after the optimizer first updated it, so that "
    r"its state has no 'max_exp_avg_sq'; set it back, or save optimizer.state_dict\(\), build a new optimizer, load it "
    r"there and set amsgrad=True before its first step"
)
FORMAT = (
    r"parameter 0 of shape \(32, 16, 4, 4\) was torch.float32 of shape \(32, 16, 4, 4\) on cpu when the optimizer "
    r"first updated it and is torch.float32 of shape \(32, 16, 4, 4\), its axes in the order \(0, 2, 3, 1\) in memory, "
    r"on cpu now; move or convert the model before the first step, or save optimizer.state_dict\(\), build a new "
    r"optimizer and load it there"
)
MATRIX = r"parameter 2 of shape \(30, 90\) was .* its axes in the order \(1, 0\) in memory"


SWITCHES = [
    (Run.set_amsgrad, AMSGRAD, 0),
    (Run.set_amsgrad, AMSGRAD, 2),
    (Run.set_format, FORMAT, 0),
    (Run.set_format, FORMAT, 1),
    (Run.set_format, FORMAT, 2),
    (Run.relay, MATRIX, 1),
]


@pytest.mark.parametrize(("place", "switch", "message", "when"), crossed(PLACES, SWITCHES))
def test_a_switch_is_refused_before_anything_changes(
    place: str, switch: Callable[[Run, bool], None], message: str, when: int, tmp_path: Path
) -> None:
    """Taken back, it has changed nothing. when: after so many of an iteration's micro-batches."""
    run, twin = (Run(made(place, tmp_path / name)) for name in "ab")
    for each in (run, twin):
        each.train(range(2))
        each.optimizer.zero_grad()
    for micro_batch in range(3):
        if micro_batch == when:
            switch(run, True)
        if micro_batch < 2:
            for each in (run, twin):
                each.backward(20 + micro_batch)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            run.optimizer.step()
    assert everything(run.model, run.optimizer) == everything(twin.model, twin.optimizer)
    with pytest.raises(RuntimeError, match=message):
        run.optimizer.step()
    switch(run, False)
    for each in (run, twin):
        each.optimizer.step()
        each.train(range(3, 5))
    assert everything(run.model, run.optimizer) == everything(twin.model, twin.optimizer)
    assert float(run.optimizer.state[run.model[0].weight]["step"]) == 5
    assert not place.startswith("disk") or bytes_on_disk(tmp_path / "a") > 0


@pytest.mark.parametrize("place", PLACES)
def test_a_norm_is_refused_where_the_step_would_be(place: str, tmp_path: Path) -> None:
    """It takes gradients that no hook has seen to the host."""
    run, twin = (Run(made(place, tmp_path / name)) for name in "ab")
    for each in (run, twin):
        each.train(range(1))
        each.optimizer.zero_grad()
        for p in each.model.parameters():
            p.grad = torch.ones_like(p)
    run.set_format(True)
    if "offload_gradients" in PLACES[place]:
        with pytest.raises(RuntimeError, match=FORMAT):
            run.optimizer.clip_grad_norm_(0.1)
    run.set_format(False)
    for each in (run, twin):
        each.optimizer.clip_grad_norm_(0.1)
        each.optimizer.step()
    assert everything(run.model, run.optimizer) == everything(twin.model, twin.optimizer)


@pytest.mark.parametrize(("place", "dtype"), crossed(PLACES, [torch.float32, torch.bfloat16]))
def test_saving_and_building_anew_works_as_the_messages_say(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Save, build anew, load: with another memory format to the bit, with amsgrad as if its maximum began then."""
    kept = Run(made(place, tmp_path / "a"), dtype)
    kept.train(range(2))
    anew = Run(made(place, tmp_path / "b"), dtype)
    anew.model.load_state_dict(kept.model.state_dict())
    saved = copy.deepcopy(kept.optimizer.state_dict())
    anew.set_format(True)
    anew.optimizer.load_state_dict(saved)
    for each in (kept, anew):
        each.train(range(2, 4))
    assert everything(kept.model, kept.optimizer) == everything(anew.model, anew.optimizer)

    saved = copy.deepcopy(kept.optimizer.state_dict())
    ends = []
    for where, make in (("b", made(place, tmp_path / "c")), ("host", adamw)):
        run = Run(make, dtype if where == "b" else torch.float32)
        run.model.load_state_dict(kept.model.state_dict())
        run.optimizer.load_state_dict(saved)
        if where == "host":  # AdamW makes no maximum later
            for p in run.model.parameters():
                run.optimizer.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)
        run.set_amsgrad(True)
        run.train(range(4, 6))
        ends.append(run.state())
    if dtype == torch.float32:  # AdamW has no masters
        assert_close_ulp(*ends)
    assert all(maximum.any() for maximum in ends[0][3::4])


@pytest.mark.parametrize("place", [place for place in PLACES if "offload_gradients" in PLACES[place]])
def test_amsgrad_is_not_loaded_over_gradients_on_the_host(place: str, tmp_path: Path) -> None:
    """They lie in memory that is made anew."""
    source = Run(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True))
    source.train(range(1))
    saved = source.optimizer.state_dict()
    run, twin = (Run(made(place, tmp_path / name)) for name in "ab")
    for each in (run, twin):
        each.train(range(2))
        each.backward(20)
    with pytest.raises(
        RuntimeError, match=r"gradients in that, .*; call optimizer.zero_grad\(\) before load_state_dict"
    ):
        run.optimizer.load_state_dict(saved)
    for each in (run, twin):
        each.optimizer.step()
    assert everything(run.model, run.optimizer) == everything(twin.model, twin.optimizer)
    run.optimizer.zero_grad()
    run.optimizer.load_state_dict(saved)
    run.train(range(3, 4))
    assert float(run.state()[0]) == 2


@pytest.mark.parametrize("place", PLACES)
def test_amsgrad_is_switched_off_and_on_again_as_with_adamw(place: str, tmp_path: Path) -> None:
    """The maximum stays as it was meanwhile."""
    ends = []
    for make in (made(place, tmp_path, amsgrad=True), lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True)):
        run = Run(make)
        run.train(range(2))
        run.set_amsgrad(False)
        run.train(range(2, 4))
        before = [maximum.clone() for maximum in run.state()[3::4]]
        run.set_amsgrad(True)
        run.train(range(4, 6))
        ends.append([*run.model.parameters(), *before, *run.state()])
    assert_close_ulp(*ends)


@pytest.mark.parametrize("place", PLACES)
def test_strides_that_keep_the_order_of_elements_are_accepted(place: str, tmp_path: Path) -> None:
    """Strides of axes of length 1, and gaps between elements that lie in the order of their indices."""
    ends = []
    for changes in (False, True):
        weights = [torch.linspace(-1, 1, 6000).view(40, 10, 1, 15), torch.linspace(-1, 1, 600).view(20, 30)]
        parameters = [nn.Parameter(weights[0].to(memory_format=torch.channels_last)), nn.Parameter(weights[1])]
        optimizer = made(place, tmp_path / str(changes))(parameters)
        for step in range(4):
            for p in parameters:
                p.grad = torch.sin(step + torch.arange(p.numel(), dtype=torch.float32)).view(p.shape)
            if changes and step in (1, 3):
                four, two = (p.data for p in parameters)
                four = four.clone()
                parameters[0].data = four.as_strided(four.shape, (150, 1, 10**step, 10))
                parameters[1].data = two.contiguous() if step == 3 else torch.zeros(20, 60)[:, ::2].copy_(two)
            optimizer.step()
        ends.append(bits([*parameters, *(optimizer.state[p][key] for p in parameters for key in ("step", "exp_avg"))]))
    assert ends[0] == ends[1]


def test_an_idle_parameter_is_not_refused_before_it_has_a_gradient() -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = DOSAdam(weights, **on("cpu"))
    weights[0].grad = torch.ones(3)
    optimizer.step()
    weights[0].grad, weights[1].grad = None, torch.ones(3)
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.step()  # the other one's first, which makes its state with amsgrad
    assert "max_exp_avg_sq" in optimizer.state[weights[1]]
    before = bits(weights)
    weights[0].grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"parameter 0 of shape .* found amsgrad=True"):
        optimizer.step()
    assert bits(weights) == before
