"""The trace of a training forward: faithful, or refused; and the model is as before."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from torchboost.algorithms.grad_freeze.prefix.trace import Call, is_opaque, random_state, trace_forward
from torchboost.errors import IncompatibleError


class Net(nn.Module):
    """A forward that a test gives."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def call_of(*args: Any, **kwargs: Any) -> Call:
    call = Call.of(args, kwargs)
    assert call is not None
    return call


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def test_a_call_is_its_tensors_and_a_key_of_the_rest() -> None:
    call = call_of(X, {"mask": X > 0, "scale": 2.0}, flag=True)
    assert [t.dtype for t in call.tensors] == [torch.float32, torch.bool]
    assert call.key == call_of(X + 1, {"mask": X > 1, "scale": 2.0}, flag=True).key
    assert call.key != call_of(X, {"mask": X > 0, "scale": 2.0}, flag=False).key
    assert call.key != call_of(X, {"mask": X > 0, "scale": 2}, flag=True).key
    assert call.key != call_of(X, {"mask": None, "scale": 2.0}, flag=True).key
    assert call.arguments(("a", "b")) == (("a", {"mask": "b", "scale": 2.0}), {"flag": True})
    assert Call.of((object(),), {}) is None


def test_a_trace_runs_like_the_forward_with_nested_arguments_defaults_and_constants() -> None:
    def run(self: Net, x: Tensor, more: Any, *, flag: bool = False, scale: float = 3.0) -> Any:
        y = self.linear(x) if flag else -self.linear(x)
        return {"y": y * scale + more["b"] + torch.tensor([1.0, 2.0, 3.0, 4.0]), "steps": (self.steps, None)}

    model = Net(run)
    names = set(vars(model))
    call = call_of(X, {"b": X.abs(), "n": 3}, flag=True)
    traced = trace_forward(model, call)
    assert set(vars(model)) == names
    graph = fx.GraphModule(traced.targets, traced.graph)
    expected = model(X, {"b": X.abs(), "n": 3}, flag=True)
    assert torch.equal(graph(*call.tensors)["y"], expected["y"])
    assert graph(*call.tensors)["steps"] == (model.steps, None)


def test_training_flags_count() -> None:
    model = Net(lambda self, x: self.linear(x) if self.training else x)
    nodes = {True: 0, False: 0}
    for training in nodes:
        nodes[training] = len(trace_forward(model.train(training), call_of(X)).graph.nodes)
    assert nodes[True] == nodes[False] + 1


def branches(self: Net, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def drops_layers(self: Net, x: Tensor) -> Tensor:
    return self.linear(x) if torch.rand(()) < 0.5 else x


def drops_layers_in_python(self: Net, x: Tensor) -> Tensor:
    return self.linear(x) if random.random() < 0.5 else x


def stops_gradients(self: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        return self.linear(x)


def lowers_precision(self: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.linear(x)


def counts(self: Net, x: Tensor) -> Tensor:
    self.steps += 1
    return x


def counts_in_python(self: Net, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return x * self.calls


def sets_an_item(self: Net, x: Tensor) -> Tensor:
    y = self.linear(x)
    y[:, 0] = 0
    return y


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (branches, "TraceError"),
        (drops_layers, "random numbers"),
        (drops_layers_in_python, "random numbers"),
        (stops_gradients, "switches gradients or autocast"),
        (lowers_precision, "switches gradients or autocast"),
        (counts, r"sets attributes of its modules \(steps\)"),
        (counts_in_python, r"sets attributes of its modules \(calls\)"),
        (sets_an_item, "item assignment"),
    ],
)
def test_what_a_trace_would_get_wrong_is_refused_and_nothing_changed(run: Any, reason: str) -> None:
    model = Net(run)
    before, states = copy.deepcopy(model.state_dict()), (random_state([]), random.getstate())
    names = set(vars(model))
    with pytest.raises(IncompatibleError, match=reason) as caught:
        trace_forward(model, call_of(X))
    assert "freezing itself does not need it" in str(caught.value)
    assert (random_state([]), random.getstate()) == states
    assert set(vars(model)) == names
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_modules_with_hooks_are_not_looked_into() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    assert not any(map(is_opaque, model.modules()))
    handle = model[0].register_forward_hook(lambda *_: None)
    assert is_opaque(model[0])
    traced = trace_forward(model, call_of(X))
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    handle.remove()
    assert F.mse_loss(model(X), fx.GraphModule(traced.targets, traced.graph)(X)) == 0
