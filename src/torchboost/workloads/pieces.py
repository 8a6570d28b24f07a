"""English text as word pieces: frequent pairs of neighbouring pieces are joined, again and again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain, pairwise
from pathlib import Path

from torchboost.workloads.data import Text, as_text, content_of

LEAST = 2
"""A pair that is there less often is not joined."""

_WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+")

Pair = tuple[str, str]


def pieces(path: str | Path | None = None, *, context: int = 128, vocabulary: int = 2_048) -> Text:
    """Load a text as word pieces, by byte-pair encoding on characters. The last tenth is the test text.

    The pieces are learned on the training text. A piece is within a word and the space before it, or within punctuation
    marks or space. Takes a few seconds for a million characters.

    Args:
        path: See :func:`~torchboost.workloads.data.text`.
        context: Pieces per sample.
        vocabulary: Different pieces at most, all characters of the text among them.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The text is too short for one window in each part.
    """
    content = content_of(path)
    border = len(content) * 9 // 10
    train, test = _WORD.findall(content[:border]), _WORD.findall(content[border:])
    counts = Counter(train)
    counts.update(dict.fromkeys(test, 0))  # words of the test text are cut, too, but decide nothing
    cut = _cut(counts, vocabulary)
    names = sorted(set(chain.from_iterable(cut.values())))
    number = {name: index for index, name in enumerate(names)}
    numbers = {word: [number[part] for part in parts] for word, parts in cut.items()}
    first, last = (list(chain.from_iterable(numbers[word] for word in words)) for words in (train, test))
    return as_text(first, last, names, context=context, unit="word pieces")


def _cut(counts: Mapping[str, int], vocabulary: int) -> dict[str, list[str]]:
    """Return the pieces of each word, learned from how often each word is there."""
    cut = {word: list(word) for word in counts}
    known = set(chain.from_iterable(cut.values()))
    pairs: Counter[Pair] = Counter()
    # In an order, so that the first of equally frequent pairs is always the same.
    words: dict[Pair, dict[str, None]] = {}

    def count(word: str, sign: int) -> None:
        for pair in pairwise(cut[word]):
            pairs[pair] += sign * counts[word]
            words.setdefault(pair, {})[word] = None

    for word in cut:
        count(word, 1)
    while len(known) < vocabulary and pairs:
        best = max(pairs, key=pairs.__getitem__)
        if pairs[best] < LEAST:
            break
        known.add("".join(best))
        for word in words.pop(best):
            count(word, -1)
            cut[word] = _joined(cut[word], best)
            count(word, 1)
        del pairs[best]
        words.pop(best, None)
    return cut


def _joined(parts: list[str], pair: Pair) -> list[str]:
    """Return the pieces of a word with a pair joined wherever it is, from left to right."""
    joined: list[str] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined
