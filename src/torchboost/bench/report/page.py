"""A report as one HTML page, without scripts and external files. The same report gives the same bytes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from html import escape

from torchboost.bench.report import wording
from torchboost.bench.report.figures import colour_classes, curve_figure, step_time_figure
from torchboost.bench.report.html import environment_section, figure, page, section, table
from torchboost.bench.report.table import result_table
from torchboost.bench.report.verdict import best_hand, headline, stock_of, target_of, verdicts
from torchboost.measure.evidence import BenchReport, Contestant, Curve

__all__ = ["html_page"]


def html_page(report: BenchReport) -> str:
    """Return the page. All text of the report is escaped. Figures are inline SVG for large and small screens.

    Args:
        report: The report to show. Sections without data, such as training curves, are left out.
    """
    sections = [
        _header(report),
        _results(report),
        _findings(report),
        _step_times(report),
        _training(report),
        _algorithms(report),
        _method(report),
        environment_section(report.environment),
        _raw(report),
    ]
    footer = (
        f"Made by torchboost {escape(report.environment.torchboost)} from a saved report; "
        "draw it again with <code>torchboost report report.json</code>."
    )
    return page(report.title, sections, footer)


def _header(report: BenchReport) -> str:
    env = report.environment
    trained = f", {report.train_samples:,} samples" if report.train_samples else ""
    if report.epochs:
        trained += f", {wording.count(report.epochs, 'epoch')}"
    facts = (
        f"{report.model}, {report.parameters:,} parameters, on {report.workload}{trained}; batch {report.batch}. "
        f"{env.processor}, {env.device}, {wording.count(env.threads, 'thread')}. {env.date}."
    )
    return (
        f'<header>\n<h1>{escape(report.title)}</h1>\n<p class="headline">{escape(headline(report).text)}</p>\n'
        f'<p class="facts">{escape(facts)}</p>\n</header>'
    )


def _named(name: str, colour: str) -> str:
    return f'<th scope="row"><span class="swatch {colour}"></span>{escape(name)}</th>'


def _stacked(cell: str) -> str:
    main, bracket, rest = cell.partition(" (")
    small = f"<small>{escape(rest.removesuffix(')'))}</small>" if bracket else ""
    return f"<td>{escape(main)}{small}</td>"


def _results(report: BenchReport) -> str:
    found, colours = result_table(report), colour_classes(report)
    rows = []
    for contestant, row in zip(report.contestants, found.rows, strict=True):
        rows.append([_named(contestant.name, colours[contestant.name]), *(_stacked(cell) for cell in row[1:])])
    lead = "Small figures are 95 % intervals. A ratio above 1 is faster than the loop that it is measured against."
    target = target_of(report)
    if target is not None:
        shown = wording.measure(target, share=wording.is_share(report))
        short = (
            ", half a point below the final value of stock"
            if wording.is_share(report)
            else ", the final value of stock"
        )
        lead += f" The target is {escape(report.metric_name)} {shown}{short}; the time to it includes set-up."
    return section("Results", table(found.headings, rows), lead=lead)


def _findings(report: BenchReport) -> str:
    colours = colour_classes(report)
    blocks = []
    for name, group in verdicts(report).items():
        lines = "".join(f'<li class="{v.tone}">{escape(v.text)}</li>\n' for v in group)
        blocks.append(f'<div class="{colours[name]}"><h3>{escape(name)}</h3>\n<ul>{lines}</ul></div>\n')
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    if not blocks and not notes:
        return ""
    lead = "Sentences computed from the numbers: + good, \N{MINUS SIGN} bad, ? not decided by this run."
    return section("What it means", notes, f'<div class="findings">{"".join(blocks)}</div>', lead=lead)


def _step_times(report: BenchReport) -> str:
    caption = (
        "Median time of one training step: forward, backward and update. Shorter is better. The thin line over "
        "each bar is its interval, the dotted line marks stock. Ratios come from paired rounds and vary less than bars."
    )
    drawn = figure(step_time_figure(report), step_time_figure(report, narrow=True), caption)
    return section("Time per step", drawn)


def _training(report: BenchReport) -> str:
    metric = report.metric_name
    hero = curve_figure(report, "metric", "seconds", wide=True, target=True)
    if not hero:
        return ""
    small = curve_figure(report, "metric", "seconds", narrow=True, target=True)
    first = figure(
        hero,
        small,
        f"{metric.capitalize()} against training time, with set-up and without evaluation. Thin lines are single "
        "seeds, thick lines their mean. Further left is sooner.",
    )
    loss = figure(
        curve_figure(report, "train_loss", "seconds"),
        curve_figure(report, "train_loss", "seconds", narrow=True),
        "Training loss against the same time.",
    )
    epochs = figure(
        curve_figure(report, "metric", "epochs"),
        curve_figure(report, "metric", "epochs", narrow=True),
        f"{metric.capitalize()} against epochs, regardless of speed. If lines coincide, they learn as much per epoch.",
    )
    return section("Training", first, f'<div class="pair">{loss}{epochs}</div>')


def _algorithms(report: BenchReport) -> str:
    colours = colour_classes(report)
    rows = []
    for contestant in report.contestants:
        on = "".join(f"<div>{escape(a.name)} <code>{escape(a.settings)}</code></div>" for a in contestant.algorithms)
        off = "".join(f"<div>{escape(d.name)}: {escape(d.reason)}</div>" for d in contestant.dropped)
        notes = "".join(f"<div>{escape(note)}</div>" for note in contestant.notes)
        name = _named(contestant.name, colours[contestant.name])
        on, off = on + notes or "<div>nothing</div>", off or "<div>nothing</div>"
        rows.append([name, f'<td data-head="on">{on}</td>', f'<td data-head="left out">{off}</td>'])
    shown = table(("contestant", "on, with settings", "left out, and why"), rows, class_="text")
    return section("What was on", shown)


def _method(report: BenchReport) -> str:
    stock, hand = stock_of(report), best_hand(report)
    pairs = max((r.pairs for c in report.contestants for r in c.ratios), default=0)
    seeds = max((len(c.curves) for c in report.contestants), default=0)
    baselines = f"The stock loop ({stock.name}) is the plain eager one. " if stock else ""
    if hand:
        baselines += f"The hand-tuned loop ({hand.name}) uses PyTorch's own options, set by hand; it is harder to beat."
    entries = [("Baselines", baselines)] if baselines else []
    entries += [
        (
            "Interleaved",
            "All contestants are warmed up first and then take turns in one process, so that a slow "
            "phase of the machine affects all of them equally. Set-up and warm-up are reported separately.",
        ),
        (
            "Paired",
            f"A ratio divides the baseline's time by the contestant's time in the same round. "
            f"{wording.count(pairs, 'round')} were timed.",
        ),
        (
            "Interval",
            "The range comes from resampling the pairs at random (bootstrap). Such ranges contain "
            "the true value about 95 times in 100. A gain counts only when the whole range lies above 1.",
        ),
    ]
    if seeds:
        entries.append(
            (
                "Seeds",
                f"Every contestant trains from scratch with {wording.count(seeds, 'seed')}; the same seed means the "
                "same starting weights and the same order of data, so differences are taken seed by seed.",
            )
        )
        margin = (
            "How much is acceptable depends on the units of the metric, which are not known here: "
            "torchboost tune --drop tests a limit of your own."
            if wording.has_own_units(report.metric_name)
            else "It must stay inside the margin: half a point, or what the level promises."
        )
        entries.append(
            (
                "Non-inferiority",
                "Seeing no difference does not prove that none exists. Therefore the worst case is stated: with 95 % "
                "confidence the loss is at most the figure given as \N{LEFT DOUBLE QUOTATION MARK}at worst"
                f"\N{RIGHT DOUBLE QUOTATION MARK}. {margin} More seeds make it tighter.",
            )
        )
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>\n" for name, said in entries)
    return section("How it was measured", f"<dl>{shown}</dl>", class_="method")


def _sample_row(contestant: Contestant, colour: str) -> list[str]:
    cells = [_named(contestant.name, colour), f"<td>{len(contestant.samples):,}</td>"]
    if not contestant.samples:
        return cells + ["<td>\N{EN DASH}</td>"] * 4
    values = [min, statistics.median, statistics.fmean, max]
    return cells + [f"<td>{escape(wording.seconds(f(contestant.samples)))}</td>" for f in values]


def _curve_rows(contestant: Contestant, curve: Curve, share: bool) -> Iterable[list[str]]:
    columns = zip(curve.epochs, curve.seconds, curve.train_loss, curve.metric, strict=True)
    for epoch, seconds, loss, metric in columns:
        shown = (str(curve.seed), f"{epoch:g}", f"{seconds:.3f}", f"{loss:.4f}", wording.measure(metric, share=share))
        yield [f"<td>{escape(contestant.name)}</td>", *(f"<td>{escape(cell)}</td>" for cell in shown)]


def _raw(report: BenchReport) -> str:
    colours, share = colour_classes(report), wording.is_share(report)
    headings = ("contestant", "samples", "shortest", "median", "mean", "longest")
    content = [table(headings, (_sample_row(c, colours[c.name]) for c in report.contestants))]
    for contestant in report.contestants:
        if not contestant.samples:
            continue
        finite = [s for s in contestant.samples if math.isfinite(s)]
        factor, unit = wording.time_unit(statistics.median(finite)) if finite else (1.0, "s")
        listed = ", ".join(f"{s * factor:.4g}" for s in contestant.samples)
        content.append(
            f"<details><summary>Step times of {escape(contestant.name)}, in {unit}</summary>"
            f'<p class="samples">{listed}</p></details>\n'
        )
    rows = [row for c in report.contestants for curve in c.curves for row in _curve_rows(c, curve, share)]
    if rows:
        shown = table(("contestant", "seed", "epoch", "seconds", "training loss", report.metric_name), rows)
        content.append(f"<details><summary>All training curves, {len(rows):,} points</summary>{shown}</details>\n")
    return section("Raw numbers", *content)
