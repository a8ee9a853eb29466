"""A configuration of a sweep scaled down to a small model that is updated on a device, against the clock."""

from __future__ import annotations

import dataclasses
import math

import torch

from experiments.gpt import GPT, GPTConfig
from experiments.miniature import UPDATE_S, equal_subgroups, measured_update_s, slowed
from experiments.paper.sweep.predict import STATE_BYTES, Outcome, Predictor, Simulation, policy_plan, simulated
from experiments.paper.sweep.spec import Configuration
from perfmodel.simulate import UPDATE_ALONE

LAYERS, HEADS, CONTEXT = 2, 4, 32
"""Of the small model; its width follows from the number of parameters."""
ROUNDS = 3


def run_on_device(config: Configuration, predictor: Predictor) -> Outcome:
    """Measure updates of the small model, beside the prediction for the same.

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
    emulated = None
    if config.device == "emulated":
        profile = emulated = slowed(profile, equal_subgroups(model.numel, size), UPDATE_S)
    plan = policy_plan(config, run, work, profile)
    return Outcome(
        run.params,
        run.subgroups,
        measured_update_s=measured_update_s(list(model.parameters()), plan, size, emulated, ROUNDS),
        **simulated(Simulation(plan, work, profile, UPDATE_ALONE)),  # type: ignore[arg-type]  # its counts are whole
    )


def small_model(config: Configuration) -> GPT:
    """A GPT of about `config.parameters` parameters where it is to train, bfloat16."""
    squared, linear = 12 * LAYERS, 256 + CONTEXT  # blocks, embeddings of bytes and positions
    width = (math.sqrt(linear**2 + 4 * squared * (config.parameters or 0)) - linear) / (2 * squared)
    width = HEADS * max(1, round(width / HEADS))
    device = "cuda" if config.device == "cuda" else "cpu"
    torch.manual_seed(0)
    return GPT(GPTConfig(LAYERS, width, HEADS, CONTEXT), device=device, dtype=torch.bfloat16)
