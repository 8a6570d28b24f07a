"""The results in one table, one figure and one line per algorithm, from the result files: what the README shows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import adasum_convergence
import level_rates
import padding_table
import svg
from ratios import total_ratio
from zoo_verdict import STOCK, Row, geometric_mean, row_of

from torchboost.bench.report import wording
from torchboost.bench.report.page import Scale, ticks
from torchboost.bench.report.table import Table
from torchboost.measure.evidence import BenchReport, Interval
from torchboost.measure.statistics import paired_ratio
from torchboost.registry import REGISTRY

RESULTS = Path(__file__).resolve().parent / "results"
UNMEASURED = "not measured"
LEVELS = ("O1", "O2")

ZOOS: Mapping[str, str] = MappingProxyType(
    {
        "zoo": "with AVX512-BF16, without AMX, one thread",
        "zoo-amx": "with AVX512-BF16 and AMX",
        "zoo-avx2": "simulated with AVX2 only",
    }
)
"""Claim of the zoo -> what its machine is called."""


def load(name: str) -> BenchReport | None:
    path = RESULTS / f"{name}.json"
    return BenchReport.load(path) if path.exists() else None


def zoo(claim: str = "zoo") -> list[BenchReport]:
    """Return the results of a claim, the network on which the best loop by hand gains least first."""
    others = [other for other in ZOOS if other.startswith(f"{claim}-")]
    paths = [p for p in RESULTS.glob(f"{claim}-*.json") if not any(p.name.startswith(f"{o}-") for o in others)]
    return sorted(map(BenchReport.load, paths), key=lambda report: row_of(report).best_ratio)


def _clause(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} and {values[-1]}"


def _promise(rows: list[Row], level: str) -> str:
    """Say on how many networks a level gains, and what it costs at worst."""
    found = [levels for row in rows if (levels := row.levels.get(level)) is not None]
    least = min(levels.stock.mid for levels in found)
    mean, worst = geometric_mean([levels.stock.mid for levels in found]), [levels.regret for levels in found]
    by_hand = sum(levels.best.low > 1 for levels in found)
    return (
        f"{level}: on {sum(levels.stock.mid >= 1.2 for levels in found)} of {len(rows)} networks at least 20 % faster "
        f"than the stock loop, {wording.ratio(least)} on the slowest and {wording.ratio(mean)} in the geometric mean. "
        f"Round by round, faster than the best loop by hand on {by_hand}, at worst {100 * max(*worst, 0):.1f} % slower."
    )


def _machine(reports: list[BenchReport], called: str) -> str:
    found = {report.environment for report in reports}
    machines = sorted({f"{env.processor}, {env.cores} cores, {env.device}" for env in found})
    versions = sorted({env.torch for env in found})
    return f"Every figure is from one machine ({'; '.join(machines)}, {called}), with torch {_clause(versions)}."


def _noise(rows: list[Row]) -> list[str]:
    """Say how far apart two equal loops were measured, if they were."""
    most = max(abs(row.noise) for row in rows)
    return [f"Two stock loops of equal code were measured at most {100 * most:.1f} % apart."] if most else []


def table(claim: str = "zoo") -> tuple[Table, list[str]]:
    """Return the table of the zoo, and the sentences that belong below it."""
    reports = zoo(claim)
    rows = [row_of(report) for report in reports]
    head = ("network", "stock, a step", "best by hand", *LEVELS)
    cells = []
    for report, row in zip(reports, rows, strict=True):
        against = [None if (found := row.levels.get(level)) is None else found.stock for level in LEVELS]
        by_hand = f"{wording.ratio(row.best_ratio)} ({row.best.replace('+', ', ').replace('_', ' ')})"
        shown = (UNMEASURED if ratio is None else wording.ratio_interval(ratio) for ratio in against)
        cells.append((report.model, wording.seconds(row.stock_seconds), by_hand, *shown))
    if not rows:
        return Table(headings=head, rows=()), [f"{UNMEASURED} yet."]
    said = [*(_promise(rows, level) for level in LEVELS), _machine(reports, ZOOS[claim]), *_noise(rows)]
    return Table(headings=head, rows=tuple(cells)), said


def _faster(name: str, contestant: str, baseline: str, words: str) -> Callable[[], str]:
    """Speed of a contestant as a multiple of a baseline's, over the summed times of a run if the steps differ."""

    def line() -> str:
        report = load(name)
        if report is None:
            return UNMEASURED
        by_name = {c.name: c for c in report.contestants}
        found = by_name[contestant]
        stored = next((ratio.interval for ratio in found.ratios if ratio.baseline == baseline), None)
        interval = stored or total_ratio(by_name[baseline].samples, found.samples)
        return f"{wording.ratio_interval(interval)} {words}"

    return line


