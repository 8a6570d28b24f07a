"""The results in one table, one figure and one line per algorithm, from the result files: what the README shows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import adasum_convergence

from torchboost.bench.report import svg, wording
from torchboost.bench.report.table import Table
from torchboost.bench.report.verdict import Summary, best_hand, stock_of, summarise
from torchboost.measure.evidence import BenchReport, Contestant, Ratio
from torchboost.measure.statistics import total_ratio
from torchboost.registry import REGISTRY

RESULTS = Path(__file__).resolve().parent / "results"
UNMEASURED = "not measured"
LEVELS = ("O1", "O2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One network of the headline.

    Args:
        name: What the row is called.
        short: The network, for a sentence.
        speed: Result file of the times.
        accuracy: Result file of the accuracy, if the network was trained to compare it.
        called: Level -> the contestant that ran it, if that has another name.
    """

    name: str
    short: str
    speed: str
    accuracy: str = ""
    called: Mapping[str, str] = field(default_factory=dict)


CASES = (
    Case(
        name="deep bottleneck ResNet [3, 4, 6, 3]",
        short="deep bottleneck ResNet",
        speed="step_time-cifar10-resnet-bottleneck",
        accuracy="accuracy-cifar10-resnet-bottleneck",
    ),
    Case(
        name="deep bottleneck ResNet, mean over a run",
        short="deep bottleneck ResNet",
        speed="whole_run-cifar10-resnet-bottleneck",
    ),
    Case(
        name="small bottleneck ResNet [2, 2, 2, 2], mean over a run",
        short="small bottleneck ResNet",
        speed="freeze_times-cifar10-resnet-bottleneck-small",
        accuracy="accuracy-cifar10-resnet-bottleneck-small",
        called={"O1": "O1+progressive"},
    ),
    Case(name="basic ResNet [2, 2, 2, 2]", short="basic ResNet", speed="step_time-cifar10-resnet-basic"),
    Case(name="VGG with BatchNorm", short="VGG", speed="step_time-cifar10-vgg"),
    Case(name="GPT, 4 layers", short="GPT", speed="step_time-text-gpt"),
    Case(name="ResNet-50, GPU", short="ResNet-50", speed="gpu-resnet50-224"),
    Case(name="GPT, 124 M parameters, GPU", short="large GPT", speed="gpu-gpt2-small"),
)


def load(name: str) -> BenchReport | None:
    path = RESULTS / f"{name}.json"
    return BenchReport.load(path) if path.exists() else None


@dataclass(frozen=True, slots=True)
class Speeds:
    """The ratios of one network against its stock loop; None without a measurement."""

    case: Case
    stock: Contestant | None
    against_stock: Mapping[str, Ratio | None]
    against_hand: Mapping[str, Ratio | None]


def speeds(case: Case) -> Speeds:
    report = load(case.speed)
    if report is None:
        return Speeds(case, None, {}, {})
    found: dict[str, Summary] = {summary.contestant.name: summary for summary in summarise(report)}
    hand = best_hand(report)
    names = {**{level: case.called.get(level, level) for level in LEVELS}, "best by hand": hand.name if hand else ""}
    seen = {shown: found[name] for shown, name in names.items() if name in found}
    return Speeds(
        case,
        stock_of(report),
        {shown: summary.stock for shown, summary in seen.items()},
        {level: seen[level].hand for level in LEVELS if level in seen},
    )


def _times(ratio: Ratio | None) -> str:
    return UNMEASURED if ratio is None else wording.ratio_interval(ratio.interval)


def _accuracies(case: Case) -> list[str]:
    report = load(case.accuracy) if case.accuracy else None
    if report is None:
        return [UNMEASURED for _ in LEVELS]
    qualities = {c.name: c.quality[0] for c in report.contestants if c.quality}
    cells = []
    for level in LEVELS:
        quality = qualities.get(level)
        if quality is None:
            cells.append(UNMEASURED)
            continue
        mid, low = (wording.difference(v, share=True) for v in (quality.difference.mid, quality.difference.low))
        trained = f"{report.epochs} epochs, {wording.count(quality.seeds, 'seed')}"
        cells.append(f"{mid.removesuffix(' points')} (at worst {low.removesuffix(' points')}; {trained})")
    return cells


def _losses(rows: list[Speeds]) -> list[str]:
    """Name the cases in which a level is not clearly faster than the stock loop or than the loop by hand."""
    slower, undecided, equal = [], [], []
    for found in rows:
        for level in LEVELS:
            stock, hand = found.against_stock.get(level), found.against_hand.get(level)
            if stock is not None and stock.interval.low <= 1:
                place = slower if stock.interval.high < 1 else undecided
                place.append(f"{level} on the {found.case.short}")
            if hand is not None and hand.interval.low <= 1:
                equal.append(f"{level} on the {found.case.short}")
    lines = []
    if slower:
        lines.append(f"Slower than the stock loop: {', '.join(slower)}.")
    if undecided:
        lines.append(f"Not measurably faster than the stock loop: {', '.join(undecided)}.")
    if equal:
        lines.append(f"Not measurably faster than the best loop by hand: {', '.join(equal)}.")
    return lines


def _machine(rows: list[Speeds]) -> str:
    found = {r.environment for row in rows if (r := load(row.case.speed)) is not None}
    machines = sorted({f"{env.processor}, {env.cores} cores, {env.device}" for env in found})
    versions = sorted({env.torch for env in found})
    return (
        f"Every figure is from one machine ({'; '.join(machines)}), with torch {', '.join(versions)}; another machine "
        "gives other ratios."
    )


