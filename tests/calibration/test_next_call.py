"""The inputs of the next training call are counted once. The calls of the model stay what they were."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchboost.algorithms import Compile
from torchboost.calibration.watch import Gate, entries_in, is_training_call
from torchboost.core.algorithm import Target, attach_all
from torchboost.core.torch_private import compiled_call, compiled_graphs, interceptor_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


X = torch.ones(2, 3)


class Counter(list[int]):
    """The entries of the training call that a gate has let through."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gate = Gate(model, self.meet)

    def meet(self, call: Any) -> bool:
        if not is_training_call(self.model, call):
            return False
        self.append(entries_in(call))
        return True


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def test_one_training_call_is_counted_and_nothing_is_left(model: Net):
    keys, expected = set(vars(model)), model(X)
    seen = Counter(model)
    assert torch.equal(model(X), expected)
    assert seen == [6]
    assert set(vars(model)) == keys
    model(X)
    assert seen == [6]


def test_the_hooks_of_the_model_run_once(model: Net):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    seen = Counter(model)
    model(X)
    model.eval()(X)
    assert (len(calls), seen) == (2, [6])


def test_entries_are_those_of_all_tensors_in_the_arguments():
    assert entries_in(((X, [torch.ones(4)], 7), {"mask": {"a": torch.ones(2, 2)}, "flag": None})) == 14


def no_gradients(model: Net) -> None:
    with torch.no_grad():
        model(X)


def evaluation(model: Net) -> None:
    model.eval()(X)
    model.train()


def jit_trace(model: Net) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        torch.jit.trace(model, X)


def jit_script(model: Net) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates it
        assert torch.equal(torch.jit.script(model)(X), model.eval()(X))
    model.train()


def export(model: Net) -> None:
    torch.export.export(model, (X,))


def symbolic_trace(model: Net) -> None:
    assert torch.equal(torch.fx.symbolic_trace(model).eval()(X), model.eval()(X))
    model.train()


def compile_it(model: Net) -> None:
    torch.compile(model, backend="eager", fullgraph=True)(X)


def copies(model: Net) -> None:
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert interceptor_of(other) is None
        other(X)


def inside_checkpoint(model: Net) -> None:
    checkpoint(model, X, use_reentrant=False).sum().backward()


def functional(model: Net) -> None:
    values = {name: value.detach().clone() for name, value in model.named_parameters()}
    torch.func.functional_call(model, values, (X,))
    torch.func.grad(lambda values: torch.func.functional_call(model, values, (X,)).sum())(values)


def mapped(model: Net) -> None:
    torch.func.vmap(lambda factor: factor * model(X), randomness="same")(torch.ones(2))


OTHER_CALLS = [no_gradients, evaluation, jit_trace, jit_script, export, symbolic_trace, compile_it, copies]
OTHER_CALLS += [inside_checkpoint, functional, mapped]


@pytest.mark.parametrize("use", OTHER_CALLS, ids=lambda use: use.__name__)
def test_other_uses_of_the_model_are_not_counted_and_do_what_they_did(model: Net, use: Callable[[Net], None]):
    seen = Counter(model)
    use(model)
    assert seen == []
    assert interceptor_of(model) is seen.gate
    model(X)
    assert seen == [6]


@pytest.mark.parametrize("sequential", [False, True], ids=["own forward", "Sequential"])
def test_a_compiled_model_stays_compiled_without_another_graph(model: Net, sequential: bool):
    network = nn.Sequential(model, nn.ReLU()) if sequential else model
    attached = attach_all(Target(network, torch.optim.SGD(network.parameters(), lr=0.1)), [Compile(backend="eager")])
    network(X)
    with torch.no_grad():
        network(X)
    call, graphs = vars(network)["_compiled_call_impl"], compiled_graphs()
    seen = Counter(network)
    assert compiled_call(network) is call
    with torch.no_grad():
        network(X)
    network(X)
    assert seen == [6]
    assert vars(network)["_compiled_call_impl"] is call
    assert compiled_graphs() == graphs
    again = Counter(network)
    attached.remove()
    assert compiled_call(network) is None
    network(X)
    assert again == [6]
    assert compiled_graphs() == graphs
    assert "_compiled_call_impl" not in vars(network)


def test_removal_puts_back_only_its_own_place(model: Net):
    waiting = (counter := Counter(model)).gate
    model.compile(backend="eager")
    call = compiled_call(model)
    waiting.remove()
    assert compiled_call(model) is call
    waiting = (counter := Counter(model)).gate
    waiting.remove()
    waiting.remove()
    assert compiled_call(model) is call
    assert counter == []


def test_a_call_that_raises_leaves_nothing(model: Net):
    seen = Counter(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 5))
    assert interceptor_of(model) is None
    assert seen == [10]
