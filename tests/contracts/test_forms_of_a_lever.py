"""A trial chooses among the modes of the compiler, and the run, its plan and its checkpoints keep the one it chose.

The compiler is replaced: a call of the model takes less time in some modes.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

import torchboost
from torchboost.algorithms.compile import Compile
from torchboost.plan import Plan

MODE: ContextVar[str] = ContextVar("MODE", default="eager")
GRAPHS = "compile(mode='reduce-overhead')"


class Net(nn.Module):
    """Waits as long as its mode takes."""

    def __init__(self, pauses: dict[str, float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)
        self.pauses = pauses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pauses.get(MODE.get(), 0.014))
        return self.layer(x)


class Modes(SimpleQueue[str]):
    """The modes in which models were compiled, in order. A trial restores lists, but not this."""

    def taken(self) -> list[str]:
        return [self.get() for _ in range(self.qsize())]


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> Modes:
    """The compiler, with the forms that there are on CUDA devices."""
    made = Modes()

    def compile_in_place(self: nn.Module, *, mode: str = "default", **_: Any) -> None:
        made.put(mode)

        def call(*args: Any, **kwargs: Any) -> Any:
            token = MODE.set(mode)
            try:
                return self._call_impl(*args, **kwargs)
            finally:
                MODE.reset(token)

        self._compiled_call_impl = call

    forms = Compile.forms
    monkeypatch.setattr(nn.Module, "compile", compile_in_place)
    monkeypatch.setattr(Compile, "forms", lambda self, device: forms(self, torch.device("cuda")))
    monkeypatch.setattr(Compile, "load", lambda self: None)
    return made


def boosted(pauses: dict[str, float], **options: Any) -> torchboost.Boosted:
    model = Net(pauses)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = {"autocast": False, "fused_optimizer": False}  # what gains nothing is timed longest
    usual = {"level": "O1", "calibrate": 30.0, "config": {"extra": extra}}
    return torchboost.boost(model, optimizer, total_steps=10**6, **{**usual, **options})


def step(made: torchboost.Boosted, rows: int = 16) -> None:
    made.model(torch.randn(rows, 8)).square().mean().backward()
    made.optimizer.step()
    made.optimizer.zero_grad()


def mode_of(plan: Plan) -> str | None:
    return next(a.mode for a in plan.algorithms if isinstance(a, Compile))


@pytest.mark.parametrize(
    ("pauses", "form", "mode"),
    [
        ({"default": 0.007, "reduce-overhead": 0.002}, GRAPHS, "reduce-overhead"),
        ({"default": 0.002, "reduce-overhead": 0.014}, "", None),
    ],
)
def test_the_trial_keeps_the_mode_that_pays(pauses, form, mode, modes):
    made = boosted(pauses)
    step(made)
    assert made.choice is not None
    verdict = next(v for v in made.choice.verdicts if v.lever == "compile")
    assert (verdict.kept, verdict.form) == (True, form), made.explain()
    assert mode_of(made.plan) == mode
    seen = modes.taken()
    assert set(seen) == {"default", "reduce-overhead"}, "others are too dear for this trial"
    assert seen[-1] == (mode or "default")
    assert f"{GRAPHS}: " in made.explain()
    assert "compile(mode='max-autotune" in made.explain()
    assert "exact here" in made.checks["compile"]
    assert made.choice.ratio is not None
    assert made.choice.ratio.mid > 1


def test_no_form_is_tried_if_compilation_gains_nothing(modes):
    made = boosted({"default": 0.03, "reduce-overhead": 0.002})
    step(made)
    assert "compile" not in made.attached
    assert set(modes.taken()) == {"default"}


def test_the_run_its_checkpoints_and_its_plan_keep_the_mode(modes, tmp_path):
    pauses = {"default": 0.007, "reduce-overhead": 0.002}
    made = boosted(pauses)
    step(made)
    modes.taken()
    step(made, rows=12)  # is checked again, with other shapes
    assert set(modes.taken()) == {"reduce-overhead"}
    assert "compile" in made.attached

    saved, levers = made.state_dict(), made.attached.state_dict()["levers"]
    assert levers["compile"] == GRAPHS
    for state in (saved, {key: value for key, value in saved.items() if key != "choice"} | {"levers": levers}):
        modes.taken()
        resumed = boosted(pauses)
        resumed.load_state_dict(state)
        assert resumed.attached.state_dict()["levers"]["compile"] == GRAPHS
        step(resumed)
        assert mode_of(resumed.plan) == "reduce-overhead"
        assert set(modes.taken()) == {"reduce-overhead"}, "nothing was measured"

    made.plan.save(tmp_path / "boost.json")
    again = boosted(pauses, level="O0", config=tmp_path / "boost.json")
    assert mode_of(again.plan) == "reduce-overhead"


def test_a_form_that_does_not_exist_here_is_the_lever_itself(modes, monkeypatch):
    pauses = {"default": 0.007, "reduce-overhead": 0.002}
    made = boosted(pauses)
    step(made)
    monkeypatch.setattr(Compile, "forms", lambda self, device: ())
    resumed = boosted(pauses)
    resumed.load_state_dict(made.state_dict())
    modes.taken()
    step(resumed)
    assert mode_of(resumed.plan) is None
    assert set(modes.taken()) == {"default"}


def test_memory_of_what_was_tried_and_dropped_is_freed(monkeypatch):
    freed = Modes()
    monkeypatch.setattr(Compile, "forget", lambda self: freed.put(str(self.mode)))
    step(boosted({"default": 0.002, "reduce-overhead": 0.014}))
    assert freed.taken() == ["reduce-overhead"]
    step(boosted({"default": 0.007, "reduce-overhead": 0.002}))
    assert freed.taken() == ["None"], "the default mode, which keeps no memory"
