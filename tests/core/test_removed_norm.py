"""What stands in for a BatchNorm remembers it, adds what its class adds, and says so if it is asked for more."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.support.removal_nets import NormAct
from torchboost.core.removed_norm import RemovedNorm


def test_it_answers_the_settings_and_refuses_the_tensors():
    norm = nn.BatchNorm2d(6, eps=1e-3, momentum=None, affine=False)
    norm.group = "stem"
    stand_in = RemovedNorm.of(norm.eval())
    assert (stand_in.num_features, stand_in.eps, stand_in.momentum, stand_in.affine) == (6, 1e-3, None, False)
    assert (stand_in.group, stand_in.track_running_stats, stand_in.training) == ("stem", True, False)
    assert not stand_in.state_dict()
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert not hasattr(stand_in, name)
    with pytest.raises(AttributeError, match=r"over 6 channels was removed by less_bn, so it has no 'weight'"):
        _ = stand_in.weight
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = stand_in.nothing_like_it


def test_it_hands_its_input_on_or_a_copy():
    x = torch.randn(2, 3, 4, 4)
    same, new = RemovedNorm.of(nn.BatchNorm2d(3), copies=False), RemovedNorm.of(nn.BatchNorm2d(3))
    assert same.is_identity
    assert same(x) is x
    assert not new.is_identity
    assert new(x) is not x
    assert torch.equal(new(input=x), x)
    assert "copies" in repr(new)


def test_what_a_subclass_adds_stays_under_its_name():
    torch.manual_seed(0)
    norm = NormAct(3, nn.PReLU(), nn.Dropout2d(0.5))
    stand_in = RemovedNorm.of(norm, copies=False)
    x = torch.randn(2, 3, 4, 4)
    assert stand_in.act is norm.act
    assert list(stand_in.state_dict()) == ["act.weight"]
    assert torch.equal(stand_in.eval()(x), norm.act(x))
    assert not stand_in.is_identity


def test_it_refuses_what_it_does_not_understand():
    norm = nn.BatchNorm2d(3)
    norm.register_forward_hook(print)
    with pytest.raises(ValueError, match="computes more"):
        RemovedNorm.of(norm)


def test_copies_remember_the_layer_of_the_copy():
    model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3))
    model[1] = RemovedNorm.of(model[1], layer=model[0])
    assert model[1].adds_bias
    assert not RemovedNorm.of(nn.BatchNorm2d(3), layer=nn.Conv2d(3, 3, 1)).adds_bias
    assert dict(model[1].named_modules()) == {"": model[1]}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[1].layer is twin[0]
        assert twin[0] is not model[0]
