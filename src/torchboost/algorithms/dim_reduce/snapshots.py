"""Snapshots of the weights of a run, read in parts: from checkpoint files, or kept during training."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchboost.core.wrapping import unwrap

__all__ = ["CheckpointFiles", "Layout", "SnapshotBuffer", "Snapshots", "checkpoint_files", "layout_of_file", "renaming"]

SUFFIXES = (".safetensors", ".pt", ".pth")
NESTED = ("model", "state_dict", "model_state_dict")
"""Keys under which a ``.pt`` file may hold its state dict."""


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
        """Return the layout of the parameters that require grad; a shared one counts once."""
        named = [(name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad]
        return cls(tuple(name for name, _ in named), tuple(shape for _, shape in named))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of weights in each parameter."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def length(self) -> int:
        """Number of all weights."""
        return sum(self.sizes)


class Snapshots(Protocol):
    """Several vectors of weights."""

    layout: Layout

    def __len__(self) -> int:
        """Return the number of snapshots."""
        ...

    def part(self, snapshot: int, parameter: int, where: tuple[slice, ...]) -> Tensor:
        """Return part of one parameter in one snapshot, cut along its first dimensions."""
        ...


class CheckpointFiles:
    """Checkpoints of one model: safetensors, or ``.pt`` and ``.pth`` that hold tensors only.

    Files are mapped into memory and read in part; nothing in them is ever executed: ``torch.load`` runs with
    ``weights_only=True``. A file may hold a state dict, or one under a key ``model``, ``state_dict`` or
    ``model_state_dict``.

    Args:
        paths: The files, in the order in which they were written, or a folder of them.
        model: The model, or the layout of its parameters; files keep names in another order than models do. Other
            entries, such as buffers, are ignored. Names may differ by a prefix that all of them have, such as
            ``module.`` of DDP.

    Raises:
        TypeError: Neither a model nor a layout.
        FileNotFoundError: A file or the folder is missing.
        ValueError: A file is not a checkpoint, holds objects other than tensors, or belongs to another model (names and
            shapes are listed).
    """

    def __init__(self, paths: str | Path | Sequence[str | Path], model: nn.Module | Layout) -> None:
        if not isinstance(model, (nn.Module, Layout)):
            raise TypeError(f"model: found {type(model).__name__}; give the model whose checkpoints these are.")
        self.layout = Layout.of(unwrap(model)) if isinstance(model, nn.Module) else model
        given = checkpoint_files(paths) if isinstance(paths, (str, Path)) else paths
        self.paths = tuple(Path(path) for path in given)
        if not self.paths:
            raise ValueError(f"found no checkpoints; give files that end in {', '.join(SUFFIXES)}.")
        self._files = [_named_as(self.layout, _opened(path)) for path in self.paths]
        for path, file in zip(self.paths, self._files, strict=True):
            self._check(path, file.shapes)

    def __len__(self) -> int:
        return len(self.paths)

    def part(self, snapshot: int, parameter: int, where: tuple[slice, ...]) -> Tensor:
        """Return part of one parameter, as :class:`Snapshots` says."""
        return self._files[snapshot].read(self.layout.names[parameter], where)

    def _check(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        wanted = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        missing = [name for name in wanted if name not in shapes]
        other = [f"{n} {shapes[n]} (wanted {s})" for n, s in wanted.items() if n in shapes and shapes[n] != s]
        if missing or other:
            said = f"missing {_few(missing)}" if missing else ""
            said += "; " if missing and other else ""
            said += f"of another shape {_few(other)}" if other else ""
            raise ValueError(
                f"{path}: it belongs to another model: {said}; it holds {_few(list(shapes)) or 'no weights'}. Give "
                "checkpoints of the model that is trained."
            )


class SnapshotBuffer:
    """Snapshots of the weights in host memory, taken during a run.

    Args:
        model: The model, or the layout of its parameters.
        dtype: Dtype of the snapshots; bfloat16 halves the memory and costs three digits of the directions.

    Cost: ``2 n`` bytes per snapshot in bfloat16, ``4 n`` in float32.
    """

    def __init__(self, model: nn.Module | Layout, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout = Layout.of(unwrap(model)) if isinstance(model, nn.Module) else model
        self.dtype = dtype
        self._kept: list[list[Tensor]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Add a copy of the current weights.

        Raises:
            ValueError: Number or shapes of the parameters are not those of the layout.
        """
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        if shapes != self.layout.shapes:
            raise ValueError(f"parameters: found shapes {_few(shapes)}, wanted {_few(self.layout.shapes)}.")
        self._kept.append([p.detach().to("cpu", self.dtype, copy=True) for p in parameters])

    def part(self, snapshot: int, parameter: int, where: tuple[slice, ...]) -> Tensor:
        """Return part of one parameter, as :class:`Snapshots` says."""
        return self._kept[snapshot][parameter][where]

    def clear(self) -> None:
        """Free the memory."""
        self._kept.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: all snapshots."""
        return {"kept": [[t.clone() for t in snapshot] for snapshot in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned."""
        self._kept = [[t.to("cpu", self.dtype, copy=True) for t in snapshot] for snapshot in state["kept"]]


