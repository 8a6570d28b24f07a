"""The command line, ``torchboost``; needs the extra ``cli``."""

from __future__ import annotations

import importlib.util
import io
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; ends the process with 0 (done), 1 (error of the user's), 2 (usage) or 130 (Ctrl-C)."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"The command line needs {' and '.join(missing)}, which this environment lacks; "
            "install it from the folder of the project: pip install '.[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal or file cannot show, such as the odd byte in the name of a file, is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    try:
        from torchboost.cli.app import app  # imports torch, which takes seconds

        app(prog_name="torchboost")
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        raise SystemExit(130) from None
