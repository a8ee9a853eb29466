"""Random iterations with updates during backward: the bits of updates in step(), whatever users do between."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from tests.support.disk import bytes_on_disk
from tests.support.inside import plan_anew
from tests.support.lockstep import KINDS, Kind, Net
from tests.support.random_plans import RandomPlans
from tests.support.training import FAST, SLOW, bits

pytestmark = pytest.mark.usefixtures("one_kernel_thread")

SEEDS = int(os.environ.get("DOS_CALLS", "62")) // 10


class Machine:
    """Two models with the same calls, of which the second updates in backward.

    streams: whether weights of the second stream. disk: a folder for its state, if some of that is on disk.
    """

    def __init__(self, seed: int, disk: Path | None = None) -> None:
        self.random, self.disk = random.Random(seed), disk
        kind: Kind = self.random.choice(KINDS if disk is None else [kind for kind in KINDS if not kind.coded])
        width = 128 if kind.coded else 9 if disk is None else 90
        models = [Net(width=width).to(kind.dtype) for _ in range(2)]
        size = self.random.choice([17, 40, 100, 400]) * (30 if kind.coded else 1) if disk is None else 2048
        settings: dict[str, Any] = {"lr": 0.01, "master_weights": kind.master_weights, "weight_decay": 0.1}
        settings["amsgrad"] = not kind.coded and self.random.random() < 0.3
        streams = self.streams = self.random.random() < 0.4
        places = ["host", "adaptive", "plans", "plans", "plans"]
        place = self.place = "plans" if disk is not None else self.random.choice(places[streams:])
        self.roomy = streams or disk is not None or self.random.random() < 0.5
        capacity = 10**8 if self.roomy else 6_000 * (50 if kind.coded else 1)
        profile = self.random.choice([FAST, SLOW]) if width == 9 else FAST
        self.optimizers, self.models = [], models
        offload = streams or self.random.random() < 0.4
        for model, state_format in zip(models, (kind.formats[-1], kind.formats[0]), strict=True):
            there: dict[str, Any] = {}
            if disk is not None and model is models[1]:
                there = {"disk": disk, "host_memory": 300_000 if streams else 230_000 if offload else 100_000}
            if place != "host":
                policy = "adaptive" if place == "adaptive" else RandomPlans(seed, self.random.choice([1, 2, 3]))
                there |= {
                    "offload_gradients": offload,
                    "device": EmulatedDevice(profile, capacity),
                    "policy": policy,
                    "subgroup_size": size,
                }
            named = dict(model.named_parameters())
            mine = [p for name, p in named.items() if not name.startswith("late")]
            self.optimizers.append(DOSAdam(mine, state_format=state_format, **settings, **there))
        self.attach("backward")

    def attach(self, updates: str) -> None:
        self.updates = updates
        weights = self.random.choice([0, 2, 1.0, "auto"]) if self.streams else None
        blocks: list[dict[str, Any]] = [
            {},
            {"weights": weights, "blocks": self.models[1].blocks} if self.streams else {},
        ]
        every = zip(self.models, self.optimizers, ("step", updates), blocks, strict=True)
        for model, optimizer, each, streaming in every:
            optimizer.attach(model, updates=each, activations=self.activations, **streaming)

    activations: Any = None
    issued = 0
    """How much backward has updated."""

    def loss(self, model: Net, seed: int, expert: bool) -> Tensor:
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(model.scale.dtype)
        return model(inputs, expert).float().square().mean()

    def iteration(self) -> None:
        draw = self.random
        batches = [(draw.randrange(99), draw.random() < 0.5) for _ in range(draw.choice([1, 1, 2, 3]))]
        names, zero = self.between_backwards(), draw.random() < 0.5
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            with optimizer.no_update():
                for seed, expert in batches[:-1]:
                    self.loss(model, seed, expert).backward()
            self.loss(model, *batches[-1]).backward()
            mode = optimizer._session.assembly.in_backward
            self.issued += 0 if mode is None else len(mode.issued)
            if "release" in names:
                optimizer.release_memory()
            if "wait" in names:
                optimizer.synchronize()
            optimizer.step()
            if zero or optimizer is self.optimizers[0] or self.updates == "step":
                optimizer.zero_grad()

    def between_backwards(self) -> set[str]:
        return {name for name in ("release", "wait") if self.random.random() < 0.1}

    def change(self) -> None:
        """Something that users do between step() and the next backward."""
        draw = self.random
        often = ["write", "data", "state", "step", "freeze", "lr", "plan", "load", "attach", "late", "weights", "look"]
        what = draw.choice(["nothing"] * 4 + [*often, "switch", "drop"])
        what = "load" if what == "state" and self.disk is not None else what  # there it can only be read
        names = [n for n, p in self.models[0].named_parameters() if p.numel() and not n.startswith("late")]
        name = draw.choice(names)
        seed, factor = draw.randrange(99), draw.choice([0.5, 1.5])
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            p = dict(model.named_parameters())[name]
            with torch.no_grad():
                if what == "write":
                    p.mul_(factor)
                elif what == "data":
                    p.data.mul_(factor)
                elif what == "state" and p in optimizer.state and "exp_avg" in optimizer.state[p]:
                    optimizer.state[p]["exp_avg"].mul_(factor)
                elif what == "step" and p in optimizer.state and "step" in optimizer.state[p]:
                    optimizer.state[p]["step"].add_(3)
                elif what == "weights":
                    model.load_state_dict(Net(seed, len(model.norm.weight)).to(p.dtype).state_dict())
            if what == "freeze":
                p.requires_grad_(not p.requires_grad)
            elif what == "lr":
                optimizer.param_groups[0]["lr"] = 0.01 * factor
            elif what == "plan":
                plan_anew(optimizer)
            elif what == "load":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif what == "late" and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [model.late.weight]})
            elif what == "drop":
                with optimizer.no_update():
                    self.loss(model, seed, True).backward()
                optimizer.zero_grad()
        if what == "look":
            self.look()
        elif what == "attach":
            # With saved tensors that move, the model has some of the memory, and its errors are the user's.
            self.activations = draw.choice([None, 1.0, "auto"]) if self.roomy else None
            self.attach("backward")
        elif what == "switch":
            self.attach("step")
            self.iteration()
            self.attach("backward")

    def look(self) -> None:
        for optimizer in self.optimizers:
            optimizer.synchronize()
        assert bits(self.models[0].parameters()) == bits(self.models[1].parameters())
        states = [list(self.states(optimizer)) for optimizer in self.optimizers]
        assert states[0] == states[1]

    def states(self, optimizer: DOSAdam) -> Iterator[list[bytes]]:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if optimizer.state.get(p):
                yield bits(optimizer.adamw_state(p).values())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_iterations_agree_to_the_bit(seed: int) -> None:
    machine = Machine(seed)
    for _ in range(14):
        machine.iteration()
        machine.change()
    machine.look()


@pytest.mark.parametrize("seed", [15, 17, 23] if SEEDS <= 6 else range(SEEDS))
def test_random_iterations_with_state_on_disk_agree_to_the_bit(seed: int, tmp_path: Path) -> None:
    """In the first three state is on disk, and other state is updated in backward; in some of the others."""
    machine, on_disk = Machine(100 + seed, tmp_path), 0
    for _ in range(10):
        machine.iteration()
        machine.change()
        on_disk += bytes_on_disk(tmp_path) > 0
    machine.look()
    assert (on_disk and machine.issued) or SEEDS > 6


def test_the_optimizer_of_one_module_alone_is_watched() -> None:
    """Hooks of an optimizer that is gone do nothing."""
    model = nn.Linear(2, 2)
    DOSAdam(model.parameters()).attach(model, updates="backward")
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
