"""Write the tables and the figure of README and documentation from the registry and the result files."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import adasum_convergence
import certificate
import fewer_steps_table
import fine_tune_rivals
import fine_tunings
import freeze_rival
import gpu_tables
import half_time
import headline
import level_rates
import muon_split
import padding_table
import parts_accuracy
import planted_effects
import ranks
import record_nanogpt
import subspace_recipe
import trainers
from figures import allowed, signed
from ratios import total_ratio

from torchboost.bench.report import wording
from torchboost.bench.report.table import Table, result_table
from torchboost.measure.evidence import BenchReport, Contestant, Interval
from torchboost.measure.statistics import paired_ratio
from torchboost.registry import LEVELS, REGISTRY
from torchboost.tuning.report import TuneReport

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "results.svg"
BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that show a table."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in every if BLOCK.search(path.read_text(encoding="utf-8"))]


def rows(table: Table) -> str:
    lines = ["| " + " | ".join(table.headings) + " |", "|" + " --- |" * len(table.headings)]
    return "\n".join([*lines, *("| " + " | ".join(cell or " " for cell in row) + " |" for row in table.rows)])


def levels(folder: str) -> str:
    def cell(level: str, name: str) -> str:
        if name not in LEVELS[level]:
            return ""
        return ", ".join(f"`{key}={value!r}`" for key, value in LEVELS[level][name].items()) or "on"

    body = [
        (f"[{name}]({folder}{name}.md)", entry.summary, *(cell(level, name) for level in LEVELS))
        for name, entry in REGISTRY.items()
        if any(name in chosen for chosen in LEVELS.values())
    ]
    return rows(Table(headings=("algorithm", "what it does", *LEVELS), rows=tuple(body)))


def results(claim: str) -> str:
    table, said = headline.table(claim)
    return "\n\n".join([rows(table), "\n".join(f"- {sentence}" for sentence in said)])


# What is made from the registry and several result files; each is told the way from its page to the cards.
WHOLE: dict[str, Callable[[str], str]] = {
    "levels": levels,
    "results": lambda folder: results("zoo"),
    "results_amx": lambda folder: results("zoo-amx"),
    "results_avx2": lambda folder: results("zoo-avx2"),
    "fewer_steps": lambda folder: own(fewer_steps_table.metrics_table(RESULTS)),
    "fewer_steps_needed": lambda folder: own(fewer_steps_table.needed_table(RESULTS)),
    "fewer_steps_rates": lambda folder: own(fewer_steps_table.rates_table(RESULTS)),
    "muon_split": lambda folder: own(muon_split.table(RESULTS)),
    "fine_tunings": lambda folder: own(fine_tunings.table(RESULTS)),
    "fine_tune_rivals": lambda folder: own(fine_tune_rivals.table(RESULTS)),
    "certificate": lambda folder: rows(certificate.table(RESULTS / "certificate-price.json")),
    "ranks": lambda folder: rows(ranks.table(RESULTS / "ranks-counts.json")),
    "planted_effects": lambda folder: rows(planted_effects.table(RESULTS / "planted_effects-tune.json")),
    "planted_priors": lambda folder: rows(planted_effects.prior_table(RESULTS / "planted_effects-tune.json")),
    "freeze_rival": lambda folder: own(freeze_rival.table(RESULTS)),
    "half_time": lambda folder: own(half_time.table(RESULTS)),
    "record": lambda folder: own(record_nanogpt.table(RESULTS)),
    "half_time_level": lambda folder: own(half_time.level_table(RESULTS)),
    "level_rates": lambda folder: own(level_rates.table(RESULTS)),
    "half_time_rival": lambda folder: own(half_time.rival_table(RESULTS)),
    "padding": lambda folder: own(padding_table.table(RESULTS)),
    "padding_short": lambda folder: own(padding_table.summary(RESULTS)),
    "padding_grouped": lambda folder: own(padding_table.grouped(RESULTS)),
    "parts_accuracy": lambda folder: own(parts_accuracy.table(RESULTS)),
    "bfloat16": lambda folder: bfloat16(),
    "algorithms": lambda folder: rows(headline.algorithms(folder)),
}


def bfloat16() -> str:
    """Return the metric of O1's switches, autocast among them, against stock on three workloads."""
    found = [
        TuneReport.load(RESULTS / f"bfloat16-{name}.report.json") for name in ("digits", "text-gpt", "fine-tuning")
    ]
    head = ("workload", "switches", "metric, against stock", "may lose", "seeds")
    lines = []
    for report in found:
        fresh, unit = report.whole[-1], "bits" if "text" in report.title else "points"
        lines.append(
            (
                f"{report.title}, {report.steps:,} steps",
                fresh.candidate.name.rpartition("levers: ")[2],
                signed(fresh.difference, unit),
                allowed(report.drop, unit),
                str(fresh.seeds),
            )
        )
    return shown(head, lines, f"{found[0].environment.processor}. Intervals hold at every look of a sequential test.")


def own(made: tuple[Table, str]) -> str:
    table, said = made
    return f"{rows(table)}\n\n{said}"


