"""Folders of checkpoints in one process: complete ones only, the newest kept. Several ranks: tests/contracts."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.nn import functional as F

from tests.support.models import batch_for, cnn, mlp
from tests.support.optimizers import CASES, DISTINCT, values
from tests.support.trajectories import snapshot
from torchboost.algorithms.channels_last import ChannelsLast
from torchboost.algorithms.fused_optimizer import FusedOptimizer
from torchboost.algorithms.loss_scale_group.scalers import DynamicLossScale
from torchboost.core.algorithm import Target, attach_all
from torchboost.core.step import TrainStep
from torchboost.distributed import checkpoint
from torchboost.optim.rules.adam import Adam


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
    with pytest.raises(ValueError, match="found number=-1 and keep=2; give a number of 0 or more"):
        run.save(tmp_path, -1)
    with pytest.raises(ValueError, match="keep=0; give a number of 0 or more, and keep 1 or more"):
        run.save(tmp_path, 1, keep=0)
    for number in ("5", 5.0):
        with pytest.raises(TypeError, match="integer"):
            run.save(tmp_path, number)
    with pytest.raises(ValueError, match=r"'torchboost\.copy' is reserved"):
        checkpoint.save(tmp_path, 1, run.model, run.optimizer, **{"torchboost.copy": run.step})
    path = run.save(tmp_path, 1)
    with pytest.raises(FileExistsError, match="give a larger number"):
        run.save(tmp_path, 1)
    with pytest.raises(FileExistsError, match=r"00000001 already exists, .* 0 would be older.* another folder"):
        run.save(tmp_path, 0)
    with pytest.raises(FileNotFoundError, match=r"no '\.metadata'"):
        run.load(tmp_path / "2")
    assert list(tmp_path.iterdir()) == [path]


class Unwritable:
    def state_dict(self):
        return {"function": lambda: 1}

    def load_state_dict(self, state):
        pass


def test_what_torch_cannot_write_or_read_is_an_ordinary_error(tmp_path):
    run = Run()
    with pytest.raises(RuntimeError, match=r"00000001 was not written: rank 0: .*[Pp]ickle"):
        checkpoint.save(tmp_path, 1, run.model, run.optimizer, part=Unwritable())
    path = run.save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == [path]
    before = snapshot(run.model)
    for data in path.glob("*.distcp"):
        data.write_bytes(b"")
    with pytest.raises(ValueError, match=r"00000001 cannot be read .*; load another checkpoint"):
        run.load(path)
    for data in path.glob("*.distcp"):
        data.unlink()
    with pytest.raises(FileNotFoundError, match="00000001 cannot be read"):
        run.load(path)
    for content in (b"", b"garbage", pickle.dumps(3)):
        (path / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match="metadata is damaged"):
            run.load(path)
    assert snapshot(run.model) == before


def test_what_lies_in_the_place_of_a_checkpoint_is_named(tmp_path):
    run = Run()
    (tmp_path / "00000005").write_text("notes")
    assert checkpoint.latest(tmp_path) is None
    with pytest.raises(FileExistsError, match="00000005 already exists and is not a checkpoint"):
        run.save(tmp_path, 5)
    with pytest.raises(FileExistsError, match="00000005"):
        run.save(tmp_path / "00000005", 1)
    assert run.save(tmp_path, 6, keep=1) == checkpoint.latest(tmp_path)


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


def test_every_rule_resumes_bit_for_bit_and_gets_back_all_it_keeps(tmp_path):
    for name in DISTINCT:
        resumes_and_gets_back_all_it_keeps(name, tmp_path / name)


def resumes_and_gets_back_all_it_keeps(name: str, folder: Path) -> None:
    models = [mlp(), mlp()]
    least = 2 if name.startswith("Muon") else 0
    optimizers = [CASES[name]([pair for pair in m.named_parameters() if pair[1].ndim >= least]) for m in models]

    def train(index: int, numbers: range) -> None:
        for number in numbers:
            inputs, labels = batch_for(models[index], torch.Generator().manual_seed(number))
            F.cross_entropy(models[index](inputs), labels).backward()
            optimizers[index].step()
            optimizers[index].zero_grad()

    train(0, range(2))
    checkpoint.load(checkpoint.save(folder, 2, models[0], optimizers[0]), models[1], optimizers[1])
    (groups, states, weights), loaded = map(values, optimizers)
    # An empty state leaves no trace in a file, and is as good as none.
    assert (groups, [state or None for state in states], weights) == loaded
    for index in (0, 1):
        train(index, range(2, 4))
    assert snapshot(models[0]) == snapshot(models[1])


def test_masters_of_bfloat16_parameters_stay_in_float32(tmp_path):
    models = [mlp().bfloat16(), mlp().bfloat16()]
    optimizers = [Adam(model.parameters(), lr=0.01, master_weights=True) for model in models]
    inputs, labels = batch_for(models[0], torch.Generator().manual_seed(0))
    F.cross_entropy(models[0](inputs.bfloat16()).float(), labels).backward()
    optimizers[0].step()
    checkpoint.load(checkpoint.save(tmp_path, 1, models[0], optimizers[0]), models[1], optimizers[1])
    assert values(optimizers[0]) == values(optimizers[1])
    assert {state["master"].dtype for state in optimizers[1].state.values()} == {torch.float32}


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="parameters that are not in the model"):
        checkpoint.save(tmp_path, 1, mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1))
    assert list(tmp_path.iterdir()) == []


def test_the_saved_optimizer_is_that_of_a_plain_run(tmp_path):
    model, plain = cnn(), cnn()
    optimizer, other = (torch.optim.AdamW(each.parameters()) for each in (model, plain))
    attached = attach_all(Target(model, optimizer), [ChannelsLast(), FusedOptimizer()])
    inputs, labels = batch_for(model, torch.Generator().manual_seed(0))
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    path = checkpoint.save(tmp_path, 1, model, optimizer)
    checkpoint.load(path, plain, other)
    assert optimizer.param_groups[0]["fused"]
    assert not other.param_groups[0]["fused"]
    kernels = [entry["exp_avg"] for param, entry in other.state.items() if param.ndim == 4]
    assert kernels
    assert all(moment.is_contiguous() for moment in kernels)
    checkpoint.load(path, model, optimizer)
    assert optimizer.param_groups[0]["fused"]
    assert all(optimizer.state[p]["exp_avg"].stride() == p.stride() for p in model.parameters())
    attached.remove()


def test_only_complete_checkpoints_of_ours_count_and_leftovers_are_removed_but_not_followed(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    (outside / "precious").touch()
    folder.mkdir()
    (folder / ".unfinished-00000002").mkdir()
    (folder / ".unfinished-00000009").symlink_to(outside)
    (folder / ".unfinished-00000010").touch()
    (folder / "2024").write_text("notes")
    foreign = [folder / name for name in ("7", "00000008", "\N{ARABIC-INDIC DIGIT THREE}" * 8)]
    for each in foreign:
        each.mkdir()
    assert checkpoint.latest(folder) is None
    path = Run().save(folder, 9, keep=1)
    assert checkpoint.latest(folder) == path
    assert sorted(folder.iterdir()) == sorted([path, folder / "2024", *foreign])
    assert (outside / "precious").exists()


def test_a_link_to_a_checkpoint_counts_and_is_never_removed(tmp_path):
    run, folder = Run(), tmp_path / "run"
    moved = run.save(tmp_path / "a", 1)
    folder.mkdir()
    link = folder / "00000001"
    link.symlink_to(moved)
    assert checkpoint.latest(folder) == link
    run.save(folder, 2, keep=1)
    path = run.save(folder, 3, keep=1)
    assert sorted(folder.iterdir()) == [link, path]
    run.load(moved)
