from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchboost.core.algorithm import Target
from torchboost.core.step import ClosureOptimizer, Replay, TrainStep, after_closure

CPU = torch.device("cpu")


def test_a_replay_draws_the_same_numbers_and_leaves_the_generator_alone() -> None:
    x = torch.randn(1000, requires_grad=True)
    replay = Replay(lambda: F.dropout(x, 0.5).sum(), CPU)
    assert replay.loss is None
    first = replay.first()
    after = torch.get_rng_state()
    assert torch.equal(replay(), first)
    assert torch.equal(replay(), first)
    assert replay.loss is not None
    assert torch.equal(replay.loss, first)
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(F.dropout(x, 0.5).sum(), first)


@pytest.mark.parametrize(
    ("closure", "error", "said"),
    [
        (lambda w: w.sum().item(), TypeError, "returned a float"),
        (lambda w: None, TypeError, "returned a NoneType"),
        (lambda w: w * 2, ValueError, r"shape \(3,\); reduce it"),
        (lambda w: w.detach().sum(), ValueError, "without a gradient"),
        (lambda w: (w.sum().backward(), w.sum())[1], ValueError, r"called backward\(\)"),
    ],
)
def test_closures_that_do_not_just_return_the_loss(closure, error, said) -> None:
    w = nn.Parameter(torch.ones(3))
    with pytest.raises(error, match=said):
        Replay(lambda: closure(w), CPU).backward([w])


def test_step_is_for_subclasses() -> None:
    with pytest.raises(NotImplementedError):
        ClosureOptimizer([nn.Parameter(torch.ones(1))], {}).step(lambda: torch.zeros(()))


class Watching(ClosureOptimizer):
    """Notes what it is handed, and descends."""

    seen: list[tuple[float, float]]

    def step(self, closure=None):
        assert isinstance(closure, Replay)
        assert closure.loss is not None
        with torch.no_grad():
            self.seen.append((closure.loss.item(), closure().item()))
            for p in self.param_groups[0]["params"]:
                p.sub_(0.1 * p.grad)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_training_step_hands_over_its_forward_pass(scaled: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    optimizer = Watching(model.parameters(), {})
    optimizer.seen = []
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    step = TrainStep(Target(model, optimizer, scaler), lambda x, y: (F.mse_loss(model(x), y), len(y)))
    x, y = torch.randn(8, 3), torch.randn(8, 3)
    losses = [float(step(x, y).loss) for _ in range(3)]
    assert [first for first, _ in optimizer.seen] == losses
    assert all(first == again for first, again in optimizer.seen)
    assert len(set(losses)) == 3


@pytest.mark.parametrize("named", [True, False])
def test_what_follows_a_closure_follows_each_of_its_calls(named: bool) -> None:
    done: list[str] = []

    def closure() -> str:
        done.append("closure")
        return "loss"

    given = ((), {"closure": closure}) if named else ((closure,), {})
    covered = after_closure(("the optimizer", *given[0]), given[1], lambda: done.append("act"))
    assert done == []
    assert covered is not None
    (first, *rest), kwargs = covered
    assert first == "the optimizer"
    evaluate = kwargs["closure"] if named else rest[0]
    assert evaluate() == evaluate() == "loss"
    assert done == ["closure", "act"] * 2


@pytest.mark.parametrize("kwargs", [{}, {"closure": None}])
def test_without_a_closure_it_happens_at_once(kwargs: dict) -> None:
    done: list[int] = []
    assert after_closure(("the optimizer", None), kwargs, lambda: done.append(1)) is None
    assert done == [1]
