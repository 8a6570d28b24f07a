"""Watch the loss of a boosted run and its metric, and withdraw what hurts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor

from torchboost.distributed.shared import mean_over_ranks
from torchboost.front import Boosted
from torchboost.measure.anytime import AnytimeTest

__all__ = ["Guard"]

_LOG = logging.getLogger("torchboost")

TOLERANCE, TOLERANCE_OF_TREND = 0.05, 0.25

_TINY = 1e-12


class Guard:
    """Compares the training loss with a reference, and withdraws algorithms while the run is worse.

    The loss is averaged over blocks of steps. Each block gives its excess over a reference, as a share of it, minus
    ``tolerance``. If a test that is valid at every look finds that the mean excess is above 0, one algorithm is
    withdrawn by its ``remove()``: gradient freezing first, then reduced precision, then centralised gradients. The test
    begins again, with half of the error rate. A loss that is not finite withdraws at once. What cannot be withdrawn,
    such as BatchNorm layers that were removed, is named in the log. If ``drop`` is given, a metric is watched too, see
    :meth:`update_metric`.

    Under ``torch.distributed`` all ranks of the default group make the same calls. The loss is averaged over them, so
    all withdraw the same algorithm at the same step.

    Cost: an addition per step on the device of the loss; one synchronisation, and across ranks one collective of a
    single number, per block.

    Args:
        boosted: What :func:`torchboost.boost` returned.
        reference: The loss of the stock loop at every step, from a run or a prefix of one with the same seed and data;
            after its end nothing is compared. :meth:`TuneReport.stock_losses` has those of a tuning, whose runs must
            have been as long as this one. Or ``"trend"``: the lowest block of this run so far, which finds runs that
            get worse, not runs that learn slowly.
        tolerance: Excess that is accepted, as a share of that loss. None takes 0.05, and 0.25 for ``"trend"``,
            because the lowest block is below the mean by chance.
        drop: Excess of the metric that is accepted, in its own units; None if no metric is watched.
        error: Probability of a false alarm in the whole run, for blocks that vary independently. If a metric is
            watched, each of the two tests gets half.
        block: Steps per block.
        log: Called with every decision as text; by default the logger ``"torchboost"``.

    Raises:
        ValueError: An argument is out of range, or ``reference`` is not finite or empty.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Linear(4, 2)
        >>> boosted = torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O0")
        >>> guard = torchboost.Guard(boosted)
        >>> for _ in range(3):
        ...     loss = boosted.model(torch.randn(8, 4)).square().mean()
        ...     loss.backward()
        ...     boosted.optimizer.step()
        ...     boosted.optimizer.zero_grad()
        ...     withdrawn = guard.update(loss)
    """

    def __init__(
        self,
        boosted: Boosted,
        reference: Sequence[float] | Literal["trend"] = "trend",
        *,
        tolerance: float | None = None,
        drop: float | None = None,
        error: float = 0.01,
        block: int = 20,
        log: Callable[[str], object] | None = None,
    ) -> None:
        if tolerance is None:
            tolerance = TOLERANCE_OF_TREND if isinstance(reference, str) else TOLERANCE
        if not 0 <= tolerance < math.inf:
            raise ValueError(f"tolerance: found {tolerance!r}; give a share of the loss, at least 0.")
        if drop is not None and not 0 <= drop < math.inf:
            raise ValueError(f"drop: found {drop!r}; give a number in units of the metric, at least 0.")
        if block < 1:
            raise ValueError(f"block: found {block!r}; give a number of steps, at least 1.")
        self._boosted, self._tolerance, self._drop, self._block = boosted, tolerance, drop, block
        self._reference = None if isinstance(reference, str) else _checked(reference)
        if isinstance(reference, str) and reference != "trend":
            raise ValueError(f"reference: found {reference!r}; give the losses of the stock loop, or 'trend'.")
        self._log = _LOG.warning if log is None else log
        part = error / (2 if drop is None else 4)
        self._test, self._metric_test = AnytimeTest(part), AnytimeTest(part)
        self._sum: Tensor | None = None
        self._step = self._inside = 0
        self._lowest, self._best_metric = math.inf, -math.inf
        self._excess = 0.0
        self.withdrawn: list[str] = []

    def update(self, loss: Tensor | float) -> str | None:
        """Take the loss of a step, after the update.

        Args:
            loss: Of shape ``()``; not changed.

        Returns:
            The name of the algorithm that was withdrawn now; None if nothing was.
        """
        value = torch.as_tensor(loss).detach().double()
        self._sum = value if self._sum is None else self._sum + value
        self._step, self._inside = self._step + 1, self._inside + 1
        if self._inside < self._block:
            return None
        mean = mean_over_ranks(self._sum) / self._inside
        self._sum, self._inside = None, 0
        return self._judge(mean)

    def update_metric(self, value: float, wanted: float | None = None) -> str | None:
        """Take the metric of an evaluation; the same on all ranks.

        A test needs at least seven evaluations, so this finds a lasting difference in a long run.

        Args:
            value: Higher is better.
            wanted: What the stock loop had at the same time; None for the best value of this run so far.

        Returns:
            The name of the algorithm that was withdrawn now; None if nothing was.

        Raises:
            ValueError: The guard was made without ``drop``.
        """
        if self._drop is None:
            raise ValueError(
                "update_metric: this guard watches no metric; give Guard(drop=...), in units of the metric."
            )
        if not math.isfinite(value):
            return self._withdraw(f"the metric is {value} at step {self._step}")
        self._best_metric = max(self._best_metric, value)
        lost = (self._best_metric if wanted is None else wanted) - value
        if not self._metric_test.add(lost - self._drop):
            return None
        mean = self._metric_test.total / self._metric_test.count + self._drop
        return self._withdraw(f"the metric is {mean:.4g} below its reference on average, at step {self._step}")

    def figures(self) -> dict[str, float]:
        """Return the state for a log: excess of the last block, evidence, and how many algorithms were withdrawn."""
        return {
            "guard/excess": self._excess,
            "guard/evidence": self._test.evidence,
            "guard/withdrawn": float(len(self.withdrawn)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            "test": asdict(self._test),
            "metric_test": asdict(self._metric_test),
            "step": self._step,
            "inside": self._inside,
            "sum": None if self._sum is None else float(self._sum),
            "lowest": self._lowest,
            "best_metric": self._best_metric,
            "excess": self._excess,
            "withdrawn": list(self.withdrawn),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. What had been withdrawn is withdrawn again."""
        self._test, self._metric_test = AnytimeTest(**state["test"]), AnytimeTest(**state["metric_test"])
        self._step, self._inside = int(state["step"]), int(state["inside"])
        self._sum = None if state["sum"] is None else torch.tensor(state["sum"], dtype=torch.float64)
        self._lowest, self._excess = float(state["lowest"]), float(state["excess"])
        self._best_metric = float(state["best_metric"])
        for name in state["withdrawn"]:
            if name not in self.withdrawn:
                self._boosted.withdraw(name, "it had been withdrawn when the checkpoint was written")
        self.withdrawn = list(state["withdrawn"])

    def _judge(self, mean: float) -> str | None:
        wanted = self._wanted()
        if not math.isfinite(mean):
            return self._withdraw(f"the loss is {mean} at step {self._step}")
        if self._reference is None:
            self._lowest = min(self._lowest, mean)
        if wanted is None:
            return None
        self._excess = (mean - wanted) / max(abs(wanted), _TINY)
        if not self._test.add(self._excess - self._tolerance):
            return None
        share = self._test.total / self._test.count + self._tolerance
        return self._withdraw(f"the loss is {share:.1%} above its reference on average, at step {self._step}")

    def _wanted(self) -> float | None:
        """Return the loss to compare with for the block that ends now; None if there is none."""
        if self._reference is None:
            return self._lowest if math.isfinite(self._lowest) else None
        part = self._reference[self._step - self._block : self._step]
        return sum(part) / len(part) if len(part) == self._block else None

    def _withdraw(self, reason: str) -> str | None:
        live = [
            one for one in self._boosted.plan.algorithms if one.traits.withdrawn and one.name in self._boosted.attached
        ]
        self._test, self._metric_test = AnytimeTest(self._test.error / 2), AnytimeTest(self._metric_test.error / 2)
        if not live:
            kept = ", ".join(one.name for one in self._boosted.plan.algorithms) or "nothing"
            self._log(f"guard: {reason}; nothing is left to withdraw (on: {kept}).")
            return None
        name = min(live, key=lambda one: one.traits.withdrawn).name
        self._boosted.withdraw(name, f"the guard withdrew it: {reason}")
        self.withdrawn.append(name)
        self._lowest, self._best_metric = math.inf, -math.inf  # what comes now is another run
        self._log(f"guard: {reason}; withdrew {name}.")
        return name


def _checked(reference: Sequence[float]) -> list[float]:
    losses = [float(value) for value in reference]
    if not losses or not all(map(math.isfinite, losses)):
        raise ValueError(f"reference: found {len(losses)} losses; give at least one, all of them finite.")
    return losses
