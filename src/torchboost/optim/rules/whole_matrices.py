"""Bring the shards of matrices together on one rank each, work on the whole matrices there, and send shards back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.errors import IncompatibleError

__all__ = ["Layout", "exchanged", "layout_of"]


@dataclass(frozen=True)
class Layout:
    """How a parameter holds its matrices.

    Args:
        shape: Of the whole parameter, or of what this rank holds if that is whole matrices.
        stacked: Whether the last two axes are those of matrices; otherwise all axes but the first are joined.
        axis: The axis along which matrices are divided among ranks; None if this rank holds whole matrices.
        mesh: The device mesh and its dimension of these ranks.
    """

    shape: tuple[int, ...]
    stacked: bool
    axis: int | None = None
    mesh: tuple[Any, int] | None = None

    @property
    def divided(self) -> bool:
        """Whether no rank holds a whole matrix."""
        return self.axis is not None

    @property
    def along(self) -> int:
        """The divided axis; 0 if there is none."""
        return self.axis or 0

    @property
    def matrices(self) -> tuple[int, ...]:
        """The shape as matrices: ``(..., m, n)``."""
        return self.shape if self.stacked else (self.shape[0], -1)

    @staticmethod
    def local(tensor: Any) -> Tensor:
        """Return what this rank holds."""
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def layout_of(tensor: Any, *, stacked: bool) -> Layout:
    """Return how a parameter holds its matrices, sharded or not.

    Raises:
        IncompatibleError: The parameter is sharded along two axes, or in a way that is not a plain division of an axis.
    """
    stacked = stacked and tensor.ndim > 2
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return Layout(tuple(tensor.shape), stacked)
    from torch.distributed.tensor import Replicate, Shard

    shards = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if not shards:
        return Layout(tuple(tensor.shape), stacked)
    placement = placements[shards[0]]
    if len(shards) > 1 or type(placement) is not Shard:
        raise IncompatibleError(
            f"Muon needs parameters that are whole, or divided along one axis as by fully_shard; found the placements "
            f"{tuple(placements)}. Give these parameters another rule, such as rule='adamw'."
        )
    axis = placement.dim % tensor.ndim
    if stacked and axis < tensor.ndim - 2:
        return Layout(tuple(tensor.to_local().shape), stacked)
    return Layout(tuple(tensor.shape), stacked, axis, (tensor.device_mesh, shards[0]))


def exchanged(
    tensors: Sequence[Any], work: Callable[[Tensor], Tensor], *, dtype: torch.dtype, stacked: bool
) -> list[Tensor]:
    """Return this rank's shards of ``work(matrices)``; every matrix is worked on by one rank.

    Matrices are dealt to the ranks by their number of multiplications, the largest first.

    Args:
        tensors: Sharded over the same ranks; not changed.
        work: Maps matrices of shape ``(..., m, n)`` to others of the same shape.
        dtype: Precision in which shards are sent.
        stacked: See :class:`Layout`.

    Returns:
        One shard per tensor, in ``dtype``.

    Cost: two ``all_to_all_single``; each sends the shards of the matrices that another rank works on.
    """
    layouts = [layout_of(tensor, stacked=stacked) for tensor in tensors]
    route = _Route(layouts, tensors[0].to_local().device)
    own = [tensor.to_local().detach().to(dtype) for tensor in tensors]
    arrived = route.send([[own[at] for at in route.owned_by(rank)] for rank in range(route.size)], dtype, there=True)
    mine = route.owned_by(route.rank)
    results: list[Tensor] = [torch.empty(0, device="cpu")] * len(mine)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for place, at in enumerate(mine):
        by_shape.setdefault(layouts[at].shape, []).append(place)
    for shape, places in by_shape.items():
        layout = layouts[mine[places[0]]]
        whole = [torch.cat([arrived[rank][place] for rank in range(route.size)], dim=layout.along) for place in places]
        worked = work(torch.stack([one.reshape(layout.matrices) for one in whole]))
        for place, one in zip(places, worked, strict=True):
            results[place] = one.reshape(shape)
    cut = [results[place].split(route.lengths(at), dim=layouts[at].along) for place, at in enumerate(mine)]
    back = route.send([[pieces[rank] for pieces in cut] for rank in range(route.size)], dtype, there=False)
    shards: list[Tensor] = [torch.empty(0, device="cpu")] * len(tensors)
    for rank in range(route.size):
        for at, shard in zip(route.owned_by(rank), back[rank], strict=True):
            shards[at] = shard
    return shards


class _Route:
    """Which rank works on which matrix, and the lengths of the shards."""

    def __init__(self, layouts: Sequence[Layout], device: torch.device) -> None:
        self.layouts, self.device = layouts, device
        mesh: Any
        mesh, dim = layouts[0].mesh or (None, 0)
        self.group: Any = mesh.get_group(dim)
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)

    @cached_property
    def _owners(self) -> list[int]:
        loads, owners = [0.0] * self.size, [0] * len(self.layouts)
        costs = [_multiplications(layout) for layout in self.layouts]
        for at in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
            owners[at] = min(range(self.size), key=lambda rank: (loads[rank], rank))
            loads[owners[at]] += costs[at]
        return owners

    def owned_by(self, rank: int) -> list[int]:
        """Return the positions of the matrices that a rank works on."""
        return [at for at, owner in enumerate(self._owners) if owner == rank]

    def lengths(self, at: int) -> list[int]:
        """Return the length of every rank's shard along the divided axis, as ``torch.chunk`` divides."""
        layout = self.layouts[at]
        length = layout.shape[layout.along]
        chunk = -(-length // self.size)
        ends = [min(length, chunk * rank) for rank in range(self.size + 1)]
        return [stop - start for start, stop in pairwise(ends)]

    def shape(self, at: int, rank: int) -> list[int]:
        """Return the shape of a rank's shard."""
        shape = list(self.layouts[at].shape)
        shape[self.layouts[at].along] = self.lengths(at)[rank]
        return shape

    def send(self, pieces: Sequence[Sequence[Tensor]], dtype: torch.dtype, *, there: bool) -> list[list[Tensor]]:
        """Send ``pieces[rank]`` to each rank and return what the ranks sent; what stays on this rank is not sent."""
        shapes = []
        for rank in range(self.size):
            whose, mine = (rank, self.owned_by(self.rank)) if there else (self.rank, self.owned_by(rank))
            shapes.append([self.shape(at, whose) for at in mine])
        counts = [[0 if rank == self.rank else sum(map(Tensor.numel, own)) for rank, own in enumerate(pieces)]]
        counts.append([0 if r == self.rank else sum(map(_count, own)) for r, own in enumerate(shapes)])
        parts = [one.reshape(-1) for rank, own in enumerate(pieces) if rank != self.rank for one in own]
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.device)
        received = torch.empty(sum(counts[1]), dtype=dtype, device=self.device)
        dist.all_to_all_single(received, sent, counts[1], counts[0], group=self.group)
        arrived: list[list[Tensor]] = []
        for rank, part in enumerate(received.split(counts[1])):
            if rank == self.rank:
                arrived.append(list(pieces[rank]))
                continue
            ends = [0, *accumulate(map(_count, shapes[rank]))]
            arrived.append([part[a:b].view(shape) for (a, b), shape in zip(pairwise(ends), shapes[rank], strict=True)])
        return arrived


def _multiplications(layout: Layout) -> float:
    count = _count(layout.shape)
    rows = layout.shape[-2] if layout.stacked else layout.shape[0]
    columns = layout.shape[-1] if layout.stacked else count // max(1, rows)
    return float(count * min(rows, columns))


def _count(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
