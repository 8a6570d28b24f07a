"""Odd networks and loops train under a level as in the plain loop. The judge is plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import torchboost
from tests.support.differential import no_effect_is_fine, some_then_slow
from tests.support.odd import PROGRAMS, Program

pytestmark = [
    no_effect_is_fine,
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),  # of torch, for its own old form
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # of torch, in a pass without gradients
]

LEVERS = {"autocast": False}
"""What is left computes the same in another order."""

FORCED = {
    "level": "O1",
    "calibrate": False,
    "config": {"extra": LEVERS | {"channels_last": True, "fused_optimizer": True}},
}
BY_RULE = {"level": "O1", "calibrate": False, "config": {"extra": LEVERS}}
BY_TRIAL = {"level": "O1", "calibrate": 0.3, "config": {"extra": LEVERS}}
IN_A_LONG_RUN = {
    "level": "O1",
    "calibrate": "auto",
    "total_steps": 4000,
    "config": {"extra": LEVERS | {"compile": False}},
}
WHOLE = {"level": "O2", "calibrate": False, "total_steps": 4000}
WHOLE_BY_TRIAL = {"level": "O2", "calibrate": 0.3, "total_steps": 4000}
COMPILED = {"level": "O1", "calibrate": False, "config": {"extra": LEVERS | {"compile": {"backend": "aot_eager"}}}}

SOME_TRIALS = [
    *("plain", "empties_its_list", "writes_into_its_input", "counts", "grows_in_forward", "steps_in_backward"),
    *("closures", "scaled"),
]
"""What meets a trial in the default run: what a trial must put back."""


COMPILABLE = [n for n in PROGRAMS if not n.startswith("penalised") and n != "two_backward_passes"]
"""All but those that differentiate twice or keep a graph, which torch cannot with a compiled graph."""


class Course(NamedTuple):
    """What a training left.

    Args:
        seen: The numbers that its loop returned.
        state: The entries of the model.
        drawn: The state of torch's generator.
    """

    seen: list[float]
    state: dict[str, Tensor]
    drawn: Tensor


def train(program: Program, mode: dict[str, Any] | None = None) -> Course:
    torch.manual_seed(0)
    model, optimizer = program.build()
    if mode is not None:
        model, optimizer = torchboost.boost(model, optimizer, **mode)
    torch.manual_seed(1)
    seen = program.loop(model, optimizer)
    return Course(seen, state_of(model), torch.get_rng_state())


def state_of(model: nn.Module) -> dict[str, Tensor]:
    entries = {name: entry.detach().clone() for name, entry in model.state_dict().items()}
    return {n: torch.view_as_real(e) if e.is_complex() else e for n, e in entries.items()}


def off(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest entry; entries that are NaN in both are equal."""
    assert found.shape == wanted.shape
    assert torch.equal(found.isnan(), wanted.isnan())
    gap = (found.double() - wanted.double()).nan_to_num().abs()
    return float(gap.max() / (wanted.double().nan_to_num().abs().max() + 1e-3)) if gap.numel() else 0.0


def assert_same(found: Course, wanted: Course, tolerance: float) -> None:
    assert len(found.seen) == len(wanted.seen)
    worst = max(off(torch.tensor(a), torch.tensor(b)) for a, b in zip(found.seen, wanted.seen, strict=True))
    assert worst <= tolerance, f"a number that the loop saw is off by {worst:.1e}"
    assert found.state.keys() == wanted.state.keys()
    entry, worst = max(((n, off(found.state[n], wanted.state[n])) for n in wanted.state), key=lambda pair: pair[1])
    assert worst <= 5 * tolerance, f"{entry} is off by {worst:.1e}"
    assert torch.equal(found.drawn, wanted.drawn), "another number of random draws"


def test_the_programs_have_no_code_of_ours():
    folder = Path(__file__).parents[1] / "support" / "odd"
    assert all("torchboost" not in file.read_text(encoding="utf-8") for file in folder.glob("*.py"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_level_zero(name: str) -> None:
    assert_same(train(PROGRAMS[name], {"level": "O0"}), train(PROGRAMS[name]), 0.0)


@pytest.mark.parametrize("name", PROGRAMS)
def test_levers_that_are_forced(name: str) -> None:
    assert_same(train(PROGRAMS[name], FORCED), train(PROGRAMS[name]), PROGRAMS[name].tolerance)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_whole_level_trains(name: str) -> None:
    """What a level does to the numbers is in ``test_differential.py``."""
    found, wanted = train(PROGRAMS[name], WHOLE), train(PROGRAMS[name])
    assert len(found.seen) == len(wanted.seen)
    assert torch.equal(torch.tensor(found.seen).isnan(), torch.tensor(wanted.seen).isnan())


@pytest.mark.parametrize("name", some_then_slow(SOME_TRIALS, PROGRAMS))
def test_a_trial_leaves_no_trace(name: str) -> None:
    assert_same(train(PROGRAMS[name], BY_TRIAL), train(PROGRAMS[name]), PROGRAMS[name].tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it cannot trace, and then does not compile it
@pytest.mark.parametrize("name", COMPILABLE)
def test_a_compiled_level(name: str) -> None:
    torch.compiler.reset()
    assert_same(train(PROGRAMS[name], COMPILED), train(PROGRAMS[name]), PROGRAMS[name].tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_levers_that_rules_choose(name: str) -> None:
    assert_same(train(PROGRAMS[name], BY_RULE), train(PROGRAMS[name]), PROGRAMS[name].tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trial_in_a_long_run_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHBOOST_CALIBRATE")
    assert_same(train(PROGRAMS[name], IN_A_LONG_RUN), train(PROGRAMS[name]), PROGRAMS[name].tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_whole_level_with_a_trial_trains(name: str) -> None:
    found, wanted = train(PROGRAMS[name], WHOLE_BY_TRIAL), train(PROGRAMS[name])
    assert len(found.seen) == len(wanted.seen)
    assert torch.equal(torch.tensor(found.seen).isnan(), torch.tensor(wanted.seen).isnan())
