"""Another optimizer from a given one: Muon for its hidden matrices, or a schedule-free rule, and rates that are scaled.

:func:`torchboost.boost` applies the section ``recipe`` of a configuration with :func:`apply_recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.config import RecipeSection
from torchboost.core.arguments import check_number, check_pair, is_number
from torchboost.core.torch_private import drives_schedule, step_post_hooks, step_pre_hooks
from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError, warn_no_effect
from torchboost.optim.groups import ParamGroup, muon_groups, options_of
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.mixed import GROUP_RULES, MixedOptimizer
from torchboost.optim.rules.muon import Muon
from torchboost.optim.rules.schedule_free import ScheduleFreeAdamW, warn_if_evaluated
from torchboost.optim.transforms import CENTRALIZE
from torchboost.optim.wrapping_optimizer import DirectSteps, described_groups

OF_TORCH: dict[type[Optimizer], str] = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
"""Rules of torch that a group of :class:`MixedOptimizer` follows bit for bit."""

SCALED = "recipe_rate"
"""Key of a param group whose learning rate a recipe has scaled. It is saved, so that no rate is scaled twice."""

_AFTER_BOOST = (
    "build the schedule after boost, on boosted.optimizer, for boosted.steps updates: "
    "scheduler = ...(boosted.optimizer, ...)"
)
_AFTER_MUON = "build the schedule after muon_from, on the optimizer that it returns"


def muon_from(optimizer: Optimizer, model: nn.Module, *, lr: float, sample: Any = None) -> MixedOptimizer:
    """Return an optimizer in which hidden matrices have Muon, and the rest moves as under the given one.

    The parameters are the given optimizer's, group by group, including frozen ones and parameters of other modules.
    Hidden matrices, filters and stacks of matrices, as found by :func:`~torchboost.optim.muon_groups`, follow Muon with
    ``momentum=0.9`` and the scale ``"original"``. Everything else keeps rule and options of its group, and is updated
    as the given optimizer would, bit for bit. A group with both kinds becomes two, the matrices after the rest.
    If groups have different rates, their matrices keep the proportion. The weight decay of matrices is such that
    ``lr * weight_decay``, the share by which an update shrinks the weights, equals the group's.

    Schedules that scale the rates of the groups, such as ``LambdaLR`` and ``CosineAnnealingLR``, fit. Schedules that
    write rates, such as ``OneCycleLR``, take one per group: ``[group["lr"] for group in optimizer.param_groups]``, with
    ``cycle_momentum=False``. If a group is added later, give it its rule and options.

    Args:
        optimizer: SGD, Adam or AdamW of torch, or a rule that a group of :class:`MixedOptimizer` may have. It must
            be fresh: no step, no checkpoint, no hook and no schedule yet. It is not changed. Do not step it any more.
        model: Wrapped or not. It is not changed.
        lr: Learning rate of the matrices, in the group with matrices that has the largest rate. 0.02 is usual.
        sample: An input of the model. None guesses one. See :func:`~torchboost.optim.muon_groups`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``lr`` is out of range, no parameter belongs to the model, or the model does not run on ``sample``.
        IncompatibleError: The optimizer is of another class, is not fresh, has a schedule as option, has Muon already,
            or has an option that torchboost's form of the rule does not have.

    Warns:
        NoEffectWarning: There is no hidden matrix to train.

    Cost: two forward passes of a copy of the model on a small input.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = muon_from(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, lr=0.02)
        >>> [(group["rule"], group["lr"], len(group["params"])) for group in optimizer.param_groups]
        [('sgd', 0.1, 5), ('muon', 0.02, 1)]
    """
    check_pair(model, optimizer)
    check_number("lr", lr, above=True)
    for group in optimizer.param_groups:
        _rule_of(optimizer, group)
    _check_plain(optimizer, _AFTER_MUON)
    _check_fresh(optimizer, _AFTER_MUON)
    return _with_muon(optimizer, described_groups(optimizer), model, lr, sample)


@dataclass(frozen=True)
class Applied:
    """The optimizers to train, one for each given one, and their description in words."""

    optimizers: list[Optimizer]
    built: str
    undo: Callable[[], None]
    """Lets the given optimizers be stepped again, and gives them back their rates unless these have changed."""


def apply_recipe(
    recipe: RecipeSection, optimizers: Sequence[Optimizer], model: nn.Module, *, total_steps: int | None
) -> Applied:
    """Build the optimizer that a recipe asks for, and scale rates.

    Without another optimizer the rates of the given ones are scaled in place. Otherwise the given one does not change,
    but refuses steps, because the new one must be stepped. If the new one is schedule-free, a hook of the model warns
    of evaluations on the weights of training.

    Raises:
        IncompatibleError: The recipe cannot be applied to these optimizers. Nothing is changed.

    Warns:
        NoEffectWarning: The length of the run is not known, so it is not shortened. Or there is no hidden matrix.
    """
    if recipe.is_neutral:
        return Applied(list(optimizers), "", lambda: None)
    if recipe.length < 1 and total_steps is None:
        warn_no_effect(
            f"recipe.length = {recipe.length:g} shortens nothing, because the length of the run is not known. Pass "
            "boost(..., total_steps=...), the number of updates, and train boosted.steps.",
            above=3,
        )
    inner = [hookable(one) for one in optimizers]
    _check(recipe, optimizers, inner)
    undo = ExitStack()
    if recipe.optimizer is None:
        tensors: dict[int, tuple[Any, Any]] = {}
        for one in inner if recipe.rate != 1 else ():
            undo.callback(_scale(one, recipe.rate, tensors))
        return Applied(list(optimizers), " and ".join(type(one).__name__ for one in optimizers), undo.close)
    given, lr, groups = optimizers[0], recipe.built_lr, described_groups(optimizers[0])
    if recipe.rate != 1:
        groups = [{**group, "lr": group["lr"] * recipe.rate} for group in groups]
    new: UpdateRule
    if recipe.optimizer == "muon":
        new = _with_muon(given, groups, model, lr, None)
        built = _in_words(new, lr, type(given).__name__)
    else:
        new = _schedule_free(given, groups, lr)
        built = f"schedule-free AdamW at {lr:g} in place of {type(given).__name__}"
        undo.callback(warn_if_evaluated(model, new).remove)
    instead = (
        f"the recipe trains with {built}, so a step of the {type(given).__name__} that was given would train twice; "
        "step boosted.optimizer: model, optimizer = boost(model, optimizer, ...)."
    )
    undo.callback(DirectSteps(given, new, instead).remove)
    undo.callback(new.register_step_pre_hook(_LooksForSchedule(given)).remove)
    return Applied([new], built, undo.close)


def _check(recipe: RecipeSection, optimizers: Sequence[Optimizer], inner: Sequence[Optimizer]) -> None:
    """Refuse optimizers to which a recipe cannot be applied. ``inner`` are the optimizers that call hooks."""
    if recipe.optimizer is not None and len(optimizers) > 1:
        raise IncompatibleError(
            f"found recipe.optimizer={recipe.optimizer!r} and {len(optimizers)} optimizers; a recipe replaces one. "
            "Give one optimizer with several groups, or leave recipe.optimizer out."
        )
    for one, within in zip(optimizers, inner, strict=True):
        if recipe.optimizer is not None and one is not within:
            raise IncompatibleError(
                f"found recipe.optimizer={recipe.optimizer!r} and a {type(one).__name__} around a "
                f"{type(within).__name__}; give the inner one, and wrap boosted.optimizer."
            )
        for group in one.param_groups if recipe.optimizer == "muon" else ():
            _rule_of(one, group)
        _check_unscheduled(one, _AFTER_BOOST)
        _check_plain(within, _AFTER_BOOST)
        if recipe.rate != 1 or recipe.optimizer is not None:
            _check_fresh(within, _AFTER_BOOST, hooks=recipe.optimizer is not None)
            for group in within.param_groups:
                _rate(within, group)


class _LooksForSchedule:
    """A hook of an optimizer that looks for schedules on the one that it replaces: at the first step, for their mark.

    ``ReduceLROnPlateau`` sets no mark. It shows when it first changes a rate, in a run, so this only warns.
    """

    def __init__(self, given: Optimizer) -> None:
        self._given, self._looked, self._warned = given, False, False
        self._rates = self._now()

    def _now(self) -> list[Any]:
        """Return the rates that are numbers. To read a tensor might wait for the device."""
        return [rate for group in self._given.param_groups if is_number(rate := group.get("lr"))]

    def __call__(self, *_: Any) -> None:
        if not self._looked:
            _check_unscheduled(self._given, _AFTER_BOOST)
            self._looked = True
        if not self._warned and self._now() != self._rates:
            self._warned = True
            warn_no_effect(
                f"the rates of the {type(self._given).__name__} that was given have changed, as by ReduceLROnPlateau, "
                "which has no effect, as the recipe trains with another optimizer; build it on boosted.optimizer.",
                above=3,
            )


def _check_unscheduled(optimizer: Optimizer, later: str) -> None:
    """Refuse a schedule. ``later`` says how to build it instead, also below."""
    if drives_schedule(optimizer):
        raise IncompatibleError(
            f"found a schedule on the {type(optimizer).__name__} that was given, whose rates no other optimizer gets; "
            f"{later}."
        )


def _check_plain(optimizer: Optimizer, later: str) -> None:
    """Refuse schedules, which were made for the given rates and the full length."""
    _check_unscheduled(optimizer, later)
    for group in described_groups(optimizer):
        for key in ("lr", "weight_decay"):
            if callable(group.get(key)):
                raise IncompatibleError(
                    f"found a schedule as {key} of a {type(optimizer).__name__}, made for the given rate and length; "
                    f"give a number, and {later}."
                )


def _check_fresh(optimizer: Optimizer, later: str, *, hooks: bool = True) -> None:
    if optimizer.state or any(SCALED in group for group in optimizer.param_groups):
        raise IncompatibleError(
            f"found a {type(optimizer).__name__} that has a state, or rates that a recipe has scaled already; give a "
            "fresh one, and load a checkpoint afterwards, into boosted.optimizer, or into what muon_from returned."
        )
    if hooks and (step_pre_hooks(hookable(optimizer)) or step_post_hooks(hookable(optimizer))):
        raise IncompatibleError(
            f"found hooks on the steps of this {type(optimizer).__name__}, such as those of a GradientPipeline, which "
            "another optimizer would not call; register them afterwards, on the new one. A factory of bench and tune "
            "clips gradients in its before_step."
        )
    if hooks and any("initial_lr" in group for group in optimizer.param_groups):
        raise IncompatibleError(
            f"found 'initial_lr' in the groups of a {type(optimizer).__name__}, as schedules set it; leave it out, and "
            f"{later}."
        )


def _rate(optimizer: Optimizer, group: Mapping[str, Any]) -> Any:
    rate = group.get("lr")
    if not is_number(rate) and not (isinstance(rate, Tensor) and rate.numel() == 1):
        raise IncompatibleError(
            f"found lr={rate!r} in a group of {type(optimizer).__name__}; give a number or a tensor with one element."
        )
    return rate


def _scale(optimizer: Optimizer, rate: float, tensors: dict[int, tuple[Any, Any]]) -> Callable[[], None]:
    """Scale the rates of an optimizer in place, and return a function that restores them unless they have changed.

    ``tensors`` holds the tensors that were scaled already, because groups and optimizers may share them.
    """
    before: list[dict[str, tuple[Any, Any]]] = []
    for options in (optimizer.defaults, *optimizer.param_groups):
        rates: dict[str, tuple[Any, Any]] = {}
        for key in ("lr", "initial_lr"):
            old = options.get(key)
            if isinstance(old, Tensor):  # changed in place: compiled steps know it
                if id(old) not in tensors:
                    tensors[id(old)] = old.clone(), old.mul_(rate).clone()
                rates[key] = tensors[id(old)]
            elif old is not None:
                options[key] = old * rate
                rates[key] = old, options[key]
        before.append(rates)
    for group in optimizer.param_groups:
        group[SCALED] = rate

    def restore() -> None:
        scheduled = drives_schedule(optimizer)
        for options in optimizer.param_groups:
            options.pop(SCALED, None)
        places = (optimizer.defaults, *optimizer.param_groups)  # of which some may have been added
        for options, rates in () if scheduled else zip(places, before, strict=False):
            for key, (old, new) in rates.items():
                if isinstance(old, Tensor) and isinstance(options.get(key), Tensor):
                    options[key].copy_(torch.where(options[key] == new, old, options[key]))
                elif options.get(key) == new:
                    options[key] = old

    return restore


def _rule_of(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """Return the name of the rule of a group. Refuse one that no group may have, and Muon."""
    kind = type(optimizer)
    names = {**OF_TORCH, **{rule: name for name, rule in GROUP_RULES.items()}}
    name = group.get("rule", optimizer.defaults["rule"]) if kind is MixedOptimizer else names.get(kind)
    if name == "muon":
        raise IncompatibleError(
            f"found a {kind.__name__} that has Muon already; give the optimizer that you had before, or leave "
            "recipe.optimizer out."
        )
    if name is None:
        ours = ", ".join(rule.__name__ for rule in GROUP_RULES.values() if rule is not Muon)
        raise IncompatibleError(
            f"found {kind.__module__}.{kind.__name__}, whose rule cannot be kept for the rest of the weights. Give "
            f"torch.optim's SGD, Adam or AdamW, or torchboost.optim's {ours} or MixedOptimizer; or build both with "
            "MixedOptimizer(muon_groups(model)), where the rest has AdamW."
        )
    return name


def _kept(optimizer: Optimizer, group: Mapping[str, Any], rule: str) -> ParamGroup:
    """Return the options of a group that keeps its rule, without entries that torch's class would not read."""
    options = options_of(group)
    if type(optimizer) in OF_TORCH:
        own = set(_defaults(GROUP_RULES[rule])) - set(optimizer.defaults)
        options = {key: value for key, value in options.items() if key not in own}
        if options.get(CENTRALIZE):  # torch's class does not read it, and a pipeline centralises without it too
            del options[CENTRALIZE]
    return {**options, "rule": rule}


