"""Checkpoints of several ranks, under DDP and FSDP2, resume on as many ranks bit for bit, and on more or fewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import batch_for, cnn, mlp
from tests.support.ranks import RankError, run_ranks
from tests.support.wrapped import Kind, all_weights, wrap
from torchboost.algorithms.grad_accumulation.algorithm import GradAccumulation
from torchboost.algorithms.grad_freeze.algorithm import GradFreeze
from torchboost.algorithms.gradient_centralization import GradientCentralization
from torchboost.algorithms.loss_scale_group.algorithm import LossScaleGroup
from torchboost.algorithms.loss_scale_group.scalers import DynamicLossScale
from torchboost.core.algorithm import Algorithm, Attachment, Target, attach_all
from torchboost.core.step import TrainStep
from torchboost.distributed import checkpoint
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.adam import Adam
from torchboost.optim.rules.sgd import SGD
from torchboost.optim.transforms import Centralize, ClipNorm, Decay

pytestmark = [pytest.mark.dist, pytest.mark.long]

UPDATES, SAVED_AT, SAMPLES = 6, 3, 8
KINDS: tuple[Kind, ...] = ("ddp", "fsdp")


@dataclass(frozen=True)
class Case:
    """What trains."""

    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=0.01)
    algorithms: tuple[Algorithm, ...] = ()
    scaler: Callable[[], Any] = lambda: None
    steps: int = 1


CASES = {
    "AdamW, centralised": Case(algorithms=(GradientCentralization(),)),
    "Adam": Case(
        lambda params: Adam(
            params, lr=0.01, amsgrad=True, transforms=(Decay(0.01), Centralize(), ClipNorm(0.1)), weight_decay=0.01
        ),
    ),
    "SGD, momentum": Case(lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True)),
    "SGD, rates in a list": Case(lambda params: SGD(params, lr=[0.1 / (k + 1) for k in range(UPDATES)])),
    "accumulation": Case(
        algorithms=(GradAccumulation(steps=2),), scaler=lambda: DynamicLossScale(64.0, window=2), steps=2
    ),
    "loss scale per group": Case(algorithms=(LossScaleGroup(groups=3, init_scale=64.0),)),
    "freezing for good": Case(
        algorithms=(GradFreeze(pattern="progressive", groups=3, full_share=0.2, total_steps=UPDATES),)
    ),
    "freezing, without a state": Case(
        lambda params: torch.optim.SGD(params, lr=0.05),
        algorithms=(GradFreeze(pattern="interval", groups=3, full_share=0.0, total_steps=UPDATES),),
    ),
    "freezing from the first update on": Case(
        algorithms=(GradFreeze(pattern="continuous", groups=3, full_share=0.0, total_steps=UPDATES),)
    ),
}
ON_FOUR = ["Adam", "accumulation", "freezing for good"]
MOST_DIFFERENT = ["Adam", "accumulation", "freezing from the first update on"]


class OwnNumber(Attachment):
    """A state of its own on every rank."""

    loaded: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"number": 100 + dist.get_rank()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state["number"]


@dataclass(frozen=True, kw_only=True)
class Numbered(Algorithm):
    name: ClassVar[str] = "numbered"

    def attach(self, target: Target) -> OwnNumber:
        return OwnNumber()


class Run:
    """A model, an optimizer, a step and a scheduler that start as in every other run of a case."""

    def __init__(self, kind: Kind, case: Case, *, model: Callable[[], nn.Module] = mlp) -> None:
        torch.manual_seed(0)
        self.bare = model()
        self.model = wrap(self.bare, kind)
        self.optimizer = case.optimizer(self.model.parameters())
        target = Target(self.model, self.optimizer, case.scaler())
        attached = attach_all(target, case.algorithms)
        self.step = TrainStep(target, lambda x, y: F.cross_entropy(self.model(x), y), attached=attached)
        self.steps = case.steps
        self.parts: dict[str, Any] = {"boost": self.step}
        if "initial_lr" not in self.optimizer.param_groups[0] and not getattr(self.optimizer, "_schedules", [{}])[0]:
            self.parts["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def micro_step(self, number: int) -> None:
        """Train this rank's share of a batch that is the same however many ranks there are."""
        share = SAMPLES // dist.get_world_size()
        x, y = batch_for(self.bare, torch.Generator().manual_seed(number), SAMPLES)
        mine = slice(share * dist.get_rank(), share * (dist.get_rank() + 1))
        self.step(x[mine], y[mine])
        if self.step.updated and "scheduler" in self.parts:
            self.parts["scheduler"].step()

    def train(self, first: int, last: int) -> None:
        for number in range(first * self.steps, last * self.steps):
            self.micro_step(number)

    def save(self, folder: Path, number: int) -> Path:
        return checkpoint.save(folder, number, self.model, self.optimizer, **self.parts)

    def load(self, path: Path) -> None:
        if isinstance(self.model, DistributedDataParallel):
            # DDP puts gradients into buckets anew after its first backward pass, in another order, and more than two
            # ranks add in the order of the buckets. The run that was not interrupted has that behind it.
            inputs, labels = batch_for(self.bare, torch.Generator())
            F.cross_entropy(self.model(inputs), labels).backward()
            self.model.zero_grad()
        checkpoint.load(path, self.model, self.optimizer, **self.parts)


