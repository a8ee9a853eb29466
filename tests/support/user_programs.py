"""Small programs of user code and its tools, of each kind that reaches past an optimizer's hooks."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import os
import pickle
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from dos import DOSAdam
from tests.support.blocks import inputs, loss, net

Make = Callable[[nn.Module], Any]
"""Gives an optimizer of a model's parameters, which it may attach."""


class Job:
    """A model of four blocks and its optimizer. adapt: changes the model before the optimizer is built."""

    def __init__(self, make: Make, adapt: Callable[[Any], object] | None, dtype: torch.dtype, width: int = 16) -> None:
        self.dtype, self.width = dtype, width
        self.model: Any = self.new_model()
        if adapt is not None:
            adapt(self.model)
        self.optimizer = make(self.model)

    def new_model(self) -> Any:
        return net(self.dtype, blocks=4, width=self.width)

    def backward(self, seed: int) -> Tensor:
        found = loss(self.model, seed)
        found.backward()
        return found.detach()

    def step(self, seed: int) -> None:
        self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, *seeds: int) -> None:
        for seed in seeds:
            self.step(seed)

    def ends(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


# A. Memory of parameters.


def deep_copies(job: Job) -> Iterable[Tensor]:
    """A model that was copied is trained on by an optimizer of its own, with the state of the first."""
    job.steps(0, 1)
    twin = job.new_model()
    twin.load_state_dict(copy.deepcopy(job.model.state_dict()))
    state = copy.deepcopy(job.optimizer.state_dict())
    job.step(2)
    coded = any("exp_avg" not in entry for entry in state["state"].values())
    other: Any = DOSAdam if coded else torch.optim.AdamW
    other = other(twin.parameters(), lr=1e-2, **({"state_format": "int8"} if coded else {}))
    other.load_state_dict(state)
    loss(twin, 2).backward()
    other.step()
    return [*job.ends(), *twin.parameters()]


def deep_copy_of_the_model(job: Job) -> Iterable[Tensor]:
    job.step(0)
    with torch.no_grad():
        found = copy.deepcopy(job.model)
        frozen = [p.clone() for p in found.parameters()]
    job.step(1)
    assert all(map(torch.equal, found.parameters(), frozen))
    return [*job.ends(), *frozen]


def pickled(job: Job) -> Iterable[Tensor]:
    job.steps(0, 1)
    with contextlib.suppress(AttributeError):  # hooks of ours are not pickled with a model
        found = pickle.loads(pickle.dumps([p.detach().clone() for p in job.model.parameters()]))
    state = pickle.loads(pickle.dumps(job.optimizer.state_dict()))
    job.steps(2, 3)
    with torch.no_grad():
        for p, value in zip(job.model.parameters(), found, strict=True):
            p.copy_(value)
    job.optimizer.load_state_dict(state)
    job.steps(4, 5)
    return job.ends()


def loaded_in_part(job: Job) -> Iterable[Tensor]:
    job.step(0)
    saved = {name: value.clone() for name, value in job.model.state_dict().items() if "out" in name}
    job.steps(1, 2)
    job.model.load_state_dict(saved, strict=False)
    job.steps(3, 4)
    return job.ends()


def loaded_by_assignment(job: Job) -> Iterable[Tensor]:
    """Torch puts other parameters in the place of those that the optimizer has."""
    job.step(0)
    saved = {name: value.clone() for name, value in job.model.state_dict().items()}
    job.model.load_state_dict(saved, assign=True)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-2)
    loss(job.model, 1).backward()
    optimizer.step()
    return job.ends()


def swapped(job: Job) -> Iterable[Tensor]:
    """`torch.utils.swap_tensors`, as `module.to` does with `torch.__future__.set_swap_module_params_on_conversion`."""
    job.steps(0, 1)
    optimizer = job.optimizer
    weight = job.model.last.weight
    other = nn.Parameter(weight.detach().clone() * 0.5)
    job.optimizer.zero_grad()
    torch.utils.swap_tensors(weight, other)
    assert optimizer is job.optimizer
    job.steps(2, 3)
    return job.ends()