def shown(headings: tuple[str, ...], lines: Iterable[tuple[str, ...]], said: str) -> str:
    """Return a table and the text below it."""
    return own((Table(headings=headings, rows=tuple(lines)), said))


def span(found: Interval, times: str = "") -> str:
    return f"{found.mid:.2f}{times} ({found.low:.2f} to {found.high:.2f})"


def mean_final(contestant: Contestant) -> str:
    """Return the mean of the last accuracies of all seeds."""
    found = [curve.metric[-1] for curve in contestant.curves]
    return f"{100 * statistics.fmean(found):.2f}" if found else ""


def origin(report: BenchReport, path: Path) -> str:
    env = report.environment
    trained = f", {report.epochs} epochs of {report.train_samples:,} samples" if report.epochs else ""
    return (
        f"{report.title}: {report.parameters:,} parameters, batch {report.batch}{trained}. "
        f"{env.processor}, {env.threads} threads, {env.device}, torch {env.torch}, "
        f"commit {env.commit or 'unknown'}, {env.date}. Raw samples: `benchmarks/results/{path.name}`."
    )


def times(path: Path) -> str:
    report = BenchReport.load(path)
    said = [f"- {c.name}: {note}" for c in report.contestants for note in c.notes if not note.startswith("by hand")]
    notes = "\n".join([*said, ""]) if said else ""
    return f"{rows(result_table(report))}\n\n{notes}\n{origin(report, path)}".replace("\n\n\n", "\n\n")


def worst(contestant: Contestant) -> str:
    quality = next(iter(contestant.quality), None)
    if quality is None:
        return ""
    return f"{100 * quality.difference.mid:+.2f}, at worst {100 * quality.difference.low:+.2f}"


def from_scratch(path: Path) -> str:
    """Accuracies, with the times of whole runs if they were measured."""
    report = BenchReport.load(path)
    beside = path.with_name(path.name.replace("freeze_types", "freeze_times"))
    timed = {c.name: c for c in BenchReport.load(beside).contestants} if beside.exists() else {}

    def ratio(name: str, baseline: str) -> str:
        if name not in timed or name in (baseline, "stock"):
            return ""
        return span(total_ratio(timed[baseline].samples, timed[name].samples), "x")

    def row(contestant: Contestant) -> tuple[str, ...]:
        name = contestant.name
        return (name, mean_final(contestant), worst(contestant), ratio(name, "stock"), ratio(name, "O1+full"))

    head = ("contestant", "accuracy, %", "against stock, points", "whole run against stock", "against O1+full")
    notes = "\n".join(f"- {note}" for note in report.notes if "can be saved" in note)
    return shown(head, (row(c) for c in report.contestants if c.curves), f"{notes}\n\n{origin(report, path)}")


def against_bare(path: Path) -> str:
    """Each step as a multiple of that of torch's kernel with nothing before it. Less is better."""
    report = BenchReport.load(path)
    plain = [c for c in report.contestants if c.name.startswith("torch fused") and "nothing before it" in c.name]

    def row(contestant: Contestant) -> tuple[str, ...]:
        bare = next((one for one in plain[1:] if "SGD" in contestant.name), plain[0])
        multiple = "" if contestant is bare else span(paired_ratio(contestant.samples, bare.samples))
        moved = contestant.notes[0].partition("so ")[2]
        return (contestant.name, f"{1e3 * contestant.step_seconds.mid:.1f} ms", multiple, moved)

    head = ("step", "time", "times the bare step", "memory traffic, at least")
    return shown(head, map(row, report.contestants), origin(report, path).replace(", batch 1", ""))


def by_case(report: BenchReport) -> dict[str, dict[str, Contestant]]:
    """Return the contestants of a report by the two parts of their names."""
    cases: dict[str, dict[str, Contestant]] = {}
    for contestant in report.contestants:
        case, _, way = contestant.name.rpartition(": ")
        cases.setdefault(case, {})[way] = contestant
    return cases


def against_best(path: Path) -> str:
    """A line per rule and form: its time, and as a multiple of the fastest of the others."""
    report = BenchReport.load(path)

    def row(rule: str, found: dict[str, Contestant]) -> tuple[str, ...]:
        own = found["torchboost"]
        peers = {way: one for way, one in found.items() if one is not own}
        time = f"{1e3 * own.step_seconds.mid:.2f} ms"
        if not peers:
            return (rule, time, "none installed", "")
        best = min(peers, key=lambda way: peers[way].step_seconds.mid)
        return (rule, time, best, span(paired_ratio(own.samples, peers[best].samples)))

    head = ("rule and form", "time", "best of the others", "times the best")
    lines = (row(rule, found) for rule, found in by_case(report).items())
    said = "".join(f"- {note}\n" for note in report.notes)
    return shown(head, lines, f"{said}\n{origin(report, path).replace(', batch 1', '')}")


