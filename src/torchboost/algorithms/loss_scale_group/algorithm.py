"""A loss scale per group of modules, with the interface of ``GradScaler``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.loss_scale_group.borders import Ratios, ScaleBorders, has_borders
from torchboost.algorithms.loss_scale_group.scalers import LossScaler, MovingScale, ScaleRule, check_scale, divide_
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_module
from torchboost.core.wrapping import is_compiled, parameters_of, unwrap
from torchboost.errors import IncompatibleError, nearest
from torchboost.graph.blocks import blocks_of, group_starts

Groups: TypeAlias = int | Sequence[str | Sequence[str]]
"""The number of groups, or the groups: names of modules (patterns with ``*``), or lists of them."""
Scales: TypeAlias = float | Sequence[float]
Modules: TypeAlias = dict[str, nn.Module]

REST = "rest of the model"
GROUP_RULE = ScaleRule(growth=2.0 ** (1 / 1000), shrink=2.0**-0.5, window=1, floor=1.0, ceiling=2.0**40)
"""MindSpore's rule for groups, with added bounds."""


class GroupStatus(NamedTuple):
    """The name and scale of a group, the updates at which a gradient in it was not finite, and how many in a row."""

    name: str
    scale: float
    overflows: int
    in_a_row: int


class GroupScaler(LossScaler):
    """Scales per group: an overflow in any group skips the update, and moves the scales of that group only.

    Args:
        names: Of the groups. The first is the rest of the model, whose scale multiplies the loss.
        scales: At the beginning, one per name.
        groups: The parameters of each group but the first, or the modules in which :meth:`_grouped` finds them.
        rule: Moves each scale.
        pinned: Whether the first scale is always 1, as nothing would tell of its overflows.
        exact: Use the scales as they are, and from the start. Otherwise the power of two below, between the first
            :meth:`scale` and :meth:`update`.
        agree: As for every scaler.
    """

    def __init__(
        self,
        names: Sequence[str],
        scales: Sequence[float],
        groups: Sequence[Any],
        *,
        rule: ScaleRule = GROUP_RULE,
        pinned: bool = True,
        exact: bool = False,
        agree: bool = True,
    ) -> None:
        super().__init__(agree=agree)
        self.rule, self.ratios = rule, Ratios(len(names))
        self.scaled = False  # whether a loss ever was
        self._names, self._groups, self._pinned, self._exact = tuple(names), groups, pinned, exact
        self._membership: tuple[list[Tensor], list[list[Tensor]]] = ([], [])
        self.restart(scales)

    @property
    def report(self) -> tuple[GroupStatus, ...]:
        """The status of every group, including the rest of the model if its scale moves."""
        moving = list(zip(self._names, self._moving, strict=True))[self._pinned :]
        return tuple(GroupStatus(name, each.scale, each.overflows, each.in_a_row) for name, each in moving)

    def get_scale(self) -> float:
        """Return the smallest scale of a group."""
        return min(status.scale for status in self.report)

    def restart(self, scales: Sequence[float]) -> None:
        """Begin again with these scales, one per name. A window that has begun keeps its own."""
        begun = [1.0, *scales[1:]] if self._pinned else scales
        self._moving = [
            MovingScale(self.rule, scale, f"the loss scale of group '{name}'")
            for name, scale in zip(self._names, begun, strict=True)
        ]
        self._settle()

    def multiply(self, group: int, ratio: float) -> float:
        """Multiply the scale of a group within its bounds, and return it."""
        moving = self._moving[group]
        moving.scale = min(max(moving.scale * ratio, self.rule.floor), self.rule.ceiling)
        self._settle()
        return moving.scale

    def _settle(self) -> None:
        if self._in_use is None:
            self.ratios.set(self._applied() if self._exact else None)

    def _applied(self) -> list[float]:
        scales = [each.scale for each in self._moving]
        # Powers of two change the exponent of a gradient only, so that unscaling gives back the same bits.
        return scales if self._exact else [2.0 ** math.floor(math.log2(scale)) for scale in scales]

    def _begun(self, scales: Sequence[float]) -> None:
        self.ratios.set(scales)
        self.scaled = True

    def _members(self, optimizer: Optimizer) -> list[list[Tensor]]:
        (params,) = super()._members(optimizer)
        known, members = self._membership
        if len(params) != len(known) or any(a is not b for a, b in zip(params, known, strict=True)):
            owner = {id(param): i for i, group in enumerate(self._grouped(), start=1) for param in group}
            members = [[param for param in params if owner.get(id(param), 0) == i] for i in range(len(self._names))]
            self._membership = (params, members)
        return members

    def _grouped(self) -> Sequence[Sequence[Tensor]]:
        """Return the parameters of each group but the first. Called again when the optimizer's parameters change."""
        return self._groups

    def _conclude(self, overflows: Sequence[bool]) -> None:
        moving = list(zip(self._moving, overflows, strict=True))[self._pinned :]
        for each, overflow in moving:
            each.move(overflow)
        self._settle()
        for each, overflow in moving:
            each.warn(overflow)

    def _own_state(self) -> dict[str, Any]:
        states, alarms = zip(*(each.saved() for each in self._moving), strict=True)
        return {"names": list(self._names), "states": list(states), "alarms": list(alarms)}

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        if list(state["names"]) != list(self._names):
            raise ValueError(
                f"the checkpoint holds the groups {list(state['names'])}, but this scaler has {list(self._names)}; "
                "build it with the groups that it was saved with."
            )

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        saved = list(zip(self._moving, state["states"], state["alarms"], strict=True))
        for each, entry, counts in saved:
            each.check(entry, counts)
        self._in_use = None
        for each, entry, counts in saved:
            each.load(entry, counts)
        self._settle()


