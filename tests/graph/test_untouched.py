"""A pass on a copy never computes with a tensor of the model, however the copy leads there."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms.channels_last import ChannelsLast
from torchboost.graph.dataflow import evaluate, trace, trace_run, undisturbed
from torchboost.graph.folding import fold_pairs
from torchboost.graph.matrix_uses import matrix_uses
from torchboost.graph.untouched import ReachesOriginal, copies_of, untouched


class ThroughLambda(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.calls = 0
        self.stem = lambda x: self.count().norm(self.layer(x))

    def count(self) -> ThroughLambda:
        self.calls += 1
        self.norm.training = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.stem(x)).mean((2, 3)))


class Scaled(nn.Module):
    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.parent = weakref.ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.parent().scale


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


def with_parent() -> nn.Module:
    model = plain()
    model.scale = nn.Parameter(torch.ones(1))
    model[2] = Scaled(model)
    model.forward = functools.partial(nn.Sequential.forward, model[:5])
    return model


def patched(wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]], child: bool) -> nn.Module:
    model = plain()
    layer = model[1] if child else model
    layer.forward = wrap(layer.forward)
    return model


def timed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def call(*args: Tensor) -> Tensor:
        return forward(*args)

    return call


LEADING_BACK = [
    ThroughLambda,
    with_parent,
    lambda: patched(timed, child=False),
    lambda: patched(timed, child=True),
    lambda: patched(torch.enable_grad(), child=False),
    lambda: patched(torch.autocast("cpu", torch.bfloat16), child=True),
    lambda: patched(lambda forward: torch.compile(timed(forward), backend="eager"), child=False),
    lambda: patched(lambda forward: lambda x: forward(x), child=True),
]


def everything(model: nn.Module) -> list[object]:
    attributes = [{k: v for k, v in vars(module).items() if k[0] != "_"} for module in model.modules()]
    return [
        {name: (tensor._version, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()},
        [p.grad for p in model.parameters()],
        attributes,
    ]


def assert_unchanged(model: nn.Module, before: list[object]) -> None:
    after = everything(model)
    assert after[1:] == before[1:]
    for name, (version, value) in before[0].items():
        assert after[0][name][0] == version
        assert torch.equal(after[0][name][1], value)


@pytest.mark.parametrize("build", LEADING_BACK)
def test_a_copy_that_leads_back_is_not_run_and_leaves_no_mark(build) -> None:
    model, x = build().train(), torch.randn(2, 3, 8, 8)
    before, generator = everything(model), torch.get_rng_state()
    with pytest.raises(ReachesOriginal, match="of the original"):
        evaluate(model, x)
    assert trace_run(model) is None
    trace(model)
    assert matrix_uses(model, x) is None
    assert fold_pairs(model, [], sample=x) is None
    assert_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("reentrant", [None, True])
def test_gradients_of_a_parameter_outside_are_not_computed(reentrant: bool | None) -> None:
    scale = nn.Parameter(torch.ones(1))

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if reentrant is None:
                return self.inner(x) * scale
            return torch.utils.checkpoint.checkpoint(lambda y: self.inner(y) * scale, x, use_reentrant=reentrant)

    model = Outside()
    assert ChannelsLast().idle(model, torch.optim.SGD(model.parameters(), lr=0.1)) is None
    assert scale.grad is None


def test_a_forward_that_catches_the_refusal_does_not_count() -> None:
    model = plain()
    inner = model[0]

    class Catches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return inner(x)
            except TypeError:
                return x

    with pytest.raises(ReachesOriginal, match="the weight of a Conv2d"), untouched(model):
        Catches()(torch.randn(2, 3, 8, 8))
    with pytest.raises(ReachesOriginal) as raised, untouched(model):
        renamed(inner, torch.randn(2, 3, 8, 8))
    assert isinstance(raised.value.__cause__, RuntimeError)


def renamed(layer: nn.Module, x: Tensor) -> Tensor:
    try:
        return layer(x)
    except TypeError as error:
        raise RuntimeError("in another class") from error


def test_other_errors_pass_and_threads_are_not_watched() -> None:
    model = plain()
    with pytest.raises(KeyError), untouched(model):
        raise KeyError
    found = []
    with untouched(model):
        thread = threading.Thread(target=lambda: found.append(model(torch.randn(2, 3, 8, 8))))
        thread.start()
        thread.join()
    assert len(found) == 1


def test_copies_of_a_copy_do_not_reach_the_first_original() -> None:
    model = ThroughLambda()
    with undisturbed(model) as copied, copies_of(model):
        pass
    with copies_of(model), pytest.raises(ReachesOriginal):
        evaluate(copied, torch.randn(2, 3, 8, 8))
