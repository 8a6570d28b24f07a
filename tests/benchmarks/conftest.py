"""The scripts of the benchmarks import each other by file name, from their own folder."""

from __future__ import annotations

import sys

from tests.conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
