"""A copy computes what the model's own forward computes, and running it leaves the model alone."""

from __future__ import annotations

import copy
import threading
import types

import numpy
import pytest
import torch
from torch import nn

from torchboost import to_channels_last
from torchboost.algorithms.autocast import autocast_forward
from torchboost.graph.dataflow import evaluate
from torchboost.graph.twin import twin


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen, self.kept = nn.Linear(3, 2), 0, [], {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.layer(x)
        self.seen.append(y)
        self.kept["last"] = y
        return y


def test_activations_kept_as_attributes_are_copied_without_their_history():
    model = Stateful()
    model(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    made = twin(model)
    assert made.kept["last"] is made.seen[0]
    assert not made.seen[0].requires_grad
    assert model.seen[0].requires_grad
    made(torch.randn(4, 3))
    assert (model.calls, len(model.seen), made.calls) == (1, 1, 2)
    assert model.training
    assert not made.training


def test_covers_and_hooks_of_ours_stay_behind_and_those_of_the_user_come_along():
    model, seen = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    with autocast_forward(model), to_channels_last(model):
        made = twin(model)
    x = torch.randn(2, 3, 4, 4)
    assert "forward" not in vars(made)
    assert not made._forward_pre_hooks
    torch.testing.assert_close(made(x), model(x))  # in another memory format, so it may round otherwise
    assert seen == [1, 1]


def test_what_cannot_be_copied_is_said():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be copied.*outside the model"):
        twin(model)


def test_large_parameters_need_no_memory_where_only_the_shape_matters(monkeypatch):
    monkeypatch.setattr("torchboost.graph.twin._NUMBERS_ELSEWHERE", 10)
    model = nn.BatchNorm1d(8)
    made = twin(model, numbers=False)
    assert made.weight.is_meta
    assert not made.running_mean.is_meta
    assert not twin(model).weight.is_meta


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("covered", ["before", "behind"])
def test_mixed_precision_of_accelerate_stays_behind(own, covered):
    operations = pytest.importorskip("accelerate.utils.operations")
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    if own:
        model.forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, model)
    expected = model(x)
    if covered == "before":
        autocast_forward(model)
    model._original_forward = model.forward  # as Accelerator.prepare_model does
    under = torch.autocast("cpu", torch.bfloat16)(model.forward.__func__)
    model.forward = types.MethodType(operations.convert_outputs_to_fp32(under), model)
    if covered == "behind":
        autocast_forward(model)
    assert not torch.equal(model(x), expected)
    made = twin(model)
    assert torch.equal(made(x), expected)
    assert "_original_forward" not in vars(made)
    assert ("forward" in vars(made)) == own
    assert not torch.equal(model(x), expected)


class Banked(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(1024, 300)
        self.bank = {"rows": [numpy.ones((300, 2048), numpy.float32)]}
        self.tensor = torch.ones(300, 2048)
        self.view = self.layer.weight.detach()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "array":
            self.bank["rows"][0][0, 0] = 7
        elif self.kind == "tensor":
            self.tensor[:, 0].add_(7)
        elif self.kind == "out":
            torch.ones(300, 2048, out=self.tensor)
        return self.layer(x) + self.tensor.sum() + float(self.bank["rows"][0].sum())


def test_large_plain_attributes_are_lent_to_a_copy_that_is_only_run():
    model = Banked("reads")
    made, copied = twin(model, lend=True), twin(model)
    assert made.bank["rows"][0].ctypes.data == model.bank["rows"][0].ctypes.data
    assert made.tensor.data_ptr() == model.tensor.data_ptr()
    assert copied.bank["rows"][0].ctypes.data != model.bank["rows"][0].ctypes.data
    assert copied.tensor.data_ptr() != model.tensor.data_ptr()
    assert made.view.data_ptr() != model.layer.weight.data_ptr()
    x = torch.randn(2, 1024)
    assert torch.equal(evaluate(model, x)[0], model(x))


@pytest.mark.parametrize("kind", ["array", "tensor", "out"])
def test_what_is_lent_is_not_written(kind):
    model = Banked(kind)
    with pytest.raises((ValueError, TypeError), match=r"read-only|large tensor that the original keeps"):
        evaluate(model, torch.randn(2, 1024))
    assert float(model.bank["rows"][0].max()) == float(model.tensor.max()) == 1


class Shared(nn.Linear):
    def __deepcopy__(self, memo: object) -> nn.Module:
        return self


def test_a_part_that_is_its_own_copy_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), Shared(2, 2))
    with pytest.raises(TypeError, match="a Shared in it is its own copy"):
        twin(model)
    assert model[1].training
    with pytest.raises(TypeError, match="a Parameter in it is its own copy"):
        twin(Held(model[1].weight))


class Held(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def __deepcopy__(self, memo: object) -> nn.Module:
        return Held(self.weight)


@pytest.mark.parametrize("other", [None, "tanh"])
def test_a_forward_that_was_compiled_on_the_instance_computes_with_the_copy(other):
    model = nn.Sequential(nn.Linear(2, 2))
    if other is not None:
        model[0].forward = types.MethodType(lambda self, x: torch.tanh(nn.Linear.forward(self, x)), model[0])
    model[0].forward = torch.compile(model[0].forward, backend="eager")
    made, x = twin(model), torch.randn(3, 2)
    expected = model(x)
    nn.init.zeros_(model[0].weight)
    assert ("forward" in vars(made[0])) == (other is not None)
    torch.testing.assert_close(made(x), expected)


def test_attributes_without_end_are_copied():
    model = nn.Linear(2, 2)
    model.ring = [1]
    model.ring.append(model.ring)
    assert twin(model).ring[1] is not model.ring
