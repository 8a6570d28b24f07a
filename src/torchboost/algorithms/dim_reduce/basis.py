"""A few orthonormal directions in the space of all weights, their rows shared out over the ranks of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Block", "SubspaceBasis", "blocks_within", "check_products", "rows_of"]

_CHUNK = 1 << 16  # columns at a time, so that a product of few rows finds them in the cache

TOLERANCE = 1e-3
"""Tolerance of the products of two rows, compared with orthonormal rows."""


class Block(NamedTuple):
    """Consecutive weights with their own directions.

    Args:
        start: First weight, counted over the flattened parameters.
        stop: One past the last weight.
        components: Number of directions.
    """

    start: int
    stop: int
    components: int


def blocks_within(
    length: int, components: int, *, budget: int | None = None, ranks: int = 1, itemsize: int = 4
) -> tuple[Block, ...]:
    """Divide the weights into as few blocks as a memory budget allows; the directions are shared out evenly.

    A dense basis takes ``4 k n`` bytes over all ranks in float32. With b blocks every direction covers one block only,
    which is ``4 k n / b``; what is lost are directions across blocks.

    Args:
        length: Number of weights, n.
        components: Number of directions, k.
        budget: Bytes on each rank; None allows a dense basis.
        ranks: Number of ranks that share the rows.
        itemsize: Bytes of a number.

    Raises:
        ValueError: More directions than weights, or not even one direction per block fits.
    """
    if not 1 <= components <= length:
        raise ValueError(
            f"n_components: found {components}; a subspace of {length} weights has at least 1 and at most {length}."
        )
    for count in range(1, components + 1):
        blocks = tuple(
            Block(
                length * i // count,
                length * (i + 1) // count,
                components * (i + 1) // count - components * i // count,
            )
            for i in range(count)
        )
        most = max(
            sum(len(rows) * (b.stop - b.start) for b, rows in zip(blocks, rows_of(blocks, r, ranks), strict=True))
            for r in range(ranks)
        )
        if budget is None or itemsize * most <= budget:
            if any(b.components > b.stop - b.start for b in blocks):
                break
            return blocks
    raise ValueError(
        f"n_components={components} directions of {length} weights need {itemsize * length} bytes over {ranks} ranks "
        f"even with one direction per block, the budget is {budget} bytes on each; raise the budget."
    )


def rows_of(blocks: Sequence[Block], rank: int, ranks: int) -> list[range]:
    """Return which rows of each block a rank holds; their number need not be divisible by that of the ranks."""
    total = sum(block.components for block in blocks)
    low, high = total * rank // ranks, total * (rank + 1) // ranks
    found, first = [], 0
    for block in blocks:
        start = min(max(low - first, 0), block.components)
        found.append(range(start, max(start, min(high - first, block.components))))
        first += block.components
    return found


class SubspaceBasis:
    """Projects vectors into the subspace and lifts coordinates back: ``P v`` and ``P' c`` for k x n rows P.

    Args:
        blocks: Cover the weights without gaps, in order.
        rows: For each block the rows that this rank holds, shape ``(rows, weights of the block)``.
        group: The ranks that share the rows; None if this process holds all of them.
        orthonormal: Whether to refuse rows that are not orthonormal; MindSpore does not check.

    Raises:
        ValueError: Shapes do not fit the blocks, a row holds NaN or infinities, or the rows are not orthonormal.

    Cost: memory ``k n / ranks`` numbers; ``project`` and ``lift`` each read them once, and exchange k numbers and
    n numbers per vector.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        rows: Sequence[Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        orthonormal: bool = True,
    ) -> None:
        self.blocks = tuple(blocks)
        self.rows = tuple(rows)
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self._mine = rows_of(self.blocks, self.rank, self.ranks)
        for block, held, mine in zip(self.blocks, self.rows, self._mine, strict=True):
            wanted = (len(mine), block.stop - block.start)
            if tuple(held.shape) != wanted:
                raise ValueError(f"rows: found shape {tuple(held.shape)} for {block}; this rank holds {wanted}.")
        self._check_values(orthonormal)

    @classmethod
    def of(cls, matrix: Tensor, *, orthonormal: bool = True) -> SubspaceBasis:
        """Build a basis from a whole k x n matrix.

        Raises:
            ValueError: It is not a matrix, or its rows are not orthonormal.
        """
        if matrix.ndim != 2 or not 1 <= matrix.shape[0] <= matrix.shape[1]:
            raise ValueError(
                f"the basis has shape {tuple(matrix.shape)}; give one row per direction and one column per weight, at "
                "most as many rows as columns."
            )
        return cls((Block(0, matrix.shape[1], matrix.shape[0]),), (matrix,), orthonormal=orthonormal)

    @property
    def components(self) -> int:
        """Number of directions, k."""
        return sum(block.components for block in self.blocks)

    @property
    def length(self) -> int:
        """Number of weights, n."""
        return self.blocks[-1].stop

    def to(self, device: torch.device, dtype: torch.dtype) -> SubspaceBasis:
        """Return the basis on a device and in a precision.

        Args:
            device: For the rows.
            dtype: Of the rows, and so of the vectors.
        """
        rows = tuple(rows.to(device, dtype) for rows in self.rows)
        moved = SubspaceBasis.__new__(SubspaceBasis)
        moved.__dict__ = {**self.__dict__, "rows": rows}
        return moved

    def project(self, vector: Tensor) -> Tensor:
        """Return ``P v``, shape ``(k,)``, float64 on the host, the same on all ranks.

        Args:
            vector: Shape ``(n,)``.
        """
        found = self.project_here(vector)
        if self.group is not None:
            dist.all_reduce(found, group=self.group)
        return found.to("cpu", torch.float64)

    def project_here(self, vector: Tensor) -> Tensor:
        """Return ``P v`` with zeros for the rows of other ranks, on the device and in the precision of ``v``."""
        found = torch.zeros(self.components, dtype=vector.dtype, device=vector.device)
        with torch.autocast(vector.device.type, enabled=False):
            for block, rows, place in self._placed():
                part = vector[block.start : block.stop]
                found[place] = rows @ part
        return found

    def lift(self, coordinates: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``P' c`` for several c at once; the rows are read once.

        Args:
            coordinates: Shape ``(vectors, k)``.
            out: Where to put them; new memory of that size costs as much as part of the products.

        Returns:
            Shape ``(vectors, n)``, on the device and in the precision of the rows.
        """
        found = self.lift_here(coordinates, out)
        if self.group is not None:
            dist.all_reduce(found, group=self.group)
        return found

    def lift_here(self, coordinates: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the contribution of this rank's rows to ``P' c``, as :meth:`lift`."""
        kind = self.rows[0]
        shape = (len(coordinates), self.length)
        found = torch.empty(shape, dtype=kind.dtype, device=kind.device) if out is None else out
        coordinates = coordinates.to(kind.device, kind.dtype)
        for block, rows, place in self._placed():
            whole = found[:, block.start : block.stop]
            for part, piece in zip(rows.split(_CHUNK, dim=1), whole.split(_CHUNK, dim=1), strict=True):
                torch.mm(coordinates[:, place], part, out=piece)
        return found

    def _placed(self) -> Iterator[tuple[Block, Tensor, slice]]:
        """Yield each block with the rows held here and their places among all coordinates."""
        first = 0
        for block, rows, mine in zip(self.blocks, self.rows, self._mine, strict=True):
            yield block, rows, slice(first + mine.start, first + mine.stop)
            first += block.components

    def _check_values(self, orthonormal: bool) -> None:
        """Check the rows of this rank only: each block's product with itself."""
        for block, rows in zip(self.blocks, self.rows, strict=True):
            with torch.autocast(rows.device.type, enabled=False):
                products = rows.float() @ rows.float().T
            if not products.isfinite().all():
                raise ValueError(f"the basis of weights {block.start} to {block.stop} holds NaN or infinities.")
            off = (products - torch.eye(len(rows), device=rows.device)).abs().max().item() if len(rows) else 0.0
            if orthonormal:
                check_products(off)


def check_products(off: float) -> None:
    """Refuse rows whose products with each other are off by more than :data:`TOLERANCE`."""
    if not off <= TOLERANCE:
        raise ValueError(
            f"the rows of the basis are not orthonormal: a product of two is off by {off:.3g}, allowed are "
            f"{TOLERANCE}; make the basis with `torchboost pca`, or orthonormalise it."
        )