def parametrized(job: Job) -> Iterable[Tensor]:
    class Symmetric(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

        def right_inverse(self, x: Tensor) -> Tensor:
            return x.triu()

    job.steps(0, 1)
    parametrize.register_parametrization(job.model.blocks[1].out, "weight", Symmetric())
    job.steps(2, 3)
    return job.ends()


def parametrization_removed(job: Job) -> Iterable[Tensor]:
    job.steps(0, 1)
    for block in job.model.blocks:
        parametrize.remove_parametrizations(block.out, "weight", leave_parametrized=True)
    job.steps(2, 3)
    return job.ends()


def halve(model: Any) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

        def right_inverse(self, x: Tensor) -> Tensor:
            return x * 2

    for block in model.blocks:
        parametrize.register_parametrization(block.out, "weight", Half())


def normed(model: Any) -> None:
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.out)


def spectral(model: Any) -> None:
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block.out)


def old_norm(model: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in model.blocks:
            nn.utils.weight_norm(block.out)


def norms(job: Job) -> Iterable[Tensor]:
    job.steps(0, 1, 2, 3)
    return job.ends()


def pruned(job: Job) -> Iterable[Tensor]:
    """The mask is applied in forward; then it is made permanent, which makes another parameter."""
    job.steps(0, 1)
    prune.l1_unstructured(job.model.blocks[1].out, "weight", amount=0.5)
    job.steps(2, 3)
    return job.ends()


def vectors(job: Job) -> Iterable[Tensor]:
    job.step(0)
    for seed in range(1, 4):
        vector = parameters_to_vector(job.model.parameters()).detach()
        vector_to_parameters(vector * 0.9, job.model.parameters())
        job.step(seed)
    return job.ends()


def exchanged_memory(job: Job) -> Iterable[Tensor]:
    """Weights that are replaced for an evaluation, and put back by their memory."""
    for seed in range(4):
        job.step(seed)
        kept = [p.data for p in job.model.parameters()]
        for p in job.model.parameters():
            p.data = p.data * 0.5
        with torch.no_grad():
            job.model(inputs(9, job.model))
        for p, data in zip(job.model.parameters(), kept, strict=True):
            p.data = data
    return job.ends()


def saved_and_loaded(job: Job) -> Iterable[Tensor]:
    from safetensors.torch import load_model, save_model

    with tempfile.TemporaryDirectory() as folder:
        job.steps(0, 1)
        save_model(job.model, f"{folder}/model.safetensors")
        torch.save(job.optimizer.state_dict(), f"{folder}/optimizer.pt")
        job.steps(2, 3)
        load_model(job.model, f"{folder}/model.safetensors")
        job.optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt"))
        job.steps(4, 5)
    return job.ends()


def distributed_checkpoint(job: Job) -> Iterable[Tensor]:
    import warnings

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job.steps(0, 1)
        model, optimizer = get_state_dict(job.model, job.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        job.steps(2, 3)
        model, optimizer = get_state_dict(job.model, job.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        job.steps(4, 5)
    return job.ends()


def exponential_averages_loaded(job: Job) -> Iterable[Tensor]:
    """Kept as a state dict, and loaded into the model for an evaluation, as many libraries do."""
    average = {name: value.clone() for name, value in job.model.state_dict().items()}
    found = []
    for seed in range(4):
        job.step(seed)
        for name, value in job.model.state_dict().items():
            average[name].lerp_(value, 0.3)
        backup = {name: value.clone() for name, value in job.model.state_dict().items()}
        job.model.load_state_dict(average)
        with torch.no_grad():
            found.append(job.model(inputs(9, job.model)).detach().clone())
        job.model.load_state_dict(backup)
    return [*job.ends(), *found]


# B. Code that runs, or raises, at odd moments.


def handler_saves(job: Job) -> Iterable[Tensor]:
    found: list[list[Tensor]] = []

    def save(*_: object) -> None:
        found.append([value.clone() for value in job.model.state_dict().values()])
        io.BytesIO().write(pickle.dumps(job.optimizer.state_dict()["param_groups"]))

    before = signal.signal(signal.SIGUSR1, save)
    try:
        for seed in range(4):
            job.backward(seed)
            os.kill(os.getpid(), signal.SIGUSR1)
            job.optimizer.step()
            os.kill(os.getpid(), signal.SIGUSR1)
            job.optimizer.zero_grad()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(found) == 8
    return [*job.ends(), *found[-1]]


def alarm_raises(job: Job) -> Iterable[Tensor]:
    """A time limit ends a step's backward, or comes after it; the step is done again."""

    class OutOfTimeError(Exception):
        pass

    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for seed in range(3):
            with contextlib.suppress(OutOfTimeError):
                job.backward(seed)
                os.kill(os.getpid(), signal.SIGALRM)
            job.optimizer.zero_grad()
            job.model.zero_grad()
            job.step(seed)
    finally:
        signal.signal(signal.SIGALRM, before)
    return job.ends()


def collected(job: Job) -> Iterable[Tensor]:
    """A callback of gc that looks at parameters is refused or served; training goes on."""
    seen: list[int] = []

    def look(phase: str, _: object) -> None:
        if phase == "stop":
            with contextlib.suppress(RuntimeError):
                seen.append(sum(p.numel() for p in job.model.parameters()))

    gc.callbacks.append(look)
    threshold = gc.get_threshold()
    gc.set_threshold(50)
    try:
        job.steps(0, 1, 2)
    finally:
        gc.callbacks.remove(look)
        gc.set_threshold(*threshold)
    return job.ends()


def backward_raises(job: Job) -> Iterable[Tensor]:
    class FailsError(Exception):
        pass

    def fail(*_: object) -> None:
        raise FailsError

    job.step(0)
    for seed in (1, 2):
        handle = job.model.blocks[1].register_full_backward_hook(fail)
        with contextlib.suppress(FailsError):
            job.backward(seed)
        handle.remove()
        job.optimizer.zero_grad()
        job.step(seed)
    return job.ends()


def step_hooks(job: Job) -> Iterable[Tensor]:
    """An average, and a bound, in a hook after each step."""
    average = [p.detach().clone() for p in job.model.parameters()]

    def after(optimizer: Any, *_: object) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.2, 0.2)
            for mine, p in zip(average, job.model.parameters(), strict=True):
                mine.lerp_(p, 0.3)

    job.optimizer.register_step_post_hook(after)
    job.steps(0, 1, 2, 3)
    return [*job.ends(), *average]


# C. Parameters that are read or written without a forward.


def averaged(job: Job) -> Iterable[Tensor]:
    average = AveragedModel(job.new_model(), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for seed in range(4):
        job.step(seed)
        average.update_parameters(job.model)
    update_bn([inputs(9, job.model)], average)
    return [*job.ends(), *average.parameters()]


def averaged_by_lists(job: Job) -> Iterable[Tensor]:
    average = [p.detach().clone() for p in job.model.parameters()]
    for seed in range(4):
        job.step(seed)
        with torch.no_grad():
            torch._foreach_lerp_(average, list(job.model.parameters()), 0.2)
    return [*job.ends(), *average]


def looked_ahead(job: Job) -> Iterable[Tensor]:
    """Slow weights, to which the fast ones return."""
    slow = [p.detach().clone() for p in job.model.parameters()]
    for seed in range(6):
        job.step(seed)
        if seed % 2:
            for mine, p in zip(slow, job.model.parameters(), strict=True):
                mine.lerp_(p.detach(), 0.5)
                p.data.copy_(mine)
    return job.ends()


def bounded(job: Job) -> Iterable[Tensor]:
    for seed in range(4):
        job.step(seed)
        for p in job.model.parameters():
            p.data.clamp_(-0.15, 0.15)
    return job.ends()


def decayed_by_hand(job: Job) -> Iterable[Tensor]:
    for seed in range(4):
        job.step(seed)
        with torch.no_grad():
            for name, p in job.model.named_parameters():
                if "weight" in name:
                    p.mul_(0.99)
    return job.ends()


def set_anew(job: Job) -> Iterable[Tensor]:
    """A layer begins anew, without its state."""
    job.steps(0, 1)
    torch.default_generator.manual_seed(7)
    job.model.blocks[2].out.reset_parameters()
    nn.init.constant_(job.model.last.bias, 0.25)
    for p in job.model.blocks[2].out.parameters():
        job.optimizer.state.pop(p)
    job.steps(2, 3)
    return job.ends()


def begun_anew(job: Job) -> Iterable[Tensor]:
    """All state is dropped, as forums advise."""
    job.steps(0, 1)
    job.optimizer.__setstate__({"state": defaultdict(dict)})
    job.steps(2, 3)
    return job.ends()


def penalised(job: Job) -> Iterable[Tensor]:
    for seed in range(4):
        penalty = sum((p.square().sum() for n, p in job.model.named_parameters() if "last" in n), torch.zeros(()))
        (loss(job.model, seed) + 0.1 * penalty).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.ends()


def logged(job: Job) -> Iterable[Tensor]:
    """Norms of parameters and what one step has changed."""
    found = []
    for seed in range(4):
        before = {name: p.detach().clone() for name, p in job.model.named_parameters()}
        job.step(seed)
        for name, p in job.model.named_parameters():
            found.append((p.detach() - before[name]).norm())
    return [*job.ends(), *found]


def called_with_its_parameters(job: Job) -> Iterable[Tensor]:
    for seed in range(3):
        given = dict(job.model.named_parameters())
        torch.func.functional_call(job.model, given, (inputs(seed, job.model),)).float().square().mean().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.ends()


def sharp(job: Job) -> Iterable[Tensor]:
    """Sharpness-aware: a second backward at perturbed weights."""
    for seed in range(3):
        job.backward(seed)
        grads = gradients_of(job)
        with torch.no_grad():
            for p, g in zip(job.model.parameters(), grads, strict=True):
                p.add_(g, alpha=0.05)
        job.optimizer.zero_grad()
        job.backward(seed)
        with torch.no_grad():
            for p, g in zip(job.model.parameters(), grads, strict=True):
                p.sub_(g, alpha=0.05)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.ends()


# D. Gradients dropped, edited or set.


def gradients_of(job: Job) -> list[Tensor]:
    """A copy of each gradient, wherever it is."""
    if not hasattr(job.optimizer, "edit_gradients"):
        return [p.grad.detach().clone() for p in job.model.parameters()]
    found: dict[int, Tensor] = {}
    job.optimizer.edit_gradients(lambda p, g: found.setdefault(id(p), g.detach().clone()))
    return [found[id(p)] for p in job.model.parameters()]


def edit(job: Job, change: Callable[[Tensor, Tensor], object]) -> None:
    """Edit gradients as AdamW's users do, or by the method for it."""
    if hasattr(job.optimizer, "edit_gradients"):
        job.optimizer.edit_gradients(change)
    else:
        with torch.no_grad():
            for p in job.model.parameters():
                if p.grad is not None:
                    change(p, p.grad)


def noisy(job: Job) -> Iterable[Tensor]:
    generator = torch.Generator()
    for seed in range(4):
        job.backward(seed)
        generator.manual_seed(seed)
        noise = {id(p): torch.randn(p.shape, generator=generator) * 0.01 for p in job.model.parameters()}
        edit(job, lambda p, g, noise=noise: g.add_(noise[id(p)].to(g)))
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.ends()


def masked(job: Job) -> Iterable[Tensor]:
    for seed in range(4):
        job.backward(seed)
        edit(job, lambda p, g: g.mul_((torch.arange(g.numel()).view(g.shape) % 3 > 0).to(g)))
        job.optimizer.step()
        job.model.zero_grad()
    return job.ends()


def edited_directly(job: Job) -> Iterable[Tensor]:
    """In `p.grad` itself, which raises where gradients are on the host."""
    for seed in range(4):
        job.backward(seed)
        for p in job.model.parameters():
            p.grad.mul_(0.5)
            p.grad.data.clamp_(-0.1, 0.1)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.ends()


def replaced_gradients(job: Job) -> Iterable[Tensor]:
    for seed in range(4):
        job.backward(seed)
        for p in job.model.parameters():
            p.grad = p.grad * 2
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.ends()


def projected(job: Job) -> Iterable[Tensor]:
    """Gradients of two losses, of which user code makes one, and sets it."""
    for seed in range(3):
        parameters = list(job.model.parameters())
        first = torch.autograd.grad(loss(job.model, seed), parameters)
        second = torch.autograd.grad(loss(job.model, seed + 50), parameters)
        for p, a, b in zip(parameters, first, second, strict=True):
            p.grad = a - (a * b).sum() / (b * b).sum().clamp_min(1e-12) * b
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.ends()


def skipping(job: Job) -> Iterable[Tensor]:
    """Accumulates, and drops what a bad micro-batch has made."""
    job.model.zero_grad()
    for seed in range(8):
        value = job.backward(seed)
        if seed == 3 or not math.isfinite(float(value)):
            job.model.zero_grad()
            continue
        if seed % 2:
            job.optimizer.step()
            job.optimizer.zero_grad()
    return job.ends()


def zeroed_in_place(job: Job) -> Iterable[Tensor]:
    for seed in range(4):
        job.backward(seed)
        job.optimizer.step()
        job.model.zero_grad(set_to_none=False)
    return job.ends()


def hooked(job: Job) -> Iterable[Tensor]:
    for number, p in enumerate(job.model.parameters()):
        if number % 2:
            p.register_hook(lambda g: g * 0.5)
    job.steps(0, 1)
    handle = job.model.last.weight.register_hook(torch.zeros_like)
    job.steps(2)
    handle.remove()
    job.steps(3)
    return job.ends()


def hooked_modules(job: Job) -> Iterable[Tensor]:
    job.model.blocks[1].register_full_backward_hook(lambda module, before, after: tuple(g * 0.5 for g in before))
    job.steps(0, 1, 2)
    return job.ends()


def hooked_after_accumulation(job: Job) -> Iterable[Tensor]:
    def bound(p: Any) -> None:
        p.grad.clamp_(-0.01, 0.01)

    for p in job.model.parameters():
        p.register_post_accumulate_grad_hook(bound)
    job.steps(0, 1, 2)
    return job.ends()


def clipped(job: Job) -> Iterable[Tensor]:
    found = []
    for seed in range(4):
        job.backward(seed)
        found.append(nn.utils.clip_grad_norm_(job.model.parameters(), 0.1).detach())
        job.optimizer.step()
        job.optimizer.zero_grad()
    return [*job.ends(), *found]


def clipped_by_value(job: Job) -> Iterable[Tensor]:
    for seed in range(4):
        job.backward(seed)
        nn.utils.clip_grad_value_(job.model.parameters(), 0.01)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job.ends()


def frozen_in_turns(job: Job) -> Iterable[Tensor]:
    for seed in range(5):
        for number, block in enumerate(job.model.blocks):
            for p in block.parameters():
                p.requires_grad_(number != seed % 4)
        job.step(seed)
    return job.ends()


def closures(job: Job) -> Iterable[Tensor]:
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            job.optimizer.zero_grad()
            return job.backward(seed)

        job.optimizer.step(closure)
        job.optimizer.zero_grad()
    return job.ends()


def scheduled(job: Job) -> Iterable[Tensor]:
    schedule = torch.optim.lr_scheduler.OneCycleLR(job.optimizer, max_lr=0.02, total_steps=8)
    for seed in range(6):
        job.step(seed)
        schedule.step()
    return job.ends()


def under_another_default_device(job: Job) -> Iterable[Tensor]:
    for seed in range(3):
        job.backward(seed)
        with torch.device("meta"):
            job.optimizer.step()
        job.optimizer.zero_grad()
    return job.ends()


def copied_optimizer(job: Job) -> Iterable[Tensor]:
    job.step(0)
    optimizer = copy.copy(job.optimizer)
    job.backward(1)
    optimizer.step()
    optimizer.zero_grad()
    return job.ends()


PROGRAMS: dict[str, dict[Callable[[Job], Iterable[Tensor]], Callable[[Any], object] | None]] = {
    "A": {
        **dict.fromkeys((deep_copies, deep_copy_of_the_model, pickled, loaded_in_part, loaded_by_assignment)),
        **dict.fromkeys((swapped, parametrized, pruned, vectors, exchanged_memory, saved_and_loaded)),
        **dict.fromkeys((distributed_checkpoint, exponential_averages_loaded)),
        parametrization_removed: halve,
    },
    "B": dict.fromkeys((handler_saves, alarm_raises, collected, backward_raises, step_hooks)),
    "C": {
        **dict.fromkeys((averaged, averaged_by_lists, looked_ahead, bounded, decayed_by_hand, set_anew)),
        **dict.fromkeys((begun_anew, penalised, logged, called_with_its_parameters, sharp)),
    },
    "D": {
        **dict.fromkeys((noisy, masked, edited_directly, replaced_gradients, projected, skipping)),
        **dict.fromkeys((zeroed_in_place, hooked, hooked_modules, hooked_after_accumulation, clipped)),
        **dict.fromkeys((clipped_by_value, frozen_in_turns, closures, scheduled, copied_optimizer)),
        under_another_default_device: None,
    },
}
"""Programs by their kind, each with what adapts its model."""


def all_programs() -> Iterator[tuple[str, Callable[[Job], Iterable[Tensor]], Callable[[Any], object] | None]]:
    """Each program with its name and what adapts its model; those that compute a weight once for each way."""
    for kind, programs in PROGRAMS.items():
        for program, adapt in programs.items():
            yield f"{kind} {program.__name__}", program, adapt
    for adapt in (normed, spectral, old_norm):
        yield f"A {adapt.__name__}", norms, adapt
