"""The command line, ``torchboost``; needs the extra ``cli``."""

from __future__ import annotations

import importlib.util
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
    from torchboost.cli.app import app

    app(prog_name="torchboost")
