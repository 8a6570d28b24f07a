"""Where a basis comes from: principal components of snapshots, or a matrix in a file; each rank gets its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.optim.principal_components import PrincipalComponents, Progress
from torchboost.optim.snapshots import Layout, Snapshots
from torchboost.optim.subspace_basis import Block, SubspaceBasis, blocks_within, rows_of

__all__ = ["BasisSource", "MatrixFile", "principal_basis", "shared_basis", "write_matrix"]

_AT_ONCE = 1 << 30  # bytes of components that are held together while a file is written


class BasisSource(Protocol):
    """Gives the rows of a basis, some at a time."""

    def rows(self, block: int, chosen: range) -> Tensor:
        """Return some rows of one block, shape ``(len(chosen), weights of the block)``, float32."""
        ...


class MatrixFile:
    """A basis in an ``.npy`` file, one row per direction; never unpickled, and mapped instead of read.

    Beside it :func:`write_matrix` puts a ``.json`` file of the same name that says which columns belong to which
    parameter. Where it is missing, columns are taken to be in the order of the model.

    Args:
        path: The file.
        components: How many rows to take, from the first.
        layout: The parameters of the model.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: No ``.npy`` file of floating point numbers, or one of another model.
    """

    def __init__(self, path: str | Path, components: int, layout: Layout) -> None:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: found no file; give an .npy file, or make one with `torchboost pca`.")
        try:
            self._matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: refused, as it is no .npy file of numbers ({error}).") from None
        shape = getattr(self._matrix, "shape", ())
        if len(shape) != 2 or self._matrix.dtype.kind != "f":
            raise ValueError(f"{path}: found shape {shape} of {self._matrix.dtype}; a basis is a matrix of floats.")
        if shape[0] < components or shape[1] != layout.length:
            raise ValueError(
                f"{path}: found {shape[0]} directions of {shape[1]} weights; wanted {components} of the "
                f"{layout.length} trained weights: make it from checkpoints of this model, or set n_components."
            )
        self._columns = _columns(path.with_suffix(".json"), layout)

    def rows(self, block: int, chosen: range) -> Tensor:
        """Return some rows, as :class:`BasisSource` says."""
        part = self._matrix[chosen.start : chosen.stop]
        found = np.empty(part.shape, dtype=np.float32)
        at = 0
        for columns in self._columns:
            found[:, at : at + columns.stop - columns.start] = part[:, columns]
            at += columns.stop - columns.start
        return torch.from_numpy(found)


def write_matrix(path: str | Path, snapshots: Snapshots, components: int, *, progress: Progress) -> float:
    """Write the principal components of snapshots into an ``.npy`` file, and their columns' names into a ``.json``.

    The files appear when they are complete; an interrupted run leaves none.

    Args:
        path: The ``.npy`` file.
        snapshots: At least as many as components.
        components: Number of directions.
        progress: Called with what is done, how much of it, and how much there is.

    Returns:
        The share of the variance of the snapshots that the components hold.

    Raises:
        ValueError: See :class:`~torchboost.optim.principal_components.PrincipalComponents`.

    Cost: one read of the snapshots for their products, and one for each gibibyte of the result.
    """
    path, layout = Path(path), snapshots.layout
    found = PrincipalComponents(snapshots, blocks_within(layout.length, components), progress=progress)
    at_once = max(1, _AT_ONCE // (4 * layout.length))
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        matrix = np.lib.format.open_memmap(unfinished, "w+", np.float32, (components, layout.length))
        for first in range(0, components, at_once):
            chosen = range(first, min(first + at_once, components))
            matrix[chosen.start : chosen.stop] = found.rows(0, chosen).numpy()
        matrix.flush()
        columns = {"names": layout.names, "shapes": layout.shapes, "explained": found.explained}
        path.with_suffix(".json").write_text(json.dumps(columns, indent=1), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return found.explained


def _columns(path: Path, layout: Layout) -> list[slice]:
    """Return where in the rows of a file the weights of each parameter of the model lie."""
    names, sizes = layout.names, layout.sizes
    if path.is_file():
        held = json.loads(path.read_text(encoding="utf-8"))
        shapes = {name: tuple(shape) for name, shape in zip(held["names"], held["shapes"], strict=True)}
        wanted = dict(zip(layout.names, layout.shapes, strict=True))
        if shapes != wanted:
            other = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
            raise ValueError(
                f"{path}: a basis of another model: {len(other)} parameters differ, among them {', '.join(other[:5])}; "
                "make it from checkpoints of this model."
            )
        names, sizes = tuple(shapes), tuple(torch.Size(shape).numel() for shape in shapes.values())
    ends = [0, *accumulate(sizes)]
    places = {name: slice(a, b) for name, (a, b) in zip(names, pairwise(ends), strict=True)}
    return [places[name] for name in layout.names]


def principal_basis(
    snapshots: Snapshots,
    components: int,
    *,
    memory_mebibytes: int | None = None,
    progress: Progress | None = None,
) -> SubspaceBasis:
    """Return the directions along which snapshots of the weights vary most; in one process.

    Args:
        snapshots: :class:`~torchboost.optim.snapshots.CheckpointFiles`, or those kept while training.
        components: Number of directions.
        memory_mebibytes: Budget of the basis: above it, directions cover one block of the weights each, see
            :func:`~torchboost.optim.subspace_basis.blocks_within`.
        progress: See :class:`~torchboost.optim.principal_components.PrincipalComponents`.

    Example:
        >>> import torch
        >>> from torchboost.optim import SnapshotBuffer, SubspaceOptimizer, principal_basis
        >>> model = torch.nn.Linear(4, 2)
        >>> snapshots = SnapshotBuffer(model)
        >>> for _ in range(3):
        ...     snapshots.add([p + 0.1 * torch.randn_like(p) for p in model.parameters()])
        >>> optimizer = SubspaceOptimizer(model.parameters(), principal_basis(snapshots, 2))

    Raises:
        TypeError: No snapshots.
        ValueError: Too few snapshots, NaN or infinities in one, or no room even for the smallest basis.
    """
    if not isinstance(getattr(snapshots, "layout", None), Layout):
        raise TypeError(
            f"snapshots: found {type(snapshots).__name__}; give CheckpointFiles(folder, model) or a SnapshotBuffer."
        )
    blocks = blocks_within(snapshots.layout.length, components, budget=_bytes(memory_mebibytes))
    return shared_basis(lambda: PrincipalComponents(snapshots, blocks, progress=progress), blocks)


def shared_basis(
    make: Callable[[], BasisSource],
    blocks: Sequence[Block],
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float = 1800.0,
    alike: str = "",
) -> SubspaceBasis:
    """Let rank 0 make a basis and hand every rank its rows, so that none holds more than its share.

    Args:
        make: Called on rank 0 only; an error it raises is raised on every rank.
        blocks: The same on all ranks.
        group: The ranks that share the rows and will train; None for one process.
        timeout: Seconds that a rank waits for the others.
        alike: What must be the same on all ranks, such as settings in words.

    Raises:
        TimeoutError: A rank did not come, or rank 0 was not done in time.
        ValueError: ``alike`` differs between the ranks.
        ValueError, OSError: As ``make`` raises.
    """
    if group is None:
        source = make()
        return SubspaceBasis(blocks, [source.rows(i, range(block.components)) for i, block in enumerate(blocks)])
    limit = timedelta(seconds=timeout)
    try:
        # Of its own: the exchange goes over the host whatever the training uses, and its patience is another.
        control: Any = dist.new_group(dist.get_process_group_ranks(group), timeout=limit, backend="gloo")
        dist.monitored_barrier(control, limit, wait_all_ranks=True)
        _check_alike(alike, control)
        rows = _received(make, blocks, control)
        dist.barrier(control)
        dist.destroy_process_group(control)
    except RuntimeError as error:
        raise TimeoutError(
            f"dim_reduce: rank {dist.get_rank(group)} of {dist.get_world_size(group)} waited {timeout:g} s for the "
            f"basis: a rank is missing, or rank 0 needs longer (dim_reduce.timeout). {error}"
        ) from error
    return SubspaceBasis(blocks, rows, group)


def _check_alike(alike: str, control: Any) -> None:
    said = [""] * dist.get_world_size(control)
    dist.all_gather_object(said, alike, group=control)
    other = next((rank for rank, own in enumerate(said) if own != said[0]), None)
    if other is not None:
        raise ValueError(f"the ranks differ: rank 0 has {said[0]}, rank {other} has {said[other]}; make them alike.")


def _received(make: Callable[[], BasisSource], blocks: Sequence[Block], control: Any) -> list[Tensor]:
    rank, ranks = dist.get_rank(control), dist.get_world_size(control)
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
    shares = [rows_of(blocks, owner, ranks) for owner in range(ranks)]
    for i, block in enumerate(blocks):
        for owner in range(ranks):
            chosen = shares[owner][i]
            if not chosen and owner != rank:
                continue
            if source is not None:
                rows = source.rows(i, chosen)
                if owner != rank:
                    dist.send(rows, group=control, group_dst=owner)
            else:
                rows = torch.empty(len(chosen), block.stop - block.start) if owner == rank else None
                if rows is not None and chosen:
                    dist.recv(rows, group=control, group_src=0)
            if owner == rank and rows is not None:
                held.append(rows)
    return held


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes << 20
