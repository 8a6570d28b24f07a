"""The decisions about the speed levers, as values that are saved as JSON."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from torchboost.core.algorithm import Algorithm
from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import device_name, package_version, processor_name

WASTE = "boosted.waste(*inputs), or boosted.waste(**batch) for a dict,"
"""The call that measures a batch, as the loop calls the model."""

SEEMS_FASTER = 1.02
"""From this ratio on a step seems to be faster, also if its interval does not exclude 1."""

_NOT_TOGETHER = "the gain of all together was not measured, since no time was left"

Source = Literal["trial", "checkpoint", "prior"]
"""Where a choice comes from."""


class _Record(BaseModel):
    # Checkpoints of earlier versions have further entries.
    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")


def machine_of(device: torch.device | str) -> dict[str, str | int]:
    """Describe the machine and versions that a measured choice depends on, besides the model and its inputs."""
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
        "torch": torch.__version__,
        "torchboost": package_version(),
    }


class Verdict(_Record):
    """The decision about one lever, and the reason.

    Attributes:
        lever: Name of the algorithm in the registry.
        kept: Whether it is on.
        reason: One sentence without its full stop.
        ratio: How many times as fast a step is with the lever as without it, both with the levers kept before it. None
            if it was not measured.
        pairs: Number of paired steps behind the ratio.
        price: Seconds that it costs once, such as for a compilation. 0 if it is not tried or costs nothing.
        form: The settings of the lever that the trial preferred, as code. Empty for the settings of the level.
        check: How far its step was found to be from the plain one, in words. Empty if it is off.
        before: Whether the model or the loop had the same before.
        untried: Whether there was no time to try it.
        undecided: Whether its pairs did not decide in the time that there was.
        longer: Seconds of a trial that may suffice for it. 0 if this one did, or if time would not help.
    """

    lever: str
    kept: bool
    reason: str
    ratio: Interval | None = None
    pairs: int = 0
    price: float = 0.0
    form: str = ""
    check: str = ""
    before: bool = False
    untried: bool = False
    undecided: bool = False
    longer: int = 0

    @property
    def found(self) -> str:
        """The reason, with the interval and the number of pairs behind it if it was measured and does not say them."""
        if self.ratio is None or self.reason.startswith(f"{self.pairs} "):
            return self.reason
        return f"{self.reason} ({self.ratio.low:.2f} to {self.ratio.high:.2f}, {self.pairs} pairs)"

    def but(self, **changes: Any) -> Self:
        """Return the same with other entries."""
        return self.model_copy(update=changes)


class Choice(_Record):
    """The decision about all levers of a level.

    Attributes:
        verdicts: One for each lever, in the order of the trial.
        source: Where the choice comes from.
        seconds: Time that the trial took.
        budget: Time that the trial was allowed to take, also if it failed. 0 if there was no trial. Unit: seconds.
        peak_bytes: Memory that the trial needed in addition to training. 0 if there was no trial.
        step_seconds: Median time of a plain step. None if it was not measured.
        ratio: How many times as fast a step of the chosen combination is as a step without levers. None if it was not
            measured.
        machine: Where it was measured: see :func:`machine_of`. None for a prior.
    """

    verdicts: tuple[Verdict, ...]
    source: Source
    seconds: float = 0.0
    budget: float = 0.0
    peak_bytes: int = 0
    step_seconds: float | None = None
    ratio: Interval | None = None
    machine: dict[str, str | int] | None = None

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> Self | None:
        """Return the choice of levers in a checkpoint, measured or as they were. None if there is none.

        Raises:
            ValueError: It is damaged.
        """
        key = next((key for key in ("choice", "levers") if key in state), None)
        if key is None:
            return None
        try:
            if key == "choice":
                saved = cls.model_validate({**json.loads(state[key]), "source": "checkpoint"})
                where = "off as in the run of the checkpoint, where"  # says nothing about this program
                before = [verdict for verdict in saved.verdicts if verdict.before]
                return saved.changed({v.lever: {"before": False, "reason": f"{where} {v.reason}"} for v in before})
            verdicts = tuple(_as_it_was(name, on) for name, on in state[key].items())
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{key}: the checkpoint holds {str(state[key])[:60]!r}, which says nothing about switches; load "
                f"another checkpoint, or this state without its key {key!r}: the first training call measures again."
            ) from error
        return cls(verdicts=verdicts, source="checkpoint")

    def changed(self, changes: Mapping[str, Mapping[str, Any]]) -> Self:
        """Return the same with other entries in the verdicts about some levers, by name."""
        verdicts = tuple(v.model_copy(update=changes.get(v.lever)) for v in self.verdicts)
        return self.model_copy(update={"verdicts": verdicts})

    def only(self, levers: Iterable[Algorithm]) -> Self:
        """Return the same without the verdicts about other levers."""
        names = {lever.name for lever in levers}
        return self.model_copy(update={"verdicts": tuple(v for v in self.verdicts if v.lever in names)})

    def figures(self) -> dict[str, float]:
        """Return each lever as 1 or 0, how many times as fast a step is, if known, and the seconds of the trial."""
        figures = {f"boost/{verdict.lever}": float(verdict.kept) for verdict in self.verdicts}
        if self.ratio is not None:
            figures["boost/times_as_fast"] = self.ratio.mid
        return {**figures, "boost/trial_seconds": self.seconds if self.source == "trial" else 0.0}

    @property
    def levers(self) -> dict[str, bool | str]:
        """Lever -> whether it is on, or its form. :meth:`saved` reads this under ``"levers"``."""
        return {verdict.lever: verdict.kept and (verdict.form or True) for verdict in self.verdicts}

    @property
    def kept(self) -> frozenset[str]:
        """Names of the levers that are on."""
        return frozenset(verdict.lever for verdict in self.verdicts if verdict.kept)

    @property
    def gain(self) -> str:
        """The ratio as a clause. Empty if it was not measured."""
        if self.ratio is None:
            return ""
        low, high = f"{self.ratio.low:.2f}", f"{self.ratio.high:.2f}"
        return f"together a step is {self.ratio.mid:.2f} times as fast as in your loop without them ({low} to {high})"

    @property
    def gains(self) -> bool:
        """Whether levers are on that gain something: all together, or one by itself if that was not measured."""
        if self.ratio is not None:
            return bool(self.kept) and self.ratio.low > 1
        return any(verdict.kept and verdict.pairs and not verdict.undecided for verdict in self.verdicts)

    @property
    def measured(self) -> str:
        """How it was measured, with the gain of all together, in a line. Empty if nothing was measured."""
        unknown = f"; {_NOT_TOGETHER}" if self.kept and self.ratio is None else ""
        trial = f"measured at the first training call in {in_seconds(self.seconds)}{unknown}"
        where = {"trial": trial, "checkpoint": "as in the checkpoint", "prior": ""}[self.source]
        return ", ".join(text for text in (self.gain, where) if text)

    def longer(self, call: str = "boost", but: Container[str] = ()) -> str:
        """Return which levers had too little time in a trial, and which call gives them more. Empty if none of them."""
        short = [v for v in self.verdicts if v.longer and v.lever not in but] if self.source == "trial" else []
        if not short:
            return ""
        seconds = max(verdict.longer for verdict in short)
        names = ", ".join(verdict.lever for verdict in short)
        return f"too little time for {names}: {call}(..., calibrate={seconds}) measures for up to {seconds} s"

    def summary(self, untimed: str = "") -> str:
        """Return the result of a trial, and what to do next, in a line. ``untimed`` names what was on in all steps."""
        on = ", ".join(verdict.lever for verdict in self.verdicts if verdict.kept)
        off = ", ".join(verdict.lever for verdict in self.verdicts if not (verdict.kept or verdict.before))
        off = f"off: {off}" if off else ""
        if self.source == "prior":
            parts = ("the trial failed, so rules chose", f"on: {on}" if on else "", off)
            return f"{'; '.join(filter(None, parts))}. boosted.explain() says why"
        gain, seconds = self.gain or _NOT_TOGETHER, in_seconds(self.seconds)
        if self.gains:
            said = "; ".join(filter(None, (on, gain, untimed, off)))
            return f"on after {seconds} of measuring: {said}. boosted.explain() says why"
        usual = ", ".join(verdict.lever for verdict in self.verdicts if verdict.untried and verdict.kept)
        tried = ", ".join(verdict.lever for verdict in self.verdicts if verdict.kept and not verdict.untried)
        parts = (f"on: {tried}" if tried else "", f"not measured, on as usual: {usual}" if usual else "")
        found = "; ".join(filter(None, (*parts, gain if tried or self.ratio else "", untimed, off)))
        lead, more = self._undecided(seconds), max((verdict.longer for verdict in self.verdicts), default=0)
        if more:
            return f"{lead}; calibrate={more} measures longer ({found}). boosted.explain() says why"
        return f"{lead} ({found}). boosted.explain() says why, and {WASTE} shows what a step spends its time on"

    def _undecided(self, seconds: str) -> str:
        """Say that a trial without a gain found none, or could not."""
        missed = ", ".join(verdict.lever for verdict in self.verdicts if verdict.untried and not verdict.kept)
        if any(verdict.untried for verdict in self.verdicts):
            return f"{seconds} of measuring did not suffice{f': no time for {missed}' if missed else ''}"
        if self.kept and (self.ratio is None or self.ratio.mid >= SEEMS_FASTER):
            return f"{seconds} of measuring did not decide"
        return f"no gain was found in {seconds} of measuring"

    def measured_elsewhere(self, device: torch.device) -> str:
        """Return how the machine of a checkpoint differs from this one, and what to do. Empty if it does not."""
        here, there = machine_of(device), self.machine or {}
        pairs = [(name, there[name], here.get(name)) for name in there if there[name] != here.get(name)]
        differences = "; ".join(f"{name}: found {before}, here {now}" for name, before, now in pairs)
        if not differences:
            return ""
        return (
            f"the switches of the checkpoint were measured elsewhere ({differences}). They are used without a new "
            'trial. To measure here, boost again and load the state without its key "choice"; to choose, name them in '
            'boost(..., config={"extra": {...}}).'
        )


def _as_it_was(lever: str, on: Any) -> Verdict:
    form = on if isinstance(on, str) and on.startswith(f"{lever}(") else ""
    kept: Any = True if form else on
    return Verdict(lever=lever, kept=kept, form=form, reason="as in the checkpoint")


def in_seconds(number: float) -> str:
    """Return a time in words, with a digit behind the point if it is short, or in milliseconds."""
    if 0 < number < 0.05:
        return f"{1e3 * number:.2g} ms"
    return f"{number:.0f} s" if number >= 10 else f"{number:.1f} s"
