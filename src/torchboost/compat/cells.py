"""MindSpore's training cells, built on :class:`~torchboost.core.step.TrainStep`, and its manager of loss scales."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.adaptive_sum import AdaptiveSum, AdaptiveSumming
from torchboost.algorithms.grad_accumulation.optimizer import AccumulatingOptimizer
from torchboost.algorithms.loss_scale_group.algorithm import GROUP_RULE, GroupScaler, Scales, checked_scales
from torchboost.algorithms.loss_scale_group.borders import change_scale
from torchboost.algorithms.loss_scale_group.scalers import FixedLossScale, LossScaler, ScaleRule, check_scale
from torchboost.compat.algorithms import GradientAccumulation
from torchboost.compat.elsewhere import counterpart
from torchboost.core.algorithm import Scaler, Target
from torchboost.core.arguments import check_loss_fn, check_module, check_number, check_pair, check_sens, is_integer
from torchboost.core.step import ClosureOptimizer, StepOutput, TrainStep
from torchboost.core.wrapping import unwrap
from torchboost.errors import IncompatibleError
from torchboost.front import boosted_of

_FIRST = 2.0**16
"""The initial scale of an update cell that does not define one, the same as ``GradScaler``'s."""


class WithLoss(nn.Module):
    """A training network that computes the loss of a backbone.

    Args:
        backbone: Called with all inputs except the last.
        loss_fn: Called with the output of the backbone and the last input (the labels).

    Raises:
        TypeError: ``backbone`` is not a module, or ``loss_fn`` cannot be called.

    Example:
        >>> import torch, torchboost
        >>> network = torchboost.WithLoss(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
        >>> loss = network(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    """

    def __init__(self, backbone: nn.Module, loss_fn: Callable[..., Tensor | tuple[Tensor, float]]) -> None:
        check_module(backbone, "backbone")
        check_loss_fn(loss_fn)
        super().__init__()
        self.backbone = backbone
        self.loss_fn = loss_fn

    def forward(self, *inputs: Any) -> Tensor | tuple[Tensor, float]:
        """Return ``loss_fn(backbone(*inputs[:-1]), inputs[-1])``."""
        return self.loss_fn(self.backbone(*inputs[:-1]), inputs[-1])


