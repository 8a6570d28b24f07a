"""Where a basis comes from: principal components of snapshots, or a matrix in a file; each rank gets its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.optim.principal_components import PrincipalComponents, Progress
from torchboost.optim.snapshots import Snapshots
from torchboost.optim.subspace_basis import Block, SubspaceBasis, blocks_within, rows_of

__all__ = ["BasisSource", "MatrixFile", "principal_basis", "shared_basis"]


class BasisSource(Protocol):
    """Gives the rows of a basis, some at a time."""

    def rows(self, block: int, chosen: range) -> Tensor:
        """Return some rows of one block, shape ``(len(chosen), weights of the block)``, float32."""
        ...


class MatrixFile:
    """A basis in an ``.npy`` file, one row per direction; never unpickled, and mapped instead of read.

    Args:
        path: The file.
        components: How many rows to take, from the first.
        length: Number of weights of the model.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: No ``.npy`` file of floating point numbers, or one of another shape.
    """

    def __init__(self, path: str | Path, components: int, length: int) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: found no file; give an .npy file, or make one with `torchboost pca`.")
        try:
            self._matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: refused, as it is no .npy file of numbers ({error}).") from None
        shape = getattr(self._matrix, "shape", ())
        if len(shape) != 2 or self._matrix.dtype.kind != "f":
            raise ValueError(f"{path}: found shape {shape} of {self._matrix.dtype}; a basis is a matrix of floats.")
        if shape[0] < components or shape[1] != length:
            raise ValueError(
                f"{path}: found {shape[0]} directions of {shape[1]} weights; wanted {components} of the {length} "
                "weights that are trained: make it from checkpoints of this model, or set n_components."
            )

    def rows(self, block: int, chosen: range) -> Tensor:
        """Return some rows, as :class:`BasisSource` says."""
        return torch.from_numpy(np.array(self._matrix[chosen.start : chosen.stop], dtype=np.float32))


def principal_basis(
    snapshots: Snapshots,
    components: int,
    *,
    memory_mebibytes: int | None = None,
    progress: Progress = lambda what, done, total: None,
) -> SubspaceBasis:
    """Return the directions along which snapshots of the weights vary most; in one process.

    Args:
        snapshots: :class:`~torchboost.optim.snapshots.CheckpointFiles`, or those kept while training.
        components: Number of directions.
        memory_mebibytes: Budget of the basis: above it, directions cover one block of the weights each, see
            :func:`~torchboost.optim.subspace_basis.blocks_within`.
        progress: See :class:`~torchboost.optim.principal_components.PrincipalComponents`.

    Raises:
        ValueError: Too few snapshots, NaN or infinities in one, or no room even for the smallest basis.
    """
    blocks = blocks_within(snapshots.layout.length, components, budget=_bytes(memory_mebibytes))
    return shared_basis(lambda: PrincipalComponents(snapshots, blocks, progress=progress), blocks)


def shared_basis(
    make: Callable[[], BasisSource],
    blocks: Sequence[Block],
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float = 1800.0,
) -> SubspaceBasis:
    """Let rank 0 make a basis and hand every rank its rows, so that none holds more than its share.

    Args:
        make: Called on rank 0 only; an error it raises is raised on every rank.
        blocks: The same on all ranks.
        group: The ranks that share the rows and will train; None for one process.
        timeout: Seconds that a rank waits for the others.

    Raises:
        TimeoutError: A rank did not come, or rank 0 was not done in time.
        ValueError, OSError: As ``make`` raises.
    """
    if group is None:
        source = make()
        return SubspaceBasis(blocks, [source.rows(i, range(block.components)) for i, block in enumerate(blocks)])
    limit = timedelta(seconds=timeout)
    try:
        # Of its own: the exchange goes over the host whatever the training uses, and its patience is another.
        control: Any = dist.new_group(dist.get_process_group_ranks(group), timeout=limit, backend="gloo")
        rows = _received(make, blocks, control, limit)
        dist.barrier(control)
        dist.destroy_process_group(control)
    except RuntimeError as error:
        raise TimeoutError(
            f"dim_reduce: rank {dist.get_rank(group)} of {dist.get_world_size(group)} waited {timeout:g} s for the "
            f"basis: a rank is missing, or rank 0 needs longer (dim_reduce.timeout). {error}"
        ) from error
    return SubspaceBasis(blocks, rows, group)


def _received(make: Callable[[], BasisSource], blocks: Sequence[Block], control: Any, limit: timedelta) -> list[Tensor]:
    rank, ranks = dist.get_rank(control), dist.get_world_size(control)
    dist.monitored_barrier(control, limit, wait_all_ranks=True)
    source, failed = None, None
    if rank == 0:
        try:
            source = make()
        except (ValueError, OSError) as error:
            failed = error
    told: list[Any] = [failed]
    dist.broadcast_object_list(told, group=control, group_src=0)
    if told[0] is not None:
        raise told[0]
    held = []
    for i, block in enumerate(blocks):
        for owner in range(ranks):
            chosen = rows_of(block, owner, ranks)
            if source is not None:
                rows = source.rows(i, chosen)
                if owner:
                    dist.send(rows, group=control, group_dst=owner)
            else:
                rows = torch.empty(len(chosen), block.stop - block.start) if owner == rank else None
                if rows is not None:
                    dist.recv(rows, group=control, group_src=0)
            if owner == rank and rows is not None:
                held.append(rows)
    return held


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes << 20
