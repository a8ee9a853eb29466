"""Random sequences of calls: the same bits whatever the plan and the overlap, and torch.optim.AdamW as the model."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn

from dos import DOSAdam, EmulatedDevice
from tests.support.random_plans import RandomPlans
from tests.support.training import FAST, SLOW, assert_close_ulp, bits, plan_anew

ULPS = 64
SEQUENCES = int(os.environ.get("DOS_CALLS", "80"))
"""How many random sequences of calls, for each kind of gradients."""


class Net(nn.Module):
    """Has an expert that not every micro-batch uses, and a part whose parameters join the optimizer later."""

    def __init__(self, seed: int = 0, width: int = 9) -> None:
        super().__init__()
        torch.default_generator.manual_seed(seed)  # torch.manual_seed keeps a stack trace of each call
        self.first = nn.Linear(6, width)
        self.norm = nn.LayerNorm(width)
        self.expert = nn.Linear(width, width)
        self.late = nn.Linear(width, width, bias=False)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor, expert: bool) -> Tensor:
        x = self.norm(self.first(x)).tanh()
        if expert:
            x = x + self.expert(x)
        return self.last(x + self.late(x).sigmoid())


MicroBatch = tuple[int, bool]
"""A seed, and whether the expert is used."""

MICRO_BATCHES = st.tuples(st.integers(0, 99), st.booleans())
FREEZABLE = [name for name, _ in Net().named_parameters() if name != "last.bias"]


NORMS = [1e-3, 0.05, 10.0]
"""To which gradients are clipped."""


class Amp(enum.Enum):
    """What GradScaler has done to the gradients that are there."""

    OFF = "not scaled"
    SCALED = "scaled"
    UNSCALED = "scaled and unscaled again"


class Run:
    """A model and an optimizer, with all that belongs to them.

    make: builds the optimizer from param groups. activations: how much of what is saved leaves. width: of the model.
    """

    def __init__(
        self,
        make: Callable[[list[dict[str, Any]]], Any],
        attached: bool = False,
        activations: Any = None,
        width: int = 9,
    ) -> None:
        self.make = make
        self.attached = attached
        self.activations = activations
        self.model = Net(width=width)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        self.scaler.scale(torch.ones(()))  # it begins with the first use
        self.use(make([self.group(late=False)]))

    def use(self, optimizer: Any) -> None:
        """Go on with another optimizer of the same model."""
        self.optimizer = optimizer
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if self.attached:
            optimizer.attach(self.model, activations=self.activations)
        if self.activations is not None:
            optimizer._session.on_device.activations.least_bytes = 16

    def group(self, late: bool) -> dict[str, Any]:
        """The parameters that are given to the optimizer at first, or later."""
        return {"params": [p for name, p in self.model.named_parameters() if name.startswith("late") is late]}

    def rebuild(self) -> None:
        """A new optimizer with the old one's groups and no state."""
        self.synchronize()  # the new one does not wait for the old one
        late = len(self.optimizer.param_groups) > 1
        self.use(self.make([self.group(late) for late in ([False, True] if late else [False])]))

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def optimized(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def loss(self, micro_batch: MicroBatch, amp: Amp) -> Tensor:
        seed, expert = micro_batch
        in_context = self.activations is not None and not self.attached
        with self.optimizer.offload_activations(self.activations) if in_context else contextlib.nullcontext():
            loss = self.model(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)), expert).square().mean()
        return self.scaler.scale(loss) if amp is Amp.SCALED else loss

    def synchronize(self) -> None:
        if isinstance(self.optimizer, DOSAdam):
            self.optimizer.synchronize()


def may_add(self: Lockstep) -> bool:
    return not self.spent and not self.clipped and self.amp is not Amp.UNSCALED


def may_step(self: Lockstep) -> bool:
    return not self.spent and (self.amp is Amp.OFF or has_gradients(self))


def may_clip(self: Lockstep) -> bool:
    return not self.spent


def may_edit(self: Lockstep) -> bool:
    """Whether users may write to gradients, and AdamW has the same ones."""
    return not self.offload_gradients and not self.spent and not self.clipped and has_gradients(self)


def may_drop(self: Lockstep) -> bool:
    """The overflow that GradScaler is to find stays in AdamW's other gradients once they were clipped with it."""
    scaled_and_clipped = self.clipped and self.amp is not Amp.OFF
    return not self.offload_gradients and not self.spent and not scaled_and_clipped and has_gradients(self)


def may_unscale(self: Lockstep) -> bool:
    return self.amp is Amp.SCALED and has_gradients(self)


def has_gradients(self: Lockstep) -> bool:
    return any(p.grad is not None for p in self.adamw.optimized())


