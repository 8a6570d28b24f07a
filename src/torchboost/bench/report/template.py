"""Reports as HTML pages, drawn by the templates in the folder next to this file. The same report gives the same bytes.

A page is one file without scripts. The engine escapes all text.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from torchboost.bench.report import wording
from torchboost.bench.report.figures import Scale, chart
from torchboost.bench.report.table import result_table
from torchboost.bench.verdict import best_hand, headline, stock_of, summarise, target_of, verdicts
from torchboost.core.files import write_whole
from torchboost.measure.evidence import BenchReport

__all__ = ["bench_page", "render", "write_page"]

COLOURS = 7


def bench_page(report: BenchReport) -> str:
    """Return the page of a benchmark. A section without data, such as training curves, is absent."""
    finite = {c.name: [s for s in c.samples if abs(s) < float("inf")] for c in report.contestants}
    others = [c.name for c in report.contestants if c.kind != "stock"]
    charts = [
        chart(report, "metric", "seconds", target=True),
        chart(report, "train_loss", "seconds"),
        chart(report, "metric", "epochs"),
    ]
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
        charts=[each for each in charts if each is not None],
        stock=stock_of(report),
        hand=best_hand(report),
        pairs=max((ratio.pairs for c in report.contestants for ratio in c.ratios), default=0),
        seeds=max((len(c.curves) for c in report.contestants), default=0),
        units={name: wording.time_unit(statistics.median(some or [0.0])) for name, some in finite.items()},
        figures=[min, statistics.median, statistics.fmean, max],
    )


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder with the values that it names."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # torch requires it; only pages need it

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
