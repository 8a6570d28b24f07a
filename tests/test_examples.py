"""The examples run, short, and do what they say."""

from __future__ import annotations

import runpy

import pytest

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"


def example(name: str):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def test_own_loop_learns(capsys):
    assert example("own_loop")() > 0.7
    said = capsys.readouterr().out
    assert "less_bn" in said
    assert said.count("epoch ") == 3


def test_train_step_resumes_bit_for_bit():
    assert example("train_step")()


def test_less_bn_report_counts_the_published_networks():
    pytest.importorskip("transformers", reason="needs the extra transformers: pip install '.[transformers]'")
    assert example("less_bn_report")(full=False) == {
        "ResNet-50": (53, 36, 32),
        "ResNet-18": (20, 11, 8),
        "RegNet": (71, 48, 44),
        "MobileNetV2": (52, 33, 33),
    }


def test_every_example_is_tested_and_short():
    scripts = sorted(EXAMPLES.glob("*.py"))
    text = (ROOT / "tests" / "test_examples.py").read_text(encoding="utf-8")
    assert scripts
    for script in scripts:
        assert f'"{script.stem}"' in text
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 80
