"""The start of a tuning from earlier ones: the order of the recipes, their first rates and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from torchboost.tuning.report import FRESH_SEED, Candidate, Finding, Start, TuneReport

Prior = str | Path | TuneReport


def reports_of(prior: Sequence[Prior] | Prior) -> list[TuneReport]:
    """Return the reports of earlier tunings, which :meth:`TuneReport.load` reads."""
    given = [prior] if isinstance(prior, Prior) else prior
    return [one if isinstance(one, TuneReport) else TuneReport.load(one) for one in given]


def fresh_after(reports: Sequence[TuneReport]) -> int:
    """Return the first seed of a confirmation, with which no run of the reports, or of earlier ones, was made.

    Plans that begin from a report were chosen with its seeds, which would favour them.
    """
    begun = (report.fresh_seed for report in reports)
    return max((FRESH_SEED, *begun, *(run.seed + 1 for report in reports for run in report.runs)))


def ordered(
    recipes: Sequence[Candidate], reports: Sequence[TuneReport], lr: float
) -> tuple[list[Candidate], dict[str, Start]]:
    """Return the recipes, beginning with those that earlier tunings ended with, and the start of each search.

    Stock remains the first. The last report in which the rates of a recipe were compared counts for it. All rates of
    stock are tried whatever a report says, because the others are compared with the best of them. ``lr`` is the user's
    learning rate.
    """
    known: dict[str, tuple[TuneReport, Finding]] = {}
    for report in reports:
        for place, finding in enumerate(report.findings):
            if finding.rates:  # stock has another name with other levers
                known[finding.candidate.name if place else recipes[0].name] = report, finding
    lrs = {recipes[0].name: None} | {one.name: one.recipe.get("lr", lr) for one in recipes[1:]}
    starts = {name: _start(*known[name], lr) for name, lr in lrs.items() if name in known}
    kept = {name for name, (_, finding) in known.items() if finding.outcome == "kept"}
    good = {name for name, start in starts.items() if start.share is not None}
    return [recipes[0], *sorted(recipes[1:], key=lambda one: (one.name not in kept, one.name not in good))], starts


def _start(report: TuneReport, finding: Finding, lr: float | None) -> Start:
    """Return the start of the search of a recipe whose rate is ``lr``. A report of another rate counts its size."""
    found, rate = finding.candidate, None
    before = found.recipe.get("lr", report.lr)
    if before and lr and len(finding.rates) > 1 and finding.rates.get(found.rate, -math.inf) > -math.inf:
        rate = 2.0 ** round(math.log2(found.rate * before / lr))
    return Start(rate=rate, share=found.share if finding.change is not None else None)
