"""Checkpoints of a model that are read as snapshots, and files of a basis. Nothing is ever unpickled."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchboost.algorithms.dim_reduce.basis import PrincipalComponents, Progress
from torchboost.core.wrapping import unwrap

__all__ = ["Layout", "checkpoint_files", "layout_of_file", "read_checkpoints", "read_matrix", "write_matrix"]

SUFFIXES = (".safetensors", ".pt", ".pth")
NESTED = ("model", "state_dict", "model_state_dict")
"""Keys under which a ``.pt`` file may hold its state dict."""
_AT_ONCE = 1 << 30  # bytes of components that are held together while a file is written


class Layout(NamedTuple):
    """The parameters that form a vector of all weights, in order.

    Args:
        names: Names of the parameters.
        shapes: Their shapes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Return the layout of the parameters that require grad. A shared parameter counts once."""
        named = [(name, tuple(p.shape)) for name, p in unwrap(model).named_parameters() if p.requires_grad]
        return cls(tuple(name for name, _ in named), tuple(shape for _, shape in named))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of weights in each parameter."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def length(self) -> int:
        """Number of all weights."""
        return sum(self.sizes)


def read_checkpoints(paths: str | Path | Sequence[str | Path], model: nn.Module | Layout) -> list[list[Tensor]]:
    """Return the weights in checkpoints of one model: a list of its parameters for each file.

    The files are safetensors, or ``.pt`` and ``.pth`` that hold tensors only: a state dict, or one under the key
    ``model``, ``state_dict`` or ``model_state_dict``. They are mapped into memory and read when they are used. Nothing
    in them is executed: ``torch.load`` runs with ``weights_only=True``.

    Args:
        paths: The files, in the order in which they were written, or a folder of them.
        model: The model, or the layout of its parameters. Other entries, such as buffers, are ignored. The names may
            differ by a prefix that all of them have, such as DDP's ``module.``.

    Raises:
        TypeError: Neither a model nor a layout.
        FileNotFoundError: A file or the folder is missing.
        ValueError: There are no files, or one is not a checkpoint, holds objects other than tensors, or belongs to
            another model. The message lists names and shapes.
    """
    if not isinstance(model, (nn.Module, Layout)):
        raise TypeError(f"model: found {type(model).__name__}; give the model whose checkpoints these are.")
    layout = Layout.of(model) if isinstance(model, nn.Module) else model
    files = checkpoint_files(paths) if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    if not files:
        raise ValueError(f"found no checkpoints; give files that end in {', '.join(SUFFIXES)}.")
    return [_parameters(path, layout) for path in files]


def checkpoint_files(folder: str | Path) -> list[Path]:
    """Return the checkpoints in a folder by name; numbers in names are sorted as numbers.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The folder holds no checkpoints.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: found no folder; give one that holds checkpoints of the model.")
    files = [path for path in folder.iterdir() if path.suffix in SUFFIXES]
    if not files:
        raise ValueError(
            f"{folder}: found no checkpoints; save some whose names end in {', '.join(SUFFIXES)}, such as "
            "torch.save(model.state_dict(), ...). Folders of torch.distributed.checkpoint are not read."
        )
    return sorted(files, key=lambda path: [p.zfill(20) if p.isdigit() else p for p in re.split(r"(\d+)", path.stem)])


def layout_of_file(path: Path, exclude: Sequence[str] = ()) -> Layout:
    """Return the floating point entries of a checkpoint, in its order; it does not say which are parameters.

    Args:
        path: The file.
        exclude: Patterns of names to ignore, as in a shell.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is not a checkpoint, or no entry is left.
    """
    tensors = {n: t for n, t in _opened(path).items() if not any(fnmatchcase(n, pattern) for pattern in exclude)}
    if not tensors:
        besides = f" besides {', '.join(exclude)}" if exclude else ""
        raise ValueError(f"{path}: found no floating point entry{besides}; give checkpoints of a model.")
    return Layout(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))


