"""The errors and warnings of torchboost."""

from __future__ import annotations

import difflib
import reprlib
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any


class ConfigError(ValueError):
    """A configuration cannot be used.

    It carries the place of the fault, so that tools can point to it.

    Args:
        path: JSON path of the offending entry, such as ``"grad_freeze.freeze_p"``. Empty for the whole document.
        found: The value at this path.
        allowed: The values that are allowed at this path.
        hint: What to do, such as the nearest valid name.
        file: The file that the configuration was read from. Empty if it is another source.
    """

    def __init__(self, path: str, *, found: str, allowed: str, hint: str = "", file: str = "") -> None:
        self.path = path
        self.found = found
        self.allowed = allowed
        self.hint = hint
        self.file = file
        where = f"{path or 'the configuration'}{f' in {shown(file)}' if file else ''}"
        text = f"{where}: found {found}; allowed: {allowed.rstrip('.')}."
        super().__init__(f"{text} {hint}" if hint else text)

    def __reduce__(self) -> tuple[partial[ConfigError], tuple[()]]:
        """Pickle the arguments: errors travel between ranks, and an exception alone keeps only its text."""
        told = {key: vars(self)[key] for key in ("found", "allowed", "hint", "file")}
        return partial(type(self), self.path, **told), ()


class FactoryError(ValueError):
    """The return value of a factory cannot be trained or compared. The message says what a factory must return."""


class IncompatibleError(RuntimeError):
    """Two things cannot work together. The message names both and says what to change."""


class RankDisagreementError(RuntimeError):
    """Ranks that train one model together disagree. The message names the ranks, the step and the values."""


class NoEffectWarning(UserWarning):
    """A requested algorithm found nothing to do."""


class ScaleCollapseWarning(RuntimeWarning):
    """A loss scale keeps falling. Soon no gradient will be representable, and the run will be lost."""


def warn_no_effect(text: str, *, above: int = 1) -> None:
    """Warn with :class:`NoEffectWarning`, at the line so many calls above the function that warns."""
    warnings.warn(text, NoEffectWarning, stacklevel=above + 2)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return ``"Did you mean 'x'?"`` for the valid name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else ""


def shown(value: Any) -> str:
    """Return ``repr(value)``, shortened to fit into a message."""
    shortened = reprlib.Repr()
    shortened.maxstring = shortened.maxother = shortened.maxlong = shortened.maxdict = 100
    return shortened.repr(value)


def in_a_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text, as a reason."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300].removesuffix(": ")
