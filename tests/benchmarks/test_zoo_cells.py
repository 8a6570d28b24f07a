"""The grid of the zoo, and one small network through all of it."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from torchboost.measure.evidence import BenchReport

zoo_cells = importlib.import_module("zoo_cells")
zoo_networks = importlib.import_module("zoo_networks")

TINY = zoo_networks.TINY["tiny"]


def task(folder: Path, **settings: Any) -> Any:
    files = {"out": str(folder / "zoo-tiny.json"), "state": str(folder / "state")}
    return zoo_cells.Task(**{"network": "tiny", **files, "pairs": 2, "grid": "eager", **settings})


def test_the_grid_holds_every_combination_once():
    for images, grid, count in (
        *((True, "eager", 8), (True, "some", 12), (True, "all", 16)),
        *((False, "eager", 4), (False, "all", 8)),
    ):
        names = [zoo_cells.cell_name(cell) for cell in zoo_cells.cells(images=images, grid=grid)]
        assert names[0] == "stock"
        assert len(set(names)) == len(names) == count
        assert images == any("channels_last" in name for name in names)
        assert grid != "some" or not [name for name in names if "compile" in name and "fused_optimizer" not in name]


def test_each_cell_trains_as_stock_does():
    expected = trained(())
    assert not torch.equal(expected, TINY.training().model[0].weight)
    for cell in (("channels_last",), ("fused_optimizer",), ("channels_last", "fused_optimizer")):
        torch.testing.assert_close(trained(cell), expected)


def trained(cell: tuple[str, ...]) -> torch.Tensor:
    made, network = [], TINY

    class Watched(zoo_networks.Network):
        def training(self, **settings: Any) -> Any:
            made.append(network.training(**settings))
            return made[-1]

    step = zoo_cells.by_hand(Watched(**vars(network)), cell)
    for _ in range(5):
        step()
    return made[-1].model[0].weight.detach()


def test_a_network_is_measured_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo_cells, "HOPELESS", math.inf)
    asked = task(tmp_path, left_out={"autocast": "crashed with SIGSEGV"}, notes=["simulated: a machine"])
    zoo_cells.main(json.dumps(asdict(asked)))
    report = BenchReport.load(asked.out)
    by_name = {c.name: c for c in report.contestants}
    assert {"stock", "fused_optimizer", "channels_last+fused_optimizer", "O1", "O2"} <= set(by_name)
    assert "autocast" not in by_name
    assert "autocast: crashed with SIGSEGV" in report.notes
    assert "simulated: a machine" in report.notes
    assert all(math.isfinite(c.step_seconds.mid) and len(c.samples) == 2 for c in report.contestants)
    assert by_name["O1"].notes[0].startswith("level O1")
    assert "grad_freeze" not in [row.name for row in by_name["O1"].algorithms]
    assert Path(asked.state).read_text().strip() in by_name


def test_a_cell_that_raises_is_noted_and_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo_cells, "HOPELESS", math.inf)  # on a busy machine an equal loop may look slow

    class Fragile(zoo_networks.Network):
        def training(self, **settings: Any) -> Any:
            if "fused" in settings:
                raise RuntimeError("no kernel\nwith a trace")
            return TINY.training()

    tried = zoo_cells.try_all(Fragile(**vars(TINY)), [(), ("fused_optimizer",)], task(tmp_path), lambda name: None)
    assert tried.notes == ["fused_optimizer: raised RuntimeError: no kernel"]
    assert list(tried.steps) == ["stock", "stock again", "O1", "O2"]
