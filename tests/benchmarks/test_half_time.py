"""The comparison with tuned stock: which runs are made, that a run is kept, and what the tables say of them."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchboost
from torchboost.bench.factory import Factory, Parts
from torchboost.measure.stopwatch import environment
from torchboost.workloads.data import Images
from torchboost.workloads.named import WORKLOADS, Workload, find_workload

half_time = importlib.import_module("half_time")
options = importlib.import_module("options")


def small(*_: Any) -> Images:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(256, (72, 1, 4, 4), generator=draw).to(torch.uint8)
    labels = images.flatten(1).sum(1) % 3
    parts = {"train_inputs": images, "train_labels": labels, "test_inputs": images, "test_labels": labels}
    return Images(**parts, classes=3, mean=(0.5,), std=(0.3,)).held_out()


def network(data: Images) -> nn.Module:
    middle = [nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, data.classes)]
    return nn.Sequential(nn.Flatten(), *middle)


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Workload:
    job = replace(
        find_workload("digits-resnet"),
        name="digits-resnet",
        load=small,
        build=network,
        batch=8,
    )
    monkeypatch.setattr(half_time, "find_workload", lambda name: job)
    return job


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand in for the tuning."""
    asked: list[dict[str, Any]] = []

    def tune(make: Any, **given: Any) -> SimpleNamespace:
        asked.append(given)
        recipe = '{"optimizer": "muon", "lr": 0.02, "rate": 0.5, "length": 0.75}'
        given["out"].write_text(f'{{"extra": {{"fused_optimizer": true}}, "recipe": {recipe}}}')
        stock = SimpleNamespace(rate=0.5)
        return SimpleNamespace(title=given["title"], stock=stock, spent_seconds=3.0, runs=[0] * 9)

    monkeypatch.setattr(torchboost, "tune", tune)
    return asked


def test_fresh_seeds_of_every_way_are_trained_and_kept(
    workload: Workload, tuned: list[dict[str, Any]], tmp_path: Path
) -> None:
    smoke = options.Options(out=tmp_path, smoke=True)
    path = half_time.measure("digits-resnet", smoke, seeds=2)
    result = json.loads(path.read_text())
    assert (tuned[0]["drop"], tuned[0]["resume"], tuned[0]["epochs"]) == (0.005, False, 1)
    ways = (half_time.STOCK, half_time.TUNED, half_time.HAND, half_time.HAND_MUON, half_time.LEVEL)
    fresh = [(run["way"], run["seed"]) for run in result["runs"] if run["seed"] >= half_time.FRESH]
    assert sorted(fresh) == sorted((way, seed) for way in ways for seed in (2000, 2001))
    assert all(("on" in run) == (run["way"] == half_time.LEVEL) for run in result["runs"])
    assert fresh[0][0] != fresh[5][0]  # they take turns at being first
    searched = [run for run in result["runs"] if run["seed"] == 0]
    assert {run["muon"] for run in searched if "muon" in run} == set(half_time.MUON_RATES)
    assert {run["steps"] for run in searched if run["way"] == half_time.HAND_MUON} <= {4, 6, 8}
    assert {run["steps"] for run in result["runs"] if run["way"] == half_time.STOCK} == {8}
    best = max((run["score"], -run["muon"]) for run in searched if run.get("share") == 0.5)
    assert result["muon"]["muon"] == -best[1]
    assert {run["steps"] for run in result["runs"] if run["way"] == half_time.TUNED} == {6}
    assert result["rate"] * result["lr"] == pytest.approx(0.05)
    gone = result["runs"].pop()
    path.write_text(json.dumps(result))
    half_time.measure("digits-resnet", replace(smoke, resume=True), seeds=2)
    again = json.loads(path.read_text())["runs"]
    assert again[:-1] == result["runs"]
    assert again[-1]["metric"] == gone["metric"]
    result["steps"] += 1
    path.write_text(json.dumps(result))
    with pytest.raises(SystemExit, match="leave out --resume"):
        half_time.measure("digits-resnet", replace(smoke, resume=True), seeds=2)


def test_stock_is_trained_at_the_rate_that_was_found(workload: Workload, tmp_path: Path) -> None:
    factory: Factory = workload.factory(small())
    parts = half_time.scaled(factory.make, 0.25)(0)
    assert [group["lr"] for group in parts.optimizer.param_groups] == [0.025]
    other = half_time.scaled(factory.make, 0.25, lambda found: torch.optim.SGD(found.model.parameters(), lr=3.0))(0)
    assert isinstance(other, Parts)
    assert [group["lr"] for group in other.optimizer.param_groups] == [3.0]
    runs = half_time.SavedRuns(tmp_path / "runs.json", {})
    run = half_time.Bench(factory, 4, Path("none.json"), 0.25, None, runs).run(half_time.STOCK, 3)
    torch.manual_seed(3)
    model = workload.model(small(), 3)
    optimizer = workload.optimizer(model.parameters(), lr=0.025)
    schedule = workload.schedule(optimizer, 4)
    for inputs, targets in list(small().train(8, seed=3, epoch=0))[:4]:
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert run["metric"] == workload.evaluate(model.eval(), small())
    assert run["score"] == workload.validate(model, small())
    assert (run["steps"], run["seed"]) == (4, 3)


