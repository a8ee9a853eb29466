"""Memory that model, compute and optimizer state take on one rank's device, host and disk, in bytes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

from perfmodel.footprint import HostBytes
from perfmodel.planner.question import Question
from perfmodel.windows import WINDOWS
from perfmodel.workload import WEIGHT_WINDOW, SavedTensors

MOST_GROUPS = 32
"""Groups in which saved tensors are planned."""


def host_bytes(question: Question, numel: int) -> HostBytes:
    """Host memory of the state of `numel` parameters and of staging.

    Offloaded gradients, and weights that may stream, count for all parameters, wherever their state is.
    """
    accelerated = not (question.offload_parameters or question.streams)
    found = HostBytes.of(numel, question.format, accelerated=accelerated)
    whole = question.state_numel * question.value_bytes
    if question.offload_gradients:
        found = dataclasses.replace(found, gradient_staging=whole)
    return dataclasses.replace(found, parameter_staging=whole) if question.streams else found


def held_bytes(question: Question) -> float:
    """Host memory of a parameter whose state is there, beyond gradients and weights that are on the host anyway."""
    if question.streams:
        return question.format.state_bytes
    return question.format.held_bytes - question.value_bytes * question.offload_gradients


class Spill(NamedTuple):
    """The part of one rank's state that is on the host while none is on the device; the rest is on disk.

    numel: parameters of it. free_bytes: host memory for state; infinite if there is enough for all.
    windows: of one subgroup each, through which the rest passes. window_bytes: of them all.
    """

    numel: int
    free_bytes: float = math.inf
    windows: int = 0
    window_bytes: int = 0


def spill(question: Question, taken: int) -> Spill:
    """Divide the state; `taken`: of the host, that each rank takes besides state, offloaded gradients and weights."""
    numel, size, parameter_bytes = question.state_numel, question.subgroup_size, held_bytes(question)
    if question.host_bytes is None or question.disk_bytes is None:
        return Spill(numel)
    if question.offload_gradients:
        found = host_bytes(question, numel)
        taken += found.gradient_staging + question.streams * found.parameter_staging
    free_bytes = (question.host_bytes - question.reserved_on_host) / question.ranks - taken
    if numel * parameter_bytes <= free_bytes:
        return Spill(numel)
    window = math.ceil(min(size, numel) * parameter_bytes)
    left = max(0.0, free_bytes - WINDOWS * window)
    # Whole subgroups go to disk, and the last one may be among them, which is smaller than others.
    gone = math.ceil((numel * parameter_bytes - left) / window) * size + numel % size
    return Spill(max(0, numel - gone), left, WINDOWS, WINDOWS * window)


def saved_tensors(question: Question) -> tuple[SavedTensors, ...]:
    """Tensors that one rank's blocks keep, in groups, saved evenly over forward and used evenly over backward."""
    count = min(question.model.layers, MOST_GROUPS)
    nbytes = question.model.layers * question.tokens * _kept_bytes(question) // count
    return tuple(SavedTensors(nbytes, i / count, 1 - i / count) for i in range(1, count + 1))


@dataclass(frozen=True)
class DeviceBytes:
    """Device memory that training takes beside optimizer state, in bytes of one rank.

    weights, gradients: of the parameters that the rank keeps.
    activations: of all blocks, held when backward begins. logits: with the loss, beside them.
    block: one block's weights and gradients while they are gathered, and its activations.
    reserved: taken by the runtime.
    gathered: weights that are whole for a while though they are divided, in forward and backward.
    """

    weights: int
    gradients: int
    activations: int
    block: int
    reserved: int
    gathered: int = 0
    logits: int = 0

    def peak_bytes(self, accumulating: bool = False) -> int:
        """Bytes at the worst moment: as backward begins, or as it ends.

        Gradients grow as activations go, and both do so evenly, so that neither moment between is worse.
        accumulating: whether those of an earlier micro-batch are there all the time, not set to None before forward.
        """
        held, before = self.reserved + self.weights + self.gathered, self.gradients if accumulating else 0
        return held + max(before + self.activations + self.logits, self.gradients + self.block)

    @property
    def update(self) -> int:
        """Bytes while the optimizer updates."""
        return self.reserved + self.weights + self.gradients


def device_footprint(question: Question) -> DeviceBytes:
    """Memory that the model and its compute take on one rank's device.

    Gradients that are offloaded, or that backward uses and releases, are on the device one block at a time.
    FSDP2 prefetches: two blocks are gathered, and beside a block's gradients are those that the one
    before it has yet to reduce. Embedding and output layer belong to its root, which is gathered
    from forward to the end of backward; both are counted. Parameters on the host take nothing else.
    Of weights that may stream a window is counted, and those outside blocks.
    """
    model, values, tokens = question.model, question.value_bytes, question.tokens
    one_block = math.ceil(model.numel / model.layers) * values
    gradients_of_one = math.ceil(question.trained / model.layers) * values
    whole = 0 if question.keeps_gradients else gradients_of_one
    gathered = 0
    if question.fsdp:
        root = 2 * model.vocabulary * model.width * values
        whole = gathered = min(2 * one_block + root, model.numel * values)
    on_host = question.offload_parameters
    streaming = max(0, model.layers - WEIGHT_WINDOW) * model.block_numel * question.streams
    return DeviceBytes(
        weights=0 if on_host else (question.share(model.numel) - streaming) * values,
        gradients=question.share(question.trained) * values if question.keeps_gradients and not on_host else 0,
        activations=tokens * (model.layers * _kept_bytes(question) + model.outer_bytes(values)),
        block=tokens * _block_bytes(question) + whole,
        reserved=question.reserved,
        gathered=gathered,
        logits=model.logit_bytes(tokens, values, fused=question.fused_loss),
    )


def _kept_bytes(question: Question) -> int:
    """Bytes per token that a block holds as backward begins; with checkpointing its input (Korthikanti et al., 5)."""
    return question.model.width * question.value_bytes if question.checkpointing else _block_bytes(question)


def _block_bytes(question: Question) -> int:
    return question.model.block_bytes(question.sequence, question.value_bytes, eager_attention=question.eager_attention)
