"""Whether a workload of the command line is a user's factory, which takes fewer options."""

from __future__ import annotations

__all__ = ["is_factory"]


def is_factory(workload: str, **options: object) -> bool:
    """Return whether a workload is ``path/to/train.py:make``, and not the name of one.

    Args:
        workload: As given on the command line.
        options: What a factory makes itself, by the name of the option; None if it was not given.

    Raises:
        ValueError: The function is missing, or an option is given that a factory does not take.
    """
    if workload.endswith(".py"):
        raise ValueError(f"found {workload!r} without a function; needed: {workload}:make.")
    found = workload.rpartition(":")[0].endswith(".py")
    for name, value in options.items():
        if found and value is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: found {str(value)!r}; leave it out, since a factory builds model and data.")
    return found
