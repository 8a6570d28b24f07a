"""Every branch for ``cuda`` runs without a GPU: the files of ``on_device`` in a process with the pretend device.

The device is registered before torch is imported and stays for the whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.pretend_device.build import built, compiler

FILES = sorted(str(path) for path in Path(__file__).with_name("on_device").glob("[!_]*.py"))
LIMIT = 600.0

pytestmark = [pytest.mark.long, pytest.mark.skipif(compiler() is None, reason="no C++ compiler")]


def test_on_device(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config):
    library = built(tmp_path_factory.getbasetemp())
    plugin, marks = "tests.support.pretend_device.plugin", str(pytestconfig.getoption("markexpr"))
    options = ["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environment |= {"TORCHBOOST_PRETEND_DEVICE": str(library), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", plugin, *options, *FILES],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
