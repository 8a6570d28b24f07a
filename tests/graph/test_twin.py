"""A copy computes what the model's own forward computes, and running it leaves the model alone."""

from __future__ import annotations

import copy
import threading
import types

import pytest
import torch
from torch import nn

from torchboost import to_channels_last
from torchboost.algorithms.autocast import autocast_forward
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
    # The copy keeps the channels-last weights, so another kernel may add in another order: a few units in the last
    # place of float32. Under bfloat16, which the copy must not run in, the difference is a thousand times as large.
    torch.testing.assert_close(made(x), model(x), rtol=1e-5, atol=1e-6)
    assert seen == [1, 1]


def test_what_cannot_be_copied_is_said():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be copied.*outside the model"):
        twin(model)


def test_large_parameters_need_no_memory_where_only_the_shape_matters(monkeypatch):
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
