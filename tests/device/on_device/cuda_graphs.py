"""Outputs and gradients of CUDA graphs stay right, although each replay writes into the same memory.

The pretend device has no CUDA graphs. A compiled call that computes into fixed memory stands for one: its output, and
the gradient that the backward pass hands over, are overwritten by the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchboost import Target
from torchboost.algorithms.compile import Compile
from torchboost.core import attach_all


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 4, device="cuda"))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": x @ self.weight.t(), "weight": self.weight, "x": x}


class Replay(torch.autograd.Function):
    """A product whose results are in fixed memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = gradient
        return output.copy_(x @ weight.t()).detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return None, ctx.gradient.copy_(gradients[0].t() @ x).detach(), None, None


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the compiler was given. It makes a replay of the product."""
    seen: list[dict[str, Any]] = []

    def compile_in_place(self: Net, **given: Any) -> None:
        seen.append(given)
        output, gradient = torch.empty(2, 3, device="cuda"), torch.empty(3, 4, device="cuda")
        self._compiled_call_impl = lambda x: {
            "y": Replay.apply(x, self.weight, output, gradient),
            "weight": self.weight,
            "x": x,
        }

    monkeypatch.setattr(nn.Module, "compile", compile_in_place)
    return seen


def attached(mode: str | None) -> tuple[Net, Any]:
    model = Net()
    return model, attach_all(Target(model, torch.optim.SGD(model.parameters(), lr=0.1)), [Compile(mode=mode)])


def inputs() -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(1)
    return [torch.randn(2, 4, generator=generator, device="cpu").to("cuda") for _ in range(4)]


def accumulated(model: nn.Module, between: Callable[[], object] = lambda: None) -> Tensor:
    model.zero_grad()
    for x in inputs():
        model(x)["y"].square().sum().backward()
        between()
    assert model.weight.grad is not None
    return model.weight.grad


def test_the_stand_in_overwrites_what_it_returned(options):
    model = Net()
    model.compile()
    first, second = (model(x)["y"] for x in inputs()[:2])
    assert torch.equal(first, second)
    assert not torch.allclose(accumulated(model), accumulated(Net()))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_loop_trains_as_without_graphs(mode, options):
    model, _ = attached(mode)
    kept, expected = [model(x) for x in inputs()], [Net()(x) for x in inputs()]
    for ours, theirs, x in zip(kept, expected, inputs(), strict=True):
        assert torch.equal(ours["y"], theirs["y"])
        assert ours["weight"] is model.weight
        assert torch.equal(ours["x"], x)
    x = inputs()[0]
    assert model(x)["x"] is x, "what is not computed is not copied"

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(2, 4, device="cuda"))

    for between in (evaluate, lambda: None):
        torch.testing.assert_close(accumulated(model, between), accumulated(Net()))
    for to_none in (False, True):
        (model, _), plain = attached(mode), Net()
        for each in (model, plain):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
            for x in inputs():
                each(x)["y"].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
        torch.testing.assert_close(model.weight, plain.weight)
    assert options[0]["options"]["triton.cudagraphs"]
    assert options[0]["options"]["triton.cudagraph_skip_dynamic_graphs"]
    assert "mode" not in options[0]


def test_a_gradient_is_copied_once_and_a_view_is_not(options):
    model, _ = attached("reduce-overhead")
    accumulated(model)
    model(inputs()[0])
    first = model.weight.grad
    model(inputs()[0])
    assert model.weight.grad is first
    bucket = torch.zeros(12, device="cuda")
    model.weight.grad = bucket.view(3, 4)
    model(inputs()[0])
    bucket.fill_(1.0)
    assert torch.equal(model.weight.grad, torch.ones(3, 4, device="cuda"))


def test_gradients_stay_when_the_compilation_is_removed(options):
    model, effect = attached("reduce-overhead")
    model(inputs()[0])["y"].square().sum().backward()
    call = model._compiled_call_impl
    effect.remove()
    found = model.weight.grad
    torch.autograd.grad(call(inputs()[1])["y"].sum(), model.weight)
    plain = Net()
    plain(inputs()[0])["y"].square().sum().backward()
    torch.testing.assert_close(found, plain.weight.grad)


def test_other_modes_copy_nothing(options):
    for mode in (None, "default", "max-autotune-no-cudagraphs"):
        model, _ = attached(mode)
        first, second = (model(x)["y"] for x in inputs()[:2])
        assert torch.equal(first, second)
        assert options.pop().get("mode") == mode
    forms = [form.algorithm.mode for form in Compile().forms(torch.device("cuda"))]
    assert forms == ["reduce-overhead", "max-autotune-no-cudagraphs"]
