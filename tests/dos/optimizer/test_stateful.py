"""Random sequences of calls: the same bits in any plan, format, memory and overlap, and torch.optim.AdamW as the model.

This is the one owner of these properties. What one call does alone, or what must be said, has tests elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import pickle
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from tests.support.clock import eventually
from tests.support.devices import LIES, Amount, Unreliable
from tests.support.inside import StoppedError, plan_anew, stopped_at
from tests.support.lockstep import KINDS, Amp, Kind, MicroBatch, Net, Run
from tests.support.races import Checker, checking
from tests.support.random_plans import ChangingPlans, RandomPlans
from tests.support.training import FAST, SLOW, assert_close_ulp, bits

ULPS = 64
SEQUENCES = int(os.environ.get("DOS_CALLS", "12"))
"""How many random sequences of calls, for each kind of gradients; a quarter as many with state on disk."""

ALL_WATCHED = bool(os.environ.get("DOS_RACES"))
"""Whether the order of accesses is checked in all sequences, and not in one of 40."""


SPECIAL = [0.0, -0.0, 1e-40, torch.inf, -torch.inf, torch.nan]
"""What user code may write to parameters; AdamW is compared with where they are usual."""


MICRO_BATCHES = st.tuples(st.integers(0, 99), st.booleans())
FREEZABLE = [name for name, _ in Net().named_parameters() if name != "last.bias"]
NORMS = [1e-3, 0.05, 10.0]
"""To which gradients are clipped."""
WEIGHTS = [0, 1, 2, 0.5, 1.0, "auto"]
"""How many blocks stay on the device."""
MEMORY = 6_000
"""Bytes of a small device, which hold the state of the smallest network and some more."""


def may_add(self: Lockstep) -> bool:
    return not self.spent and not self.clipped and self.amp is not Amp.UNSCALED


def may_step(self: Lockstep) -> bool:
    return not self.spent and (self.amp is Amp.OFF or has_gradients(self))


def may_clip(self: Lockstep) -> bool:
    """Norms of gradients that are offloaded have another order of sums."""
    return not self.spent and not self.as_autograd


def may_edit(self: Lockstep) -> bool:
    """Whether users may write to gradients, and AdamW has the same ones."""
    return not self.offload_gradients and not self.spent and not self.clipped and has_gradients(self)


def may_drop(self: Lockstep) -> bool:
    """The overflow that GradScaler is to find stays in AdamW's other gradients once they were clipped with it."""
    scaled_and_clipped = self.clipped and self.amp is not Amp.OFF
    return not self.offload_gradients and not self.spent and not scaled_and_clipped and has_gradients(self)


def may_overwrite(self: Lockstep) -> bool:
    """Also what was clipped, which is clipped no more."""
    return not self.offload_gradients and not self.spent and has_gradients(self)


def may_unscale(self: Lockstep) -> bool:
    return self.amp is Amp.SCALED and has_gradients(self)


def has_gradients(self: Lockstep) -> bool:
    return bool(self.adamw.gradients())


BETWEEN = {
    "clip": may_clip,
    "clip_by_torch": may_edit,
    "unscale": may_unscale,
    "overflow": may_unscale,
    "scale_a_gradient": may_edit,
    "overwrite_a_gradient": may_overwrite,
    "replace_gradients": may_edit,
    "drop_a_gradient": may_drop,
    "replan": lambda _: True,
    "release_memory": lambda _: True,
    "halve_moments": lambda _: True,
}
"""What may happen between backward and step, and when."""


