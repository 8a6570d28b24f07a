"""Passes begin alike, write no gradient, and leave the inputs alone."""

from __future__ import annotations

import collections
import contextvars
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchboost
from torchboost.calibration import passes as module
from torchboost.calibration.passes import Passes, noise
from torchboost.calibration.snapshot import Snapshot
from torchboost.errors import IncompatibleError

Pair = collections.namedtuple("Pair", "first second")


def passes(model: nn.Module, *args: Any, **kwargs: Any) -> Passes:
    call = args, kwargs
    return Passes(model, call, Snapshot(model, call))


def once(made: Passes, change: Any = None) -> Any:
    with made.prepared(change):
        return made.run()


def test_passes_are_equal_and_write_no_gradient():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    made = passes(model, torch.randn(4, 3))
    first, second = once(made), once(made)
    assert all(map(torch.equal, first.outputs, second.outputs))
    assert all(map(torch.equal, first.gradients, second.gradients))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model[1].num_batches_tracked == 0
    assert len(first.gradients) == len(made.parameters) == 6


def test_passes_that_differ_in_the_number_of_outputs_are_not_equal():
    reader = iter([1, 2])

    class Grows(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return [super().forward(input)] * next(reader)

    made = passes(Grows(3, 2), torch.randn(4, 3))
    first, second = once(made), once(made)
    for one, other in ((first, second), (second, first)):
        with pytest.raises(IncompatibleError, match="two equal passes differ"):
            made.compare(one.outputs, other.outputs)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, inputs: Any) -> Tensor:
        x = inputs.first if isinstance(inputs, Pair) else inputs["first"]
        return self.layer(x.relu_())


@pytest.mark.parametrize("build", [lambda x: Pair(x, None), lambda x: {"first": x}], ids=["named tuple", "dict"])
def test_inputs_with_a_history_are_cut_from_it_and_may_be_written_to(build):
    encoder, model = nn.Linear(3, 3), Reads()
    hidden = encoder(torch.randn(4, 3))
    found = once(passes(model, build(hidden)))
    assert len(found.gradients) == 3  # that of the input, too
    assert encoder.weight.grad is None
    model(build(hidden * 1)).sum().backward()  # the graph of the encoder is still there
    assert encoder.weight.grad is not None


class Recomputing(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(3, 3), nn.Linear(3, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant))


def test_recomputed_parts():
    model, x = Recomputing(reentrant=False), torch.randn(4, 3)
    kept = model.first.weight.grad = torch.ones(3, 3)
    found = once(passes(model, x))
    assert all(gradient is not None for gradient in found.gradients[:4])
    assert model.first.weight.grad is kept
    assert torch.equal(kept, torch.ones(3, 3))


def test_a_reentrant_checkpoint_is_refused_before_anything_is_accumulated():
    model, x, called = Recomputing(reentrant=True), torch.randn(4, 3), []
    weight = model.first.weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: called.append(1))
    with pytest.raises(IncompatibleError, match="use_reentrant=False"):
        once(passes(model, x))
    assert called == []
    boosted = torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), calibrate=0.2)
    model(x).sum().backward()
    assert called == [1]
    assert "use_reentrant" in boosted.explain()


def test_noise_is_repeatable_and_leaves_whole_numbers():
    x = torch.tensor([1.0, 2.5, -3.0, 0.1])
    first, second, other = x.clone(), x.clone(), x.clone()
    noise(1e-3, 0)(first)
    noise(1e-3, 0)(second)
    noise(1e-3, 1)(other)
    assert torch.equal(first, second)
    assert first[0] == 1.0
    assert first[2] == -3.0
    assert 0 < abs(first[1] / 2.5 - 1) < 2e-3
    model = nn.Linear(4, 2)
    made = passes(model, x)
    assert not torch.equal(once(made).outputs[0], once(made, noise(1e-3, 0)).outputs[0])


class CallsBackward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x).sum().backward()
        return super().forward(x)


def test_gradients_of_the_loop_stay_if_forward_calls_backward():
    model = CallsBackward(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    gradient = model.weight.grad
    before = gradient.clone()
    once(passes(model, torch.ones(1, 3)))
    assert model.weight.grad is gradient
    assert torch.equal(gradient, before)


CALLS = contextvars.ContextVar("CALLS", default=0)


class CountsInContext(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        CALLS.set(CALLS.get() + 1)
        return super().forward(x) * CALLS.get()


def test_context_variables_stay():
    once(passes(CountsInContext(3, 2), torch.ones(1, 3)))
    assert CALLS.get() == 0


def test_an_autocast_context_of_the_loop_keeps_no_weights_of_a_pass():
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        torch.clear_autocast_cache()
        snapshot = Snapshot(model, ((x,), {}))
        with snapshot.changed(lambda tensor: tensor.mul_(2)):
            once(Passes(model, ((x,), {}), snapshot))
        assert torch.equal(model(x), expected)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, None, 0.5) + F.scaled_dot_product_attention(
            x, x, x, dropout_p=0.5
        )


MODELS = {
    "module": (nn.Dropout(0.5), (4, 8)),
    "in place": (nn.Dropout(0.5, inplace=True), (4, 8)),
    "channels": (nn.Dropout2d(0.5), (4, 8, 2, 2)),
    "alpha": (nn.AlphaDropout(0.5), (4, 8)),
    "attention": (Attention(), (2, 4, 8)),
    "layer": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True), (2, 4, 8)),
    "recurrent": (nn.LSTM(8, 8, 2, dropout=0.5), (4, 2, 8)),
}


def test_nothing_is_dropped_and_nothing_drawn():
    for model, shape in MODELS.values():
        x = torch.randn(shape)
        state = torch.get_rng_state()
        with module._WithoutDropout():
            first, second = model(x.clone()), model(x.clone())
        assert torch.equal(torch.get_rng_state(), state)
        first, second = (found[0] if isinstance(found, tuple) else found for found in (first, second))
        assert torch.equal(first, second)
        model(x.clone())
        assert not torch.equal(torch.get_rng_state(), state)


def test_noise_does_not_depend_on_the_memory_format():
    x = torch.randn(2, 3, 4, 4)
    found = []
    for each in (x, x.contiguous(memory_format=torch.channels_last)):
        torch.manual_seed(0)
        with module._WithoutDropout():
            found.append(torch.randn_like(each))
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_the_compiler_traces_through_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(3, 4)
    with module._WithoutDropout():
        assert torch.equal(compiled(x), model(x))
    assert (compiled(x) == 0).any()
