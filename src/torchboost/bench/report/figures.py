"""The figures of a report as SVG text: step times and training curves. The page's style sheet sets the colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchboost.bench.report import svg, wording
from torchboost.bench.report.verdict import Summary, stock_of, summarise, target_of
from torchboost.measure.evidence import BenchReport, Contestant, Curve
from torchboost.measure.statistics import mean_of

__all__ = ["colour_classes", "curve_figure", "step_time_figure"]

Quantity = Literal["metric", "train_loss"]
Against = Literal["seconds", "epochs"]

COLOURS = 7
POINTS = 240
LABEL_GAP = 17.0


def colour_classes(report: BenchReport) -> dict[str, str]:
    """Return contestant name -> style class. Stock is grey, the others take the colours of the palette in order."""
    others = [c.name for c in report.contestants if c.kind != "stock"]
    classes = {name: f"k{1 + k % COLOURS}" for k, name in enumerate(others)}
    return {c.name: classes.get(c.name, "k0") for c in report.contestants}


def step_time_figure(report: BenchReport, *, narrow: bool = False) -> str:
    """Draw the time per step as bars from zero with intervals, and the ratios next to them.

    Args:
        report: The report to draw.
        narrow: Layout for a phone: name, bar and ratios below each other.
    """
    width, label = (358.0, 0.0) if narrow else (1040.0, 176.0)
    row_height, top, foot = (88.0, 0.0, 0.0) if narrow else (46.0, 34.0, 34.0)
    bar_end = width - 8 if narrow else width - 376
    height = top + row_height * len(report.contestants) + foot
    longest = max(c.step_seconds.high for c in report.contestants)
    factor, unit = wording.time_unit(max(c.step_seconds.mid for c in report.contestants))
    room = 0.0 if narrow else 78.0
    scale = svg.Scale(0.0, longest * factor, label, bar_end - room)
    parts = []
    if not narrow:
        parts += _bar_axis(scale, unit, top, height - foot)
        parts += _bar_headings(report, label, bar_end, top)
    stock = stock_of(report)
    if stock is not None:
        x = scale(stock.step_seconds.mid * factor)
        # On a phone there is text between the bars, so the line marks each bar separately.
        spans = [(top + k * row_height + 22, top + k * row_height + 46) for k in range(len(report.contestants))]
        for start, end in spans if narrow else [(top, height - foot)]:
            parts.append(svg.element("line", x1=x, x2=x, y1=start, y2=end, class_="reference"))
    classes = colour_classes(report)
    for k, summary in enumerate(summarise(report)):
        y = top + k * row_height
        draw = _narrow_bar if narrow else _wide_bar
        content = draw(summary, scale, factor, y, width)
        parts.append(svg.element("g", content, class_=classes[summary.contestant.name]))
    said = [f"{c.name} {wording.seconds_interval(c.step_seconds)}" for c in report.contestants]
    return svg.document(width, height, f"Time per step: {'; '.join(said)}", "".join(parts), _size(narrow))


def _size(narrow: bool) -> str:
    return "figure small-screen" if narrow else "figure large-screen"


def _bar_axis(scale: svg.Scale, unit: str, top: float, bottom: float) -> list[str]:
    parts = []
    values = svg.ticks(scale.low, scale.high)
    for value in values:
        x = scale(value)
        parts.append(svg.element("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
        shown = f"{value:g} {unit}" if value == values[-1] else f"{value:g}"
        parts.append(svg.text(x, bottom + 20, shown, anchor="middle", class_="tick"))
    return parts


def _bar_headings(report: BenchReport, left: float, right: float, top: float) -> list[str]:
    parts = [svg.text(left, top - 16, "time per step", class_="heading")]
    if any(s.stock for s in summarise(report)):
        parts.append(svg.text(right + 24, top - 16, "against stock", class_="heading"))
    if any(s.hand for s in summarise(report)):
        parts.append(svg.text(right + 204, top - 16, "against best hand-tuned", class_="heading"))
    return parts


def _bar(contestant: Contestant, scale: svg.Scale, factor: float, y: float, thickness: float) -> str:
    interval = contestant.step_seconds
    low, mid, high = (scale(v * factor) for v in (interval.low, interval.mid, interval.high))
    middle = y + thickness / 2
    width = max(mid - scale.start, 1)
    shown = svg.element("rect", x=scale.start, y=y, width=width, height=thickness, rx=2, class_="bar")
    shown += svg.element("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker")
    for x in (low, high):
        shown += svg.element("line", x1=x, x2=x, y1=middle - 5, y2=middle + 5, class_="whisker")
    return shown


def _wide_bar(summary: Summary, scale: svg.Scale, factor: float, y: float, width: float) -> str:
    contestant = summary.contestant
    name = svg.fit(contestant.name, scale.start - 12)
    parts = svg.text(0, y + 27, name, class_="name") + _bar(contestant, scale, factor, y + 11, 22)
    after = scale(contestant.step_seconds.high * factor) + 9
    parts += svg.text(after, y + 27, wording.seconds(contestant.step_seconds.mid), class_="value")
    for ratio, x in ((summary.stock, width - 352), (summary.hand, width - 172)):
        if ratio is None:
            continue
        interval = ratio.interval
        spans = svg.element("tspan", wording.ratio(interval.mid), class_="value")
        spans += svg.element("tspan", f"{interval.low:.2f} to {interval.high:.2f}", dx=8, class_="tick")
        parts += svg.element("text", spans, x=x, y=y + 27)
    return parts


def _narrow_bar(summary: Summary, scale: svg.Scale, factor: float, y: float, width: float) -> str:
    contestant = summary.contestant
    value = wording.seconds(contestant.step_seconds.mid)
    parts = svg.text(0, y + 18, svg.fit(contestant.name, width - 100), class_="name")
    parts += svg.text(width, y + 18, value, anchor="end", class_="value")
    parts += _bar(contestant, scale, factor, y + 26, 16)
    pairs = ((summary.stock, "stock"), (summary.hand, "best hand"))
    said = [f"{wording.ratio_interval(r.interval)} against {name}" for r, name in pairs if r is not None]
    return parts + "".join(svg.text(0, y + 59 + 16 * k, line, class_="tick small") for k, line in enumerate(said))


@dataclass(frozen=True, slots=True)
class _Line:
    contestant: Contestant
    seeds: list[list[tuple[float, float]]]
    mean: list[tuple[float, float]]


def _points(curve: Curve, x: Against, y: Quantity) -> list[tuple[float, float]]:
    across = curve.epochs if x == "epochs" else [curve.setup_seconds + s for s in curve.seconds]
    return list(zip(across, getattr(curve, y), strict=True))


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = math.ceil(len(points) / POINTS)
    return [*points[:-1:stride], points[-1]] if stride > 1 else list(points)


def _lines(report: BenchReport, x: Against, y: Quantity) -> list[_Line]:
    lines = []
    for contestant in report.contestants:
        seeds = [_points(curve, x, y) for curve in contestant.curves if curve.epochs]
        together = list(zip(*seeds, strict=False))
        mean = [(mean_of(p[0] for p in at), mean_of(p[1] for p in at)) for at in together]
        if mean:
            lines.append(_Line(contestant, seeds, mean))
    return lines


@dataclass(frozen=True, slots=True)
class _Frame:
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


def _frame(narrow: bool, wide: bool, names: Sequence[str]) -> _Frame:
    width, height = (358.0, 300.0) if narrow else (1040.0, 400.0) if wide else (500.0, 330.0)
    longest = max(svg.text_width(name) for name in names)
    margin = 36 + min(longest, 92.0 if narrow else 190.0 if wide else 130.0)
    return _Frame(width, height, 44.0, width - margin, 34.0, height - 46.0)


def _vertical(
    lines: Sequence[_Line], y: Quantity, share: bool, frame: _Frame, low_is_start: bool
) -> tuple[svg.Scale, bool]:
    values = sorted(v for line in lines for seed in line.seeds for _, v in seed if svg.drawable(v))
    low, high, log, cut = values[0], values[-1], False, False
    if y == "train_loss" or not low_is_start:
        log = low > 0 and high / low > 20
    elif len(values) >= 8:
        quarter = values[len(values) // 4]
        floor = quarter - 0.6 * (high - quarter)
        if low < floor:
            low, cut = math.floor(100 * floor) / 100 if share else floor, True
    if high - low <= 1e-9 * max(abs(high), 1e-9):
        reach = 0.5 * abs(high) if abs(high) > svg.SMALLEST else 0.5
        low, high = low - reach, high + reach
    if log:
        low, high = low * 0.9, high * 1.1
    else:
        pad = 0.04 * (high - low)
        low, high = low - (0 if cut else pad), high + pad
    if share:
        low, high = 100 * max(low, 0.0), 100 * min(high, 1.0)
    return svg.Scale(low, high, frame.bottom, frame.top, log=log), cut


def curve_figure(
    report: BenchReport, y: Quantity, x: Against, *, narrow: bool = False, wide: bool = False, target: bool = False
) -> str:
    """Draw a quantity against time or epochs: thin lines for the seeds, thick lines for their mean, names at the ends.

    Time includes set-up such as compilation. If an axis does not start at the start of the data, its title says so.

    Args:
        report: The report to draw.
        y: Quantity on the vertical axis.
        x: Quantity on the horizontal axis.
        narrow: Size for a phone.
        wide: Size for the full width of a large screen.
        target: Mark the target of the column "time to target".

    Returns:
        The figure, or an empty string if the report does not have this curve.
    """
    lines = _lines(report, x, y)
    finite = [p for line in lines for seed in line.seeds for p in seed if all(map(svg.drawable, p))]
    if not finite:
        return ""
    frame = _frame(narrow, wide, [line.contestant.name for line in lines])
    share = y == "metric" and wording.is_share(report)
    up, cut = _vertical(lines, y, share, frame, report.metric_higher_is_better)
    far = max(p[0] for p in finite)
    factor, unit = wording.time_unit(far) if x == "seconds" else (1.0, "epochs")
    along = svg.Scale(0.0, far * factor or 1.0, frame.left, frame.right)
    name = report.metric_name if y == "metric" else "training loss"
    title = f"{name}, %" if share else f"{name}, logarithmic" if up.log else name
    if cut:
        title += f" (axis starts at {svg.number(up.low)})"
    caption = f"training time, {unit}" if x == "seconds" else unit
    parts = _axes(frame, along, up, title, caption)
    height = 100.0 if share else 1.0
    wanted = target_of(report)
    if target and wanted is not None:
        parts.append(_target(frame, up, wanted * height))
    key = f"clip-{y}-{x}-{'narrow' if narrow else 'wide'}".replace("_", "-")
    size = {"width": frame.right - frame.left, "height": frame.bottom - frame.top}
    area = svg.element("rect", x=frame.left, y=frame.top, **size)
    parts.append(svg.element("clipPath", area, id=key))
    classes = colour_classes(report)

    def place(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(along(px * factor), up(py * height)) for px, py in _thin(points)]

    parts.append(svg.element("g", _drawn(lines, classes, place), clip_path=f"url(#{key})"))
    parts += _end_labels(lines, classes, frame, place)
    across = "training time" if x == "seconds" else "epochs"
    label = f"{name} against {across}, {wording.count(len(lines), 'contestant')}"
    return svg.document(frame.width, frame.height, label, "".join(parts), _size(narrow))


def _axes(frame: _Frame, along: svg.Scale, up: svg.Scale, title: str, caption: str) -> list[str]:
    parts = [svg.text(0, 16, svg.fit(title, frame.width), class_="heading")]
    for value in svg.ticks(up.low, up.high, most=5, log=up.log):
        y = up(value)
        parts.append(svg.element("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_="grid"))
        parts.append(svg.text(frame.left - 8, y + 4.5, f"{value:g}", anchor="end", class_="tick"))
    for value in svg.ticks(along.low, along.high, most=round(frame.width / 90), whole=caption == "epochs"):
        x = along(value)
        parts.append(svg.element("line", x1=x, x2=x, y1=frame.bottom, y2=frame.bottom + 5, class_="axis"))
        parts.append(svg.text(x, frame.bottom + 20, f"{value:g}", anchor="middle", class_="tick"))
    parts.append(svg.element("line", x1=frame.left, x2=frame.right, y1=frame.bottom, y2=frame.bottom, class_="axis"))
    parts.append(svg.text(frame.right, frame.bottom + 40, caption, anchor="end", class_="heading"))
    return parts


def _target(frame: _Frame, up: svg.Scale, value: float) -> str:
    y = up(value)
    if not frame.top <= y <= frame.bottom:
        return ""
    line = svg.element("line", x1=frame.left, x2=frame.right, y1=y, y2=y, class_="reference")
    return line + svg.text(frame.right - 4, y + 16, f"target {svg.number(value)}", anchor="end", class_="tick small")


def _drawn(
    lines: Sequence[_Line],
    classes: dict[str, str],
    place: Callable[[Sequence[tuple[float, float]]], list[tuple[float, float]]],
) -> str:
    parts = []
    for line in lines:
        seeds = "".join(svg.path(place(seed), class_="seed") for seed in line.seeds) if len(line.seeds) > 1 else ""
        content = seeds + svg.path(place(line.mean), class_="mean")
        parts.append(svg.element("g", content, class_=classes[line.contestant.name]))
    return "".join(parts)


def _end_labels(
    lines: Sequence[_Line],
    classes: dict[str, str],
    frame: _Frame,
    place: Callable[[Sequence[tuple[float, float]]], list[tuple[float, float]]],
) -> list[str]:
    ends = []
    for line in lines:
        seen = [p for p in place(line.mean) if all(map(math.isfinite, p))]
        if seen:
            ends.append((line.contestant.name, seen[-1][0], min(max(seen[-1][1], frame.top), frame.bottom)))
    heights = svg.spread([y for _, _, y in ends], LABEL_GAP, frame.top + 2, frame.bottom - 2)
    parts = []
    for (name, x, y), height in zip(ends, heights, strict=True):
        key = [(frame.right + 12, height), (frame.right + 26, height)]
        content = svg.element("circle", cx=x, cy=y, r=4, class_="end") + svg.path(key, class_="mean")
        shown = svg.fit(name, frame.width - frame.right - 32)
        content += svg.text(frame.right + 32, height + 4.5, shown, class_="name")
        parts.append(svg.element("g", content, class_=classes[name]))
    return parts
