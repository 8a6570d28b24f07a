"""The data of a measurement: plain, frozen values that are saved as JSON and drawn by the report.

Times are seconds, ratios are pure numbers (above 1: faster than the baseline), accuracies lie in [0, 1].
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from torchboost.core.files import write_whole

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
    "Record",
    "SavedRecord",
]


class Record(BaseModel):
    """A frozen value whose fields are checked."""

    # A diverged run has losses that are not numbers. JSON keeps them as strings.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class SavedRecord(Record):
    """A record with a file of its own."""

    def save(self, path: str | Path) -> Path:
        """Write the record as JSON, completely or not at all, and return the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{self.text()}\n".encode())
        return path

    def text(self) -> str:
        """Return the text that :meth:`save` writes."""
        return self.model_dump_json(indent=1)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the text of :meth:`save`. Raise ``pydantic.ValidationError`` for another format or encoding."""
        return cls.model_validate_json(Path(path).read_bytes())


class Interval(Record):
    """An estimate with its confidence interval, ``low <= mid <= high``."""

    low: float
    mid: float
    high: float
    confidence: float = 0.95

    @property
    def inverse(self) -> Interval:
        """The interval of one over the quantity, which must be positive."""
        return Interval(low=1 / self.high, mid=1 / self.mid, high=1 / self.low, confidence=self.confidence)


class Environment(Record):
    """The machine and the versions of a result.

    ``instructions`` are the vector instructions that torch computes with. Earlier files do not tell them.
    """

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
    instructions: str = ""


class AlgorithmRow(Record):
    """An algorithm that was on, with its settings as text."""

    name: str
    settings: str


class DroppedRow(Record):
    """A requested algorithm that was dropped, with the reason."""

    name: str
    reason: str


class Curve(Record):
    """One training run, with one point per evaluation. All lists have the same length.

    ``seconds`` is the training time without evaluation. Set-up, such as compilation, is in ``setup_seconds``.
    ``peak_bytes`` is how far the memory rose in the whole run. None if the system does not tell.
    """

    seed: int
    epochs: list[float]
    seconds: list[float]
    train_loss: list[float]
    metric: list[float]
    setup_seconds: float = 0.0
    peak_bytes: int | None = None

    @property
    def final(self) -> float:
        """The last metric. NaN without one or if the last loss is NaN, because NaN logits have an accuracy too."""
        sound = all(math.isfinite(loss) for loss in self.train_loss[-1:])
        return self.metric[-1] if self.metric and sound else math.nan


class Ratio(Record):
    """Paired ratio ``baseline time / contestant time`` with a bootstrap interval.

    ``detectable`` is the smallest gain that these pairs would have shown in four of five repetitions (0.03 is 3 %).
    None if there are too few pairs.
    """

    baseline: str
    interval: Interval
    pairs: int
    detectable: float | None = None


class Quality(Record):
    """Whether the accuracy was kept: the final metric against a baseline's, paired by seed. Higher is better.

    ``difference`` is contestant minus baseline in units of the metric, with the sign changed if lower is better. Each
    bound is one-sided at its confidence. ``passed`` means that the lower bound is above ``-margin``. ``detectable`` is
    the smallest drop that these seeds would have shown in four of five repetitions.
    """

    baseline: str
    difference: Interval
    margin: float
    seeds: int
    passed: bool
    detectable: float


class Contestant(Record):
    """One way to train the model, with all of its measurements.

    ``source`` tells apart the versions of a configuration.
    """

    name: str
    kind: Literal["stock", "hand", "level", "algorithm", "config"]
    algorithms: list[AlgorithmRow] = []
    dropped: list[DroppedRow] = []
    step_seconds: Interval
    samples: list[float]
    ratios: list[Ratio] = []
    warmup_seconds: float = 0.0
    curves: list[Curve] = []
    quality: list[Quality] = []
    notes: list[str] = []
    source: str = ""


class BenchReport(SavedRecord):
    """The result of one benchmark: several contestants on one workload in one process.

    ``metric_name`` is "metric" for the metric of a user, whose units are not known. ``source`` tells apart the versions
    of the user's file that defines the workload, ``fingerprint`` models and optimizers, and ``data`` the first batches,
    all of seed 0. Earlier files do not have the last two.
    """

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
    source: str = ""
    fingerprint: str = ""
    data: str = ""
