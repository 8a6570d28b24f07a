"""What stands in for a BatchNorm remembers it, adds what its class adds, and says so if it is asked for more."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.removal_nets import NormAct
from torchboost.graph.removed_norm import RemovedNorm


def test_it_answers_the_settings():
    norm = nn.BatchNorm2d(6, eps=1e-3, momentum=None, affine=False)
    norm.group = "stem"
    stand_in = RemovedNorm(norm.eval())
    assert (stand_in.num_features, stand_in.eps, stand_in.momentum, stand_in.affine) == (6, 1e-3, None, False)
    assert (stand_in.group, stand_in.track_running_stats, stand_in.training) == ("stem", True, False)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = stand_in.nothing_like_it


def test_it_hands_its_input_on_or_a_copy():
    x = torch.randn(2, 3, 4, 4)
    same, new = RemovedNorm(nn.BatchNorm2d(3), copies=False), RemovedNorm(nn.BatchNorm2d(3))
    assert same.is_identity
    assert same(x) is x
    assert not new.is_identity
    assert new(x) is not x
    assert torch.equal(new(input=x), x)
    assert "copies" in repr(new)


def test_what_a_subclass_adds_stays_under_its_name():
    torch.manual_seed(0)
    norm = NormAct(3, nn.PReLU(), nn.Dropout2d(0.5))
    stand_in = RemovedNorm(norm, copies=False)
    x = torch.randn(2, 3, 4, 4)
    assert stand_in.act is norm.act
    assert list(stand_in.state_dict()) == list(norm.state_dict())
    assert torch.equal(stand_in.eval()(x), norm.act(x))
    assert not stand_in.is_identity


def test_it_refuses_what_it_does_not_understand():
    norm = nn.BatchNorm2d(3)
    norm.register_forward_hook(print)
    with pytest.raises(ValueError, match="computes more"):
        RemovedNorm(norm)


def test_copies_remember_the_layer_of_the_copy():
    model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3))
    model[1] = RemovedNorm(model[1], layer=model[0])
    assert model[1].adds_bias
    assert not RemovedNorm(nn.BatchNorm2d(3), layer=nn.Conv2d(3, 3, 1)).adds_bias
    assert dict(model[1].named_modules()) == {"": model[1]}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[1].layer is twin[0]
        assert twin[0] is not model[0]


class TwoSteps(nn.BatchNorm2d):
    """What runs behind the normalisation was registered in another order, and beside something that does not run."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.second, self.unused, self.first = nn.ReLU(inplace=True), nn.Sigmoid(), nn.PReLU(init=-0.5)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        x = F.batch_norm(x, mean, variance, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.second(self.first(x))


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, TwoSteps])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_it_can_be_scripted_traced_and_exported(kind, copies):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), RemovedNorm(kind(3), copies=copies), nn.Dropout(0.0))
    x = torch.randn(2, 3, 4, 4)
    expected = model(x)
    assert (expected.min() < 0) == (kind is not TwoSteps)
    assert torch.equal(torch.jit.script(model)(x), expected)
    assert torch.equal(torch.jit.trace(model, x)(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)


def test_what_runs_behind_it_runs_in_its_order():
    norm = TwoSteps(3).eval()
    stand_in, x = RemovedNorm(norm), torch.randn(2, 3, 4, 4)
    before = x.clone()
    assert torch.equal(stand_in(x), norm.first(before).relu())
    assert torch.equal(x, before)
    assert set(stand_in.state_dict()) == set(norm.state_dict())


def test_a_norm_that_runs_one_module_twice_is_not_understood():
    class Twice(nn.BatchNorm2d):
        def __init__(self):
            super().__init__(3)
            self.act = nn.PReLU()

        def forward(self, x):
            return self.act(self.act(super().forward(x)))

    with pytest.raises(ValueError, match="computes more"):
        RemovedNorm(Twice())


def test_a_whole_model_says_what_it_needs_to_load_and_a_copy_says_nothing(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), RemovedNorm(nn.BatchNorm1d(3)))
    assert all(type(c[1]) is RemovedNorm for c in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
    with pytest.warns(UserWarning, match=r"loads only if torchboost.*save model.state_dict\(\)"):
        torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert type(again[1]) is RemovedNorm