def result_of(name: str, **changes: Any) -> dict[str, Any]:
    def run(way: str, seed: int, seconds: float, metric: float) -> dict[str, Any]:
        return {"way": way, "seed": seed, "seconds": seconds, "wall": seconds, "metric": metric, "score": metric}

    runs = [run("stock", 0, 100.0, 0.1), run("by hand, Muon", 0, 1.0, 0.9)]
    for seed in (2000, 2001, 2002):
        runs += [run("stock", seed, 10.0, 0.8), run("tuned", seed, 4.0, 0.799), run("by hand", seed, 8.0, 0.8)]
        runs += [run("by hand, Muon", seed, 5.0, 0.7)]
    about = {"name": name, "title": "a network", "steps": 100, "drop": 0.005, "lr": 0.1, "rate": 0.25}
    config = {"extra": {"unpad": True, "less_bn": False}, "recipe": {"optimizer": "muon", "lr": 0.02, "length": 0.55}}
    tuning = {"seconds": 300.0, "runs": 40}
    muon = {"muon": 0.04, "share": 0.5}
    return {
        **about,
        "config": config,
        "tuning": tuning,
        "environment": environment().model_dump(),
        "muon": muon,
        "runs": runs,
        **changes,
    }


def level_runs(losses: list[float]) -> list[dict[str, Any]]:
    runs = result_of("text-gpt")["runs"]
    for seed, loss in zip((2000, 2001, 2002), losses, strict=True):
        on = ["autocast"] if loss else ["autocast", "fused_optimizer"]
        runs.append({"way": "O1", "seed": seed, "seconds": 5.0, "metric": 0.8 - loss, "on": on})
    return runs


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [([0.0, 0.001, 0.002], "kept"), ([0.03, 0.04, 0.04], "broken"), ([0.0, 0.001, 0.02], "not decided")],
)
def test_a_level_keeps_its_promise_if_the_bound_does(tmp_path: Path, losses: list[float], verdict: str) -> None:
    (tmp_path / "half_time-cifar10-vgg.json").write_text(json.dumps(result_of("cifar10-vgg", runs=level_runs(losses))))
    (tmp_path / "half_time-text-gpt.json").write_text(json.dumps(result_of("text-gpt")))  # without the level
    found, _ = half_time.level_table(tmp_path)
    (line,) = found.rows
    assert len(line) == len(found.headings)
    assert (line[1], line[4], line[5]) == ("80.0 %", "0.5 points", verdict)
    assert line[2] == ("autocast" if losses[0] else "autocast, fused_optimizer (1 of 3)")


def test_the_tables_count_fresh_seeds_alone_and_say_what_is_not_reached(tmp_path: Path) -> None:
    def save(result: dict[str, Any]) -> None:
        (tmp_path / f"half_time-{result['name']}.json").write_text(json.dumps(result))

    save(result_of("cifar10-vgg"))
    save(result_of("text-gpt", rate=1, config={"extra": {}}, runs=result_of("text-gpt")["runs"][:3]))  # one seed
    found, said = half_time.table(tmp_path)
    (line,) = found.rows
    assert len(line) == len(found.headings)
    assert line[:4] == (
        "a network, 100 steps",
        "0.025, 0.25 times its own",
        "80.0 %, 10.0 s",
        "Muon at 0.02, 55% of the steps, unpad",
    )
    assert line[4].startswith("\N{MINUS SIGN}0.10 points")
    assert line[5].startswith("0.40\N{MULTIPLICATION SIGN}")
    assert line[6] == "30"
    assert "3 seeds" in said
    rival, _ = half_time.rival_table(tmp_path)
    (line,) = rival.rows
    assert len(line) == len(rival.headings)
    assert line[1:3] == ("+0.00 points (+0.00 to +0.00)", "0.80\N{MULTIPLICATION SIGN} (0.80 to 0.80)")
    assert line[3].startswith("0.50")
    assert line[4] == "0.04, 50% of the steps"
    assert line[6].startswith("not reached; a run takes 0.50")
    diverged = result_of("cifar10-vgg")
    diverged["runs"][3]["metric"] = float("nan")
    save(diverged)
    assert half_time.table(tmp_path)[0].rows[0][4:6] == ("diverged", "not reached")
    assert half_time.chosen_in({"extra": {}}) == "nothing"
    given = options.Options(data=tmp_path / "images", text=tmp_path / "text")
    paths = {name.partition("-")[0]: given.path_for(name) for name in half_time.CASES}
    assert paths == {
        "fine": None,
        "digits": None,
        "cifar10": given.data,
        "text": given.text,
        "docstrings": None,
        "pieces": given.text,
    }
    assert set(half_time.CASES) == {workload.name for workload in WORKLOADS} | set(half_time.OTHERS)


@pytest.mark.parametrize(("name", "package"), [("cifar10-timm-vit", "timm"), ("pieces-neox", "transformers")])
def test_a_foreign_workload_trains(name: str, package: str, tmp_path: Path):
    pytest.importorskip(package, exc_type=ImportError)  # timm needs torchvision, too
    path = tmp_path / "text"
    path.write_text("to be or not to be, that is the question. " * 400)
    images = Images(
        **{key: torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8) for key in ("train_inputs", "test_inputs")},
        **{key: torch.arange(8) for key in ("train_labels", "test_labels")},
        classes=10,
        mean=(0.5,) * 3,
        std=(0.3,) * 3,
    )
    job = replace(half_time.workload(name), batch=2)
    parts = job.factory(images if package == "timm" else job.load(path, 8)).build(0)
    inputs, targets = next(iter(parts.batches))
    loss = parts.loss(parts.model(inputs), targets)
    loss.backward()
    assert 0 < float(loss.detach()) < 20
