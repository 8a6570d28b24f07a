"""What the results of the zoo say: a row for each network, geometric means, and whether the requirement holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from torchboost.bench.report.table import NOTHING, Table, plain
from torchboost.calibration.choice import Choice
from torchboost.measure.evidence import BenchReport, Contestant, Interval
from torchboost.measure.statistics import paired_ratio

STOCK = "stock"
AGAIN = "stock again"
"""The stock loop a second time: how far apart two equal loops are measured."""
LEVELS = ("O1", "O2")

SLOWEST = 0.98
"""Least ratio to stock, by its estimate."""
SLOWEST_END = 0.95
"""Least ratio to stock, by the lower end of its interval."""
BEHIND = 0.05
"""Largest share by which a level may take longer than the best cell of a network."""
BEHIND_ON_AVERAGE = 0.02
OVER_BUDGET = 0.1
"""Largest share by which a trial may take longer than it was allowed to."""
BY_HAND = {("zoo-bottleneck", "O2"): 1.2}
"""Workload and level -> least ratio to the best cell. O1 has nothing that a loop by hand has not."""


@dataclass(frozen=True, kw_only=True)
class LevelRow:
    """A level on one network.

    Args:
        stock: Ratio to stock; above 1 is faster.
        best: Ratio to the best cell; above 1 is faster.
        regret: Share by which a step takes longer than with the best cell; negative if the level is faster.
        crossed: The same, with the best cell chosen on other rounds than those it is compared on.
        seconds: Time that its trial took; 0 if it had none.
        budget: Time that its trial was allowed to take.
    """

    stock: Interval
    best: Interval
    regret: float
    crossed: float
    seconds: float = 0.0
    budget: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A network.

    Args:
        workload: Name in the results.
        stock_seconds: Median step of the stock loop.
        best: Name of the best cell.
        best_ratio: Its ratio to stock.
        noise: Share by which a second stock loop, of equal code, takes longer than the first.
        levels: Level -> its figures; None if it raised or crashed.
    """

    workload: str
    stock_seconds: float
    best: str
    best_ratio: float
    noise: float = 0.0
    levels: Mapping[str, LevelRow | None] = field(default_factory=dict)

    @property
    def network(self) -> str:
        return self.workload.removeprefix("zoo-")


def cells_of(report: BenchReport) -> dict[str, Contestant]:
    """Return stock and all cells that were timed in the same rounds."""
    found = {c.name: c for c in report.contestants if c.kind in ("stock", "hand") and c.name != AGAIN}
    return {name: c for name, c in found.items() if len(c.samples) == len(found[STOCK].samples)}


def best_cell(cells: Mapping[str, Sequence[float]], rounds: Sequence[int]) -> str:
    """Return the name of the cell with the highest median ratio to stock in these rounds."""
    stock = cells[STOCK]
    return max(cells, key=lambda name: median(stock[k] / cells[name][k] for k in rounds))


