"""The prose is plain English: turns of phrase that are always wrong here, each with what to write instead."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.conftest import ROOT

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

_CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
_EXAMPLE = re.compile(r"^\s*(>>>|\.\.\.) .*$", re.MULTILINE)
_FENCED = re.compile(r"^(`{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_WORDS = 3
"""A string with fewer words is a key or a name, not a message."""


class Passage(NamedTuple):
    """A docstring, a comment, a message or a paragraph: its place, and its text without code and examples."""

    path: Path
    line: int
    text: str


def passages(path: Path) -> Iterator[Passage]:
    """Yield the prose of a Python file or a Markdown page."""
    source = path.read_text(encoding="utf-8")
    found = _paragraphs(source) if path.suffix == ".md" else _in_code(source)
    for line, text in found:
        yield Passage(path, line, _plain(text))


def _plain(text: str) -> str:
    return " ".join(_CODE.sub("`", _EXAMPLE.sub("", text)).split())


def _in_code(source: str) -> Iterator[tuple[int, str]]:
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.JoinedStr):
            pending += [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        else:
            pending += ast.iter_child_nodes(node)
        if isinstance(node, (ast.JoinedStr, ast.Constant)):
            text = _text(node)
            if len(text.split()) >= _WORDS:
                yield node.lineno, text
    yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments; comments on consecutive lines belong together."""
    start, last, block = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, text = token.start[0], token.string.lstrip("# ")
        if line != last + 1 and block:
            yield start, block
            block = ""
        start, last, block = (start if block else line), line, f"{block} {text}"
    if block:
        yield start, block


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return f"{_text(node.left)}{_text(node.right)}" if isinstance(node, ast.BinOp) else ""


def _paragraphs(source: str) -> Iterator[tuple[int, str]]:
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", _FENCED.sub(lambda block: "\n" * block.group().count("\n"), source)):
        if paragraph.strip():
            yield line, paragraph
        line += paragraph.count("\n")


PARTS = ["src/torchboost", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "examples", "benchmarks"]


def files(part: str) -> list[Path]:
    root = ROOT / part
    found = sorted(root.rglob("*")) if root.is_dir() else [root]
    return [path for path in found if path.suffix in (".py", ".md")]


@cache
def prose() -> list[Passage]:
    return [passage for part in PARTS for file in files(part) for passage in passages(file)]


def test_no_turn_of_phrase_that_is_always_wrong() -> None:
    pattern = re.compile("|".join(rf"(?P<t{i}>\b(?:{turn})\b)" for i, turn in enumerate(TURNS)), re.IGNORECASE)
    instead = list(TURNS.values())
    found = [
        f"{path.relative_to(ROOT)}:{line}: '{hit.group()}': write {instead[int(str(hit.lastgroup)[1:])]}"
        for path, line, text in prose()
        for hit in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_where_is_rare() -> None:
    texts = [passage.text for passage in prose()]
    words = sum(len(text.split()) for text in texts)
    where = sum(len(re.findall(r"\bwhere\b", text, re.IGNORECASE)) for text in texts)
    assert 10_000 * where / words <= WHERE_PER_10_000, "write 'if' for a condition, 'when' for a time"
