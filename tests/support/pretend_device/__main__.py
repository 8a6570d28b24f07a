"""Run a script, or a module after ``-m``, on the pretend device: ``python -m tests.support.pretend_device FILE``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.support.pretend_device import plugin

assert plugin  # the device is there from its import on
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
