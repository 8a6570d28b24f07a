"""What a measurement leaves behind: plain, frozen data that is saved as JSON and drawn by the report.

Times are seconds, ratios are pure numbers (above 1: faster than the baseline), accuracies lie in [0, 1].
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = [
    "AlgorithmRow",
    "BenchReport",
    "Contestant",
    "Curve",
    "DroppedRow",
    "Environment",
    "Interval",
    "Quality",
    "Ratio",
]


class _Record(BaseModel):
    # A run that diverged has losses that are not numbers; as strings they survive the way through JSON.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Interval(_Record):
    """An estimate with its confidence interval, ``low <= mid <= high``."""

    low: float
    mid: float
    high: float
    confidence: float = 0.95


class Environment(_Record):
    """Machine and versions a result belongs to."""

    torchboost: str
    torch: str
    python: str
    platform: str
    processor: str
    cores: int
    threads: int
    device: str
    commit: str
    date: str


class AlgorithmRow(_Record):
    """An algorithm that was on, as its settings print."""

    name: str
    settings: str


class DroppedRow(_Record):
    """An algorithm that was asked for and left out, with the reason."""

    name: str
    reason: str


class Curve(_Record):
    """One training run: a point per evaluation, all lists of equal length.

    ``seconds`` is training time alone, evaluation excluded; set-up such as compiling is in ``setup_seconds``.
    """

    seed: int
    epochs: list[float]
    seconds: list[float]
    train_loss: list[float]
    metric: list[float]
    setup_seconds: float = 0.0

    @property
    def final(self) -> float:
        """The last metric; NaN if there is none or the loss is no number, as NaN logits have an accuracy too."""
        sound = all(math.isfinite(loss) for loss in self.train_loss[-1:])
        return self.metric[-1] if self.metric and sound else math.nan


class Ratio(_Record):
    """Paired ratio ``baseline time / contestant time`` with a bootstrap interval.

    ``detectable`` is the smallest gain these pairs would have shown in four of five repetitions (0.03: 3 %);
    None where there are too few pairs to say.
    """

    baseline: str
    interval: Interval
    pairs: int
    detectable: float | None = None


class Quality(_Record):
    """Whether the accuracy held: final metric against a baseline's, paired by seed, higher is better.

    ``difference`` is contestant minus baseline in units of the metric (sign turned where lower is better),
    each bound one-sided at its confidence. ``passed``: its low end lies above ``-margin``. ``detectable`` is
    the smallest drop these seeds would have shown in four of five repetitions.
    """

    baseline: str
    difference: Interval
    margin: float
    seeds: int
    passed: bool
    detectable: float


class Contestant(_Record):
    """One way of training the same model, with everything measured of it."""

    name: str
    kind: Literal["stock", "hand", "level", "algorithm"]
    algorithms: list[AlgorithmRow] = []
    dropped: list[DroppedRow] = []
    step_seconds: Interval
    samples: list[float]
    ratios: list[Ratio] = []
    warmup_seconds: float = 0.0
    curves: list[Curve] = []
    quality: list[Quality] = []
    notes: list[str] = []


class BenchReport(_Record):
    """The result of one benchmark: several contestants on one workload in one process."""

    format: Literal[1] = 1
    title: str
    workload: str
    model: str
    parameters: int
    batch: int
    metric_name: str
    metric_higher_is_better: bool = True
    epochs: int = 0
    train_samples: int = 0
    environment: Environment
    contestants: list[Contestant]
    notes: list[str] = []

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON, whole or not at all, and return the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(path.suffix + ".partial")
        partial.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        return partial.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> BenchReport:
        """Read what :meth:`save` wrote; a file of another format or encoding is a ``pydantic.ValidationError``."""
        return cls.model_validate_json(Path(path).read_bytes())
