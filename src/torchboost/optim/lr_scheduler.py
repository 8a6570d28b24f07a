"""torch's learning-rate schedulers under torch's module name, with :class:`ScheduleLR` and :class:`Shortened`.

Schedules as functions of the update are in :mod:`torchboost.optim.schedules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as _torchs
from torch.optim.lr_scheduler import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchboost.core.arguments import check_count
from torchboost.optim.schedules import CheckedRate, Schedule, each, function, whole

__all__ = ["ScheduleLR", "Shortened"]
__all__ += _torchs.__all__


class ScheduleLR(LRScheduler):
    """Set the learning rates of an optimizer from schedules, as absolute values.

    Call :meth:`step` after each update that was not skipped. A tensor ``lr`` is filled in place, so compiled,
    capturable and fused optimizers see the change. The state holds only numbers. To resume, construct the scheduler
    with the same schedules and load the state, before or after the optimizer's. ``{"last_epoch": step}`` is enough.

    Args:
        optimizer: The optimizer whose groups get the rates.
        schedule: One for all groups, including those added later, or a list with one per group. It replaces the rates
            of the groups. To scale them, use torch's ``LambdaLR``. After the last entry of a list
            (see :class:`Listed`) one more :meth:`step` is allowed, because loops end with it. The next raises
            ``IndexError``.
        last_epoch: Updates done before, minus 1.

    Raises:
        TypeError: Not an optimizer, or not a schedule.
        ValueError: The numbers of schedules and groups differ, ``last_epoch`` is below -1, or a rate is out of range.

    Example:
        >>> import torch
        >>> from torchboost.optim.schedules import CosineDecay
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = ScheduleLR(optimizer, CosineDecay(0.2, decay_steps=2))
        >>> for _ in range(2):
        ...     print(scheduler.get_last_lr())
        ...     optimizer.step()
        ...     scheduler.step()
        [0.2]
        [0.1]
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule | Sequence[Schedule], last_epoch: int = -1) -> None:
        self._schedules = _one_or_each(schedule)
        whole("last_epoch", last_epoch, least=-1)
        if last_epoch >= 0 and isinstance(optimizer, Optimizer):
            # torch requires this key then. A schedule of absolute values resumes without it.
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", _copied(group["lr"]))
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of every group at update ``last_epoch``."""
        groups = len(self.optimizer.param_groups)
        if not isinstance(self._schedules, tuple):
            return [_rate(self._schedules, self.last_epoch)] * groups
        if len(self._schedules) != groups:
            raise ValueError(
                f"found {len(self._schedules)} schedules and {groups} param groups; give one schedule per group."
            )
        return [_rate(schedule, self.last_epoch) for schedule in self._schedules]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, without the schedules."""
        return {key: value for key, value in super().state_dict().items() if key != "_schedules"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from the state of another scheduler, and set the learning rates of that update.

        Raises:
            ValueError: ``last_epoch`` is missing or below 0.
        """
        if "last_epoch" not in state_dict:
            raise ValueError(f"state_dict: found the keys {sorted(state_dict)}; it must have 'last_epoch'.")
        whole("last_epoch", state_dict["last_epoch"], least=0)
        super().load_state_dict({key: value for key, value in state_dict.items() if key in self.state_dict()})
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [_copied(group["lr"]) for group in self.optimizer.param_groups]


class Shortened:
    """Drives a scheduler that was built for a longer run, so that it ends with a shorter one.

    After ``k`` of ``steps`` updates it has made ``k * total_steps // steps`` steps of the scheduler. Use it if the
    length of a schedule cannot be changed where it is built. Otherwise build it for the shorter run. It is not a
    scheduler itself. A trainer that looks for one gets the scheduler without this class.

    Args:
        scheduler: Of torch or transformers, as it was built, for ``total_steps`` steps.
        steps: Updates of the shorter run, such as ``boosted.steps``, at most ``total_steps``.
        total_steps: Updates that the scheduler was built for.

    Raises:
        TypeError: ``scheduler`` is not a scheduler, or decides by a metric, as ``ReduceLROnPlateau`` does.
        ValueError: A number is below 1, ``steps`` is above ``total_steps``, or the scheduler has made steps already.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> whole = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
        >>> scheduler = Shortened(whole, steps=4, total_steps=8)
        >>> for _ in range(4):
        ...     print(scheduler.get_last_lr())
        ...     optimizer.step()
        ...     scheduler.step()
        [1.0]
        [0.75]
        [0.5]
        [0.25]
    """

    def __init__(self, scheduler: LRScheduler, *, steps: int, total_steps: int) -> None:
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                f"scheduler: found {type(scheduler).__name__}; give an LRScheduler of torch that follows the number of "
                "updates. One that decides by a metric needs no shortening: build it for the shorter run."
            )
        check_count("steps", steps, of="updates of the shorter run")
        check_count("total_steps", total_steps, of="updates that the scheduler was built for")
        if steps > total_steps:
            raise ValueError(f"steps: found {steps}, more than total_steps={total_steps}; give at most as many.")
        if (made := getattr(scheduler, "last_epoch", 0)) > 0:
            raise ValueError(f"scheduler: found one that has made {made} steps; give it as it was built.")
        self.scheduler = scheduler
        self._steps, self._total_steps, self._updates = steps, total_steps, 0

    def step(self) -> None:
        """Make the steps that belong to one update. Call it after each update that was not skipped."""
        done = self._made()
        self._updates += 1
        for _ in range(self._made() - done):
            self.scheduler.step()

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of every group, as the scheduler does."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, both lengths and the state of the scheduler."""
        own = {"updates": self._updates, "steps": self._steps, "total_steps": self._total_steps}
        return {**own, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`. The optimizer's state holds the rates, as in torch.

        Raises:
            ValueError: The state is of another class or of a run of another length. Nothing is loaded.
        """
        own = {"steps": self._steps, "total_steps": self._total_steps}
        found = {name: state_dict.get(name) for name in own}
        if found != own or not {"updates", "scheduler"} <= state_dict.keys():
            raise ValueError(f"state_dict: found {found}, here it is {own}; shorten it as when the state was saved.")
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self._updates = state_dict["updates"]

    def _made(self) -> int:
        return self._updates * self._total_steps // self._steps


def _one_or_each(schedule: Any) -> Schedule | tuple[Schedule, ...]:
    if not isinstance(schedule, (list, tuple)):
        return CheckedRate(function("schedule", schedule), "schedule")
    return tuple(CheckedRate(one, f"schedule[{i}]") for i, one in enumerate(each("schedule", schedule, function)))


def _rate(schedule: Schedule, step: int) -> float:
    """Return the rate. One step past the end of a list, return its last rate."""
    try:
        return schedule(step)
    except IndexError as ended:
        if step == 0:
            raise
        try:
            return schedule(step - 1)
        except IndexError:
            raise ended from None


def _copied(lr: float | Tensor) -> float | Tensor:
    return lr.clone() if isinstance(lr, Tensor) else lr
