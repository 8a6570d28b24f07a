"""A loss scale per group of modules, with the interface of ``GradScaler``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.loss_scale_group.borders import Ratios, ScaleBorders, has_borders
from torchboost.algorithms.loss_scale_group.scalers import (
    LossScaler,
    MovingScale,
    ScaleRule,
    ScaleState,
    bad_gradient,
)
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_module
from torchboost.core.wrapping import is_compiled, unwrap
from torchboost.errors import IncompatibleError, nearest
from torchboost.graph.blocks import blocks_of, group_starts

__all__ = [
    "GROUP_RULE",
    "GroupGradScaler",
    "GroupScaler",
    "GroupStatus",
    "Groups",
    "LossScaleGroup",
    "Scales",
    "checked_scales",
]

Pick: TypeAlias = str | type[nn.Module] | nn.Module
Groups: TypeAlias = int | Sequence[Pick | Sequence[Pick]]
"""The number of groups, or the groups: names of modules (patterns with ``*``), types, modules, or lists of them."""

REST = "rest of the model"


GROUP_RULE = ScaleRule(growth=2.0 ** (1 / 1000), shrink=2.0**-0.5, window=1, floor=1.0, ceiling=2.0**40)
"""MindSpore's rule for groups, with added bounds."""

Scales: TypeAlias = float | Sequence[float]


class GroupStatus(NamedTuple):
    """The status of a group.

    Args:
        name: Of the group.
        scale: Its scale.
        overflows: Updates at which a gradient in it was not finite.
        in_a_row: How many of the last updates without a clean one between.
    """

    name: str
    scale: float
    overflows: int
    in_a_row: int


