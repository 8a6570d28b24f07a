"""Folders of checkpoints in one process: complete ones only, the newest kept. Several ranks: tests/contracts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.nn import functional as F

from tests.support.models import batch_for, mlp
from tests.support.trajectories import snapshot
from torchboost.core.algorithm import Target
from torchboost.core.loss_scale import DynamicLossScale
from torchboost.core.step import TrainStep
from torchboost.distributed import checkpoint


class Killed(BaseException):
    """The end of the process."""


class Run:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        target = Target(self.model, self.optimizer, DynamicLossScale(8.0, window=2))
        self.step = TrainStep(target, lambda x, y: F.cross_entropy(self.model(x), y))

    def train(self, *numbers: int) -> None:
        for number in numbers:
            self.step(*batch_for(self.model, torch.Generator().manual_seed(number)))

    def save(self, folder: Path, number: int, **options: int) -> Path:
        return checkpoint.save(folder, number, self.model, self.optimizer, boost=self.step, **options)

    def load(self, path: Path) -> None:
        checkpoint.load(path, self.model, self.optimizer, boost=self.step)


def test_one_process_resumes_bit_for_bit(tmp_path):
    run, again = Run(), Run()
    run.train(0, 1, 2)
    path = run.save(tmp_path, 3)
    assert checkpoint.latest(tmp_path) == path
    again.load(path)
    for each in (run, again):
        each.train(3, 4)
    assert snapshot(again.model) == snapshot(run.model)
    assert again.step.target.scaler.get_scale() == run.step.target.scaler.get_scale() == 32.0


def test_a_checkpoint_before_the_first_update_changes_nothing(tmp_path):
    run, undisturbed = Run(), Run()
    path = run.save(tmp_path, 0)
    assert not run.optimizer.state
    again = Run()
    again.load(path)
    for each in (run, again, undisturbed):
        each.train(0, 1)
    assert snapshot(run.model) == snapshot(again.model) == snapshot(undisturbed.model)


def test_the_newest_stay_by_number_and_not_by_name(tmp_path):
    run = Run()
    assert checkpoint.latest(tmp_path / "nothing") is None
    assert checkpoint.latest(tmp_path) is None
    for number in (5, 20, 99_999_999, 100_000_000):
        run.save(tmp_path, number, keep=3)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [20, 99_999_999, 100_000_000]
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert int(newest.name) == 100_000_000


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_write_loses_nothing(when, tmp_path, monkeypatch):
    run = Run()
    run.train(0)
    first = run.save(tmp_path, 1)
    run.train(1)
    write = state_dict_saver.save

    def killed(*args, **options):
        if when == "after":
            write(*args, **options)
        options["checkpoint_id"].mkdir(exist_ok=True)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(state_dict_saver, "save", killed)
        with pytest.raises(Killed):
            run.save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == first
    assert len(list(tmp_path.iterdir())) == 2
    again = Run()
    again.load(first)
    again.train(1)
    second = again.save(tmp_path, 2)
    assert sorted(tmp_path.iterdir()) == [first, second]
    assert snapshot(again.model) == snapshot(run.model)


def test_numbers_that_make_no_sense_are_refused(tmp_path):
    run = Run()
    with pytest.raises(ValueError, match="found -1 and 2"):
        run.save(tmp_path, -1)
    with pytest.raises(ValueError, match="found 1 and 0"):
        run.save(tmp_path, 1, keep=0)
    path = run.save(tmp_path, 1)
    with pytest.raises(FileExistsError, match="give a larger number"):
        run.save(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match=r"no '\.metadata'"):
        run.load(tmp_path / "2")
    assert list(tmp_path.iterdir()) == [path]


def test_groups_in_another_order_get_their_own_moments(tmp_path):
    run, again = Run(), Run()
    run.train(0)
    path = run.save(tmp_path, 1)
    again.optimizer = torch.optim.AdamW(list(again.model.parameters())[::-1], lr=0.01)
    again.step.target.optimizer = again.optimizer
    again.load(path)
    for name, param in run.model.named_parameters():
        other = again.model.get_parameter(name)
        assert torch.equal(run.optimizer.state[param]["exp_avg"], again.optimizer.state[other]["exp_avg"])
