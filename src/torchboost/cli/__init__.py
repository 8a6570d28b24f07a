"""The command line, ``torchboost``. It needs the extra ``cli``."""

from __future__ import annotations

import importlib.util
import io
import sys


def main() -> None:
    """Run the command line. Exit with 0 (done), 1 (user error), 2 (usage error) or 130 (Ctrl-C)."""
    if importlib.util.find_spec("typer") is None:
        text = "The command line needs typer; install it from the folder of the project: pip install '.[cli]'"
        print(text, file=sys.stderr)
        raise SystemExit(1)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Do not fail on characters that the output cannot show, such as an invalid byte in a file name.
            stream.reconfigure(errors="backslashreplace")
    try:
        from torchboost.cli.app import app  # imports torch, which takes seconds

        app(prog_name="torchboost")
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        raise SystemExit(130) from None