class GroupScaler(LossScaler):
    """Scales per group: an overflow in any group skips the update, and moves the scales of that group only.

    Args:
        names: Of the groups; the first is the rest of the model, whose scale multiplies the loss.
        scales: At the beginning, one per name.
        ratios: Told the scales in use, for the borders to change between them.
        rule: Moves each scale.
        pinned: Whether the first scale stays 1, as nothing would tell of its overflows.
        exact: Use the scales as they are, and from the start; otherwise the power of two below, between the first
            :meth:`scale` and :meth:`update`.
        agree: See :class:`~torchboost.algorithms.loss_scale_group.scalers.LossScaler`.
        process_group: Likewise.
    """

    def __init__(
        self,
        names: Sequence[str],
        scales: Sequence[float],
        ratios: Ratios,
        *,
        rule: ScaleRule = GROUP_RULE,
        pinned: bool = True,
        exact: bool = False,
        agree: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(len(names), agree=agree, process_group=process_group)
        self.rule = rule
        self._names, self._ratios, self._pinned, self._exact = tuple(names), ratios, pinned, exact
        self._membership: tuple[list[Tensor], list[list[Tensor]]] = ([], [])
        self._restart(scales)

    @property
    def report(self) -> tuple[GroupStatus, ...]:
        """The status of every group, including the rest of the model if its scale moves."""
        first = 1 if self._pinned else 0
        moving = list(zip(self._names, self._moving, strict=True))[first:]
        return tuple(GroupStatus(name, each.state.scale, each.overflows, each.in_a_row) for name, each in moving)

    def parameters_of(self, group: int) -> Sequence[Tensor]:
        """Return the parameters of a group, counted from 1."""
        raise NotImplementedError

    def name_of(self, param: Tensor) -> str:
        """Name a parameter in messages."""
        return f"a parameter of shape {tuple(param.shape)}"

    def get_scale(self) -> float:
        """Return the smallest scale of a group."""
        return min(status.scale for status in self.report)

    def _restart(self, scales: Sequence[float]) -> None:
        states = [self.rule.start(scale) for scale in scales]
        if self._pinned:
            states[0] = ScaleState(1.0)
        self._moving = [
            MovingScale(self.rule, state, f"the loss scale of group '{name}'")
            for name, state in zip(self._names, states, strict=True)
        ]
        self._settle()

    def _settle(self) -> None:
        if self._in_use is None:
            self._ratios.set(self._applied() if self._exact else None)

    def _applied(self) -> list[float]:
        if self._exact:
            return [each.state.scale for each in self._moving]
        # Powers of two change the exponent of a gradient only, so that unscaling gives back the same bits.
        return [2.0 ** math.floor(math.log2(each.state.scale)) for each in self._moving]

    def _begun(self, scales: Sequence[float]) -> None:
        self._ratios.set(scales)

    def _members(self, optimizer: Optimizer) -> list[list[Tensor]]:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        known, members = self._membership
        # Sharding and surgery replace parameters, so the groups are resolved again when the parameters of the optimizer
        # change.
        if len(params) != len(known) or any(a is not b for a, b in zip(params, known, strict=True)):
            owner = {id(p): i for i in range(1, self._count) for p in self.parameters_of(i)}
            members = [[] for _ in range(self._count)]
            for param in params:
                members[owner.get(id(param), 0)].append(param)
            self._membership = (params, members)
        return members

    def _named(self, params: Sequence[Tensor]) -> str | None:
        bad = bad_gradient(params)
        return None if bad is None else f"the gradient of {self.name_of(params[bad])}"

    def _conclude(self, overflow: Sequence[bool], where: Sequence[str | None]) -> None:
        moving = list(zip(self._moving, overflow, where, strict=True))[self._pinned :]
        for each, bad, _ in moving:
            each.move(bad)
        self._settle()
        for each, bad, name in moving:
            each.warn(bad, name)

    def _own_state(self) -> dict[str, Any]:
        return {
            "names": list(self._names),
            "states": [list(each.state) for each in self._moving],
            "alarms": [each.counts() for each in self._moving],
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        if list(state["names"]) != list(self._names):
            raise ValueError(
                f"the checkpoint holds the groups {list(state['names'])}, but this scaler has {list(self._names)}; "
                "build it with the groups that it was saved with."
            )
        self._in_use = None
        for each, entry, counts in zip(self._moving, state["states"], state["alarms"], strict=True):
            each.load(entry, counts)
        self._settle()


class GroupGradScaler(GroupScaler):
    """A ``GradScaler`` with one scale per group, for float16 models that no single scale fits.

    Borders at the modules of each group change the scale of the gradients that pass, and are the identity in the
    forward pass; the code of the model does not change. With ``s_g`` the scale of group g, its gradients are ``s_g``
    times the true ones during the backward pass, and the true ones, bit for bit but for under- and overflow, after
    :meth:`unscale_`. (What is multiplied is the power of two below ``s_g``.) Between :meth:`update` and the next
    :meth:`scale` the borders let gradients pass unchanged, so a backward pass without this scaler is as it was. They go
    with the scaler.

    If a gradient in any group is not finite, the update is skipped, the scales of the affected groups shrink and all
    others grow. An inf that arises in one group reaches those before it, which then shrink too.

    Args:
        model: Gets hooks; wrapped or not. What is not in a group is one more group, the rest.
        groups: So many groups of blocks, as even as possible; or for each group the names of its modules, as of
            ``named_modules()`` with ``*`` and ``?``, or types of modules, or modules. A name takes all that is inside.
        init_scale: At the beginning, for all groups or one for each.
        rule: Moves each scale: see :class:`ScaleRule`.
        agree: Whether an overflow on one rank skips the update on all; every rank must then make the same calls.
        process_group: The ranks that agree; None stands for all.

    Attributes:
        report: How each group stands: ``name``, ``scale``, ``overflows``, ``in_a_row``.
        overflowed: Whether the last update was skipped.

    Raises:
        TypeError, ValueError: An argument is not valid, or no module has a given name.
        IncompatibleError: Two groups, or a group and the rest, share a parameter, the model is compiled already, or
            another of these scalers is on it; nothing was changed.

    Warns:
        ScaleCollapseWarning: A scale collapses; the message names the group and the gradient.

    Cost: one pass over each tensor that crosses a border, in the backward pass; in float16 a copy in float32 of what
    leaves a group for anything but a module of another group. One pass over the gradients and one wait for the device
    per update.

    Limits: a module's weight that is used outside of it (``F.linear(x, embedding.weight)``) gets gradients of the wrong
    scale there; put what uses it into the same group, or neither into any. torch refuses operations in place
    directly on what leaves or enters a group: take the activation behind it into the group.

    Source: layer-wise loss scaling, Zhao et al. 2019 (arXiv:1910.12385); shrinkage and growth as in MindSpore.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = torchboost.GroupGradScaler(model, [["0", "1"], "2"])
        >>> scaler.scale(model(torch.randn(3, 4)).sum()).backward()
        >>> scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Groups = 4,
        *,
        init_scale: Scales = 2.0**16,
        rule: ScaleRule = GROUP_RULE,
        agree: bool = True,
        process_group: Any = None,
    ) -> None:
        check_module(model)
        if not isinstance(rule, ScaleRule):
            raise TypeError(f"rule: found {type(rule).__name__}; give a torchboost.ScaleRule(...).")
        self._removed = self._resumed = False
        self._groups = _resolved(model, groups)
        scales = checked_scales(init_scale, len(self._groups), rule)
        self._model = model
        inside = {id(p) for group in self._groups for module in group.values() for p in module.parameters()}
        ratios = Ratios(len(self._groups) + 1)
        super().__init__(
            [REST, *(_title(group) for group in self._groups)],
            [min(scales), *scales],
            ratios,
            rule=rule,
            pinned=all(id(p) in inside for p in model.parameters()),
            agree=agree,
            process_group=process_group,
        )
        self._borders: ScaleBorders | None = ScaleBorders(self._groups, ratios)

    def __del__(self) -> None:
        if getattr(self, "_borders", None) is not None:  # absent if the groups were refused
            self.remove()

    def parameters_of(self, group: int) -> Sequence[Tensor]:
        """Return the parameters of a group, counted from 1."""
        return [param for module in self._groups[group - 1].values() for param in module.parameters()]

    def name_of(self, param: Tensor) -> str:
        """Name a parameter of the model."""
        names = (name for name, own in unwrap(self._model).named_parameters() if own is param)
        return next(names, super().name_of(param))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale of their group, in place, and look for overflow.

        Raises:
            RuntimeError: Called twice since the last update, or before anything was scaled.
            IncompatibleError: A gradient in float16, or a module in a group that was never called itself.
        """
        if self._borders is not None and not self._resumed:
            self._borders.check_called()
        super().unscale_(optimizer)

    def update(self) -> None:
        """Choose the scales of the next step.

        Raises:
            RuntimeError: No gradients were unscaled since the last update.
        """
        super().update()
        self._resumed = False

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned.

        Raises:
            ValueError: The checkpoint is of another scaler; nothing was loaded.
        """
        super().load_state_dict(state_dict)
        # A window that had begun may hold gradients of modules that are not called again before the update.
        self._resumed = state_dict["in_use"] is not None

    def remove(self) -> None:
        """Remove the borders; the scale is 1 from then on."""
        if self._borders is not None:
            self._borders.remove()
        self._borders = None
        self._in_use = [1.0] * self._count if self._in_use is not None else None
        self._removed = True

    def _applied(self) -> list[float]:
        return [1.0] * self._count if self._removed else super()._applied()


@dataclass(frozen=True, kw_only=True)
class LossScaleGroup(Algorithm):
    """A loss scale per group of modules. The loop must use ``target.scaler``.

    :class:`~torchboost.core.step.TrainStep` and the training cells do; a loop of your own uses ``booster.scaler``, or
    :class:`GroupGradScaler`, as it would a ``GradScaler``. A loop that does not scale trains as before.

    Args:
        groups: So many groups of blocks, or the names of the modules of each group; see :class:`GroupGradScaler`.
        init_scale: At the beginning, for all groups or one for each.
        growth: Factor of a group's scale after a window without overflow.
        shrink: Factor at an overflow.
        window: Updates without overflow per growth.
        floor: Smallest scale.
        ceiling: Largest scale.
        hysteresis: Number of overflows before the scale shrinks; a clean window resets the count.
    """

    name: ClassVar[str] = "loss_scale_group"
    # Before autocast, which asks for a scaler; after the modules were changed.
    traits: ClassVar[Traits] = Traits(order=25, brings_scaler=True)

    groups: int | Sequence[str | Sequence[str]] = 4
    init_scale: float | Sequence[float] = 2.0**16
    growth: float = GROUP_RULE.growth
    shrink: float = GROUP_RULE.shrink
    window: int = GROUP_RULE.window
    floor: float = GROUP_RULE.floor
    ceiling: float = GROUP_RULE.ceiling
    hysteresis: int = GROUP_RULE.hysteresis

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
        """Refuse a target that :meth:`attach` cannot work on.

        Raises:
            ValueError: A name that no module has.
            IncompatibleError: The target or the model has a scaler already, or groups share a parameter.
        """
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

        def release() -> None:
            scaler.remove()
            if target.scaler is scaler:
                target.scaler = None

        return Attachment(undo=release)

    def _rule(self) -> ScaleRule:
        return ScaleRule(
            growth=self.growth,
            shrink=self.shrink,
            window=self.window,
            floor=self.floor,
            ceiling=self.ceiling,
            hysteresis=self.hysteresis,
        )


def checked_scales(scales: Any, groups: int, rule: ScaleRule, name: str = "init_scale") -> list[float]:
    """Return one scale per group.

    Raises:
        TypeError, ValueError: A scale is not a number or out of bounds, or the list has another length.
    """
    if isinstance(scales, (list, tuple)):
        if len(scales) != groups:
            raise ValueError(f"{name}: found {len(scales)} scales for {groups} groups; give one for each, or a number.")
        listed = list(scales)
    else:
        listed = [scales] * groups
    return [rule.start(scale, name).scale for scale in listed]


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
            if not isinstance(pick, (str, nn.Module)) and not (isinstance(pick, type) and issubclass(pick, nn.Module)):
                raise TypeError(f"groups: found {pick!r}; give names of modules, types of modules, or modules.")


def _picks(entry: Any) -> list[Any]:
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def _resolved(model: nn.Module, groups: Any) -> list[dict[str, nn.Module]]:
    """Return the modules of each group by name, none inside another, and no parameter in two groups."""
    _check_groups(groups)
    if is_compiled(model):
        # Graphs that were made before stay in use, and know nothing of hooks that come later.
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
    found = [_outermost({n: m for pick in _picks(entry) for n, m in _matches(network, pick)}) for entry in groups]
    owner: dict[nn.Module, int] = {}
    for index, group in enumerate(found):
        for name, module in group.items():
            for inner in module.modules():
                if owner.setdefault(inner, index) != index:
                    raise ValueError(
                        f"groups: the module '{name}' is in group {owner[inner] + 1} and, itself or a part of it, in "
                        f"group {index + 1}; name it once."
                    )
    for param_name, users in _shared(network, found).items():
        raise IncompatibleError(
            f"loss_scale_group: the parameter '{param_name}' is shared by {' and '.join(users)}, so that its gradient "
            "would be a sum of two scales; put all modules that use it into one group."
        )
    return found


def _matches(network: nn.Module, pick: Pick) -> list[tuple[str, nn.Module]]:
    named = [(name, module) for name, module in network.named_modules() if name]
    if isinstance(pick, str):
        chosen = [(name, module) for name, module in named if fnmatchcase(name, pick)]
    elif isinstance(pick, type):
        chosen = [(name, module) for name, module in named if isinstance(module, pick)]
    else:
        chosen = [(name, module) for name, module in named if module is pick]
    if not chosen:
        hint = nearest(pick, [name for name, _ in named]) if isinstance(pick, str) else ""
        shown = repr(pick) if isinstance(pick, str) else getattr(pick, "__name__", type(pick).__name__)
        raise ValueError(
            f"groups: no module of the model is {shown}; give names as of model.named_modules(), such as "
            f"{named[0][0] if named else 'none here'!r}. {hint}".rstrip()
        )
    return [called for name, module in chosen for called in _called(name, module)]


def _called(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Replace lists of modules, which are never called, by their items."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [pair for child, inner in module.named_children() for pair in _called(f"{name}.{child}", inner)]
    return [(name, module)]


def _outermost(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    inner = {part for module in modules.values() for part in module.modules() if part is not module}
    return {name: module for name, module in modules.items() if module not in inner}


def _automatic(model: nn.Module, network: nn.Module, count: int) -> list[dict[str, nn.Module]]:
    names = {module: name for name, module in network.named_modules() if name}
    blocks = blocks_of(model)
    starts = group_starts(len(blocks), count)
    groups: list[dict[str, nn.Module]] = []
    for start, end in zip(starts, (*starts[1:], len(blocks)), strict=True):
        modules = [module for block in blocks[start:end] for module in block.modules if module in names]
        pairs = [pair for module in modules for pair in _called(names[module], module)]
        groups.append(_outermost(dict(pairs)))
    while shared := _shared(network, groups):
        # Tied weights have one gradient: whatever uses them goes to the rest of the model.
        tied = {id(network.get_parameter(name)) for name in shared}
        groups = [{n: m for n, m in group.items() if tied.isdisjoint(map(id, m.parameters()))} for group in groups]
    kept = [group for group in groups if any(True for m in group.values() for _ in m.parameters())]
    if not kept:
        raise IncompatibleError(
            "loss_scale_group: found no block that does not share its parameters; name the modules of each group in "
            "'groups'."
        )
    return kept


def _shared(network: nn.Module, groups: Sequence[Mapping[str, nn.Module]]) -> dict[str, list[str]]:
    """Return the parameters that modules of different groups use, with the names of those modules."""
    owner = {inner: i for i, group in enumerate(groups, 1) for module in group.values() for inner in module.modules()}
    users: dict[int, dict[int, str]] = {}
    for name, module in network.named_modules():
        for param in module.parameters(recurse=False):
            users.setdefault(id(param), {}).setdefault(owner.get(module, 0), f"'{name}'")
    return {n: list(users[id(p)].values()) for n, p in network.named_parameters() if len(users[id(p)]) > 1}


def _title(group: Mapping[str, nn.Module]) -> str:
    names = list(group)
    return ", ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
