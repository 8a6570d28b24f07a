"""MindSpore's names for loss scaling: the training cell with a scale, and the manager of scales per group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.loss_scale_group.algorithm import GROUP_RULE, GroupScaler, Scales, checked_scales
from torchboost.algorithms.loss_scale_group.borders import change_scale
from torchboost.algorithms.loss_scale_group.scalers import FixedLossScale, LossScaler, ScaleRule, check_scale
from torchboost.compat.cells import BoostTrainOneStepCell
from torchboost.core.algorithm import Scaler
from torchboost.core.arguments import check_number, check_scaler, is_integer

__all__ = ["BoostTrainOneStepWithLossScaleCell", "GroupLossScaleManager"]

_FIRST = 2.0**16
"""The initial scale of an update cell that does not define one, the same as ``GradScaler``'s."""


class BoostTrainOneStepWithLossScaleCell(BoostTrainOneStepCell):
    """A training step with loss scaling. Gradients are unscaled before any hook of the optimizer sees them.

    If a gradient holds inf or nan, the step updates nothing, ``overflow`` is true, and a dynamic scale falls.

    Args:
        network: See :class:`BoostTrainOneStepCell`.
        optimizer: See :class:`BoostTrainOneStepCell`.
        scale_sense: One of three: a tensor of shape ``()`` or ``(1,)`` for a fixed scale; a manager, that is,
            :class:`~torchboost.DynamicLossScale`, ``torch.amp.GradScaler``, :class:`~torchboost.GroupGradScaler`,
            :class:`GroupLossScaleManager`, or an object with their methods; or an update cell, called as
            ``cell(loss_scale, overflow)`` after each update with two tensors of shape ``()``. An update cell changes
            ``loss_scale`` in place, or returns the new scale; a returned boolean is ignored. Its initial scale is
            ``cell.get_loss_scale()``, or 65536 without such a method.

    Raises:
        TypeError: ``scale_sense`` is none of these, ``network`` is not a module, or ``optimizer`` is not an optimizer.
        ValueError: The tensor has another shape or is not a finite number above 0, or none of the optimizer's
            parameters belongs to the network.
        IncompatibleError: ``AutoBoost`` added another scaler for this optimizer.

    Cost: that of the scaler.

    Example:
        >>> import torch, torchboost
        >>> network = torchboost.WithLoss(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> manager = torchboost.DynamicLossScale(1024.0, factor=2, window=1000)
        >>> cell = torchboost.BoostTrainOneStepWithLossScaleCell(network, optimizer, manager)
        >>> loss, overflow, loss_scale = cell(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, scale_sense: Any) -> None:
        self.scaler: Scaler = _scaler(scale_sense)
        advice = (
            f"scale_sense: found a {type(scale_sense).__name__}, but AutoBoost added another scaler for this "
            "optimizer; give booster.scaler, or leave loss_scale_group out."
        )
        self._build(network, optimizer, self.scaler, advice)

    @property
    def sens(self) -> float:
        """The scale."""
        return self.scaler.get_scale()

    def set_sense_scale(self, sens: Tensor) -> None:
        """Change a fixed scale. Within an accumulation window it takes effect at the next window.

        Args:
            sens: A tensor of shape ``()`` or ``(1,)``.

        Raises:
            TypeError: ``sens`` is not a tensor, or the scale of this cell is not fixed.
            ValueError: ``sens`` has another shape or is not a finite number above 0. The scale is not changed.
        """
        if not isinstance(self.scaler, FixedLossScale):
            raise TypeError(
                f"set_sense_scale: a {type(self.scaler).__name__} sets the scale of this cell; only a scale given "
                "as a tensor can be set."
            )
        self.scaler.set(_number(sens, "sens"))


class GroupLossScaleManager(nn.Module):
    """One scale per group, with borders that the network's ``forward`` sets by hand, as in MindSpore.

    There are n groups in the order of the network. The list of scales has a 1 before them and a 1 after them.
    ``manager(x, i, i + 1)`` is the border between the list entries i and i + 1: ``manager(x, 0, 1)`` at the input of
    the network, and ``manager(x, k, k + 1)`` after the k-th group. If the input does not require a gradient, the first
    border may be left out. :class:`~torchboost.GroupGradScaler` sets the borders itself.

    Args:
        init_loss_scale: The initial scales: one number, or one per group.
        loss_scale_groups: A list of parameters per group. If the network needs the manager when it is built, give
            ``[]`` and set ``manager.loss_scale_groups`` afterwards.
        rule: Changes each scale. By default by 2^-0.5 at an overflow in the group, and by 2^(1/1000) at a step without
            one.
        agree: Whether an overflow on one rank skips the update on all ranks. If so, every rank must make the same
            calls.
        process_group: The ranks that agree. None means all ranks.

    Raises:
        TypeError, ValueError: An entry is not a parameter, a parameter is in two groups, or a scale is invalid.

    Cost: one pass over the gradient at each border, plus the cost of :class:`~torchboost.GroupGradScaler` per update.

    Example:
        >>> import torch, torchboost
        >>> first, last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)
        >>> manager = torchboost.GroupLossScaleManager(1024.0, [list(first.parameters()), list(last.parameters())])
        >>> out = manager(last(manager(first(torch.randn(3, 4)), 1, 2)), 2, 3)
        >>> manager.get_loss_scale()
        [1.0, 1024.0, 1024.0, 1.0]
    """

    def __init__(
        self,
        init_loss_scale: Scales,
        loss_scale_groups: Sequence[Sequence[nn.Parameter]],
        *,
        rule: ScaleRule = GROUP_RULE,
        agree: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        self._init, self._rule, self._agree, self._process_group = init_loss_scale, rule, agree, process_group
        self._groups: list[list[nn.Parameter]] = []
        self._scaler: GroupScaler | None = None
        if isinstance(loss_scale_groups, (list, tuple)) and not loss_scale_groups:
            count = len(init_loss_scale) if isinstance(init_loss_scale, (list, tuple)) else 1
            checked_scales(init_loss_scale, count, rule, "init_loss_scale")
        else:
            self.loss_scale_groups = loss_scale_groups

    @property
    def loss_scale_groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """The list of parameters of each group. Set it once if the network had to be built with the manager."""
        return self._groups

    @loss_scale_groups.setter
    def loss_scale_groups(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        if self._scaler is not None:
            raise ValueError(
                "loss_scale_groups: this manager already has groups; build another manager for other groups."
            )
        listed = _checked_groups(groups)
        scales = checked_scales(self._init, len(listed), self._rule, "init_loss_scale")
        self._scaler = GroupScaler(
            ["ends", *map(str, range(len(listed)))],
            [1.0, *scales],
            lambda: listed,
            rule=self._rule,
            exact=True,
            agree=self._agree,
            process_group=self._process_group,
        )
        self._groups = listed

    @property
    def scaler(self) -> GroupScaler:
        """The scaler, which a training loop uses like a ``GradScaler``. The training cell takes the manager itself.

        Raises:
            ValueError: The groups are not set yet.
        """
        if self._scaler is None:
            raise ValueError(
                "loss_scale_groups: found none yet; when the network is built, set one list of parameters per group: "
                "manager.loss_scale_groups = [...]."
            )
        return self._scaler

    def forward(self, x: Tensor, layer1: int, layer2: int) -> Tensor:
        """Return ``x`` and multiply its gradient by ``scale[layer1] / scale[layer2]``.

        Args:
            x: The tensor that one group passes to the next.
            layer1: Entry of the list of scales before the border, from 0.
            layer2: Entry of the list of scales after the border.

        Raises:
            ValueError: The list of scales does not have this entry.
        """
        ratios, last = self.scaler.ratios, len(self._groups) + 1
        for name, layer in (("layer1", layer1), ("layer2", layer2)):
            if not is_integer(layer) or not 0 <= layer <= last:
                raise ValueError(f"{name}: found {layer!r}; the list of scales has the entries 0 to {last}.")
        return change_scale(x, ratios.between(layer1 % last, layer2 % last))

    def get_loss_scale(self) -> list[float]:
        """Return the list of scales, including the 1 at either end."""
        return [1.0, *(status.scale for status in self.scaler.report), 1.0]

    def get_update_cell(self) -> GroupLossScaleManager:
        """Return the manager, which updates the scales itself."""
        return self

    def set_loss_scale_status(self, loss_scale_number: int, init_loss_scale: Scales) -> None:
        """Restart with these scales. Within an accumulation window they take effect at the next window.

        Args:
            loss_scale_number: Number of groups, equal to the number of lists of parameters.
            init_loss_scale: One number, or one per group.

        Raises:
            ValueError: The number of groups is another one, or a scale is invalid. Nothing is changed.
        """
        scaler, count = self.scaler, len(self._groups)
        if loss_scale_number != count:
            raise ValueError(
                f"loss_scale_number: found {loss_scale_number!r}; this manager has {count} groups of parameters: build "
                "another manager for other groups."
            )
        scaler.restart([1.0, *checked_scales(init_loss_scale, count, self._rule, "init_loss_scale")])

    def update_loss_scale_status(self, layer: int, update_ratio: float) -> float:
        """Multiply the scale of a group, within its bounds, and return the new scale.

        Args:
            layer: Index of the group, from 0.
            update_ratio: The factor, above 0.

        Raises:
            TypeError, ValueError: The group does not exist, or the ratio is not a finite number above 0.
        """
        scaler, count = self.scaler, len(self._groups)
        if not is_integer(layer) or not 0 <= layer < count:
            raise ValueError(f"layer: found {layer!r}; the groups are 0 to {count - 1}.")
        check_number("update_ratio", update_ratio, above=True)
        return scaler.multiply(layer + 1, update_ratio)


class _CellScale(LossScaler):
    """A loss scale that the user's function or module updates."""

    def __init__(self, cell: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        start = getattr(cell, "get_loss_scale", lambda: _FIRST)()
        self._cell, self._scale = cell, self._checked(start)

    def _checked(self, scale: Any) -> float:
        number = scale.item() if isinstance(scale, Tensor) and scale.numel() == 1 else scale
        try:
            check_scale("loss_scale", number)
        except (TypeError, ValueError) as error:
            raise type(error)(f"the update cell, a {type(self._cell).__name__}: {error}") from None
        return float(number)

    def _applied(self) -> list[float]:
        return [self._scale]

    def _conclude(self, overflows: Sequence[str | None]) -> None:
        scale = torch.tensor(self._scale, device="cpu")
        with torch.no_grad():
            returned = self._cell(scale, torch.tensor(self.overflowed, device="cpu"))
        verdict = returned is None or isinstance(returned, bool) or getattr(returned, "dtype", None) is torch.bool
        self._scale = self._checked(scale if verdict else returned)

    def _own_state(self) -> dict[str, Any]:
        return {"scale": self._scale, "cell": self._cell.state_dict() if isinstance(self._cell, nn.Module) else {}}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        if isinstance(self._cell, nn.Module):
            self._cell.load_state_dict(state["cell"])
        self._scale = float(state["scale"])


def _scaler(sense: Any) -> Scaler:
    if isinstance(sense, Tensor):
        return FixedLossScale(_number(sense, "scale_sense"))
    if isinstance(sense, GroupLossScaleManager):
        return sense.scaler
    try:
        check_scaler(sense)
        is_cell = False
    except TypeError:
        is_cell = _accepts_two(sense)
    if sense is None or isinstance(sense, type) or not (is_cell or hasattr(sense, "unscale_")):
        raise TypeError(
            "scale_sense must be a tensor of shape () or (1,), or a manager such as DynamicLossScale, GradScaler, "
            "GroupLossScaleManager or a cell that is called with (loss_scale, overflow); found neither. For a fixed "
            "scale give torch.tensor(1024.0)."
        )
    return _CellScale(sense) if is_cell else sense


def _accepts_two(cell: Any) -> bool:
    try:
        inspect.signature(cell.forward if isinstance(cell, nn.Module) else cell).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _number(sense: Any, name: str) -> float:
    if not isinstance(sense, Tensor):
        raise TypeError(f"{name} must be a tensor of shape () or (1,), found {type(sense).__name__} {sense!r}.")
    if sense.shape not in ((), (1,)):
        raise ValueError(f"{name}: found a tensor of shape {tuple(sense.shape)}; give one of shape () or (1,).")
    return float(sense)


def _checked_groups(groups: Any) -> list[list[nn.Parameter]]:
    if not isinstance(groups, (list, tuple)) or not groups:
        raise ValueError(f"loss_scale_groups: found {groups!r}; give one list of parameters per group.")
    owner: dict[int, int] = {}
    for index, group in enumerate(groups):
        for param in group if isinstance(group, (list, tuple)) else [group]:
            if not isinstance(param, nn.Parameter):
                raise TypeError(
                    f"loss_scale_groups[{index}]: found a {type(param).__name__}; a group is a list of parameters."
                )
            if owner.setdefault(id(param), index) != index:
                raise ValueError(
                    f"loss_scale_groups: a parameter of shape {tuple(param.shape)} is in the groups {owner[id(param)]} "
                    f"and {index}; its gradient has one scale, so put it into one group."
                )
    return [list(group) for group in groups]
