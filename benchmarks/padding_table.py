"""The tables of ``padding.py``: a step on padded batches, against the stock loop and the loops by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torchboost.bench.report import wording
from torchboost.bench.report.table import Table
from torchboost.measure.evidence import BenchReport, Interval
from torchboost.measure.statistics import paired_ratio

STOCK, O1, O1_LONGEST = "stock", "O1", "O1, longest"
O1_GROUPED = "O1, grouped"
BY_HAND = ("by hand", "by hand, float32", "by hand, compiled")
BY_HAND_GROUPED = ("by hand, grouped", "by hand, float32, grouped")
HEAD = ("task", "stock, a step", *BY_HAND, O1, "O1 against the best by hand", "the same, longest")
ORDER = ("classification", "instructions", "masked words", "summaries", "packed pretraining")
MIDDLE = ", 256 x 4, "


@dataclass(frozen=True)
class Measured:
    """A task at one size."""

    report: BenchReport

    @cached_property
    def place(self) -> tuple[int, int]:
        task = next(place for place, task in enumerate(ORDER) if self.report.title.startswith(task))
        return task, self.report.parameters

    @cached_property
    def samples(self) -> dict[str, list[float]]:
        return {one.name: one.samples for one in self.report.contestants}

    @property
    def machine(self) -> str:
        environment = self.report.environment
        threads = environment.threads
        return f"{environment.processor}, {threads} {'thread' if threads == 1 else 'threads'}"

    @property
    def best(self) -> str:
        return self.best_of(BY_HAND)

    def best_of(self, names: Sequence[str]) -> str:
        return max((name for name in names if name in self.samples), key=lambda name: self.ratio(name).mid)

    def ratio(self, name: str, baseline: str = STOCK) -> Interval:
        return paired_ratio(self.samples[baseline], self.samples[name])

    @property
    def is_padded(self) -> bool:
        return not self.report.title.startswith(ORDER[-1])

    @property
    def start(self) -> tuple[str, str]:
        times = {one.name: one.step_seconds for one in self.report.contestants}
        stock = times[STOCK]
        return self.report.title, "" if stock is None else wording.seconds(stock.mid)


def measured(results: Path) -> list[Measured]:
    return sorted(map(Measured, map(BenchReport.load, results.glob("padding-*.json"))), key=lambda one: one.place)


def table(results: Path) -> tuple[Table, str]:
    """Return all rows, and what belongs below them."""
    rows = [
        (
            *one.start,
            *(wording.ratio(one.ratio(name).mid) if name in one.samples else "" for name in BY_HAND),
            wording.ratio_interval(one.ratio(O1)),
            wording.ratio_interval(one.ratio(O1, one.best)),
            wording.ratio_interval(one.ratio(O1_LONGEST, one.best_of(BY_HAND[:2]))),
        )
        for one in measured(results)
    ]
    return Table(headings=HEAD, rows=tuple(rows)), _conditions(results)


def summary(results: Path) -> tuple[Table, str]:
    """Return the rows of the middle size in short, and what belongs below them."""
    every = measured(results)
    rows = [
        (
            *one.start,
            wording.ratio(one.ratio(one.best).mid),
            wording.ratio_interval(one.ratio(O1)),
            wording.ratio_interval(one.ratio(O1, one.best)),
        )
        for one in every
        if MIDDLE in one.report.title
    ]
    padded = [one for one in every if one.is_padded]
    stock, best = ([one.ratio(O1, one.best if hand else STOCK).mid for one in padded] for hand in (False, True))
    elsewhere = "; ".join(sorted({one.machine for one in every if MIDDLE not in one.report.title}))
    said = (
        f"Over three sizes of the padded tasks (small and large: {elsewhere}) O1 was "
        f"{min(stock):.1f} to {max(stock):.1f} times as fast as stock, and "
        f"{min(best):.2f} to {max(best):.2f} times as fast as the best loop by hand."
    )
    head = ("task", "stock, a step", "best by hand", O1, "O1 against best by hand")
    return Table(headings=head, rows=tuple(rows)), said


def grouped(results: Path) -> tuple[Table, str]:
    """Return what is left of the gain if batches hold sequences of similar lengths, and what belongs below the rows."""
    found = [one for one in measured(results) if O1_GROUPED in one.samples and one.is_padded]
    rows = []
    for one in found:
        best = one.best_of(BY_HAND_GROUPED)
        ways = (one.best, O1, best, O1_GROUPED)
        ratios = (wording.ratio(one.ratio(name).mid) for name in ways)
        rows.append((one.report.title, *ratios, wording.ratio_interval(one.ratio(O1_GROUPED, best))))
    head = ("task", "best by hand", O1, "by hand, grouped", O1_GROUPED, "O1 against by hand, both grouped")
    machines = "; ".join(sorted({one.machine for one in found}))
    return Table(headings=head, rows=tuple(rows)), f"Times as fast as stock, whose batches are not grouped. {machines}."


def against_best(results: Path) -> str:
    """Return the range of O1 against the best loops by hand on padded batches."""
    found = [one.ratio(O1, one.best).mid for one in measured(results) if one.is_padded]
    return f"{wording.ratio(min(found))} to {wording.ratio(max(found))} the best loop by hand (padded batches, with O1)"


def _conditions(results: Path) -> str:
    machines = sorted({f"{one.machine}, torch {one.report.environment.torch}" for one in measured(results)})
    return (
        "Models of transformers with random weights: BERT, Llama, BERT with a masked-LM head, BART and Llama, of "
        "the width and number of layers that are named. Batches have 32, 16 or 8 sequences of log-normal lengths, "
        "padded to 128 tokens. *By hand* is autocast in bfloat16 and a fused optimizer on batches padded to their "
        "longest sequence, *by hand, float32* the same without autocast, *by hand, compiled* with autocast and "
        "`torch.compile` on batches padded to 128 tokens. In "
        f"the last column O1 gets the batches padded to the longest, too. {'; '.join(machines)}. "
        "95 % intervals of 12 pairs. Each batch is new to all if there is a figure in float32 by hand. The other rows "
        "were timed on four batches in turn. If all batches are new, as in a training, bfloat16 kernels meet new "
        "shapes, and steps of the small and middle models take up to a tenth longer in O1 and up to a fifth longer by "
        "hand."
    )
