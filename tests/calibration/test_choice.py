"""A choice survives JSON and names what is on."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from torchboost.calibration.choice import Choice, Machine, Verdict
from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import environment


def choice() -> Choice:
    ratio = Interval(low=1.1, mid=1.2, high=1.3)
    machine = Machine(processor="a", threads=2, device="cpu", torch="2.13", torchboost="1")
    verdicts = (
        Verdict(lever="autocast", kept=True, reason="1.2 times as fast", ratio=ratio, pairs=8),
        Verdict(lever="compile", kept=False, reason="the run is too short"),
    )
    return Choice(verdicts=verdicts, source="trial", seconds=1.5, step_seconds=0.01, ratio=ratio, machine=machine)


def test_it_survives_json():
    assert Choice.model_validate_json(choice().model_dump_json()) == choice()


def test_it_names_what_is_on():
    assert choice().kept == {"autocast"}


def test_the_levers_alone_say_the_form_too():
    form = "compile(mode='reduce-overhead')"
    compiled = Verdict(lever="compile", kept=True, form=form, reason="")
    made = choice().model_copy(update={"verdicts": (*choice().verdicts[:1], compiled)})
    assert made.levers == {"autocast": True, "compile": form}
    again = Choice.saved({"levers": made.levers})
    assert again is not None
    assert again.levers == made.levers
    assert choice().levers == {"autocast": True, "compile": False}


def test_machines_differ_in_what_was_found_and_what_is_here():
    found = Machine(processor="a", threads=2, device="cpu", torch="2.13", torchboost="1")
    assert found.differences(found) == ""
    here = found.model_copy(update={"device": "GPU", "torch": "2.14"})
    assert found.differences(here) == "device: found cpu, here GPU; torch: found 2.13, here 2.14"


def test_unknown_keys_are_refused():
    with pytest.raises(ValidationError):
        Choice.model_validate({**choice().model_dump(), "more": 1})


def test_a_machine_is_described_by_what_this_process_uses(monkeypatch):
    here = Machine.of("cpu")
    assert here == Machine.of(torch.device("cpu"))
    assert (here.device, here.threads, here.torch) == ("cpu", torch.get_num_threads(), torch.__version__)
    assert here.processor == environment().processor
    assert here.torchboost == environment().torchboost
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "get_device_name", lambda device: f"GPU {device.index}")
        assert Machine.of(f"{kind}:1").device == "GPU 1"
    assert Machine.of("mps").device == "mps"


@pytest.mark.parametrize("state", [{"choice": "{"}, {"choice": 7}, {"levers": 7}, {"levers": {"autocast": "maybe"}}])
def test_a_damaged_state_is_said(state):
    with pytest.raises(ValueError, match=f"{next(iter(state))}: the checkpoint holds .* says nothing about levers"):
        Choice.saved(state)


def test_a_checkpoint_holds_a_choice_the_levers_or_neither():
    assert Choice.saved({}) is None
    assert Choice.saved({"choice": choice().model_dump_json()}) == choice().model_copy(update={"source": "checkpoint"})
    found = Choice.saved({"levers": {"autocast": True, "compile": False}})
    assert found is not None
    assert (found.source, found.kept, len(found.verdicts)) == ("checkpoint", {"autocast"}, 2)
