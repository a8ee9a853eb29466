"""The fastest settings for a model on a machine: those that leave AdamW's results as they are, and any batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.planner.options import difference
from perfmodel.planner.outcome import Outcome, adaptive_outcome
from perfmodel.planner.question import Question
from perfmodel.planner.situation import Situation
from perfmodel.planner.whatif import AUTO, MOST, STREAM, WORTHWHILE, Effect, Remedy, most

_Choices = Sequence[tuple[dict[str, Any], dict[str, Any]]]

SHARDED = ({"fsdp": True}, {"fsdp": False})
"""A choice for several GPUs."""
CHOICES: _Choices = (
    (AUTO, {"offload_activations": 0.0}),
    ({"checkpointing": True}, {"checkpointing": False}),
    ({"fused_loss": True}, {"fused_loss": False}),
    (STREAM, {"weights": "stay"}),
    ({"offload_gradients": True}, {"offload_gradients": False}),
)
"""Settings that change no result, and the same without each."""
ACCUMULATIONS = (2, 4, 8, 16, 32)
SEARCHED = 64
"""Subgroups with which settings are compared: with all of a large model planning would take a multiple of the time."""
NEARLY_ALL = 0.97
"""A share of the compute alone above which more micro-batches gain little."""


@dataclass(frozen=True)
class Fastest:
    """A question with the fastest of some settings, and its outcome.

    change: the options that were added. effect: what else they change, if nothing fits without.
    """

    question: Question
    outcome: Outcome
    change: str
    effect: Effect = Effect.NOTHING

    @property
    def tokens_per_s(self) -> float:
        """Of the whole job."""
        return self.question.step_tokens / self.outcome.seconds

    @property
    def compute_share(self) -> float:
        """Share of the tokens per second that forward and backward reach without an optimizer, up to 1."""
        return Situation(self.question).training_s / self.outcome.seconds

    def accumulating(self) -> tuple[int, float] | None:
        """The fewest micro-batches with which `compute_share` is NEARLY_ALL, or of that with the most; and it.

        None if more micro-batches gain nothing worth while, or are not what was asked.
        """
        if self.compute_share >= NEARLY_ALL or self.question.micro_batches > 1 or not self.question.accumulation:
            return None
        most = self._share_accumulating(ACCUMULATIONS[-1])
        if most * (1 - WORTHWHILE) <= self.compute_share:
            return None
        enough = NEARLY_ALL
        if most < enough:  # nearly all that more micro-batches gain
            enough = self.compute_share + NEARLY_ALL * (most - self.compute_share)
        shares = ((count, self._share_accumulating(count)) for count in ACCUMULATIONS)
        return next((count, share) for count, share in shares if share >= enough)

    def _share_accumulating(self, count: int) -> float:
        situation = Situation(self.question.replace(micro_batches=count))
        return situation.training_s / adaptive_outcome(situation).seconds

    def to_json(self) -> dict[str, Any]:
        """Return the options, the batch, and times in seconds."""
        more = self.accumulating()
        return {
            "change": self.change,
            "effect": self.effect.name.lower(),
            "batch": self.question.batch,
            "iteration_s": self.outcome.seconds,
            "tokens_per_s": self.tokens_per_s,
            "compute_share": self.compute_share,
            "accumulation": more and more[0],
            "compute_share_accumulating": more and more[1],
        }


@functools.lru_cache(16)
def fastest_batch(question: Question, largest: int = MOST) -> tuple[Question, Outcome] | None:
    """The question with the batch that trains most tokens per second, and its outcome; None if none fits.

    Larger batches hide more of the update, and leave less memory for state. So it is looked for from the largest
    batch that fits, and is no larger than `largest`, down, in steps of a quarter, for as long as that is faster.
    """
    found, fastest, size = None, 0.0, most(question, "batch", largest)
    while size:
        asked = question.replace(batch=size)
        outcome = adaptive_outcome(Situation(asked))
        if found and asked.step_tokens / outcome.seconds <= fastest:
            break
        if outcome.fits:
            found, fastest = (asked, outcome), asked.step_tokens / outcome.seconds
        size = size * 3 // 4
    return found


def fastest(question: Question) -> Fastest | None:
    """The fewest settings of CHOICES that are as fast as any, at their best batches; None if nothing fits.

    All are taken that the question permits. Then each is left out with which the job is not faster by more than
    WORTHWHILE, in two orders: checkpointing is slower than saved tensors on the host for some jobs, faster for others.
    The settings that were asked for win if they are as fast. Settings are compared with SEARCHED subgroups, and what
    is returned is planned with the question's.
    """
    coarse = question.replace(chosen_size=max(question.subgroup_size, math.ceil(question.state_numel / SEARCHED)))
    choices = _choices(question)
    allowed = [n for n, choice in enumerate(choices) if _with(question, [choice]) is not None]

    def found(taken: Sequence[int], largest: int) -> Fastest | None:
        return _at_best(coarse, [choices[n] for n in taken], largest)

    ways = [_fewest(found, allowed, order) for order in (allowed, [*allowed[1:], *allowed[:1]])]
    best = max(filter(None, ways), key=lambda each: each.tokens_per_s, default=None)
    asked = [question]  # may be faster than the best by less than WORTHWHILE
    if best:
        asked.append(best.question.replace(chosen_size=question.chosen_size, batch=question.batch))
    planned = filter(None, map(fastest_batch, asked))
    return max(
        (Fastest(*each, difference(question, each[0])) for each in planned),
        key=lambda each: each.tokens_per_s,
        default=None,
    )


def fastest_with(question: Question, remedies: Sequence[Remedy]) -> Fastest | None:
    """The fastest settings; if nothing fits, those with the first remedy, which changes least."""
    if found := fastest(question):
        return found
    for remedy in remedies[:1]:
        if found := fastest(remedy.situation.question):
            return dataclasses.replace(found, change=difference(question, found.question), effect=remedy.effect)
    return None


def _fewest(
    found: Callable[[Sequence[int], int], Fastest | None], taken: Sequence[int], order: Sequence[int]
) -> Fastest | None:
    """Leave out choices, in an order, that are not worthwhile; None if no part of them fits.

    found: choices at their best batch up to a limit, which is twice the best before: with fewer ways to save memory
    the best batch is no larger.
    """
    result = best = found(taken, MOST)
    for choice in (*order, *order):  # twice: one that was worthwhile may not be without another
        fewer = [each for each in taken if each != choice]
        without = found(fewer, 2 * result.question.batch if result else MOST) if choice in taken else None
        if without is None or (best and without.tokens_per_s < (1 - WORTHWHILE) * best.tokens_per_s):
            continue
        taken, result = fewer, without
        # The fastest of all stays the measure: else a little would be lost with each that is left out.
        best = max(filter(None, (best, without)), key=lambda each: each.tokens_per_s)
    return result


def _choices(question: Question) -> _Choices:
    """CHOICES that the question leaves open: GradScaler needs gradients on the device, FSDP2 several GPUs."""
    choices = [each for each in CHOICES if not (question.scales_loss and "offload_gradients" in each[0])]
    several = question.ranks > 1 and not question.offload_parameters
    return (*choices, SHARDED) if several else choices


def _with(question: Question, taken: _Choices) -> Question | None:
    """Return the question with these choices and without the others; None if they exclude each other."""
    changes = {name: value for choice in _choices(question) if choice not in taken for name, value in choice[1].items()}
    changes |= {name: value for choice in taken for name, value in choice[0].items()}
    try:
        return question.replace(**changes)
    except ValueError:
        return None


def _at_best(question: Question, taken: _Choices, largest: int) -> Fastest | None:
    """Return the question with these choices at its best batch up to the largest; None if that does not fit."""
    asked = _with(question, taken)
    found = fastest_batch(asked, largest) if asked else None
    return found and Fastest(*found, difference(question, found[0]))
