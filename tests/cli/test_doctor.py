from __future__ import annotations

import pytest
import torch

from torchboost.cli.doctor import EXTRAS, compile_advice, examine


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.13.0+cpu", "good"), ("2.14.1", "good"), ("3.0", "good"), ("2.9.1", "careful"), ("2.12.0a0+git1", "careful")],
)
def test_known_compiler_fault(version, verdict):
    assert compile_advice(version).startswith(verdict)


def test_examine(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else name)
    found = examine()
    assert found["versions"]["torch"] == torch.__version__ or found["versions"]["torch"] in torch.__version__
    assert found["threads"] == 1
    assert set(found["extras"]) == set(EXTRAS)
    assert found["extras"]["workloads"] == ["pyarrow"]
    assert found["extras"]["cli"] == []
