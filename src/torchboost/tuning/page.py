"""The report of a tuning as one HTML page: the answer first, then what became of each candidate, and all runs."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from torchboost.bench.report import svg, wording
from torchboost.bench.report.html import environment_section, figure, page, section, table, write_whole_page
from torchboost.tuning.evidence import STOCK, Finding, Run, TuneReport
from torchboost.tuning.sentences import HEADINGS, cost, headline, horizon, notes, rows

__all__ = ["tune_page", "write_page"]

GOOD = ("kept",)


def write_page(report: TuneReport, path: str | Path) -> Path:
    """Write the page of a tuning, completely or not at all, and return its path."""
    return write_whole_page(tune_page(report), path)


def tune_page(report: TuneReport) -> str:
    """Return the page. All text of the report is escaped. Figures are inline SVG for large and small screens."""
    return page(
        f"Tuning of {report.title}",
        [_header(report), _outcomes(report), _differences(report), _method(report), _runs(report), _end(report)],
        f"Made by torchboost {escape(report.environment.torchboost)} from a saved tuning.",
    )


def _header(report: TuneReport) -> str:
    facts = (
        f"{report.model}, {report.parameters:,} parameters. Accepted drop {report.drop:g}. "
        f"{len(report.runs)} runs in {wording.seconds(report.spent_seconds)} of "
        f"{wording.seconds(report.budget_seconds)}. {report.environment.date}."
    )
    return (
        f'<header>\n<h1>Tuning of {escape(report.title)}</h1>\n<p class="headline">{escape(headline(report))}</p>\n'
        f'<p class="facts">{escape(" ".join((cost(report), facts)).strip())}</p>\n</header>'
    )


def _outcomes(report: TuneReport) -> str:
    lines = []
    for name, *cells in rows(report):
        shown = zip(HEADINGS[1:], cells, strict=True)
        lines.append([f'<th scope="row">{escape(name)}</th>', *(_cell(head, cell) for head, cell in shown)])
    said = "".join(f"<p>{escape(note)}</p>" for note in notes(report))
    lead = (
        "Speed is the time of a whole stock run over its own, memory the peak over that of stock. "
        f"The metric is the difference to stock, with {1 - report.error:.0%} bounds; those of the final test are wider."
    )
    return section("What was tried", said, table(HEADINGS, lines, class_="text"), lead=lead)


def _cell(head: str, content: str) -> str:
    kind = "" if head == HEADINGS[-1] else ' class="figures"'
    return f'<td{kind} data-head="{escape(head)}">{escape(content)}</td>'


def _differences(report: TuneReport) -> str:
    whole = [
        one.model_copy(update={"candidate": one.candidate.model_copy(update={"name": "together"})})
        for one in report.whole
    ]
    found = [one for one in (*report.findings, *whole) if _drawable(one)]
    if not found:
        return ""
    caption = (
        "Difference of the metric to stock, higher is better, with bounds that hold at all looks together. The dotted "
        "line is the largest accepted drop: a candidate is accepted if its whole line lies to the right of it."
    )
    return section(
        "What it costs", figure(_drawn(report, found, narrow=False), _drawn(report, found, narrow=True), caption)
    )


def _drawable(found: Finding) -> bool:
    return found.difference is not None and math.isfinite(found.difference.low)


def _drawn(report: TuneReport, found: list[Finding], *, narrow: bool) -> str:
    width, label, row = (358.0, 4.0, 52.0) if narrow else (1040.0, 330.0, 40.0)
    top, foot = 10.0, 34.0
    height = top + row * len(found) + foot
    bounds = [value for one in found if one.difference for value in (one.difference.low, one.difference.high)]
    low, high = min(*bounds, -1.4 * report.drop), max(*bounds, 0.4 * report.drop)
    scale = svg.Scale(low, high, label, width - 14)
    parts = []
    for value in svg.ticks(low, high, most=3 if narrow else 6):
        parts.append(svg.element("line", x1=scale(value), x2=scale(value), y1=top, y2=height - foot, class_="grid"))
        parts.append(svg.text(scale(value), height - foot + 20, f"{value:+g}", anchor="middle", class_="tick"))
    edge = scale(-report.drop)
    parts.append(svg.element("line", x1=edge, x2=edge, y1=top, y2=height - foot, class_="reference"))
    for place, one in enumerate(found):
        parts.append(_line(one, scale, top + place * row, row, narrow=narrow))
    said = "; ".join(f"{one.candidate.name} {one.difference.mid:+.4g}" for one in found if one.difference)
    size = "figure small-screen" if narrow else "figure large-screen"
    return svg.document(width, height, f"Difference of the metric to stock: {said}", "".join(parts), size)


def _line(one: Finding, scale: svg.Scale, y: float, row: float, *, narrow: bool) -> str:
    assert one.difference is not None
    middle = y + (row - 14 if narrow else row / 2)
    name = svg.fit(one.candidate.name, 350.0 if narrow else scale.start - 16)
    drawn = svg.text(0, y + 18 if narrow else middle + 5, name, class_="name")
    low, mid, high = (scale(value) for value in (one.difference.low, one.difference.mid, one.difference.high))
    drawn += svg.element("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker")
    drawn += svg.element("rect", x=mid - 4, y=middle - 6, width=8, height=12, rx=2, class_="bar")
    return svg.element("g", drawn, class_="k1" if one.outcome in GOOD else "k0")


def _method(report: TuneReport) -> str:
    entries = [
        ("Horizon", horizon(report)),
        (
            "Paired",
            "A candidate and stock train with the same seed: the same starting weights and the same order of data. "
            "Differences are taken seed by seed.",
        ),
        (
            "Sequential",
            f"After each seed from the third on a test decides, with limits such that all looks together are wrong "
            f"with probability {report.error:g} at most. A candidate is accepted only if a drop beyond the accepted "
            "one is excluded.",
        ),
        (
            "Fewer steps",
            "What leaves out a part of the training must end with a better metric than stock that trains for equally "
            "long with fewer steps and its schedule fitted to them.",
        ),
        (
            "Together",
            "The accepted candidates are trained together with fresh seeds; if they fail, fewer of them. At most three "
            "such attempts share the error rate.",
        ),
    ]
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>\n" for name, said in entries)
    return section("How it was decided", f"<dl>{shown}</dl>", class_="method")


def _runs(report: TuneReport) -> str:
    order = {STOCK: -1} | {found.candidate.name: place for place, found in enumerate(report.findings)}
    made = sorted(report.runs, key=lambda run: (order.get(run.name, len(order)), run.name, run.seed))
    headings = ("run", "seed", "steps", "metric", "set-up", "training")
    shown = table(headings, map(_run_row, made))
    return section("Raw numbers", f"<details><summary>All {len(made)} runs</summary>{shown}</details>\n")


def _run_row(run: Run) -> list[str]:
    cells = [str(run.seed), f"{run.steps:,}", f"{run.metric:.5g}"]
    cells += [wording.seconds(run.setup_seconds), wording.seconds(run.seconds)]
    return [f'<th scope="row">{escape(run.name)}</th>', *(f"<td>{escape(cell)}</td>" for cell in cells)]


def _end(report: TuneReport) -> str:
    return environment_section(report.environment)
