"""The command line as a module: ``python -m torchboost``."""

from __future__ import annotations

from torchboost.cli import main

if __name__ == "__main__":
    main()