def _accumulated() -> str:
    errors = json.loads((RESULTS / "accumulation.json").read_text(encoding="utf-8"))["errors"]
    ragged = errors["sequences of random length"]
    ours, plain = (statistics.median(ragged[way]) for way in ("exact", "divided by steps"))
    return f"gradient error {ours:.0e}; {plain:.2f} if averaged over batches (GPT, ragged batches)"


def _adaptive_sum() -> str:
    found = json.loads((RESULTS / "adasum_convergence.json").read_text(encoding="utf-8"))["found"]
    ways = found["SGD, 16 x 32 images"]
    steps = {
        way: statistics.median(adasum_convergence.LIMIT if step is None else step for step in run["steps"])
        for way, run in ways.items()
    }
    mean = steps.pop("mean")
    (ours,) = steps.values()
    return f"target after {ours:g} steps; {mean:g} with plain averaging (SGD, 16 ranks)"


def _subspace() -> str:
    runs = json.loads((RESULTS / "subspace_recipe.json").read_text(encoding="utf-8"))["runs"]
    ((_, seeds),) = runs.items()
    ours, plain = (100 * statistics.fmean(run[part]["accuracy"] for run in seeds) for part in ("subspace", "sgd"))
    return f"{ours:.1f} % accuracy; SGD at the same cost {plain:.1f} % (small ResNet): it does not pay"


_DEEP, _AMX = "zoo-bottleneck", "zoo-amx-bottleneck"
_RUN, _COMPILED = "freeze_times-cifar10-resnet-bottleneck-small", "zoo-llama"


def _centred() -> str:
    return f"{level_rates.gained(RESULTS, 'vgg')} at O2, with freezing (VGG)"


def _unpadded() -> str:
    return padding_table.against_best(RESULTS)


FIGURES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "unpad": _unpadded,
        "less_bn": _faster(_DEEP, "O2", "O1", "O1, with centralised gradients (bottleneck ResNet)"),
        "gradient_centralization": _centred,
        "channels_last": _faster(_DEEP, "channels_last", "stock", "the stock loop (bottleneck ResNet)"),
        "autocast": _faster(_AMX, "autocast", "stock", "the stock loop (bottleneck ResNet, AMX)"),
        "grad_freeze": _faster(_RUN, "O1+progressive", "O1+full", "O1, over a run (bottleneck ResNet)"),
        "fused_optimizer": _faster("zoo-recommender", "fused_optimizer", "stock", "the stock loop (large embeddings)"),
        "compile": _faster(_COMPILED, "fused_optimizer+compile", "fused_optimizer", "the same loop (Llama)"),
        "grad_accumulation": _accumulated,
        "adasum": _adaptive_sum,
        "loss_scale_group": _faster("loss_scale-resnet", "group", "no scaling", "a step without scaling (ResNet)"),
        "dim_reduce": _subspace,
    }
)
"""Algorithm -> its one figure. An algorithm that is not in here has none, and is not in the README."""


def algorithms(folder: str) -> Table:
    """Return a line and a figure for each algorithm; ``folder`` leads from the page to the cards."""
    rows = [
        (f"[{name}]({folder}{name}.md)", entry.summary, FIGURES[name]() if name in FIGURES else UNMEASURED)
        for name, entry in REGISTRY.items()
    ]
    return Table(headings=("algorithm", "what it does", "one figure"), rows=tuple(rows))


