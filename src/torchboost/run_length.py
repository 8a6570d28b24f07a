"""The length of a run, which a configuration may give in several places."""

from __future__ import annotations

from typing import Any

from torchboost.config import BoostConfig
from torchboost.errors import ConfigError, shown
from torchboost.registry import REGISTRY

__all__ = ["LENGTH", "check_one_length", "written_length"]

LENGTH = "total_steps"
"""A fact about the run, not a choice: the written value always counts."""


def check_one_length(given: int, config: BoostConfig) -> None:
    """Refuse a number of updates that differs from what the configuration says.

    Raises:
        ConfigError: They differ.
    """
    left = config.recipe.steps_of(given)
    of_recipe = "" if left == given else f", of which recipe.length leaves {left}"
    for path, length in _written_lengths(config).items():
        if length != left:
            raise ConfigError(
                path,
                found=f"{shown(length)}, and {LENGTH}={given} as an argument{of_recipe}",
                allowed="one length of the run",
                hint="Leave one of them out.",
            )


def _written_lengths(config: BoostConfig) -> dict[str, Any]:
    """Return what the configuration gives as the length of the run, by JSON path, the section last."""
    extras = {name: config.extra.get(name) for name, entry in REGISTRY.items() if LENGTH in entry.facts}
    under = {name: extra for name, extra in extras.items() if isinstance(extra, dict) and LENGTH in extra}
    written = {f"extra.{name}.{LENGTH}": extra[LENGTH] for name, extra in under.items()}
    if LENGTH in config.grad_freeze.model_fields_set:
        written[f"grad_freeze.{LENGTH}"] = config.grad_freeze.total_steps
    return written


def written_length(config: BoostConfig) -> int | None:
    """Return the number of updates that the configuration gives. What else it may hold there is refused elsewhere.

    Raises:
        ConfigError: Two algorithms have different ones.
    """
    lengths = {p: steps for p, steps in _written_lengths(config).items() if type(steps) is int and steps >= 1}
    if f"extra.grad_freeze.{LENGTH}" in lengths:
        lengths.pop(f"grad_freeze.{LENGTH}", None)  # overridden
    if len(set(lengths.values())) > 1:
        (_, one), (path, other) = lengths.items()
        raise ConfigError(
            path,
            found=f"{shown(other)}, and {shown(one)} for another algorithm",
            allowed="one length of the run",
            hint="Leave one of them out.",
        )
    return next(iter(lengths.values()), None)
