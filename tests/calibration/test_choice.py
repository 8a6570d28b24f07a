"""A choice survives JSON, and a checkpoint of an earlier version is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from torchboost.calibration.choice import Choice, Verdict, in_seconds, machine_of
from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import environment

MACHINE = {"processor": "a", "threads": 2, "device": "cpu", "torch": "2.13", "torchboost": "1"}
RATIO = Interval(low=1.1, mid=1.2, high=1.3)
VERDICTS = (
    Verdict(lever="autocast", kept=True, reason="1.2 times as fast", ratio=RATIO, pairs=8),
    Verdict(lever="compile", kept=False, reason="the run is too short"),
)
CHOICE = Choice(verdicts=VERDICTS, source="trial", seconds=1.5, step_seconds=0.01, ratio=RATIO, machine=MACHINE)


def test_it_survives_json():
    assert Choice.model_validate_json(CHOICE.model_dump_json()) == CHOICE
    assert CHOICE.kept == {"autocast"}


def test_a_choice_of_an_earlier_version_may_be_from_a_cache_and_has_more_entries():
    earlier = json.loads(CHOICE.model_dump_json()) | {"source": "cache"}
    for verdict in earlier["verdicts"]:
        verdict["interrupted"] = False
    choice = Choice.saved({"choice": json.dumps(earlier)})
    assert choice == CHOICE.model_copy(update={"source": "checkpoint"})


def test_a_checkpoint_holds_a_choice_the_levers_or_neither():
    assert Choice.saved({}) is None
    assert Choice.saved({"choice": CHOICE.model_dump_json()}) == CHOICE.model_copy(update={"source": "checkpoint"})
    form = "compile(mode='reduce-overhead')"
    for verdict, levers in (
        (VERDICTS[1], {"autocast": True, "compile": False}),
        (Verdict(lever="compile", kept=True, form=form, reason=""), {"autocast": True, "compile": form}),
    ):
        choice = CHOICE.model_copy(update={"verdicts": (VERDICTS[0], verdict)})
        assert choice.levers == levers
        again = Choice.saved({"levers": levers})
        assert again is not None
        assert (again.levers, again.source) == (levers, "checkpoint")
    for state in ({"choice": "{"}, {"choice": 7}, {"levers": 7}, {"levers": {"autocast": "maybe"}}):
        with pytest.raises(
            ValueError, match=f"{next(iter(state))}: the checkpoint holds .* says nothing about switches"
        ):
            Choice.saved(state)


def test_numbers_without_an_end_survive_a_checkpoint():
    infinite = {"ratio": Interval(low=float("-inf"), mid=1.0, high=float("inf")), "step_seconds": 1e-300}
    choice = CHOICE.model_copy(update=infinite)
    assert Choice.saved({"choice": choice.model_dump_json()}) == choice.model_copy(update={"source": "checkpoint"})


def test_a_machine_is_described_by_what_this_process_uses(monkeypatch):
    here = machine_of("cpu")
    assert here == machine_of(torch.device("cpu"))
    assert (here["device"], here["threads"], here["torch"]) == ("cpu", torch.get_num_threads(), torch.__version__)
    assert (here["processor"], here["torchboost"]) == (environment().processor, environment().torchboost)
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "get_device_name", lambda device: f"GPU {device.index}")
        assert machine_of(f"{kind}:1")["device"] == "GPU 1"
    assert CHOICE.model_copy(update={"machine": here}).measured_elsewhere(torch.device("cpu")) == ""
    other = CHOICE.model_copy(update={"machine": {**here, "device": "GPU", "torch": "1.0"}})
    text = f"measured elsewhere (device: found GPU, here cpu; torch: found 1.0, here {torch.__version__})"
    assert text in other.measured_elsewhere(torch.device("cpu"))


def test_a_time_above_zero_is_never_shown_as_zero() -> None:
    shown = {1e-5: "0.01 ms", 0.0312: "31 ms", 0.0499: "50 ms", 0.06: "0.1 s", 4.0: "4.0 s", 12.4: "12 s", 0.0: "0.0 s"}
    assert {number: in_seconds(number) for number in shown} == shown


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (
            Interval(low=0.7, mid=1.4, high=2.8),
            "1.5 s of measuring did not decide (on: autocast; together a step",
        ),
        (Interval(low=0.97, mid=1.0, high=1.03), "no gain was found in 1.5 s of measuring (on: autocast; together"),
        (Interval(low=1.1, mid=1.2, high=1.3), "on after 1.5 s of measuring: autocast; together a step is 1.20"),
    ],
)
def test_the_summary_says_no_more_than_the_interval_of_all_together(ratio: Interval, said: str) -> None:
    assert CHOICE.model_copy(update={"ratio": ratio}).summary().startswith(said)


def test_the_summary_names_the_switches_for_which_there_was_no_time() -> None:
    untried = Verdict(lever="compile", kept=False, reason="the time for the trial was used up", untried=True)
    choice = CHOICE.model_copy(update={"ratio": None, "verdicts": (untried,)})
    assert choice.summary().startswith("1.5 s of measuring did not suffice: no time for compile (")


def test_the_summary_says_how_to_measure_longer() -> None:
    """A switch that is on as usual is not also one for which there was no time, and the remedy is a longer trial."""
    untried = {"reason": "the time for the trial was used up", "untried": True, "longer": 20}
    usual = Verdict(lever="fused_optimizer", kept=True, **untried)
    missed = Verdict(lever="compile", kept=False, **untried)
    short = CHOICE.model_copy(update={"ratio": None, "verdicts": (missed, usual)})
    why = "boosted.explain() says why"
    assert short.summary() == (
        "1.5 s of measuring did not suffice: no time for compile; calibrate=20 measures longer "
        f"(not measured, on as usual: fused_optimizer; off: compile). {why}"
    )
    assert short.model_copy(update={"verdicts": (usual,)}).summary() == (
        f"1.5 s of measuring did not suffice; calibrate=20 measures longer (not measured, on as usual: "
        f"fused_optimizer). {why}"
    )
    open_ = CHOICE.model_copy(update={"ratio": Interval(low=0.7, mid=1.4, high=2.8)})
    open_ = open_.changed({"autocast": {"longer": 7}})
    assert open_.summary().startswith("1.5 s of measuring did not decide; calibrate=7 measures longer (on: autocast; ")
    assert open_.summary().endswith(why)


@pytest.mark.parametrize(
    "ratio", [RATIO, Interval(low=0.7, mid=1.4, high=2.8), Interval(low=0.97, mid=1.0, high=1.03), None]
)
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("source", ["trial", "prior"])
def test_the_summary_names_every_switch(ratio: Interval | None, kept: bool, source: Any) -> None:
    """None that the first line announced is missing in the last one."""
    before = Verdict(lever="threads", kept=False, reason="the program has chosen them", before=True)
    verdicts = (VERDICTS[0].but(kept=kept), VERDICTS[1], before)
    choice = CHOICE.model_copy(update={"verdicts": verdicts, "ratio": ratio, "source": source})
    off = "off: compile" if kept else "off: autocast, compile"
    assert off in choice.summary("also on, not timed: less_bn")
    assert ("autocast" in choice.summary(), "threads" in choice.summary()) == (True, False)


def test_one_hint_is_for_all_that_had_too_little_time() -> None:
    short = (VERDICTS[0].but(longer=7), VERDICTS[1].but(longer=20), Verdict(lever="unpad", kept=False, reason=""))
    choice = CHOICE.model_copy(update={"verdicts": short})
    hint = "boost(..., calibrate=20) measures for up to 20 s"
    assert choice.longer() == f"too little time for autocast, compile: {hint}"
    assert choice.longer(but={"compile"}).endswith("autocast: boost(..., calibrate=7) measures for up to 7 s")
    assert choice.longer("BoostTrainer").endswith(": BoostTrainer(..., calibrate=20) measures for up to 20 s")
    assert CHOICE.longer() == ""
    assert choice.model_copy(update={"source": "checkpoint"}).longer() == ""


def test_what_was_on_before_another_run_is_not_said_of_this_one() -> None:
    reason = "the loop computes under torch.autocast to bfloat16"
    choice = Choice(verdicts=(Verdict(lever="autocast", kept=False, reason=reason, before=True),), source="trial")
    loaded = Choice.saved({"choice": choice.model_dump_json()})
    assert loaded is not None
    (verdict,) = loaded.verdicts
    assert not verdict.before
    assert verdict.reason == f"off as in the run of the checkpoint, where {reason}"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("a step is 1.04 times as fast", "a step is 1.04 times as fast (0.91 to 1.14, 9 pairs)"),
        ("9 pairs did not decide (1.04 times as fast, 0.91 to 1.14); kept as usual",) * 2,
    ],
)
def test_the_number_of_pairs_is_said_once(reason: str, shown: str) -> None:
    ratio = Interval(low=0.91, mid=1.04, high=1.14, confidence=0.98)
    assert Verdict(lever="fused_optimizer", kept=True, reason=reason, ratio=ratio, pairs=9).found == shown


@pytest.mark.parametrize("open_", [{"pairs": 3, "undecided": True}, {"untried": True}])
def test_what_is_on_as_usual_is_not_said_to_be_measured(open_: dict[str, Any]) -> None:
    kept = Verdict(lever="fused_optimizer", kept=True, reason="kept as usual", **open_)
    choice = Choice(verdicts=(kept,), source="trial", seconds=30.0)
    assert not choice.gains
    assert choice.summary().startswith("30 s of measuring did not ")
    on = "not measured, on as usual: fused_optimizer" if kept.untried else "on: fused_optimizer; "
    assert f"({on}" in choice.summary()


def test_an_unknown_gain_of_all_together_has_its_reason() -> None:
    kept = Verdict(lever="fused_optimizer", kept=True, reason="a step is clearly faster in each of 2 pairs", pairs=2)
    choice = Choice(verdicts=(kept,), source="trial", seconds=30.0)
    assert choice.measured.endswith("not measured, since no time was left")
    assert "no time was left" in choice.summary()
    assert choice.summary().startswith("on after 30 s of measuring: fused_optimizer")
    nothing = Choice(verdicts=(kept.but(kept=False),), source="trial", seconds=30.0)
    assert nothing.measured == "measured at the first training call in 30 s"
