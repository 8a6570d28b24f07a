"""The examples run, short, and do what they say."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.ranks import run_ranks
from tests.support.torchrun import torchrun

EXAMPLES = ROOT / "examples"


def example(name: str, function: str = "main"):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))[function]


def train(name: str, *arguments: Any) -> Any:
    """Call the function of an example that trains on a rank whose group is there already."""
    return example(name, "train")(*arguments)


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


@pytest.mark.dist
def test_ddp_o2_learns_on_two_ranks():
    first, second = run_ranks(train, 2, "ddp_o2", 3)
    assert first == second > 0.7


@pytest.mark.dist
def test_fsdp2_resumes_bit_for_bit(tmp_path):
    assert run_ranks(train, 2, "fsdp2", tmp_path) == [True, True]


# Restarts of "elastic_ddp": tests/contracts/test_elastic.py.
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ddp_o2", "of the test images right"),
        ("fsdp2", "bit for bit: True"),
        ("elastic_ddp", "update 60 of 60, started from 0"),
    ],
)
def test_examples_run_under_torchrun(name, said, tmp_path):
    folder = [] if name == "ddp_o2" else [tmp_path]
    assert said in torchrun(EXAMPLES / f"{name}.py", *folder)[0]


@pytest.mark.dist
def test_two_nodes_learn_by_adasum():
    said, silent = torchrun((EXAMPLES / "adasum_two_nodes").with_suffix(".py"), nodes=2)
    assert "agreement" not in silent, "only rank 0 speaks"
    agreements = [float(found) for found in re.findall(r"agreement of the nodes (-?[0-9.]+)", said)]
    assert len(agreements) == 3
    assert all(-1 < agreement < 1 for agreement in agreements)
    (right,) = re.findall(r"([0-9.]+)% of the test images right", said)
    assert float(right) > 70


def test_every_example_is_tested_and_short():
    scripts = sorted(EXAMPLES.glob("*.py"))
    text = (ROOT / "tests" / "test_examples.py").read_text(encoding="utf-8")
    assert scripts
    for script in scripts:
        assert f'"{script.stem}"' in text
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 80