class GroupGradScaler(GroupScaler):
    """A ``GradScaler`` with one scale per group, for float16 models that no single scale fits.

    Borders at the modules of each group change the scale of the gradients that pass, and are the identity in the
    forward pass. The code of the model does not change. With ``s_g`` the scale of group g, its gradients are ``s_g``
    times the true ones during the backward pass, and the true ones, bit for bit but for under- and overflow, after
    :meth:`unscale_`. (The factor is the power of two below ``s_g``.) Between :meth:`update` and the next
    :meth:`scale` the borders let gradients pass unchanged, so a backward pass without this scaler is as it was. They go
    with the scaler.

    If a gradient in any group is not finite, the update is skipped, the scales of the affected groups shrink and all
    others grow. An inf that arises in one group reaches those before it, which then shrink too.

    Args:
        model: Gets hooks. Wrapped or not. Modules that are not in a group are one more group, the rest.
        groups: The number of groups of blocks, which are as even as possible, or for each group the names of its
            modules, as of ``named_modules()`` with ``*`` and ``?``. A name includes all that is inside.
        init_scale: At the beginning, for all groups or one for each.
        rule: Moves each scale: see :class:`ScaleRule`.
        agree: Whether an overflow on one rank skips the update on all. Every rank must then make the same calls.

    Attributes:
        report: How each group stands: ``name``, ``scale``, ``overflows``, ``in_a_row``.
        overflowed: Whether the last update was skipped.

    Raises:
        TypeError, ValueError: An argument is not valid, or no module has a given name.
        IncompatibleError: Two groups, or a group and the rest, share a parameter, the model is compiled already, or
            another of these scalers is on it. Nothing was changed. :meth:`unscale_` raises it if a module of a group
            has gradients but was never called itself.

    Warns:
        ScaleCollapseWarning: A scale collapses. The message names the group.

    Cost: in the backward pass one pass over each tensor that crosses a border. In float16 a copy in float32 of tensors
    that leave the groups. Per update one pass over the gradients and one wait for the device.

    Limits: a module's weight that is used outside of it (``F.linear(x, embedding.weight)``) gets gradients of the wrong
    scale there. Put the user of the weight into the same group, or neither into any. torch refuses operations in place
    directly on tensors that leave or enter a group: take the activation that follows into the group.

    Source: layer-wise loss scaling, Zhao et al. 2019 (arXiv:1910.12385). Shrinkage and growth as in MindSpore.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = torchboost.GroupGradScaler(model, [["0", "1"], "2"])
        >>> scaler.scale(model(torch.randn(3, 4)).sum()).backward()
        >>> scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    """

    _borders: ScaleBorders | None = None  # also if the groups are refused

    def __init__(
        self,
        model: nn.Module,
        groups: Groups = 4,
        *,
        init_scale: Scales = 2.0**16,
        rule: ScaleRule = GROUP_RULE,
        agree: bool = True,
    ) -> None:
        check_module(model)
        if not isinstance(rule, ScaleRule):
            raise TypeError(f"rule: found {type(rule).__name__}; give a torchboost.ScaleRule(...).")
        modules = _resolved(model, groups)
        self._resumed = False
        scales = checked_scales(init_scale, len(modules), rule)
        grouped = {id(param) for group in modules for module in group.values() for param in module.parameters()}
        super().__init__(
            [REST, *(_title(group) for group in modules)],
            [min(scales), *scales],
            modules,
            rule=rule,
            pinned=all(id(param) in grouped for param in model.parameters()),
            agree=agree,
        )
        self._rest = [param for param in model.parameters() if id(param) not in grouped]
        self._borders = ScaleBorders(modules, self.ratios)

    def __del__(self) -> None:
        if self._borders is not None:
            self._borders.remove()

    def remove(self) -> None:
        """Remove the borders. The scale is 1 from then on, and gradients that are scaled are divided."""
        if self._borders is None:
            return
        if self._in_use is not None:
            true = set(map(id, parameters_of(*self._overflows)))
            members = [[p for p in group if id(p) not in true] for group in (self._rest, *self._grouped())]
            divide_(members, self._in_use)
        self._borders.remove()
        self._borders = None
        self._in_use = None if self._in_use is None else self._applied()

    def _grouped(self) -> Sequence[Sequence[Tensor]]:
        return [[param for module in group.values() for param in module.parameters()] for group in self._groups]

    def _members(self, optimizer: Optimizer) -> list[list[Tensor]]:
        if self._borders is not None and not self._resumed:
            self._borders.check_called()
        return super()._members(optimizer)

    def _conclude(self, overflows: Sequence[bool]) -> None:
        self._resumed = False
        super()._conclude(overflows)

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        super()._load_own_state(state)
        # A window that had begun may hold gradients of modules that are not called again before the update.
        self._resumed = state["in_use"] is not None

    def _applied(self) -> list[float]:
        return [1.0] * len(self._names) if self._borders is None else super()._applied()


