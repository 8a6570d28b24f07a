"""Names of a package that load on first use, so that importing the package costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

__all__ = ["exports"]


def exports(package: str, homes: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names live in other modules.

    Args:
        package: Its name, for the message about a name it does not have.
        homes: Module -> the names it holds.

    Example:
        >>> find, names = exports("shapes", {"math": ("pi", "tau")})
        >>> find("pi"), names()
        (3.141592653589793, ['pi', 'tau'])
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name]), name)

    return find, lambda: sorted(home_of)
