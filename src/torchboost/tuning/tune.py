"""Find out which algorithms pay on a model without losing accuracy, within a budget of time."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchboost.bench.factory import Parts, count_of, made_by, source_of
from torchboost.bench.resume import check_same
from torchboost.core.arguments import check_count, check_number, is_number, seconds_of
from torchboost.distributed.agreement import Agreement, from_first_rank, is_first_rank
from torchboost.errors import FactoryError
from torchboost.measure.stopwatch import Progress, environment
from torchboost.plan import Plan
from torchboost.registry import Facts
from torchboost.tuning.candidates import (
    fingerprint_of,
    fresh,
    looked_at,
    named_candidates,
    recipe_candidates,
    standard_candidates,
    try_levers,
)
from torchboost.tuning.race import Race
from torchboost.tuning.report import Candidate, Finding, TuneReport
from torchboost.tuning.training import LEAST_STEPS, Training

__all__ = ["report_path", "tune"]

TRIAL_SHARE, TRIAL_MOST = 0.1, 60.0
"""The trial of the levers takes at most this share of the budget, and at most so many seconds."""

LEAST_ERROR, MOST_ERROR = 0.01, 0.5
"""Limits of ``error``; an attempt of the final test, with a third of it, needs 0.003 at least."""

LEAST_SEEDS, MOST_SEEDS = 3, 100
"""The limits of the sequential test are simulated for all seeds, which takes seconds for a hundred."""

LEAST_CALLS = 12
"""Calls of the factory: two to check it, one for the trial, two or more to look at candidates, and seven runs."""


def tune(
    make: Callable[[int], object],
    *,
    drop: float,
    budget: float | str,
    epochs: int = 1,
    total_steps: int | None = None,
    candidates: Mapping[str, Mapping[str, Any]] | None = None,
    recipes: Mapping[str, tuple[Callable[[int], object], float]] | None = None,
    seeds: int = 12,
    error: float = 0.05,
    device: torch.device | str = "cpu",
    title: str = "a model",
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> TuneReport:
    """Train candidates against the stock loop, and return what may be turned on for this model.

    First a trial chooses the levers that make a step faster here. Then every candidate is trained against stock, paired
    by seed, until a sequential test shows that it keeps the metric within ``drop``, or that it does not, or that more
    seeds would hardly decide. What leaves out work must also end with a better metric than stock trained for equally
    long with fewer steps. At last the accepted candidates are trained together, with fresh seeds, and tested as a
    whole; the result turns them on only if that passes. If not, fewer of them are tested, at last those that leave out
    no work. These attempts, at most three, have equal parts of ``error``, so the probability that something which costs
    more than ``drop`` is turned on is at most ``error``.

    Under ``torch.distributed`` all ranks of the default group call this with the same arguments; the factory wraps the
    model. They take the metric of the first rank and the times of the slowest, so they decide the same; the first one
    reads and writes the files.

    The answer is valid for runs like those that were made: ``epochs`` passes over the factory's batches. A drop that
    only shows later in a longer run cannot be seen.

    Args:
        make: ``make(seed) -> (model, optimizer, loss, batches, evaluate[, schedule])``. ``evaluate(model)`` returns the
            metric, higher is better. ``schedule(optimizer, steps)`` returns a torch scheduler, stepped after every
            update.
        drop: Largest accepted drop of the metric, in its own units: 0.005 for half a point of an accuracy.
        budget: Seconds, or text such as ``"30m"``. The next run is not begun if it does not fit.
        epochs: Passes over the batches in a run of stock.
        total_steps: Updates of the training that the answer is for, over which compilation is spread; by default those
            of a run.
        candidates: Name -> section ``extra`` of a configuration, in place of the standard ones.
        recipes: Name -> ``(make, share)``: other factories, for instance with another optimizer, trained for a share of
            the steps. They are compared like candidates, but no configuration can turn them on.
        seeds: Most seeds per comparison, from 3 to 100.
        error: Probability of a wrong decision in each comparison, and in the final test as a whole.
        device: Where the batches go.
        title: Of the report.
        out: JSON file of the resulting configuration; the report is saved next to it after every run, see
            :func:`report_path`.
        resume: Continue the report that is there. The runs in it are not repeated.
        progress: Called with the seconds that were spent.

    Raises:
        FactoryError: The factory returns something else or has no ``evaluate``, or the stock loop cannot be compared:
            it diverges, or has the same losses and metric for two seeds.
        RankDisagreementError: The ranks have different numbers of batches.
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or the report belongs to another tuning.
        KeyboardInterrupt: Passed on. The report holds all finished runs.

    Example:
        >>> import torchboost
        >>> report = torchboost.tune(make, drop=0.005, budget="30m", out="boost.json")  # doctest: +SKIP
        >>> model, optimizer = torchboost.boost(model, optimizer, config="boost.json")  # doctest: +SKIP
    """
    _check_functions(make, progress)
    _check_arguments(title=title, drop=drop, epochs=epochs, total_steps=total_steps, seeds=seeds, error=error)
    started, seconds, place = time.perf_counter(), seconds_of(budget), torch.device(device)
    path = None if out is None else Path(out)
    if path is not None:
        _check_free(path, resume)
    parts = fresh(make)
    if parts.evaluate is None:
        raise FactoryError(
            "the factory has no evaluate; tune needs it: return (model, optimizer, loss, batches, evaluate)."
        )
    _check_building((time.perf_counter() - started) / 2, seconds)
    report = _frame(
        parts,
        title=title,
        drop=drop,
        budget_seconds=seconds,
        steps=_agreed(_steps(epochs, parts, seconds)),
        total_steps=total_steps,
        most_seeds=seeds,
        error=error,
        device=place,
        source=from_first_rank(source_of(make)),
    )
    session = _Session(
        started=started,
        make=make,
        recipes=dict(recipes or {}),
        compared=recipe_candidates(recipes or {}, parts),
        seconds=seconds,
        device=place,
        out=path,
        progress=_silent if progress is None else progress,
        report=report,
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
    """A tuning under way: what was asked, and the report as far as it came."""

    started: float
    make: Callable[[int], object]
    recipes: Mapping[str, tuple[Callable[[int], object], float]]
    compared: list[Candidate]
    seconds: float
    device: torch.device
    out: Path | None
    progress: Progress
    report: TuneReport

    def tell(self, phase: str, done: int, total: int, note: str = "") -> None:
        """Tell the progress, on the first rank."""
        if is_first_rank():
            self.progress(phase, done, total, note)

    def take_up(self) -> None:
        """Continue the saved report.

        Raises:
            ValueError: It belongs to another tuning.
        """
        path = None if self.out is None else report_path(self.out)
        there = path is not None and is_first_rank() and path.is_file()
        saved = from_first_rank(TuneReport.load(path) if path is not None and there else None)
        if path is None or saved is None:
            return
        names = ("title", "model", "parameters", "drop", "steps", "total_steps", "most_seeds", "error", "fingerprint")
        check_same(path, saved, self.report, names, "was made with")
        if saved.source and saved.source != self.report.source:
            raise ValueError(
                f"{path} was made with another factory, another version of its file, or other arguments of it; runs of "
                "both cannot be mixed. Restore the factory, choose another file with out, or do not resume."
            )
        self.report = saved.model_copy(update={"budget_seconds": self.seconds, "state": "running", "whole": []})

    def run(self, given: Mapping[str, Mapping[str, Any]] | None) -> TuneReport:
        findings = from_first_rank(self._candidates(given))
        runs = {(run.name, run.seed): run for run in self.report.runs}
        training = Training(
            make=self.make,
            recipes={name: make for name, (make, _) in self.recipes.items()},
            steps=self.report.steps,
            device=self.device,
            told=self._within,
        )
        race = Race(
            train=training,
            candidates=[found.candidate for found in findings if found.outcome is None],
            drop=self.report.drop,
            budget=self.seconds,
            total_steps=self.report.total_steps,
            most=self.report.most_seeds,
            error=self.report.error,
            spent=from_first_rank(self.report.spent_seconds + time.perf_counter() - self.started),
            told=lambda race: self._note(race, findings),
            runs=runs,
        )
        try:
            extra = race.decide()
        except KeyboardInterrupt:
            self._note(race, findings, state="interrupted")
            raise
        self._note(race, findings, state="complete", extra=extra)
        if self.out is not None:
            self._write(self.out, extra)
        return self.report

    def _candidates(self, given: Mapping[str, Mapping[str, Any]] | None) -> list[Finding]:
        """Return a finding for each candidate, with an outcome for those that cannot work here."""
        if self.report.findings:
            self._check_recipes()
            if given is not None:
                self._check_same(named_candidates(given))
            kept = [found for found in self.report.findings if found.outcome in ("not usable", "duplicate")]
            names = {found.candidate.name for found in kept}
            return [
                *kept,
                *(Finding(candidate=f.candidate) for f in self.report.findings if f.candidate.name not in names),
            ]
        total = self.report.total_steps
        if given is None:
            self._check_names()
            self.tell("trial of the levers", 0, 1)
            trial = try_levers(self.make, steps=total, seconds=min(TRIAL_MOST, TRIAL_SHARE * self.seconds))
            self.report = self.report.model_copy(update={"left_out": trial.left_out})
            wanted = standard_candidates(trial.kept)
            self.tell("trial of the levers", 1, 1)
        else:
            wanted = named_candidates(given)
        wanted += self.compared
        twice = [name for name, count in Counter(one.name for one in wanted).items() if count > 1]
        if twice:
            raise ValueError(f"found {twice[0]!r} among the candidates and the recipes; give each its own name.")
        return looked_at(wanted, self.make, self.report.steps)

    def _check_names(self) -> None:
        """Raise ``ValueError`` before the trial if a recipe has the name of a standard candidate."""
        standard = {one.name for one in standard_candidates([])}
        taken = [one.name for one in self.compared if one.name in standard or one.name.startswith("levers: ")]
        if taken:
            raise ValueError(f"recipes: found {taken[0]!r}, the name of a standard candidate; give it another one.")

    def _check_same(self, given: list[Candidate]) -> None:
        """Raise ``ValueError`` if the candidates are not those of the report that is continued."""
        saved = [found.candidate for found in self.report.findings if not found.candidate.recipe]
        if sorted(one.model_dump_json() for one in saved) != sorted(one.model_dump_json() for one in given):
            known = ", ".join(repr(one.name) for one in saved)
            raise ValueError(
                f"the report was made with other candidates or settings of them ({known}); give the same ones, or "
                "choose another file."
            )

    def _check_recipes(self) -> None:
        """Raise ``ValueError`` if the recipes are not those of the report that is continued."""
        saved = [found.candidate for found in self.report.findings if found.candidate.recipe]
        if saved != self.compared:
            known = ", ".join(f"{one.name!r} ({one.share:g})" for one in saved) or "none"
            raise ValueError(
                f"the report was made with the recipes {known}; give the same ones, from the same files and with the "
                "same optimizers and start weights, to continue it."
            )

    def _within(self, candidate: Candidate, seed: int, share: float) -> None:
        self.tell("tuning", round(self.report.spent_seconds), round(self.seconds), f"{candidate.name}, seed {seed}")

    def _note(self, race: Race, given: list[Finding], **update: Any) -> None:
        """Put what the race knows into the report, and save it."""
        findings = [race.findings.get(found.candidate.name, found) for found in given]
        self.report = self.report.model_copy(
            update={
                "findings": findings,
                "whole": list(race.whole),
                "runs": list(race.runs.values()),
                "spent_seconds": race.spent,
                "notes": list(race.notes),
                **update,
            }
        )
        if self.out is not None and is_first_rank():
            self.report.save(report_path(self.out))
        last = self.report.runs[-1] if self.report.runs else None
        note = "" if last is None else f"{last.name}, seed {last.seed}: {last.metric:.4g}"
        self.tell("tuning", round(race.spent), round(self.seconds), note)

    def _write(self, out: Path, extra: dict[str, Any]) -> None:
        parts = made_by(self.make, 0)
        facts = Facts.measure(parts.model, total_steps=self.report.total_steps, loop="own")
        plan = Plan.of("O0", {"extra": extra}, facts).fit(parts.model, parts.optimizer)
        if is_first_rank():  # all ranks built the model, which a wrapper may do together
            out.parent.mkdir(parents=True, exist_ok=True)
            plan.save(out)


def _frame(parts: Parts, *, total_steps: int | None, steps: int, device: torch.device, **given: Any) -> TuneReport:
    return TuneReport(
        model=type(parts.model).__name__,
        parameters=sum(param.numel() for param in parts.model.parameters()),
        steps=steps,
        total_steps=steps if total_steps is None else _checked_total(total_steps, steps),
        environment=environment(device),
        fingerprint=fingerprint_of(parts),
        **given,
    )


def _check_building(seconds: float, budget: float) -> None:
    """Raise ``FactoryError`` if calling the factory takes most of the budget."""
    seconds = from_first_rank(seconds)
    if LEAST_CALLS * seconds > budget:
        raise FactoryError(
            f"the factory takes {seconds:.1f} s, and a tuning calls it {LEAST_CALLS} times at least, but the budget is "
            f"{budget:.0f} s. Load data once, outside of the factory, or allow more time."
        )


def _checked_total(total_steps: int, steps: int) -> int:
    if total_steps < steps:
        raise ValueError(f"total_steps: found {total_steps}; the runs that are made have {steps} steps.")
    return total_steps


def _check_free(out: Path, resume: bool) -> None:
    """Raise ``ValueError`` if the files cannot be written, or would replace something."""
    report = report_path(out)
    if not is_first_rank():
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"out: {out.parent} cannot be a folder: {error.strerror}.") from error
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"out: {out.parent} cannot be written to; choose another folder.")
    if report.is_dir():
        raise ValueError(f"{report} is a folder, and the report must be saved there; choose another file.")
    if report.exists() and not resume:
        raise ValueError(f"{report} exists; continue it with resume=True, or choose another file.")
    if out.exists() and not report.exists():
        raise ValueError(f"{out} exists and is not from a tuning, since {report.name} is missing; choose another file.")


def _check_functions(make: Any, progress: Any) -> None:
    if not callable(make):
        raise TypeError(f"make: found {make!r}; give a function of a seed.")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: found {progress!r}; give a function of (phase, done, total, note), or None.")


def _check_arguments(
    *, title: str, drop: float, epochs: int, total_steps: int | None, seeds: int, error: float
) -> None:
    if not isinstance(title, str):
        raise TypeError(f"title: found {title!r}; give a text.")
    check_number("drop", drop, above=True)
    check_count("epochs", epochs, of="passes over the batches")
    check_count("seeds", seeds, of="seeds per comparison")
    if not LEAST_SEEDS <= seeds <= MOST_SEEDS:
        raise ValueError(f"seeds: found {seeds}; give a number from {LEAST_SEEDS} to {MOST_SEEDS}.")
    if total_steps is not None:
        check_count("total_steps", total_steps, of="updates")
    if not is_number(error) or not LEAST_ERROR <= error < MOST_ERROR:
        raise ValueError(f"error: found {error!r}; give a number from {LEAST_ERROR} to below {MOST_ERROR}.")


def _steps(epochs: int, parts: Parts, seconds: float) -> int:
    steps = epochs * count_of(parts.batches, seconds)
    if steps < LEAST_STEPS:
        raise FactoryError("a run has one step, of which no speed is known; give more batches, or more epochs.")
    return steps


def _agreed(steps: int) -> int:
    """Return the steps of a run, which must be those of all ranks.

    Raises:
        RankDisagreementError: They are not, so the ranks would wait for each other without end.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        agreement = Agreement(range(dist.get_world_size()), subject="tune")
        agreement.check({"the number of steps of a run": steps}, hint="Give all ranks equally many batches.")
        agreement.close()
    return steps


def _silent(phase: str, done: int, total: int, note: str = "") -> None:
    return None
