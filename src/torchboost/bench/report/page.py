"""Reports as HTML pages, drawn by the templates in the folder next to this file. The same report gives the same bytes.

A page is one file without scripts. The engine escapes all text. The figures are positions in percent: a figure has one
form for all screens, since its marks scale with their container and its text does not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torchboost.bench.report import wording
from torchboost.bench.report.table import ratio_text, result_table
from torchboost.bench.verdict import best_hand, headline, stock_of, summarise, target_of, verdicts
from torchboost.core.files import write_whole
from torchboost.measure.evidence import BenchReport
from torchboost.measure.statistics import mean_of

Points = list[tuple[float, float]]

COLOURS = 7
POINTS = 240
"""Points of a line at most. The eye sees no more."""
DOTS = 60
"""Points of a mean line at most that show their values under the pointer."""
LARGEST = 1e150
"""Larger values are not drawn, as if they were infinite: their differences and ratios may be too large for a number."""


class Tick(NamedTuple):
    """A mark on an axis: its position in percent, and its text."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps data from ``low`` to ``high``, which differ, to positions from ``start`` to ``end``.

    If the scale is logarithmic, ``low`` and ``high`` must be above 0.
    """

    low: float
    high: float
    start: float = 0.0
    end: float = 100.0
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of ``value``, or NaN if it cannot be drawn or has no logarithm."""
        if not _drawable(value) or (self.log and value <= 0):
            return math.nan
        low, value, high = map(math.log, (self.low, value, self.high)) if self.log else (self.low, value, self.high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def marks(self, most: int, *, whole: bool = False) -> list[Tick]:
        """Return marks at round values, about ``most`` at most."""
        values = ticks(self.low, self.high, most=most, log=self.log, whole=whole)
        return [Tick(self(value), f"{value:g}") for value in values]


def _drawable(value: float) -> bool:
    return abs(value) <= LARGEST


def ticks(low: float, high: float, *, most: int = 6, log: bool = False, whole: bool = False) -> list[float]:
    """Return round values in ``[low, high]``, about ``most`` at most. ``whole`` gives integers only."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for mantissas in ((1, 2, 5), (1, 3), (1,)):
            values = [m * 10.0**decade for decade in decades for m in mantissas]
            values = [value for value in values if low <= value * (1 + 1e-9) and value <= high * (1 + 1e-9)]
            if len(values) <= most + 1:
                break
        values = values[:: math.ceil(len(values) / (most + 1)) or 1]
        return values if len(values) > 1 else ticks(low, high, most=most)
    raw = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


class Dot(NamedTuple):
    """A point of a line: its position in percent, and its values as text."""

    x: float
    y: float
    text: str


class Line(NamedTuple):
    """The curve of a contestant, as SVG: the path of each seed if there are several, and that of their mean.

    ``end`` is the end of the mean, if it can be drawn, and ``dots`` are points of it, the last one among them.
    """

    name: str
    seeds: list[str]
    mean: str
    end: tuple[float, float] | None
    dots: list[Dot]


class Chart(NamedTuple):
    """Curves in a frame. All positions are in percent from the upper left corner."""

    title: str
    unit: str
    description: str
    across: list[Tick]
    up: list[Tick]
    target: Tick | None
    lines: list[Line]


def chart(
    report: BenchReport,
    quantity: Literal["metric", "train_loss"],
    against: Literal["seconds", "epochs"],
    *,
    target: bool = False,
) -> Chart | None:
    """Return a quantity against time or epochs, for every seed and their mean. None without such curves.

    Time includes set-up such as compilation. If an axis does not start at the start of the data, its title says so.
    ``target`` marks the target of the column "time to target".
    """
    curves = _curves(report, quantity, against)
    points = [p for seeds in curves.values() for seed in seeds for p in seed if all(map(_drawable, p))]
    if not points:
        return None
    share = quantity == "metric" and wording.is_share(report)
    percent = 100.0 if share else 1.0
    losses = quantity == "train_loss" or not report.metric_higher_is_better
    up, cut = _vertical(sorted(percent * y for _, y in points), losses=losses, share=share)
    far = max(x for x, _ in points)
    factor, unit = wording.time_unit(far) if against == "seconds" else (1.0, "epochs")
    across = Scale(0.0, far * factor or 1.0)

    def place(line: Points) -> Points:
        return [(across(x * factor), up(y * percent)) for x, y in thinned(line)]

    def tell(contestant: str, x: float, y: float) -> str:
        where = wording.seconds(x) if against == "seconds" else f"epoch {x:g}"
        return f"{contestant}: {wording.measure(y, share=share)} at {where}"

    name = report.metric_name if quantity == "metric" else "training loss"
    title = f"{name}, %" if share else f"{name}, logarithmic" if up.log else name
    time = "training time" if against == "seconds" else "epochs"
    wish = target_of(report) if target else None
    height = math.nan if wish is None else up(wish * percent)
    return Chart(
        title=title + (f" (axis starts at {_short(up.low)})" if cut else ""),
        unit=f"training time, {unit}" if against == "seconds" else unit,
        description=f"{name} against {time}, {wording.count(len(curves), 'contestant')}",
        across=across.marks(8, whole=against == "epochs"),
        up=up.marks(5),
        target=Tick(height, f"target {_short((wish or 0.0) * percent)}") if 0 <= height <= 100 else None,
        lines=[
            _line(
                contestant, [place(line) for line in lines], [tell(contestant, *point) for point in thinned(lines[-1])]
            )
            for contestant, lines in curves.items()
        ],
    )


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _curves(report: BenchReport, quantity: str, against: str) -> dict[str, list[Points]]:
    """Return the points of all seeds of each contestant, and as the last line the points of their mean."""
    curves: dict[str, list[Points]] = {}
    for contestant in report.contestants:
        seeds: list[Points] = []
        for curve in contestant.curves:
            where = curve.epochs if against == "epochs" else [curve.setup_seconds + s for s in curve.seconds]
            seeds += [list(zip(where, getattr(curve, quantity), strict=True))] if curve.epochs else []
        if seeds:
            together = zip(*seeds, strict=False)
            mean = [(mean_of(x for x, _ in at), mean_of(y for _, y in at)) for at in together]
            curves[contestant.name] = [*seeds, mean]
    return curves


def _vertical(values: Sequence[float], *, losses: bool, share: bool) -> tuple[Scale, bool]:
    """Return the vertical scale of sorted values, and whether it omits the first, low ones."""
    low, high = values[0], values[-1]
    if losses and low > 0 and high / low > 20:
        return Scale(low * 0.9, high * 1.1, 100.0, 0.0, log=True), False
    quarter = values[len(values) // 4]
    floor = quarter - 0.6 * (high - quarter)
    cut = not losses and len(values) >= 8 and low < floor
    if cut:
        low = math.floor(floor) if share else floor
    if high - low <= 1e-9 * max(abs(high), 1e-9):
        reach = 0.5 * abs(high) if abs(high) > 1 / LARGEST else 0.5
        low, high = low - reach, high + reach
    pad = 0.04 * (high - low)
    low, high = low - (0 if cut else pad), high + pad
    return Scale(max(low, 0.0) if share else low, min(high, 100.0) if share else high, 100.0, 0.0), cut


def thinned(line: Points) -> Points:
    """Return about evenly chosen points of a line, with its end."""
    stride = math.ceil(len(line) / POINTS)
    return [*line[:-1:stride], line[-1]] if stride > 1 else line


def _line(name: str, places: list[Points], texts: Sequence[str]) -> Line:
    *seeds, mean = places
    finite = [
        Dot(x, y, text) for (x, y), text in zip(mean, texts, strict=True) if math.isfinite(x) and math.isfinite(y)
    ]
    return Line(
        name=name,
        seeds=[_path(seed) for seed in seeds] if len(seeds) > 1 else [],
        mean=_path(mean),
        end=finite[-1][:2] if finite else None,
        dots=[*finite[: -1 : math.ceil(len(finite) / DOTS)], *finite[-1:]] if finite else [],
    )


def _path(points: Iterable[tuple[float, float]]) -> str:
    """Return an open line through the points as SVG. A point that is not finite makes a gap."""
    commands, pen = [], "M"
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            commands.append(f"{pen}{x:.2f} {y:.2f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(commands)


def bench_page(report: BenchReport) -> str:
    """Return the page of a benchmark. A section without data, such as training curves, is absent."""
    finite = {c.name: [s for s in c.samples if abs(s) < float("inf")] for c in report.contestants}
    others = [c.name for c in report.contestants if c.kind != "stock"]
    once = all(len(curve.epochs) < 2 for c in report.contestants for curve in c.curves)
    charts = [chart(report, "metric", "seconds", target=True)]
    if not once:  # a single point has no course
        charts += [chart(report, "train_loss", "seconds"), chart(report, "metric", "epochs")]
    return render(
        "bench.html",
        report=report,
        headline=headline(report).text,
        verdicts=verdicts(report),
        table=result_table(report),
        target=target_of(report),
        share=wording.is_share(report),
        own_units=wording.has_own_units(report.metric_name),
        # Stock is grey, the others take the colours of the palette in order.
        colours={c.name: "k0" for c in report.contestants} | {n: f"k{1 + k % COLOURS}" for k, n in enumerate(others)},
        summaries=summarise(report),
        scale=Scale(0.0, max(c.step_seconds.high for c in report.contestants)),
        evaluated_once=once,
        charts=[each for each in charts if each is not None],
        stock=stock_of(report),
        hand=best_hand(report),
        pairs=max((ratio.pairs for c in report.contestants for ratio in c.ratios), default=0),
        seeds=max((len(c.curves) for c in report.contestants), default=0),
        units={name: wording.time_unit(statistics.median(some or [0.0])) for name, some in finite.items()},
        ratio_of=ratio_text,
        figures=[min, statistics.median, statistics.fmean, max],
    )


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder with the values that it names."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # torch requires it, and only pages need it

    engine = Environment(
        loader=PackageLoader("torchboost.bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return engine.get_template(template).render(wording=wording, **values)


def write_page(page: str, path: str | Path) -> Path:
    """Write a page, completely or not at all, and return its path. Missing folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode("utf-8"))
    return path
