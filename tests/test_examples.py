"""The examples run, short, and do what they say."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn

from tests.conftest import ROOT
from tests.support.ranks import run_ranks
from tests.support.timm_without_torchvision import in_a_process
from tests.support.torchrun import torchrun

EXAMPLES = ROOT / "examples"
PRINTED = "\n# It prints"
SHORT = {"transformers_trainer": 100, "lightning_fit": 3, "accelerate_loop": 3}
"""Epochs, or steps, with which a trainer learns."""
pytestmark = pytest.mark.long


def example(name: str, function: str = "main"):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))[function]


def train(name: str, *arguments: Any) -> Any:
    """Call the function of an example that trains. On ranks their group is there already."""
    return example(name, "train")(*arguments)


def test_own_loop_learns(capsys):
    assert example("own_loop")(3) > 0.7
    assert "fused_optimizer" in capsys.readouterr().out


def test_the_gpt_needs_fewer_steps_with_muon_and_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra transformers: pip install '.[transformers]'")
    adamw, _, resumed = example("gpt_own_loop")(100, 60)
    assert resumed < adamw
    assert resumed == train("gpt_own_loop", True, 60, 60, tmp_path / "whole.pt")


def test_train_step_resumes_bit_for_bit_and_prints_the_same_in_every_run(capsys):
    assert example("train_step")()
    said = capsys.readouterr().out
    torch.manual_seed(123)
    example("train_step")()
    assert capsys.readouterr().out == said


def test_less_bn_report_counts_the_published_networks():
    pytest.importorskip("transformers", reason="needs the extra transformers: pip install '.[transformers]'")
    assert example("less_bn_report")() == {
        "ResNet-50": (53, 36, 32),
        "ResNet-18": (20, 11, 8),
        "RegNet": (71, 48, 44),
        "MobileNetV2": (52, 33, 33),
    }


@pytest.mark.dist
def test_ddp_o2_learns_on_two_ranks():
    first, second = run_ranks(train, 2, "ddp_o2", 3)
    assert first == second > 0.7


def in_one_start_or_two(folder: Path) -> tuple[float, float, set[str]]:
    """Return the last loss of a run, of one that was started twice, and the devices on which they are sharded."""
    shard, devices = torch.distributed.fsdp.fully_shard, set()

    def noting(module: nn.Module, *, mesh: Any = None, **options: Any) -> nn.Module:
        devices.add("any" if mesh is None else mesh.device_type)  # left to itself it takes an accelerator
        return shard(module, mesh=mesh, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed.fsdp, "fully_shard", noting)
        whole = train("fsdp2", folder / "one", 2)
        train("fsdp2", folder / "two", 1)
        return whole, train("fsdp2", folder / "two", 1), devices


@pytest.mark.dist
def test_fsdp2_resumes_bit_for_bit_and_shards_where_its_data_lie(tmp_path):
    for whole, resumed, devices in run_ranks(in_one_start_or_two, 2, tmp_path):
        assert resumed == whole
        assert devices == {"cpu"}
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["00000001", "00000002"]


@pytest.mark.parametrize("name", ["ddp_o2", "fsdp2", "elastic_ddp", "adasum_two_nodes"])
def test_ranks_on_the_cpu_talk_over_gloo_where_there_is_an_accelerator(name, monkeypatch):
    class Asked(BaseException):
        pass

    def asked(backend: str) -> None:
        raise Asked(backend)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", asked)
    monkeypatch.setattr(sys, "argv", [name, "folder"])
    with pytest.raises(Asked, match="gloo"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


# Restarts of "elastic_ddp": tests/contracts/test_elastic.py.
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ddp_o2", "of the test images right"),
        ("fsdp2", "epoch 2: loss of the last batch"),
        ("elastic_ddp", "update 60 of 60, started from 0"),
    ],
)
def test_examples_run_under_torchrun(name, said, tmp_path):
    folder = [] if name == "ddp_o2" else [tmp_path]
    assert said in torchrun(EXAMPLES / f"{name}.py", *folder)[0]


@pytest.mark.dist
@pytest.mark.slow
def test_two_nodes_learn_by_adasum():
    said, silent = torchrun((EXAMPLES / "adasum_two_nodes").with_suffix(".py"), nodes=2)
    assert "agreement" not in silent, "only rank 0 speaks"
    agreements = [float(found) for found in re.findall(r"agreement of the nodes (-?[0-9.]+)", said)]
    assert len(agreements) == 3
    assert all(-1 < agreement < 1 for agreement in agreements)
    (right,) = re.findall(r"([0-9.]+)% of the test images right", said)
    assert float(right) > 70


def test_every_example_is_tested_and_short_and_says_what_it_prints():
    scripts = sorted(EXAMPLES.glob("*.py"))
    text = (ROOT / "tests" / "test_examples.py").read_text(encoding="utf-8")
    assert scripts
    for script in scripts:
        assert f'"{script.stem}"' in text
        program, _, output = script.read_text(encoding="utf-8").partition(PRINTED)
        assert len(program.rstrip().splitlines()) < 60
        printed = output.splitlines()[2:]
        assert printed, script
        assert all(line.startswith("#") for line in printed), script


def test_examples_use_public_names_only():
    allowed = re.compile(r"torchboost(\.(optim|algorithms|integrations\.\w+))?")
    for script in sorted(EXAMPLES.glob("*.py")):
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert [n for n in names if n.startswith("torchboost") and not allowed.fullmatch(n)] == [], script


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore:.*LeafSpec.*")
@pytest.mark.parametrize(
    ("name", "package"),
    [("transformers_trainer", "transformers"), ("lightning_fit", "lightning"), ("accelerate_loop", "accelerate")],
)
def test_the_trainers_learn(name: str, package: str, capsys, one_accelerator):
    pytest.importorskip(package, reason=f"needs the extra {package}: pip install '.[{package}]'")
    assert example(name)(SHORT[name]) > 0.7
    assert "fused_optimizer" in capsys.readouterr().out


def test_the_timm_loop_learns():
    if importlib.util.find_spec("timm") is None:  # it cannot be imported without torchvision
        pytest.skip("needs timm: pip install --no-deps timm (it asks for torchvision)")
    assert in_a_process("timm_loop") > 0.6


def test_the_model_of_transformers_can_be_tuned():
    pytest.importorskip("transformers", reason="needs the extra transformers: pip install '.[transformers]'")
    from torchboost.tuning.report import Candidate
    from torchboost.tuning.training import Training

    training = Training(make=example("tune_transformers", "gpt2"), steps=2, device=torch.device("cpu"))
    stock = training(Candidate(name="stock"), 0)
    cast = training(Candidate(name="autocast", extra={"autocast": True}), 0)
    assert stock.metric == pytest.approx(cast.metric, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_store_what_they_print(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: make setup")
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells), "execute it, and store it with its outputs"
    assert any(cell.outputs for cell in cells)
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