class _Sens:
    """MindSpore's ``sens``: the gradients are multiplied by it and not divided again."""

    def __init__(self, sens: float) -> None:
        self._sens = sens

    def scale(self, outputs: Tensor) -> Tensor:
        return outputs if self._sens == 1.0 else outputs * self._sens

    def unscale_(self, optimizer: Optimizer) -> None:
        pass

    def step(self, optimizer: Optimizer, *args: Any) -> float | None:
        optimizer.step(*args)
        return None

    def update(self) -> None:
        pass

    def get_scale(self) -> float:
        return self._sens

    def state_dict(self) -> dict[str, Any]:
        return {"sens": self._sens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sens = float(state_dict["sens"])


class BoostTrainOneStepCell:
    """A training step (:class:`~torchboost.TrainStep`) for a network that returns its loss.

    Args:
        network: Returns the loss, a tensor of shape ``()``, alone or followed by the number of samples or tokens, by
            which gradient accumulation weighs it. See :class:`WithLoss`. Usually the network and the optimizer come
            from :meth:`AutoBoost.network_auto_process_train`, whose algorithms then act in this step.
        optimizer: Updates the network. The optimizer that was passed to :class:`AutoBoost` is replaced by the one that
            it returned.
        sens: Multiplies the gradients, as in MindSpore. They are not divided again.

    Attributes:
        updated: Whether the last call updated the weights. With gradient accumulation, step schedulers only if it did.

    Raises:
        TypeError: ``sens`` is not a number, ``network`` is not a module, or ``optimizer`` is not an optimizer.
        ValueError: None of the optimizer's parameters belongs to the network.
        IncompatibleError: Gradient accumulation does not work with the wrapper of the network, or ``sens`` is used
            together with group loss scaling.

    Example:
        >>> import torch, torchboost
        >>> network = torchboost.WithLoss(torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy)
        >>> cell = torchboost.BoostTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1))
        >>> loss, overflow, loss_scale = cell(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, sens: float = 1.0) -> None:
        check_sens(sens)
        self.sens = float(sens)
        scaler = None if self.sens == 1.0 else _Sens(self.sens)
        advice = f"sens={sens}: group loss scaling already scales the loss of this optimizer; leave sens at 1."
        self._build(network, optimizer, scaler, advice)

    def _build(self, network: nn.Module, optimizer: Optimizer, scaler: Scaler | None, advice: str) -> None:
        """Build the step. ``advice`` tells what to do if boosting has added another scaler than this one.

        MindSpore's API passes only the network and the optimizer from ``AutoBoost`` to the cell.
        """
        check_pair(network, optimizer, name="network")
        boosted = boosted_of(optimizer)
        self._summing: AdaptiveSumming | None = None
        if boosted is not None:
            optimizer = boosted.optimizer
            if boosted.brings_scaler and scaler is not None and scaler is not boosted.scaler:
                raise IncompatibleError(advice)
            scaler = boosted.scaler if boosted.brings_scaler else scaler
            if AdaptiveSum.name in boosted.attached:
                summing = boosted.attached[AdaptiveSum.name]
                assert isinstance(summing, AdaptiveSumming)
                summing.check_scaler(scaler)
                self._summing = summing
        self.network = network
        self.optimizer = optimizer
        self.updated = False
        self._stepping: Callable[[], AbstractContextManager[None]] = nullcontext
        target = Target(network, optimizer, scaler)
        window = 1
        if isinstance(optimizer, AccumulatingOptimizer):
            # The cell knows where a window begins, so it does not need a second copy of the gradients.
            target.optimizer, target.accumulator = optimizer.opt, optimizer.accumulator
            self._stepping = optimizer.direct.allowed
            optimizer.accumulator.model = network  # it may have been wrapped after AutoBoost
            window = optimizer.accumulator.steps
        self._step = TrainStep(target, network)
        self._window = GradientAccumulation(window, target.optimizer)
        self._at_once = GradientAccumulation(1, target.optimizer)

    def __getattr__(self, name: str) -> Any:
        """Name the counterpart of an attribute that a cell of MindSpore has and this one has not."""
        kind = type(self).__name__
        raise AttributeError(counterpart(kind, name) or f"{kind!r} object has no attribute {name!r}")

    def __call__(self, *inputs: Any) -> StepOutput:
        """Train on one batch and return ``(loss, overflow, loss_scale)``, tensors of shape ``()``.

        Raises:
            TypeError: The network does not accept these inputs, or does not return a loss.
        """
        try:
            with self._stepping():
                output = self._step(*inputs)
        except TypeError as error:
            _check_inputs(self.network, inputs, error)
            raise
        self.updated = self._step.updated
        return output

    def flush(self) -> bool:
        """Update with a partial accumulation window. Return whether it held any gradients."""
        with self._stepping():
            handed_over, called = self._window.flush(), self._step.flush()
        self.updated = handed_over or self._step.updated
        return handed_over or called is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the step, to be saved with the network, the optimizer and ``AutoBoost.attached``."""
        return {"step": self._step.state_dict(), "given": self._window.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned."""
        self._step.load_state_dict(state["step"])
        self._window.load_state_dict(state["given"])

    def check_adasum_enable(self) -> bool:
        """Whether AdaSum combines the updates of this cell: it is configured, and there are several nodes."""
        return self._summing is not None and self._summing.active

    def check_dim_reduce_enable(self) -> bool:
        """Whether dimension-reduced training acts in this cell, that is, whether its optimizer uses a line search."""
        return isinstance(self.optimizer, ClosureOptimizer)

    def adasum_process(self, loss: Tensor, grads: Any) -> Tensor:
        """Take the gradients of this rank, step, and combine the updates of all nodes.

        Args:
            loss: Returned unchanged.
            grads: One unscaled gradient per parameter of the optimizer. None for a parameter without a gradient.

        Raises:
            IncompatibleError: AdaSum does not act in this cell. Nothing is changed.
            ValueError: The number or the shapes of the gradients differ from the parameters'.
        """
        if not self.check_adasum_enable():
            raise IncompatibleError(
                'AdaSum does not act in this cell; give AutoBoost {"boost": {"mode": "manual", "adasum": true}} and '
                "start at least two nodes. AutoBoost.explain() says what is missing."
            )
        return self._hand_over(self._at_once, loss, grads)

    def gradient_accumulation_process(self, loss: Tensor, grads: Any, sens: float, *inputs: Any) -> Tensor:
        """Take gradients that were computed elsewhere, and update with their mean when the window is full.

        Args:
            loss: Returned unchanged.
            grads: As of :meth:`adasum_process`, multiplied by ``sens``.
            sens: Not used. MindSpore passes it to dimension-reduced training.
            *inputs: Not used.

        Raises:
            ValueError: The number or the shapes of the gradients differ from the parameters'.
        """
        return self._hand_over(self._window, loss, grads)

    def _hand_over(self, window: GradientAccumulation, loss: Tensor, grads: Any) -> Tensor:
        with self._stepping():
            window(loss, grads)
        self.updated = window.updated
        return loss

    def gradient_freeze_process(self, *inputs: Any) -> Tensor:
        """Train on one batch and return its loss. The freezing that is attached to the optimizer decides what trains.

        Freezing comes from :class:`~torchboost.AutoBoost`, :class:`~torchboost.GradientFreeze` or
        :class:`~torchboost.FreezeOpt`. Without any of them everything trains.
        """
        return self(*inputs).loss


class BoostTrainOneStepWithLossScaleCell(BoostTrainOneStepCell):
    """A training step with loss scaling. Gradients are unscaled before any hook of the optimizer sees them.

    If a gradient holds inf or nan, the step updates nothing, ``overflow`` is true, and a dynamic scale falls.

    Args:
        network: See :class:`BoostTrainOneStepCell`.
        optimizer: See :class:`BoostTrainOneStepCell`.
        scale_sense: A tensor of shape ``()`` or ``(1,)`` for a fixed scale, a manager, or an update cell. A manager is
            a :class:`~torchboost.DynamicLossScale`, ``torch.amp.GradScaler``, :class:`~torchboost.GroupGradScaler`,
            :class:`GroupLossScaleManager`, or an object with their methods. An update cell is called as
            ``cell(loss_scale, overflow)`` after each update with two tensors of shape ``()``. It changes ``loss_scale``
            in place, or returns the new scale. A returned boolean is ignored. Its initial scale is
            ``cell.get_loss_scale()``, or 65536 without such a method.

    Raises:
        TypeError: ``scale_sense`` is none of these, ``network`` is not a module, or ``optimizer`` is not an optimizer.
        ValueError: The tensor has another shape or is not a finite number above 0, none of the optimizer's
            parameters belongs to the network, or a group manager lacks one that trains.
        IncompatibleError: ``AutoBoost`` added another scaler for this optimizer.

    Cost: see the scaler.

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
        if isinstance(self.scaler, _GroupsByHand):
            names = {id(param): name for name, param in network.named_parameters()}
            self.scaler.check_groups(self.optimizer, names)

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
            kind = type(self.scaler).__name__
            raise TypeError(f"set_sense_scale: a {kind} sets the scale of this cell; give a tensor when you build it.")
        self.scaler.set(_number(sens, "sens"))


class _GroupsByHand(GroupScaler):
    """The scaler of a :class:`GroupLossScaleManager`.

    The gradient of a parameter in no group has the scale of the borders around its use, which nothing tells.
    """

    def check_groups(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Raise ``ValueError`` if a parameter that trains is in no group. ``names`` are by the parameter's id."""
        missing = [p for p in super()._members(optimizer)[0] if p.requires_grad or p.grad is not None]
        if not missing:
            return
        first = missing[0]
        found = repr(names[id(first)]) if id(first) in names else f"a parameter of shape {tuple(first.shape)}"
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise ValueError(
            f"loss_scale_groups: {found} is in no group{more}, so its gradient would keep a loss scale. Put every "
            "parameter that trains into the group between whose borders it is used, and set the groups after "
            "AutoBoost.network_auto_process_train or LessBN, which add parameters."
        )

    def _members(self, optimizer: Optimizer) -> list[list[Tensor]]:
        self.check_groups(optimizer, {})
        return super()._members(optimizer)


class GroupLossScaleManager(nn.Module):
    """One scale per group, with borders that the network's ``forward`` sets by hand, as in MindSpore.

    The list of scales has a 1 before and a 1 after those of the groups, in the order of the network.
    ``manager(x, i, i + 1)`` is the border between the list entries i and i + 1: ``manager(x, 0, 1)`` at the input of
    the network, unless it requires no gradient, and ``manager(x, k, k + 1)`` after the k-th group.
    :class:`~torchboost.GroupGradScaler` sets the borders itself.

    Args:
        init_loss_scale: The initial scales: one number, or one per group.
        loss_scale_groups: A list of parameters per group. If the network needs the manager when it is built, give
            ``[]`` and set ``manager.loss_scale_groups`` afterwards, but after ``AutoBoost`` and ``LessBN``, which add
            parameters.
        rule: Changes each scale. By default by 2^-0.5 at an overflow in the group, and by 2^(1/1000) at a step without
            one.
        agree: Whether an overflow on one rank skips the update on all ranks. If so, every rank must make the same
            calls.

    Raises:
        TypeError, ValueError: An entry is not a parameter, a parameter is in two groups, or a scale is invalid. The
            training cell, and an update without it, raise ``ValueError`` if a parameter that trains is in no group.

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
    ) -> None:
        super().__init__()
        self._init, self._rule, self._agree = init_loss_scale, rule, agree
        self._scaler: _GroupsByHand | None = None
        self.loss_scale_groups = loss_scale_groups

    @property
    def loss_scale_groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """The list of parameters of each group. Set it once if the network had to be built with the manager."""
        return self._groups

    @loss_scale_groups.setter
    def loss_scale_groups(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        if self._scaler is not None:
            raise ValueError("loss_scale_groups: this manager already has groups; build another one for other groups.")
        self._groups = listed = _checked_groups(groups)
        count = len(listed) or (len(self._init) if isinstance(self._init, (list, tuple)) else 1)
        scales = checked_scales(self._init, count, self._rule, "init_loss_scale")
        if listed:
            names = ["ends", *map(str, range(count))]
            self._scaler = _GroupsByHand(names, [1.0, *scales], listed, rule=self._rule, exact=True, agree=self._agree)

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
        """Return ``x`` and multiply its gradient by ``scale[layer1] / scale[layer2]``. Without groups it is left alone.

        Args:
            x: The tensor that one group passes to the next.
            layer1: Entry of the list of scales before the border, from 0.
            layer2: Entry of the list of scales after the border.

        Raises:
            ValueError: The list of scales does not have this entry.
        """
        if self._scaler is None:  # AutoBoost and LessBN run the network, before its groups can be set
            return x
        ratios, last = self._scaler.ratios, len(self._groups) + 1
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
        self._cell = cell
        self._scale = self._checked(getattr(cell, "get_loss_scale", lambda: _FIRST)())

    def _checked(self, scale: Any) -> float:
        number = scale.item() if isinstance(scale, Tensor) and scale.numel() == 1 else scale
        check_scale(f"loss_scale of the update cell, a {type(self._cell).__name__}", number)
        return float(number)

    def _applied(self) -> list[float]:
        return [self._scale]

    def _conclude(self, overflows: Sequence[bool]) -> None:
        scale = torch.tensor(self._scale, device="cpu")
        with torch.no_grad():
            returned = self._cell(scale, torch.tensor(self.overflowed, device="cpu"))
        verdict = returned is None or isinstance(returned, bool) or getattr(returned, "dtype", None) is torch.bool
        self._scale = self._checked(scale if verdict else returned)

    def _own_state(self) -> dict[str, Any]:
        return {"scale": self._scale, "cell": self._cell.state_dict() if isinstance(self._cell, nn.Module) else {}}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        scale = self._checked(state["scale"])
        if isinstance(self._cell, nn.Module):
            self._cell.load_state_dict(state["cell"])
        self._scale = scale


def _scaler(sense: Any) -> Scaler:
    if isinstance(sense, Tensor):
        return FixedLossScale(_number(sense, "scale_sense"))
    if isinstance(sense, GroupLossScaleManager):
        return sense.scaler
    if hasattr(sense, "unscale_") and not isinstance(sense, type):
        return sense
    if _accepts_two(sense):
        return _CellScale(sense)
    raise TypeError(
        "scale_sense must be a tensor of shape () or (1,), or a manager such as DynamicLossScale, GradScaler, "
        "GroupLossScaleManager or a cell that is called with (loss_scale, overflow); found neither. For a fixed "
        "scale give torch.tensor(1024.0)."
    )


def _accepts_two(cell: Any) -> bool:
    try:
        inspect.signature(cell.forward if isinstance(cell, nn.Module) else cell).bind(None, None)
    except (TypeError, ValueError):
        return False
    return not isinstance(cell, type)


def _number(sense: Any, name: str) -> float:
    if not isinstance(sense, Tensor):
        raise TypeError(f"{name} must be a tensor of shape () or (1,), found {type(sense).__name__} {sense!r}.")
    if sense.shape not in ((), (1,)):
        raise ValueError(f"{name}: found a tensor of shape {tuple(sense.shape)}; give one of shape () or (1,).")
    return float(sense)


def _checked_groups(groups: Any) -> list[list[nn.Parameter]]:
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"loss_scale_groups: found {groups!r}; give one list of parameters per group.")
    owner: dict[int, int] = {}
    for index, group in enumerate(groups):
        for param in group if isinstance(group, (list, tuple)) else [group]:
            if not isinstance(param, nn.Parameter):
                found = type(param).__name__
                raise TypeError(f"loss_scale_groups[{index}]: found a {found}; a group is a list of parameters.")
            if owner.setdefault(id(param), index) != index:
                both = f"a parameter of shape {tuple(param.shape)} is in the groups {owner[id(param)]} and {index}"
                raise ValueError(f"loss_scale_groups: {both}; its gradient has one scale, so put it into one group.")
    return [list(group) for group in groups]


def _check_inputs(network: nn.Module, inputs: tuple[Any, ...], error: TypeError) -> None:
    """Raise ``TypeError`` with advice if the network's ``forward`` does not accept this number of inputs."""
    inner = unwrap(network)
    try:
        inspect.signature(inner.forward).bind(*inputs)
    except TypeError as refusal:
        raise TypeError(
            f"the forward of {type(inner).__name__} does not take {len(inputs)} inputs ({refusal}). The network of a "
            "cell must return its loss: wrap it as WithLoss(network, loss_fn), which takes the labels last."
        ) from error
    except ValueError:  # scripted modules have no signature
        return