def _defaults(rule: Any) -> dict[str, Any]:
    return rule([{"params": []}]).defaults


def _moved(optimizer: Optimizer, group: Mapping[str, Any], largest: float, lr: float, rule: type) -> ParamGroup:
    """Return the options of a group whose parameters get another rule, with ``lr`` in place of the ``largest`` rate.

    Options that any rule has are kept, and entries that are the user's own, such as a name.
    """
    own = optimizer.defaults_for(group) if isinstance(optimizer, UpdateRule) else optimizer.defaults
    common = {"maximize", "master_weights"} & own.keys()
    strange = {*_defaults(rule), *own, "rule", "lr", "weight_decay", "updates"} - common
    return {
        **{key: value for key, value in options_of(group).items() if key not in strange},
        "lr": lr * (float(group["lr"]) / largest),
        "weight_decay": float(group.get("weight_decay", 0.0)) * largest / lr,
    }


def _members(group: Mapping[str, Any], chosen: Callable[[Any], bool]) -> ParamGroup:
    """Return some parameters of a group, and their names if it has them."""
    places = [place for place, param in enumerate(group["params"]) if chosen(param)]
    return {key: [group[key][place] for place in places] for key in ("params", "param_names") if key in group}


def _with_muon(
    optimizer: Optimizer, groups: Sequence[ParamGroup], model: nn.Module, lr: float, sample: Any
) -> MixedOptimizer:
    rules = [_rule_of(optimizer, group) for group in groups]
    rates = [float(_rate(optimizer, group)) for group in groups]
    forms: dict[Any, ParamGroup] = {}
    for found in muon_groups(model, sample=sample, include_frozen=True):
        if found["rule"] == "muon":
            forms |= dict.fromkeys(found["params"], options_of(found))
    having = [any(param in forms for param in group["params"]) for group in groups]
    largest = max((rate for rate, has in zip(rates, having, strict=True) if has), default=0.0)
    if any(having) and not largest:
        raise IncompatibleError("found the learning rate 0 for all hidden matrices, so they would not be trained.")
    built: list[ParamGroup] = []
    for group, rule, has in zip(groups, rules, having, strict=True):
        rest = _members(group, lambda param: param not in forms)
        if rest["params"] or not has:
            built.append({**_kept(optimizer, group, rule), **rest})
        for form in {id(forms[param]): forms[param] for param in group["params"] if param in forms}.values():
            members = _members(group, lambda param, form=form: forms.get(param) is form)
            options = {**_moved(optimizer, group, largest, lr, Muon), "momentum": 0.9, "adjust_lr_fn": "original"}
            built.append({**options, **form, **members})
    try:
        mixed = MixedOptimizer(built, rules[0], **_pipeline(optimizer))
    except (TypeError, ValueError) as error:
        raise IncompatibleError(
            f"an option of this {type(optimizer).__name__} cannot be kept for the rest of the weights: {error}"
        ) from error
    if not _matrices(mixed):
        warn_no_effect(
            f"Muon found no hidden matrix or filter to train in this {type(model).__name__}, so "
            f"{type(optimizer).__name__} trains all of it. print(torchboost.optim.muon_groups(model)) says why.",
            above=2,
        )
    return mixed


