"""Choose the algorithms from a level, a configuration and the facts, with a reason for each one that is dropped."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.adaptive_sum import AdaptiveSum
from torchboost.algorithms.grad_freeze.algorithm import GradFreeze
from torchboost.config import BoostConfig, BoostSwitches, ConfigSource, RecipeSection, naming_file
from torchboost.core.algorithm import Algorithm, AlreadyOn, AttachedAlgorithms, Target, attach_all
from torchboost.core.arguments import check_module, check_optimizer, check_pair, check_shapes, in_words
from torchboost.core.files import write_whole
from torchboost.core.wrapping import already_wrapped, hookable, wrapper_of
from torchboost.errors import ConfigError, IncompatibleError, nearest, shown
from torchboost.graph.trace import shared_traces
from torchboost.measure.stopwatch import package_version, processor_name
from torchboost.registry import LEVELS, REGISTRY, Entry, Facts, Loop, build, place
from torchboost.sheet import Explanation, Row

LENGTH = "total_steps"
"""A fact about the run, not a choice: the written value always counts."""
COMPILED = "compile is on, and compiled code takes whole tensors only"
"""Why an algorithm whose traits say ``eager`` is off."""
SWITCHES = tuple(name for name in BoostSwitches.model_fields if name != "mode")
_COMMON = {
    "gradient_split_groups": "AdaSum, which packs the updates by it, is off; DistributedDataParallel has bucket_cap_mb",
    "device_number": "AdaSum is off, and nothing else uses the number of ranks on a node",
}


class Dropped(NamedTuple):
    """A requested algorithm, or one of the level, that does not run, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The chosen algorithms, the dropped ones, and why. A value that can be printed, compared and reused.

    Args:
        level: The level that the plan was made for.
        mode: The mode of the configuration: auto, manual, enable_all, disable_all.
        algorithms: The algorithms that will run, with their settings, in attach order.
        dropped: The requested algorithms, and those of the level, that do not run, with the reasons.
        levers: The algorithms of the level that only change the speed of a step. A trial may switch them on and off.
        total_steps: Updates of the whole run, from the argument or the configuration. None if neither gives it. If the
            recipe shortens the run, the updates that remain.
        unmeasured: Algorithms that the configuration adds to the measured level, takes from it or sets otherwise.
        served: With several optimizers, name of an algorithm that changes the update alone -> the optimizers that it is
            on for, in words.
        recipe: The optimizer, its rates and the length of the run, as configured.
        full_steps: Updates of the whole run before the recipe shortened it. None if that is not known.
        built: What the recipe made of the optimizer, in words. Empty before :func:`torchboost.boost` applied it.

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
    levers: tuple[Algorithm, ...] = ()
    total_steps: int | None = None
    unmeasured: tuple[str, ...] = ()
    served: tuple[tuple[str, str], ...] = ()
    recipe: RecipeSection = field(default_factory=RecipeSection)
    full_steps: int | None = None
    built: str = ""

    @classmethod
    def of(
        cls,
        level: str = "O0",
        config: ConfigSource | None = None,
        facts: Facts | None = None,
        *,
        loop: Loop | None = None,
        total_steps: int | None = None,
    ) -> Plan:
        """Load ``config`` and resolve it.

        Args:
            level: ``"O0"``, ``"O1"`` or ``"O2"``.
            config: A dict, a path to a JSON file, JSON text, a :class:`BoostConfig`, or nothing.
            facts: By default measured on this machine, without a model.
            loop: The owner of the training loop. Overrides ``facts.loop``. See :class:`Facts`.
            total_steps: Number of updates in the whole run. Overrides ``facts.total_steps``. ``recipe.length`` takes
                its share of either. If the configuration has ``grad_freeze.total_steps``, or ``total_steps`` of an
                algorithm under ``extra``, all must equal the number that remains.

        Raises:
            ConfigError: A level, section, key or setting is unknown, or a value has the wrong type or is out of range.
            ValueError: ``loop`` is unknown.
        """
        loaded = BoostConfig.load(config)
        facts = facts if facts is not None else Facts.measure()
        if loop is not None:
            facts = replace(facts, loop=loop)
        if total_steps is not None:
            facts = replace(facts, total_steps=total_steps)
        with naming_file(config):
            if total_steps is not None:
                run_length(loaded, total_steps)
            return resolve(loaded, level, facts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a configuration that gives this plan again, on any machine and at any level, without measuring.

        The file is plain JSON, for ``config=`` of :func:`torchboost.boost`, :func:`torchboost.prepare` and
        :meth:`Plan.of`, and for :class:`torchboost.AutoBoost`. Its section ``extra`` names every algorithm of the
        registry, either with all of its settings or with false, so no level or trial decides about any. An algorithm
        that cannot run elsewhere, such as AdaSum on a single node, is dropped there with the reason. The section
        ``about`` is a note with level, versions, machine and date, which nothing reads.

        Save the plan of a :class:`torchboost.Boosted` after the first training call, when the trial has decided about
        :attr:`levers`. Before, the file has the levers that wait as off.

        Args:
            path: In a folder that exists. The file is written completely or not at all, in place of an earlier one.

        Raises:
            ValueError: The plan has an algorithm that is not in the registry, or a setting that JSON cannot hold, such
                as a function or infinity. Nothing is written.
            OSError: There is no such folder, or the file cannot be written.

        Example:
            >>> import torchboost
            >>> plan = torchboost.Plan.of("O1", total_steps=10_000)
            >>> plan.save("boost.json")  # doctest: +SKIP
            >>> torchboost.Plan.of("O0", "boost.json").algorithms == plan.algorithms  # doctest: +SKIP
            True
        """
        file = Path(os.path.realpath(path))
        if not file.parent.is_dir():
            raise FileNotFoundError(f"found no folder {str(file.parent)!r}; create it first, or give another path.")
        about = {
            "level": self.level,
            "mode": self.mode,
            "torchboost": package_version(),
            "torch": torch.__version__,
            "processor": processor_name(),
            "threads": str(torch.get_num_threads()),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        content = {"about": about, "extra": _as_extra(self.algorithms)}
        if not self.recipe.is_neutral:
            content["recipe"] = self.recipe.model_dump(mode="json")
        write_whole(file, json.dumps(content, indent=2).encode() + b"\n")

    def fit(
        self, model: nn.Module, optimizer: Optimizer, *others: Optimizer, but: Container[str] = frozenset()
    ) -> Plan:
        """Return the plan without the algorithms that would change nothing for this pair. The reasons are listed.

        An algorithm that has already transformed the bare model remains on. If there are other optimizers of the model,
        the algorithms that serve only one optimizer are dropped, too. Those in ``but`` are not asked.

        Raises:
            TypeError: Not a module, or not an optimizer.
            ValueError: None of an optimizer's parameters belongs to the model.
            IncompatibleError: An optimizer does not call hooks and does not wrap another optimizer.
        """
        for one in (optimizer, *others):
            check_pair(model, one)
        inner = [hookable(one) for one in (optimizer, *others)]
        on = {a.name for a in self.algorithms}
        every = (a for a in (*self.levers, *self.algorithms) if a.name not in but)
        asked = {a.name: a for a in every if not (a.name in on and a.applied(model))}
        idle = {name: reason for name, a in asked.items() if (reason := why_idle(a, model, inner)) is not None}
        served = dict(self.served)
        if len(inner) > 1:
            useful = [a for name, a in asked.items() if name not in idle and REGISTRY[name].of_optimizer]
            served |= {a.name: _served(a, model, inner) for a in useful}
        return replace(self.without(idle), served=tuple(served.items()))

    def chosen(self, decisions: Mapping[str, tuple[bool, str]]) -> Plan:
        """Return the plan with levers switched on and off.

        Args:
            decisions: Name of a lever -> whether it is on, and the reason if it is off. Other levers do not change.

        Raises:
            ValueError: A name is not one of :attr:`levers`.
        """
        levers = {lever.name: lever for lever in self.levers}
        unknown = [name for name in decisions if name not in levers]
        if unknown:
            raise ValueError(f"found {', '.join(unknown)}; the levers of this plan are {', '.join(levers) or 'none'}.")
        on = [levers[name] for name, (kept, _) in decisions.items() if kept]
        off = [Dropped(name, reason) for name, (kept, reason) in decisions.items() if not kept]
        algorithms = [*(a for a in self.algorithms if a.name not in decisions), *on]
        dropped = *(entry for entry in self.dropped if entry.name not in decisions), *off
        return replace(self, algorithms=tuple(sorted(algorithms, key=place)), dropped=dropped)

    def without(self, reasons: Mapping[str, str]) -> Plan:
        """Return the plan without some algorithms, by name -> reason, also as levers."""
        kept, levers = (tuple(a for a in of if a.name not in reasons) for of in (self.algorithms, self.levers))
        dropped = (*(d for d in self.dropped if d.name not in reasons), *map(Dropped._make, reasons.items()))
        return replace(self, algorithms=kept, levers=levers, dropped=dropped)

    def transform(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Let every algorithm change the modules. Call it before the model is wrapped, sharded or compiled.

        A second call does nothing. If the optimizer exists already, pass it, and it follows parameters that are
        replaced.

        Raises:
            TypeError: Not a module, or not an optimizer.
            ValueError: A lazy module has no shape yet.
            IncompatibleError: The model is already wrapped, and an algorithm still has to change it.
        """
        check_module(model)
        if optimizer is not None:
            check_optimizer(optimizer)
            optimizer = hookable(optimizer)
        if self.algorithms:
            check_shapes(model)
        with torch.inference_mode(False), shared_traces():  # tensors that are made in that mode cannot be trained
            pending = [a for a in self.algorithms if a.needs_transform(model)]
            if pending and (wrapper := wrapper_of(model)) is not None:
                raise already_wrapped("model", wrapper, "plan.transform")
            for algorithm in pending:
                algorithm.transform(model, optimizer)

    def attach(self, target: Target) -> AttachedAlgorithms:
        """Attach every algorithm to a loop. A bare model is transformed first, if that was not done before.

        Raises:
            IncompatibleError: The plan has a recipe, which only :func:`torchboost.boost` applies. Or as
                :func:`torchboost.core.attach_all` raises it.
        """
        self.check_recipe()
        with torch.inference_mode(False), shared_traces():
            return attach_all(target, self.algorithms)

    def check_recipe(self) -> None:
        """Raise :class:`IncompatibleError` if the plan has a recipe that was not applied."""
        if not (self.recipe.is_neutral or self.built):
            raise IncompatibleError(
                f"found a recipe ({self.recipe.in_words()}), which only torchboost.boost applies; call it with this "
                "configuration, or change optimizer, rates and length yourself and leave the section out."
            )

    def explanation(self, optimizer: str = "") -> Explanation:
        """Return the content of :meth:`explain` as a value, with the name of the optimizer if there is one."""
        level = f"level {self.level}"
        mode = level if self.mode == "auto" else f"mode {self.mode} ({level} adds nothing; no speed is measured)"
        of = f" for {optimizer}" if optimizer else ""
        length = "total_steps not given" if self.total_steps is None else f"{self.total_steps:,} steps"
        recipe = self.recipe.in_words(total_steps=self.full_steps, built=self.built)
        promise = f"your settings, with which the promise of {self.level} was not measured: "
        call = f'torchboost.boost(model, optimizer, "{self.level}", total_steps=...)'
        return Explanation(
            heading=(f"{mode}{of}, {length}", *([f"recipe: {recipe}"] if recipe else [])),
            rows=(*map(self._row_on, self.algorithms), *map(_row_off, self.dropped)),
            unchanged="nothing is on" if recipe else "nothing is on: the optimizer and the model are as you built them",
            notes=(promise + ", ".join(self.unmeasured),) if self.unmeasured else (),
            ask=f"{call} measures which of these pay; plan.save(path) keeps this plan as it is" if self.levers else "",
        )

    def _row_on(self, algorithm: Algorithm) -> Row:
        entry = REGISTRY[algorithm.name]
        settings = own_settings(algorithm, but=(LENGTH,) if self.total_steps is not None else ())  # the heading has it
        did = f"{entry.summary}{f': {settings}' if settings else ''}{dict(self.served).get(algorithm.name, '')}"
        changes = not entry.lever and any(algorithm.name in row for row in LEVELS.values())
        return Row(algorithm.name, "on", did, "changes the training" if changes else "")

    def explain(self) -> str:
        """Return which algorithms are on, with settings other than the defaults, and which were dropped and why."""
        return str(self.explanation().sheet)

    def _repr_html_(self) -> str:
        return self.explanation().sheet._repr_html_()


def _row_off(dropped: Dropped) -> Row:
    state = "was on before" if isinstance(dropped.reason, AlreadyOn) else "off"
    return Row(dropped.name, state if dropped.name in REGISTRY else "not read", str(dropped.reason))


def _as_extra(algorithms: Sequence[Algorithm]) -> dict[str, Any]:
    """Return a section ``extra`` from which these algorithms are read back. A plan built by hand may hold anything."""
    extra: dict[str, Any] = dict.fromkeys(REGISTRY, False)
    for algorithm in algorithms:
        settings = [field.name for field in fields(algorithm) if field.init]  # pyright: ignore[reportArgumentType]
        extra[algorithm.name] = {name: getattr(algorithm, name) for name in settings}
    try:
        section = json.loads(json.dumps(extra, allow_nan=False))
        on = {name: settings for name, settings in section.items() if settings is not False}
        paths = {name: {key: f"extra.{name}.{key}" for key in settings} for name, settings in on.items()}
        read = sorted((build(REGISTRY[name], settings, paths[name]) for name, settings in on.items()), key=place)
        fault = "" if read == list(algorithms) else f"it would be read back as {reprlib.repr(read)}"
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        fault = str(error)
    if fault:
        listed = ", ".join(repr(one)[:200] for one in algorithms)
        raise ValueError(
            f"found the algorithms {listed}, which no configuration gives back: {fault:.300}. "
            "Save a plan of Plan.of, and set in code what JSON cannot hold, such as your own algorithm or a function."
        )
    return extra


def why_idle(algorithm: Algorithm, model: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    """Return why an algorithm would change nothing, or must not run, with these optimizers. None if it can."""
    if len(optimizers) > 1 and not algorithm.traits.each_optimizer:
        return f"it works with one optimizer, and this model has {len(optimizers)}"
    reasons = [algorithm.idle(model, optimizer) for optimizer in optimizers]
    if len(set(reasons)) == 1:
        return reasons[0]
    if None in reasons and REGISTRY[algorithm.name].of_optimizer:
        return None
    return _of_each(reasons, optimizers)


def _served(algorithm: Algorithm, model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Return the optimizers that an algorithm is on for, and those that it does not serve, with the reasons."""
    reasons = [algorithm.idle(model, optimizer) for optimizer in optimizers]
    on = [name for name, reason in zip(in_words(optimizers), reasons, strict=True) if reason is None]
    off = _of_each(reasons, optimizers)
    return f"; on for {', '.join(on)}" + (f"; left out for {off}" if off else "")


def _of_each(reasons: Sequence[str | None], optimizers: Sequence[Optimizer]) -> str:
    named = zip(in_words(optimizers), reasons, strict=True)
    return "; ".join(f"{name}: {reason}" for name, reason in named if reason is not None)


def resolve(config: BoostConfig, level: str, facts: Facts) -> Plan:
    """Turn a level, a configuration and facts into a plan. A pure function: the same inputs give the same plan.

    Order of decisions: The mode gives the requested set. ``extra`` adds and removes. One algorithm may bring or
    displace others. Algorithms that the facts rule out are dropped. The rest is built and sorted by attach order. The
    settings of an algorithm come from the row of the level. Keys that the user wrote in the section of MindSpore's JSON
    override the row, and ``extra`` overrides both. A written key that holds MindSpore's default does not override a
    level, because the row of the level was chosen by measurement. Outside mode auto the defaults of the section replace
    the row of the level. If the user wrote ``total_steps``, in the section ``grad_freeze`` or under ``extra``, it is
    the length of the run for every algorithm. ``common.device_number`` is the number of ranks on a node.
    """
    if not isinstance(level, str) or level not in LEVELS:
        raise ConfigError("level", found=repr(level), allowed=", ".join(LEVELS), hint=nearest(str(level), LEVELS))
    for name in config.extra:
        if name not in REGISTRY:
            allowed, hint = ", ".join(REGISTRY), nearest(name, REGISTRY)
            raise ConfigError(f"extra.{name}", found="an unknown algorithm", allowed=allowed, hint=hint)
    full, length = facts.total_steps, run_length(config)
    if length is not None:
        facts = replace(facts, total_steps=length)
    elif full is not None:
        facts = replace(facts, total_steps=config.recipe.steps_of(full))
    per_node = _ranks_per_node(config)
    if per_node is not None:
        per_node = min(per_node, facts.world_size)
        facts = replace(facts, devices_per_node=per_node, nodes=-(-facts.world_size // per_node))

    def made(name: str) -> Algorithm:
        return build(REGISTRY[name], *_settings(REGISTRY[name], config, level, facts))

    written = {name: made(name) for name, setting in config.extra.items() if isinstance(setting, dict)}  # their faults
    requested = _requested(config, level)
    reasons = {name: _objection(name, requested, config, facts) for name in requested}
    built = {name: written.get(name) or made(name) for name, reason in reasons.items() if reason is None}
    off = [name for name in _chosen(config, level) if config.extra.get(name) is False]
    reasons |= {name: f"as configured: extra.{name} = false" for name in off}
    dropped = tuple(Dropped(name, reason) for name, reason in reasons.items() if reason is not None)
    # A trial may decide about levers of the level about which the user said nothing.
    open_to_it = LEVELS[level].keys() - config.extra.keys() if config.boost.mode == "auto" else set[str]()
    rows = {name: REGISTRY[name] for name in requested if name in open_to_it}
    levers = [name for name, row in rows.items() if row.lever and row.unusable(facts) is None]
    kept = list(built.values())
    return Plan(
        level=level,
        mode=config.boost.mode,
        algorithms=tuple(sorted(kept, key=place)),
        dropped=dropped + _unread(config, level, requested, on=list(built)),
        levers=tuple(built.get(name) or made(name) for name in levers),
        total_steps=facts.total_steps,
        unmeasured=_unmeasured(config, level, kept, facts),
        recipe=config.recipe,
        full_steps=full,
    )


def run_length(config: BoostConfig, given: int | None = None) -> int | None:
    """Return the number of updates in a configuration. Other values that it may hold there are refused elsewhere.

    It may give the number in several places, which must agree, also with the share of a ``given`` argument that
    ``recipe.length`` leaves.
    """
    extras = {name: config.extra.get(name) for name, entry in REGISTRY.items() if LENGTH in entry.facts}
    under = {name: extra for name, extra in extras.items() if isinstance(extra, dict) and LENGTH in extra}
    written: dict[str, Any] = {f"extra.{name}.{LENGTH}": extra[LENGTH] for name, extra in under.items()}
    if LENGTH in config.grad_freeze.model_fields_set and GradFreeze.name not in under:
        written[f"grad_freeze.{LENGTH}"] = config.grad_freeze.total_steps
    lengths = {path: steps for path, steps in written.items() if type(steps) is int and steps >= 1}
    first = length = next(iter(lengths.values()), None)
    other = f"{shown(first)} for another algorithm"
    if given is not None:
        length = config.recipe.steps_of(given)
        left = "" if length == given else f", of which recipe.length leaves {length}"
        other = f"{LENGTH}={given} as an argument{left}"
    for path, steps in lengths.items():
        if steps != length:
            hint = "Leave one of them out."
            raise ConfigError(path, found=f"{shown(steps)}, and {other}", allowed="one length of the run", hint=hint)
    return first


def own_settings(algorithm: Algorithm, but: Container[str] = ()) -> str:
    """Return the settings that differ from the defaults, as code, without some of them. Empty if none does."""
    settings = [(f.name, getattr(algorithm, f.name), f.default) for f in fields(algorithm) if f.name not in but]  # pyright: ignore[reportArgumentType]
    return ", ".join(f"{name}={value!r}" for name, value, default in settings if value != default)


def _ranks_per_node(config: BoostConfig) -> int | None:
    """Return the number that the user wrote. MindSpore's default of 8 says nothing about the launched ranks."""
    extra = config.extra.get("adasum")
    if isinstance(extra, dict) and "devices_per_node" in extra:
        ranks = extra["devices_per_node"]  # null: the launched ranks, whatever the section says
        return ranks if type(ranks) is int and ranks >= 1 else None
    return config.common.device_number if "device_number" in config.common.model_fields_set else None


def _chosen(config: BoostConfig, level: str) -> list[str]:
    """Return the algorithms of the mode, before ``extra`` adds and removes some."""
    return {
        "auto": list(LEVELS[level]),
        "manual": [name for name in SWITCHES if getattr(config.boost, name)],
        "enable_all": [*SWITCHES, *(name for name in REGISTRY if name not in SWITCHES)],
        "disable_all": [],
    }[config.boost.mode]


def _requested(config: BoostConfig, level: str) -> list[str]:
    mode, chosen = config.boost.mode, _chosen(config, level)
    if mode == "disable_all":
        return []
    switched = {name: setting is not False for name, setting in config.extra.items()}
    for entry in REGISTRY.values():
        if switched.get(entry.name, entry.name in chosen):
            for key, brought in entry.brings.items():
                section = getattr(config, entry.section)
                if brought not in config.extra and (mode != "auto" or key in section.model_fields_set):
                    switched[brought] = getattr(section, key)
    return [name for name in dict.fromkeys([*chosen, *switched]) if switched.get(name, True)]


def _unread(config: BoostConfig, level: str, requested: list[str], on: list[str]) -> tuple[Dropped, ...]:
    """List the written keys that are not read."""
    mode, unread = config.boost.mode, dict[str, str]()
    if mode != "disable_all" and AdaptiveSum.name not in requested:
        unread = {f"common.{key}": why for key, why in _COMMON.items() if _says(config.common, key)}
    for name in SWITCHES if mode == "auto" else ():
        section = getattr(config, name, None)
        keys = () if section is None else type(section).model_fields
        says = [key for key in keys if key != LENGTH and _says(section, key)]
        if name in on:
            if name in config.boost.model_fields_set and not getattr(config.boost, name):
                unread[f"boost.{name}"] = f"false is not read: mode auto follows the level; use extra.{name} = false"
            unread |= _measured_otherwise(REGISTRY[name], config, level)
        elif name in requested:
            off = f"{name} is off, for the reason that its row gives"
            unread |= {f"{name}.{key}": off for key in says if key in REGISTRY[name].words}
        elif says or getattr(config.boost, name):
            unread[name] = "mode auto follows the level and reads no switches; use mode manual, or extra"
    return tuple(map(Dropped._make, unread.items()))


def _measured_otherwise(entry: Entry, config: BoostConfig, level: str) -> dict[str, str]:
    """Return the written keys that hold the default. The settings that the level was measured with override them."""
    row = LEVELS[level].get(entry.name)
    section = getattr(config, entry.section, None)
    if row is None or section is None:
        return {}
    measured = {field.name: field.default for field in fields(entry.algorithm)} | dict(row)  # pyright: ignore[reportArgumentType]
    unread = {}
    for key, ours in entry.words.items():
        if key not in section.model_fields_set or _says(section, key) or key == LENGTH:
            continue
        value, instead = _valued(entry, section, key), measured[ours]
        extra = config.extra.get(entry.name, True)
        if value != instead and not (isinstance(extra, dict) and ours in extra):
            unread[f"{entry.section}.{key}"] = (
                f"{_json(getattr(section, key))} is the default of mode manual; {level} was measured with "
                f"{ours} = {_json(instead)}; to have yours, use extra.{entry.name}.{ours} = {_json(value)}"
            )
    return unread


def _unmeasured(config: BoostConfig, level: str, kept: list[Algorithm], facts: Facts) -> tuple[str, ...]:
    """List the differences of the configuration from the measured level.

    A configuration that names every algorithm, such as the one that a tuning writes, takes nothing from the level.
    """
    if config.boost.mode != "auto" or not LEVELS[level] or config.extra.keys() >= REGISTRY.keys():
        return ()
    plain = BoostConfig()
    if config == plain:
        return ()
    usual = {a.name for a in resolve(plain, level, facts).algorithms}
    rows = [REGISTRY[a.name] for a in kept if a.name in LEVELS[level]]  # also a lever that is not known to gain here
    measured = {row.name: build(row, *_settings(row, plain, level, facts)) for row in rows}
    others = [f"{a.name}({own_settings(a)})" for a in kept if a != measured.get(a.name)]
    return tuple(sorted([*others, *(f"without {name}" for name in usual - {a.name for a in kept})]))


def _says(section: Any, key: str) -> bool:
    """Whether the user wrote a key with a value other than its default."""
    return key in section.model_fields_set and getattr(section, key) != type(section).model_fields[key].default


def _objection(name: str, requested: list[str], config: BoostConfig, facts: Facts) -> str | None:
    entry, asked = REGISTRY[name], {one for one in requested if config.boost.mode != "auto" or one in config.extra}
    winner = next((one for one in requested if one != name and REGISTRY[one].algorithm.traits.replaces_optimizer), None)
    if winner is not None and REGISTRY[winner].unusable(facts) is None:
        return f"{winner} is on, and it cannot be combined with others"
    if entry.algorithm.traits.eager and any(REGISTRY[one].once for one in asked):
        return COMPILED
    return entry.unusable(facts) or (None if name in asked else entry.unproven(facts))


def _settings(entry: Entry, config: BoostConfig, level: str, facts: Facts) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of an algorithm, and the JSON path of each setting that the user wrote."""
    auto = config.boost.mode == "auto"
    row = LEVELS[level].get(entry.name) if auto else None
    settings, origins = dict(row or {}), {}
    if entry.section:
        section = getattr(config, entry.section)
        for key, ours in entry.words.items():
            written = key in section.model_fields_set
            if written and (row is None or _says(section, key) or key == LENGTH):
                origins[ours] = f"{entry.section}.{key}"
            if ours in origins or not auto:
                settings[ours] = _valued(entry, section, key)
    known = {name: getattr(facts, name) for name in entry.facts}
    settings |= {name: value for name, value in known.items() if value is not None}
    extra = config.extra.get(entry.name, True)
    if isinstance(extra, dict):
        settings |= extra
        origins |= {ours: f"extra.{entry.name}.{ours}" for ours in extra}
    return settings, origins


def _valued(entry: Entry, section: Any, key: str) -> Any:
    value = getattr(section, key)
    return entry.values.get(key, {}).get(value, value)


def _json(value: Any) -> str:
    return json.dumps(value, default=repr)
