"""Drawing primitives for the figures: scales, ticks, elements and labels that do not overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Scale", "document", "drawable", "element", "fit", "number", "path", "spread", "text", "text_width", "ticks"]

FONT = 13.0
WIDTH = 0.62
LARGEST = 1e150
"""Larger values are not drawn, as if they were infinite: their differences and ratios may be too large for a number."""

SMALLEST = 1 / LARGEST


def number(value: float) -> str:
    """Format a coordinate with one decimal, without trailing zeros."""
    rounded = f"{value:.1f}".removesuffix(".0")
    return "0" if rounded == "-0" else rounded


def element(name: str, content: str | None = None, /, **attributes: str | float) -> str:
    """Return one SVG element. Attribute values are escaped; ``content`` must be markup.

    A trailing underscore of an attribute name is dropped and inner ones become hyphens: ``class_``, ``text_anchor``.
    """
    parts = [name]
    for key, value in attributes.items():
        shown = value if isinstance(value, str) else number(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown, quote=True)}"')
    head = " ".join(parts)
    return f"<{head}/>" if content is None else f"<{head}>{content}</{name}>"


def text(x: float, y: float, content: str, *, anchor: str = "start", class_: str = "") -> str:
    """Return a line of text with its baseline at ``y``; ``content`` is escaped."""
    extra = {"class_": class_} if class_ else {}
    where = {"text_anchor": anchor} if anchor != "start" else {}
    return element("text", escape(content), x=x, y=y, **where, **extra)


def text_width(content: str, size: float = FONT) -> float:
    """Estimate the width of a line in a sans-serif font."""
    return WIDTH * size * len(content)


def fit(content: str, width: float, size: float = FONT) -> str:
    """Shorten text to about ``width``, with an ellipsis if something was cut."""
    room = max(2, int(width / (WIDTH * size)))
    return content if len(content) <= room else content[: room - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def drawable(value: float) -> bool:
    """Whether a value can be drawn: it is finite and not too large."""
    return abs(value) <= LARGEST


def path(points: Sequence[tuple[float, float]], **attributes: str | float) -> str:
    """Return an open line through the points. A point that is not finite leaves a gap."""
    commands, pen = [], "M"
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        commands.append(f"{pen}{number(x)} {number(y)}")
        pen = "L"
    return element("path", d="".join(commands), **attributes)


def document(width: float, height: float, label: str, content: str, class_: str) -> str:
    """Return a complete figure of the given size that scales with its container. Screen readers read ``label``."""
    box = f"0 0 {number(width)} {number(height)}"
    return element("svg", content, viewBox=box, role="img", aria_label=label, class_=class_)


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data to pixels, linearly or by logarithm.

    Args:
        low: Data value at ``start``.
        high: Data value at ``end``, different from ``low``.
        start: Pixel of ``low``.
        end: Pixel of ``high``.
        log: Whether the scale is logarithmic. If so, ``low`` and ``high`` must be above 0.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of ``value``; NaN if it cannot be drawn, or if its logarithm does not exist."""
        if not drawable(value) or (self.log and value <= 0):
            return math.nan
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            share = (math.log(value) - low) / (high - low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, *, most: int = 6, log: bool = False, whole: bool = False) -> list[float]:
    """Return round values in ``[low, high]``, about ``most`` at most. ``whole`` gives integers only."""
    if log:
        for mantissas in ((1, 2, 5), (1, 3), (1,)):
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            found = [m * 10.0**d for d in decades for m in mantissas]
            found = [v for v in found if low <= v * (1 + 1e-9) and v <= high * (1 + 1e-9)]
            if len(found) <= most + 1:
                break
        found = found[:: math.ceil(len(found) / (most + 1)) or 1]
        return found if len(found) > 1 else ticks(low, high, most=most)
    raw = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions apart by at least ``gap`` within ``[low, high]``. Each stays as near to its wish as possible."""
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    placed = [0.0] * len(wanted)
    previous = low - gap
    for k in order:
        previous = placed[k] = max(wanted[k], previous + gap)
    following = high + gap
    for k in reversed(order):
        following = placed[k] = min(placed[k], following - gap)
    return placed
