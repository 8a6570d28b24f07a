"""Train to a result: watch the metric of a run, and say when it is as good as stock's at its end."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchboost.bench.verdict import stock_of
from torchboost.core.arguments import check_number, is_number
from torchboost.guard import checked_state
from torchboost.measure.evidence import BenchReport
from torchboost.measure.statistics import LEAST_SPREAD, ChangeTest, t_quantile
from torchboost.tuning.report import TuneReport

_LOG = logging.getLogger("torchboost")

OF_STOCK = 0.8
"""Share of the error for the mean of stock. The rest is for the run."""

EVERY = 4
"""A test begins each time after this number of evaluations that count."""


class Goal:
    """Says when the metric of a run has reached stock's, so that the run can end.

    Let ``m`` be the mean metric of stock at its end, over all seeds. An evaluation of the run varies about a level,
    which changes as the run learns. If :meth:`update` returns True, the level has reached ``m - drop``. The probability
    that it ever returns True in a run whose level has not been there is at most ``error``, however often it is called.
    This holds for the run, not for other seeds of it.

    ``m`` is not known. Its upper bound comes from the finals by Student's distribution, with four fifths of the error.
    So the level must exceed :attr:`target`, which is that bound minus ``drop``. An evaluation counts if the one before
    it was better than the target. A test that is valid at every look has the rest of the error. It needs at least eight
    evaluations that are better than the target.

    The finals are assumed to be independent and normally distributed. The evaluations are assumed to vary independently
    about the level, symmetrically. If neighbouring evaluations differ in the same direction by chance, as evaluations a
    few steps apart do, errors become more frequent: see ``docs/guard.md``. A spread of the finals below a third of
    ``drop`` counts as a third.

    Under ``torch.distributed`` each rank decides for itself: give all of them the same number.

    Args:
        like: The metric of at least two runs of stock at their end, with different seeds. Or the path of a JSON file:
            a report of ``torchboost tune``, from which it takes the confirmation's runs of stock, a report of
            ``torchboost bench``, or a list of numbers.
        drop: How far below stock the level may be, in units of the metric. With 0 it must be above stock's.
        error: Largest probability of a false True.
        higher_is_better: None takes the direction of the report, and True for a list.
        log: Called with the result as text. By default the logger ``"torchboost"``.

    Attributes:
        finals: The metrics of stock.
        target: The bound that the level must exceed, in units of the metric.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, the file holds no finals of stock, they are fewer than two, not all
            finite or of the other direction.
        FileNotFoundError: There is no such file.

    Warns:
        UserWarning: The finals differ so much that even a run which is as good as their mean cannot be shown to be. Or
            the first evaluation is far better than all of them, as with other units or the wrong direction.

    Example:
        >>> import torchboost
        >>> goal = torchboost.Goal([0.912, 0.915, 0.911, 0.914, 0.913], drop=0.005)
        >>> for epoch in range(30):
        ...     metric = 0.9 + 0.001 * epoch  # train for an epoch, and evaluate on the data of stock's finals
        ...     if goal.update(metric):
        ...         break
        >>> epoch
        20
    """

    def __init__(
        self,
        like: Sequence[float] | str | os.PathLike[str],
        *,
        drop: float,
        error: float = 0.05,
        higher_is_better: bool | None = None,
        log: Callable[[str], object] | None = None,
    ) -> None:
        if log is not None and not callable(log):
            raise TypeError(f"log: found {log!r}; give a function of a text, such as print.")
        if higher_is_better not in (None, True, False):
            raise TypeError(f"higher_is_better: found {higher_is_better!r}; give True, False or None.")
        check_number("drop", drop)
        if not is_number(error) or not 0 < error < 1:
            raise ValueError(f"error: found {error!r}; give a probability between 0 and 1.")
        direction: bool | None = None
        source = "like"
        if isinstance(like, (str, os.PathLike)):
            source = f"like: {os.fspath(like)!r}"
            like, direction = _read(Path(like))
        if None not in (direction, higher_is_better) and direction != higher_is_better:
            raise ValueError(
                f"{source} says that {_better(direction)} values of the metric are better, and higher_is_better is "
                f"{higher_is_better}; leave it out, and give update() the metric as it is in the report."
            )
        self._sign, self._drop = -1.0 if False in (direction, higher_is_better) else 1.0, drop
        self._log = _LOG.info if log is None else log
        self.finals = _checked(like, source)
        mean, spread = statistics.fmean(self.finals), max(statistics.stdev(self.finals), LEAST_SPREAD * drop)
        if spread == 0:
            raise ValueError(
                f"{source}: found {len(self.finals)} equal finals and drop=0, so the seeds seem not to differ; give "
                "finals of runs with other seeds, or a drop above 0."
            )
        count = len(self.finals)
        reach = t_quantile(1 - OF_STOCK * error, count - 1) * spread / math.sqrt(count)
        self.target = mean + self._sign * (reach - drop)
        if reach >= drop > 0:
            warnings.warn(
                f"{source}: the {count} finals of stock, {mean:.4g} on average, differ so much that the run must be "
                f"better than that by {reach - drop:.2g} to count as equal; give finals of more seeds, or accept a "
                "larger drop.",
                UserWarning,
                stacklevel=2,
            )
        self._state = _State(self.target, ChangeTest((1 - OF_STOCK) * error, every=EVERY))

    @property
    def reached(self) -> bool:
        """Whether :meth:`update` has returned True."""
        return self._state.reached

    def update(self, metric: Tensor | float) -> bool:
        """Take an evaluation, and return whether the run can end. Once True, it remains True.

        A metric that is not finite discards the evidence, and tests begin again with half of the error.

        Args:
            metric: Of shape ``()``, on the data and in the units of the finals.

        Raises:
            ValueError: ``metric`` has more than one entry, or none.
        """
        shape = tuple(metric.shape) if isinstance(metric, Tensor) else ()
        if math.prod(shape) != 1:
            raise ValueError(f"metric: found the shape {shape}; give one number, such as its mean.")
        value, state = float(metric), self._state
        state.evaluations += 1
        if not math.isfinite(value):
            if state.test.count:
                state.test = ChangeTest(state.test.error / 2, every=EVERY)
            state.counts = False
            return state.reached
        if state.evaluations == 1 and self._is_strange(value):
            warnings.warn(
                f"metric: the first evaluation, {value:.4g}, is far {_better(self._sign > 0)}, and so better, than all "
                f"finals of stock, {min(self.finals):.4g} to {max(self.finals):.4g}; give both in the same units, and "
                "pass higher_is_better=False if lower is better.",
                UserWarning,
                stacklevel=2,
            )
        excess = self._sign * (value - self.target)
        shown, state.counts = state.counts and state.test.add(excess), excess > 0
        if shown and state.counts and not state.reached:
            state.reached = True
            self._log(
                f"goal: reached after {state.evaluations} evaluations: the last one is {value:.4g}, stock ends at "
                f"{statistics.fmean(self.finals):.4g}, the mean of {len(self.finals)} runs, and the level must be "
                f"{'above' if self._sign > 0 else 'below'} {self.target:.4g}."
            )
        return state.reached

    def _is_strange(self, first: float) -> bool:
        """Whether the first evaluation is better than the best of the finals by more than they differ and the drop."""
        low, high = min(self.finals), max(self.finals)
        excess = first - high if self._sign > 0 else low - first
        return excess > max(high - low, self._drop)

    def figures(self) -> dict[str, float]:
        """Return the state for a log: target, evidence, and whether the goal is reached."""
        return {
            "goal/target": self.target,
            "goal/evidence": self._state.test.evidence,
            "goal/reached": float(self.reached),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return asdict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint.

        Raises:
            ValueError: The state is not complete, a part of it is damaged, or it belongs to another target. Nothing is
                loaded.
        """
        loaded = checked_state(_State, state, of="Goal")
        if loaded.target != self.target:
            raise ValueError(
                f"the state is that of a goal with the target {loaded.target:.6g}, and this one has "
                f"{self.target:.6g}; give the same like, drop and error, or begin with a new goal."
            )
        self._state = loaded


