"""A configuration of a sweep scaled down to a small model that trains on a device, against the clock."""

from __future__ import annotations

import dataclasses
import math
import statistics

import torch

from dos import DOSAdam, EmulatedDevice
from experiments.corpus import Corpus, standard_library
from experiments.gpt import GPT, GPTConfig
from experiments.miniature import UPDATE_S, equal_subgroups, slowed
from experiments.paper.sweep.predict import STATE_BYTES, Outcome, Predictor, Simulation, lanes, policy_plan
from experiments.paper.sweep.spec import Configuration
from perfmodel.hardware import HardwareProfile
from perfmodel.plan import Plan
from perfmodel.simulate import UPDATE_ALONE

LAYERS, HEADS, CONTEXT, BATCH = 2, 4, 32, 2
"""Of the small model; its width follows from the number of parameters."""
SETTLING, STEPS = 2, 3
"""Steps that move state to where it stays, and steps that are measured."""


def check_device(name: str) -> None:
    """Raise ValueError if there is no such device here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for and there is no CUDA device here; use 'emulated' or 'simulated'")


def run_on_device(config: Configuration, predictor: Predictor) -> Outcome:
    """Train the small model and measure its updates, beside what is predicted of the same.

    The model has as many subgroups as a rank of the configuration, its state is placed by the same policy, and the GPU
    memory that is free for it is in proportion. An emulated device has the machine's rates, slowed together so that an
    update on the CPU alone lasts UPDATE_S; a CUDA device has its own, which `machine` should be a profile
    of. Measured is the median time from `step()`, with all gradients on the device, to the last transfer.
    """
    run = predictor.run_of(config)
    model = small_model(config)
    size = math.ceil(model.numel / run.subgroups)
    whole = predictor.simulation(config).workload
    state, state_there = STATE_BYTES * size, STATE_BYTES * whole.subgroups[0].numel
    work = equal_subgroups(
        model.numel,
        size,
        peak_free_bytes=int(whole.peak_free_bytes) * state // state_there,
        shared_free_bytes=int(whole.shared_free_bytes) * state // state_there,
    )
    profile = dataclasses.replace(config.profile(), ranks_per_host=config.ranks_per_node)
    if config.device == "emulated":
        profile = slowed(profile, equal_subgroups(model.numel, size), UPDATE_S)
    plan = policy_plan(config, run, work, profile)
    simulation = Simulation(plan, work, profile, UPDATE_ALONE)
    timeline = simulation.timeline()
    return Outcome(
        run.params,
        run.subgroups,
        update_s=timeline.makespan,
        measured_update_s=measure(model, plan, size, profile if config.device == "emulated" else None),
        **lanes(simulation, timeline),  # type: ignore[arg-type]  # its counts are whole
    )


def small_model(config: Configuration) -> GPT:
    """A GPT of about `config.parameters` parameters where it is to train, bfloat16."""
    squared, linear = 12 * LAYERS, 256 + CONTEXT  # blocks, embeddings of bytes and positions
    width = (math.sqrt(linear**2 + 4 * squared * (config.parameters or 0)) - linear) / (2 * squared)
    width = HEADS * max(1, round(width / HEADS))
    device = "cuda" if config.device == "cuda" else "cpu"
    torch.manual_seed(0)
    return GPT(GPTConfig(LAYERS, width, HEADS, CONTEXT), device=device, dtype=torch.bfloat16)


def measure(model: GPT, plan: Plan, subgroup_size: int, emulated: HardwareProfile | None) -> float:
    """Median seconds of an update of a training model under a plan, on its own device or on an emulated one.

    Gradients are set when all of them are there, so that none leaves during backward: what is predicted is the update
    alone.
    """
    device = None if emulated is None else EmulatedDevice(emulated, capacity=20 * model.numel)
    optimizer = DOSAdam(
        model.parameters(),
        policy=lambda work: plan,
        subgroup_size=subgroup_size,
        state_format="float32",  # as the published runs have it
        device=device,
    )
    parameters = list(model.parameters())
    seconds = []
    for batch in Corpus(standard_library(), CONTEXT).batches(SETTLING + STEPS, BATCH, seed=0):
        loss = model(*(tensor.to(parameters[0].device) for tensor in batch))
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        timeline = optimizer.timeline()
        assert timeline, "a step has run"
        seconds.append(max(span.end for span in timeline.spans))
    return statistics.median(seconds[SETTLING:])
