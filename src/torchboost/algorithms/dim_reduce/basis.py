"""A few directions in the space of all weights: principal components of snapshots, shared out over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["DimReduceBasis", "PrincipalComponents", "Progress", "principal_basis", "rows_of"]

TOLERANCE = 1e-3
"""Largest error of the products of rows, compared with orthonormal rows."""
_COLUMNS = 1 << 16  # columns at a time, so that a product of few rows finds them in the cache
_PIECE = 64 << 20  # bytes of snapshots in float64 that are read together

Progress = Callable[[str, int, int], None]


class DimReduceBasis:
    """Project vectors into a subspace and lift coordinates back: ``P v`` and ``P' c`` for k x n rows P.

    Args:
        rows: The directions, shape ``(k, n)``. With a group: the rows of this rank, see :func:`rows_of`.
        group: The ranks that share the rows. None: this process has all rows.
        components: Number of directions k. Needed with a group.
        orthonormal: Whether to refuse rows that are not orthonormal. MindSpore does not check this. With a group, all
            ranks must build the basis together.

    Raises:
        ValueError: The shape does not fit, a row has NaN or infinities, or the rows are not orthonormal.

    Cost: memory ``k n / ranks`` numbers. :meth:`project` and :meth:`lift` read them once, and exchange k numbers and n
    numbers per vector.
    """

    def __init__(
        self,
        rows: Tensor,
        group: dist.ProcessGroup | None = None,
        components: int | None = None,
        *,
        orthonormal: bool = True,
    ) -> None:
        if rows.ndim != 2:
            raise ValueError(
                f"the basis has shape {tuple(rows.shape)}; give one row per direction and one column per weight."
            )
        self.rows, self.group = rows, group
        self.components = len(rows) if components is None else components
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        check_components(self.components, self.length)
        share = rows_of(self.components, self.rank, self.ranks)
        self._place = slice(share.start, share.stop)
        if len(rows) != len(share):
            raise ValueError(
                f"the basis has {len(rows)} rows; rank {self.rank} of {self.ranks} holds rows {share.start} to "
                f"{share.stop} of {self.components}."
            )
        if not rows.isfinite().all():
            raise ValueError("the basis holds NaN or infinities.")
        if orthonormal:
            self.check_orthonormal()

    @property
    def length(self) -> int:
        """Number of weights, n."""
        return self.rows.shape[1]

    def to(self, device: torch.device, dtype: torch.dtype) -> DimReduceBasis:
        """Return the basis on a device and in a precision."""
        moved = copy.copy(self)
        moved.rows = self.rows.to(device, dtype)
        return moved

    def project(self, vector: Tensor) -> Tensor:
        """Return ``P v``, shape ``(k,)``, float64 on the host, the same on all ranks.

        Args:
            vector: Shape ``(n,)``.
        """
        coordinates = torch.zeros(self.components, dtype=vector.dtype, device=vector.device)
        with torch.autocast(vector.device.type, enabled=False):
            coordinates[self._place] = self.rows @ vector
        if self.group is not None:
            dist.all_reduce(coordinates, group=self.group)
        return coordinates.to("cpu", torch.float64)

    def lift(self, coordinates: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``P' c`` for several c at once. The rows are read once.

        Args:
            coordinates: Shape ``(vectors, k)``.
            out: Where to write them. Allocating memory of that size costs as much as part of the products.

        Returns:
            Shape ``(vectors, n)``, on the device and in the precision of the rows.
        """
        vectors = self.rows.new_empty(len(coordinates), self.length) if out is None else out
        mine = coordinates.to(self.rows.device, self.rows.dtype)[:, self._place]
        for rows, piece in zip(self.rows.split(_COLUMNS, dim=1), vectors.split(_COLUMNS, dim=1), strict=True):
            torch.mm(mine, rows, out=piece)
        if self.group is not None:
            dist.all_reduce(vectors, group=self.group)
        return vectors

    def fingerprint(self) -> Tensor:
        """Return the projection of a fixed vector, shape ``(k,)``, to tell bases apart; NaN for rows of other ranks."""
        vector = torch.arange(self.length, device=self.rows.device).to(self.rows.dtype).cos()
        mark = torch.full((self.components,), torch.nan, dtype=torch.float64, device="cpu")
        mark[self._place] = (self.rows @ vector).to("cpu", torch.float64)
        return mark

    def check_orthonormal(self) -> None:
        """Check that ``P P'c`` is c for a few random c. With a group, all ranks must call this together.

        Raises:
            ValueError: It is not; raised on every rank.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        for _ in range(4):
            signs = torch.randint(0, 2, (self.components,), generator=generator, device="cpu") * 2.0 - 1.0
            error = (self.project(self.lift(signs[None])[0]) - signs).abs().max().item()
            # Errors of k products add up like random numbers.
            if not error <= TOLERANCE * self.components**0.5:
                raise ValueError(
                    f"the rows of the basis are not orthonormal: a product is off by {error:.3g}, allowed are "
                    f"{TOLERANCE}; make the basis with `torchboost pca`, or orthonormalise it."
                )


def check_components(components: int, length: int) -> None:
    """Raise ``ValueError`` unless a subspace of ``length`` weights can have so many directions."""
    if not 1 <= components <= length:
        raise ValueError(
            f"n_components: found {components}; a subspace of {length} weights has at least 1 and at most {length}."
        )


def rows_of(components: int, rank: int, ranks: int) -> range:
    """Return which rows a rank holds. Their number need not be divisible by the number of ranks."""
    return range(components * rank // ranks, components * (rank + 1) // ranks)


class PrincipalComponents:
    """Directions along which snapshots of the weights vary most: the right singular vectors of the centred matrix.

    For m snapshots of n weights the m x m Gram matrix is built in float64, piece by piece, and its eigenvectors give
    the components exactly. Nothing of size n x n or m x n is held. The sign of each component makes its entry of
    largest magnitude positive. m snapshots span m - 1 directions around their mean. If there are m components, the last
    one is the direction of the mean.

    Args:
        snapshots: At least as many as components. Each is a list of the parameters, in the same order.
        components: Number of directions.
        progress: Called with a description, the number of weights done, and the number of all weights.

    Attributes:
        explained: Share of the variance of the snapshots that the components hold.

    Raises:
        ValueError: Too few snapshots, NaN or infinities in one, or they span fewer directions.

    Cost: two reads of the snapshots, ``m m n`` multiplications, at most 128 MiB besides the rows.
    """

    def __init__(
        self, snapshots: Sequence[Sequence[Tensor]], components: int, *, progress: Progress | None = None
    ) -> None:
        self._snapshots, self._progress = snapshots, progress
        count = len(snapshots)
        if count < components:
            raise ValueError(
                f"n_components: found {components} and {count} snapshots; as many snapshots as components are needed: "
                "save more, or lower n_components."
            )
        self.length = sum(tensor.numel() for tensor in snapshots[0])
        check_components(components, self.length)
        gram = torch.zeros(count + 1, count + 1, dtype=torch.float64, device="cpu")
        for _, values in self._pieces("comparing the snapshots, weights"):
            gram += values @ values.T
        if not gram.isfinite().all():
            raise ValueError(f"snapshots: {self._spoiled()}; leave it out.")
        values, vectors = torch.linalg.eigh(gram[:count, :count])
        values, vectors = values.flip(0).clamp(min=0.0), vectors.flip(1)
        rank = int((values > values[0] * 1e-12).sum()) if values[0] > 0 else 0  # the rest is rounding of the sums
        kept = min(rank, components)
        self._factors = torch.zeros(components, count + 1, dtype=torch.float64, device="cpu")
        self._factors[:kept, :count] = (vectors[:, :kept] / values[:kept].sqrt()).T
        if kept < components:
            self._add_mean(kept, gram)
        self.explained = float(values[:kept].sum() / values.sum()) if rank else 1.0

    def rows(self, share: range, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return some components, shape ``(len(share), n)``. Cost: one read of the snapshots."""
        rows = torch.empty(len(share), self.length, dtype=dtype, device="cpu")
        for first, values in self._pieces(f"making directions {share.start + 1} to {share.stop}, weights"):
            rows[:, first : first + values.shape[1]] = self._factors[share.start : share.stop] @ values
        for row in rows:
            if row[row.abs().argmax()] < 0:
                row.neg_()
        return rows

    def _add_mean(self, kept: int, gram: Tensor) -> None:
        """Make the last component the direction of the mean, without what the other components hold of it."""
        mean = torch.zeros(len(gram), dtype=torch.float64, device="cpu")
        mean[-1] = 1.0
        for _ in range(2):  # the second time removes what rounding left
            mean = mean - (self._factors @ (gram @ mean)) @ self._factors
        length = (mean @ gram @ mean).clamp(min=0.0).sqrt()
        spanned = kept + int(length > 1e-12 * gram[-1, -1].sqrt())
        if spanned < len(self._factors):
            raise ValueError(
                f"n_components: found {len(self._factors)}, but {len(gram) - 1} snapshots span only {spanned} "
                "directions; save snapshots that differ more, or lower n_components."
            )
        self._factors[kept] = mean / length

    def _pieces(self, subject: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the first weight of each piece, and the piece: the snapshots without their mean, and the mean."""
        count, first = len(self._snapshots), 0
        for tensors in zip(*self._snapshots, strict=True):
            flat = [tensor.detach().reshape(-1).split(max(1, _PIECE // (8 * (count + 1)))) for tensor in tensors]
            for parts in zip(*flat, strict=True):
                values = torch.empty(count + 1, len(parts[0]), dtype=torch.float64, device="cpu")
                for row, part in zip(values, parts, strict=False):
                    row.copy_(part)
                values[count] = values[:count].mean(0)
                values[:count] -= values[count]
                yield first, values
                first += values.shape[1]
                if self._progress is not None:
                    self._progress(subject, first, self.length)

    def _spoiled(self) -> str:
        for number, snapshot in enumerate(self._snapshots):
            for place, tensor in enumerate(snapshot):
                if not tensor.isfinite().all():
                    return f"number {number} holds NaN or infinities in parameter {place}"
        return "their products overflow"


def principal_basis(
    snapshots: Sequence[Sequence[Tensor]], components: int, *, progress: Progress | None = None
) -> DimReduceBasis:
    """Return the directions along which snapshots of the weights vary most. Works in one process.

    Args:
        snapshots: Copies of the parameters of one model, in the same order each, or the checkpoints from
            :func:`~torchboost.algorithms.read_checkpoints`.
        components: Number of directions.
        progress: Called with a description, the number of weights done, and the number of all weights.

    Raises:
        ValueError: Too few snapshots, NaN or infinities in one, or they span fewer directions.

    Example:
        >>> import torch
        >>> from torchboost.algorithms import DimReduceOptimizer, principal_basis
        >>> model = torch.nn.Linear(4, 2)
        >>> snapshots = [[p + 0.1 * torch.randn_like(p) for p in model.parameters()] for _ in range(3)]
        >>> optimizer = DimReduceOptimizer(model.parameters(), principal_basis(snapshots, 2))
    """
    return DimReduceBasis(PrincipalComponents(snapshots, components, progress=progress).rows(range(components)))
