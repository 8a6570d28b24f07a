"""Small real data sets as tensors in memory, and their order for a seed.

The same seed and epoch give the same batches, including augmentation, so all contestants of a benchmark see identical
data.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from torchboost.workloads.images import Split, find_split, pixels_of

Batch = tuple[Tensor, Tensor]

CIFAR10_ON_THE_HUB = "uoft-cs/cifar10"
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
COLUMNS = ("img", "label")
HELD_OUT = 10
"""One of so many training samples, the last ones, is for validation."""
EXTRA = "from the folder of the project: pip install '.[workloads]'"


@dataclass(frozen=True, eq=False, kw_only=True)
class _Data:
    """The base class of all data sets. ``validation`` are the same with other samples for tests: :meth:`held_out`."""

    validation: Self | None = None

    @property
    def samples(self) -> int:
        """Number of training samples."""
        raise NotImplementedError

    def _split(self) -> Self:
        raise NotImplementedError

    def steps(self, batch: int) -> int:
        """Return the number of whole batches in an epoch."""
        if not 1 <= batch <= self.samples:
            raise ValueError(f"batch: found {batch}; allowed are 1 to {self.samples}, the number of training samples.")
        return self.samples // batch

    def held_out(self) -> Self:
        """Return the data without the last tenth of the training samples, which are for validation then."""
        return self if self.validation is not None else self._split()

    def to(self, device: torch.device | str) -> Self:
        """Return the same data on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: v.to(device) for name, v in values.items() if isinstance(v, (Tensor, _Data))})


