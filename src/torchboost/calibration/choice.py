"""What a trial found out: one verdict for each lever, as values that are saved as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from torchboost.core.algorithm import Algorithm
from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import device_name, package_version, processor_name

__all__ = ["Choice", "Machine", "Source", "Verdict"]

Source = Literal["trial", "cache", "checkpoint", "prior"]
"""Where a choice comes from."""

_Device: TypeAlias = torch.device | str  # inside of Machine, torch is the name of a field


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Machine(_Record):
    """What a measured choice depends on besides the model and its inputs."""

    processor: str
    threads: int
    device: str
    torch: str
    torchboost: str

    @classmethod
    def of(cls, device: _Device) -> Self:
        """Describe this machine and process, with the device that trains."""
        return cls(
            processor=processor_name(),
            threads=torch.get_num_threads(),
            device=device_name(device),
            torch=torch.__version__,
            torchboost=package_version(),
        )

    def differences(self, here: Machine) -> str:
        """Return each field that differs, as it was found and as it is ``here``; empty if the machines are equal."""
        found, own = self.model_dump(), here.model_dump()
        return "; ".join(f"{name}: found {found[name]}, here {own[name]}" for name in own if found[name] != own[name])


class Verdict(_Record):
    """What is decided about one lever, and why.

    Attributes:
        lever: Name of the algorithm in the registry.
        kept: Whether it is on.
        reason: One sentence without its full stop.
        ratio: How many times as fast a step is with the lever as without it, both with the levers kept before it. None
            if it was not measured.
        pairs: Number of paired steps behind the ratio.
        price: Seconds that it costs once, such as those of a compilation; 0 if it is not tried or costs nothing.
        interrupted: Whether its first steps took longer than the trial had left. The compiler keeps parts of its work
            on disk, so a later start may come to a decision.
        form: The settings of the lever that the trial preferred, as code; empty for those of the level.
        check: How far its step was found to be from the plain one, in words; empty if it is off.
    """

    lever: str
    kept: bool
    reason: str
    ratio: Interval | None = None
    pairs: int = 0
    price: float = 0.0
    interrupted: bool = False
    form: str = ""
    check: str = ""


class Choice(_Record):
    """The decision about all levers of a level.

    Attributes:
        verdicts: One for each lever, in the order of the trial.
        source: Where the choice comes from.
        seconds: Time that the trial took.
        budget: Time that the trial was allowed to take; 0 if there was no trial. Unit: seconds.
        peak_bytes: Memory that the trial needed in addition to that of training; 0 if there was no trial.
        step_seconds: Median time of a step of the chosen combination; None if it was not measured.
        ratio: How many times as fast a step of the chosen combination is as the plain step; None if not measured.
        machine: Where it was measured; None for a prior.
    """

    verdicts: tuple[Verdict, ...]
    source: Source
    seconds: float = 0.0
    budget: float = 0.0
    peak_bytes: int = 0
    step_seconds: float | None = None
    ratio: Interval | None = None
    machine: Machine | None = None

    @classmethod
    def saved(cls, state: Mapping[str, Any]) -> Self | None:
        """Return what a checkpoint says about the levers, measured or as they were; None if it says nothing.

        Raises:
            ValueError: It is damaged.
        """
        key = next((key for key in ("choice", "levers") if key in state), None)
        if key is None:
            return None
        try:
            if key == "choice":
                return cls.model_validate_json(state[key]).model_copy(update={"source": "checkpoint"})
            verdicts = tuple(_as_it_was(name, on) for name, on in state[key].items())
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{key}: the checkpoint holds {str(state[key])[:60]!r}, which says nothing about levers; load another "
                f"checkpoint, or this state without its key {key!r}, and the first training call measures again."
            ) from error
        return cls(verdicts=verdicts, source="checkpoint")

    def only(self, levers: Iterable[Algorithm]) -> Self:
        """Return the same without the verdicts about other levers."""
        names = {lever.name for lever in levers}
        return self.model_copy(update={"verdicts": tuple(v for v in self.verdicts if v.lever in names)})

    @property
    def levers(self) -> dict[str, bool | str]:
        """Lever -> whether it is on, or its form; what :meth:`saved` reads under ``"levers"``."""
        return {verdict.lever: verdict.kept and (verdict.form or True) for verdict in self.verdicts}

    @property
    def kept(self) -> frozenset[str]:
        """Names of the levers that are on."""
        return frozenset(verdict.lever for verdict in self.verdicts if verdict.kept)


def _as_it_was(lever: str, on: Any) -> Verdict:
    form = on if isinstance(on, str) and on.startswith(f"{lever}(") else ""
    kept: Any = True if form else on
    return Verdict(lever=lever, kept=kept, form=form, reason="as in the checkpoint")
