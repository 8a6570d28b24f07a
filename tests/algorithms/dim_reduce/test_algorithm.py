from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchboost
from torchboost import Target, TrainStep
from torchboost.algorithms import DimReduction
from torchboost.algorithms.dim_reduce import algorithm as dim_reduce
from torchboost.algorithms.dim_reduce.algorithm import DimReduceRun
from torchboost.algorithms.grad_accumulation.algorithm import Accumulator
from torchboost.core import attach_all
from torchboost.errors import IncompatibleError


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3))


def batch(seed: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=g)
    return x, x[:, :3].argmax(1)


def start(
    settings: DimReduction, seed: int = 0, model: nn.Module | None = None
) -> tuple[nn.Module, TrainStep, DimReduceRun]:
    model = network(seed) if model is None else model
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    attached = attach_all(target, [settings])
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y), attached=attached)
    assert isinstance(target.optimizer, DimReduceRun)
    return model, step, target.optimizer


def checkpoints(folder: Path, count: int, seed: int = 0) -> list[nn.Module]:
    """Train with momentum and save the weights after every few updates."""
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kept = []
    for number in range(3 * count):
        x, y = batch(number)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 3 == 2:
            torch.save(model.state_dict(), folder / f"step-{number}.pt")
            kept.append(copy.deepcopy(model))
    return kept


def loss_of(model: nn.Module) -> float:
    x, y = batch(1000, 256)
    with torch.no_grad():
        return float(F.cross_entropy(copy.deepcopy(model).eval()(x), y))


def test_trains_from_checkpoints_of_an_earlier_run(tmp_path: Path) -> None:
    checkpoints(tmp_path, 8)
    model, step, run = start(DimReduction(n_components=8, weight_load_dir=str(tmp_path)))
    assert run.phase == "subspace"
    before = loss_of(model)
    for number in range(60):
        step(*batch(number))
    assert loss_of(model) < 0.5 * before
    assert run.subspace is not None
    assert run.subspace.accepted > 20


@pytest.mark.parametrize(
    ("length", "end"),
    [(None, ""), (7, ""), (6, ", and this run ends before, after 6 updates")],
)
def test_says_until_when_it_collects(length: int | None, end: str) -> None:
    model = network()
    config = {"extra": {"dim_reduce": {"n_components": 2, "snapshot_every": 2, "snapshots": 3}}}
    boosted = torchboost.boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config=config, total_steps=length, calibrate=False
    )
    step = boosted.step(F.cross_entropy)
    for number in range(6):
        row = next(row for row in boosted.levers.explanation().rows if row.name == "dim_reduce")
        assert row.did.endswith(f"not in effect: collecting until update 6{end}")
        step(*batch(number))
    assert "not in effect" not in boosted.explain()


def test_continues_from_the_last_snapshot() -> None:
    model, step, _ = start(DimReduction(n_components=2, snapshot_every=1))
    step(*batch(0))
    x, y = batch(1)
    other, plain = network(), None
    plain = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    for inputs, labels in (batch(0), (x, y)):
        F.cross_entropy(other(inputs), labels).backward()
        plain.step()
        plain.zero_grad()
    step(x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_resumes_bit_for_bit_after_every_step_of_both_phases(tmp_path: Path) -> None:
    checkpoints(tmp_path, 3)
    own = DimReduction(n_components=2, snapshots=3, snapshot_every=2)
    for settings in (own, DimReduction(n_components=2, weight_load_dir=str(tmp_path))):
        model, step, run = start(settings)
        saved, phases = [], set()
        for number in range(14):
            saved.append(copy.deepcopy((model.state_dict(), run.state_dict(), step.state_dict())))
            phases.add(run.phase)
            step(*batch(number))
        assert phases == ({"collect", "subspace"} if settings is own else {"subspace"})
        for number, (weights, state, of_step) in enumerate(saved):
            again, resumed, rerun = start(settings, seed=5)
            again.load_state_dict(weights)
            rerun.load_state_dict(state)
            resumed.load_state_dict(of_step)
            for rest in range(number, 14):
                resumed(*batch(rest))
            for name, value in model.state_dict().items():
                assert torch.equal(again.state_dict()[name], value), f"{name} after resuming at {number}"


def test_a_checkpoint_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    checkpoints(tmp_path, 3)
    own = DimReduction(n_components=2, snapshots=3, snapshot_every=2)
    for settings in (own, DimReduction(n_components=2, weight_load_dir=str(tmp_path))):
        _, step, run = start(settings)
        _, trained, other = start(settings)
        step(*batch(0))
        for number in range(9):
            trained(*batch(number))
        before = copy.deepcopy(run.state_dict())
        with pytest.raises(ValueError, match="groups"):
            run.load_state_dict({**other.state_dict(), "param_groups": []})
        state = run.state_dict()
        with pytest.raises(ValueError, match="snapshots of weights of other shapes"):
            run.load_state_dict({**state, "front": {**state["front"], "snapshots": {"kept": [[torch.zeros(3)]]}}})
        assert repr(run.state_dict()) == repr(before)


def test_a_file_to_come_is_written_from_the_checkpoints_and_read_the_next_time(tmp_path: Path) -> None:
    folder, path = tmp_path / "checkpoints", tmp_path / "new" / "pca.npy"
    folder.mkdir()
    checkpoints(folder, 4)
    both = DimReduction(n_components=3, pca_mat_path=str(path), weight_load_dir=str(folder))
    _, _, from_folder = start(DimReduction(n_components=3, weight_load_dir=str(folder)))
    _, _, made = start(both)
    assert path.is_file()
    for file in folder.iterdir():
        file.unlink()
    _, _, read = start(both)
    for run in (from_folder, made, read):
        assert run.subspace is not None
    assert torch.equal(made.subspace.basis.rows, from_folder.subspace.basis.rows)
    assert torch.equal(made.subspace.basis.rows, read.subspace.basis.rows)
    path.unlink()
    refused(both, ValueError, "found no checkpoints")
    refused(dataclasses.replace(both, weight_load_dir=None), FileNotFoundError, "weight_load_dir")


def test_bad_settings() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"n_components": 0}, "n_components=0"),
        ({"rho": 1.0}, "rho: found 1.0"),
        ({"gamma": -1.0}, "gamma"),
        ({"alpha": float("inf")}, "alpha"),
        ({"sigma": 0.0}, "sigma"),
        ({"snapshots": 40.0}, "snapshots=40.0"),
        ({"snapshots": 0}, "snapshots=0: an integer of 1 or more, or None"),
        ({"snapshots": 3, "n_components": 4}, "snapshots=3: at least as many as directions"),
        ({"timeout": 10**12}, "timeout=1000000000000: seconds, at most"),
    ]
    for settings, message in bad:
        with pytest.raises(ValueError, match=message):
            DimReduction(**settings)


