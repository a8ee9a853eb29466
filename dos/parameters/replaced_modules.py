"""Warns where modules of an attached model were replaced, whose successors the optimizer does not have."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from dos.guard import warn
from dos.parameters.admission import Group
from dos.parameters.hooks import Attachment
from dos.state.record import ParameterRecord
from dos.torch_internals.live_objects import parameters_of_all_modules, parameters_of_all_optimizers
from dos.torch_internals.module_parameters import own_parameters, parameters_of


def find_gone(model: nn.Module, parameters: Collection[Tensor], *, anywhere: bool) -> list[Tensor]:
    """Return those of the parameters that the model does not have, and, with `anywhere`, no other module either."""
    inside = set(map(id, parameters_of(model)))
    gone = [p for p in parameters if id(p) not in inside and p.requires_grad]
    if not gone or not anywhere:
        return gone
    held = set(map(id, parameters_of_all_modules()))
    return [p for p in gone if id(p) not in held]


def warn_of_successors(model: nn.Module, own: Collection[Tensor], gone: Collection[Tensor]) -> bool:
    """Warn, and return True, if the model has parameters to be trained that no optimizer has.

    own: the optimizer's. gone: those of them that are no longer in the model. Without any nothing was replaced, and the
    model may well have parameters that are not to be trained.
    """
    if not gone:
        return False
    known = set(map(id, own))
    others = {
        f"{place}.{name}".strip("."): p
        for place, module in model.named_modules()
        for name, p in own_parameters(module).items()
        if p is not None and p.requires_grad and id(p) not in known
    }
    elsewhere = set(map(id, parameters_of_all_optimizers())) if others else set[int]()
    names = [name for name, p in others.items() if id(p) not in elsewhere]
    if not names:
        return False
    warn(
        f"the model has parameters that no optimizer has ({_some(names)}), and DOSAdam has some that are not in the "
        f"model, of shapes {_some([str(tuple(p.shape)) for p in gone])}: a module was replaced after the optimizer was "
        "built, and its successor is not trained. Build the optimizer from the model as it is now, or call "
        "optimizer.add_param_group() with the new parameters and attach the model again."
    )
    return True


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class Successors:
    """Looks for modules of an attached model that were replaced, where the number of gradients has changed."""

    def __init__(self) -> None:
        self.gradients = -1
        """The number of parameters with a gradient when `look` was called last."""
        self._looked_for: set[int] = set()
        """The ids of parameters without a gradient for which the model was searched."""

    def begin(self, attachment: Attachment, own: Collection[Tensor]) -> None:
        """Begin with a model that was just attached. own: the optimizer's parameters."""
        self.gradients, self._looked_for, model = -1, set(), attachment.model
        if model is not None and not attachment.gathers:
            gone = find_gone(model, own, anywhere=True)
            if warn_of_successors(model, own, gone):
                self._looked_for.update(map(id, gone))  # once

    def look(
        self, attachment: Attachment, own: Collection[Tensor], active: Sequence[tuple[ParameterRecord, Group]]
    ) -> None:
        """Warn if the model no longer has parameters that got no gradient, and has others that no optimizer has.

        active: the records with a gradient.
        """
        self.gradients, model = len(active), attachment.model
        known = {id(record.parameter) for record, _ in active} | self._looked_for
        missing = [p for p in own if id(p) not in known]
        # Once each: experts of a mixture often get none.
        self._looked_for.update(map(id, missing))
        if missing and model is not None and not attachment.gathers:
            warn_of_successors(model, own, find_gone(model, missing, anywhere=False))
