"""Gradients that are handed over: the mean of a window, ragged or short, and resuming inside one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchboost.algorithms.grad_accumulation.gradient_window import GradientWindow


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_and_grads(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    loss = model(x).square().mean()
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def test_a_ragged_window_updates_like_one_large_batch():
    model, optimizer = model_and_optimizer()
    raw, plain = model_and_optimizer()
    accumulate = GradientWindow(3, optimizer)
    for sizes in ([5, 2, 1], [3, 7]):
        x = torch.randn(sum(sizes), 4)
        for part in x.split(sizes):
            loss, grads = loss_and_grads(model, part)
            assert accumulate(loss, grads, count=len(part)) is loss
        assert accumulate.updated == (len(sizes) == 3)
        assert accumulate.flush() == (len(sizes) == 2)
        raw(x).square().mean().backward()
        plain.step()
        plain.zero_grad()
        for p, q in zip(model.parameters(), raw.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert not accumulate.flush()


def test_a_short_window_is_averaged_over_what_it_holds():
    model, optimizer = model_and_optimizer()
    raw, plain = model_and_optimizer()
    accumulate = GradientWindow(4, optimizer)
    xs = [torch.randn(3, 4) for _ in range(2)]
    for x in xs:
        accumulate(*loss_and_grads(model, x))
    assert accumulate.flush()
    raw(torch.cat(xs)).square().mean().backward()
    plain.step()
    for p, q in zip(model.parameters(), raw.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_hooks_and_schedulers_follow_the_updates():
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(len(steps)))
    accumulate = GradientWindow(2, optimizer)
    for _ in range(5):
        accumulate(*loss_and_grads(model, torch.randn(3, 4)))
        if accumulate.updated:
            scheduler.step()
    assert (len(steps), scheduler.last_epoch) == (2, 2)


def test_gradients_may_be_missing():
    model, optimizer = model_and_optimizer()
    before = model.weight.detach().clone()
    accumulate = GradientWindow(2, optimizer)
    accumulate("a loss of any kind", [None, torch.ones(2)])
    accumulate("a loss of any kind", [None, None])
    assert accumulate.updated
    assert torch.equal(model.weight, before)
    assert model.weight not in optimizer.state
    assert torch.equal(optimizer.state[model.bias]["momentum_buffer"], torch.full((2,), 0.5))


@pytest.mark.parametrize("stop", range(1, 12))
def test_resume_at_every_call_is_bit_identical(stop):
    def run(model, optimizer, accumulate, batches):
        for x in batches:
            accumulate(*loss_and_grads(model, x), count=len(x))
        return [p.tolist() for p in model.parameters()]

    batches = [torch.randn(2 + i % 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    model, optimizer = model_and_optimizer()
    accumulate = GradientWindow(3, optimizer)
    run(model, optimizer, accumulate, batches[:stop])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), accumulate.state_dict()))
    again, other = model_and_optimizer()
    resumed = GradientWindow(3, other)
    for part, state in zip((again, other, resumed), saved, strict=True):
        part.load_state_dict(state)
    assert run(model, optimizer, accumulate, batches[stop:]) == run(again, other, resumed, batches[stop:])


def test_bad_input_is_refused_and_changes_nothing():
    model, optimizer = model_and_optimizer()
    for steps in (0, True, 1.5, "2"):
        with pytest.raises(ValueError, match=f"steps: found {steps!r}"):
            GradientWindow(steps, optimizer)
    with pytest.raises(TypeError, match="found Linear"):
        GradientWindow(2, model)
    accumulate = GradientWindow(2, optimizer)
    good = [torch.ones(2, 4), torch.ones(2)]
    with pytest.raises(ValueError, match="found 1, the optimizer has 2"):
        accumulate(0.0, good[:1])
    with pytest.raises(ValueError, match=r"grads\[0\] has shape \(2,\), but its parameter has \(2, 4\)"):
        accumulate(0.0, good[::-1])
    with pytest.raises(TypeError, match=r"grads\[1\] must be a tensor or None, found float"):
        accumulate(0.0, [good[0], 1.0])
    for count in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"count: found {count}"):
            accumulate(0.0, good, count=count)
    assert accumulate.state_dict()["calls"] == 0
    accumulate(0.0, good, count=3)
    with pytest.raises(ValueError, match="found None, but the window began otherwise"):
        accumulate(0.0, good)
    with pytest.raises(ValueError, match="holds 1 calls, but a window takes 1"):
        GradientWindow(1, optimizer).load_state_dict(accumulate.state_dict())
