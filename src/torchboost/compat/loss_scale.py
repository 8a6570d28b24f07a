"""MindSpore's names for loss scaling: the training cell with a scale, and the manager of scales per group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.loss_scale.borders import Ratios, change_scale
from torchboost.algorithms.loss_scale.group_scale import GROUP_RULE, GroupScaler, Scales, checked_scales
from torchboost.algorithms.loss_scale.rule import ScaleRule, ScaleState, check_scale
from torchboost.algorithms.loss_scale.scalers import FixedLossScale, LossScaler
from torchboost.compat.cells import BoostTrainOneStepCell, found_by
from torchboost.core.algorithm import Scaler
from torchboost.core.arguments import check_number, check_pair, check_scaler, is_integer
from torchboost.errors import IncompatibleError

__all__ = ["BoostTrainOneStepWithLossScaleCell", "GroupLossScaleManager"]

_FIRST = 2.0**16
"""The scale that an update cell begins with if it does not say, as that of ``GradScaler``."""


class BoostTrainOneStepWithLossScaleCell(BoostTrainOneStepCell):
    """One training step with the loss scaled; gradients are unscaled before any hook of the optimizer sees them.

    At a step with inf or nan in the gradients nothing is updated, ``overflow`` is true, and a dynamic scale falls.

    Args:
        network: As of :class:`BoostTrainOneStepCell`.
        optimizer: Likewise.
        scale_sense: A tensor of shape ``()`` or ``(1,)``, for a scale that stays; or a manager:
            :class:`~torchboost.DynamicLossScale`, ``torch.amp.GradScaler``, :class:`~torchboost.GroupGradScaler`,
            :class:`GroupLossScaleManager`, or anything with their methods; or an update cell of your own, called as
            ``cell(loss_scale, overflow)`` after each update with two tensors of shape ``()``. It changes
            ``loss_scale`` in place, or returns the new scale; a boolean that it returns is not looked at. It begins
            with its ``get_loss_scale()``, or 65536 without such a method.

    Raises:
        TypeError: ``scale_sense`` is neither, ``network`` no module, or ``optimizer`` no optimizer.
        ValueError: A tensor of another shape, or one that is no finite number above 0; none of the parameters of the
            optimizer belongs to the network.
        IncompatibleError: ``AutoBoost`` brought another scaler for this optimizer.

    Cost: that of the scaler; see there.

    Example:
        >>> import torch, torchboost
        >>> network = torchboost.WithLoss(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        >>> manager = torchboost.DynamicLossScale(1024.0, factor=2, window=1000)
        >>> cell = torchboost.BoostTrainOneStepWithLossScaleCell(network, optimizer, manager)
        >>> loss, overflow, loss_scale = cell(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, scale_sense: Any) -> None:
        check_pair(network, optimizer, name="network")
        optimizer, brought = found_by(optimizer)
        scaler = _scaler(scale_sense)
        if brought is not None and brought is not scaler:
            raise IncompatibleError(
                f"scale_sense: found a {type(scale_sense).__name__}, but AutoBoost brought a {type(brought).__name__} "
                "for this optimizer; give booster.scaler, or leave loss_scale_group out."
            )
        self.scaler: Scaler = scaler
        self._build(network, optimizer, scaler)

    @property
    def sens(self) -> float:
        """The scale."""
        return self.scaler.get_scale()

    def set_sense_scale(self, sens: Tensor) -> None:
        """Change a fixed scale; within a window of accumulation it holds from the next window on.

        Args:
            sens: A tensor of shape ``()`` or ``(1,)``.

        Raises:
            TypeError: No tensor, or the scale of this cell is not a fixed one.
            ValueError: Another shape, or no finite number above 0; the scale stays as it was.
        """
        if not isinstance(self.scaler, FixedLossScale):
            raise TypeError(
                f"set_sense_scale: the scale of this cell is moved by a {type(self.scaler).__name__}; only one given "
                "as a tensor can be set."
            )
        self.scaler.set(_number(sens, "sens"))


class GroupLossScaleManager(nn.Module):
    """Scales per group with borders set by hand in the network's ``forward``, as in the reference.

    There are n groups in the order of the network. The list of scales has a 1 before them and a 1 after them;
    ``manager(x, i, i + 1)`` is the border between list entries i and i + 1: at the input of the network
    ``manager(x, 0, 1)``, behind the k-th group ``manager(x, k, k + 1)``. Where the input needs no gradient the first
    border may be left out. :class:`~torchboost.GroupGradScaler` sets borders by itself.

    Args:
        init_loss_scale: At the beginning: a number, or one for each group.
        loss_scale_groups: For each group the list of its parameters. If the network takes the manager when it is
            built, give ``[]`` and set ``manager.loss_scale_groups`` afterwards.
        rule: Moves each scale; by default 2^-0.5 at an overflow in the group, 2^(1/1000) at a step without.
        agree: Whether an overflow on one rank skips the update on all; every rank must then make the same calls.
        process_group: The ranks that agree; None stands for all.

    Raises:
        TypeError, ValueError: Something that is no parameter, one that is in two groups, or a bad scale.

    Cost: one pass over the gradient at each border, and what :class:`~torchboost.GroupGradScaler` costs per update.

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
        self._scaler: _HandScaler | None = None
        if isinstance(loss_scale_groups, (list, tuple)) and not loss_scale_groups:
            checked_scales(init_loss_scale, _count(init_loss_scale), rule, "init_loss_scale")
        else:
            self.loss_scale_groups = loss_scale_groups

    @property
    def loss_scale_groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """For each group the list of its parameters; set it once if the network had to be built with the manager."""
        return self._groups

    @loss_scale_groups.setter
    def loss_scale_groups(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        if self._scaler is not None:
            raise ValueError("loss_scale_groups: this manager has its groups already; build another for other groups.")
        listed = _checked_groups(groups)
        scales = checked_scales(self._init, len(listed), self._rule, "init_loss_scale")
        self._ratios = Ratios(len(listed) + 1)
        names = ["ends", *(str(index) for index in range(len(listed)))]
        self._scaler = _HandScaler(
            listed,
            names,
            [1.0, *scales],
            self._ratios,
            rule=self._rule,
            exact=True,
            agree=self._agree,
            process_group=self._process_group,
        )
        self._groups = listed

    @property
    def scaler(self) -> _HandScaler:
        """What the training loop uses, as it would a ``GradScaler``; the cell takes the manager itself.

        Raises:
            ValueError: There are no groups yet.
        """
        self._check_groups()
        assert self._scaler is not None
        return self._scaler

    def _check_groups(self) -> None:
        if self._scaler is None:
            raise ValueError(
                "loss_scale_groups: found none yet; once the network is built, give for each group the list of its "
                "parameters: manager.loss_scale_groups = [...]."
            )

    def forward(self, x: Tensor, layer1: int, layer2: int) -> Tensor:
        """Return ``x``; its gradient is multiplied by ``scale[layer1] / scale[layer2]``.

        Args:
            x: What goes from one group to the next.
            layer1: Entry of the list of scales behind which the border stands, from 0.
            layer2: Entry before which it stands.

        Raises:
            ValueError: There is no such entry.
        """
        self._check_groups()
        last = len(self._groups) + 1
        for name, layer in (("layer1", layer1), ("layer2", layer2)):
            if not is_integer(layer) or not 0 <= layer <= last:
                raise ValueError(f"{name}: found {layer!r}; the list of scales has the entries 0 to {last}.")
        return change_scale(x, self._ratios.between(layer1 % last, layer2 % last))

    def get_loss_scale(self) -> list[float]:
        """Return the list of scales, with the 1 before and the 1 after."""
        return [1.0, *(status.scale for status in self.scaler.report), 1.0]

    def get_update_cell(self) -> GroupLossScaleManager:
        """Return the manager, which moves the scales itself."""
        return self

    def set_loss_scale_status(self, loss_scale_number: int, init_loss_scale: Scales) -> None:
        """Start anew with these scales; within a window of accumulation they hold from the next window on.

        Args:
            loss_scale_number: Number of groups, as many as there are lists of parameters.
            init_loss_scale: A number, or one for each group.

        Raises:
            ValueError: Another number of groups, or a bad scale; nothing was changed.
        """
        self._check_groups()
        if loss_scale_number != len(self.loss_scale_groups):
            raise ValueError(
                f"loss_scale_number: found {loss_scale_number!r}; this manager has {len(self.loss_scale_groups)} "
                "groups of parameters: build another for other groups."
            )
        scales = checked_scales(init_loss_scale, len(self.loss_scale_groups), self.scaler.rule, "init_loss_scale")
        self.scaler.restart(scales)

    def update_loss_scale_status(self, layer: int, update_ratio: float) -> float:
        """Multiply the scale of a group, within floor and ceiling; return the new one.

        Args:
            layer: The group, from 0.
            update_ratio: Above 0.

        Raises:
            TypeError, ValueError: There is no such group, or the ratio is no finite number above 0.
        """
        self._check_groups()
        count = len(self.loss_scale_groups)
        if not is_integer(layer) or not 0 <= layer < count:
            raise ValueError(f"layer: found {layer!r}; the groups are 0 to {count - 1}.")
        check_number("update_ratio", update_ratio, above=True)
        return self.scaler.multiply(layer + 1, update_ratio)


class _HandScaler(GroupScaler):
    def __init__(self, groups: Sequence[Sequence[nn.Parameter]], *args: Any, **kwargs: Any) -> None:
        self._groups = groups
        super().__init__(*args, **kwargs)

    def parameters_of(self, group: int) -> Sequence[Tensor]:
        return self._groups[group - 1]

    def restart(self, scales: Sequence[float]) -> None:
        self._restart([1.0, *scales])

    def multiply(self, group: int, ratio: float) -> float:
        state = self._states[group]
        scale = min(max(state.scale * ratio, self.rule.floor), self.rule.ceiling)
        self._states[group] = ScaleState(scale, state.clean, state.patience)
        self._settle()
        return scale


class _CellScale(LossScaler):
    """A loss scale that a function or module of the user's moves."""

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

    def _conclude(self, overflow: Sequence[bool], where: Sequence[str | None]) -> None:
        scale = torch.tensor(self._scale)
        with torch.no_grad():
            returned = self._cell(scale, torch.tensor(overflow[0]))
        verdict = returned is None or isinstance(returned, bool) or getattr(returned, "dtype", None) is torch.bool
        self._scale = self._checked(scale if verdict else returned)

    def _own_state(self) -> dict[str, Any]:
        return {"scale": self._scale, "cell": self._cell.state_dict() if isinstance(self._cell, nn.Module) else {}}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        if isinstance(self._cell, nn.Module):
            self._cell.load_state_dict(state["cell"])
        self._scale = float(state["scale"])


def _is_update_cell(sense: Any) -> bool:
    if isinstance(sense, type) or not callable(sense):
        return False
    try:
        inspect.signature(sense.forward if isinstance(sense, nn.Module) else sense).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _scaler(sense: Any) -> Scaler:
    if isinstance(sense, Tensor):
        return FixedLossScale(_number(sense, "scale_sense"))
    if isinstance(sense, GroupLossScaleManager):
        return sense.scaler
    try:
        check_scaler(sense)
    except TypeError:
        if _is_update_cell(sense):
            return _CellScale(sense)
        sense = None
    if sense is None:
        raise TypeError(
            "scale_sense must be a tensor of shape () or (1,), or a manager such as DynamicLossScale, GradScaler, "
            "GroupLossScaleManager or a cell that is called with (loss_scale, overflow); found neither: for a fixed "
            "scale give torch.tensor(1024.0)."
        )
    return sense


def _number(sense: Any, name: str) -> float:
    if not isinstance(sense, Tensor):
        raise TypeError(f"{name} must be a tensor of shape () or (1,), found {type(sense).__name__} {sense!r}.")
    if sense.shape not in ((), (1,)):
        raise ValueError(f"{name}: found a tensor of shape {tuple(sense.shape)}; give one of shape () or (1,).")
    return float(sense)


def _count(scales: Any) -> int:
    return len(scales) if isinstance(scales, (list, tuple)) else 1


def _checked_groups(groups: Any) -> list[list[nn.Parameter]]:
    if not isinstance(groups, (list, tuple)) or not groups:
        raise ValueError(f"loss_scale_groups: found {groups!r}; give for each group the list of its parameters.")
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
                    f"and {index}; its gradient has one scale: put it into one."
                )
    return [list(group) for group in groups]