@dataclass
class _State:
    """The state of a goal in a checkpoint. ``counts``: whether the next evaluation counts."""

    target: float
    test: ChangeTest
    counts: bool = False
    evaluations: int = 0
    reached: bool = False


def _better(higher: bool | None) -> str:
    return "higher" if higher else "lower"


def _read(path: Path) -> tuple[list[Any], bool | None]:
    """Return stock's finals, and whether higher is better, if the file says so."""
    try:
        text = path.read_bytes()
        data = json.loads(text)
        if isinstance(data, list):
            return data, None
        if isinstance(data, dict) and "contestants" in data:
            report = BenchReport.model_validate_json(text)
            stock = stock_of(report)
            finals = [curve.final for curve in stock.curves] if stock else []
            return finals, report.metric_higher_is_better
        if isinstance(data, dict) and "runs" in data:
            return TuneReport.load(path).stock_finals(), True
    except ValueError as error:  # of JSON, of the encoding or of a report
        raise ValueError(f"like: {str(path)!r} cannot be read: {error}; {_FILES}") from error
    raise ValueError(f"like: {str(path)!r} holds no finals of stock; {_FILES}")


_FILES = "give a report of torchboost tune or bench, or a JSON list of the metrics of stock at the end of its runs."


def _checked(like: Any, source: str) -> list[float]:
    try:
        if isinstance(like, Mapping):  # its keys are numbers too
            raise TypeError("found a mapping")
        finals = [float(value) for value in like]
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{source}: found {like!r}; give the metrics of stock at the end of its runs, one number per run."
        ) from error
    if len(finals) < 2:
        raise ValueError(
            f"{source}: found {len(finals)} final metrics of stock; a goal needs at least two, better five, of runs "
            "with different seeds, because fewer do not tell how much the seeds differ."
        )
    if not all(map(math.isfinite, finals)):
        raise ValueError(f"{source}: found finals that are not finite in {finals}; stock must have come to its end.")
    return finals