def _pipeline(optimizer: Optimizer) -> dict[str, Any]:
    if not isinstance(optimizer, UpdateRule):
        return {}
    return {"transforms": optimizer.transforms, "nonfinite": optimizer.nonfinite}


def _matrices(optimizer: Optimizer) -> int:
    """Return the number of trained parameters that follow Muon."""
    muon = [group for group in optimizer.param_groups if group["rule"] == "muon"]
    return sum(param.requires_grad for group in muon for param in group["params"])


def _in_words(optimizer: Optimizer, lr: float, rest: str) -> str:
    count = _matrices(optimizer)
    if not count:
        return f"no hidden matrix for Muon, {rest} for all"
    return f"Muon at {lr:g} for {count} {'matrix' if count == 1 else 'matrices'}, {rest} for the rest"


def _schedule_free(optimizer: Optimizer, groups: Sequence[ParamGroup], lr: float) -> ScheduleFreeAdamW:
    """Return schedule-free AdamW over the groups. Rates and decays follow the rules of :func:`muon_from`."""
    largest = max(float(_rate(optimizer, group)) for group in groups)
    if not largest:
        raise IncompatibleError("found the learning rate 0 in all groups, so nothing would be trained.")
    built = [
        {**_moved(optimizer, group, largest, lr, ScheduleFreeAdamW), **_members(group, lambda param: True)}
        for group in groups
    ]
    return ScheduleFreeAdamW(built, **_pipeline(optimizer))
