"""A few directions in the space of all weights: principal components of snapshots, and the files they come from.

Directions are shared out over ranks. Nothing in a file is ever unpickled.
"""

from __future__ import annotations

import copy
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchboost.core.wrapping import unwrap

__all__ = [
    "DimReduceBasis",
    "Shapes",
    "checkpoint_files",
    "principal_basis",
    "principal_components",
    "read_checkpoints",
    "read_matrix",
    "rows_of",
    "shapes_in",
    "shapes_of",
    "write_matrix",
]

TOLERANCE = 1e-3
"""Largest error of the products of rows, compared with orthonormal rows."""
SUFFIXES = (".safetensors", ".pt", ".pth")
NESTED = ("model", "state_dict", "model_state_dict")
"""Keys under which a ``.pt`` file may hold its state dict."""
_COLUMNS = 1 << 16  # columns at a time, so that a product of few rows finds them in the cache
_PIECE = 64 << 20  # bytes of snapshots in float64 that are read together

Progress: TypeAlias = Callable[[str, int, int], None]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The parameters that form a vector of all weights, in order: their names and shapes."""


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


def principal_components(
    snapshots: Sequence[Sequence[Tensor]],
    components: int,
    share: range | None = None,
    *,
    out: Tensor | None = None,
    progress: Progress | None = None,
) -> tuple[Tensor, float]:
    """Return directions along which snapshots of the weights vary most, and how much of their variance all hold.

    They are the right singular vectors of the centred matrix. For m snapshots of n weights the m x m Gram matrix is
    built in float64, piece by piece, and its eigenvectors give the components exactly. Nothing of size n x n or m x n
    is held, and the snapshots are read twice. The sign of each component makes its entry of largest magnitude positive.
    m snapshots span m - 1 directions around their mean. If there are m components, the last one is the direction of the
    mean. ``share`` names the directions to return, ``out`` takes them, shape ``(len(share), n)``.
    """
    count, length = len(snapshots), sum(tensor.numel() for tensor in snapshots[0]) if snapshots else 0
    if count < components:
        raise ValueError(
            f"n_components: found {components} and {count} snapshots; as many snapshots as components are needed: "
            "save more, or lower n_components."
        )
    check_components(components, length)

    def pieces(subject: str) -> Iterator[tuple[int, Tensor]]:
        for last, values in _pieces(snapshots):
            yield last - values.shape[1], values
            if progress is not None:
                progress(subject, last, length)

    gram = torch.zeros(count + 1, count + 1, dtype=torch.float64, device="cpu")
    for _, values in pieces("comparing the snapshots, weights"):
        gram += values @ values.T
    if not gram.isfinite().all():
        raise ValueError(f"snapshots: {_spoiled(snapshots)}; leave it out.")
    factors, explained = _factors(gram, components)
    share = range(components) if share is None else share
    rows = torch.empty(len(share), length, device="cpu") if out is None else out
    for first, values in pieces(f"making directions {share.start + 1} to {share.stop}, weights"):
        rows[:, first : first + values.shape[1]] = factors[share.start : share.stop] @ values
    for row in rows:
        if row[row.abs().argmax()] < 0:
            row.neg_()
    return rows, explained


def _factors(gram: Tensor, components: int) -> tuple[Tensor, float]:
    """Return the components as combinations of the centred snapshots and their mean, and the share they explain."""
    count = len(gram) - 1
    values, vectors = torch.linalg.eigh(gram[:count, :count])
    values, vectors = values.flip(0).clamp(min=0.0), vectors.flip(1)
    rank = int((values > values[0] * 1e-12).sum()) if values[0] > 0 else 0  # the rest is rounding of the sums
    kept = min(rank, components)
    factors = torch.zeros(components, count + 1, dtype=torch.float64, device="cpu")
    factors[:kept, :count] = (vectors[:, :kept] / values[:kept].sqrt()).T
    if kept < components:  # the direction of the mean, without what the other components hold of it
        mean = torch.zeros(count + 1, dtype=torch.float64, device="cpu")
        mean[-1] = 1.0
        for _ in range(2):  # the second time removes what rounding left
            mean = mean - (factors @ (gram @ mean)) @ factors
        length = (mean @ gram @ mean).clamp(min=0.0).sqrt()
        spanned = kept + int(length > 1e-12 * gram[-1, -1].sqrt())
        if spanned < components:
            raise ValueError(
                f"n_components: found {components}, but {count} snapshots span only {spanned} directions; save "
                "snapshots that differ more, or lower n_components."
            )
        factors[kept] = mean / length
    return factors, float(values[:kept].sum() / values.sum()) if rank else 1.0


def _pieces(snapshots: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Yield pieces of the snapshots without their mean, and of the mean, each with the number of weights up to it."""
    count, last = len(snapshots), 0
    for tensors in zip(*snapshots, strict=True):
        flat = [tensor.detach().reshape(-1).split(max(1, _PIECE // (8 * (count + 1)))) for tensor in tensors]
        for parts in zip(*flat, strict=True):
            values = torch.empty(count + 1, len(parts[0]), dtype=torch.float64, device="cpu")
            for row, part in zip(values, parts, strict=False):
                row.copy_(part)
            values[count] = values[:count].mean(0)
            values[:count] -= values[count]
            last += values.shape[1]
            yield last, values


def _spoiled(snapshots: Sequence[Sequence[Tensor]]) -> str:
    for number, snapshot in enumerate(snapshots):
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
    return DimReduceBasis(principal_components(snapshots, components, progress=progress)[0])


def shapes_of(model: nn.Module) -> Shapes:
    """Return the parameters that require grad. A shared parameter counts once."""
    return {name: tuple(p.shape) for name, p in unwrap(model).named_parameters() if p.requires_grad}


def length_of(shapes: Shapes) -> int:
    """Return the number of all weights."""
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def read_checkpoints(paths: str | Path | Sequence[str | Path], model: nn.Module | Shapes) -> list[list[Tensor]]:
    """Return the weights in checkpoints of one model: a list of its parameters for each file.

    The files are safetensors, or ``.pt`` and ``.pth`` that hold tensors only: a state dict, or one under the key
    ``model``, ``state_dict`` or ``model_state_dict``. They are mapped into memory and read when they are used. Nothing
    in them is executed: ``torch.load`` runs with ``weights_only=True``.

    Args:
        paths: The files, in the order in which they were written, or a folder of them.
        model: The model, or the names and shapes of its parameters. Other entries, such as buffers, are ignored. The
            names may differ by a prefix that all of them have, such as DDP's ``module.``.

    Raises:
        TypeError: Neither a model nor names and shapes.
        FileNotFoundError: A file or the folder is missing.
        ValueError: There are no files, or one is not a checkpoint, holds objects other than tensors, or belongs to
            another model. The message lists names and shapes.
    """
    if not isinstance(model, (nn.Module, Mapping)):
        raise TypeError(f"model: found {type(model).__name__}; give the model whose checkpoints these are.")
    shapes = shapes_of(model) if isinstance(model, nn.Module) else model
    files = checkpoint_files(paths) if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    if not files:
        raise ValueError(f"found no checkpoints; give files that end in {', '.join(SUFFIXES)}.")
    snapshots = []
    for path in files:
        tensors = _opened(path)
        names = _names(path, shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        snapshots.append([tensors[names[name]] for name in shapes])
    return snapshots


def checkpoint_files(folder: str | Path) -> list[Path]:
    """Return the checkpoints in a folder by name. The order does not matter for principal components."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: found no folder; give one that holds checkpoints of the model.")
    files = [path for path in folder.iterdir() if path.suffix in SUFFIXES]
    if not files:
        raise ValueError(
            f"{folder}: found no checkpoints; save some whose names end in {', '.join(SUFFIXES)}, such as "
            "torch.save(model.state_dict(), ...). Folders of torch.distributed.checkpoint are not read."
        )
    return sorted(files)


def shapes_in(path: Path, exclude: Sequence[str] = ()) -> Shapes:
    """Return the floating point entries of a checkpoint; it does not say which are parameters.

    Names that fit a pattern in ``exclude`` are ignored.
    """
    entries = _opened(path).items()
    shapes = {n: tuple(t.shape) for n, t in entries if not any(fnmatchcase(n, pattern) for pattern in exclude)}
    if not shapes:
        besides = f" besides {', '.join(exclude)}" if exclude else ""
        raise ValueError(f"{path}: found no floating point entry{besides}; give checkpoints of a model.")
    return shapes


def read_matrix(path: str | Path, components: int, shapes: Shapes, share: range) -> Tensor:
    """Return rows of a basis in an ``.npy`` file, shape ``(len(share), weights)``, float32.

    :func:`write_matrix` also writes a ``.json`` file of the same name, which maps columns to parameters. Without it the
    columns must be in the order of the model.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: found no file; give an .npy file, or make one with `torchboost pca`, or also give "
            "weight_load_dir, the folder of checkpoints to make it from."
        )
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: refused: it is not an .npy file of numbers ({error}).") from None
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or matrix.dtype.kind != "f":
        content = f"shape {matrix.shape} of {matrix.dtype}" if isinstance(matrix, np.ndarray) else "an archive"
        raise ValueError(f"{path}: found {content}; a basis is an .npy file of one matrix of floats.")
    if len(matrix) < components or matrix.shape[1] != length_of(shapes):
        raise ValueError(
            f"{path}: found {len(matrix)} directions of {matrix.shape[1]} weights; needed are {components} of the "
            f"{length_of(shapes)} trained weights: make it from checkpoints of this model, or set n_components."
        )
    stored = _stored(path.with_suffix(".json"), shapes)
    names = _names(path, shapes, stored)
    ends = pairwise(accumulate((torch.Size(shape).numel() for shape in stored.values()), initial=0))
    places = {name: slice(first, last) for name, (first, last) in zip(stored, ends, strict=True)}
    part = matrix[share.start : share.stop]
    rows = np.empty(part.shape, dtype=np.float32)
    np.concatenate([part[:, places[names[name]]] for name in shapes], axis=1, out=rows, casting="same_kind")
    return torch.from_numpy(rows)


def _stored(path: Path, shapes: Shapes) -> Shapes:
    if not path.is_file():
        return shapes
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        stored = {str(name): tuple(shape) for name, shape in zip(entries["names"], entries["shapes"], strict=True)}
        if length_of(stored) != length_of(shapes):
            raise ValueError("another number of columns")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: found no names and shapes of columns, as `torchboost pca` writes them next to a basis "
            f"({type(error).__name__}); remove the file if it does not belong to a basis."
        ) from None
    return stored


def write_matrix(
    path: str | Path,
    snapshots: Sequence[Sequence[Tensor]],
    shapes: Shapes,
    components: int,
    *,
    progress: Progress | None = None,
) -> float:
    """Write principal components into an ``.npy`` file and the names of their columns into a ``.json``.

    The files appear when they are complete. Returns the share of the variance that the components hold.
    """
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        matrix = np.lib.format.open_memmap(unfinished, "w+", np.float32, (components, length_of(shapes)))
        _, explained = principal_components(snapshots, components, out=torch.from_numpy(matrix), progress=progress)
        matrix.flush()
        columns = {"names": list(shapes), "shapes": list(shapes.values()), "explained": explained}
        path.with_suffix(".json").write_text(json.dumps(columns, indent=1), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return explained


def _opened(path: Path) -> dict[str, Tensor]:
    """Return the floating point entries of a file, mapped into memory."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: found no file; give the checkpoints of the model.")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: found a file that ends in {path.suffix!r}; allowed are {', '.join(SUFFIXES)}.")
    entries = _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
    return {n: t for n, t in entries.items() if isinstance(t, Tensor) and t.is_floating_point()}


def _safetensors(path: Path) -> Mapping[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: it is not a safetensors file ({error}).") from None


def _torch_file(path: Path) -> Mapping[str, Any]:
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("not in the format that torch.save writes")
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{path}: refused: it is not a file of tensors only ({reason}). Save the weights with safetensors, or "
            "torch.save(model.state_dict(), ...)."
        ) from None
    for key in NESTED:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path}: found a {type(loaded).__name__}; a checkpoint is a state dict.")
    return loaded


def _names(path: Path, shapes: Shapes, stored: Shapes) -> dict[str, str]:
    """Map the names of a model to those in a file, which may have a common prefix more, or less, than the model.

    Raises:
        ValueError: A parameter is not in the file, or has another shape there.
    """
    first, names = next(iter(shapes), ""), {name: name for name in shapes}
    for other in () if set(shapes) <= set(stored) else stored:
        if other.endswith(f".{first}"):
            renamed = {name: other.removesuffix(first) + name for name in shapes}
        elif first.endswith(f".{other}"):
            renamed = {name: name.removeprefix(first.removesuffix(other)) for name in shapes}
        else:
            continue
        if set(renamed.values()) <= set(stored) and len(set(renamed.values())) == len(shapes):
            names = renamed
            break
    missing = [name for name in shapes if names[name] not in stored]
    present = {name: stored[names[name]] for name in shapes if names[name] in stored}
    other = [f"{name} {shape} (needed {shapes[name]})" for name, shape in present.items() if shape != shapes[name]]
    if missing or other:
        differences = [f"missing {_few(missing)}"] * bool(missing) + [f"of another shape {_few(other)}"] * bool(other)
        raise ValueError(
            f"{path}: it belongs to another model: {'; '.join(differences)}; it holds "
            f"{_few(list(stored)) or 'no weights'}. Give files of the model that is trained."
        )
    return names


def _few(items: Sequence[Any]) -> str:
    shown = ", ".join(map(str, items[:5]))
    return f"{shown} and {len(items) - 5} more" if len(items) > 5 else shown
