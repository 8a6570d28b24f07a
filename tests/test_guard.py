"""A guard withdraws what makes a run worse, nearly never what does not, alike on all ranks and after a resume."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchboost
from tests.support.ranks import run_ranks
from torchboost import Boosted, Guard

STEPS = 300


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )


def batches(seed: int) -> Any:
    """Four classes of noisy patterns that a small network learns in 300 steps, not in 50."""
    patterns = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(99))
    draw = torch.Generator().manual_seed(1000 + seed)
    while True:
        labels = torch.randint(0, 4, (16,), generator=draw)
        yield patterns[labels] + 3.0 * torch.randn(16, 3, 8, 8, generator=draw), labels


def train(
    seed: int, extra: dict[str, Any], *, watch: Any = None, steps: int = STEPS, total: int = STEPS
) -> tuple[list[float], Boosted]:
    """Return the losses of a run and what it was boosted with; ``watch(boosted)`` makes a guard."""
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    boosted = torchboost.boost(
        model, optimizer, level="O0", config={"extra": extra}, total_steps=total, calibrate=False
    )
    guard = None if watch is None else watch(boosted)
    losses, data = [], batches(seed)
    for _ in range(steps):
        inputs, labels = next(data)
        loss = F.cross_entropy(boosted.model(inputs), labels)
        loss.backward()
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        if guard is not None:
            guard.update(loss)
        losses.append(float(loss.detach()))
    return losses, boosted


def guarded(extra: dict[str, Any], *reference: Any, **settings: Any) -> tuple[Guard, Boosted, list[str]]:
    """Return a guard of a run that did two steps, and the lines of its log."""
    length = max([300, *(len(losses) for losses in reference if isinstance(losses, list))])
    _, boosted = train(0, extra, steps=2, total=length)
    lines: list[str] = []
    return Guard(boosted, *reference, log=lines.append, **settings), boosted, lines


HARMFUL = {"grad_freeze": {"pattern": "continuous", "full_share": 0.02, "groups": 3}}


def at_end(losses: list[float]) -> float:
    return sum(losses[-50:]) / 50


def test_a_harmful_setting_is_withdrawn_and_the_run_ends_where_stock_does():
    ends = {"stock": 0.0, "unguarded": 0.0, "guarded": 0.0}
    for seed in range(2):
        stock, _ = train(seed, {})
        unguarded, _ = train(seed, HARMFUL)
        said: list[str] = []
        guarded, boosted = train(seed, HARMFUL, watch=lambda b, r=stock, s=said: Guard(b, r, block=5, log=s.append))
        for name, losses in (("stock", stock), ("unguarded", unguarded), ("guarded", guarded)):
            ends[name] += at_end(losses)
        assert "withdrew grad_freeze" in said[0]
        assert all("nothing is left to withdraw" in text for text in said[1:])  # it may still be catching up
        assert "grad_freeze" not in boosted.attached
        assert all(param.requires_grad for param in boosted.model.parameters())
        assert "the guard withdrew it" in boosted.explain()
    assert ends["unguarded"] > 1.06 * ends["stock"]
    assert ends["guarded"] < 1.05 * ends["stock"]


def test_clean_runs_raise_few_false_alarms():
    """Five runs that differ from theirs by rounding, which grows to other trajectories."""
    alarms = 0
    for seed in range(5):
        stock, _ = train(seed, {}, steps=120)
        said: list[str] = []
        train(seed, {"autocast": True}, watch=lambda b, r=stock, s=said: Guard(b, r, log=s.append), steps=120)
        alarms += len(said)
    assert alarms <= 1


def test_the_trend_finds_a_run_that_gets_worse_and_not_one_that_learns():
    quiet: list[str] = []
    _, boosted = train(1, {"autocast": True}, watch=lambda b: Guard(b, log=quiet.append))
    assert quiet == []
    said: list[str] = []
    guard = Guard(boosted, block=5, log=said.append)
    generator = torch.Generator().manual_seed(0)
    for step in range(400):
        level = 1.0 - 0.004 * step if step < 150 else 0.4 + 0.01 * (step - 150)
        guard.update(level + 0.02 * torch.randn((), generator=generator))
    assert said
    assert "withdrew autocast" in said[0]
    assert "autocast" not in boosted.attached


def test_a_loss_that_is_not_finite_withdraws_at_the_end_of_its_block():
    guard, _, _ = guarded({"autocast": True, "gradient_centralization": True}, [1.0] * 50, block=4)
    assert [guard.update(value) for value in (1.0, math.nan, 1.0, 1.0)] == [None, None, None, "autocast"]
    assert [guard.update(math.inf) for _ in range(4)][-1] == "gradient_centralization"
    assert [guard.update(math.nan) for _ in range(4)][-1] is None
    assert guard.withdrawn == ["autocast", "gradient_centralization"]


Draw = Callable[[np.random.Generator], np.ndarray]


def blocks(losses: np.ndarray) -> list[float]:
    """Average over 20 steps here rather than in the guard, which takes a tenth of the time."""
    return losses.reshape(-1, 20).mean(1).tolist()


def alarm(losses: list[float], reference: Any = "trend", **settings: Any) -> int | None:
    """Return the block of the first alarm."""
    said: list[str] = []
    model = nn.Linear(2, 2)
    boosted = torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O0")
    guard = Guard(boosted, reference, block=1, log=said.append, **settings)
    for place, loss in enumerate(losses):
        guard.update(loss)
        if said:
            return place
    return None


def gamma(variation: float, steps: int = 4000) -> Draw:
    return lambda draw: draw.gamma(variation**-2, variation**2, steps)


def hinge(draw: np.random.Generator) -> np.ndarray:
    return np.maximum(0, 1e-3 * draw.standard_normal(10_000) - 2.5e-3)


HEALTHY: dict[str, Draw] = {
    "half of the mean": gamma(0.5),
    "the mean": gamma(1.0),
    "more than the mean": gamma(1.5),
    "about zero": lambda draw: 0.05 * draw.standard_normal(10_000),
    "mostly zero": hinge,
    "falls below zero": lambda draw: np.linspace(1, -1, 10_000) + 0.05 * draw.standard_normal(10_000),
    "learns": lambda draw: (0.2 + 2.3 * np.exp(-np.arange(4000) / 800)) * gamma(0.5)(draw),
}


def test_noise_raises_few_false_alarms():
    for kind, loss in HEALTHY.items():
        draw = np.random.default_rng(0)
        for against in ("trend", "reference"):
            pairs = [(blocks(loss(draw)), blocks(loss(draw))) for _ in range(10)]
            found = [alarm(losses, against if against == "trend" else stock) for losses, stock in pairs]
            assert sum(block is not None for block in found) <= 1, (kind, against)


def test_late_harm_is_found():
    """Later than half of the run, against a reference and against the trend."""
    for before, after, reference, within in (
        (1.0, 1.1, [1.0] * 500, 15),
        (0.8, 1.5, [1.0] * 500, 15),
        (1.0, 1.5, "trend", 40),
        (0.0, 0.3, "trend", 40),
    ):
        noise = 0.02 * np.random.default_rng(1).standard_normal(10_000)
        found = alarm(blocks(np.repeat([before, after], 5000) + noise), reference)
        assert found is not None
        assert 250 < found <= 250 + within


def test_a_spike_does_not_blind_the_guard():
    for spike, place in ((3.0, 2), (1000.0, 0), (1e160, 2)):
        losses = blocks(1.3 + 0.02 * np.random.default_rng(2).standard_normal(10_000))
        losses[place] = spike
        found = alarm(losses, [1.0] * 500)
        assert found is not None
        assert found < 30
        found = alarm([spike, *([1.0, 1.02] * 50), *([1.6, 1.62] * 50)])
        assert found is not None
        assert 100 < found < 150


def test_after_the_right_withdrawal_the_innocent_ones_stay():
    everything = {**HARMFUL, "autocast": True, "gradient_centralization": True}
    guard, boosted, _ = guarded(everything, [1.0] * 3000)
    excess, noise = 0.3, torch.Generator().manual_seed(0)
    for _ in range(2000):
        guard.update((1 + excess) * (1 + 0.01 * float(torch.randn((), generator=noise))))
        excess *= 0.5 ** (1 / 200) if guard.withdrawn else 1.0  # the loss needs time to return
    assert guard.withdrawn == ["grad_freeze"]
    other = Guard(boosted, [1.0] * 3000, log=lambda text: None)
    for _ in range(3000):
        other.update(1.3)
    assert other.withdrawn == ["autocast", "gradient_centralization"]


@pytest.mark.parametrize("guard_first", [True, False])
def test_the_states_are_loaded_in_either_order(guard_first):
    settings = {**HARMFUL, "autocast": True}
    guard, boosted, _ = guarded(settings, [1.0], block=1)
    assert guard.update(math.nan) == "grad_freeze"
    resumed, other, _ = guarded(settings, [1.0], block=1)
    pairs = [(resumed, guard.state_dict()), (other, boosted.state_dict())]
    for part, state in pairs if guard_first else reversed(pairs):
        part.load_state_dict(state)
    assert list(other.attached) == list(boosted.attached) == ["autocast"]
    assert resumed.withdrawn == ["grad_freeze"]


def test_if_nothing_is_left_this_is_said_once():
    guard, boosted, said = guarded({"autocast": True, "grad_accumulation": {"steps": 2}}, [1.0], block=1)
    for _ in range(3000):
        guard.update(math.nan)
    assert len(said) == 2
    assert "nothing is left to withdraw (on: grad_accumulation)" in said[1]
    boosted.remove()
    Guard(boosted, [1.0], block=1, log=said.append).update(math.nan)
    assert "(on: nothing)" in said[2]


def test_a_loss_is_copied_has_one_entry_and_is_shared_on_the_device_of_the_model(monkeypatch):
    guard, boosted, _ = guarded({}, [1.0] * 4, block=2)
    buffer = torch.ones(1, dtype=torch.float64)
    guard.update(buffer)
    buffer.fill_(100.0)
    guard.update(1.0)
    assert guard.figures()["guard/excess"] == 0.0
    with pytest.raises(ValueError, match=r"loss: found the shape \(2,\); give one number"):
        guard.update(torch.ones(2))
    devices = []
    monkeypatch.setattr("torchboost.guard.mean_over_ranks", lambda value: devices.append(value.device) or 1.0)
    boosted.model.to("meta")
    Guard(boosted, block=1).update(1.0)
    assert devices == [torch.device("meta")]


def test_of_a_state_that_is_not_complete_or_damaged_nothing_is_loaded():
    guard, boosted, _ = guarded({"autocast": True})
    before = guard.state_dict()
    state = {**before, "step": 7, "excess": 0.5, "withdrawn": ["autocast"]}
    damaged: list[tuple[str, Any]] = [
        *(("test", {}), ("test", {"error": 0.1, "tests": [{"unknown": 1}]}), ("trend", {"lowest": 1.0})),
        *(("trend", None), ("step", "many"), ("sum", "much"), ("withdrawn", "autocast"), ("withdrawn", [1])),
    ]
    states = [state | {key: value} for key, value in damaged]
    states += [{key: value for key, value in state.items() if key != "test"}, {**state, "more": 1}]
    for each in states:
        with pytest.raises(ValueError, match=r"the state of the guard is not complete, or damaged: (.|\n)*; load what"):
            guard.load_state_dict(each)
        assert guard.state_dict() == before
    assert "autocast" in boosted.attached
    guard.load_state_dict({**state, "metric_test": {}, "metric_trend": {}, "metric_pause": 5})  # an earlier version
    assert guard.state_dict() == state


def _guarded_rank() -> tuple[list[str | None], list[str]]:
    guard, boosted, _ = guarded({"autocast": True, "gradient_centralization": True}, [1.0] * 200, block=5)
    loss = 1.0 if torch.distributed.get_rank() == 0 else 1.3  # only one rank sees an excess
    return [guard.update(loss + 0.01 * math.sin(step)) for step in range(100)], list(boosted.attached)


@pytest.mark.dist
def test_ranks_withdraw_the_same_at_the_same_step():
    first, second = run_ranks(_guarded_rank, 2)
    assert first == second
    assert "autocast" in first[0]


def test_an_excess_is_a_share_of_the_loss_while_that_is_large():
    """A steady excess of 3 % is less than the 5 % that are accepted, also where the loss is ten times its mean."""
    reference = [2.3 / (1 + at / 100) + 0.05 for at in range(6000)]
    guard, boosted, _ = guarded({**HARMFUL, "autocast": True}, reference)
    assert all(guard.update(1.03 * loss) is None for loss in reference)
    guard = Guard(boosted, reference)
    assert any(guard.update(1.3 * loss) for loss in reference[:2000])


def test_the_log_says_how_far_off_a_run_is_and_what_is_accepted():
    for loss, tolerance, said in (
        (1.65, 0.05, "the loss is 65 % above its reference (5 % is accepted), on average over"),
        (1.65, 0.125, "the loss is 65 % above its reference (12.5 % is accepted), on average over"),
        (9.0, 0.05, "the loss is at least 105 % above its reference (5 % is accepted), on average over"),
    ):
        guard, _, lines = guarded({"autocast": True}, [1.0] * 1000, tolerance=tolerance)
        while not lines:
            guard.update(loss)
        assert lines[0].startswith(f"guard: {said}")
        assert lines[0].endswith("; withdrew autocast.")
    guard, _, lines = guarded({"autocast": True}, block=1)
    for loss in [1.0] * 60 + [1.5] * 60:
        guard.update(loss)
    assert "% further above its lowest mean than is accepted (25 % and 2 standard deviations of a block), " in lines[0]
    guard, _, lines = guarded({"autocast": True}, [1.0] * 10, block=5)  # after its end nothing is compared
    for _ in range(500):
        guard.update(9.0)
    assert guard.withdrawn == lines == []


def test_a_guard_resumes_from_a_checkpoint():
    losses = [1.0 + 0.2 * math.sin(step) for step in range(200)]
    extra = {"autocast": True, "gradient_centralization": True}
    whole, boosted, _ = guarded(extra, [1.0] * 200, block=7, tolerance=0.0)
    for loss in losses[:90]:
        whole.update(loss)
    state = copy.deepcopy(whole.state_dict())
    resumed, other, _ = guarded(extra, [1.0] * 200, block=7, tolerance=0.0)
    resumed.load_state_dict(state)
    for loss in losses[90:]:
        assert whole.update(loss) == resumed.update(loss)
    assert resumed.state_dict() == whole.state_dict()
    assert list(other.attached) == list(boosted.attached)


def test_figures_for_a_log():
    _, boosted = train(0, {**HARMFUL, "autocast": True}, steps=20)
    found = boosted.figures()
    assert found["boost/autocast"] == 1.0
    assert 0 < found["boost/grad_freeze/frozen"] < 1
    guard = Guard(boosted, [1.0] * 20, block=2, log=lambda text: None)
    for _ in range(4):
        guard.update(1.5)
    assert guard.figures() == {
        "guard/excess": pytest.approx(0.5),
        "guard/evidence": pytest.approx(guard._state.test.evidence),
        "guard/withdrawn": 0.0,
    }
    boosted.withdraw("autocast", "a test")
    assert "boost/autocast" not in boosted.figures()
    boosted.withdraw("autocast", "twice does nothing")
    assert train(0, {"loss_scale_group": True}, steps=0)[1].figures()["boost/loss_scale"] > 0


def test_a_guard_checks_what_it_is_given():
    _, boosted = train(0, {}, steps=1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"reference": []}, "reference: found 0 losses"),
        ({"reference": [1.0, math.nan]}, "all of them finite"),
        ({"reference": "stock"}, "give the losses of the stock loop, or 'trend'"),
        ({"tolerance": -0.1}, "tolerance: found"),
        ({"block": 0}, "block: found 0"),
        ({"error": 1.5}, "error: found 1.5"),
        ({"error": 0}, "error: found 0"),
        ({"reference": [1.0] * 19}, "found 19 losses, and a block has 20 steps"),
        ({"reference": [0.0] * 20}, "found only zeros"),
    ]
    for wrong, said in refused:
        with pytest.raises(ValueError, match=said):
            Guard(boosted, **wrong)
    with pytest.raises(TypeError, match="boosted: found tuple; keep what"):
        Guard(tuple(boosted))  # pyright: ignore[reportArgumentType]
    texts = {
        **{key: f"{key}: found .*; give" for key in ("log", "tolerance", "block")},
        "reference": "reference: found .*; give the losses of the stock loop, one number per",
    }
    typed: list[tuple[str, Any]] = [("log", "guard.log"), ("tolerance", "a"), ("block", 2.5)]
    typed += [("reference", wrong) for wrong in (0.5, None, ["a"], [10**400])]
    for key, wrong in typed:
        with pytest.raises(TypeError, match=texts[key]):
            Guard(boosted, **{key: wrong})
    guard = Guard(boosted)
    json.dumps(guard.state_dict())