BETWEEN = {
    "clip": may_clip,
    "clip_by_torch": may_edit,
    "unscale": may_unscale,
    "overflow": may_unscale,
    "scale_a_gradient": may_edit,
    "replace_gradients": may_edit,
    "drop_a_gradient": may_drop,
    "replan": lambda _: True,
}
"""What may happen between backward and step, and when."""


class Lockstep(RuleBasedStateMachine):
    """The same calls to DOSAdam in variants, which must agree to the bit, and to AdamW, which must be close.

    AdamW gets the gradients that the first variant's parameters have, so that differences do not grow in the model.
    disk: whether the model is larger, and the last variant has most of its state on disk.
    """

    def __init__(self, offload_gradients: bool, disk: bool = False) -> None:
        super().__init__()
        self.offload_gradients = offload_gradients
        self.disk = TemporaryDirectory() if disk else None
        self.width = 90 if disk else 9
        self.variants: list[Run] = []
        self.amp = Amp.OFF
        self.fresh = True  # no gradient since zero_grad
        self.clipped = False  # by the optimizer's own method, so the factor waits for the step
        self.spent = False  # the step left the gradients as they were, and AdamW did not
        self.saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.copies_left = 2  # that is enough of what takes longest

    @initialize(
        group=st.fixed_dictionaries(
            {"lr": st.sampled_from([0.01, 0.1]), "amsgrad": st.booleans(), "weight_decay": st.sampled_from([0.0, 0.1])}
        ),
        subgroup_size=st.sampled_from([17, 40, 100]),
        seed=st.integers(0, 2**16),
        slots=st.integers(1, 3),
        slow=st.booleans(),
        capacity=st.sampled_from([10**8, 6_000]),
        attached=st.booleans(),
        activations=st.sampled_from([None, None, "auto", 1.0, 0.5, 300]),
        max_grad_norm=st.sampled_from([None, None, 0.05]),
        frozen=st.sets(st.sampled_from(FREEZABLE)),
    )
    def build(
        self,
        group: dict[str, Any],
        subgroup_size: int,
        seed: int,
        slots: int,
        slow: bool,
        capacity: int,
        attached: bool,
        activations: Any,
        max_grad_norm: float | None,
        frozen: set[str],
    ) -> None:
        self.max_grad_norm = max_grad_norm
        ours = {**group, "offload_gradients": self.offload_gradients, "max_grad_norm": max_grad_norm}
        here = {**ours, "policy": "cpu", "device": EmulatedDevice(FAST, 10**8)} if self.offload_gradients else ours
        if activations is not None:
            capacity = 10**8  # of which the model takes some then
        there = {**ours, "device": EmulatedDevice(SLOW if slow else FAST, capacity), "subgroup_size": subgroup_size}
        if self.disk is not None:
            there["subgroup_size"], there["device"] = 2048, EmulatedDevice(FAST, 50 * capacity)
            there |= {"disk": self.disk.name, "host_memory": 230_000 if self.offload_gradients else 82_000}
        self.adamw = Run(lambda groups: torch.optim.AdamW(groups, **group), width=self.width)
        self.variants = [
            Run(lambda groups: DOSAdam(groups, **here), width=self.width),
            Run(
                lambda groups: DOSAdam(groups, **there, policy=RandomPlans(seed, slots)),
                attached,
                activations,
                self.width,
            ),
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
            self.amp = Amp.SCALED if scaled and not self.offload_gradients else Amp.OFF
        self.fresh = False
        self.add_to_adamw(micro_batch)
        losses = [run.loss(micro_batch, self.amp) for run in self.variants]
        for loss in losses:
            loss.backward()
        assert bits(losses) == bits(losses[:1]) * len(losses)

    def add_to_adamw(self, micro_batch: MicroBatch) -> None:
        source = self.variants[0]
        trained = {name: p for name, p in source.named().items() if p.requires_grad}
        gradients = torch.autograd.grad(source.loss(micro_batch, self.amp), list(trained.values()), allow_unused=True)
        for parameter, gradient in zip((self.adamw.named()[name] for name in trained), gradients, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
            elif gradient is not None:
                parameter.grad = gradient

    @precondition(may_step)
    @rule(look=st.booleans())
    def step(self, look: bool = False) -> None:
        for run in self.runs:
            if self.max_grad_norm is not None and run is self.adamw:
                if self.amp is Amp.SCALED:
                    run.scaler.unscale_(run.optimizer)
                nn.utils.clip_grad_norm_(run.optimized(), self.max_grad_norm)
            if self.amp is Amp.OFF:
                run.optimizer.step()
            else:
                run.scaler.step(run.optimizer)
                run.scaler.update()
        self.spent = self.clipped or self.max_grad_norm is not None or self.amp is not Amp.OFF
        self.amp, self.clipped = Amp.OFF, False
        if self.offload_gradients:  # the step has used them up
            self.adamw.optimizer.zero_grad()
            self.spent, self.fresh = False, True
        assert len({run.scaler.get_scale() for run in self.runs}) == 1
        if look:
            self.look()

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
        edit=st.sampled_from(["nothing", "scale_a_gradient", "replace_gradients", "drop_a_gradient", "replan"]),
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
                for name in (*scaling[1:], edit, clipping):
                    self.between(name, which)
            if may_step(self):
                self.step()

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
            self.adamw.optimizer.zero_grad()
            self.fresh, self.spent = True, False

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
            gradient.view(-1)[which % gradient.numel()] = (torch.inf, -torch.inf, torch.nan)[which % 3]

    def scale_a_gradient(self, which: int) -> None:
        for gradient in self.each_gradient(which):
            gradient.mul_(0.5)

    def replace_gradients(self, _: int) -> None:
        for run in self.runs:
            run.synchronize()
            for parameter in run.optimized():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5

    def drop_a_gradient(self, which: int) -> None:
        for run in self.runs:
            owners = [p for p in run.optimized() if p.grad is not None]
            owners[which % len(owners)].grad = None

    def each_gradient(self, which: int) -> Iterator[Tensor]:
        """The same gradient in each run, for writing to it."""
        for run in self.runs:
            run.synchronize()
            gradients = [p.grad for p in run.optimized() if p.grad is not None]
            yield gradients[which % len(gradients)]

    # What is done to parameters, settings and state.

    @rule(
        name=st.sampled_from(
            ["unfreeze", "schedule", "save", "replan", "release_memory", "attach", "synchronize", "evaluate", "look"]
        )
    )
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

    @precondition(lambda self: len(self.adamw.optimizer.param_groups) == 1)
    @rule(settings=st.fixed_dictionaries({}, optional={"lr": st.just(0.05), "amsgrad": st.booleans()}))
    def add_param_group(self, settings: dict[str, Any]) -> None:
        for run in self.runs:
            run.optimizer.add_param_group({**run.group(late=True), **settings})

    @rule(
        number=st.integers(0, 1),
        settings=st.fixed_dictionaries(
            {},
            optional={
                "lr": st.sampled_from([0.0, 0.01, 0.1]),
                "weight_decay": st.sampled_from([0.0, 0.1]),
                "betas": st.sampled_from([(0.9, 0.999), (0.5, 0.9)]),
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

    @rule(name=st.sampled_from(FREEZABLE), state=st.booleans())
    @torch.no_grad()
    def write(self, name: str, state: bool) -> None:
        """To a parameter, or to its state."""
        for run in self.runs:
            run.synchronize()
            parameter = run.named()[name]
            tensor = run.optimizer.state.get(parameter, {}).get("exp_avg") if state else parameter
            if tensor is not None:
                tensor.mul_(0.75)

    # Checkpoints and copies.

    @rule(seed=st.integers(1, 5))
    def load_weights(self, seed: int) -> None:
        weights = Net(seed, self.width).state_dict()
        for run in self.runs:
            run.model.load_state_dict(weights)

    @rule(source=st.integers(0, 2), rebuild=st.booleans(), through_file=st.booleans())
    def exchange_state(self, source: int, rebuild: bool, through_file: bool) -> None:
        """All go on from what one of them saved."""
        saved = self.runs[source].optimizer.state_dict()
        file = io.BytesIO()
        torch.save(saved, file)
        if rebuild:
            self.zero_grad()
        for run in self.runs:
            if rebuild:
                run.rebuild()
            file.seek(0)
            run.optimizer.load_state_dict(torch.load(file) if through_file else copy.deepcopy(saved))

    def save(self) -> None:
        self.saved = [copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict())) for run in self.runs]

    @precondition(lambda self: self.saved)
    @rule(weights_first=st.booleans())
    def restore(self, weights_first: bool) -> None:
        if len(self.saved[0][1]["param_groups"]) != len(self.adamw.optimizer.param_groups):
            return
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

    def replan(self, _: int = 0) -> None:
        for run in self.variants:
            plan_anew(run.optimizer)

    def release_memory(self) -> None:
        self.variants[1].optimizer.release_memory()

    def attach(self) -> None:
        self.variants[1].attached = True
        self.variants[1].optimizer.attach(self.variants[1].model, activations=self.variants[1].activations)

    def evaluate(self) -> None:
        outputs = []
        for run in self.variants:
            run.model.eval()
            with torch.no_grad():
                outputs.append(run.model(torch.ones(3, 6), expert=True))
            run.model.train()
        assert bits(outputs) == bits(outputs[:1]) * len(outputs)

    def synchronize(self) -> None:
        for run in self.runs:
            run.synchronize()

    def look(self) -> None:
        """Compare parameters and state."""
        states = [run.optimizer.state_dict()["state"] for run in self.runs]  # which waits
        parameters = [list(run.model.parameters()) for run in self.runs]
        for other, state in zip(parameters[2:], states[2:], strict=True):
            assert bits(other) == bits(parameters[1])
            assert state.keys() == states[1].keys()
            for key, entry in state.items():
                assert entry.keys() == states[1][key].keys()
                assert bits(entry.values()) == bits(states[1][key].values())
        assert states[1].keys() == states[0].keys()
        assert_close_ulp(parameters[1], parameters[0], ULPS)
        for key, theirs in states[0].items():
            assert states[1][key].keys() == theirs.keys()
            assert states[1][key]["step"] == theirs["step"]
            assert_close_ulp([states[1][key][name] for name in theirs], theirs.values(), ULPS)

    def teardown(self) -> None:
        if self.variants:
            self.look()


@pytest.mark.usefixtures("one_core")
@pytest.mark.filterwarnings("ignore:DOSAdam.step", "ignore:Detected call of")
@pytest.mark.parametrize("offload_gradients", [False, True])
@pytest.mark.parametrize("disk", [False, True])
def test_random_calls_agree_to_the_bit_and_with_adamw(offload_gradients: bool, disk: bool) -> None:
    chosen = settings(
        max_examples=SEQUENCES // 6 if disk else SEQUENCES,
        stateful_step_count=20,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(functools.partial(Lockstep, offload_gradients, disk), settings=chosen)


# What the sequences found, one by one.


def started(offload_gradients: bool = False) -> tuple[Run, Run]:
    """Ours and AdamW's after the backward of their first step."""
    ours = {"policy": "cpu", "subgroup_size": 40, "offload_gradients": offload_gradients}
    runs = Run(lambda groups: DOSAdam(groups, device=EmulatedDevice(FAST, 10**8), **ours)), Run(torch.optim.AdamW)
    for run in runs:
        run.loss((0, True), Amp.OFF).backward()
    return runs


def assert_same_momentum(runs: tuple[Run, Run]) -> None:
    """After the step. It shows how gradients were clipped, to which AdamW's parameters are insensitive."""
    found = []
    for run in runs:
        run.optimizer.step()
        found.append([run.optimizer.state[p]["exp_avg"] for p in run.optimized() if p in run.optimizer.state])
    assert_close_ulp(*found, ULPS)


@pytest.mark.parametrize(
    ("offload_gradients", "change"),
    [
        (False, lambda run: run.optimizer.add_param_group(run.group(late=True))),
        (True, lambda run: run.optimizer.add_param_group(run.group(late=True))),
        (False, lambda run: setattr(run.model.first.weight, "grad", None)),
    ],
    ids=["others join", "others join those on the host", "one is dropped"],
)
def test_a_clip_stays_with_its_gradients(offload_gradients: bool, change: Callable[[Run], None]) -> None:
    runs = started(offload_gradients)
    runs[0].optimizer.clip_grad_norm_(1e-3)
    nn.utils.clip_grad_norm_(runs[1].optimized(), 1e-3)
    for run in runs:
        change(run)
    assert_same_momentum(runs)


def test_the_norm_of_offloaded_gradients_counts_those_that_no_hook_saw_and_makes_no_state() -> None:
    runs = started(offload_gradients=True)
    for run in runs:
        weight = run.model.first.weight
        extra = torch.ones_like(weight)
        weight.grad = extra if weight.grad is None else weight.grad + extra
    theirs = nn.utils.clip_grad_norm_(runs[1].optimized(), 1e-3)
    torch.testing.assert_close(runs[0].optimizer.clip_grad_norm_(1e-3), theirs, rtol=1e-5, atol=0)
    assert not runs[0].optimizer.state
    assert_same_momentum(runs)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_optimizer_that_was_replaced_takes_no_gradients_any_more(frozen: bool) -> None:
    run, _ = started(offload_gradients=True)
    replaced = run.optimizer
    run.model.first.weight.requires_grad_(not frozen)
    run.rebuild()
    run.model.first.weight.requires_grad_(True)
    replaced.zero_grad()
    run.loss((1, True), Amp.OFF).backward()
    assert replaced.grad_norm() == 0
    run.optimizer.step()
    assert set(run.optimizer.state) == set(run.optimized())
