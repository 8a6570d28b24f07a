from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from torchboost.cli.app import app


def run(*words: object):
    return CliRunner().invoke(app, ["pca", *map(str, words)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    path.mkdir()
    for i in range(4):
        torch.manual_seed(i)
        torch.save(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict(), path / f"{i}.pt")
    return path


def test_writes_the_directions_and_says_what_they_hold(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "basis.npy"
    found = run(folder, "--components", 3, "--out", out)
    assert found.exit_code == 0, found.output
    assert "3 directions of 12 weights in 4 parameters, from 4 checkpoints; they explain 100.0%" in found.stdout
    matrix = np.load(out)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-6)
    assert "comparing the snapshots, weights: " in found.stderr


def test_json(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "basis.npy"
    found = json.loads(run(folder, "--components", 2, "--out", out, "--json").stdout)
    assert found["checkpoints"] == 4
    assert found["weights"] == 12
    assert 0 < found["explained"] <= 1


def test_statistics_count_where_nobody_excludes_them(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "basis.npy"
    assert json.loads(run(folder, "--components", 2, "--out", out, "--exclude", "", "--json").stdout)["weights"] == 16


def test_what_is_wrong_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "basis.npy"
    for words, said in (
        ([folder, "--out", tmp_path / "basis.bin"], "ends in .npy"),
        ([folder, "--components", 9, "--out", out], "n_components: found 9 and 4 snapshots"),
        ([tmp_path / "none", "--out", out], "found no folder"),
        ([folder, "--out", tmp_path / "none" / "basis.npy"], "create it first"),
    ):
        found = run(*words)
        assert found.exit_code == 1
        assert said in found.stderr
        assert "Traceback" not in found.output
    assert not out.exists()
    out.write_bytes(b"mine")
    assert "already exists" in run(folder, "--out", out).stderr
    assert out.read_bytes() == b"mine"
    assert run(folder, "--components", 2, "--out", out, "--force").exit_code == 0


def test_a_file_of_somebody_else_beside_it_is_left_alone(folder: Path, tmp_path: Path) -> None:
    out, beside = tmp_path / "basis.npy", tmp_path / "basis.json"
    beside.write_text("mine")
    found = run(folder, "--components", 2, "--out", out)
    assert found.exit_code == 1
    assert "basis.json already exists" in found.stderr
    assert beside.read_text() == "mine"
    assert not out.exists()
    assert run(folder, "--components", 2, "--out", out, "--force").exit_code == 0
    assert json.loads(beside.read_text())["names"]
