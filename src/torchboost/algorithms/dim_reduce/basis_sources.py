"""Sources of a basis: principal components of snapshots, or a matrix in a file; each rank gets its rows."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.algorithms.dim_reduce.basis import Block, SubspaceBasis, blocks_within, check_products, rows_of
from torchboost.algorithms.dim_reduce.principal_components import PrincipalComponents, Progress
from torchboost.algorithms.dim_reduce.snapshots import Layout, Snapshots, renaming
from torchboost.core.torch_private import lazy_gloo
from torchboost.distributed.agreement import own_store
from torchboost.distributed.teardown import part

__all__ = ["BasisSource", "MatrixFile", "principal_basis", "shared_basis", "write_matrix"]

_AT_ONCE = 1 << 30  # bytes of components that are held together while a file is written


class BasisSource(Protocol):
    """A source of the rows of a basis, some at a time."""

    def rows(self, block: int, chosen: range) -> Tensor:
        """Return some rows of one block, shape ``(len(chosen), weights of the block)``, float32."""
        ...


class MatrixFile:
    """A basis in an ``.npy`` file, one row per direction; never unpickled, and mapped instead of read.

    :func:`write_matrix` also writes a ``.json`` file of the same name, which maps columns to parameters. If it is
    missing, the columns must be in the order of the model.

    Args:
        path: The file.
        components: How many rows to take, from the first.
        layout: The parameters of the model.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not an ``.npy`` file of floating point numbers, or belongs to another model.
    """

    def __init__(self, path: str | Path, components: int, layout: Layout) -> None:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: found no file; give an .npy file, or make one with `torchboost pca`, or also give "
                "weight_load_dir, the folder of checkpoints to make it from."
            )
        try:
            self._matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: refused: it is not an .npy file of numbers ({error}).") from None
        if not isinstance(self._matrix, np.ndarray):
            raise ValueError(f"{path}: refused: it is not an .npy file of numbers but an archive of several.")
        shape = self._matrix.shape
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


def write_matrix(path: str | Path, snapshots: Snapshots, components: int, *, progress: Progress | None = None) -> float:
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
        ValueError: See :class:`~torchboost.algorithms.dim_reduce.principal_components.PrincipalComponents`.

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
    """Return the columns of each parameter of the model in the rows of a file."""
    names, sizes = layout.names, layout.sizes
    if path.is_file():
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            stored = {str(name): tuple(shape) for name, shape in zip(held["names"], held["shapes"], strict=True)}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: found no names and shapes of columns, as `torchboost pca` writes them next to a basis "
                f"({type(error).__name__}); remove the file if it does not belong to a basis."
            ) from None
        shapes = {new: stored[old] for new, old in renaming(layout.names, stored).items()}
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
        snapshots: :class:`~torchboost.algorithms.dim_reduce.snapshots.CheckpointFiles`, or those kept while training.
        components: Number of directions.
        memory_mebibytes: Budget of the basis: above it, directions cover one block of the weights each, see
            :func:`~torchboost.algorithms.dim_reduce.basis.blocks_within`.
        progress: See :class:`~torchboost.algorithms.dim_reduce.principal_components.PrincipalComponents`.

    Example:
        >>> import torch
        >>> from torchboost.algorithms.dim_reduce import SnapshotBuffer, SubspaceOptimizer, principal_basis
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
    """Let rank 0 make a basis and send every rank its rows, one rank's at a time.

    Args:
        make: Called on rank 0 only; an error it raises is raised on every rank.
        blocks: The same on all ranks.
        group: The ranks that share the rows and will train; None for one process.
        timeout: Seconds that a rank waits for the others.
        alike: A string that must be the same on all ranks, such as the settings.

    Raises:
        TimeoutError: A rank did not arrive, or rank 0 was not done in time.
        ValueError: ``alike`` differs between the ranks, or the rows are not orthonormal.
        Exception: What ``make`` raises.
    """
    if group is None:
        source = make()
        return SubspaceBasis(blocks, [source.rows(i, range(block.components)) for i, block in enumerate(blocks)])
    meeting = _Meeting(group, timeout)
    meeting.check_alike(alike)
    source, failed = None, None
    if meeting.rank == 0:
        try:
            source = make()
        except Exception as error:
            failed = error
    meeting.raise_first("made", failed)
    try:
        rows = meeting.shared_out(source, blocks)
        basis, failed = None, None
        try:
            basis = SubspaceBasis(blocks, rows, group)
        except ValueError as error:
            failed = error
        meeting.raise_first("checked", failed)
        assert basis is not None
        meeting.check_orthonormal(basis)
        return basis
    finally:
        meeting.close()


class _Meeting:
    """Ranks that exchange a basis over the host, with their own timeout."""

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._timeout = timeout
        self._store = own_store("basis", dist.get_process_group_ranks(group))
        self._gloo: Any = None  # a ProcessGroupGloo, most of which torch's stubs leave out

    def check_alike(self, own: str) -> None:
        """Raise on every rank if one has other settings than rank 0."""
        if self.rank == 0:
            self._store.set("alike", own)
        first = self._told("alike")
        differ = f"the ranks differ: rank 0 has {first}, rank {self.rank} has {own}; make them equal."
        self.raise_first("settings", None if own == first else ValueError(differ))

    def raise_first(self, subject: str, failed: Exception | None) -> None:
        """Raise on every rank if one failed: its own error, otherwise that of another. Each rank asks two others."""
        below = [f"{subject}/{rank}" for rank in (2 * self.rank + 1, 2 * self.rank + 2) if rank < self.ranks]
        said = [self._told(key) for key in below] if failed is None else [_packed(failed).hex()]
        self._store.set(f"{subject}/{self.rank}", next(filter(None, said), ""))
        first = self._told(f"{subject}/0")
        if failed is not None:
            raise failed
        if first:
            raise pickle.loads(bytes.fromhex(first))

    def _told(self, key: str) -> str:
        with self._patience():
            self._store.wait([key], timedelta(seconds=self._timeout))
        return self._store.get(key).decode()

    def shared_out(self, source: BasisSource | None, blocks: Sequence[Block]) -> list[Tensor]:
        """Return the rows of this rank; rank 0 makes those of all ranks, one rank's after the other's."""
        shares = [rows_of(blocks, owner, self.ranks) for owner in range(self.ranks)]
        held = []
        with self._patience():
            self._gloo = lazy_gloo(self._store, self.rank, self.ranks, self._timeout)
            for i, block in enumerate(blocks):
                mine = len(shares[self.rank][i])
                if source is None:
                    held.append(torch.empty(mine, block.stop - block.start, dtype=torch.float32, device="cpu"))
                    if mine:
                        self._gloo.recv([held[-1]], 0, 0).wait()
                    continue
                for owner in range(1, self.ranks):
                    if shares[owner][i]:
                        self._gloo.send([source.rows(i, shares[owner][i])], owner, 0).wait()
                held.append(source.rows(i, shares[0][i]))
        return held

    def check_orthonormal(self, basis: SubspaceBasis) -> None:
        """Check products of rows on different ranks: with orthonormal rows ``P P'c`` is c.

        Raises:
            ValueError: On every rank.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        for _ in range(4):
            signs = torch.randint(0, 2, (basis.components,), generator=generator, device="cpu") * 2.0 - 1.0
            with self._patience():
                lifted = basis.lift_here(signs[None])
                self._gloo.allreduce([lifted]).wait()
                back = basis.project_here(lifted[0])
                self._gloo.allreduce([back]).wait()
            # Errors of k products add up like random numbers.
            check_products((back - signs).abs().max().item() / basis.components**0.5)

    def close(self) -> None:
        """Free the group."""
        if self._gloo is not None:
            part(self._gloo, min(5.0, self._timeout))
            self._gloo = None

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Convert an error of an exchange into one that names the rank that waited."""
        try:
            yield
        except RuntimeError as error:
            raise TimeoutError(
                f"dim_reduce: rank {self.rank} of {self.ranks} waited {self._timeout:g} s for the basis: a rank is "
                f"missing, or rank 0 needs longer (raise dim_reduce.timeout). {error}"
            ) from error


def _packed(error: Exception) -> bytes:
    try:
        pickle.loads(packed := pickle.dumps(error))
    except Exception:  # an exception may refuse to be pickled, or to be built again
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes << 20
