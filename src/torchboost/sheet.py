"""What a user is shown: lines, a table and lines, as text and as HTML from the same cells."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Sheet", "in_columns"]


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as a line with its cells in columns.

    The last filled cell of a row may be long. It does not move the columns of the other rows.
    """
    filled = [max((k + 1 for k, cell in enumerate(row) if cell), default=0) for row in rows]
    columns = range(max(filled, default=0))
    widths = [
        max((len(row[k]) for row, count in zip(rows, filled, strict=True) if k + 1 < count), default=0) for k in columns
    ]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Lines, a table and lines. A notebook shows it as HTML.

    Args:
        before: Lines above the table.
        headings: One per column. They are shown if there are rows.
        rows: Each as long as ``headings``, or shorter.
        after: Lines below the table.
    """

    before: tuple[str, ...] = ()
    headings: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    after: tuple[str, ...] = ()

    @property
    def _table(self) -> tuple[tuple[str, ...], ...]:
        return (self.headings, *self.rows) if self.rows else ()

    def __str__(self) -> str:
        """Return the text, with an empty line around the table."""
        parts = (self.before, in_columns(self._table), self.after)
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