def _train_and_save(root: Path, names: list[str]) -> dict[str, list[float]]:
    """Train without a break, and once more with a checkpoint on the way, which must change nothing."""
    found = {}
    for kind in KINDS:
        for name in names:
            run, undisturbed = Run(kind, CASES[name]), Run(kind, CASES[name])
            run.train(0, SAVED_AT)
            run.save(root / f"{kind} {name}", SAVED_AT)
            run.train(SAVED_AT, UPDATES)
            undisturbed.train(0, UPDATES)
            found[f"{kind} {name}"] = all_weights(undisturbed.model)
            assert all_weights(run.model) == found[f"{kind} {name}"], f"{kind} {name}"
    return found


def _resume(root: Path, names: list[str], onto: dict[Kind, Kind]) -> dict[str, list[float]]:
    found = {}
    for kind in KINDS:
        for name in names:
            newest = checkpoint.latest(root / f"{kind} {name}")
            assert newest is not None
            run = Run(onto[kind], CASES[name])
            run.load(newest)
            run.train(int(newest.name), UPDATES)
            found[f"{kind} {name}"] = all_weights(run.model)
    return found


SAME: dict[Kind, Kind] = {"ddp": "ddp", "fsdp": "fsdp"}
OTHER: dict[Kind, Kind] = {"ddp": "fsdp", "fsdp": "ddp"}


def _check(root: Path, ranks: int, onto: dict[Kind, Kind], wanted: dict[str, list[float]], *, exact: bool) -> None:
    names = [name for name in CASES if f"ddp {name}" in wanted]
    for found in run_ranks(_resume, ranks, root, names, onto):
        assert found.keys() == wanted.keys()
        for name, weights in found.items():
            # Adam divides by the root of the second moment, which makes more of a rounding error.
            torch.testing.assert_close(weights, wanted[name], rtol=0, atol=0 if exact else 2e-6, msg=name)


def test_four_ranks_resume_on_four_bit_for_bit_and_on_two_up_to_rounding(tmp_path):
    wanted, *others = run_ranks(_train_and_save, 4, tmp_path, ON_FOUR)
    assert all(other == wanted for other in others)
    _check(tmp_path, 4, SAME, wanted, exact=True)
    _check(tmp_path, 2, SAME, wanted, exact=False)


def test_two_ranks_resume_on_two_on_four_and_in_the_other_wrapper(tmp_path):
    names = [name for name in CASES if name in MOST_DIFFERENT or name not in ON_FOUR]
    wanted = run_ranks(_train_and_save, 2, tmp_path, names)[0]
    _check(tmp_path, 2, SAME, wanted, exact=True)
    some = {name: weights for name, weights in wanted.items() if name.split(" ", 1)[1] in MOST_DIFFERENT}
    _check(tmp_path, 4, SAME, some, exact=False)
    _check(tmp_path, 2, OTHER, some, exact=False)


def _stop_in_mid_window(root: Path) -> list[float]:
    sharded = Run("fsdp", CASES["accumulation"])
    sharded.micro_step(0)
    with pytest.raises(IncompatibleError, match="save after a window has ended"):
        sharded.save(root / "fsdp", 0)
    assert not (root / "fsdp").exists()
    run = Run("ddp", CASES["accumulation"])
    for number in range(3):
        run.micro_step(number)
    run.save(root / "ddp", 1)
    run.micro_step(3)
    return all_weights(run.model)


def _go_on_in_mid_window(root: Path) -> list[float]:
    run = Run("ddp", CASES["accumulation"])
    newest = checkpoint.latest(root / "ddp")
    assert newest is not None
    before = all_weights(run.model)
    if dist.get_world_size() != 2:
        with pytest.raises(ValueError, match=r"'boost' differs between ranks 0 and 1.*Resume on 2 ranks"):
            run.load(newest)
        assert all_weights(run.model) == before
        return []
    run.load(newest)
    run.micro_step(3)
    return all_weights(run.model)