def crossed_regret(cells: Mapping[str, Sequence[float]], level: Sequence[float]) -> float:
    """Return the regret against a best cell that was not chosen for its luck in the rounds of the comparison.

    Rounds come in twos, an order and its reverse. The best cell of one half of the twos is compared on the other half,
    and the reverse. With fewer than four rounds there are no halves, and all rounds do both.
    """
    rounds = range(len(level))
    halves = [[k for k in rounds if k // 2 % 2 == side] for side in (0, 1)]
    sides = [(halves[0], halves[1]), (halves[1], halves[0])] if len(level) >= 4 else [(rounds, rounds)]
    logs = []
    for choosing, comparing in sides:
        best = cells[best_cell(cells, choosing)]
        logs += [math.log(level[k] / best[k]) for k in comparing]
    return math.exp(median(logs)) - 1


def choice_in(level: Contestant) -> Choice | None:
    """Return what the level measured; None if it measured nothing."""
    texts = [note.removeprefix("choice: ") for note in level.notes if note.startswith("choice: ")]
    return Choice.model_validate_json(texts[0]) if texts else None


def row_of(report: BenchReport) -> Row:
    cells = {name: contestant.samples for name, contestant in cells_of(report).items()}
    stock = cells[STOCK]
    best = best_cell(cells, range(len(stock)))
    found = {c.name: c for c in report.contestants if c.kind == "level"}
    again = [c.samples for c in report.contestants if c.name == AGAIN]

    def level_row(level: Contestant) -> LevelRow:
        samples, choice = level.samples, choice_in(level)
        against_best = paired_ratio(cells[best], samples)
        return LevelRow(
            stock=paired_ratio(stock, samples),
            best=against_best,
            regret=1 / against_best.mid - 1,
            crossed=crossed_regret(cells, samples),
            seconds=choice.seconds if choice else 0.0,
            budget=choice.budget if choice else 0.0,
        )

    return Row(
        workload=report.workload,
        stock_seconds=median(stock),
        best=best,
        best_ratio=paired_ratio(stock, cells[best]).mid,
        noise=1 / paired_ratio(stock, again[0]).mid - 1 if again else 0.0,
        levels={name: level_row(found[name]) if name in found else None for name in LEVELS},
    )


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan


def average_regret(regrets: Sequence[float]) -> float:
    """Return the geometric mean. A network on which a level beats the best cell counts 0 and pays for no other."""
    return geometric_mean([1 + max(0.0, regret) for regret in regrets]) - 1


def measured(rows: Sequence[Row], level: str) -> list[LevelRow]:
    return [found for row in rows if (found := row.levels.get(level)) is not None]


def violations(rows: Sequence[Row], lost: Sequence[str] = ()) -> list[str]:
    """Return one sentence for each part of the requirement that does not hold; ``lost`` networks gave no result."""
    said = [f"{network} gave no result" for network in lost]
    for row in rows:
        for level in LEVELS:
            found = row.levels.get(level)
            said += [f"{row.network} {level} {text}" for text in _broken(row, level, found)]
    for level in LEVELS:
        average = average_regret([found.regret for found in measured(rows, level)])
        if average > BEHIND_ON_AVERAGE:
            said.append(f"{level} is {average:.1%} behind the best cells on the geometric mean")
    return said


def _broken(row: Row, level: str, found: LevelRow | None) -> list[str]:
    if found is None:
        return ["gave no result"]
    said = []
    if found.stock.mid < SLOWEST:
        said.append(f"is {found.stock.mid:.3f}x stock, needed {SLOWEST}")
    if found.stock.low <= SLOWEST_END:
        said.append(f"has {found.stock.low:.3f}x stock as its lower end, needed above {SLOWEST_END}")
    if found.regret > BEHIND:
        said.append(f"is {found.regret:.1%} behind the best cell, {row.best}, allowed {BEHIND:.0%}")
    if found.seconds > (1 + OVER_BUDGET) * found.budget:
        said.append(f"measured for {found.seconds:.1f} s, allowed {found.budget:.1f} s")
    least = BY_HAND.get((row.workload, level))
    if least is not None and found.best.mid < least:
        said.append(f"is {found.best.mid:.2f}x the best loop by hand, needed {least}")
    return said


def table(rows: Sequence[Row]) -> Table:
    """Return one row per network, and the geometric means. ``again`` is how far a second stock loop is off."""
    head = ("network", "stock, ms", "again, %", "best cell", "ratio")
    head += tuple(f"{level} ({what})" for what in ("95 %", "regret, %", "crossed, %", "trial, s") for level in LEVELS)

    def figures(found: LevelRow | None) -> tuple[str, str, str, str]:
        if found is None:
            return NOTHING, NOTHING, NOTHING, NOTHING
        interval = f"{found.stock.mid:.2f} ({found.stock.low:.2f} to {found.stock.high:.2f})"
        return interval, f"{100 * found.regret:+.1f}", f"{100 * found.crossed:+.1f}", f"{found.seconds:.0f}"

    lines = []
    for row in sorted(rows, key=lambda row: row.best_ratio):
        columns = zip(*(figures(row.levels.get(level)) for level in LEVELS), strict=True)
        texts = [text for column in columns for text in column]
        lines.append(
            (
                row.network,
                f"{1e3 * row.stock_seconds:.1f}",
                f"{100 * row.noise:+.1f}",
                row.best,
                f"{row.best_ratio:.2f}",
                *texts,
            )
        )
    by_level = [measured(rows, level) for level in LEVELS]
    means = [f"{geometric_mean([found.stock.mid for found in level]):.2f}" for level in by_level]
    means += [f"{100 * average_regret([found.regret for found in level]):.1f}" for level in by_level]
    means += [f"{100 * average_regret([found.crossed for found in level]):.1f}" for level in by_level]
    ratios = f"{geometric_mean([row.best_ratio for row in rows]):.2f}"
    return Table(headings=head, rows=(*lines, ("geometric mean", "", "", "", ratios, *means, *(len(LEVELS) * ("",)))))


def conclusion(reports: Sequence[BenchReport], lost: Sequence[str] = ()) -> str:
    """Return the table, and whether the requirement holds."""
    rows = [row_of(report) for report in reports]
    broken = violations(rows, lost)
    rule = (
        f"both levels, every network: at least {SLOWEST}x stock, lower end above {SLOWEST_END}, at most {BEHIND:.0%} "
        f"behind the best cell, {BEHIND_ON_AVERAGE:.0%} on the geometric mean; "
        f"trials within {OVER_BUDGET:.0%} of their budget"
    )
    said = [f"The requirement {'does not hold' if broken else 'holds'} ({rule})."]
    note = "In the mean of the regrets, a level that beats the best cell counts 0."
    return "\n".join([plain(table(rows)), "", note, *said, *(f"- {text}" for text in broken)])
