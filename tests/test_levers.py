"""The levers wait, are decided once, and are kept by checkpoints; what is withdrawn stays off."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import torchboost
from tests.support.boosted import batch, hooks, pair, train
from torchboost import Boosted, Plan, boost
from torchboost.algorithms import Autocast, ChannelsLast, FusedOptimizer
from torchboost.calibration.calibration import Calibration
from torchboost.calibration.choice import Choice, Verdict
from torchboost.optim import muon_from

NO_COMPILE = {"extra": {"compile": False}}


def waiting() -> Boosted:
    """A pair whose levers the first training call chooses, within a tenth of a second."""
    return boost(*pair(), level="O2", total_steps=1000, config=NO_COMPILE, calibrate=0.1)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every trial keep all of its levers, at once."""

    def measure(self: Calibration, *_: object, **__: object) -> Choice:
        kept = tuple(Verdict(lever=lever.name, kept=True, reason="a test") for lever in self.levers)
        return Choice(verdicts=kept, source="trial")

    monkeypatch.setattr(Calibration, "measure", measure)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("attached", [True, False])
def test_a_lever_is_withdrawn_before_the_first_call(attached):
    boosted = waiting()
    if not attached:
        boosted.attached.detach("autocast")
    boosted.withdraw("autocast", "a test withdrew it")
    train(*boosted, 2)
    assert "autocast" not in boosted.attached
    assert "fused_optimizer" in boosted.attached
    assert "a test withdrew it" in boosted.explain()


@pytest.mark.usefixtures("chosen")
def test_all_levers_may_be_withdrawn_before_the_first_call():
    boosted = waiting()
    for lever in boosted.plan.levers:
        boosted.withdraw(lever.name, "a test")
    assert boosted.levers.state == "decided"
    train(*boosted, 2)
    assert boosted.plan.levers == ()


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("trained", [True, False])
def test_what_was_withdrawn_stays_so_in_a_run_that_is_resumed(trained):
    boosted = waiting()
    if trained:
        train(*boosted, 2)
    before = copy.deepcopy(boosted.state_dict())
    boosted.withdraw("autocast", "a test withdrew it")
    boosted.withdraw("grad_freeze", "so did this one")
    for state in (boosted.state_dict(), before):
        again = waiting()
        if state is before:  # as a guard does that is loaded first
            again.load_state_dict(state)
            for name, reason in boosted.withdrawn.items():
                again.withdraw(name, reason)
        else:
            again.load_state_dict(copy.deepcopy(state))
        train(*again, 2)
        assert again.withdrawn == boosted.withdrawn
        assert {"autocast", "grad_freeze"}.isdisjoint(again.attached)
        assert "so did this one" in again.explain()
    assert "withdrawn" not in before


def test_a_name_that_the_plan_does_not_have_is_not_withdrawn():
    boosted = boost(*pair(), level="O0")
    boosted.withdraw("autocast", "a test")
    assert boosted.plan.dropped == boost(*pair(), level="O0").plan.dropped
    assert boosted.state_dict() == {"attached": {}}


def test_a_state_that_is_refused_switches_nothing(bfloat16):
    written = boost(*pair(), level="O2", total_steps=10_000, config=NO_COMPILE, calibrate=False)
    bfloat16(0.5, 0.5)
    other = boost(*pair(), level="O1", total_steps=10_000, config=NO_COMPILE, calibrate=False)
    before = list(other.attached)
    with pytest.raises(ValueError, match="grad_freeze"):
        other.load_state_dict(written.state_dict())
    assert list(other.attached) == before


@pytest.mark.parametrize("before", [True, False])
def test_a_resumed_run_that_measures_nothing_computes_as_before(before, bfloat16):
    runs = []
    for fast in (before, not before):
        bfloat16(2.0 if fast else 0.5, 2.0 if fast else 0.5)
        boosted = boost(*pair(), total_steps=10_000, config=NO_COMPILE, calibrate=False)
        assert ("autocast" in boosted.attached) is fast
        if runs:
            boosted.load_state_dict(runs[0].state_dict())
        train(*boosted, 1)
        runs.append(boosted)
    assert list(runs[0].attached) == list(runs[1].attached)
    assert ("autocast" in runs[1].attached) is before
    off = [entry.reason for entry in runs[1].plan.dropped if entry.name == "autocast"]
    assert off == [] if before else ["the checkpoint was trained without it"]