def test_a_window_that_is_not_full_resumes_on_the_ranks_that_hold_its_gradients(written):
    folder, two = written
    for answers in two:
        assert answers["resumed window"] == answers["stopped window"]
    assert run_ranks(_go_on_in_mid_window, 1, folder / "own window") == [[]]


def _own_figures(root: Path, resume: bool) -> list[int | None]:
    found = []
    for kind in KINDS:
        run = Run(kind, Case(algorithms=(Numbered(),)))
        newest = checkpoint.latest(root / kind)
        if not resume:
            run.save(root / kind, 5)
        elif newest is not None:
            run.load(newest)
        live = run.step.attached["numbered"]
        assert isinstance(live, OwnNumber)
        found.append(live.loaded)
    return found


def test_what_ranks_measured_goes_back_to_them(written):
    folder, two = written
    assert [answers["saved figures"] for answers in two] == [[None] * len(KINDS)] * 2
    assert [answers["loaded figures"] for answers in two] == [[100] * len(KINDS), [101] * len(KINDS)]
    with pytest.raises(RankError, match=r"'boost' differs between ranks 0 and 1.*Resume on 2 ranks"):
        run_ranks(_own_figures, 1, folder / "figures", True)


def _statistics(root: Path) -> list[list[float]]:
    """Return the running means of two BatchNorms before saving, and as loaded."""
    seen = []
    run = Run("ddp", Case(), model=cnn)
    run.train(0, SAVED_AT)
    path = run.save(root, SAVED_AT)
    again = Run("ddp", Case(), model=cnn)
    again.load(path)
    for each in (run, again):
        norms = [module for module in each.bare.modules() if isinstance(module, nn.BatchNorm2d)]
        seen.append(torch.cat([norm.running_mean for norm in norms if norm.running_mean is not None]).tolist())
    return seen


def _refusals(root: Path) -> None:
    run = Run("fsdp", CASES["AdamW, centralised"])
    run.train(0, 1)
    path = run.save(root, 1)
    with pytest.raises(FileExistsError, match="give a larger number"):
        run.save(root, 1)

    def other_groups(params: Any) -> torch.optim.Optimizer:
        first, *rest = params
        return torch.optim.AdamW([{"params": [first]}, {"params": rest}])

    scaled = Case(algorithms=(GradientCentralization(),), scaler=lambda: DynamicLossScale(64.0))
    for other, match in (
        (Run("fsdp", CASES["freezing for good"]), "the checkpoint holds no state of grad_freeze, attached here"),
        (Run("fsdp", scaled), "build the step with the same scaler"),
        (Run("fsdp", CASES["AdamW, centralised"], model=cnn), r"of another model: \d+ entries differ, the first is '0"),
        (Run("fsdp", Case(other_groups, algorithms=(GradientCentralization(),))), r"hold \[6\] .* \[1, 5\]"),
    ):
        before = all_weights(other.model)
        with pytest.raises(ValueError, match=match):
            other.load(path)
        assert all_weights(other.model) == before
        assert not other.optimizer.state
    again = Run("fsdp", CASES["AdamW, centralised"])
    with pytest.raises(ValueError, match=r"the parts \['boost', 'scheduler'\], but load got \['boost'\]"):
        checkpoint.load(path, again.model, again.optimizer, boost=again.step)
    with pytest.raises(FileNotFoundError, match=r"latest\(folder\)"):
        again.load(root)


def _late(root: Path) -> tuple[str, str]:
    """Save where only rank 0 sees what an earlier run left, as on a disk that is slow to show it to others."""
    run = Run("ddp", Case())
    for number in (50, 60):
        run.save(root, number)
    run.train(0, 1)
    folder = root if dist.get_rank() == 0 else root / "seen by another rank"
    said = []
    for number in (60, 10):
        with pytest.raises(FileExistsError) as error:
            run.save(folder, number)
        said.append(str(error.value))
    return said[0], said[1]


def test_a_number_that_is_not_the_newest_is_refused_on_all_ranks(written):
    folder, two = written
    first, second = (answers["late"] for answers in two)
    assert first == second
    assert "give a larger number" in first[0]
    assert "and checkpoint 10 would be older" in first[1]
    assert sorted(path.name for path in (folder / "late").iterdir()) == ["00000050", "00000060"]


