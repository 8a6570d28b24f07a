"""Algorithms from the settings of a configuration, and a configuration from algorithms."""

from __future__ import annotations

import functools
import json
import os
import re
import reprlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from torchboost.core.algorithm import Algorithm
from torchboost.core.files import write_whole
from torchboost.errors import ConfigError, nearest, shown
from torchboost.measure.stopwatch import package_version, processor_name
from torchboost.registry import REGISTRY, Entry

__all__ = ["build", "place", "write_plan"]

_TOO_LARGE = 1 << 63


def build(entry: Entry, settings: Mapping[str, Any], origins: Mapping[str, str]) -> Algorithm:
    """Build an algorithm from its settings.

    Args:
        entry: Of the algorithm.
        settings: As JSON has them.
        origins: Setting -> JSON path, for those that the user wrote. Their types are checked.

    Raises:
        ConfigError: A setting is unknown, of a wrong type, or out of range.
    """
    if not settings:
        return _plain(entry.algorithm)
    hints = _hints(entry.algorithm)
    given = {key: _frozen(value) for key, value in settings.items() if (key, value) not in entry.removed.items()}
    for key, value in given.items():
        path = origins.get(key, f"extra.{entry.name}.{key}")
        if key not in hints:
            allowed, kind = ", ".join(hints) or "no settings", "a removed" if key in entry.removed else "an unknown"
            raise ConfigError(path, found=f"{kind} setting", allowed=allowed, hint=nearest(key, hints))
        if key not in origins:
            continue  # of the registry, or a fact
        try:
            TypeAdapter(hints[key]).validate_python(value, strict=True)
        except ValidationError:
            raise ConfigError(path, found=shown(settings[key]), allowed=_in_words(hints[key])) from None
        if any(abs(number) >= _TOO_LARGE for number in _integers(value)):
            raise ConfigError(path, found=shown(settings[key]), allowed="integers of 64 bits")
    try:
        return entry.algorithm(**given)
    except (TypeError, ValueError, OverflowError) as error:
        # A message begins with the name of its setting.
        named = next((key for key in given if re.match(rf"{key}\b", str(error))), None)
        path = f"extra.{entry.name}" if named is None else origins.get(named, f"extra.{entry.name}.{named}")
        found = shown(dict(settings)) if named is None else shown(settings[named])
        raise ConfigError(path, found=found, allowed=str(error)) from None


@functools.cache
def _plain(kind: type[Algorithm]) -> Algorithm:
    """Return an algorithm with its default settings, a value that plans share."""
    return kind()


@functools.cache
def _hints(kind: type[Algorithm]) -> dict[str, Any]:
    """Return the type of each setting of an algorithm."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}  # pyright: ignore[reportArgumentType]


def _frozen(value: Any) -> Any:
    """Return lists as tuples, which JSON does not have."""
    return tuple(_frozen(entry) for entry in value) if isinstance(value, (list, tuple)) else value


def _integers(value: Any) -> list[int]:
    if isinstance(value, tuple):
        return [number for entry in value for number in _integers(entry)]
    return [value] if isinstance(value, int) else []


def _in_words(hint: Any) -> str:
    """Describe the values of a type in the terms of JSON."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(repr(choice) for choice in typing.get_args(hint))
    parts = [part for part in typing.get_args(hint) if part is not Ellipsis]
    if isinstance(typing.get_origin(hint), type) and issubclass(typing.get_origin(hint), Sequence):
        return f"a list, each entry {' or '.join(_in_words(part) for part in parts)}"
    if parts:
        # Lists come last, so that "or" does not seem to belong to their entries.
        return " or ".join(sorted(map(_in_words, parts), key=lambda words: words.startswith("a list")))
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}
    return words.get(hint, str(hint))


def place(algorithm: Algorithm) -> tuple[int, int]:
    """Return the place of an algorithm in the attach order. The registry decides between equal orders."""
    return algorithm.traits.order, list(REGISTRY).index(algorithm.name)


def write_plan(path: str | os.PathLike[str], algorithms: Sequence[Algorithm], *, level: str, mode: str) -> None:
    """Write a configuration that turns on these algorithms with these settings, and turns off all others.

    Args:
        path: In a folder that exists. A link is followed.
        algorithms: In attach order.
        level: The level of the plan, for the note.
        mode: The mode of the plan, for the note.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: An algorithm or a setting cannot be written. Nothing is written.
        OSError: There is no such folder, ``path`` is a folder, or the file cannot be written.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: found {_shown(path)}; give the path of a file, a str or a Path.")
    file = Path(os.path.realpath(path))
    if file.is_dir():
        raise IsADirectoryError(f"found a folder at {_shown(os.fspath(path))}; give the path of a file in it.")
    if not file.parent.is_dir():
        raise FileNotFoundError(
            f"found no folder {_shown(str(file.parent))}; create it first, or give a path in another one."
        )
    about = {
        "level": level,
        "mode": mode,
        "torchboost": package_version(),
        "torch": torch.__version__,
        "processor": processor_name(),
        "threads": str(torch.get_num_threads()),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    content = {"about": about, "extra": _written(algorithms)}
    write_whole(file, json.dumps(content, indent=2).encode() + b"\n")


def _written(algorithms: Sequence[Algorithm]) -> dict[str, Any]:
    """Return a section ``extra`` from which these algorithms are read back. A plan built by hand may hold anything."""
    unknown = [a for a in algorithms if a.name not in REGISTRY or type(a) is not REGISTRY[a.name].algorithm]
    if unknown:
        raise ValueError(
            f"found the algorithm {_shown(unknown[0])}, which a configuration cannot name; allowed are "
            f"{', '.join(REGISTRY)}. Save the plan without it, and attach your own algorithm in code."
        )
    extra: dict[str, Any] = dict.fromkeys(REGISTRY, False)
    for algorithm in algorithms:
        settings = {name: getattr(algorithm, name) for name in _hints(type(algorithm))}
        for name, value in settings.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError):
                raise ValueError(
                    f"{algorithm.name}.{name}: found {_shown(value)}, which JSON cannot hold; allowed are finite "
                    "numbers, strings, true, false, null and lists of them. Choose such a value, or set it in code."
                ) from None
        extra[algorithm.name] = settings
    try:
        section = json.loads(json.dumps(extra))
        on = {name: settings for name, settings in section.items() if settings is not False}
        paths = {name: {key: f"extra.{name}.{key}" for key in settings} for name, settings in on.items()}
        read = sorted((build(REGISTRY[name], settings, paths[name]) for name, settings in on.items()), key=place)
    except ConfigError as error:
        raise ValueError(f"the configuration of this plan could not be read back: {error}") from None
    if read != list(algorithms):
        raise ValueError(
            f"found the algorithms {_shown(list(algorithms))}; read back from a configuration they would be "
            f"{_shown(read)}. Give each algorithm once, in attach order, or make the plan with Plan.of."
        )
    return extra


def _shown(value: Any) -> str:
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = shortened.maxlong = 200
    return shortened.repr(value)