STYLE = """
text { font: 15px system-ui, sans-serif; fill: #24292f; } .tick { fill: #57606a; } .grid { stroke: #d0d7de; }
.one { stroke: #24292f; stroke-dasharray: 3 3; } .whisker { stroke: #24292f; }
.hand { fill: #9aa4ae; } .O1 { fill: #2f6fde; } .O2 { fill: #d9731a; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .tick { fill: #9198a1; } .grid { stroke: #3d444d; }
.one { stroke: #e6edf3; } .whisker { stroke: #e6edf3; } .hand { fill: #6e7781; } .O1 { fill: #5c94f5; } }
"""
CLASSES = {"best by hand": "hand", "O1": "O1", "O2": "O2"}
# So narrow that its text can be read on a telephone; the names stand above the bars.
WIDTH, LEFT, RIGHT, TOP = 640.0, 28.0, 64.0, 44.0
BAR, NAME, GAP = 17.0, 20.0, 12.0


def _line(x: float, y: float, bars: int, class_: str) -> str:
    return svg.element("line", x1=x, x2=x, y1=y - 3, y2=y + BAR * bars + 2, class_=class_)


def _bar(interval: Interval, name: str, scale: Scale, y: float) -> str:
    middle = y + BAR / 2 - 1
    low, mid, high = (scale(v) for v in (interval.low, interval.mid, interval.high))
    parts = svg.element("rect", x=scale.start, y=y, width=mid - scale.start, height=BAR - 2, class_=CLASSES[name])
    parts += svg.element("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker")
    return parts + svg.text(high + 6, y + 13, wording.ratio(interval.mid))


def _bars(report: BenchReport) -> dict[str, Interval]:
    """Return the ratios to stock by the names in the key of the figure."""
    row = row_of(report)
    samples = {contestant.name: contestant.samples for contestant in report.contestants}
    found = {"best by hand": paired_ratio(samples[STOCK], samples[row.best])}
    return found | {level: levels.stock for level, levels in row.levels.items() if levels is not None}


def figure() -> str:
    """Draw the speed of the best loop by hand, O1 and O2 as multiples of the stock loop's, with 95 % intervals."""
    rows = [(report.model, _bars(report)) for report in zoo()]
    fastest = max((bar.high for _, bars in rows for bar in bars.values()), default=1.0)
    height = TOP + sum(NAME + BAR * len(bars) + GAP for _, bars in rows) + 24
    scale = Scale(0.0, fastest, LEFT, WIDTH - RIGHT)
    parts = [svg.element("style", STYLE)]
    for k, (name, class_) in enumerate(CLASSES.items()):
        x = LEFT + (0, 130, 190)[k]
        parts.append(svg.element("rect", x=x, y=6, width=12, height=12, class_=class_))
        parts.append(svg.text(x + 18, 17, name))
    for value in ticks(0.0, fastest):
        shown = "1 = stock" if value == 1 else f"{value:g}"
        parts.append(svg.text(scale(value), height - 6, shown, anchor="middle", class_="tick"))
    y = TOP
    for called, bars in rows:
        parts.append(svg.text(LEFT, y + NAME - 6, called))
        y += NAME
        parts += [_line(scale(value), y, len(bars), "grid") for value in ticks(0.0, fastest)]
        parts += [_bar(bar, name, scale, y + BAR * k) for k, (name, bar) in enumerate(bars.items())]
        parts.append(_line(scale(1.0), y, len(bars), "one"))
        y += BAR * len(bars) + GAP
    said = "Speed as a multiple of the stock loop's: best loop by hand, O1, O2"
    box = f"0 0 {svg.number(WIDTH)} {svg.number(height)}"
    size = {"width": svg.number(WIDTH), "viewBox": box}
    opened = {"xmlns": "http://www.w3.org/2000/svg", **size, "role": "img", "aria_label": said}
    return svg.element("svg", "\n".join(parts), **opened) + "\n"