def _by_hand(run: Run) -> dict[str, Any]:
    """Return what torch's tutorials save."""
    optimizer = get_optimizer_state_dict(run.model, run.optimizer)
    return {"model": get_model_state_dict(run.model), "optimizer": optimizer, "boost": run.step}


def _plain(root: Path) -> None:
    """DCP without our functions: saved and loaded between windows, also from a checkpoint of ours."""
    for kind in KINDS:
        run, again, ours = (Run(kind, CASES["accumulation"]) for _ in range(3))
        run.train(0, SAVED_AT)
        dcp.save(_by_hand(run), checkpoint_id=root / kind)
        for other, path in ((again, root / kind), (ours, run.save(root / f"{kind} ours", 1))):
            content = _by_hand(other)
            if other is ours:
                checkpoint.load(path, other.model, other.optimizer, **other.parts)
                del content["boost"]
            dcp.load(content, checkpoint_id=path)
            set_model_state_dict(other.model, content["model"])
            set_optimizer_state_dict(other.model, other.optimizer, content["optimizer"])
        for each in (run, again, ours):
            each.train(SAVED_AT, UPDATES)
        assert all_weights(run.model) == all_weights(again.model) == all_weights(ours.model)


def _plain_in_mid_window(root: Path) -> None:
    run, again = Run("ddp", CASES["accumulation"]), Run("ddp", CASES["accumulation"])
    run.micro_step(0)
    dcp.save({"boost": run.step}, checkpoint_id=root)
    with pytest.raises(CheckpointException, match=r"boost\.accumulator\.window"):
        dcp.load({"boost": again.step}, checkpoint_id=root)


def test_refusals_checkpoints_of_torch_alone_and_statistics_of_rank_0(written):
    """What does not fit is refused before anything is changed; torch alone drops no window silently."""
    (first, loaded), (second, loaded_too) = (answers["statistics"] for answers in written[1])
    assert first != second
    assert first == loaded == loaded_too


def _dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 4))


def _with_dropout(root: Path, resume: bool) -> dict[str, list[float]]:
    """Return the last weights and numbers drawn then, after a save on the way, or from that on."""
    found = {}
    for kind in KINDS:
        run = Run(kind, Case(), model=_dropping)
        torch.manual_seed(100 * (1 + resume) + dist.get_rank())
        if resume:
            run.load(root / kind / f"{SAVED_AT:08d}")
        else:
            run.train(0, SAVED_AT)
            run.save(root / kind, SAVED_AT)
        run.train(SAVED_AT, UPDATES)
        found[kind] = all_weights(run.model) + torch.rand(3).tolist()
    return found


def _drawn_around_loading(root: Path) -> list[bool]:
    """Return whether a seed draws the same with and without loading."""
    same = []
    for kind in KINDS:
        run = Run(kind, Case(), model=_dropping)
        torch.manual_seed(7)
        wanted = torch.rand(3)
        torch.manual_seed(7)
        checkpoint.load(root / kind / f"{SAVED_AT:08d}", run.model, run.optimizer, **run.parts)
        same.append(torch.equal(torch.rand(3), wanted))
    return same


def test_random_numbers_go_on_where_they_stood_on_as_many_ranks_and_are_left_alone_on_others(written):
    folder, two = written
    wanted = [answers["dropout"] for answers in two]
    for kind in KINDS:
        assert wanted[0][kind][:-3] == wanted[1][kind][:-3]
        assert wanted[0][kind][-3:] != wanted[1][kind][-3:], "each rank draws its own"
    assert [answers["resumed dropout"] for answers in two] == wanted
    for ranks in (1, 4):
        assert run_ranks(_drawn_around_loading, ranks, folder / "dropout") == [[True, True]] * ranks


def _on_two_ranks(root: Path) -> dict[str, Any]:
    _refusals(root / "refused")
    _plain(root / "plain")
    _plain_in_mid_window(root / "window")
    return {
        "statistics": _statistics(root / "statistics"),
        "stopped window": _stop_in_mid_window(root / "own window"),
        "resumed window": _go_on_in_mid_window(root / "own window"),
        "saved figures": _own_figures(root / "figures", False),
        "loaded figures": _own_figures(root / "figures", True),
        "late": _late(root / "late"),
        "dropout": _with_dropout(root / "dropout", False),
        "resumed dropout": _with_dropout(root / "dropout", True),
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of what two ranks wrote, and what they returned."""
    folder = tmp_path_factory.mktemp("written")
    return folder, run_ranks(_on_two_ranks, 2, folder)