def read_matrix(path: str | Path, components: int, layout: Layout, share: range) -> Tensor:
    """Return rows of a basis in an ``.npy`` file, shape ``(len(share), weights)``, float32. It is never unpickled.

    :func:`write_matrix` also writes a ``.json`` file of the same name, which maps columns to parameters. Without it the
    columns must be in the order of the model.

    Args:
        path: The file, with one row per direction.
        components: Number of directions of the basis, the first rows of the file.
        layout: The parameters of the model.
        share: The rows to return.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is not an ``.npy`` file of floating point numbers, or belongs to another model.
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
    if len(matrix) < components or matrix.shape[1] != layout.length:
        raise ValueError(
            f"{path}: found {len(matrix)} directions of {matrix.shape[1]} weights; needed are {components} of the "
            f"{layout.length} trained weights: make it from checkpoints of this model, or set n_components."
        )
    part = matrix[share.start : share.stop]
    rows = np.empty(part.shape, dtype=np.float32)
    columns = _columns(path.with_suffix(".json"), layout)
    np.concatenate([part[:, place] for place in columns], axis=1, out=rows, casting="same_kind")
    return torch.from_numpy(rows)


def write_matrix(
    path: str | Path,
    snapshots: Sequence[Sequence[Tensor]],
    layout: Layout,
    components: int,
    *,
    progress: Progress | None = None,
) -> float:
    """Write principal components into an ``.npy`` file and the names of their columns into a ``.json``.

    The files appear when they are complete. An interrupted run leaves none.

    Args:
        path: The ``.npy`` file.
        snapshots: At least as many as components.
        layout: The parameters in a snapshot.
        components: Number of directions.
        progress: See :class:`~torchboost.algorithms.dim_reduce.basis.PrincipalComponents`.

    Returns:
        Share of the variance of the snapshots that the components hold.

    Cost: one read of the snapshots for their products, and one for each gibibyte of the result.
    """
    path = Path(path)
    basis = PrincipalComponents(snapshots, components, progress=progress)
    at_once = max(1, _AT_ONCE // (4 * layout.length))
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        matrix = np.lib.format.open_memmap(unfinished, "w+", np.float32, (components, layout.length))
        for first in range(0, components, at_once):
            share = range(first, min(first + at_once, components))
            matrix[share.start : share.stop] = basis.rows(share).numpy()
        matrix.flush()
        columns = {"names": layout.names, "shapes": layout.shapes, "explained": basis.explained}
        path.with_suffix(".json").write_text(json.dumps(columns, indent=1), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return basis.explained


def _columns(path: Path, layout: Layout) -> list[slice]:
    """Return the columns of each parameter of the model in a file whose ``.json`` is at ``path``."""
    stored = dict(zip(layout.names, layout.shapes, strict=True))
    if path.is_file():
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            stored = {str(n): tuple(shape) for n, shape in zip(entries["names"], entries["shapes"], strict=True)}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: found no names and shapes of columns, as `torchboost pca` writes them next to a basis "
                f"({type(error).__name__}); remove the file if it does not belong to a basis."
            ) from None
    names = _names_in_file(layout.names, stored)
    other = [n for n, shape in zip(layout.names, layout.shapes, strict=True) if stored.get(names[n]) != shape]
    if other or len(stored) != len(names):
        raise ValueError(
            f"{path}: a basis of another model: {_few(other or list(stored))} differ; make it from checkpoints of this "
            "model."
        )
    ends = accumulate((torch.Size(shape).numel() for shape in stored.values()), initial=0)
    places = dict(zip(stored, (slice(first, last) for first, last in pairwise(ends)), strict=True))
    return [places[names[name]] for name in layout.names]


def _parameters(path: Path, layout: Layout) -> list[Tensor]:
    """Return the parameters of a model from one checkpoint."""
    tensors = _opened(path)
    names = _names_in_file(layout.names, tensors)
    missing = [name for name in layout.names if names[name] not in tensors]
    shapes = {name: tuple(tensors[names[name]].shape) for name in layout.names if names[name] in tensors}
    wanted = dict(zip(layout.names, layout.shapes, strict=True))
    other = [f"{name} {shape} (wanted {wanted[name]})" for name, shape in shapes.items() if shape != wanted[name]]
    if missing or other:
        differences = [f"missing {_few(missing)}"] * bool(missing) + [f"of another shape {_few(other)}"] * bool(other)
        raise ValueError(
            f"{path}: it belongs to another model: {'; '.join(differences)}; it holds "
            f"{_few(list(tensors)) or 'no weights'}. Give checkpoints of the model that is trained."
        )
    return [tensors[names[name]] for name in layout.names]


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


def _names_in_file(names: Sequence[str], stored: Collection[str]) -> dict[str, str]:
    """Map the names of a model to those in a file, which may have a common prefix more, or less, than the model."""
    first = names[0] if names else ""
    for other in () if set(names) <= set(stored) else stored:
        if other.endswith(f".{first}"):
            renamed = {name: other.removesuffix(first) + name for name in names}
        elif first.endswith(f".{other}"):
            renamed = {name: name.removeprefix(first.removesuffix(other)) for name in names}
        else:
            continue
        if set(renamed.values()) <= set(stored) and len(set(renamed.values())) == len(names):
            return renamed
    return {name: name for name in names}


def _few(items: Sequence[Any]) -> str:
    shown = ", ".join(map(str, items[:5]))
    return f"{shown} and {len(items) - 5} more" if len(items) > 5 else shown