def runs_with(monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> None:
    """Let each trial keep all levers, or none."""

    def measure(self: Calibration, *_: object, **__: object) -> Choice:
        return Choice(
            verdicts=tuple(Verdict(lever=a.name, kept=kept, reason="a test") for a in self.levers), source="trial"
        )

    monkeypatch.setattr(Calibration, "measure", measure)


@pytest.mark.parametrize("part", ["boosted", "step", "attached"])
@pytest.mark.parametrize("kept", [True, False])
def test_each_documented_checkpoint_holds_the_choice(part, kept, monkeypatch):
    def of(boosted: Boosted):
        return {"boosted": boosted, "step": boosted.step(F.cross_entropy), "attached": boosted.attached}[part]

    runs_with(monkeypatch, kept=kept)
    boosted = waiting()
    assert "levers" not in boosted.attached.state_dict()
    train(*boosted, 1)
    state = copy.deepcopy(of(boosted).state_dict())
    runs_with(monkeypatch, kept=not kept)
    again = waiting()
    of(again).load_state_dict(state)
    assert ("autocast" in again.attached) is kept  # also if no training call of the model is ever seen
    assert again.attached.state_dict()["levers"] == boosted.attached.state_dict()["levers"]
    train(*again, 1)
    assert again.choice is not None
    assert again.choice.source == "checkpoint"
    assert list(again.attached) == list(boosted.attached)


def test_a_model_that_is_compiled_after_boost_keeps_its_levers_in_the_checkpoint(bfloat16):
    bfloat16(2.0, 2.0)
    boosted = waiting()
    compiled = torch.compile(boosted.model, backend="eager")
    assert "levers" not in boosted.state_dict()
    train(compiled, boosted.optimizer, 1)
    assert boosted.choice is None
    assert boosted.state_dict()["levers"]["autocast"]
    assert "no training call of the model was seen" in boosted.explain()
    assert "trial" not in boosted.explain()
    bfloat16(0.5, 0.5)
    again = waiting()
    assert "autocast" not in again.attached
    assert "the trial at the first training call decides" in again.explain()
    again.load_state_dict(copy.deepcopy(boosted.state_dict()))
    assert list(again.attached) == list(boosted.attached)
    train(torch.compile(again.model, backend="eager"), again.optimizer, 1)
    assert list(again.attached) == list(boosted.attached)
    assert again.state_dict()["attached"].keys() == boosted.state_dict()["attached"].keys()
    train(*boosted, 1)  # a training call that is seen still decides
    assert boosted.choice is not None
    assert "no training call" not in boosted.explain()


@pytest.mark.usefixtures("chosen")
def test_a_state_that_is_refused_leaves_no_choice():
    trained = waiting()
    train(*trained, 1)
    boosted = waiting()
    for damaged in ({"attached": {}}, {"choice": "{"}, {"choice": 7}):
        with pytest.raises(ValueError, match=r"no state of grad_freeze|the checkpoint holds"):
            boosted.load_state_dict({**trained.state_dict(), **damaged})
    assert "choice" not in boosted.state_dict()
    train(*boosted, 1)
    assert boosted.choice is not None
    assert boosted.choice.source == "trial"


def test_an_empty_plan_that_is_removed_says_so():
    boosted = boost(*pair(), level="O0")
    assert "removed" not in boosted.explain()
    boosted.remove()
    assert boosted.explain().startswith("removed; before, this was so")
    open_now = waiting()
    open_now.withdraw("grad_freeze", "a test")
    open_now.remove()
    assert open_now.explain().startswith("removed")
    assert "the trial" not in open_now.explain()
    assert open_now.state_dict() == {"attached": {}, "withdrawn": {"grad_freeze": "a test"}}


def test_what_structure_rules_out_does_not_wait():
    """A convolutional network has no tokens, and one whose optimizer is fused needs no switch for that."""
    model, optimizer = pair()
    for group in optimizer.param_groups:
        group["fused"] = True
    boosted = boost(model, optimizer, total_steps=1000, calibrate=0.1)
    rows = {row.name: row for row in boosted.levers.explanation().rows}
    for name, state, did in (
        ("unpad", "off", "does not apply: no argument of its forward masks padding"),
        ("sparse_head", "off", "does not apply: the model has no output head that a loss could read in part"),
        ("fused_optimizer", "was on before", "already fused"),
    ):
        assert (rows[name].state, rows[name].did) == (state, did)
    assert rows["channels_last"].state == "waits"
    assert "waits: the trial" in boosted.explain()


@pytest.mark.usefixtures("chosen")
def test_levers_wait_and_are_attached_once(monkeypatch):
    boosted = waiting()
    attached: list[str] = []
    for kind in (Autocast, ChannelsLast, FusedOptimizer):
        attach = kind.attach
        monkeypatch.setattr(
            kind, "attach", lambda self, target, attach=attach: attached.append(self.name) or attach(self, target)
        )
    names = {"channels_last", "autocast", "fused_optimizer"}
    assert boosted.levers.state == "waiting"
    assert names.isdisjoint(boosted.attached)
    assert boosted.explain().count("  waits  ") >= len(names)
    model, optimizer = boosted
    model.eval()(batch()[0])
    assert boosted.levers.state == "waiting"
    model.train()
    monkeypatch.setattr(Calibration, "check", lambda self, choice, *_: self.unchecked(choice))
    train(model, optimizer, 2)
    assert boosted.levers.state == "decided"
    assert sorted(attached) == sorted(names) == sorted(names & set(boosted.attached))
    boosted.remove()
    assert boosted.levers.state == "removed"
    assert not hooks(optimizer)


FILES = Path(__file__).parent / "fixtures" / "levers"


@pytest.mark.parametrize("part", ["boosted", "attached"])
def test_what_the_version_before_wrote_can_be_loaded(part, monkeypatch):
    monkeypatch.setattr(Calibration, "measure", None)
    boosted = waiting()
    (boosted if part == "boosted" else boosted.attached).load_state_dict(
        json.loads((FILES / "states.json").read_text(encoding="utf-8"))[part]
    )
    train(*boosted, 1)
    assert boosted.choice is not None
    assert boosted.choice.source == "checkpoint"
    assert {"channels_last", "fused_optimizer", "grad_freeze"} <= set(boosted.attached)
    assert "autocast" not in boosted.attached
    plan = torchboost.Plan.of("O0", FILES / "boost.json")
    assert {a.name for a in plan.algorithms} == {a.name for a in boosted.plan.algorithms}


def test_a_reason_why_nothing_was_measured_is_said_once() -> None:
    boosted = boost(*pair(), level="O1", total_steps=100, calibrate=True)
    train(*boosted, 2)
    text = " ".join(boosted.explain().split())
    assert text.count("a run of 100 steps is short") == 1
    assert text.index("a run of 100 steps is short") < text.index("what it did")
    assert text.count("not measured") > 2


def test_an_explanation_without_a_trial_says_once_who_wanted_none() -> None:
    boosted = boost(*pair(), level="O1", total_steps=1000, calibrate=False)
    for _ in range(2):
        assert boosted.explain().count("calibrate=False") == 1
        train(*boosted, 1)
    assert "calibrate=False" not in boost(*pair(), level="O0", total_steps=1000, calibrate=False).explain()


def test_the_hint_for_a_longer_trial_is_still_there_after_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: Calibration, *_: object, **__: object) -> Choice:
        short = [Verdict(lever=lever.name, kept=False, reason="", untried=True, longer=20) for lever in self.levers]
        return Choice(verdicts=tuple(short), source="trial")

    monkeypatch.setattr(Calibration, "measure", measure)
    boosted = boost(*pair(), level="O1", total_steps=1000, config=NO_COMPILE, calibrate=True, verify=False)
    train(*boosted, 1)
    hint = "boost(..., calibrate=20) measures for up to 20 s"
    assert boosted.explain().endswith(hint)  # nothing else is to be done next
    boosted.levers.end()
    assert hint in " ".join(boosted.explain().split())


def test_the_heading_has_the_rates_of_the_optimizer_as_it_was_built() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = muon_from(torch.optim.AdamW(model.parameters(), lr=1e-3), model, lr=0.02)
    boosted = boost(model, optimizer, level="O0", total_steps=10)
    for group in boosted.optimizer.param_groups:
        group["lr"] *= 0.9
    first, second = boosted.explain().splitlines()[:2]
    assert first == "level O0 for AdamW at 0.001 and Muon at 0.02, 10 steps"
    assert second == "nothing is on: the optimizer and the model are as you built them"


def test_what_the_user_turns_off_has_a_row() -> None:
    off = {"extra": {"autocast": False}}
    everything = {"boost": {"mode": "enable_all"}, **off}
    for plan in (Plan.of("O1", off), Plan.of("O0", everything), boost(*pair(), config=off).levers):
        explained = plan.explanation()
        row = next(row for row in explained.rows if row.name == "autocast")
        assert (row.state, row.did) == ("off", "as configured: extra.autocast = false")
        assert row.did in str(explained.sheet)
        assert row.did in explained.sheet._repr_html_()
    assert Plan.of("O0", off).explanation().rows == ()
