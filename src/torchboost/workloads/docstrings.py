"""A classification of real English texts that needs no download: which package is a docstring from?"""

from __future__ import annotations

import importlib.util
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchboost.workloads.data import EXTRA, Documents

PACKAGES = ("python", "sklearn", "sympy", "torch")
"""The classes: packages that torch or the extra ``workloads`` install, and Python's standard library."""

TRAIN, TEST = 1_250, 350
"""Texts of a package."""
LEAST = 8
"""Words of a text."""
WIDTH = 128
"""Words of a row. Longer texts are cut, and shorter ones filled up."""
VOCABULARY = 8_000
"""Different words, with padding and one for all unknown words among them."""
UNKNOWN, NAME = "[unknown]", "[name]"

_DOCSTRING = re.compile(r':[ \t]*\n[ \t]+[rR]?"""(.*?)"""', re.DOTALL)
_SECTION = re.compile(r"^\s*(?:Parameters|Args|Arguments|Attributes|Returns|Examples?|>>>|:param|\.\. )", re.MULTILINE)
_WORD = re.compile(r"[a-z]+|[^\w\s]")
_NAMES = frozenset({*PACKAGES, "pytorch", "scikit"})
_LEFT_OUT = frozenset({"_vendor", "idlelib", "lib2to3", "site-packages", "test", "testing", "tests"})

Words = Sequence[str]


def docstrings() -> Documents:
    """Read docstrings of installed packages, with the package as the label. Nothing is downloaded or imported.

    A text is a docstring up to its first section or example, as lower-case words and punctuation marks. The
    names of the packages are masked. The texts for tests are drawn at random, so they are from the same files as the
    others. About 70 % of the positions are padding.

    The texts depend on the versions of the packages, so accuracies in two environments cannot be compared. Takes about
    a second.

    Raises:
        ImportError: A package is missing.
        ValueError: A package has too few docstrings, as one without source files.
    """
    train: list[tuple[Words, int]] = []
    test: list[tuple[Words, int]] = []
    known: set[Words] = set()
    for label, package in enumerate(PACKAGES):
        texts = _texts(package, known)
        test += [(text, label) for text in texts[:TEST]]
        train += [(text, label) for text in texts[TEST:]]
    counts = Counter(word for text, _ in train for word in text)
    words = ("", UNKNOWN, *(word for word, _ in counts.most_common(VOCABULARY - 2)))
    number = {word: index for index, word in enumerate(words)}
    random.Random(0).shuffle(train)  # the first texts are then of all packages
    return Documents(
        train_inputs=_rows([text for text, _ in train], number),
        train_labels=torch.tensor([label for _, label in train]),
        test_inputs=_rows([text for text, _ in test], number),
        test_labels=torch.tensor([label for _, label in test]),
        words=words,
        classes=PACKAGES,
    )


def _texts(package: str, known: set[Words]) -> list[Words]:
    """Return texts of a package in an order that is drawn, always in the same way, each text once."""
    texts: list[Words] = []
    for file in _files(package):
        texts += _new_texts(file, known)
        if len(texts) >= TRAIN + TEST:
            texts = texts[: TRAIN + TEST]
            random.Random(0).shuffle(texts)
            return texts
    raise ValueError(
        f"found {len(texts)} docstrings in the source files of {package}; {TRAIN + TEST} are needed. "
        "Install the package with its source files."
    )


def _files(package: str) -> list[Path]:
    """Return the source files of a package, always in the same order, which is drawn."""
    if package == "python":
        folders = [sysconfig.get_path("stdlib")]
    else:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ImportError(f"the docstrings need {package}, which is not installed; install it {EXTRA}")
        folders = list(spec.submodule_search_locations)
    folder = Path(folders[0])
    files = sorted(file for file in folder.rglob("*.py") if not _LEFT_OUT & set(file.relative_to(folder).parts))
    random.Random(0).shuffle(files)
    return files


def _new_texts(file: Path, known: set[Words]) -> Iterator[Words]:
    for docstring in _DOCSTRING.findall(file.read_text(encoding="utf-8", errors="replace")):
        found = _WORD.findall(_SECTION.split(docstring, maxsplit=1)[0].lower())
        words = tuple(NAME if word in _NAMES else word for word in found)
        if len(words) >= LEAST and words not in known:
            known.add(words)
            yield words


def _rows(texts: Sequence[Words], number: Mapping[str, int]) -> Tensor:
    rows = torch.zeros(len(texts), WIDTH, dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        numbers = [number.get(word, number[UNKNOWN]) for word in text[:WIDTH]]
        row[: len(numbers)] = torch.tensor(numbers)
    return rows