def checkpoint_files(folder: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, by name with numbers in their order.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The folder holds no checkpoints.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: found no folder; give one that holds checkpoints of the model.")
    found = sorted((path for path in folder.iterdir() if path.suffix in SUFFIXES), key=_natural)
    if not found:
        raise ValueError(
            f"{folder}: found no checkpoints; save some whose names end in {', '.join(SUFFIXES)}, such as "
            "torch.save(model.state_dict(), ...). Folders of torch.distributed.checkpoint are not read."
        )
    return found


class _Reader(NamedTuple):
    shapes: dict[str, tuple[int, ...]]
    """Of the floating point entries."""
    read: Callable[[str, tuple[slice, ...]], Tensor]


def _opened(path: Path) -> _Reader:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: found no file; give the checkpoints of the model.")
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix in SUFFIXES:
        return _torch_file(path)
    raise ValueError(f"{path}: found a file that ends in {path.suffix!r}; allowed are {', '.join(SUFFIXES)}.")


def _safetensors(path: Path) -> _Reader:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt")
        names: list[str] = file.keys()
        slices = {name: file.get_slice(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path}: it is not a safetensors file ({error}).") from None
    shapes = {
        name: tuple(part.get_shape())
        for name, part in slices.items()
        if part.get_dtype() in ("F64", "F32", "F16", "BF16")
    }
    return _Reader(shapes, lambda name, where: slices[name][where] if where else file.get_tensor(name))


def _torch_file(path: Path) -> _Reader:
    from pickle import UnpicklingError

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
    tensors = {n: t for n, t in loaded.items() if isinstance(t, Tensor) and t.is_floating_point()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return _Reader(shapes, lambda name, where: tensors[name][where])


def _named_as(layout: Layout, file: _Reader) -> _Reader:
    """Map the names of the entries of a file to those of the layout."""
    names = renaming(layout.names, file.shapes)
    shapes = {new: file.shapes[old] for new, old in names.items()}
    return _Reader(shapes, lambda name, where: file.read(names[name], where))


def renaming(wanted: Sequence[str], found: Collection[str]) -> dict[str, str]:
    """Return the names in a file under what they are called without a prefix, or with one, if that makes them wanted.

    Without such a prefix each is called what it is.
    """
    same = {name: name for name in found}
    first = wanted[0] if wanted else ""
    for name in () if set(wanted) <= set(found) else found:
        if name.endswith(f".{first}"):
            cut = len(name) - len(first)
            renamed = {n[cut:]: n for n in found if n.startswith(name[:cut])}
        elif first.endswith(f".{name}"):
            renamed = {first[: len(first) - len(name)] + n: n for n in found}
        else:
            continue
        if set(wanted) <= set(renamed):
            return renamed
    return same


def layout_of_file(path: Path, exclude: Sequence[str] = ()) -> Layout:
    """Return all floating point entries of a file, in its order; it does not say what is a parameter.

    Args:
        path: The file.
        exclude: Patterns of names, as in a shell, that are left out.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is not a checkpoint, or nothing is left.
    """
    reader = _opened(path)
    chosen = {n: s for n, s in reader.shapes.items() if not any(fnmatchcase(n, pattern) for pattern in exclude)}
    if not chosen:
        said = f" that {', '.join(exclude)} do not leave out" if exclude and reader.shapes else ""
        raise ValueError(f"{path}: found no floating point entry{said}; give checkpoints of a model.")
    return Layout(tuple(chosen), tuple(chosen.values()))


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort ``step-9`` before ``step-10``."""
    parts, digits = [], ""
    for character in f"{path.stem} ":
        if character.isdigit():
            digits += character
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        parts.append((1, 0, character))
    return parts


def _few(items: Sequence[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:5])
    return f"{shown} and {len(items) - 5} more" if len(items) > 5 else shown
