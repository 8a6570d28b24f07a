"""Exact principal components of a few long vectors, through the small matrix of their products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchboost.algorithms.dim_reduce.basis import Block
from torchboost.algorithms.dim_reduce.snapshots import Snapshots

__all__ = ["PrincipalComponents"]

_CHUNK = 64 << 20  # bytes of snapshots in float64 that are looked at together

Progress = Callable[[str, int, int], None]


class PrincipalComponents:
    """Directions along which snapshots of the weights vary most: the right singular vectors of the centred matrix.

    For m snapshots of n weights the m x m Gram matrix is built in float64, piece by piece, and its eigenvectors give
    the components exactly; nothing of size n x n or m x n is ever held. Each component is turned so that its entry of
    largest magnitude is positive. m snapshots span m - 1 directions around their mean; asked for m, the last one is
    the direction of the mean itself.

    Args:
        snapshots: At least as many as components.
        blocks: Weights with their own directions, see :func:`~torchboost.algorithms.dim_reduce.basis.blocks_within`.
        progress: Called with what is done, how much of it, and how much there is.

    Attributes:
        explained: Share of the variance of the snapshots that the components hold.

    Raises:
        ValueError: Too few snapshots, NaN or infinities in one, or they span fewer directions than asked for.

    Cost: two reads of the snapshots, ``m m n`` multiplications; at most 128 MiB besides the rows that :meth:`rows`
    returns.
    """

    def __init__(self, snapshots: Snapshots, blocks: Sequence[Block], *, progress: Progress | None = None) -> None:
        self._snapshots, self._blocks, self._progress = snapshots, tuple(blocks), progress
        components = sum(block.components for block in self._blocks)
        if len(snapshots) < components:
            raise ValueError(
                f"n_components: found {components} and {len(snapshots)} snapshots; as many snapshots as components are "
                "needed: save more, or lower n_components."
            )
        if self._blocks[-1].stop != snapshots.layout.length:
            raise ValueError(f"the blocks cover {self._blocks[-1].stop} weights of {snapshots.layout.length}.")
        self._weights: list[Tensor] = []
        held = total = 0.0
        for i, block in enumerate(self._blocks):
            kept, all_of_it = self._solve(i, block)
            held, total = held + kept, total + all_of_it
        self.explained = held / total if total else 1.0

    def rows(self, block: int, chosen: range, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return some components of one block, shape ``(len(chosen), weights of the block)``.

        Cost: one read of the snapshots.
        """
        where, weights = self._blocks[block], self._weights[block][chosen.start : chosen.stop]
        found = torch.empty(len(chosen), where.stop - where.start, dtype=dtype, device="cpu")
        what = f"making directions {chosen.start + 1} to {chosen.stop}{self._of(block)}, weights"
        for start, values in self._chunks(where, what):
            found[:, start : start + values.shape[1]] = weights @ values
        for row in found:
            if row[row.abs().argmax()] < 0:
                row.neg_()
        return found

    def _solve(self, i: int, block: Block) -> tuple[float, float]:
        """Compute the components of a block from the snapshots; return the explained and the total variance."""
        count = len(self._snapshots)
        gram = torch.zeros(count + 1, count + 1, dtype=torch.float64, device="cpu")
        for _, values in self._chunks(block, f"comparing the snapshots{self._of(i)}, weights"):
            gram += values @ values.T
        if not gram.isfinite().all():
            raise ValueError(f"snapshots: {self._spoiled()}; leave it out.")
        values, vectors = torch.linalg.eigh(gram[:count, :count])
        values, vectors = values.flip(0).clamp(min=0.0), vectors.flip(1)
        # What is below this is rounding of the sums.
        rank = int((values > values[0] * 1e-12).sum()) if values[0] > 0 else 0
        kept = min(rank, block.components)
        weights = torch.zeros(block.components, count + 1, dtype=torch.float64, device="cpu")
        weights[:kept, :count] = (vectors[:, :kept] / values[:kept].sqrt()).T
        if kept < block.components:
            weights[kept] = self._mean_direction(gram, weights[:kept])
        if kept + 1 < block.components:
            raise ValueError(
                f"n_components: found {block.components} for weights {block.start} to {block.stop}, but {count} "
                f"snapshots span only {kept + 1} directions there; save snapshots that differ more, or lower "
                "n_components."
            )
        self._weights.append(weights)
        return float(values[:kept].sum()), float(values.sum())

    def _mean_direction(self, gram: Tensor, weights: Tensor) -> Tensor:
        """Return the direction of the mean without what the other components hold of it."""
        mean = torch.zeros(len(gram), dtype=torch.float64, device="cpu")
        mean[-1] = 1.0
        for _ in range(2):  # the second time removes what rounding left
            mean = mean - (weights @ (gram @ mean)) @ weights
        length = (mean @ gram @ mean).clamp(min=0.0).sqrt()
        if not length > 1e-12 * gram[-1, -1].sqrt():
            raise ValueError(
                f"n_components: {len(gram) - 1} snapshots span only {len(weights)} directions; save snapshots that "
                "differ more, or lower n_components."
            )
        return mean / length

    def _chunks(self, block: Block, what: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the start of each piece in the block, and the piece: the snapshots without their mean, and the mean."""
        count, offset = len(self._snapshots), 0
        for i, shape in enumerate(self._snapshots.layout.shapes):
            for where, size in _cuts(shape, max(1, _CHUNK // (8 * (count + 1)))):
                low, high = max(offset, block.start), min(offset + size, block.stop)
                if low < high:
                    values = torch.empty(count + 1, high - low, dtype=torch.float64, device="cpu")
                    for m in range(count):
                        values[m] = self._snapshots.part(m, i, where).reshape(-1)[low - offset : high - offset]
                    values[count] = values[:count].mean(0)
                    values[:count] -= values[count]
                    yield low - block.start, values
                    if self._progress is not None:
                        self._progress(what, high - block.start, block.stop - block.start)
                offset += size

    def _of(self, block: int) -> str:
        return f" in block {block + 1} of {len(self._blocks)}" if len(self._blocks) > 1 else ""

    def _spoiled(self) -> str:
        """Say which snapshot and parameter holds NaN or infinities."""
        layout = self._snapshots.layout
        for m in range(len(self._snapshots)):
            for i, name in enumerate(layout.names):
                if not self._snapshots.part(m, i, ()).isfinite().all():
                    return f"number {m} holds NaN or infinities in {name}"
        return "their products overflow"


def _cuts(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Cut a parameter into consecutive parts of so many weights at most; yield each one's place and size."""
    width = torch.Size(shape[1:]).numel()
    if not shape:
        yield (), 1
    elif width > most:
        for entry in range(shape[0]):
            for rest, size in _cuts(shape[1:], most):
                yield (slice(entry, entry + 1), *rest), size
    else:
        step = max(1, most // max(width, 1))
        for first in range(0, shape[0] if width else 0, step):
            last = min(first + step, shape[0])
            yield (slice(first, last),), (last - first) * width
