"""Find out which algorithms pay on a model without losing accuracy, within a budget of time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchboost.algorithms.threads import compute_with_threads
from torchboost.bench.bench import check_same
from torchboost.bench.digests import changes_by_call, check_unchanged, data_of, fingerprint_of, modes_of
from torchboost.bench.factory import count_of, made_by, source_of
from torchboost.bench.schedules import ABSOLUTE, LEAST_STEPS, schedule_sets_rates
from torchboost.calibration.watch import uninterrupted
from torchboost.core.arguments import check_count, check_number, is_number, seconds_of
from torchboost.distributed.topology import Topology
from torchboost.errors import FactoryError, IncompatibleError
from torchboost.measure.stopwatch import Progress, environment, interrupts_kept
from torchboost.tuning.prior import Prior, fresh_after, ordered, reports_of
from torchboost.tuning.race import LEAST_SEEDS, Race
from torchboost.tuning.report import STOCK, Candidate, Finding, TuneReport
from torchboost.tuning.runs import HALF, Runs
from torchboost.tuning.search import Search
from torchboost.tuning.training import (
    Training,
    boosted_by,
    fresh,
    looked_at,
    named_candidates,
    placed,
    standard_recipes,
    try_levers,
)
from torchboost.tuning.workers import Shares, Workers, shares

TRIAL_SHARE, TRIAL_MOST = 0.1, 60.0
"""The trial of the levers takes at most this share of the budget, and at most so many seconds."""

LEAST_ERROR, MOST_ERROR = 0.012, 0.5
"""Limits of ``error``. An attempt of the final test, with a fourth of it, needs 0.003 at least."""

MOST_SEEDS = 100
"""The limits of the sequential test are simulated for all seeds, which takes seconds for a hundred."""


def tune(
    make: Callable[[int], object],
    *,
    drop: float,
    budget: float | str,
    epochs: int | None = None,
    steps: int | None = None,
    total_steps: int | None = None,
    candidates: Mapping[str, Mapping[str, Any]] | None = None,
    rate: str = "search",
    prior: Sequence[Prior] | Prior = (),
    seeds: int = 12,
    error: float = 0.05,
    device: torch.device | str = "cpu",
    title: str = "a model",
    out: str | Path | None = None,
    resume: bool = False,
    processes: int = 1,
    progress: Progress | None = None,
) -> TuneReport:
    """Find the plan that reaches the metric of stock at its best rate in the least time, and test it with fresh seeds.

    First a trial chooses the levers that make a step faster here. All recipes have them. Then every recipe gets the
    same search: stock itself, Muon, schedule-free AdamW, LessBN and freezing. The search finds the best of at least
    three learning rates at half of the steps, and the fewest steps that keep the metric of stock at its best rate. At
    last the fastest plan is trained with fresh seeds against plain stock at that rate, until a sequential test decides.
    If it fails, it is tried with more steps, and then the levers alone. These attempts, at most three, have equal parts
    of ``error``. So whatever the search found, the probability that something which costs more than ``drop`` is turned
    on is at most ``error``.

    Of a training on several ranks, tune the part of one rank. With several ``processes``, runs that do not depend on
    each other are made at the same time. The budget is still the time that passes. Each process builds the training
    for itself, so memory and data are needed once for each.

    The answer is valid for runs like those that were made: ``epochs`` passes over the factory's batches, or ``steps``
    updates. A drop that only shows later in a longer run cannot be seen.

    Args:
        make: ``make(seed) -> (model, optimizer, loss, batches, evaluate[, schedule[, validate[, before_step]]])``.
            ``evaluate(model)`` returns the metric, higher is better. ``schedule(optimizer, steps)`` returns a torch
            scheduler, stepped after every update. ``validate(model)`` is like ``evaluate``, on other data. The search
            uses it, and ``evaluate`` without it. ``before_step(model)`` clips the gradients before every update.
        drop: Largest accepted drop of the metric, in its own units: 0.005 for half a point of an accuracy.
        budget: Seconds, or text such as ``"30m"``. The next run is not begun if it does not fit.
        epochs: Passes over the batches in a run of stock, 1 by default.
        steps: Updates of a run of stock, in place of ``epochs``. The batches may then be endless.
        total_steps: Updates of the training that the answer is for, over which compilation is spread. By default the
            updates of a run.
        candidates: Name -> section ``extra`` of a configuration, in place of the standard recipes and the levers.
        rate: ``"search"``, or ``"fixed"``, which keeps the learning rate of your optimizer. Optimizers that take its
            place are still searched, because for them you have none.
        prior: Reports of tunings of similar trainings, or their files, the most similar one last. The search begins
            from their recipes, rates and lengths. The test is the same, with seeds that they have not used.
        seeds: Most seeds of a test, from 3 to 100.
        error: Probability of a wrong decision, in all attempts of the confirmation together.
        device: Where the model is moved, and the batches.
        title: Of the report.
        out: JSON file of the resulting configuration. The report is saved next to it after every run. See
            :func:`report_path`.
        resume: Continue the report that is there. The runs in it are not repeated.
        processes: Runs that are made at the same time, each in a process. On ``"cuda"`` each of them gets a GPU, and on
            a CPU an equal part of the threads. By default all runs are made one after the other, in this process.
            Otherwise ``make`` must be defined at the top level of a module, and a script must call ``tune`` under
            ``if __name__ == "__main__":``. A report can be continued with another number, on a CPU if the threads of a
            run stay the same.
        progress: Called with the seconds that were spent.

    Raises:
        FactoryError: The factory returns something else or has no ``evaluate``, or the stock loop cannot be compared:
            it diverges, or has the same losses and metric for two seeds. With several ``processes`` also: they
            cannot load ``make``, or the training of stock raised an error in one of them, which the text has.
        IncompatibleError: ``torch.distributed`` has several ranks, :func:`torchboost.boost` cannot take the pair,
            another tuning writes to the same file, or a process was ended from outside.
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, the report belongs to another tuning, or the file of a report was
            changed after it was written.
        KeyboardInterrupt: Passed on. The report holds all finished runs.

    Example:
        >>> import torchboost
        >>> report = torchboost.tune(make, drop=0.005, budget="30m", out="boost.json")  # doctest: +SKIP
        >>> boosted = torchboost.boost(model, optimizer, config="boost.json", total_steps=1000)  # doctest: +SKIP
        >>> boosted.steps  # of boosted.optimizer, with a schedule that is built on it for so many  # doctest: +SKIP
        450
    """
    check_number("drop", drop, above=True)
    if epochs is not None:
        check_count("epochs", epochs, of="passes over the batches")
    if steps is not None:
        check_count("steps", steps, of="updates of a run")
        if epochs is not None:
            raise ValueError(f"found epochs={epochs} and steps={steps}; give one of them.")
    check_count("processes", processes, of="processes")
    check_count("seeds", seeds, of="seeds per comparison")
    if not LEAST_SEEDS <= seeds <= MOST_SEEDS:
        raise ValueError(f"seeds: found {seeds}; give a number from {LEAST_SEEDS} to {MOST_SEEDS}.")
    if total_steps is not None:
        check_count("total_steps", total_steps, of="updates")
    if not is_number(error) or not LEAST_ERROR <= error < MOST_ERROR:
        raise ValueError(f"error: found {error!r}; give a number from {LEAST_ERROR} to below {MOST_ERROR}.")
    if rate not in ("search", "fixed"):
        raise ValueError(f"rate: found {rate!r}; give 'search' or 'fixed'.")
    share = shares(processes, torch.device(device))
    started, seconds, path = time.perf_counter(), seconds_of(budget), None if out is None else Path(out)
    if path is not None:
        _check_free(path, resume)
    earlier = reports_of(prior)
    parts = fresh(make)
    if parts.evaluate is None:
        raise FactoryError(
            "the factory has no evaluate; tune needs it: return (model, optimizer, loss, batches, evaluate)."
        )
    if Topology.current().world_size > 1:
        raise IncompatibleError("tune runs in one process, and here are several ranks; let one of them tune its part.")
    if steps is None:
        steps = (1 if epochs is None else epochs) * count_of(parts.batches, seconds)
    if HALF * steps < LEAST_STEPS:
        raise FactoryError(
            f"found runs of {steps} {'step' if steps == 1 else 'steps'}, and half of a run must have at least "
            f"{LEAST_STEPS}, or no speed is known; give more steps, batches or epochs."
        )
    if total_steps is not None and total_steps < steps:
        raise ValueError(f"total_steps: found {total_steps}; the runs that are made have {steps} steps.")
    report = TuneReport(
        title=title,
        model=type(parts.model).__name__,
        parameters=sum(param.numel() for param in parts.model.parameters()),
        drop=drop,
        budget_seconds=seconds,
        steps=steps,
        total_steps=steps if total_steps is None else total_steps,
        most_seeds=seeds,
        error=error,
        rate_search=rate == "search",
        environment=environment(device).model_copy(update={"threads": share.threads}),
        fingerprint=fingerprint_of(parts),
        data=data_of(made_by(make, 0)),
        lr=max(float(group["lr"]) for group in parts.optimizer.param_groups),
        source=source_of(make),
        prior=[one.title for one in earlier],
        fresh_seed=fresh_after(earlier),
    )
    session = _Session(
        started=started,
        make=make,
        device=torch.device(device),
        out=path,
        progress=(lambda phase, done, total, note="": None) if progress is None else progress,
        report=report,
        earlier=earlier,
        absolute=schedule_sets_rates(make, steps),
        processes=processes,
        share=share,
        changes=changes_by_call(made_by(make, 0), report.fingerprint, report.data),
    )
    del parts  # a model less in memory during the runs
    if resume:
        session.take_up()
    return session.run(candidates)


def report_path(out: str | Path) -> Path:
    """Return where the report of a configuration file is: ``boost.report.json`` for ``boost.json`` and ``boost``.

    Raises:
        ValueError: It is a folder.
    """
    path = Path(out)
    if not path.name or path.is_dir():
        raise ValueError(f"out: found {str(out)!r}, a folder; give a file, such as boost.json.")
    return path.with_name(path.name.removesuffix(".json") + ".report.json")


@dataclass(kw_only=True)
class _Session:
    """A tuning under way: the request, reports of earlier ones, and the report as far as it came.

    ``absolute`` is whether the schedule sets its own rates, ``share`` what each process gets of the machine, and
    ``changes`` a note if another call for the same seed gave something else. ``written`` is what the report's file has.
    """

    started: float
    make: Callable[[int], object]
    device: torch.device
    out: Path | None
    progress: Progress
    report: TuneReport
    earlier: Sequence[TuneReport]
    absolute: bool
    processes: int
    share: Shares
    changes: str = ""
    written: bytes | None = None

    def take_up(self) -> None:
        """Continue the saved report. ``ValueError`` if it belongs to another tuning."""
        path, now = None if self.out is None else report_path(self.out), self.report
        if path is None or not path.is_file():
            return
        saved, self.written = TuneReport.load(path), path.read_bytes()
        names = ("title", "model", "parameters", "drop", "steps", "total_steps", "most_seeds", "error", "rate_search")
        check_same(path, saved, now, (*names, "fingerprint"), "was made with")
        check_unchanged(path, saved, now, lambda: made_by(self.make, 0))
        if self.earlier:
            check_same(path, saved, now, ("prior", "fresh_seed"), "was made with")
        aside = saved.spent_seconds - sum(run.charge for run in saved.runs)
        self.started -= max(0.0, aside)
        update = {"budget_seconds": now.budget_seconds, "state": "running", "whole": [], "notes": [], "rate": None}
        self.report = saved.model_copy(update=update)

    @interrupts_kept()
    def run(self, extras: Mapping[str, Mapping[str, Any]] | None) -> TuneReport:
        training = Training(make=self.make, steps=self.report.steps, device=self.device, told=self._tell_of)
        if self.processes == 1:
            return self._run(extras, training, None)
        with compute_with_threads(self.share.threads), Workers(training, self.processes, self.share) as workers:
            return self._run(extras, training, workers)

    def _run(
        self, extras: Mapping[str, Mapping[str, Any]] | None, training: Training, workers: Workers | None
    ) -> TuneReport:
        findings = self._findings(extras)
        if findings[0].outcome is not None:
            raise IncompatibleError(f"{findings[0].candidate.name}: {findings[0].reason}")
        runs = Runs(
            train=training,
            budget=self.report.budget_seconds,
            total_steps=self.report.total_steps,
            aside=time.perf_counter() - self.started,
            made={(run.name, run.seed): run for run in self.report.runs},
            told=lambda: self._note(race, findings),
            at_once=workers,
            processes=self.processes,
        )
        recipes = [finding.candidate for finding in findings if finding.outcome is None]
        search = Search(
            runs=runs,
            recipes=recipes,
            drop=self.report.drop,
            rates=self.report.rate_search and not self.absolute,
            starts=self.report.starts,
            least=LEAST_STEPS / self.report.steps,
        )
        race = Race(
            search=search,
            most=self.report.most_seeds,
            error=self.report.error,
            fresh=self.report.fresh_seed,
            planned=self.report.planned,
            tested=dict(self.report.tested),
            notes=self._notes(),
        )
        self.progress("plan", 0, 1, _plan(self.report, len(recipes)))
        try:
            chosen = race.decide()
        except KeyboardInterrupt:
            self._note(race, findings, state="interrupted")
            raise
        if chosen is None:
            rate = search.rate.best if search.rate is not None and search.rate.kept else 1.0
            chosen = Candidate(name=STOCK, rate=rate, extra=dict.fromkeys(self.report.exact, True))
        self._note(race, findings, state="complete", extra=chosen.extra, recipe=chosen.section)
        if self.out is not None:
            boosted = boosted_by(placed(self.make, 0, self.device), chosen, self.report.total_steps)
            boosted.plan.save(self.out)
            boosted.remove()
        return self.report

    def _findings(self, extras: Mapping[str, Mapping[str, Any]] | None) -> list[Finding]:
        """Return a finding for each recipe, with an outcome for those that cannot work here. Stock comes first."""
        named = None if extras is None else [Candidate(name=STOCK), *named_candidates(extras)]
        resumed = bool(self.report.findings)
        if resumed:
            saved = [finding.candidate for finding in self.report.findings]
            recipes = [_as_given(candidate) for candidate in saved if not candidate.base]
            _check_same_recipes(recipes, recipes if named is None else named)
        elif named is None:
            self.progress("trial of the switches", 0, 1)
            seconds = min(TRIAL_MOST, TRIAL_SHARE * self.report.budget_seconds)
            tried = try_levers(self.make, steps=self.report.total_steps, seconds=seconds, device=self.device)
            found = {"levers": tried.kept, "exact": tried.exact, "left_out": tried.reasons}
            self.report = self.report.model_copy(update=found)
            recipes = standard_recipes(tried.kept, made_by(self.make, 0).optimizer)
            self.progress("trial of the switches", 1, 1)
        else:
            recipes = named
        if self.earlier:
            recipes, starts = ordered(recipes, self.earlier, self.report.lr or 0.0)
            if resumed and starts != self.report.starts:
                raise ValueError("prior: found other reports than those that this tuning began from; leave them out.")
            self.report = self.report.model_copy(update={"starts": starts})
        usable = [one for one in recipes if not (self.absolute and one.recipe.get("optimizer") == "muon")]
        looked = looked_at(usable, self.make, self.report.steps, self.report.levers, device=self.device)
        found = {one.candidate.name: one for one in looked}
        return [found.get(one.name, Finding(candidate=one, outcome="not usable", reason=ABSOLUTE)) for one in recipes]

    def _notes(self) -> list[str]:
        """Return how the search was made, if not as usual."""
        earlier, begins = " and ".join(map(repr, self.report.prior)), bool(self.report.starts)
        parts = made_by(self.make, 0)
        modes = modes_of(parts.model)
        said = {
            f"the search began from {earlier}; the seeds of the confirmation are others": begins,
            f"nothing was taken from {earlier}, in which no recipe was searched": bool(earlier) and not begins,
            "the learning rate was kept as it is, as asked": not self.report.rate_search,
            f"the learning rate was not searched, because {ABSOLUTE}": self.report.rate_search and self.absolute,
            "the factory has no validate, so the search chose by evaluate, and only the seeds of the confirmation are "
            "fresh": parts.validate is None,
            f"several runs were made at the same time (threads of each: {self.report.environment.threads}); the times "
            "are those of such runs": self.processes > 1
            or any(run.charged_seconds is not None for run in self.report.runs),
            self.changes: bool(self.changes),
            modes: bool(modes),
        }
        return [note for note, holds in said.items() if holds]

    def _tell_of(self, candidate: Candidate, seed: int) -> None:
        self._tell(f"{candidate.label}, seed {seed}")

    def _tell(self, note: str) -> None:
        self.progress("tuning", round(self.report.spent_seconds), round(self.report.budget_seconds), note)

    def _note(self, race: Race, known: list[Finding], **update: Any) -> None:
        """Put the state of the race into the report, and save it."""
        search, runs = race.search, race.search.runs
        names = dict.fromkeys((*(finding.candidate.name for finding in known), *search.findings))
        before = {finding.candidate.name: finding for finding in known}
        self.report = self.report.model_copy(
            update={
                "findings": [search.findings.get(name) or before[name] for name in names],
                "whole": list(race.whole),
                "rate": search.rate,
                "planned": race.planned,
                "tested": dict(race.tested),
                "runs": list(runs.made.values()),
                "spent_seconds": runs.aside + sum(run.charge for run in runs.made.values()),
                "notes": list(race.notes),
                **update,
            }
        )
        if self.out is not None:
            self._save(report_path(self.out))
        last = self.report.runs[-1] if self.report.runs else None
        self._tell("" if last is None else f"{last.name}, seed {last.seed}: {last.metric:.4g}")

    def _save(self, path: Path) -> None:
        """Save the report, unless another tuning has begun to write to the same file since this one did."""
        if path.exists() and path.read_bytes() != self.written:
            raise IncompatibleError(
                f"{path} was written by another tuning while this one ran, which ends here; let each have its own file "
                "(out, --out)."
            )
        with uninterrupted():  # a Ctrl-C in between would take the file for that of another one
            self.written = self.report.save(path).read_bytes()


def _as_given(candidate: Candidate) -> Candidate:
    """Return a recipe as it was before its search."""
    recipe = {key: value for key, value in candidate.recipe.items() if key != "rate"}
    return candidate.model_copy(update={"recipe": recipe}).at(1.0)


def _check_same_recipes(saved: list[Candidate], now: list[Candidate]) -> None:
    """Raise ``ValueError`` if the recipes differ from the report that is continued."""
    if sorted(map(repr, saved)) != sorted(map(repr, now)):
        known = ", ".join(repr(one.name) for one in saved)
        raise ValueError(
            f"the report was made with other candidates, or settings of them ({known}); give the same ones, or "
            "choose another file."
        )


def _plan(report: TuneReport, recipes: int) -> str:
    """Return which runs will be made, in words."""
    return (
        f"{recipes} recipes that may lose {report.drop:g} of the metric, within {report.budget_seconds / 2:.0f} s, "
        "first stock and then by what they promise: 3 to 7 runs of half length each for its rate, up to 10 for its "
        f"length; then pairs of whole runs with up to {report.most_seeds} fresh seeds"
    )


def _check_free(out: Path, resume: bool) -> None:
    """Raise ``ValueError`` if the files cannot be written, or would replace something."""
    report = report_path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"out: {out.parent} cannot be written to; choose another folder.")
    if report.exists() and not resume:
        raise ValueError(f"{report} exists; continue it with resume=True (--resume), or choose another file.")
    if out.exists() and not report.exists():
        raise ValueError(f"{out} exists and is not from a tuning, since {report.name} is missing; choose another file.")
