"""What ``explain()`` says: the same rows for a plan, a boosted pair and its log, as text and as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torchboost.sheet import Sheet

__all__ = ["Explanation", "Row"]

_STATES = ("on", "waits", "was on before", "off", "not read")
"""The order of the rows."""


class Row(NamedTuple):
    """What is said about one algorithm.

    Args:
        name: Of the algorithm, or the path of an entry of the configuration that is not read.
        state: ``"on"``, ``"waits"``, ``"was on before"``, ``"off"`` or ``"not read"``.
        did: What it did, or why it is not on.
        exact: How far its step is from the plain one.
    """

    name: str
    state: str
    did: str
    exact: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What is on, and why.

    Args:
        heading: Lines that name the level, the optimizer and the length of the run.
        rows: One for each algorithm, in any order.
        unchanged: What is said if no row is on or waits.
        notes: Lines below the rows.
        ask: What the user would do next; empty for nothing.
    """

    heading: tuple[str, ...]
    rows: tuple[Row, ...] = ()
    unchanged: str = ""
    notes: tuple[str, ...] = ()
    ask: str = ""

    @property
    def sheet(self) -> Sheet:
        """The same in the order in which it is shown."""
        ordered = tuple(sorted(self.rows, key=lambda row: _STATES.index(row.state)))
        idle = not {row.state for row in ordered} & {"on", "waits"}
        return Sheet(
            before=(*self.heading, *([self.unchanged] if idle and self.unchanged else [])),
            headings=("switch", "state", "what it did", "how exact"),
            rows=ordered,
            after=(*self.notes, *([f"next: {self.ask}"] if self.ask else [])),
        )
