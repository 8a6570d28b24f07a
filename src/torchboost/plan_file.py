"""Write the algorithms of a plan as a configuration, and make sure that the same ones are read back."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

import torch

from torchboost.core.algorithm import Algorithm
from torchboost.core.files import write_whole
from torchboost.errors import ConfigError
from torchboost.measure.stopwatch import package_version, processor_name
from torchboost.registry import REGISTRY

__all__ = ["write_plan"]

Extra: TypeAlias = dict[str, bool | dict[str, Any]]


def write_plan(
    path: str | os.PathLike[str],
    algorithms: Sequence[Algorithm],
    *,
    level: str,
    mode: str,
    read_back: Callable[[Mapping[str, bool | dict[str, Any]]], tuple[Algorithm, ...]],
) -> None:
    """Write a configuration that turns on these algorithms with these settings, and turns off all others.

    Args:
        path: In a folder that exists. A link is followed.
        algorithms: In attach order.
        level: The level of the plan, for the note.
        mode: The mode of the plan, for the note.
        read_back: Builds the algorithms of a section ``extra``.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: An algorithm or a setting cannot be written. Nothing is written.
        OSError: There is no such folder, ``path`` is a folder, or the file cannot be written.
    """
    file = _writable(path)
    extra = _extra(algorithms)
    _check(algorithms, extra, read_back)
    content = {"about": _about(level, mode), "extra": extra}
    write_whole(file, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")


def _about(level: str, mode: str) -> dict[str, str]:
    return {
        "level": level,
        "mode": mode,
        "torchboost": package_version(),
        "torch": torch.__version__,
        "processor": processor_name(),
        "threads": str(torch.get_num_threads()),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _extra(algorithms: Sequence[Algorithm]) -> Extra:
    extra: Extra = dict.fromkeys(REGISTRY, False)
    for algorithm in algorithms:
        entry = REGISTRY.get(algorithm.name)
        if entry is None or type(algorithm) is not entry.algorithm:
            raise ValueError(
                f"found the algorithm {_shown(algorithm)}, which a configuration cannot name; allowed are "
                f"{', '.join(REGISTRY)}. Save the plan without it, and attach your own algorithm in code."
            )
        settings = {f.name: getattr(algorithm, f.name) for f in fields(entry.algorithm) if f.init}  # pyright: ignore[reportArgumentType]
        for name, value in settings.items():
            if not _is_plain(value):
                raise ValueError(
                    f"{algorithm.name}.{name}: found {_shown(value)}, which JSON cannot hold; allowed are finite "
                    "numbers, strings, true, false, null and lists of them. Choose such a value, or set it in code."
                )
        extra[algorithm.name] = settings
    return extra


def _check(
    algorithms: Sequence[Algorithm],
    extra: Extra,
    read_back: Callable[[Mapping[str, bool | dict[str, Any]]], tuple[Algorithm, ...]],
) -> None:
    """Raise unless the configuration gives the algorithms. A plan that was built by hand may hold anything."""
    try:
        read = read_back(json.loads(json.dumps(extra)))
    except ConfigError as error:
        raise ValueError(f"the configuration of this plan could not be read back: {error}") from None
    if read != tuple(algorithms):
        raise ValueError(
            f"found the algorithms {_shown(list(algorithms))}; read back from a configuration they would be "
            f"{_shown(list(read))}. Give each algorithm once, in attach order, or make the plan with Plan.of."
        )


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps a value, but for tuples, which become lists."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(entry) for entry in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def _writable(path: str | os.PathLike[str]) -> Path:
    """Return the file that a path leads to. Raise if there cannot be one."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: found {_shown(path)}; give the path of a file, a str or a Path.")
    file = Path(os.path.realpath(path))
    if file.is_dir():
        text = f"found a folder at {_shown(os.fspath(path))}; give the path of a file, such as boost.json."
        raise IsADirectoryError(text)
    if not file.parent.is_dir():
        text = f"found no folder {_shown(str(file.parent))}; create it first, or give a path in another one."
        raise FileNotFoundError(text)
    return file


def _shown(value: Any) -> str:
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = shortened.maxlong = 200
    return shortened.repr(value)
