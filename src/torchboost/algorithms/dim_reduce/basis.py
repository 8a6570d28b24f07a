"""A few directions in the space of all weights: principal components of snapshots, and the files they come from.

Directions are shared out over ranks. Nothing in a file is ever unpickled.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from torchboost.core.files import write_whole
from torchboost.core.wrapping import unwrap

TOLERANCE = 1e-3
"""Largest error of the products of rows, compared with orthonormal rows."""
SUFFIXES = (".safetensors", ".pt", ".pth")
NESTED = ("model", "state_dict", "model_state_dict")
"""Keys under which a ``.pt`` file may hold its state dict."""
_COLUMNS = 1 << 16  # columns at a time, so that a product of few rows finds them in the cache
_PIECE = 64 << 20  # bytes of snapshots in float64 that are read together

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The parameters that form a vector of all weights, in order: their names and shapes."""


class DimReduceBasis:
    """Project vectors into a subspace and lift coordinates back: ``P v`` and ``P' c`` for k x n rows P.

    Args:
        rows: The directions, shape ``(k, n)``. With a group: the rows of this rank, see :func:`rows_of`.
        group: The ranks that share the rows. None: this process has all rows.
        components: Number of directions k. Needed with a group.

    Raises:
        ValueError: The shape does not fit, or a row has NaN or infinities.

    Cost: memory ``k n / ranks`` numbers. :meth:`project` and :meth:`lift` read them once, and exchange k numbers and n
    numbers per vector.
    """

    def __init__(self, rows: Tensor, group: dist.ProcessGroup | None = None, components: int | None = None) -> None:
        if rows.ndim != 2:
            raise ValueError(
                f"the basis has shape {tuple(rows.shape)}; give one row per direction and one column per weight."
            )
        self.rows, self.group = rows, group
        self.components = len(rows) if components is None else components
        self.rank, self.ranks = place_in(group)
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

    @property
    def length(self) -> int:
        """Number of weights, n."""
        return self.rows.shape[1]

    def project(self, vector: Tensor) -> Tensor:
        """Return ``P v`` for a vector of shape ``(n,)``: shape ``(k,)``, float64 on the host, the same on all ranks."""
        coordinates = torch.zeros(self.components, dtype=vector.dtype, device=vector.device)
        with torch.autocast(vector.device.type, enabled=False):
            coordinates[self._place] = self.rows @ vector
        if self.group is not None:
            dist.all_reduce(coordinates, group=self.group)
        return coordinates.to("cpu", torch.float64)

    def lift(self, coordinates: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``P' c`` for several c, shape ``(vectors, k)``: shape ``(vectors, n)``, as precise as the rows.

        The rows are read once. Allocating memory of that size costs as much as part of the products: give ``out``.
        """
        vectors = self.rows.new_empty(len(coordinates), self.length) if out is None else out
        mine = coordinates.to(self.rows.device, self.rows.dtype)[:, self._place]
        for rows, piece in zip(self.rows.split(_COLUMNS, dim=1), vectors.split(_COLUMNS, dim=1), strict=True):
            torch.mm(mine, rows, out=piece)
        if self.group is not None:
            dist.all_reduce(vectors, group=self.group)
        return vectors

    def fingerprint(self) -> Tensor:
        """Return the projection of a fixed vector, shape ``(k,)``, to tell bases apart. NaN for rows of other ranks."""
        vector = torch.arange(self.length, device=self.rows.device).to(self.rows.dtype).cos()
        mark = torch.full((self.components,), torch.nan, dtype=torch.float64, device="cpu")
        mark[self._place] = (self.rows @ vector).to("cpu", torch.float64)
        return mark

    def check_orthonormal(self) -> None:
        """Raise ``ValueError`` on every rank unless ``P P'c`` is c for a few random c. All ranks must call this."""
        generator = torch.Generator("cpu").manual_seed(0)
        for _ in range(4):
            signs = torch.randint(0, 2, (self.components,), generator=generator, device="cpu") * 2.0 - 1.0
            error = (self.project(self.lift(signs[None])[0]) - signs).abs().max().item()
            # Errors of k products add up like random numbers.
            if not error <= TOLERANCE * self.components**0.5:
                raise ValueError(
                    f"the rows of the basis are not orthonormal: a product is off by {error:.3g}, allowed are "
                    f"{TOLERANCE}; make the basis from checkpoints, or orthonormalise it."
                )


def check_components(components: int, length: int) -> None:
    """Raise ``ValueError`` unless a subspace of ``length`` weights can have so many directions."""
    if not 1 <= components <= length:
        raise ValueError(
            f"n_components: found {components}; a subspace of {length} weights has at least 1 and at most {length}."
        )


def place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank of this process in a group and the number of ranks, 0 and 1 without a group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def rows_of(components: int, rank: int, ranks: int) -> range:
    """Return which rows a rank holds. Their number need not be divisible by the number of ranks."""
    return range(components * rank // ranks, components * (rank + 1) // ranks)


def principal_components(snapshots: Sequence[Sequence[Tensor]], components: int, share: range | None = None) -> Tensor:
    """Return the directions along which snapshots of the weights, lists of the parameters each, vary most.

    They are the right singular vectors of the centred matrix. For m snapshots of n weights the m x m Gram matrix is
    built in float64, piece by piece, and its eigenvectors give the components exactly. Nothing of size n x n or m x n
    is held, and the snapshots are read twice. The sign of each component makes its entry of largest magnitude positive.
    m snapshots span m - 1 directions around their mean. If there are m components, the last one is the direction of the
    mean.

    Returns:
        Those in ``share``, None for all: shape ``(len(share), n)``, in float32, or float64 if the snapshots are.

    Raises:
        ValueError: Too few snapshots, NaN or infinities in one, or they span fewer directions.
    """
    count, length = len(snapshots), sum(tensor.numel() for tensor in snapshots[0]) if snapshots else 0
    if count < components:
        raise ValueError(
            f"n_components: found {components} and {count} snapshots; as many snapshots as components are needed: "
            "save more, or lower n_components."
        )
    check_components(components, length)

    gram = torch.zeros(count + 1, count + 1, dtype=torch.float64, device="cpu")
    for _, values in _pieces(snapshots):
        gram += values @ values.T
    if not gram.isfinite().all():
        raise ValueError(f"snapshots: {_spoiled(snapshots)}; leave it out.")
    factors = _factors(gram, components)
    share = range(components) if share is None else share
    precision = torch.promote_types(snapshots[0][0].dtype, torch.float32)
    rows = torch.empty(len(share), length, dtype=precision, device="cpu")
    for first, values in _pieces(snapshots):
        rows[:, first : first + values.shape[1]] = factors[share.start : share.stop] @ values
    for row in rows:
        if row[row.abs().argmax()] < 0:
            row.neg_()
    return rows


def _factors(gram: Tensor, components: int) -> Tensor:
    """Return the components as combinations of the centred snapshots and their mean."""
    count = len(gram) - 1
    values, vectors = torch.linalg.eigh(gram[:count, :count])
    values, vectors = values.flip(0).clamp(min=0.0), vectors.flip(1)
    rank = int((values > values[0] * 1e-12).sum()) if values[0] > 0 else 0  # the rest is rounding of the sums
    kept = min(rank, components)
    factors = torch.zeros(components, count + 1, dtype=torch.float64, device="cpu")
    factors[:kept, :count] = (vectors[:, :kept] / values[:kept].sqrt()).T
    if kept < components:  # the direction of the mean, without its part along the other components
        mean = torch.zeros(count + 1, dtype=torch.float64, device="cpu")
        mean[-1] = 1.0
        for _ in range(2):  # the second time removes the rounding errors of the first
            mean = mean - (factors @ (gram @ mean)) @ factors
        length = (mean @ gram @ mean).clamp(min=0.0).sqrt()
        spanned = kept + int(length > 1e-12 * gram[-1, -1].sqrt())
        if spanned < components:
            raise ValueError(
                f"n_components: found {components}, but {count} snapshots span only {spanned} directions; save "
                "snapshots that differ more, or lower n_components."
            )
        factors[kept] = mean / length
    return factors


def _pieces(snapshots: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """Yield pieces of the snapshots without their mean, and of the mean, each with the number of weights before it."""
    count, first = len(snapshots), 0
    for tensors in zip(*snapshots, strict=True):
        flat = [tensor.detach().reshape(-1).split(max(1, _PIECE // (8 * (count + 1)))) for tensor in tensors]
        for parts in zip(*flat, strict=True):
            values = torch.empty(count + 1, len(parts[0]), dtype=torch.float64, device="cpu")
            for row, part in zip(values, parts, strict=False):
                row.copy_(part)
            values[count] = values[:count].mean(0)
            values[:count] -= values[count]
            yield first, values
            first += values.shape[1]


def _spoiled(snapshots: Sequence[Sequence[Tensor]]) -> str:
    for number, snapshot in enumerate(snapshots):
        for place, tensor in enumerate(snapshot):
            if not tensor.isfinite().all():
                return f"number {number} holds NaN or infinities in parameter {place}"
    return "their products overflow"


def shapes_of(model: nn.Module) -> Shapes:
    """Return the parameters that require grad. A shared parameter counts once."""
    return {name: tuple(p.shape) for name, p in unwrap(model).named_parameters() if p.requires_grad}


def read_checkpoints(folder: str | Path, shapes: Shapes) -> list[list[Tensor]]:
    """Return the weights in the checkpoints of a folder: a list of the parameters for each file, by name.

    The files are safetensors, or ``.pt`` and ``.pth`` that hold tensors only: a state dict, or one under the key
    ``model``, ``state_dict`` or ``model_state_dict``. They are mapped into memory and read when they are used. Nothing
    in them is executed: ``torch.load`` runs with ``weights_only=True``. Entries besides the parameters, such as
    buffers, are ignored, and so is DDP's prefix ``module.``.

    Raises:
        FileNotFoundError: The folder is missing.
        ValueError: There are no files, or one is not a checkpoint, holds objects other than tensors, or belongs to
            another model. The message lists names and shapes.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: found no folder; give one that holds checkpoints of the model.")
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if not files:
        raise ValueError(
            f"{folder}: found no checkpoints; save some whose names end in {', '.join(SUFFIXES)}, such as "
            "torch.save(model.state_dict(), ...). Folders of torch.distributed.checkpoint are not read."
        )
    snapshots = []
    for path in files:
        tensors = _opened(path)
        _check_model(path, shapes, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        snapshots.append([tensors[name] for name in shapes])
    return snapshots


def read_matrix(path: str | Path, components: int, shapes: Shapes, share: range) -> Tensor:
    """Return rows of a basis in an ``.npy`` file, shape ``(len(share), weights)``, float32.

    The columns must be in the order of the model. :func:`write_matrix` also writes a ``.json`` file of the same name
    with the names of their parameters, which are compared.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: found no file; give an .npy file, or also give weight_load_dir, the folder of checkpoints to "
            "make it from."
        )
    try:
        matrix = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: refused: it is not an .npy file of numbers ({error}).") from None
    if not isinstance(matrix, np.ndarray) or matrix.ndim != 2 or matrix.dtype.kind != "f":
        content = f"shape {matrix.shape} of {matrix.dtype}" if isinstance(matrix, np.ndarray) else "an archive"
        raise ValueError(f"{path}: found {content}; a basis is an .npy file of one matrix of floats.")
    length = sum(torch.Size(shape).numel() for shape in shapes.values())
    if len(matrix) < components or matrix.shape[1] != length:
        raise ValueError(
            f"{path}: found {len(matrix)} directions of {matrix.shape[1]} weights; needed are {components} of the "
            f"{length} trained weights: make it from checkpoints of this model, or set n_components."
        )
    columns = path.with_suffix(".json")
    if columns.is_file() and _names_in(columns) != list(shapes):
        raise ValueError(
            f"{columns}: the columns of {path.name} belong to other parameters, or are in another order; make the file "
            "again from the checkpoints in weight_load_dir."
        )
    return torch.from_numpy(np.array(matrix[share.start : share.stop], dtype=np.float32))


def _names_in(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["names"]
    except (ValueError, KeyError, TypeError):
        return None


def write_matrix(path: str | Path, rows: Tensor, shapes: Shapes) -> None:
    """Write all directions into an ``.npy`` file and the names of their columns into a ``.json``, or nothing."""
    path, matrix = Path(path), io.BytesIO()
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(matrix, rows.numpy().astype(np.float32, copy=False))
    write_whole(path.with_suffix(".json"), json.dumps({"names": list(shapes)}).encode())
    write_whole(path, matrix.getbuffer())


def _opened(path: Path) -> dict[str, Tensor]:
    """Return the floating point entries of a file, mapped into memory."""
    entries = dict(_safetensors(path) if path.suffix == ".safetensors" else _torch_file(path))
    consume_prefix_in_state_dict_if_present(entries, "module.")
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


def _check_model(path: Path, shapes: Shapes, stored: Shapes) -> None:
    """Raise ``ValueError`` if a parameter is not in a file, or has another shape there."""
    missing = [name for name in shapes if name not in stored]
    other = [
        f"{name} {stored[name]} (needed {shape})"
        for name, shape in shapes.items()
        if name in stored and stored[name] != shape
    ]
    if missing or other:
        differences = [f"missing {_few(missing)}"] * bool(missing) + [f"of another shape {_few(other)}"] * bool(other)
        raise ValueError(
            f"{path}: it belongs to another model: {'; '.join(differences)}; it holds "
            f"{_few(list(stored)) or 'no weights'}. Give files of the model that is trained."
        )


def _few(items: Sequence[Any]) -> str:
    shown = ", ".join(map(str, items[:5]))
    return f"{shown} and {len(items) - 5} more" if len(items) > 5 else shown
