"""Images from files: a folder of classes, and the batches in which CIFAR-10 is distributed."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Split", "find_split"]

Split = tuple[Tensor, Tensor, tuple[str, ...]]
"""Images of shape (N, 3, 32, 32) in uint8, their labels, and the names of the classes; none for CIFAR-10."""

SIDE = 32
ROW = 1 + 3 * SIDE * SIDE
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
FOLDERS = {"train": ("train",), "test": ("test", "val")}
ENDINGS = {".png", ".jpg", ".jpeg"}
ARRAYS = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
CORES = ("numpy.core.multiarray", "numpy._core.multiarray")


def find_split(root: Path, split: str) -> Split | None:
    """Return the images of ``train`` or ``test`` in a folder, or None if it has neither layout.

    The layouts are torchvision's: batches of CIFAR-10 in Python's or the binary format, in the folder itself or in
    ``cifar-10-batches-py`` or ``-bin`` below it, and a folder per class with PNG or JPEG files, below ``train`` and
    ``test`` or ``val``. Images of classes become 32 x 32, in an order that is drawn once.

    Raises:
        ValueError: A file is not such a batch, or a folder has no image.
        ImportError: Pillow is missing.
    """
    for folder in (root, root / "cifar-10-batches-py", root / "cifar-10-batches-bin"):
        for ending, read in ((".bin", _binary), ("", _pickled)):
            files = [folder / f"{name}{ending}" for name in BATCHES[split]]
            if all(file.is_file() for file in files):
                pixels, labels = zip(*map(read, files), strict=True)
                images = torch.from_numpy(np.concatenate(pixels)).view(-1, 3, SIDE, SIDE)
                return images, torch.from_numpy(np.concatenate(labels)).long(), ()
    folders = [root / name for name in FOLDERS[split] if (root / name).is_dir()]
    return _of_classes(folders[0]) if folders else None


def _of_classes(root: Path) -> Split:
    image: Any = importlib.import_module("PIL.Image")
    classes = tuple(sorted(folder.name for folder in root.iterdir() if folder.is_dir()))
    files = [
        (f, k)
        for k, name in enumerate(classes)
        for f in sorted((root / name).rglob("*"))
        if f.suffix.lower() in ENDINGS
    ]
    if not files:
        raise ValueError(f"found no PNG or JPEG file in the folders below {root}; needed: a folder per class.")
    # The last images are held out, and a limit takes the first ones, so the classes are mixed.
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    pixels = [np.asarray(image.open(files[place][0]).convert("RGB").resize((SIDE, SIDE))) for place in order]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor([files[place][1] for place in order]), classes


def _binary(file: Path) -> tuple[np.ndarray, np.ndarray]:
    content = np.fromfile(file, dtype=np.uint8)
    if not len(content) or len(content) % ROW:
        raise ValueError(f"{file}: found {len(content)} bytes; needed: a multiple of {ROW}, a label and an image each.")
    rows = content.reshape(-1, ROW)
    return rows[:, 1:], rows[:, 0]


def _pickled(file: Path) -> tuple[np.ndarray, np.ndarray]:
    with file.open("rb") as stream:
        content = _Arrays(stream, encoding="bytes").load()
    try:
        return np.asarray(content[b"data"], dtype=np.uint8).reshape(-1, ROW - 1), np.asarray(
            content[b"labels"], dtype=np.int64
        )
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{file}: found no batch of CIFAR-10; needed: a dict with b'data' and b'labels'.") from None


class _Arrays(pickle.Unpickler):
    """Reads arrays and nothing else: a pickle may name any function, which would run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ARRAYS or (module in CORES and name == "_reconstruct"):
            return super().find_class(module, name)
        raise ValueError(f"found {module}.{name} in a batch of CIFAR-10; allowed: arrays of numbers.")
