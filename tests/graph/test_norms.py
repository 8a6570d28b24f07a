"""The roles of BatchNorms, what stands in for one, and the sizes of activations without them."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.conv_nets import Basic, vgg
from tests.support.removal_nets import NormAct
from torchboost.graph.norms import (
    NormalizedLinear,
    norm_tail,
    rescale_layers,
    residual_blocks,
    was_trained,
)
from torchboost.graph.removed_norm import RemovedNorm
from torchboost.graph.trace import trace


def labels(flow, indices):
    return [flow.nodes[i].label for i in indices]


def test_an_addition_around_a_block_is_no_block():
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(Basic(3, 3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))

        def forward(self, x):
            return x + self.inner(x)

    flow = trace(Long())
    assert len(residual_blocks(flow)) == 1


def test_two_computing_branches_are_both_main():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = vgg((2,))[:6], vgg((2,))[:6]

        def forward(self, x):
            return self.a(x) + self.b(x)

    flow = trace(Two())
    (block,) = residual_blocks(flow)
    assert [labels(flow, norms) for norms in block.norms] == [["a.1", "a.4"], ["b.1", "b.4"]]
    assert not block.shortcut_norms


def test_a_network_was_trained_where_statistics_or_counter_moved():
    norm, still = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=0.0)
    without = (nn.Linear(2, 2), nn.BatchNorm1d(3, track_running_stats=False))
    for fresh in (
        *without,
        norm,
        still,
        nn.LazyBatchNorm1d(),
        nn.BatchNorm1d(3, device="meta"),
        nn.Sequential(norm, norm),
    ):
        assert was_trained(fresh) is False
    for model in (norm, still):
        model(torch.randn(4, 3))
        assert was_trained(nn.Sequential(nn.BatchNorm1d(3), model)) is True
    restored = nn.BatchNorm1d(3)
    restored.running_var.fill_(2.0)
    assert was_trained(restored) is True


class Sandwich(nn.BatchNorm2d):
    """Something else than modules in a row behind the normalisation."""

    def __init__(self, kind: str):
        super().__init__(3)
        self.kind, self.act, self.scale = kind, nn.ReLU(), 2.0

    def forward(self, x):
        if self.kind == "in front":
            return super().forward(self.act(x))
        if self.kind == "other numbers":
            return self.act(F.batch_norm(x, self.running_mean, self.running_var, training=self.training, eps=1e-2))
        out = super().forward(x)
        if self.kind == "function":
            return self.act(out.relu())
        if self.kind == "in place":
            out.mul_(self.scale)
            return self.act(out)
        if self.kind == "in training":
            return self.act(out) if self.training else out
        return self.act(out) + x


def test_what_a_batch_norm_ends_with():
    assert norm_tail(nn.BatchNorm1d(3)) == norm_tail(nn.BatchNorm3d(3, affine=False)) == ()
    assert norm_tail(nn.SyncBatchNorm(3)) == ()
    norm = NormAct(3, nn.SiLU())
    assert norm_tail(norm) == norm_tail(norm.eval()) == ("drop", "act")
    assert norm.num_batches_tracked == 0
    assert norm_tail(nn.GroupNorm(1, 3)) is None
    for kind in ("in front", "other numbers", "function", "in place", "in training", "skip"):
        assert norm_tail(Sandwich(kind)) is None


def test_a_part_that_is_none_is_not_run():
    class Optional(nn.BatchNorm2d):
        def __init__(self, act):
            super().__init__(3)
            self.register_module("act", act)

        def forward(self, x):
            x = super().forward(x)
            return x if self.act is None else self.act(x)

    assert norm_tail(Optional(None)) == ()
    assert norm_tail(Optional(nn.ReLU())) == ("act",)


def customised() -> dict[str, nn.Module]:
    norms = {name: nn.BatchNorm2d(3) for name in ("hook", "pre", "gradient", "forward", "buffer", "parametrized")}
    norms["hook"].register_forward_hook(lambda *_: None)
    norms["pre"].register_forward_pre_hook(lambda *_: None)
    norms["gradient"].weight.register_hook(lambda gradient: gradient)
    norms["forward"].forward = lambda x: x
    norms["buffer"].register_buffer("extra", torch.zeros(1))
    nn.utils.parametrize.register_parametrization(norms["parametrized"], "weight", nn.Softplus())
    return norms


class Clamped(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).clamp(-20, 20)  # usual values do not reach it


class Stopping(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input.detach())


@pytest.mark.parametrize("kind", [Clamped, Stopping])
def test_arithmetic_that_changes_no_usual_value_is_seen(kind):
    assert norm_tail(kind(3)) is None


def test_a_batch_norm_that_someone_extended_is_not_understood():
    for kind in list(customised()):
        assert norm_tail(customised()[kind]) is None


def mean_squares(model, x, kinds):
    found = []
    handles = [
        m.register_forward_hook(lambda m, i, out: found.append(float(out.square().mean())))
        for m in model.modules()
        if isinstance(m, kinds)
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


def test_every_kind_of_layer():
    for layer in [
        nn.Conv1d(64, 32, 3, bias=False),
        nn.Conv2d(64, 32, 3, groups=4, bias=False),
        nn.Conv2d(64, 64, 3, groups=64, bias=False),
        nn.Conv3d(64, 32, 2, bias=False),
        nn.ConvTranspose2d(64, 32, 4, stride=2, bias=False),
    ]:
        model = nn.Sequential(layer)
        flow = trace(model)
        rescale_layers(flow, {flow.calls(layer)[0]: 1.0})
        x = torch.randn(8, 64, *[12] * len(layer.kernel_size))
        assert mean_squares(model, x, type(layer))[0] == pytest.approx(1, rel=0.25)


def test_zero_weights_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.zeros_(model[0].weight)
    flow = trace(model)
    assert rescale_layers(flow, {flow.calls(model[0])[0]: 1.0}) == []
    assert not model[0].weight.any()


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
    assert same(x) is x
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


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_it_can_be_scripted_traced_and_exported():
    for copies, kind in itertools.product([False, True], [nn.BatchNorm2d, TwoSteps]):
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


def test_taking_a_layer_over_shares_its_parameters_and_draws_no_random_number():
    linear = torch.nn.Linear(5, 3, dtype=torch.float64).eval()
    before = torch.get_rng_state()
    head = NormalizedLinear(linear)
    assert torch.equal(torch.get_rng_state(), before)
    assert (head.weight is linear.weight, head.bias is linear.bias, head.training) == (True, True, False)
    assert head.multiplier.dtype is torch.float64
    assert head.multiplier.tolist() == [1.0]


def test_tiny_inputs_stay_finite_forward_and_backward():
    head = NormalizedLinear(nn.Linear(5, 3))
    x = torch.zeros(2, 5, requires_grad=True)
    F.cross_entropy(head(x), torch.tensor([0, 1])).backward()
    assert torch.isfinite(head(x)).all()
    assert all(torch.isfinite(p.grad).all() for p in [*head.parameters(), x])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_the_head_can_be_scripted_traced_and_exported():
    for bias in [True, False]:
        head, x = NormalizedLinear(nn.Linear(5, 3, bias)), torch.randn(2, 5)
        expected = head(x)
        assert torch.equal(torch.jit.script(head)(x), expected)
        assert torch.equal(torch.jit.trace(head, x)(x), expected)
        assert torch.equal(torch.export.export(head, (x,)).module()(x), expected)
