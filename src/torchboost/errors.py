"""The errors and warnings of torchboost, and the wording they share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial

__all__ = [
    "CacheSpaceWarning",
    "ConfigError",
    "IncompatibleError",
    "NoEffectWarning",
    "RankDisagreementError",
    "ScaleCollapseWarning",
    "nearest",
]


class ConfigError(ValueError):
    """A configuration cannot be used.

    Carries the place of the fault so that tools can point at it.

    Args:
        path: JSON path of the offending entry, such as ``"grad_freeze.freeze_p"``; empty for the whole document.
        found: What stood there.
        allowed: What may stand there.
        hint: What to do about it, such as the nearest valid name.
    """

    def __init__(self, path: str, *, found: str, allowed: str, hint: str = "") -> None:
        self.path = path
        self.found = found
        self.allowed = allowed
        self.hint = hint
        where = path or "the configuration"
        text = f"{where}: found {found}; allowed: {allowed}."
        super().__init__(f"{text} {hint}" if hint else text)

    def __reduce__(self) -> tuple[partial[ConfigError], tuple[()]]:
        """Pickle by the arguments, which an exception keeps only as its text; errors travel between ranks."""
        return partial(type(self), self.path, found=self.found, allowed=self.allowed, hint=self.hint), ()


class IncompatibleError(RuntimeError):
    """Two things cannot work together; the message names both and says what to change."""


class RankDisagreementError(RuntimeError):
    """Ranks that train one model together are not where the others are; the message names ranks, step and figures."""


class CacheSpaceWarning(RuntimeWarning):
    """A cache did not get the space it wanted; training goes on without it, more slowly."""


class NoEffectWarning(UserWarning):
    """An algorithm was asked for and found nothing to do."""


class ScaleCollapseWarning(RuntimeWarning):
    """A loss scale falls and falls; soon no gradient will be representable and the run is lost."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return ``"Did you mean 'x'?"`` for the valid name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else ""
