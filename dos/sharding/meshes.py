"""The ranks over which parameters are divided: sums over all of them, and checks that they agree."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dos.sharding.local import is_sharded


class Meshes:
    """The device meshes of an optimizer's parameters, and further process groups that the user named.

    Every rank must call the same methods in the same order: each is one collective on a few numbers for every process
    group.
    """

    def __init__(self, process_groups: Sequence[Any] = ()) -> None:
        """process_groups: further groups over which the job is divided, such as the stages of a pipeline."""
        self._meshes: list[Any] = []
        self._further = tuple(process_groups)

    def __bool__(self) -> bool:
        """Return whether any parameter, or the job, is divided."""
        return bool(self._meshes or self._further)

    def meet(self, parameters: Iterable[Tensor]) -> None:
        """Add the meshes of these parameters, in order."""
        for parameter in parameters:
            if is_sharded(parameter) and parameter.device_mesh not in self._meshes:  # type: ignore[attr-defined]
                self._meshes.append(parameter.device_mesh)  # type: ignore[attr-defined]

    def norm(self, squares: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the 2-norm over all ranks: float64, shape (), the same bits on each rank.

        squares: parameters that have a gradient here, each with the sum of squares of this rank's part: float64,
            shape (). Elements that several ranks have count once.
        """
        device = self._device()
        sums = torch.zeros(len(self._meshes) + 1, dtype=torch.float64, device=device)
        for parameter, square in squares:
            place = self._meshes.index(parameter.device_mesh) if is_sharded(parameter) else -1  # type: ignore[attr-defined]
            sums[place] += square.to(device, non_blocking=True) / _copies(parameter)
        # In the order of the meshes, which is the same on all ranks: else two ranks would wait for ever, each in the
        # collective of another group.
        for group, places in self._groups().items():
            part = sums[places]
            dist.all_reduce(part, group=group)
            sums[places] = part
        total = sums.sum()
        for group in self._further:
            dist.all_reduce(total, group=group)
        return total.sqrt()

    def any_infinite(self, infinite: bool, scale: float) -> bool:
        """Return whether a gradient is infinite on any rank. scale: the loss scale, which must be equal on all.

        Raises RuntimeError on every rank if it is not, because gradients of different scales were added up.
        """
        anywhere, most, least = self._most([float(infinite), scale, -scale])
        if most != -least:
            raise RuntimeError(
                f"ranks have loss scales from {-least:g} to {most:g}, so their gradients cannot be added up; build "
                "GradScaler with the same settings on every rank, and call its step() and update() on all of them"
            )
        return anywhere > 0

    def agree(self, settings: Mapping[str, int | str], *, stages: bool = True) -> None:
        """Raise RuntimeError on every rank if a setting differs, naming the first one that does.

        stages: whether the ranks of further process groups must agree, too.
        """
        values = [zlib.crc32(each.encode()) if isinstance(each, str) else each for each in settings.values()]
        most = self._most([*values, *(-value for value in values)], stages=stages)
        for i, (name, mine) in enumerate(settings.items()):
            if most[i] != -most[i + len(values)]:
                others = (
                    "others have something else"
                    if isinstance(mine, str)
                    else f"from {-most[i + len(values)]:,.0f} to {most[i]:,.0f} were found"
                )
                raise RuntimeError(
                    f"ranks disagree on {name}: this one (rank {dist.get_rank()}) has {mine}, and {others}; build the "
                    "optimizer with the same arguments and parameters on every rank"
                )

    def _most(self, values: Sequence[float], *, stages: bool = True) -> list[float]:
        most = torch.tensor(values, dtype=torch.float64, device=self._device())
        for group in (*self._groups(), *(self._further if stages else ())):
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return most.tolist()

    def _groups(self) -> dict[Any, list[int]]:
        """Return the process groups of all dimensions of all meshes, each with the positions of its meshes."""
        groups: dict[Any, list[int]] = {}
        for place, mesh in enumerate(self._meshes):
            for dim in range(mesh.ndim):
                if mesh.size(dim) > 1:
                    groups.setdefault(mesh.get_group(dim), []).append(place)
        return groups

    def _device(self) -> torch.device:
        """Return the device of the collectives' tensors."""
        if self._meshes:
            return torch.device(self._meshes[0].device_type)
        backend = dist.get_backend(self._further[0])
        return torch.device("cuda" if backend == "nccl" else "cpu")


def _copies(parameter: Any) -> int:
    """Return how many ranks of its mesh have each element of the parameter."""
    if not is_sharded(parameter):
        return 1
    mesh = parameter.device_mesh
    return math.prod(mesh.size(dim) for dim, p in enumerate(parameter.placements) if p.is_replicate())


def checked_groups(groups: object) -> tuple[Any, ...]:
    """Return the argument `process_groups`; None is no group. Raises TypeError for anything but process groups."""
    found = () if groups is None else tuple(groups) if isinstance(groups, list | tuple | set) else (groups,)
    wrong = [each for each in found if not (dist.is_available() and isinstance(each, dist.ProcessGroup))]
    if wrong:
        raise TypeError(
            f"process_groups must be process groups of torch.distributed, such as mesh.get_group(), found {wrong[0]!r}"
        )
    return found