def table() -> tuple[Table, list[str]]:
    """Return the table of the results, and the sentences that belong below it."""
    rows = [speeds(case) for case in CASES]
    cells = []
    for found in rows:
        stock = UNMEASURED if found.stock is None else wording.seconds(found.stock.step_seconds.mid)
        ratios = (_times(found.against_stock.get(name)) for name in ("best by hand", *LEVELS))
        cells.append((found.case.name, stock, *ratios, *_accuracies(found.case)))
    accuracy = (f"accuracy, {level}, points" for level in LEVELS)
    head = ("network", "stock, a step", "best by hand", *LEVELS, *accuracy)
    return Table(headings=head, rows=tuple(cells)), [*_losses(rows), _machine(rows)]


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


_DEEP, _RUN = "step_time-cifar10-resnet-bottleneck", "freeze_times-cifar10-resnet-bottleneck-small"
FIGURES: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "less_bn": _faster(_DEEP, "hand+less_bn", "hand", "the loop by hand (bottleneck ResNet)"),
        "gradient_centralization": _faster(
            _DEEP, "hand+gradient_centralization", "hand", "the loop by hand (bottleneck ResNet)"
        ),
        "channels_last": _faster(_DEEP, "stock+channels_last", "stock", "the stock loop (bottleneck ResNet)"),
        "autocast": _faster(_DEEP, "stock+autocast", "stock", "the stock loop (bottleneck ResNet)"),
        "grad_freeze": _faster(_RUN, "O1+progressive", "O1+full", "O1 without it, over a run (bottleneck ResNet)"),
        "fused_optimizer": _faster(_DEEP, "stock+fused_optimizer", "stock", "the stock loop (bottleneck ResNet)"),
        "compile": _faster(_DEEP, "hand+compile", "hand", "the loop by hand (bottleneck ResNet)"),
        "grad_accumulation": _accumulated,
        "adasum": _adaptive_sum,
        "loss_scale_group": _faster("loss_scale-resnet", "group", "no scaling", "a step without scaling (ResNet)"),
        "dim_reduce": _subspace,
    }
)
"""Algorithm -> its one figure. An algorithm that is not in here has none, and is not in the README."""


def algorithms(folder: str, *, with_figure_only: bool) -> Table:
    """Return a line and a figure for each algorithm; ``folder`` leads from the page to the cards."""
    rows = [
        (f"[{name}]({folder}{name}.md)", entry.summary, FIGURES[name]() if name in FIGURES else UNMEASURED)
        for name, entry in REGISTRY.items()
        if name in FIGURES or not with_figure_only
    ]
    return Table(headings=("algorithm", "what it does", "one figure"), rows=tuple(rows))


STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; } .tick { fill: #57606a; } .grid { stroke: #d0d7de; }
.one { stroke: #57606a; stroke-dasharray: 3 3; } .whisker { stroke: #24292f; }
.hand { fill: #9aa4ae; } .O1 { fill: #2f6fde; } .O2 { fill: #d9731a; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .tick { fill: #9198a1; } .grid { stroke: #3d444d; }
.one { stroke: #9198a1; } .whisker { stroke: #e6edf3; } .hand { fill: #6e7781; } .O1 { fill: #5c94f5; } }
"""
CLASSES = {"best by hand": "hand", "O1": "O1", "O2": "O2"}
WIDTH, LEFT, RIGHT, TOP = 930.0, 350.0, 60.0, 40.0
BAR, GAP = 15.0, 15.0


def _bar(ratio: Ratio, name: str, scale: svg.Scale, y: float) -> str:
    interval, middle = ratio.interval, y + BAR / 2 - 1
    low, mid, high = (scale(v) for v in (interval.low, interval.mid, interval.high))
    parts = svg.element("rect", x=scale.start, y=y, width=mid - scale.start, height=BAR - 2, class_=CLASSES[name])
    parts += svg.element("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker")
    return parts + svg.text(high + 6, y + 11, wording.ratio(interval.mid))


def figure() -> str:
    """Draw the speed of the best loop by hand, O1 and O2 as multiples of the stock loop's, with 95 % intervals."""
    rows = [found for case in CASES if (found := speeds(case)).stock is not None]
    fastest = max(r.interval.high for found in rows for r in found.against_stock.values() if r is not None)
    height = TOP + sum(BAR * len(found.against_stock) + GAP for found in rows) + 24
    scale = svg.Scale(0.0, fastest, LEFT, WIDTH - RIGHT)
    parts = [svg.element("style", STYLE)]
    for k, (name, class_) in enumerate(CLASSES.items()):
        x = LEFT + 120 * k
        parts.append(svg.element("rect", x=x, y=6, width=12, height=12, class_=class_))
        parts.append(svg.text(x + 18, 17, name))
    for value in svg.ticks(0.0, fastest):
        x = scale(value)
        line = "one" if value == 1 else "grid"
        parts.append(svg.element("line", x1=x, x2=x, y1=TOP - 10, y2=height - 22, class_=line))
        shown = "1 = stock" if value == 1 else f"{value:g}"
        parts.append(svg.text(x, height - 6, shown, anchor="middle", class_="tick"))
    y = TOP
    for found in rows:
        bars = {name: ratio for name in CLASSES if (ratio := found.against_stock.get(name)) is not None}
        parts.append(svg.text(LEFT - 12, y + BAR * len(bars) / 2 + 4, found.case.name, anchor="end"))
        parts += [_bar(ratio, name, scale, y + BAR * k) for k, (name, ratio) in enumerate(bars.items())]
        y += BAR * len(bars) + GAP
    said = "Speed as a multiple of the stock loop's: best loop by hand, O1, O2"
    box = f"0 0 {svg.number(WIDTH)} {svg.number(height)}"
    opened = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, "role": "img", "aria_label": said}
    return svg.element("svg", "\n".join(parts), **opened) + "\n"
