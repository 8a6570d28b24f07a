"""MindSpore's JSON configuration, key for key, as frozen values. It does not need torch.

The description of a field says which values are allowed. Error messages and the JSON schema both show it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from typing_extensions import Self

from torchboost.errors import ConfigError, nearest, shown

_SWITCH = "true or false"
_MOST = 2**53
"""Largest integer that is exact as a floating point number. Shares of integers are computed in floating point."""
_COUNT = "an integer, 1 or more and at most 2**53"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class BoostSwitches(_Section):
    """Section ``boost``: the mode, and the switches that mode ``manual`` reads."""

    mode: Literal["auto", "manual", "enable_all", "disable_all"] = Field(
        default="auto", description="'auto' (by level), 'manual' (by the switches), 'enable_all' or 'disable_all'"
    )
    less_bn: bool = Field(default=False, description=_SWITCH)
    grad_freeze: bool = Field(default=False, description=_SWITCH)
    adasum: bool = Field(default=False, description=_SWITCH)
    grad_accumulation: bool = Field(default=False, description=_SWITCH)
    dim_reduce: bool = Field(default=False, description=_SWITCH)
    loss_scale_group: bool = Field(default=False, description=_SWITCH)


class CommonSection(_Section):
    """Section ``common``: where gradients are split into collectives, and the devices of one node."""

    gradient_split_groups: int | tuple[int, ...] = Field(
        default=(50, 100),
        description="an integer, 1 or more, or a list of such integers, each greater than the one before",
    )
    device_number: int = Field(default=8, ge=1, le=_MOST, description=_COUNT)

    @field_validator("gradient_split_groups", mode="before")
    @classmethod
    def _ascending(cls, value: Any) -> int | tuple[int, ...]:
        points = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if not points or any(type(point) is not int or not 1 <= point <= _MOST for point in points):
            raise ValueError("not integers of 1 or more, or too large")
        if any(after <= before for before, after in pairwise(points)):
            raise ValueError("not ascending")
        return points if isinstance(value, (list, tuple)) else points[0]


class LessBNSection(_Section):
    """Section ``less_bn``: normalise the last linear layer, centralise gradients."""

    fn_flag: bool = Field(default=True, description=_SWITCH)
    gc_flag: bool = Field(default=True, description=_SWITCH)


class GradFreezeSection(_Section):
    """Section ``grad_freeze``. ``freeze_p`` is the share of steps that train everything."""

    param_groups: int = Field(default=10, ge=1, le=_MOST, description=_COUNT)
    freeze_type: int = Field(default=1, ge=0, le=2, description="0 (continuous), 1 (interval) or 2 (progressive)")
    freeze_p: float = Field(default=0.7, ge=0.0, lt=1.0, description="a number, 0 or more and below 1")
    total_steps: int = Field(default=65536, ge=1, le=_MOST, description=_COUNT)


class GradAccumulationSection(_Section):
    """Section ``grad_accumulation``: micro-batches per update."""

    grad_accumulation_step: int = Field(default=1, ge=1, le=_MOST, description=_COUNT)


class DimReduceSection(_Section):
    """Section ``dim_reduce``: line search, residual step and PCA basis. ``timeout`` is in seconds."""

    rho: float = Field(default=0.55, gt=0.0, lt=1.0, description="a number above 0 and below 1")
    gamma: float = Field(default=0.9, ge=0.0, lt=1.0, description="a number, 0 or more and below 1")
    alpha: float = Field(default=0.001, ge=0.0, description="a finite number, 0 or more")
    sigma: float = Field(default=0.4, gt=0.0, lt=1.0, description="a number above 0 and below 1")
    n_components: int = Field(default=32, ge=1, le=_MOST, description=_COUNT)
    pca_mat_path: str | None = Field(default=None, description="the path of an .npy file, or null")
    weight_load_dir: str | None = Field(default=None, description="the path of a folder of checkpoints, or null")
    timeout: int = Field(default=1800, ge=1, le=10**9, description="an integer, 1 or more and at most 10**9")


class RecipeSection(_Section):
    """Section ``recipe``: the findings of a tuning about the optimizer, its rates and the length of the run.

    :func:`torchboost.boost` applies it. The defaults change nothing.

    Attributes:
        optimizer: The optimizer that takes the place of the given one and is built from it: ``"muon"``
            (:func:`torchboost.optim.muon_from`) or ``"schedule_free_adamw"``. None keeps the given one.
        lr: Learning rate of the hidden matrices under Muon, 0.02 if it is None. Of all weights under schedule-free
            AdamW, 0.001 if it is None.
        rate: Multiplies the learning rates of the given optimizer, also for weights that Muon leaves to its rule.
        length: Share of the updates of the run that is trained.

    Example:
        >>> from torchboost.config import BoostConfig
        >>> recipe = BoostConfig.load({"recipe": {"optimizer": "muon", "rate": 0.5, "length": 0.55}}).recipe
        >>> recipe.steps_of(600)
        330
        >>> recipe.in_words(total_steps=600)
        '0.55 of the steps (330 of 600), learning rates times 0.5, Muon at 0.02 for the hidden matrices'
    """

    optimizer: Literal["muon", "schedule_free_adamw"] | None = Field(
        default=None, description="'muon', 'schedule_free_adamw' or null, which keeps the given optimizer"
    )
    lr: float | None = Field(
        default=None, gt=0.0, description="a number above 0 if 'optimizer' is given, or null, which takes its default"
    )
    rate: float = Field(default=1.0, gt=0.0, description="a number above 0")
    length: float = Field(default=1.0, gt=0.0, le=1.0, description="a number above 0 and at most 1")

    @field_validator("lr")
    @classmethod
    def _of_an_optimizer(cls, value: float | None, found: ValidationInfo) -> float | None:
        if value is not None and found.data.get("optimizer", "wrong") is None:
            raise ValueError("without an optimizer")
        return value

    @property
    def is_neutral(self) -> bool:
        """Whether the recipe changes nothing."""
        return self == RecipeSection()

    @property
    def built_lr(self) -> float:
        """The learning rate of the optimizer that is built."""
        usual = 0.02 if self.optimizer == "muon" else 0.001
        return self.lr if self.lr is not None else usual

    def steps_of(self, total_steps: int) -> int:
        """Return the number of updates to train in place of ``total_steps``, at least 1."""
        return max(1, round(self.length * total_steps))

    def in_words(self, *, total_steps: int | None = None, built: str = "") -> str:
        """Return the changes in words. Empty if there are none.

        Args:
            total_steps: The number of updates that it takes its share of, if known.
            built: The optimizer that was built from the given one. By default a general description.
        """
        known = "" if total_steps is None else f" ({self.steps_of(total_steps):,} of {total_steps:,})"
        parts = [f"{self.length:g} of the steps{known}"] if self.length < 1 else []
        parts += [f"learning rates times {self.rate:g}"] if self.rate != 1 else []
        general = {"muon": "Muon at {:g} for the hidden matrices", "schedule_free_adamw": "schedule-free AdamW at {:g}"}
        parts += [built or general[self.optimizer].format(self.built_lr)] if self.optimizer is not None else []
        return ", ".join(parts)


class BoostConfig(_Section):
    """A whole configuration, as a value that can be compared, printed and written back as JSON.

    ``extra`` holds, by name, the settings of algorithms that MindSpore's JSON does not have. ``false`` turns an
    algorithm off, ``true`` or ``{}`` turns it on with its defaults, and an object gives settings. The names and
    settings in it are checked when a plan is made, not here.

    ``recipe`` holds the findings of a tuning about the optimizer, its rates and the length of the run.

    ``about`` is a note for people, in free strings. Nothing reads it. :meth:`torchboost.Plan.save` writes it.

    Example:
        >>> from torchboost.config import BoostConfig
        >>> BoostConfig.load({"boost": {"mode": "manual", "less_bn": True}}).boost.less_bn
        True
        >>> BoostConfig.load('{"common": {"device_number": 4}}').common.device_number
        4
    """

    boost: BoostSwitches = BoostSwitches()
    common: CommonSection = CommonSection()
    less_bn: LessBNSection = LessBNSection()
    grad_freeze: GradFreezeSection = GradFreezeSection()
    grad_accumulation: GradAccumulationSection = GradAccumulationSection()
    dim_reduce: DimReduceSection = DimReduceSection()
    extra: dict[str, bool | dict[str, Any]] = Field(
        default_factory=dict,
        description="an object of algorithm names (strings), each with true, false or an object of settings",
    )
    recipe: RecipeSection = RecipeSection()
    about: dict[str, str] = Field(
        default_factory=dict, description="an object of free strings, a note for people that nothing reads"
    )

    @classmethod
    def load(cls, source: ConfigSource = None) -> Self:
        """Read a configuration. Missing keys take MindSpore's defaults.

        Args:
            source: A dict, a path to a JSON file, JSON text (a string whose first character is ``{``), a configuration,
                which is returned unchanged, or ``""`` or None for the defaults.

        Raises:
            ConfigError: The file or the JSON cannot be read, a section or key is unknown, or a value has the wrong type
                or is out of range. The first fault is reported, with its JSON path.
        """
        if isinstance(source, cls):
            return source
        data = _read(source)
        with naming_file(source):
            try:
                return cls.model_validate(data)
            except ValidationError as error:
                raise _explained(cls, data, error) from None


ConfigSource: TypeAlias = Mapping[str, Any] | str | os.PathLike[str] | BoostConfig | None
"""The sources of a configuration. See :meth:`BoostConfig.load`."""


def _read(source: Any) -> dict[str, Any]:
    if source is None or (isinstance(source, str) and not source.strip()):
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    if _is_path(source):
        text = _read_file(os.fspath(source))
        with naming_file(source):
            return _parse(text)
    if isinstance(source, str):
        return _parse(source)
    raise ConfigError("", found=_found(source), allowed="a dict, a path to a JSON file, JSON text, or nothing")


def _is_path(source: Any) -> bool:
    return isinstance(source, os.PathLike) or (isinstance(source, str) and source.strip()[:1] not in ("", "{"))


def _read_file(path: str | bytes) -> str:
    try:
        return Path(os.fsdecode(path)).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", error)
        raise ConfigError(
            "",
            found=f"{shown(path)}, which cannot be read: {reason}",
            allowed="the path of a readable JSON file, or JSON text that starts with '{'",
        ) from None


@contextmanager
def naming_file(source: Any) -> Iterator[None]:
    """Let errors about a configuration name the file that it was read from."""
    try:
        yield
    except ConfigError as error:
        if error.file or not _is_path(source) or error.path == "level":  # an argument
            raise
        told = {"found": error.found, "allowed": error.allowed, "hint": error.hint}
        raise ConfigError(error.path, **told, file=os.fsdecode(source)) from None


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError("", found=f"JSON with a fault: {error}", allowed="a JSON object") from None
    if not isinstance(data, dict):
        raise ConfigError("", found=_found(data), allowed="a JSON object with sections such as 'boost'")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(twice, found=f"the key {shown(twice)} more than once", allowed="each key once in an object")
    return entries


def _explained(config: type[BoostConfig], data: Any, error: ValidationError) -> ConfigError:
    """Turn the first fault that pydantic found into a :class:`ConfigError`."""
    section: type[_Section] | None = config
    names, value, allowed, choices = [], data, _keys(config), []
    for name in error.errors(include_url=False, include_context=False)[0]["loc"]:
        if not isinstance(value, Mapping) or name not in value:
            break
        names.append(str(name))
        value = value[name]
        if section is None:
            continue
        field = section.model_fields.get(str(name))
        if field is None:
            return _unknown(config, section, ".".join(names), str(name))
        section = _section_of(field)
        allowed = _keys(section) if section is not None else field.description or ""
        kinds = get_args(field.annotation)
        choices = [choice for kind in kinds for choice in (kind, *get_args(kind)) if isinstance(choice, str)]
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return ConfigError(".".join(names), found=_found(value), allowed=allowed, hint=hint)


def _unknown(config: type[BoostConfig], section: type[_Section], path: str, name: str) -> ConfigError:
    homes = [
        home for home, field in config.model_fields.items() if name in getattr(_section_of(field), "model_fields", ())
    ]
    hint = f"'{name}' belongs in the section '{homes[0]}'." if homes else nearest(name, section.model_fields)
    what = "section" if section is config else "key"
    return ConfigError(path, found=f"the unknown {what} {shown(name)}", allowed=_keys(section), hint=hint)


def _section_of(field: FieldInfo) -> type[_Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, _Section) else None


def _keys(section: type[_Section]) -> str:
    return f"an object with the keys {', '.join(section.model_fields)}"


def _found(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {shown(value)}"
