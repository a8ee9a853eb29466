"""Clipping the global norm of gradients, wherever they lie: factors that are folded into the update."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from dos.gradients.identity import GradientOrHandle, Token
from dos.gradients.offload import OffloadedGradients
from dos.gradients.scaling import versions_of_a_check
from dos.guard import warn
from dos.kernels.update import sum_of_squares
from dos.sharding.local import local
from dos.sharding.meshes import Meshes
from dos.state.record import ParameterRecord, flat_alias


class Clipping:
    """Clips one optimizer's gradients, in `p.grad` and offloaded ones, on all ranks.

    Factors are stored until the step, each for one gradient as it was when the factor was computed. A gradient that is
    replaced or written to afterwards, as zeroing and backward do, is another one and has no factor. Trainers zero
    gradients through the model, without a call to the optimizer: factors stored by parameter would clip the gradients
    of the next iteration by the norm of these.

    max_grad_norm: the norm to which every step clips, or None. skips: whether a step is skipped whose norm is not
    finite. meshes: the ranks over which gradients are divided.
    Of `parameters` in the methods, some may have no gradient.
    """

    def __init__(
        self, offloaded: OffloadedGradients, max_grad_norm: float | None, meshes: Meshes, *, skips: bool = False
    ) -> None:
        self._offloaded = offloaded
        self._meshes = meshes
        self._skips = skips
        self.max_grad_norm = max_grad_norm
        self._clipped: dict[int, tuple[Token, Tensor]] = {}
        """By id of the gradient: its token when it was clipped, and its factor."""
        self._floats: dict[int, float] = {}
        self._warned = False

    def forget(self) -> None:
        """Forget all factors, because the gradients are zeroed, or were used."""
        self._clipped, self._floats = {}, {}

    def marked(self) -> list[tuple[Token, Tensor]]:
        """Return tokens and tensors of which no version counts writes; see `look_at_bits`."""
        return [
            (token, local(alive)) for token, _ in self._clipped.values() if isinstance(alive := token.alive, Tensor)
        ]

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the 2-norm of their gradients, wherever these are, as the step will use them.

        float32, shape (), on the first gradient's device where ranks divide none.
        """
        parameters = list(parameters)
        # Not of all offloaded gradients: user code may have removed parameters from their groups since backward.
        away = self._squares_away({id(p) for p in parameters}) if self._offloaded.enabled else []
        if self._meshes:
            squares = [(p, self._square(p.grad)) for p in parameters if p.grad is not None]
            return self._meshes.norm([*squares, *away]).to(torch.float32)
        norms = []
        for gradient in _gradients(parameters):
            norm, factor = torch.linalg.vector_norm(gradient, dtype=torch.float32), self._factor(gradient)
            norms.append(norm if factor is None else norm * factor.to(norm.device))
        norms += [_root(away)] if away else []
        norms = [norm.to(norms[0].device, non_blocking=True) for norm in norms]
        none = torch.zeros((), dtype=torch.float32, device="cpu")
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else none

    def norm_away(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """Return the norm of the offloaded gradients of these parameters as the step will use them, shape ().

        Raises ValueError for another norm than the 2-norm where ranks divide the parameters.
        """
        wanted = {id(p) for p in parameters}
        if norm_type == 2:
            squares = self._squares_away(wanted)
            return self._meshes.norm(squares) if self._meshes else _root(squares)
        if self._meshes:
            raise ValueError(
                f"clip_grad_norm_(norm_type={norm_type:g}) is not supported for gradients that "
                "DOSAdam(offload_gradients=True) keeps on the host, where ranks divide the parameters; use norm_type=2"
            )
        norms = []
        for record, handle in self._offloaded.gradients(wanted):
            flat, factor = self._offloaded.flat(record), self._as_float(handle)
            flat = flat if factor == 1 else flat * factor
            norms.append(torch.linalg.vector_norm(flat, norm_type, dtype=torch.float64))
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())

    def _squares_away(self, wanted: Collection[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters of offloaded gradients with the sums of squares of these: float64, shape ().

        wanted: the ids of the parameters.
        """
        squares = []
        for record, handle in self._offloaded.gradients(wanted):
            square = self._as_float(handle) ** 2 * sum_of_squares(self._offloaded.flat(record))
            squares.append((record.parameter, torch.tensor(square, dtype=torch.float64, device="cpu")))
        return squares

    def _square(self, gradient: Tensor) -> Tensor:
        """Return the sum of squares of this rank's part: float64, shape ()."""
        mine, factor = local(gradient), self._factor(gradient)
        flat = flat_alias(mine.detach()) if mine.is_cpu else None
        if flat is None:
            square = torch.linalg.vector_norm(mine, dtype=torch.float64) ** 2
        else:
            square = torch.tensor(sum_of_squares(flat), dtype=torch.float64, device="cpu")
        return square if factor is None else square * factor.to(square.device) ** 2

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip their gradients to `max_norm` in the step, wherever these are; return their norm before."""
        norm = self.norm(parameters)
        handles = [handle for _, handle in self._offloaded.gradients({id(p) for p in parameters})]
        self._fold([*_gradients(parameters), *handles], clip_factor(norm, max_norm))
        return norm

    def fold(self, parameters: Iterable[Tensor], factor: Tensor) -> None:
        """Multiply their gradients in the step by a factor that torch's clipping has computed.

        Raises RuntimeError if one was clipped already, because torch's norm does not include that factor.
        """
        gradients = _gradients(parameters)
        if any(self._factor(gradient) is not None for gradient in gradients):
            raise RuntimeError(
                "gradients of DOSAdam were clipped twice since the last step, the second time by torch's function, "
                "which does not see what the first one folded into the step; clip once, or not with dos.fold_clipping()"
            )
        self._fold(gradients, factor)

    def fold_away(self, parameters: Iterable[Tensor], factor: Tensor) -> None:
        """Multiply their offloaded gradients, as they are now, in the step by a factor of a norm that includes them."""
        self._fold([handle for _, handle in self._offloaded.gradients({id(p) for p in parameters})], factor)

    def _fold(self, gradients: Iterable[GradientOrHandle], factor: Tensor) -> None:
        """Multiply the factors of these gradients by `factor`; other gradients keep their factors."""
        before = [(gradient, self._factor(gradient)) for gradient in gradients]
        # Most often all gradients share one factor, which is then read from the device only once.
        products = {id(old): old * factor for _, old in before if old is not None}
        # Keyed by ids of factors, of which the next line releases some: other tensors may get the same ids.
        self._floats = {}
        self._clipped |= {id(each): (Token(each), products.get(id(old), factor)) for each, old in before}

    def _factor(self, gradient: GradientOrHandle) -> Tensor | None:
        """Return the factor for the gradient: float32, shape (); None: it was not clipped, or has changed since."""
        # Another gradient may have the id of one that was released: the token tells them apart.
        token, factor = self._clipped.get(id(gradient), (None, None))
        if token is None or not token.holds(gradient):
            return None
        # GradScaler may have checked and unscaled it since; in some versions of torch these count as writes.
        if isinstance(gradient, Tensor) and not 0 <= token.writes(gradient) <= 2 * versions_of_a_check():
            return None
        return factor

    def _as_float(self, gradient: GradientOrHandle) -> float:
        """Return the factor as a number, 1 if there is none. Synchronises once for all gradients that share it."""
        factor = self._factor(gradient)
        if factor is None:
            return 1.0
        if id(factor) not in self._floats:
            self._floats[id(factor)] = float(factor)
        return self._floats[id(factor)]

    def apply(self, gradient: GradientOrHandle | None, values: Tensor) -> None:
        """Multiply the values of a gradient by its factor, and forget this: user code is about to edit them."""
        factor = None if gradient is None else self._factor(gradient)
        if factor is not None:
            values.mul_(factor.to(values.device))
            del self._clipped[id(gradient)]

    def _lost(self, gradient: GradientOrHandle) -> bool:
        """Return whether the gradient was clipped and has been written to since."""
        token, _ = self._clipped.get(id(gradient), (None, None))
        return token is not None and token.alive is gradient and self._factor(gradient) is None

    def about_to_add(self, record: ParameterRecord) -> None:
        """Clip an offloaded gradient by its factor now, as another micro-batch is about to be added to it."""
        handle = self._offloaded.handle(record)
        if handle is not None and self._factor(handle) is not None:
            self.apply(handle, self._offloaded.flat(record))

    def scales(
        self, members: Sequence[tuple[ParameterRecord, object]], parameters: Iterable[Tensor], scale: float
    ) -> float | list[float] | None:
        """Return the factors by which the step multiplies the gradient of each record, or of all.

        None: the step is skipped.

        members: tuples that begin with a record. parameters: of the norm, where it is needed. scale: unscales
        gradients.
        """
        if self._skips or self.max_grad_norm is not None:
            norm = self.norm(parameters) * scale
            if self._skips and not norm.isfinite():
                return None
            if self.max_grad_norm is not None:
                scale *= float(clip_factor(norm, self.max_grad_norm))
        if not self._clipped:
            return scale
        away = dict(self._offloaded.gradients())
        found: list[GradientOrHandle] = []
        for record, _ in members:
            gradient = away.get(record, record.parameter.grad)
            assert gradient is not None, "asked only for parameters that have a gradient"
            found.append(gradient)
        if any(map(self._lost, found)):
            self._warn()
        return [scale * self._as_float(gradient) for gradient in found]

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "a gradient was written to between clip_grad_norm_() and step(), by backward, by zeroing in place or "
                "by hand, so it is not clipped; call clip_grad_norm_() after all that changes gradients"
            )


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _root(squares: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the square root of the sum of these, each with its parameter: float32, shape ()."""
    total = math.sqrt(math.fsum(float(square) for _, square in squares))
    return torch.tensor(total, dtype=torch.float32, device="cpu")


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor of clipping to `max_norm`: the formula of torch.nn.utils.clip_grads_with_norm_."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
