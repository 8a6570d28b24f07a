"""From a level, a configuration and the facts to the algorithms that run, and the reasons for those that do not."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.config import BoostConfig, BoostSwitches, ConfigSource
from torchboost.core.algorithm import Algorithm, Attached, Scaler, Target, attach_all
from torchboost.core.arguments import check_loss_fn, check_module, check_optimizer, check_pair, check_scaler
from torchboost.core.step import TrainStep
from torchboost.core.wrapping import hookable, wrapper_of
from torchboost.errors import ConfigError, IncompatibleError, nearest
from torchboost.registry import LEVELS, REGISTRY, Entry, Facts

__all__ = ["Dropped", "Plan", "boost", "resolve"]

SWITCHES = tuple(name for name in BoostSwitches.model_fields if name != "mode")


class Dropped(NamedTuple):
    """An algorithm that was asked for and is left out."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which algorithms were chosen, which were dropped, and why. A value: it can be printed, compared and reused.

    Args:
        level: The level it was resolved for.
        mode: The mode of the configuration: auto, manual, enable_all, disable_all.
        algorithms: Settings of what will run, in attach order.
        dropped: What was asked for and left out, with the reason.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> plan = torchboost.Plan.of("O1", facts=torchboost.Facts.measure(model))
        >>> plan.transform(model)  # before DDP, FSDP2, compile
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> attached = plan.attach(torchboost.Target(model, optimizer))
        >>> attached.remove()
    """

    level: str
    mode: str
    algorithms: tuple[Algorithm, ...]
    dropped: tuple[Dropped, ...] = ()

    @classmethod
    def of(cls, level: str = "O0", config: ConfigSource | None = None, facts: Facts | None = None) -> Plan:
        """Load ``config`` and resolve it.

        Args:
            level: ``"O0"``, ``"O1"`` or ``"O2"``.
            config: A dict, a path to a JSON file, JSON text, a :class:`BoostConfig`, or nothing.
            facts: By default measured here, without a model.

        Raises:
            ConfigError: Unknown level, section, key or setting, wrong type or value out of range.
        """
        loaded = config if isinstance(config, BoostConfig) else BoostConfig.load(config)
        return resolve(loaded, level, facts if facts is not None else Facts.measure())

    def fit(self, model: nn.Module, optimizer: Optimizer) -> Plan:
        """Return the plan without the algorithms that would change nothing for this pair; the reasons are listed.

        An algorithm that has transformed the model already stays on.

        Raises:
            TypeError: Not a module, or not an optimizer.
            ValueError: None of the parameters of the optimizer belongs to the model.
            IncompatibleError: The optimizer calls no hooks and wraps no other one.
        """
        check_pair(model, optimizer)
        inner = hookable(optimizer)
        reasons = {a.name: None if a.applied(model) else a.idle(model, inner) for a in self.algorithms}
        idle = tuple(Dropped(name, reason) for name, reason in reasons.items() if reason is not None)
        kept = tuple(a for a in self.algorithms if reasons[a.name] is None)
        return replace(self, algorithms=kept, dropped=self.dropped + idle)

    def transform(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Let every algorithm change the modules; do this before the model is wrapped, sharded or compiled.

        Doing it twice is harmless. Parameters keep their identity, but for those an algorithm replaces;
        pass the optimizer where it exists already and it follows.

        Raises:
            TypeError: Not a module, or not an optimizer.
            IncompatibleError: The model is wrapped already and some algorithm still has to change it.
        """
        check_module(model)
        if optimizer is not None:
            check_optimizer(optimizer)
            optimizer = hookable(optimizer)
        pending = [a for a in self.algorithms if a.needs_transform(model)]
        wrapper = wrapper_of(model)
        if pending and wrapper is not None:
            raise IncompatibleError(
                f"{', '.join(a.name for a in pending)} must change the modules of the model, but it is already wrapped "
                f"by {wrapper}; call plan.transform(model) on the bare model, then wrap it."
            )
        for algorithm in pending:
            algorithm.transform(model, optimizer)

    def attach(self, target: Target) -> Attached:
        """Hook every algorithm into a loop; a bare model is transformed first where that is still to be done."""
        return attach_all(target, self.algorithms)

    def explain(self) -> str:
        """Return for people what is on, with its settings, and what is not, with the reason."""
        lines = [f"level {self.level}, mode {self.mode}"]
        width = max((len(n) for n in [a.name for a in self.algorithms] + [d.name for d in self.dropped]), default=0)
        lines.append("on:" if self.algorithms else "on: nothing, training is unchanged")
        lines += [f"  {a.name:<{width}}  {REGISTRY[a.name].summary}: {a!r}" for a in self.algorithms]
        if self.dropped:
            lines.append("left out:")
            lines += [f"  {d.name:<{width}}  {d.reason}" for d in self.dropped]
        return "\n".join(lines)


