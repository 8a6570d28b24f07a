"""What holds in each trainer: exact resumption, plain checkpoints, and no trace afterwards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import torchboost
import torchboost.registry
from tests.integrations.trainers import WAYS, run
from tests.support.trainer_models import FORMS, KINDS, SPEED, has_plain_layout, trained_alike
from torchboost.calibration.calibration import Calibration
from torchboost.calibration.choice import Choice, Verdict
from torchboost.core.torch_private import module_hooks, step_pre_hooks
from torchboost.front import warn_of_missing_state
from torchboost.graph.removed_norm import RemovedNorm
from torchboost.measure.evidence import Interval

pytestmark = [
    pytest.mark.usefixtures("one_accelerator"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
TRAINER = pytest.mark.parametrize("trainer", WAYS)


def has_removed(net: torch.nn.Module) -> bool:
    return any(isinstance(module, RemovedNorm) for module in net.modules())


@TRAINER
@pytest.mark.parametrize(("kind", "setting"), FORMS)
def test_a_resumed_run_equals_the_uninterrupted_one(trainer: str, kind: str, setting: str, tmp_path: Path):
    whole = run(trainer, kind, tmp_path / "whole", setting=setting)
    resumed = run(trainer, kind, tmp_path / "resumed", resumed=tmp_path / "whole", setting=setting)
    assert trained_alike(whole.net, resumed.net)
    assert resumed.boosted.plan.total_steps == 8
    assert has_removed(whole.net) == (kind == "resnet")


@TRAINER
def test_level_o0_trains_as_the_trainer_alone(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KINDS, "resnet", KINDS["resnet"]._replace(config=None))
    boosted = run(trainer, "resnet", tmp_path / "boosted", setting="both", level="O0")
    alone = run(trainer, "resnet", tmp_path / "alone", setting="both", boosting=False)
    assert trained_alike(boosted.net, alone.net)


@TRAINER
def test_saved_weights_are_those_of_the_original_class_and_nothing_is_left(trainer: str, tmp_path: Path):
    kind = KINDS["resnet"]
    trained = run(trainer, "resnet", tmp_path)
    assert "grad_freeze" in {algorithm.name for algorithm in trained.boosted.plan.algorithms}
    told = "removed; before" if trainer == "accelerate" else "training has ended and the hooks are off; it ran with:"
    assert trained.boosted.explain().startswith(told)  # the loop of accelerate is the user's, who calls remove()
    assert list(trained.net.state_dict()) == list(kind.build().state_dict())
    loaded, batch = WAYS[trainer].weights(tmp_path, kind), kind.data().batch(6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, trained.net.eval()(**batch).logits)
    check_clean(trained)


@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_nothing_is_left_after_an_error(trainer: str, tmp_path: Path):
    check_clean(run(trainer, "resnet", tmp_path, fails=True))


def check_clean(trained: Any) -> None:
    assert has_removed(trained.net)
    assert sum(len(found) for module in trained.net.modules() for found in module_hooks(module)) == 0
    assert not step_pre_hooks(trained.boosted.optimizer)
    assert "forward" not in vars(trained.net)
    assert all(p.requires_grad for p in trained.net.parameters())


@TRAINER
def test_the_saved_optimizer_is_that_of_a_plain_run(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KINDS, "resnet", KINDS["resnet"]._replace(config=SPEED))
    assert run(trainer, "resnet", tmp_path).fused
    assert has_plain_layout(WAYS[trainer].optimizer(tmp_path))


@TRAINER
def test_after_the_training_the_hint_names_what_takes_the_seconds(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def measure(self: Calibration, *_: object, **__: object) -> Choice:
        short = [Verdict(lever=lever.name, kept=False, reason="", untried=True, longer=20) for lever in self.levers]
        return Choice(verdicts=tuple(short), source="trial")

    monkeypatch.setattr(Calibration, "measure", measure)
    explained = " ".join(run(trainer, "bert", tmp_path, calibrate=0.5).boosted.explain().split())
    call = {"transformers": "BoostTrainer", "lightning": "Boost", "accelerate": "prepare"}[trainer]
    assert f": {call}(..., calibrate=20) measures for up to 20 s" in explained


@TRAINER
def test_a_resumed_run_does_not_measure_again(trainer: str, tmp_path: Path):
    whole = run(trainer, "bert", tmp_path / "whole", calibrate=0.5)
    resumed = run(trainer, "bert", tmp_path / "resumed", resumed=tmp_path / "whole", calibrate=0.5)
    assert (whole.boosted.choice.source, resumed.boosted.choice.source) == ("trial", "checkpoint")
    assert resumed.boosted.choice.kept == whole.boosted.choice.kept
    assert trained_alike(whole.net, resumed.net)


def test_a_missing_state_is_told_if_anything_counts(caplog):
    for extra, counts in (({}, False), ({"grad_freeze": {"pattern": "progressive"}}, True)):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        boosted = torchboost.boost(model, optimizer, level="O1", total_steps=10, config={"extra": extra})
        with caplog.at_level(logging.WARNING):
            warn_of_missing_state(boosted, logging.getLogger("torchboost.tests"))
        assert ("so these start as in a new run: grad_freeze." in caplog.text) == counts


def test_figures_are_levers_gain_and_time():
    reasons = {"compile": (False, "slow"), "fused_optimizer": (True, "fast")}
    verdicts = tuple(Verdict(lever=name, kept=kept, reason=reason) for name, (kept, reason) in reasons.items())
    for source, seconds in (("trial", 7.5), ("checkpoint", 0.0)):
        choice = Choice(verdicts=verdicts, source=source, seconds=7.5, ratio=Interval(low=1.1, mid=1.2, high=1.3))
        assert choice.figures() == {
            "boost/compile": 0.0,
            "boost/fused_optimizer": 1.0,
            "boost/times_as_fast": 1.2,
            "boost/trial_seconds": seconds,
        }
    assert "boost/times_as_fast" not in Choice(verdicts=verdicts, source="prior").figures()
