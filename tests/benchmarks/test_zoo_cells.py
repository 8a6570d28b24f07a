"""The grid of the zoo, and one small network through all of it."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchboost.errors import IncompatibleError
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


def test_each_cell_trains_as_stock_does(tmp_path: Path):
    expected = trained(())
    assert not torch.equal(expected, TINY.training().model[0].weight)
    for cell in (("channels_last",), ("fused_optimizer",), ("channels_last", "fused_optimizer")):
        torch.testing.assert_close(trained(cell), expected)
    sent = task(tmp_path, left_out={"autocast": "crashed with SIGSEGV"}, notes=["simulated"])
    assert zoo_cells.Task.from_json(sent.to_json()) == sent


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


def test_a_cell_that_the_library_refuses_is_not_built():
    network = zoo_networks.Network(
        title="1x1 with a stride", build=lambda: nn.Conv2d(8, 8, 1, stride=2), draw=TINY.draw, optimizer=TINY.optimizer,
        loss=TINY.loss,
    )  # fmt: skip
    with pytest.raises(IncompatibleError, match="6035"):
        zoo_cells.by_hand(network, ("channels_last",))


def test_a_network_is_measured_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo_cells, "HOPELESS", math.inf)
    asked = task(tmp_path, left_out={"autocast": "crashed with SIGSEGV"}, notes=["simulated: a machine"])
    zoo_cells.main(asked.to_json())
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


@pytest.mark.parametrize(("seconds", "pairs"), [([22.0, 2.0], 1), ([19.0, 2.0, 5.0, 2.0, 5.0, 4.0], 3)])
def test_a_cell_that_is_far_too_slow_has_one_pair(seconds: list[float], pairs: int, monkeypatch: pytest.MonkeyPatch):
    left = iter(seconds)
    monkeypatch.setattr(zoo_cells, "timed", lambda step: next(left))
    assert len(zoo_cells.first_pairs(lambda: None, lambda: None, all_of_them=False)) == pairs


def test_a_compiled_cell_has_all_its_first_pairs_since_its_second_step_may_compile_again(
    monkeypatch: pytest.MonkeyPatch,
):
    left = iter([40.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    monkeypatch.setattr(zoo_cells, "timed", lambda step: next(left))
    pairs = zoo_cells.first_pairs(lambda: None, lambda: None, all_of_them=True)
    assert min(pair.share for pair in pairs) == 0.5


@pytest.mark.parametrize(("slow", "kept"), [(3.0, False), (1.5, True)])
def test_a_cell_that_is_slow_each_time_is_not_timed_in_rounds(
    slow: float, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pairs = [zoo_cells.Paired(slow, 1.0), zoo_cells.Paired(5.0, 1.0)]
    monkeypatch.setattr(zoo_cells, "first_pairs", lambda step, stock, all_of_them: pairs)
    tried = zoo_cells.Tried(steps={"stock": lambda: None})
    zoo_cells.try_one(TINY, "fused_optimizer", ("fused_optimizer",), tried, lambda name: None)
    assert ("fused_optimizer" in tried.steps) == kept
    assert ("fused_optimizer" in tried.hopeless) == (not kept)
    zoo_cells.try_one(TINY, "stock", (), tried, lambda name: None)
    assert "stock" in tried.steps
    assert "at least 3.0 times" in zoo_cells.slow_contestant("fused_optimizer", [pairs[0]] * 2).notes[0] or kept


def test_a_level_is_stepped_until_it_has_chosen():
    class Choosing:
        choice: object = None

    boosted, calls = Choosing(), []

    def step() -> None:
        calls.append(1)
        if len(calls) == 7:
            boosted.choice = "chosen"

    assert len(zoo_cells.calibrate(step, boosted)) == 7
    assert len(zoo_cells.calibrate(step, object())) == zoo_cells.TRIES


@pytest.mark.parametrize("graphs", [[3, 4], [3, 3]])
def test_a_cell_of_which_no_graph_was_made_says_so(graphs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counts = iter(graphs)
    monkeypatch.setattr(zoo_cells, "HOPELESS", math.inf)
    monkeypatch.setattr(zoo_cells, "compiled", lambda model, mode: model)
    monkeypatch.setattr(zoo_cells, "compiled_graphs", lambda: next(counts))
    tried = zoo_cells.Tried(steps={"stock": lambda: None})
    zoo_cells.try_one(TINY, "compile", ("compile",), tried, lambda name: None)
    assert tried.uncompiled == ({"compile"} if graphs == [3, 3] else set())


@pytest.mark.parametrize(("least", "seconds", "expected"), [(20, 0.2, 20), (20, 0.02, 100), (2, 0.02, 2)])
def test_short_steps_are_timed_more_often(least: int, seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo_cells, "timed", lambda step: seconds)
    assert zoo_cells.rounds(least, lambda: None) == expected