@dataclass(frozen=True, eq=False, kw_only=True)
class Labelled(_Data):
    """Samples with labels.

    Args:
        train_inputs: Shape (N, ...).
        train_labels: int64, shape (N,).
        test_inputs: Shape (M, ...).
        test_labels: int64, shape (M,).
    """

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self.train_inputs)

    def train(self, batch: int, *, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield one epoch of whole batches, shuffled and augmented by ``seed`` and ``epoch`` alone."""
        generator = _generator(seed, epoch)
        order = torch.randperm(self.samples, generator=generator).to(self.train_inputs.device)
        for picked in order[: self.steps(batch) * batch].split(batch):
            yield self._prepared(self.train_inputs[picked], generator), self.train_labels[picked]

    def picked(self, indices: Tensor) -> Batch:
        """Return these training samples as they are, without augmentation."""
        return self._prepared(self.train_inputs[indices]), self.train_labels[indices]

    def test(self, batch: int) -> Iterator[Batch]:
        """Yield the test set once, in order, the last batch possibly short."""
        for inputs, labels in zip(self.test_inputs.split(batch), self.test_labels.split(batch), strict=True):
            yield self._prepared(inputs), labels

    def limited(self, count: int | None) -> Self:
        """Return the same data with only the first ``count`` training samples, or with all of them for None."""
        return replace(self, train_inputs=self.train_inputs[:count], train_labels=self.train_labels[:count])

    def _split(self) -> Self:
        border = _border(self.samples)
        inputs, labels = self.train_inputs, self.train_labels
        validation = replace(self.limited(0), test_inputs=inputs[border:], test_labels=labels[border:])
        return replace(self.limited(border), validation=validation)

    def _prepared(self, inputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the inputs of the model, augmented if there is a generator."""
        return inputs


@dataclass(frozen=True, eq=False, kw_only=True)
class Images(Labelled):
    """Labelled images, kept as bytes of shape (N, C, H, W) and normalised batch by batch.

    Args:
        classes: Number of labels.
        mean: Per channel, of pixels in [0, 1].
        std: Per channel, of pixels in [0, 1].
        shift: Training images are moved by up to this number of pixels in each direction and padded with zeros.
        flip: Training images are mirrored with probability 0.5.
    """

    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shift: int = 0
    flip: bool = False

    def _prepared(self, inputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        images = inputs if generator is None else augment(inputs, generator, shift=self.shift, flip=self.flip)
        shape = (1, -1, 1, 1)
        std = images.new_tensor(self.std, dtype=torch.float32).mul_(255)
        mean = images.new_tensor(self.mean, dtype=torch.float32).mul_(255)
        return (images.float() - mean.view(shape)).div_(std.view(shape))


@dataclass(frozen=True, eq=False, kw_only=True)
class Documents(Labelled):
    """Labelled texts as numbers of words, int64 of shape (N, width), one text in a row, filled up with zeros.

    ``words`` are in the order of their numbers. The first one stands for padding. ``classes`` are the labels' names.
    """

    words: tuple[str, ...]
    classes: tuple[str, ...]

    @property
    def padding(self) -> float:
        """Share of the positions of the training texts that are padding."""
        return float((self.train_inputs == 0).float().mean())


@dataclass(frozen=True, eq=False, kw_only=True)
class Text(_Data):
    """Characters or word pieces as numbers. A sample is a window, and its target is the window shifted by one token.

    Args:
        train_tokens: int64, shape (N,).
        test_tokens: int64, shape (M,).
        characters: The characters, or word pieces, in the order of their numbers.
        context: Length of a window.
    """

    train_tokens: Tensor
    test_tokens: Tensor
    characters: Sequence[str]
    context: int

    @property
    def samples(self) -> int:
        """Number of windows that cover the training text once."""
        return (len(self.train_tokens) - 1) // self.context

    def train(self, batch: int, *, seed: int, epoch: int) -> Iterator[Batch]:
        """Yield whole batches of random windows, as many as would cover the text once."""
        last = len(self.train_tokens) - self.context
        generator = _generator(seed, epoch)
        for _ in range(self.steps(batch)):
            yield self._windows(self.train_tokens, torch.randint(last, (batch,), generator=generator))

    def test(self, batch: int) -> Iterator[Batch]:
        """Yield the test text once as windows side by side, in order, the last batch possibly short."""
        starts = torch.arange(0, len(self.test_tokens) - self.context, self.context)
        for some in starts.split(batch):
            yield self._windows(self.test_tokens, some)

    def limited(self, count: int | None) -> Self:
        """Return the same data with a training text of ``count`` windows, or with all of it for None."""
        return self if count is None else replace(self, train_tokens=self.train_tokens[: count * self.context + 1])

    def _split(self) -> Self:
        """Hold out at least one window, and keep at least one."""
        tokens, window = self.train_tokens, self.context + 1
        if len(tokens) < 2 * window:
            raise ValueError(f"found a training text of {len(tokens)} tokens; {2 * window} are needed, two windows.")
        border = min(_border(len(tokens)), len(tokens) - window)
        validation = replace(self.limited(0), test_tokens=tokens[border:])
        return replace(self, train_tokens=tokens[:border], validation=validation)

    def _windows(self, tokens: Tensor, starts: Tensor) -> Batch:
        where = (starts[:, None] + torch.arange(self.context + 1)).to(tokens.device)
        windows = tokens[where]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def to_longest(ids: Tensor) -> Tensor:
    """Return numbers, of shape (N, width), without the columns at their end that hold padding alone, the number 0."""
    return ids[:, : int((ids != 0).sum(1).max())].contiguous()


def augment(images: Tensor, generator: torch.Generator, *, shift: int, flip: bool) -> Tensor:
    """Move each image by up to ``shift`` pixels each way, and mirror half of them. The border is padded with zeros.

    Takes well under a millisecond for 64 images of 32 x 32.

    Args:
        images: Shape (N, C, H, W), any dtype. Not changed.
        generator: On the CPU, so that the numbers do not depend on the device of the images.
        shift: Pixels.
        flip: Whether to mirror left to right.
    """
    count, _, height, width = images.shape
    if shift:
        rows, columns = torch.randint(2 * shift + 1, (2, count), generator=generator).to(images.device)
        padded = F.pad(images, (shift, shift, shift, shift))
        views = padded.unfold(2, height, 1).unfold(3, width, 1)
        images = views[torch.arange(count, device=images.device), :, rows, columns]
    if flip:
        mirrored = torch.rand(count, generator=generator).lt(0.5).to(images.device)
        images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)
    return images


def digits(size: int = 16) -> Images:
    """Load the 1,797 handwritten digits that come with scikit-learn, enlarged to ``size``. Nothing is downloaded.

    Half of the images, 898 of them, are for tests: with fewer, an accuracy is known to half a point only. The images
    come writer by writer, so the halves are drawn at random, always in the same way. Training images move by up to
    ``size // 8`` pixels. ``size`` is the height and width, a multiple of 8.
    """
    if size < 8 or size % 8:
        raise ValueError(f"size: found {size}; the digits are 8 x 8, allowed are multiples of 8.")
    datasets = _imported("sklearn.datasets", "scikit-learn", "the digits data set")
    pixels, targets = datasets.load_digits(return_X_y=True)
    images = torch.as_tensor(pixels).view(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
    images = images.repeat_interleave(size // 8, 2).repeat_interleave(size // 8, 3)
    labels = torch.as_tensor(targets).long()
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[drawn[: len(labels) // 2]] = True
    return Images(
        train_inputs=images[~held_out],
        train_labels=labels[~held_out],
        test_inputs=images[held_out],
        test_labels=labels[held_out],
        classes=10,
        mean=(0.305,),
        std=(0.376,),
        shift=size // 8,
    )


def cifar10(path: str | Path | None = None, *, train_limit: int | None = None) -> Images:
    """Load CIFAR-10: 50,000 training and 10,000 test images of 32 x 32. Or load images of your own instead.

    Args:
        path: Folder with ``train.parquet`` and ``test.parquet``, or one of these files, with columns ``img`` (JPEG
            or PNG bytes, or a dict with ``bytes``) and ``label``. Or a folder with the binary version or the
            classes that :func:`~torchboost.workloads.images.find_split` reads. None fetches it from the Hugging Face
            Hub.
        train_limit: Use only the first training images.

    Raises:
        FileNotFoundError: A file does not exist.
        ValueError: A file has other columns or another content, training and test have other classes, or the folder has
            pickled batches alone.
        ImportError: A package that reads the files is missing. The message names it.
    """
    if path is not None and (train := find_split(Path(path), "train")) and (test := find_split(Path(path), "test")):
        return _of_files(train, test).limited(train_limit)
    tables = {split: _hub(split) if path is None else _parquet(Path(path), split) for split in ("train", "test")}
    return _of_files((*_decoded(tables["train"], train_limit), ()), (*_decoded(tables["test"], None), ()))


def _of_files(train: Split, test: Split) -> Images:
    if train[2] != test[2]:
        other = sorted(set(train[2]) ^ set(test[2]))
        raise ValueError(f"found the classes {other} in one of training and test only; needed: the same in both.")
    pixels = train[0].float().div_(255) if train[2] else torch.empty(0)
    return Images(
        train_inputs=train[0],
        train_labels=train[1],
        test_inputs=test[0],
        test_labels=test[1],
        classes=len(train[2]) or 10,
        mean=tuple(pixels.mean((0, 2, 3)).tolist()) if train[2] else CIFAR10_MEAN,
        std=tuple(pixels.std((0, 2, 3)).clamp(min=1e-3).tolist()) if train[2] else CIFAR10_STD,
        shift=4,
        flip=True,
    )


def text(path: str | Path | None = None, *, context: int = 128) -> Text:
    """Load a text as characters. The last tenth is the test text.

    Args:
        path: A UTF-8 text file. None takes the language reference that ships with Python as
            ``pydoc_data.topics``, about 700,000 characters of English. It differs between Python versions.
        context: Characters per sample.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The text is too short for one window in each part.
    """
    content = content_of(path)
    characters = "".join(sorted(set(content)))
    number = {character: index for index, character in enumerate(characters)}
    border = len(content) * 9 // 10
    train, test = ([number[one] for one in part] for part in (content[:border], content[border:]))
    return as_text(train, test, characters, context=context, unit="characters")


def content_of(path: str | Path | None) -> str:
    """Return the content of a UTF-8 text file, or for None of the language reference that ships with Python."""
    if path is not None:
        return _existing(Path(path), "a UTF-8 text file").read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def as_text(train: Sequence[int], test: Sequence[int], characters: Sequence[str], *, context: int, unit: str) -> Text:
    """Return numbers of characters or word pieces as data. ``unit`` is the meaning of the numbers, in the plural.

    Raises:
        ValueError: The text is too short for one window in each part.
    """
    found, needed = len(train) + len(test), 20 * (context + 1)
    if found < needed:
        raise ValueError(f"found a text of {found} {unit}; a context of {context} needs {needed}.")
    return Text(
        train_tokens=torch.tensor(train), test_tokens=torch.tensor(test), characters=characters, context=context
    )


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def _border(samples: int) -> int:
    """Return how many of the samples remain for training if the last tenth is held out, at least one."""
    if samples < 2:
        raise ValueError(f"found {samples} training samples; at least 2 are needed, one of them for validation.")
    return samples * (HELD_OUT - 1) // HELD_OUT


def _existing(path: Path, content: str) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"found no file {path}; give the path of {content}.")
    return path


def _imported(module: str, package: str, purpose: str, remedy: str = EXTRA) -> Any:
    """Import an optional module, or say what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {package}, which is not installed; install it {remedy}") from error


def _parquet(path: Path, split: str) -> Mapping[str, Sequence[Any]]:
    folder = path if path.is_dir() else path.parent
    content = (
        "a folder with train.parquet and test.parquet, with the binary version of CIFAR-10, or with train and test of "
        "a folder per class"
    )
    file = _existing(folder / f"{split}.parquet", content)
    parquet = _imported("pyarrow.parquet", "pyarrow", "reading a parquet file")
    names = parquet.read_schema(file).names
    if not set(COLUMNS) <= set(names):
        raise ValueError(f"{file}: found columns {names}; needed are {list(COLUMNS)}.")
    return parquet.read_table(file, columns=list(COLUMNS)).to_pydict()


def _hub(split: str) -> Mapping[str, Sequence[Any]]:
    remedy = "with: pip install datasets; or give the path of a folder with train.parquet and test.parquet"
    datasets = _imported("datasets", "datasets", "CIFAR-10 from the Hub", remedy)
    table = datasets.load_dataset(CIFAR10_ON_THE_HUB, split=split)
    return table.cast_column("img", datasets.Image(decode=False)).to_dict()


def _decoded(table: Mapping[str, Sequence[Any]], limit: int | None) -> tuple[Tensor, Tensor]:
    image = _imported("PIL.Image", "pillow", "decoding images")
    files = [entry["bytes"] if isinstance(entry, dict) else entry for entry in table["img"][:limit]]
    pixels = [np.asarray(pixels_of(image, io.BytesIO(file), f"row {row}")) for row, file in enumerate(files)]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(table["label"][:limit])
