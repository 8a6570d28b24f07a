"""The prose is plain English: turns of phrase that are always wrong here, each with what to write instead."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT
from tests.support.prose import passages

TURNS = {
    r"anew": "again",
    r"(go|goes|went|going) on": "continue",
    r"alike(?!:)": "equally, the same, both",
    r"in vain": "without effect",
    r"by halves": "partly",
    r"(?<!there )is no (?!longer\b|more\b|less\b|different\b)\w+": "is not a ..., there is no ...",
    r"the reference(?! (implementation|page|pages|section|part)\b)": "MindSpore",
    r"nobody|whoever|whosoever": "name the subject: the user, the caller, the loop",
    r"of (ours|theirs|yours)": "of torchboost, your ...",
    r"belongs? into": "belongs in",
    r"in the place of": "instead of",
    r"beside": "next to, in addition to, with",
    r"one's own": "name the owner",
    r"by turns": "in turn, alternately",
}
WHERE_PER_10_000 = 5
"""``where`` for ``if`` cannot be told from ``where`` for a place, so its share is limited. Docstrings of optax have 5,
those of Composer 8 in 10,000 words."""

PARTS = ["src/torchboost", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples", "benchmarks"]


def files(part: str) -> list[Path]:
    root = ROOT / part
    found = sorted(root.rglob("*")) if root.is_dir() else [root]
    return [path for path in found if path.suffix in (".py", ".md")]


def test_no_turn_of_phrase_that_is_always_wrong() -> None:
    pattern = re.compile("|".join(rf"(?P<t{i}>\b(?:{turn})\b)" for i, turn in enumerate(TURNS)), re.IGNORECASE)
    instead = list(TURNS.values())
    found = [
        f"{path.relative_to(ROOT)}:{line}: '{hit.group()}': write {instead[int(str(hit.lastgroup)[1:])]}"
        for part in PARTS
        for file in files(part)
        for path, line, text in passages(file)
        for hit in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_where_is_rare() -> None:
    texts = [passage.text for part in PARTS for file in files(part) for passage in passages(file)]
    words = sum(len(text.split()) for text in texts)
    where = sum(len(re.findall(r"\bwhere\b", text, re.IGNORECASE)) for text in texts)
    assert 10_000 * where / words <= WHERE_PER_10_000, "write 'if' for a condition, 'when' for a time"
