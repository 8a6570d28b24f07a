"""Models of timm: their BatchNorms with activations, and a whole loop."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None, reason="needs timm: pip install --no-deps timm (it asks for torchvision)"
)


def run(what: str) -> Any:
    """Run in a process of its own and return the JSON of the last line."""
    program = [sys.executable, "-m", "tests.support.timm_without_torchvision", what]
    quiet = {**os.environ, "TORCHBOOST_CALIBRATE": "0", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(program, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_models_lose_batch_norms_and_leave_the_library():
    found = run("models")
    assert {name for name, figures in found.items() if figures["removed"] == 0} == {"densenet121"}
    assert all(figures["plain"] < 1e-6 and figures["copy"] < 1e-5 for figures in found.values())


def test_the_example_learns():
    assert run("example") > 0.7