def refused(settings: DimReduction, error: type[Exception], said: str, model: nn.Module | None = None) -> None:
    """Attaching raises, and nothing was changed."""
    model = network() if model is None else model
    before = copy.deepcopy(model.state_dict())
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    given = target.optimizer
    with pytest.raises(error, match=said):
        attach_all(target, [settings])
    assert target.optimizer is given
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bad_checkpoints(tmp_path: Path) -> None:
    settings = DimReduction(n_components=4, weight_load_dir=str(tmp_path))
    refused(settings, ValueError, "found no checkpoints")
    checkpoints(tmp_path, 3)
    refused(settings, ValueError, "n_components: found 4 and 3 snapshots")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    refused(settings, ValueError, "belongs to another model: missing 0.weight")
    (tmp_path / "other.pt").unlink()
    spoiled = network().state_dict()
    spoiled["3.bias"][1] = float("nan")
    torch.save(spoiled, tmp_path / "z.pt")
    refused(settings, ValueError, "number 3 holds NaN or infinities in parameter 5")
    refused(DimReduction(weight_load_dir=str(tmp_path / "none")), FileNotFoundError, "found no folder")


def test_bad_matrices(tmp_path: Path) -> None:
    length = sum(p.numel() for p in network().parameters())
    path = tmp_path / "basis.npy"

    def settings(k: int = 2) -> DimReduction:
        return DimReduction(n_components=k, pca_mat_path=str(path))

    refused(settings(), FileNotFoundError, "found no file")
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    refused(settings(), ValueError, "not an .npy file of numbers")
    np.save(path, np.ones((2, length), dtype=np.float32))
    refused(settings(), ValueError, "not orthonormal")
    np.save(path, np.eye(2, length - 1, dtype=np.float32))
    refused(settings(), ValueError, rf"needed are 2 of the {length} trained weights")
    np.save(path, np.eye(2, length, dtype=np.float32))
    refused(settings(3), ValueError, "found 2 directions")
    refused(settings(length + 1), ValueError, f"at most {length}")
    start(settings())


def test_what_it_cannot_work_with() -> None:
    settings = DimReduction(n_components=2)
    model = network()
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulator=Accumulator(2, model))
    with pytest.raises(IncompatibleError, match="accumulates gradients"):
        attach_all(target, [settings])
    mixed = network()
    mixed[0].bfloat16()
    refused(settings, IncompatibleError, "torch.bfloat16 on cpu, torch.float32 on cpu", mixed)
    part = network()
    target = Target(part, torch.optim.SGD(part[0].parameters(), lr=0.1))
    with pytest.raises(IncompatibleError, match="4 of 6 parameters of the model"):
        attach_all(target, [settings])


def test_the_optimizer_behind_is_not_stepped_by_others() -> None:
    model = network()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach_all(Target(model, given), [DimReduction(n_components=2)])
    with pytest.raises(IncompatibleError, match=r"target\.optimizer\.step"):
        given.step()
    attached.remove()
    given.step()


def test_a_parameter_that_is_frozen_later_is_not_moved_in_silence(tmp_path: Path) -> None:
    checkpoints(tmp_path, 3)
    model, step, _ = start(DimReduction(n_components=2, weight_load_dir=str(tmp_path)))
    step(*batch(0))
    model[0].weight.requires_grad_(False)
    with pytest.raises(IncompatibleError, match="was frozen"):
        step(*batch(1))


def test_a_subspace_that_cannot_begin_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for the basis")

    model, step, run = start(DimReduction(n_components=2, snapshot_every=1))
    step(*batch(0))
    with monkeypatch.context() as patch:
        patch.setattr(dim_reduce, "Subspace", full)
        with pytest.raises(MemoryError):
            step(*batch(1))
    assert run.phase == "collect"
    assert len(run.state_dict()["front"]["snapshots"]["kept"]) == 2
    after = [p.detach().clone() for p in model.parameters()]
    again, other, resumed = start(DimReduction(n_components=2, snapshot_every=1), seed=3)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(run.state_dict())
    other(*batch(2))
    assert resumed.phase == "subspace"
    assert not all(torch.equal(p, q) for p, q in zip(again.parameters(), after, strict=True))


def test_parameters_of_the_optimizer_that_are_not_in_the_model_are_refused() -> None:
    model, head = network(), nn.Linear(3, 2)
    target = Target(model, torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1))
    with pytest.raises(IncompatibleError, match="trains 2 parameters that are not in the model"):
        attach_all(target, [DimReduction(n_components=2)])
    head.requires_grad_(False)
    attach_all(target, [DimReduction(n_components=2)])
