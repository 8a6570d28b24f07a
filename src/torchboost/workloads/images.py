"""Images from files: a folder of classes, and the binary version of CIFAR-10."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

Split = tuple[Tensor, Tensor, tuple[str, ...]]
"""Images of shape (N, 3, 32, 32) in uint8, their labels, and the names of the classes, none for CIFAR-10."""

SIDE = 32
ROW = 1 + 3 * SIDE * SIDE
BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
FOLDERS = {"train": ("train",), "test": ("test", "val")}
ENDINGS = {".png", ".jpg", ".jpeg"}
FORMATS = ("PNG", "JPEG")
"""The formats that Pillow tries, whatever a file is called: its decoders of rare formats are less tested."""
LABELS = 10
PICKLED = "cifar-10-batches-py"


def find_split(root: Path, split: str) -> Split | None:
    """Return the images of ``train`` or ``test`` in a folder, or None if it has neither layout.

    The layouts are the binary version of CIFAR-10, in the folder itself or in ``cifar-10-batches-bin`` below it, and a
    folder per class with PNG or JPEG files, below ``train`` and ``test`` or ``val``. Images of classes become 32 x 32,
    in an order that is drawn once. Files and folders whose name begins with a dot are ignored.

    Raises:
        ValueError: A file has another content, a folder has no image, or there are pickled batches alone.
        ImportError: Pillow is missing.
    """
    for folder in (root, root / "cifar-10-batches-bin"):
        files = [folder / f"{name}.bin" for name in BATCHES[split]]
        if all(file.is_file() for file in files):
            pixels, labels = zip(*map(_binary, files), strict=True)
            images = torch.from_numpy(np.concatenate(pixels)).view(-1, 3, SIDE, SIDE)
            return images, torch.from_numpy(np.concatenate(labels)).long(), ()
    folders = [root / name for name in FOLDERS[split] if (root / name).is_dir()]
    if folders:
        return _of_classes(folders[0])
    pickled = (root / PICKLED).is_dir() or (root / "data_batch_1").is_file()
    if pickled and not (root / f"{split}.parquet").is_file():
        raise ValueError(
            f"{root}: found pickled batches of CIFAR-10, which are not read because they can run code; allowed: the "
            "binary version of CIFAR-10, train.parquet and test.parquet, or train and test of a folder per class."
        )
    return None


def pixels_of(image: Any, source: Path | IO[bytes], name: str) -> Any:
    """Return a picture in RGB with 8 bits per channel, as Pillow's, given the module ``PIL.Image`` and the file.

    Raises:
        ValueError: It is not a PNG or a JPEG, or its channels have more than 8 bits, which Pillow would cut off at 255.
    """
    try:
        with image.open(source, formats=FORMATS) as picture:
            mode, rgb = picture.mode, picture.convert("RGB")
    except Exception as error:  # Pillow has no common class for errors of a damaged file
        raise ValueError(f"{name}: found no PNG or JPEG that Pillow can read: {error}") from error
    if mode.partition(";")[0] == "I":
        raise ValueError(f"{name}: found an image of mode {mode}; needed: 8 bits per channel. Convert it first.")
    return rgb


def _of_classes(root: Path) -> Split:
    image: Any = importlib.import_module("PIL.Image")
    classes = tuple(sorted(f.name for f in root.iterdir() if f.is_dir() and not f.name.startswith(".")))
    files = [(f, k) for k, name in enumerate(classes) for f in sorted((root / name).rglob("*")) if _is_image(f, root)]
    if not files:
        raise ValueError(f"found no PNG or JPEG file in the folders below {root}; needed: a folder per class.")
    # The last images are held out, and a limit takes the first ones, so the classes are mixed.
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    pictures = (pixels_of(image, files[place][0], str(files[place][0])) for place in order)
    pixels = [np.asarray(picture.resize((SIDE, SIDE))) for picture in pictures]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor([files[place][1] for place in order]), classes


def _is_image(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return not hidden and file.suffix.lower() in ENDINGS and file.is_file()


def _binary(file: Path) -> tuple[np.ndarray, np.ndarray]:
    content = np.fromfile(file, dtype=np.uint8)
    if not len(content) or len(content) % ROW:
        raise ValueError(f"{file}: found {len(content)} bytes; needed: a multiple of {ROW}, a label and an image each.")
    rows = content.reshape(-1, ROW)
    if (highest := int(rows[:, 0].max())) >= LABELS:
        raise ValueError(f"{file}: found the label {highest}; allowed: 0 to {LABELS - 1}.")
    return rows[:, 1:], rows[:, 0]
