"""torch's learning-rate schedulers under torch's module name, with :class:`ScheduleLR`.

With ``from torchboost import optim`` in place of ``from torch import optim``, ``optim.lr_scheduler.OneCycleLR`` still
resolves. These are torch's own classes, which work with the optimizers of both packages. Schedules as functions of the
update are in :mod:`torchboost.optim.schedules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as _torchs
from torch.optim.lr_scheduler import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from torch.optim.lr_scheduler import LRScheduler

from torchboost.optim.schedules import CheckedRate, Schedule, each, function, whole

__all__ = ["ScheduleLR"]
__all__ += _torchs.__all__


class ScheduleLR(LRScheduler):
    """Set the learning rates of an optimizer from schedules, as absolute values.

    Call :meth:`step` after each update that was not skipped. A tensor ``lr`` is filled in place, so compiled,
    capturable and fused optimizers see the change. The state holds numbers only: to resume, construct the scheduler
    with the same schedules and load the state, before or after that of the optimizer; ``{"last_epoch": step}`` is
    enough.

    Args:
        optimizer: The optimizer whose groups get the rates.
        schedule: One for all groups, including those added later, or a list with one per group. It replaces the rates
            of the groups; to scale them, use torch's ``LambdaLR``. After the last entry of a list
            (see :class:`Listed`) one more :meth:`step` is allowed, because loops end with it; the next raises
            ``IndexError``.
        last_epoch: Updates done before, minus 1.

    Raises:
        TypeError: Not an optimizer, or not a schedule.
        ValueError: The number of schedules is not that of the groups, ``last_epoch`` is below -1, or a rate is out of
            range.

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
            # torch requires this key then; a schedule of absolute values resumes without it.
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


def _one_or_each(schedule: Any) -> Schedule | tuple[Schedule, ...]:
    if not isinstance(schedule, (list, tuple)):
        return CheckedRate(function("schedule", schedule), "schedule")
    return tuple(CheckedRate(one, f"schedule[{i}]") for i, one in enumerate(each("schedule", schedule, function)))


def _rate(schedule: Schedule, step: int) -> float:
    """Return the rate; one step past the end of a list, return its last rate."""
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