@dataclass(frozen=True, kw_only=True)
class LossScaleGroup(Algorithm):
    """A loss scale per group of modules. The loop must use ``target.scaler``.

    :class:`~torchboost.core.step.TrainStep` and the training cells do. A loop of your own uses ``booster.scaler``, or
    :class:`GroupGradScaler`, as it would a ``GradScaler``. A loop that does not scale trains as before.

    Args:
        groups: The number of groups of blocks, or the names of the modules of each group. See :class:`GroupGradScaler`.
        init_scale: At the beginning, for all groups or one for each.
        floor: Smallest scale.
        ceiling: Largest scale.
    """

    name: ClassVar[str] = "loss_scale_group"
    # Before autocast, which asks for a scaler, and after the modules were changed.
    traits: ClassVar[Traits] = Traits(order=25, brings_scaler=True)

    groups: int | Sequence[str | Sequence[str]] = 4
    init_scale: float | Sequence[float] = 2.0**16
    floor: float = GROUP_RULE.floor
    ceiling: float = GROUP_RULE.ceiling

    def __post_init__(self) -> None:
        _check_groups(self.groups)
        if not isinstance(self.groups, int):
            listed = tuple(entry if isinstance(entry, str) else tuple(entry) for entry in self.groups)
            object.__setattr__(self, "groups", listed)
        count = 1
        if isinstance(self.init_scale, (list, tuple)):
            object.__setattr__(self, "init_scale", tuple(self.init_scale))
            count = len(self.init_scale)
        checked_scales(self.init_scale, count, self._rule())

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that a single scale is enough for a single block."""
        alone = isinstance(self.groups, int) and len(blocks_of(model)) < 2
        return "the model is a single block, for which a single loss scale is enough" if alone else None

    def check(self, target: Target) -> None:
        """Refuse a target that has a scaler, a model that has one, unknown names, and groups that share parameters."""
        if target.scaler is not None:
            raise IncompatibleError(
                f"loss_scale_group: the target has a scaler already, a {type(target.scaler).__name__}; group scaling "
                "brings its own: leave out either that scaler or loss_scale_group."
            )
        checked_scales(self.init_scale, len(_resolved(target.model, self.groups)), self._rule())

    def attach(self, target: Target) -> Attachment:
        """Put the borders into the model and give the target its scaler, whose state ``TrainStep`` saves."""
        scaler = GroupGradScaler(target.model, self.groups, init_scale=self.init_scale, rule=self._rule())
        target.scaler = scaler
        return _Scaling(target, scaler)

    def _rule(self) -> ScaleRule:
        return replace(GROUP_RULE, floor=self.floor, ceiling=self.ceiling)


class _Scaling(Attachment):
    """The scaler of a target, which the loop may never use."""

    def __init__(self, target: Target, scaler: GroupGradScaler) -> None:
        super().__init__(undo=self._release)
        self._target, self._scaler = target, scaler

    @property
    def remark(self) -> str:
        """The calls that the loop must make, if it has not scaled a loss."""
        return "" if self._scaler.scaled else "scale with boosted.scaler, or call boosted.step(loss_fn)"

    def _release(self) -> None:
        self._scaler.remove()
        if self._target.scaler is self._scaler:
            self._target.scaler = None


def checked_scales(scales: Any, groups: int, rule: ScaleRule, name: str = "init_scale") -> list[float]:
    """Return one scale per group. ``TypeError``, ``ValueError``: one is invalid, or the list has another length."""
    if isinstance(scales, (list, tuple)):
        if len(scales) != groups:
            raise ValueError(f"{name}: found {len(scales)} scales for {groups} groups; give one for each, or a number.")
        listed = list(scales)
    else:
        listed = [scales] * groups
    for scale in listed:
        check_scale(name, scale, rule)
    return [float(scale) for scale in listed]


def _check_groups(groups: Any) -> None:
    if isinstance(groups, bool) or not isinstance(groups, (int, list, tuple)):
        raise TypeError(
            f"groups: found {groups!r}; give a number of groups, or a list with the names of the modules of each group."
        )
    if isinstance(groups, int) and groups < 1:
        raise ValueError(f"groups: found {groups}; give 1 or more.")
    if isinstance(groups, (list, tuple)):
        if not groups or not all(_picks(entry) for entry in groups):
            raise ValueError(f"groups: found {groups!r}; each group needs at least one module name.")
        for pick in (pick for entry in groups for pick in _picks(entry)):
            if not isinstance(pick, str):
                raise TypeError(f"groups: found {pick!r}; give names of modules, as of model.named_modules().")


def _picks(entry: Any) -> list[Any]:
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def _resolved(model: nn.Module, groups: Any) -> list[Modules]:
    """Return the modules of each group by name, none inside another, and no parameter in two groups."""
    _check_groups(groups)
    if is_compiled(model):
        # Graphs that were made before are still used, and know nothing of hooks that come later.
        raise IncompatibleError(
            "loss_scale_group: the model is already compiled, and its graphs would not contain the borders; set the "
            "borders first (GroupGradScaler, or attach) and compile afterwards."
        )
    network = unwrap(model)
    if has_borders(network):
        raise IncompatibleError(
            "loss_scale_group: the model already has a GroupGradScaler, and the two would mistake each other's "
            "borders; use that one, or call its remove() first."
        )
    if isinstance(groups, int):
        return _automatic(model, network, groups)
    resolved = [_outermost(pair for pick in _picks(entry) for pair in _matches(network, pick)) for entry in groups]
    owner: dict[nn.Module, int] = {}
    for index, group in enumerate(resolved, start=1):
        for name, module in group.items():
            for inner in module.modules():
                if owner.setdefault(inner, index) != index:
                    raise ValueError(
                        f"groups: the module '{name}' is in group {owner[inner]} and, itself or a part of it, in "
                        f"group {index}; name it once."
                    )
    for param_name, users in _shared(network, resolved).items():
        raise IncompatibleError(
            f"loss_scale_group: the parameter '{param_name}' is shared by {' and '.join(users)}, of different groups, "
            "so that its gradient would be a sum of two scales; put all modules that use it into one group."
        )
    return resolved


def _matches(network: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    named = [(name, module) for name, module in network.named_modules() if name]
    chosen = [(name, module) for name, module in named if fnmatchcase(name, pattern)]
    if not chosen:
        raise ValueError(
            f"groups: no module of the model is {pattern!r}; give names as of model.named_modules(), such as "
            f"{named[0][0] if named else 'none here'!r}. {nearest(pattern, [name for name, _ in named])}".rstrip()
        )
    return chosen


def _outermost(pairs: Iterable[tuple[str, nn.Module]]) -> Modules:
    """Return the modules that are in no other one, with the items of lists of modules, which are never called."""

    def called(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return [pair for child, inner in module.named_children() for pair in called(f"{name}.{child}", inner)]
        return [(name, module)]

    modules = dict(each for pair in pairs for each in called(*pair))
    inner = {part for module in modules.values() for part in module.modules() if part is not module}
    return {name: module for name, module in modules.items() if module not in inner}


def _automatic(model: nn.Module, network: nn.Module, count: int) -> list[Modules]:
    names = {module: name for name, module in network.named_modules() if name}
    blocks = blocks_of(model)
    groups: list[Modules] = []
    for start, end in pairwise((*group_starts(len(blocks), count), len(blocks))):
        modules = [module for block in blocks[start:end] for module in block.modules if module in names]
        groups.append(_outermost((names[module], module) for module in modules))
    while shared := _shared(network, groups):
        # Tied weights have one gradient: whatever uses them goes to the rest of the model.
        tied = {id(network.get_parameter(name)) for name in shared}
        groups = [{n: m for n, m in group.items() if tied.isdisjoint(map(id, m.parameters()))} for group in groups]
    kept = [group for group in groups if any(True for m in group.values() for _ in m.parameters())]
    if not kept:
        raise IncompatibleError(
            "loss_scale_group: found no block that does not share its parameters; name the modules in 'groups'."
        )
    return kept


def _shared(network: nn.Module, groups: Sequence[Mapping[str, nn.Module]]) -> dict[str, list[str]]:
    """Return the parameters that modules of different groups use, with the names of those modules."""
    grouped = [(i, name, module) for i, group in enumerate(groups, 1) for name, module in group.items()]
    inside = {inner for *_, module in grouped for inner in module.modules()}
    rest = [(0, name, module) for name, module in network.named_modules() if module not in inside]
    users: dict[int, dict[int, str]] = {}
    for place, name, module in (*grouped, *rest):
        for param in module.parameters(recurse=place > 0):
            users.setdefault(id(param), {}).setdefault(place, f"'{name}'")
    return {n: list(users[id(p)].values()) for n, p in network.named_parameters() if len(users[id(p)]) > 1}


def _title(group: Mapping[str, nn.Module]) -> str:
    names = list(group)
    return ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
