"""What a measurement leaves behind: plain, frozen data that is saved as JSON and drawn by the report.

Times are seconds, ratios are pure numbers (above 1: faster than the baseline), accuracies lie in [0, 1].
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["AlgorithmRow", "BenchReport", "Contestant", "Curve", "DroppedRow", "Environment", "Interval", "Ratio"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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


class Ratio(_Record):
    """Paired ratio ``baseline time / contestant time`` with a bootstrap interval."""

    baseline: str
    interval: Interval
    pairs: int


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
        """Read what :meth:`save` wrote; a file of another format is a ``pydantic.ValidationError``."""
        return cls.model_validate_json(Path(path).read_text(encoding="utf-8"))