def beside_all_reduce(path: Path) -> str:
    """A line per number of ranks and size, a column per way, as a multiple of the all-reduce."""
    report = BenchReport.load(path)
    cases = by_case(report)
    ways = list(dict.fromkeys(way for found in cases.values() for way in found))

    def multiple(found: dict[str, Contestant], way: str) -> str:
        return span(paired_ratio(found[way].samples, found[ways[0]].samples)) if way in found else ""

    def row(case: str, found: dict[str, Contestant]) -> tuple[str, ...]:
        return (
            *case.split(", ", 1),
            f"{1e3 * found[ways[0]].step_seconds.mid:.1f} ms",
            *(multiple(found, way) for way in ways[1:]),
        )

    head = ("ranks", "vector", ways[0], *(f"{way}, times that" for way in ways[1:]))
    env = report.environment
    said = "".join(f"- {note}\n" for note in report.notes)
    said += (
        f"\n{env.processor}, {env.cores} cores, torch {env.torch}, commit {env.commit or 'unknown'}, {env.date}. "
        f"Raw samples: `benchmarks/results/{path.name}`."
    )
    return shown(head, (row(case, found) for case, found in cases.items()), said)


def steps_to_target(path: Path) -> str:
    result = json.loads(path.read_text(encoding="utf-8"))
    env = result["environment"]
    said = (
        f"{result['title']}. {result['model']}. Tuning: {result['tuning']}. torch {env['torch']}, commit "
        f"{env['commit'] or 'unknown'}, {env['date']}. Curves and grids: `benchmarks/results/{path.name}`."
    )
    return shown(adasum_convergence.HEADINGS, adasum_convergence.rows(result["found"]), said)


def by_recipe(path: Path) -> str:
    result = json.loads(path.read_text(encoding="utf-8"))
    env, settings = result["environment"], result["settings"]
    lines = []
    for rate, runs in result["runs"].items():
        for part, name in subspace_recipe.PARTS.items():
            scores = [100 * run[part]["accuracy"] for run in runs]
            seconds = sum(run[part]["seconds"] for run in runs) / len(runs)
            spread = f"{min(scores):.2f} to {max(scores):.2f}"
            lines.append((name, rate, f"{sum(scores) / len(scores):.2f}", spread, f"{seconds:.0f} s"))
    said = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())
    said = (
        f"{result['title']}: {result['model']}; {said}. {env['processor']}, torch {env['torch']}, commit "
        f"{env['commit'] or 'unknown'}, {env['date']}. All runs: `benchmarks/results/{path.name}`."
    )
    return shown(("what", "rate", "accuracy, %", "range over seeds", "processor time"), lines, said)


def in_trainers(path: Path) -> str:
    """One row per host of the training: the step alone, the gain of the level, and the share of the loop's gain."""
    report = BenchReport.load(path)
    found = {contestant.name: contestant for contestant in report.contestants}

    def row(host: str) -> tuple[str, ...]:
        alone, boosted = found[host], found[f"{host}+O1"]
        gain = wording.ratio_interval(paired_ratio(alone.samples, boosted.samples))
        share = "" if host == trainers.LOOP else span(trainers.share_of(report, host))
        return (host, wording.seconds(statistics.median(alone.samples)), gain, share)

    head = ("training in", "a step, alone", "O1 against that", "share of the loop's gain")
    return shown(head, map(row, trainers.HOSTS), origin(report, path))


def fine_tuned(path: Path) -> str:
    report = BenchReport.load(path)

    def row(contestant: Contestant) -> tuple[str, ...]:
        against = {ratio.baseline: span(ratio.interval, "x") for ratio in contestant.ratios}
        ratios = [against.get(baseline, "") for baseline in ("stock", "frozen")]
        time = f"{1e3 * contestant.step_seconds.mid:.1f} ms"
        return (contestant.name, time, *ratios, mean_final(contestant), worst(contestant))

    head = ("contestant", "time per step", "against stock", "against frozen", "accuracy, %", "against frozen, points")
    return shown(head, map(row, report.contestants), origin(report, path))


MAKERS: dict[str, Callable[[Path], str]] = {
    "inference": times,
    "overhead": times,
    "loss_scale": times,
    "gpu": lambda path: own(gpu_tables.table(path)),
    "freeze_savings": times,
    "freeze_on_ranks": times,
    "dim_reduce": times,
    "subspace_recipe": by_recipe,
    "trainers": in_trainers,
    "optimizer_step": against_bare,
    "optimizer_rules": against_best,
    "freeze_types": from_scratch,
    "fine_tune": fine_tuned,
    "adasum_time": beside_all_reduce,
    "adasum_convergence": steps_to_target,
}


def block(name: str, shown_on: Path) -> str:
    if name in WHOLE:
        cards = Path(os.path.relpath(ROOT / "docs" / "algorithms", shown_on.parent)).as_posix()
        return WHOLE[name]("" if cards == "." else f"{cards}/")
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "Not measured yet."
    return MAKERS[name.split("-")[0]](path)


def written() -> dict[Path, str]:
    """Return what each page with a table, and the figure, should hold."""
    made = {}
    for path in pages():
        text = path.read_text(encoding="utf-8")
        made[path] = BLOCK.sub(lambda match, at=path: f"{match[1]}{block(match['name'], at)}\n{match[3]}", text)
    return {**made, FIGURE: headline.figure()}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, after in written().items():
        path.write_text(after, encoding="utf-8")