def resolve(config: BoostConfig, level: str, facts: Facts) -> Plan:
    """Turn level, configuration and facts into a plan: a pure function, same inputs, same plan.

    Order of decisions: mode gives the requested set; ``extra`` adds and removes; one algorithm may bring or
    displace others; what these facts rule out is dropped; the rest is built and sorted by attach order.
    Settings of an algorithm: the level's row, overridden by the keys the user wrote in the reference's
    section, overridden by ``extra``. Outside mode auto the section's defaults take the place of the level's row.
    ``grad_freeze.total_steps``, where the user wrote it, is the length of the run for every algorithm, and
    ``common.device_number`` the number of ranks on a node.

    Raises:
        ConfigError: Unknown level, unknown name or setting under ``extra``, or a setting of wrong type or range.
    """
    if level not in LEVELS:
        raise ConfigError("level", found=repr(level), allowed=", ".join(LEVELS), hint=nearest(str(level), LEVELS))
    for name in config.extra:
        if name not in REGISTRY:
            allowed, hint = ", ".join(REGISTRY), nearest(name, REGISTRY)
            raise ConfigError(f"extra.{name}", found="no algorithm of that name", allowed=allowed, hint=hint)
    if "total_steps" in config.grad_freeze.model_fields_set:
        facts = replace(facts, total_steps=config.grad_freeze.total_steps)
    per_node = _ranks_per_node(config)
    if per_node is not None:
        per_node = min(per_node, facts.world_size)
        facts = replace(facts, devices_per_node=per_node, nodes=-(-facts.world_size // per_node))
    wanted = _wanted(config, level)
    reasons = {name: _objection(name, wanted, config, facts) for name in wanted}
    dropped = tuple(Dropped(name, reason) for name, reason in reasons.items() if reason is not None)
    dropped += _unread(config, wanted, on=[name for name, reason in reasons.items() if reason is None])
    built = [
        _build(REGISTRY[name], _settings(REGISTRY[name], config, level, facts))
        for name, reason in reasons.items()
        if reason is None
    ]
    built.sort(key=lambda algorithm: algorithm.traits.order)
    return Plan(level=level, mode=config.boost.mode, algorithms=tuple(built), dropped=dropped)


def _ranks_per_node(config: BoostConfig) -> int | None:
    """Return what the user wrote; the reference's default of 8 is not what the launcher started."""
    extra = config.extra.get("adasum")
    own = extra.get("devices_per_node") if isinstance(extra, dict) else None
    if type(own) is int and own >= 1:
        return own
    return config.common.device_number if "device_number" in config.common.model_fields_set else None


def _wanted(config: BoostConfig, level: str) -> list[str]:
    mode = config.boost.mode
    if mode == "disable_all":
        return []
    chosen = {
        "auto": list(LEVELS[level]),
        "manual": [name for name in SWITCHES if getattr(config.boost, name)],
        "enable_all": [*SWITCHES, *(name for name in REGISTRY if name not in SWITCHES)],
    }[mode]
    wanted = dict.fromkeys(chosen)
    for name, setting in config.extra.items():
        if setting is False:
            wanted.pop(name, None)
        else:
            wanted[name] = None
    for entry in REGISTRY.values():
        if entry.name not in wanted or not entry.brings:
            continue
        section = getattr(config, entry.section)
        for key, brought in entry.brings.items():
            decided = brought not in config.extra and (mode != "auto" or key in section.model_fields_set)
            if decided and getattr(section, key):
                wanted[brought] = None
            elif decided:
                wanted.pop(brought, None)
    return list(wanted)


def _unread(config: BoostConfig, wanted: list[str], on: list[str]) -> tuple[Dropped, ...]:
    """List what mode auto, which goes by the level, was told in vain."""
    if config.boost.mode != "auto":
        return ()
    unread = {}
    for name in SWITCHES:
        if name in on and name in config.boost.model_fields_set and not getattr(config.boost, name):
            unread[f"boost.{name}"] = f"false is not read: mode auto goes by the level; use extra.{name} = false"
        if name in wanted:
            continue
        section = getattr(config, name, None)
        written = section.model_fields_set - {"total_steps"} if section is not None else set()
        if written or getattr(config.boost, name):
            unread[name] = "mode auto goes by the level and reads no switches; use mode manual, or extra"
            if REGISTRY[name].in_no_level:
                unread[name] += f" (in no level: {REGISTRY[name].in_no_level})"
    return tuple(Dropped(name, reason) for name, reason in unread.items())


def _objection(name: str, wanted: list[str], config: BoostConfig, facts: Facts) -> str | None:
    entry = REGISTRY[name]
    winner = next((w for w in wanted if name in REGISTRY[w].displaces), None)
    if winner is not None and REGISTRY[winner].unusable(facts) is None:
        return f"{winner} is on, which stands alone"
    asked_for = config.boost.mode != "auto" or name in config.extra
    return entry.unusable(facts) or (None if asked_for else entry.unproven(facts))


def _settings(entry: Entry, config: BoostConfig, level: str, facts: Facts) -> dict[str, Any]:
    auto = config.boost.mode == "auto"
    settings = dict(LEVELS[level].get(entry.name, {})) if auto else {}
    if entry.section:
        section = getattr(config, entry.section)
        written = section.model_fields_set if auto else entry.words
        for key, ours in entry.words.items():
            if key in written:
                value = getattr(section, key)
                settings[ours] = entry.values.get(key, {}).get(value, value)
    known = {ours: getattr(facts, fact) for fact, ours in entry.facts.items()}
    settings |= {ours: value for ours, value in known.items() if value is not None}
    extra = config.extra.get(entry.name, True)
    return settings | extra if isinstance(extra, dict) else settings


def _build(entry: Entry, settings: Mapping[str, Any]) -> Algorithm:
    known = [f.name for f in fields(entry.algorithm) if f.init]  # pyright: ignore[reportArgumentType]
    hints = typing.get_type_hints(entry.algorithm)
    for key, value in settings.items():
        path = f"extra.{entry.name}.{key}"
        if key not in known:
            allowed = ", ".join(known) or "no settings"
            raise ConfigError(path, found="no setting of that name", allowed=allowed, hint=nearest(key, known))
        try:
            TypeAdapter(hints[key]).validate_python(value, strict=True)
        except ValidationError as error:
            hint = error.errors()[0]["msg"]
            raise ConfigError(path, found=repr(value), allowed=_in_words(hints[key]), hint=hint) from None
    try:
        return entry.algorithm(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"extra.{entry.name}", found=repr(dict(settings)), allowed=str(error)) from None


def _in_words(hint: Any) -> str:
    """Say in the terms of JSON what a type allows."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(repr(choice) for choice in typing.get_args(hint))
    parts = typing.get_args(hint)
    if parts:
        return " or ".join(_in_words(part) for part in parts)
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}
    return words.get(hint, str(hint))


def boost(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Tensor | tuple[Tensor, float]] | None = None,
    *,
    level: str = "O0",
    config: ConfigSource | None = None,
    scaler: Scaler | None = None,
) -> TrainStep:
    """The shortest way in: resolve a plan for this model, attach it, return the training step.

    Args:
        model: Changed in place where the plan needs it; must not be wrapped yet if so.
        optimizer: Stays the caller's; it follows replaced parameters.
        loss_fn: Called as ``loss_fn(model(*inputs[:-1]), inputs[-1])``; without it the model returns the loss. The
            loss may come with the number of samples or tokens behind it, see :class:`~torchboost.TrainStep`.
        level: ``"O0"`` changes nothing, ``"O1"`` keeps the accuracy, ``"O2"`` may cost up to 3 points.
        config: Overrides, see :meth:`Plan.of`.
        scaler: A ``GradScaler``; the step scales, unscales and updates it. Autocast to float16 needs one.

    Returns:
        The step; call it with the inputs of a batch. ``step.attached.remove()`` takes everything away again.

    Raises:
        TypeError: Not a module, not an optimizer, not a scaler, or ``loss_fn`` cannot be called.
        ValueError: None of the parameters of the optimizer belongs to the model.
        ConfigError: See :meth:`Plan.of`.
        IncompatibleError: An algorithm cannot work on this pair, or the model is wrapped already; nothing was changed.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> step = torchboost.boost(model, optimizer, torch.nn.functional.cross_entropy, level="O1")
        >>> loss, overflow, scale = step(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    """
    check_pair(model, optimizer)
    check_scaler(scaler)
    if loss_fn is not None:
        check_loss_fn(loss_fn)
    plan = Plan.of(level, config, Facts.measure(model)).fit(model, optimizer)
    target = Target(model, optimizer, scaler)
    attached = plan.attach(target)
    if loss_fn is None:
        return TrainStep(target, lambda *inputs: target.model(*inputs), attached=attached)
    return TrainStep(target, lambda *inputs: loss_fn(target.model(*inputs[:-1]), inputs[-1]), attached=attached)