GROUPS = st.fixed_dictionaries(
    {"lr": st.sampled_from([0.01, 0.1]), "amsgrad": st.booleans(), "weight_decay": st.sampled_from([0.0, 0.1])}
)
AXES: dict[str, list[Any]] = {
    "subgroup_size": [17, 40, 100],
    "policy": ["adaptive", RandomPlans, RandomPlans, ChangingPlans],
    "slots": [1, 2, 3],
    "slow": [False, True],
    "late": [0.0, 0.0, 1e-3],
    "capacity": [10**8, MEMORY],
    "failing": [0.0, 0.0, 0.2],
    "lie": [None, None, *LIES],
    "budgets": [False, True],
    "attached": [False, True],
    "activations": [None, None, "auto", 1.0, 0.5, 300],
    "folders": [1, 3],
    "max_grad_norm": [None, None, 0.05],
    "as_autograd": [False, True],
    "weights": [None, None, *WEIGHTS],
}
"""How the second variant differs, and what both have. as_autograd: whether the first one offloads no gradients."""


class Lockstep(RuleBasedStateMachine):
    """The same calls to DOSAdam in variants, which must agree to the bit, and to AdamW, which must be close.

    AdamW gets the gradients that the first variant's parameters have, so that differences do not grow in the model.
    disk: whether the model is larger, and the last variant has most of its state on disk.
    """

    def __init__(self, offload_gradients: bool, disk: bool = False) -> None:
        super().__init__()
        self.offload_gradients = offload_gradients
        self.disk = TemporaryDirectory() if disk else None
        self.variants: list[Run] = []
        self.amp = Amp.OFF
        self.fresh = True  # no gradient since zero_grad
        self.clipped = False  # by the optimizer's own method, so the factor waits for the step
        self.spent = False  # the step left the gradients as they were, and AdamW did not
        self.saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.copies_left = 2  # that is enough of what takes longest
        self.streams = False  # weights of the second variant
        self.watched = contextlib.ExitStack()
        self.checker: Checker | None = None

    @initialize(
        kind=st.sampled_from(KINDS),
        group=GROUPS,
        seed=st.integers(0, 2**16),
        drawn=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in AXES.items()}),
        frozen=st.sets(st.sampled_from(FREEZABLE)),
    )
    def build(self, kind: Kind, group: dict[str, Any], seed: int, drawn: dict[str, Any], frozen: set[str]) -> None:
        # Watching a sequence takes a third of a second.
        if ALL_WATCHED or zlib.crc32(repr((kind, group, seed, drawn)).encode()) % 40 == 0:
            self.checker = self.watched.enter_context(checking())
        if self.disk is not None and kind.coded:
            kind = Kind(torch.bfloat16)  # subgroups whose scales fill a page would be larger than the model
        self.as_autograd = self.offload_gradients and drawn["as_autograd"]
        self.kind, self.max_grad_norm = kind, None if self.as_autograd else drawn["max_grad_norm"]
        self.group = group | {"amsgrad": group["amsgrad"] and not kind.coded}
        self.width = width = 90 if self.disk is not None else 128 if kind.coded else 9
        offload = self.offload_gradients
        ours = {**self.group, "offload_gradients": offload, "max_grad_norm": self.max_grad_norm}
        ours["master_weights"] = kind.master_weights
        here = ours | ({"policy": "cpu", "device": EmulatedDevice(FAST, 10**8)} if offload else {})
        here |= {"offload_gradients": False} if self.as_autograd else {}
        there = ours | {"subgroup_size": drawn["subgroup_size"] * (30 if kind.coded else 1)}
        capacity = drawn["capacity"] * (50 if width > 9 else 1)
        self.streams = offload and drawn["attached"] and drawn["weights"] is not None
        on_device = self.streams or drawn["activations"] is not None
        self.unit = 0 if on_device else capacity if capacity < 10**7 else MEMORY
        if on_device:  # the model has some of the memory then, and its errors are the user's
            capacity, drawn["failing"] = 10**8, 0.0
        self.own, self.others = Amount(), Amount()
        profile = SLOW if drawn["slow"] and width == 9 else FAST
        wrong = {name: drawn[name] for name in ("failing", "late", "lie")}
        self.device = Unreliable(
            capacity=capacity, seed=seed, profile=profile, occupied=self.own, neighbour=self.others, **wrong
        )
        policy = drawn["policy"]
        there |= {"device": self.device, "policy": policy if policy == "adaptive" else policy(seed, drawn["slots"])}
        if drawn["budgets"]:
            there["memory_budget"] = functools.partial(random.Random(seed).randint, 0, 2 * capacity)
        if self.disk is not None:
            folders = [Path(self.disk.name) / str(i) for i in range(drawn["folders"])]
            there |= {"subgroup_size": 2048, "disk": folders, "host_memory": 230_000 if offload else 100_000}
        how = drawn["attached"], drawn["activations"], drawn["weights"] if self.streams else None
        formats = itertools.cycle(kind.formats)
        self.adamw = Run(lambda g: torch.optim.AdamW(g, **self.group), Net(width=width).to(kind.dtype))
        self.variants = [
            Run(lambda g: DOSAdam(g, state_format=kind.formats[-1], **here), Net(width=width).to(kind.dtype)),
            Run(lambda g: DOSAdam(g, state_format=next(formats), **there), Net(width=width).to(kind.dtype), *how),
        ]
        for name in frozen:
            self.freeze(name, drop=False)

    @property
    def runs(self) -> list[Run]:
        return [self.adamw, *self.variants]

    # One iteration, in its parts and as a whole.

    @precondition(may_add)
    @rule(micro_batch=MICRO_BATCHES, scaled=st.booleans())
    def backward(self, micro_batch: MicroBatch, scaled: bool = False) -> None:
        if self.fresh:
            scales = scaled and not self.offload_gradients and self.kind.dtype != torch.float16
            self.amp = Amp.SCALED if scales else Amp.OFF
        penalty = micro_batch[0] % 4 == 0
        self.fresh = False
        self.add_to_adamw(micro_batch, penalty)
        losses = [run.loss(micro_batch, self.amp, penalty) for run in self.variants]
        for loss in losses:
            loss.backward()
        assert bits(losses) == bits(losses[:1]) * len(losses)

    def add_to_adamw(self, micro_batch: MicroBatch, penalty: bool = False) -> None:
        source = self.variants[0]
        trained = {name: p for name, p in source.named().items() if p.requires_grad}
        gradients = torch.autograd.grad(
            source.loss(micro_batch, self.amp, penalty), list(trained.values()), allow_unused=True
        )
        for parameter, gradient in zip((self.adamw.named()[name] for name in trained), gradients, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
            elif gradient is not None:
                parameter.grad = gradient

    @precondition(may_step)
    @rule(look=st.booleans())
    def step(self, look: bool = False, inside: bool = False) -> None:
        for run in self.runs:
            if self.max_grad_norm is not None and run is self.adamw:
                if self.amp is Amp.SCALED:
                    run.scaler.unscale_(run.optimizer)
                nn.utils.clip_grad_norm_(run.optimized(), self.max_grad_norm)
            # AdamW cannot go on outside with state that it has made inside.
            with torch.inference_mode(inside and run is not self.adamw):
                if self.amp is Amp.OFF:
                    run.optimizer.step()
                else:
                    run.scaler.step(run.optimizer)
                    run.scaler.update()
        self.spent = self.clipped or self.max_grad_norm is not None or self.amp is not Amp.OFF
        self.amp, self.clipped = Amp.OFF, False
        if self.offload_gradients:
            self.forget_gradients()
        assert len({run.scaler.get_scale() for run in self.runs}) == 1
        assert self.device.peak_bytes <= self.device.capacity
        if look:
            self.look()

    def forget_gradients(self) -> None:
        """A step has used up those that were offloaded."""
        for run in (self.adamw, self.variants[0]):
            run.optimizer.zero_grad()
        self.spent, self.fresh = False, True

    @rule(micro_batch=MICRO_BATCHES, number=st.integers(0, 12))
    def interrupt_backward(self, micro_batch: MicroBatch, number: int) -> None:
        """By an exception after this number of gradients, where one is written and our hook has not seen it."""
        for run in self.variants:
            with contextlib.suppress(StoppedError), stopped_at(number):
                run.loss(micro_batch, Amp.OFF).backward()
        self.zero_grad()
        for run in self.variants:
            run.model.zero_grad()  # also what the optimizer does not have yet

    @rule(set_to_none=st.booleans(), through_model=st.booleans())
    def zero_grad(self, set_to_none: bool = True, through_model: bool = False) -> None:
        set_to_none |= self.offload_gradients  # gradients on the host are forgotten in any case
        for run in self.runs:
            if self.amp is Amp.UNSCALED:
                run.scaler.update()
            if through_model and not self.offload_gradients:
                if not set_to_none:
                    run.synchronize()
                run.model.zero_grad(set_to_none)
            else:
                run.optimizer.zero_grad(set_to_none)
        self.fresh, self.spent, self.clipped, self.amp = True, False, False, Amp.OFF

    @rule(
        times=st.integers(1, 3),
        micro_batches=st.lists(MICRO_BATCHES, min_size=1, max_size=2),
        replan=st.booleans(),
        scaling=st.sampled_from([(), ("scaled",), ("scaled", "unscale"), ("scaled", "overflow")]),
        edit=st.sampled_from(["nothing", *sorted(BETWEEN.keys() - {"clip", "clip_by_torch", "unscale", "overflow"})]),
        clipping=st.sampled_from(["nothing", "clip", "clip_by_torch"]),
        which=st.integers(0, 99),
    )
    def train(
        self,
        times: int,
        micro_batches: Sequence[MicroBatch],
        replan: bool,
        scaling: Sequence[str],
        edit: str,
        clipping: str,
        which: int,
    ) -> None:
        """Iterations as people write them, the last of them with more between backward and step."""
        for iteration in range(times):
            self.zero_grad()
            if replan:
                self.replan()
            for micro_batch in micro_batches:
                self.backward(micro_batch, "scaled" in scaling)
            if iteration == times - 1:
                for name in (*scaling[1:], edit, clipping, edit if edit == "overwrite_a_gradient" else "nothing"):
                    self.between(name, which)
            if may_step(self):
                self.step()

    @rule(
        inside=st.sets(st.sampled_from(["backward", "between", "step"]), min_size=1),
        micro_batch=MICRO_BATCHES,
        names=st.lists(st.sampled_from(["clip", "clip_by_torch", "overwrite_a_gradient", "halve_moments"]), max_size=3),
        which=st.integers(0, 99),
    )
    def train_in_inference_mode(self, inside: set[str], micro_batch: MicroBatch, names: list[str], which: int) -> None:
        """Gradients made there have no version that would tell that they were written to."""
        self.zero_grad()
        self.fresh = False
        self.add_to_adamw(micro_batch)
        for run in self.variants:
            loss = run.loss(micro_batch, Amp.OFF)
            with torch.inference_mode("backward" in inside):
                loss.backward()
        with torch.inference_mode(bool({"backward", "between"} & inside)):
            for name in names:
                self.between(name, which)
        self.step(inside="step" in inside)
        self.zero_grad()
        for run in self.runs:
            run.model.zero_grad()  # also what the optimizer does not have yet

    @precondition(lambda self: self.amp is Amp.OFF)
    @rule(micro_batches=st.lists(MICRO_BATCHES, min_size=1, max_size=2))
    def step_with_closure(self, micro_batches: Sequence[MicroBatch]) -> None:
        def reevaluate_adamw() -> None:
            self.adamw.optimizer.zero_grad()
            for micro_batch in micro_batches:
                self.add_to_adamw(micro_batch)
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self.adamw.optimized(), self.max_grad_norm)

        def reevaluate(run: Run) -> bytes:
            run.optimizer.zero_grad()
            for micro_batch in micro_batches:
                loss = run.loss(micro_batch, Amp.OFF)
                loss.backward()
            return bits([loss])[0]

        self.adamw.optimizer.step(reevaluate_adamw)
        losses = {run.optimizer.step(functools.partial(reevaluate, run)) for run in self.variants}
        assert len(losses) == 1
        self.fresh, self.clipped, self.spent = False, False, self.max_grad_norm is not None
        if self.offload_gradients:
            self.forget_gradients()

    # What is done to gradients in between. which: of the gradients there are.

    @rule(name=st.sampled_from(sorted(BETWEEN)), which=st.integers(0, 99))
    def between(self, name: str, which: int) -> None:
        if name in BETWEEN and BETWEEN[name](self):
            getattr(self, name)(which)

    def clip(self, which: int) -> None:
        """By the optimizer's own method, which leaves the gradients as they are."""
        max_norm = NORMS[which % len(NORMS)]
        norms = [run.optimizer.clip_grad_norm_(max_norm) for run in self.variants]
        theirs = nn.utils.clip_grad_norm_(self.adamw.optimized(), max_norm)
        assert bits(norms) == bits(norms[:1]) * len(norms)
        if self.kind.as_adamw:
            torch.testing.assert_close(norms[0], theirs, rtol=1e-5, atol=0, equal_nan=True)
        self.clipped = True

    def clip_by_torch(self, which: int) -> None:
        for run in self.runs:
            run.synchronize()
            nn.utils.clip_grad_norm_(run.optimized(), NORMS[which % len(NORMS)])

    def unscale(self, _: int) -> None:
        for run in self.runs:
            run.scaler.unscale_(run.optimizer)
        self.amp = Amp.UNSCALED

    def overflow(self, which: int) -> None:
        for gradient in self.each_gradient(which):
            gradient[(0,) * gradient.ndim] = (torch.inf, -torch.inf, torch.nan)[which % 3]

    def scale_a_gradient(self, which: int) -> None:
        for gradient in self.each_gradient(which):
            gradient.mul_(0.5)

    def overwrite_a_gradient(self, which: int) -> None:
        for gradient in self.each_gradient(which):
            gradient.fill_(which - 30.5)

    def replace_gradients(self, _: int) -> None:
        for run in self.runs:
            run.synchronize()
            for parameter in run.optimized():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5

    def drop_a_gradient(self, which: int) -> None:
        for run in self.runs:
            owners = [p for p in run.optimized() if p.grad is not None and p.numel()]
            owners[which % len(owners)].grad = None

    def halve_moments(self, _: int) -> None:
        for run in self.runs:
            for moment in run.moments():
                moment.mul_(0.5)
        self._load_written()

    def each_gradient(self, which: int) -> Iterator[Tensor]:
        """The same gradient in each run, for writing to it."""
        for run in self.runs:
            run.synchronize()
            gradients = run.gradients()
            yield gradients[which % len(gradients)]

    # What is done to parameters, settings and state.

    @rule(
        name=st.sampled_from(
            ["unfreeze", "schedule", "save", "replan", "release_memory", "synchronize", "evaluate", "look",
             "begin_anew", "load_amsgrad"]
        )
    )  # fmt: skip
    def without_choice(self, name: str) -> None:
        """What there is only one way to do, under one rule so that others have their turn."""
        getattr(self, name)()

    @rule(name=st.sampled_from(FREEZABLE), drop=st.booleans())
    def freeze(self, name: str, drop: bool) -> None:
        for run in self.runs:
            run.named()[name].requires_grad_(False)
            if drop and not self.offload_gradients:
                run.named()[name].grad = None

    def unfreeze(self) -> None:
        for run in self.runs:
            run.model.requires_grad_(True)
            if run.weights is not None:
                run.attach()

    @precondition(lambda self: len(self.adamw.optimizer.param_groups) == 1)
    @rule(settings=st.fixed_dictionaries({}, optional={"lr": st.just(0.05), "amsgrad": st.booleans()}))
    def add_param_group(self, settings: dict[str, Any]) -> None:
        for run in self.runs:
            run.optimizer.add_param_group(
                {**run.group(late=True), **settings, **({"amsgrad": False} if self.kind.coded else {})}
            )

    @rule(
        number=st.integers(0, 1),
        settings=st.fixed_dictionaries(
            {},
            optional={
                "lr": st.sampled_from([0.0, 0.01, 0.1]),
                "weight_decay": st.sampled_from([0.0, 0.1]),
                "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9)]),
                "eps": st.sampled_from([1e-8, 1e-3]),
                "maximize": st.booleans(),
            },
        ),
    )
    def edit_param_group(self, number: int, settings: dict[str, Any]) -> None:
        for run in self.runs:
            run.optimizer.param_groups[number % len(run.optimizer.param_groups)].update(settings)

    def schedule(self) -> None:
        for run in self.runs:
            run.scheduler.step()

    @rule(name=st.sampled_from(FREEZABLE), moves=st.booleans(), special=st.none() | st.sampled_from(SPECIAL))
    @torch.no_grad()
    def write_to_a_parameter(self, name: str, moves: bool, special: float | None) -> None:
        """In place or not. special: into the first element, unless AdamW is compared."""
        for run in self.runs:
            run.synchronize()
            parameter = run.named()[name]
            if moves:
                parameter.data = parameter.data * 0.75
            elif special is None or not parameter.numel() or (self.kind.as_adamw and special):
                parameter.mul_(0.75)
            else:
                parameter[(0,) * parameter.ndim] = special

    @rule(
        name=st.sampled_from(FREEZABLE),
        key=st.sampled_from(["exp_avg", "exp_avg_sq", "step"]),
        how=st.sampled_from(["in place", "by data", "another tensor", "another memory"]),
    )
    @torch.no_grad()
    def write_to_an_entry(self, name: str, key: str, how: str) -> None:
        for run in self.runs:
            entry = run.optimizer.state.get(run.named()[name], {})
            if key not in entry or not entry["step"]:
                continue
            value = torch.ones(()) if key == "step" else entry[key] * 0.5
            match how:
                case "another tensor":
                    entry[key] = value
                case "another memory":
                    entry[key].data = value
                case "by data":
                    entry[key].data.copy_(value)
                case _:
                    entry[key].copy_(value)
        self._load_written()

    def _load_written(self) -> None:
        """State on disk can only be read, unless what is written is loaded."""
        if self.disk is not None:
            optimizer = self.runs[-1].optimizer
            optimizer.load_state_dict(optimizer.state_dict())

    @rule(micro_batch=MICRO_BATCHES, key=st.sampled_from(["exp_avg", "exp_avg_sq"]))
    def replace_in_entries_of_before(self, micro_batch: MicroBatch, key: str) -> None:
        """State that has gone to the device since does not come home over it."""
        entries = [[run.optimizer.state[p] for p in run.optimized() if p in run.optimizer.state] for run in self.runs]
        for writes in (False, True):
            self.zero_grad()
            self.backward(micro_batch)
            for entry in itertools.chain.from_iterable(entries if writes else ()):
                if key in entry:
                    entry[key] = torch.full_like(entry[key], 0.5)
            self.step()

    @rule(micro_batch=MICRO_BATCHES, early=st.booleans(), hooks=st.booleans())
    def write_to_views_in_an_iteration(self, micro_batch: MicroBatch, early: bool, hooks: bool) -> None:
        """early: state is read before backward. hooks: and written in backward, while its gradients leave."""
        self.zero_grad()
        hooks &= not self.streams  # which are refused
        views = [run.moments() for run in self.runs] if early else []

        def write(run: Run, parameter: Tensor) -> None:
            entry = run.optimizer.state.get(parameter, {})
            if "exp_avg" in entry:
                entry["exp_avg"].mul_(0.5)

        installed = [
            p.register_post_accumulate_grad_hook(functools.partial(write, run))
            for run in self.variants
            for p in run.optimized()
            if hooks and p.requires_grad
        ]
        self.backward(micro_batch)
        for hook in installed:
            hook.remove()  # they refer to the optimizer, where the garbage collector does not see it
        for p in self.adamw.optimized():
            if hooks and p.grad is not None:
                write(self.adamw, p)
        for moment in itertools.chain.from_iterable(views or [run.moments() for run in self.runs]):
            moment.mul_(0.5)
        self._load_written()
        self.step()

    def begin_anew(self) -> None:
        for run in self.runs:
            run.synchronize()
            run.optimizer.state.clear()

    def load_amsgrad(self) -> None:
        """Its maximum gets memory, and views of the state that goes are what is loaded."""
        self.zero_grad()
        for run in self.runs if not self.kind.coded else ():
            saved = run.optimizer.state_dict()
            for entry in saved["state"].values():
                entry.setdefault("max_exp_avg_sq", entry["exp_avg_sq"].clone())
            for group in saved["param_groups"]:
                group["amsgrad"] = True
            run.optimizer.load_state_dict(saved)

    @precondition(lambda self: not self.kind.coded and not self.streams)
    @rule(name=st.sampled_from(["expert.weight", "expert.bias", "last.weight"]))
    def exchange_a_parameter(self, name: str) -> None:
        """As where a model is pruned: another parameter takes its place, with its rows in another order, and state."""
        self.zero_grad()
        for run in self.runs:
            run.synchronize()
            old, (layer, which) = run.named()[name], name.split(".")
            new = nn.Parameter(old.detach().flip(0).clone(), requires_grad=old.requires_grad)
            if old in run.optimizer.state:
                entry = run.optimizer.state.pop(old)
                moved = {
                    key: value.flip(0)
                    for key, value in entry.items()
                    if key not in ("step", "master_rest", "master_param")
                }
                run.optimizer.state[new] = {"step": entry["step"], **moved}
            parameters = run.optimizer.param_groups[0]["params"]
            parameters[next(i for i, p in enumerate(parameters) if p is old)] = new
            setattr(run.model.get_submodule(layer), which, new)

    # Checkpoints and copies.

    @rule(seed=st.integers(1, 5))
    def load_weights(self, seed: int) -> None:
        weights = Net(seed, self.width).to(self.kind.dtype).state_dict()
        for run in self.runs:
            run.model.load_state_dict(weights)

    @rule(
        source=st.integers(0, 2),
        rebuild=st.booleans(),
        form=st.sampled_from(["copied", "through a file", "mapped", "AdamW's", "live"]),
    )
    def exchange_state(self, source: int, rebuild: bool, form: str) -> None:
        """All go on from what one of them saved."""
        origin = self.runs[source or not self.kind.as_adamw]
        saved = origin.optimizer.state_dict()
        live = saved["state"]
        if form == "AdamW's" or self.kind.coded:
            saved["state"] = origin.state()
        saved = copy.deepcopy(saved)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "saved.pt"
            torch.save(saved, file)
            if rebuild:
                self.zero_grad()
            for run in self.runs:
                if rebuild:
                    run.rebuild()
                in_file = form in ("through a file", "mapped")
                its = torch.load(file, mmap=form == "mapped") if in_file else copy.deepcopy(saved)
                if form == "live" and run is origin and not self.kind.coded:  # steps are written to
                    its["state"] = {i: {**entry, "step": entry["step"].clone()} for i, entry in live.items()}
                run.optimizer.load_state_dict(its)

    def save(self) -> None:
        self.saved = [copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict())) for run in self.runs]

    @precondition(lambda self: self.saved)
    @rule(weights_first=st.booleans())
    def restore(self, weights_first: bool) -> None:
        if len(self.saved[0][1]["param_groups"]) != len(self.adamw.optimizer.param_groups):
            return
        self.zero_grad()
        for run, (weights, state) in zip(self.runs, self.saved, strict=True):
            if weights_first:
                run.model.load_state_dict(weights)
            run.optimizer.load_state_dict(copy.deepcopy(state))
            if not weights_first:
                run.model.load_state_dict(weights)

    @precondition(lambda self: self.copies_left)
    @rule(pickled=st.booleans())
    def go_on_with_copies(self, pickled: bool) -> None:
        self.copies_left -= 1
        self.zero_grad()  # copies of parameters have no gradients
        for run in self.runs:
            pair = run.model, run.optimizer
            run.model, optimizer = pickle.loads(pickle.dumps(pair)) if pickled else copy.deepcopy(pair)
            run.use(optimizer)

    # What only the variants know, and what must not matter.

    @rule(own=st.floats(0, 1), others=st.floats(0, 1))
    def change_memory(self, own: float, others: float) -> None:
        """What the model itself takes of the device, as far as there is any, and what another process wants."""
        self.own.nbytes = min(int(own * self.unit), self.own.nbytes + EmulatedDevice.memory(self.device).free)
        self.others.nbytes = int(others * self.unit)

    def replan(self, _: int = 0) -> None:
        for run in self.variants:
            plan_anew(run.optimizer)

    def release_memory(self, _: int = 0) -> None:
        self.variants[1].optimizer.release_memory()

    @rule(weights=st.sampled_from(WEIGHTS))
    def attach(self, weights: Any) -> None:
        self.variants[1].attached = True
        self.variants[1].weights = weights if self.streams else None
        self.variants[1].attach()

    def evaluate(self) -> None:
        outputs = []
        for run in self.variants:
            run.model.eval()
            with torch.no_grad():
                outputs.append(run.model(torch.ones(3, 6, dtype=self.kind.dtype), expert=True))
            run.model.train()
        assert bits(outputs) == bits(outputs[:1]) * len(outputs)

    def synchronize(self) -> None:
        for run in self.runs:
            run.synchronize()

    def look(self) -> None:
        """Compare parameters and state."""
        theirs, here, there = (run.state() for run in self.runs)  # which waits
        parameters = [list(run.model.parameters()) for run in self.runs]
        assert bits(parameters[2]) == bits(parameters[1])
        assert there.keys() == here.keys()
        for number, entry in here.items():
            assert there[number].keys() == entry.keys()
            assert bits(there[number].values()) == bits(entry.values())
        if self.kind.as_adamw:
            assert here.keys() == theirs.keys()
            assert_close_ulp(parameters[1], parameters[0], ULPS)
            for number, entry in theirs.items():
                assert here[number].keys() == entry.keys()
                assert here[number]["step"] == entry["step"]
                assert_close_ulp([here[number][name] for name in entry], entry.values(), ULPS)

    def teardown(self) -> None:
        with self.watched:
            self.end()
        assert self.checker is None or not self.checker.races, self.checker.report()

    def end(self) -> None:
        if self.variants:
            self.look()
            self.release_memory()
            if self.device.usage().held:
                gc.collect()  # schedulers make cycles of the optimizers that others took the place of
            whole = (
                self.copies_left == 2 and not self.streams and self.variants[1].activations is None
            )  # all memory is that of one device
            held = self.device.usage  # a thread that has ended its work may hold some for a moment
            assert not whole or eventually(lambda: held().held == 0, 10), "not all was given back"


@pytest.mark.hypothesis
@pytest.mark.usefixtures("one_core")
@pytest.mark.filterwarnings("ignore:DOSAdam", "ignore:Detected call of", "ignore:.*is not clipped")
@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("disk", [False, True])
def test_random_calls_agree_to_the_bit_and_with_adamw(offload_gradients: bool, disk: bool) -> None:
    chosen = settings(
        max_examples=SEQUENCES // 4 if disk else SEQUENCES,
        stateful_step_count=20,
        derandomize=True,
        phases=[
            Phase.explicit,
            Phase.reuse,
            Phase.generate,
        ],  # a sequence as found says more than one shrunk for minutes
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(functools.partial(Lockstep, offload_gradients, disk), settings=chosen)
