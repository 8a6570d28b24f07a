"""Output for users, such as ``explain()``: lines, a table and lines, as text and as HTML from the same cells."""

from __future__ import annotations

import html
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

_WIDTH = 120
"""Characters of a line."""
_LEAST = 40
"""A last cell with less room than this has lines of its own, below the row."""
_MOST = 60
"""Characters of a line of any other cell."""
State = Literal["on", "idle", "waits", "was on before", "off", "not read"]
"""The states of the rows of an explanation, in their order there. What is idle is attached, and not in effect."""


def percent(share: float, digits: int = 0) -> str:
    """Return a share in words: ``0.674`` -> ``67 %``."""
    return f"{100 * share:.{digits}f} %"


def _in_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table. The last filled cell of a row takes the remaining room, and moves no columns."""
    filled = [row[: max((k + 1 for k, cell in enumerate(row) if cell), default=1)] for row in rows]
    columns = itertools.zip_longest(*(row[:-1] for row in filled), fillvalue="")
    widths = [min(_MOST, max(map(len, column))) for column in columns]
    for *cells, last in filled:
        wide = widths[: len(cells)]
        room = _WIDTH - sum(wide) - 2 * len(wide)
        below = len(last) > room and room < _LEAST
        parts = [*map(_wrapped, cells, wide), [] if below else _wrapped(last, max(1, room))]
        for line in itertools.zip_longest(*parts, fillvalue=""):
            yield "  ".join(map(str.ljust, line, [*wide, 0])).rstrip()
        yield from (f"    {line}" for line in _wrapped(last, _WIDTH - 4) if below)


def _wrapped(text: str, width: int = _WIDTH) -> list[str]:
    """Return a text as lines. A longer word, such as a path, is not broken."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Lines, a table and lines. A notebook shows it as HTML. Rows may be shorter than ``headings``."""

    before: tuple[str, ...] = ()
    headings: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    after: tuple[str, ...] = ()

    @property
    def _table(self) -> tuple[tuple[str, ...], ...]:
        return (self.headings, *self.rows) if self.rows else ()

    def __str__(self) -> str:
        """Return the text, with an empty line around the table."""
        before, after = ([line for text in part for line in _wrapped(text)] for part in (self.before, self.after))
        parts = (before, [*_in_columns(self._table)], after)
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _repr_html_(self) -> str:
        def lines(texts: Iterable[str]) -> str:
            return "".join(f"<div>{html.escape(text)}</div>" for text in texts)

        def row(cells: Sequence[str], tag: str) -> str:
            style = ' style="text-align: left"'
            filled = [*cells, *[""] * (len(self.headings) - len(cells))]
            return f"<tr>{''.join(f'<{tag}{style}>{html.escape(cell)}</{tag}>' for cell in filled)}</tr>"

        body = "".join(row(cells, "td" if place else "th") for place, cells in enumerate(self._table))
        return lines(self.before) + (f"<table>{body}</table>" if body else "") + lines(self.after)


class Row(NamedTuple):
    """The row of one algorithm, or of an entry of the configuration that is not read: ``name`` is then its path."""

    name: str
    state: State
    did: str
    """What it did, or why it is not on."""
    exact: str = ""
    """How far its step is from the plain one."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The algorithms that are on, and why: a heading, a row for each of them in any order, and notes."""

    heading: tuple[str, ...]
    rows: tuple[Row, ...] = ()
    unchanged: str = ""
    """The text if no row is on or waits."""
    notes: tuple[str, ...] = ()
    ask: str = ""
    """What the user would do next. Empty for nothing."""

    @property
    def sheet(self) -> Sheet:
        """The same in the order in which it is shown."""
        ordered = tuple(sorted(self.rows, key=lambda row: get_args(State).index(row.state)))
        idle = not {row.state for row in ordered} & {"on", "idle", "waits"}
        return Sheet(
            before=(*self.heading, *([self.unchanged] if idle and self.unchanged else [])),
            headings=("switch", "state", "what it did", "how exact"),
            rows=ordered,
            after=(*self.notes, *([f"next: {self.ask}"] if self.ask else [])),
        )
