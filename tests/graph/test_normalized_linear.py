from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchboost.graph.normalized_linear import NormalizedLinear


def reference(x, weight, bias, multiplier):
    def unit(t):
        return t / t.square().sum(-1, keepdim=True).clamp(min=1e-4).sqrt()

    out = unit(x) @ unit(weight).T
    return multiplier * (out if bias is None else out + bias)


@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_formula_and_shares_the_parameters(bias):
    linear = nn.Linear(5, 3, bias=bias).eval()
    head = NormalizedLinear.from_linear(linear)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert not head.training
    with torch.no_grad():
        head.multiplier.fill_(3.5)
    x = torch.randn(7, 5)
    torch.testing.assert_close(head(x), reference(x, linear.weight, linear.bias, 3.5))


def test_taking_a_layer_over_draws_no_random_number():
    linear = torch.nn.Linear(5, 3, dtype=torch.float64)
    before = torch.get_rng_state()
    head = NormalizedLinear.from_linear(linear)
    assert torch.equal(torch.get_rng_state(), before)
    assert head.weight is linear.weight
    assert head.multiplier.dtype is torch.float64
    assert head.multiplier.tolist() == [1.0]


def test_tiny_inputs_stay_finite_forward_and_backward():
    head = NormalizedLinear(5, 3)
    x = torch.zeros(2, 5, requires_grad=True)
    F.cross_entropy(head(x), torch.tensor([0, 1])).backward()
    assert torch.isfinite(head(x)).all()
    assert all(torch.isfinite(p.grad).all() for p in [*head.parameters(), x])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_it_can_be_scripted_traced_and_exported(bias):
    head, x = NormalizedLinear(5, 3, bias), torch.randn(2, 5)
    expected = head(x)
    assert torch.equal(torch.jit.script(head)(x), expected)
    assert torch.equal(torch.jit.trace(head, x)(x), expected)
    assert torch.equal(torch.export.export(head, (x,)).module()(x), expected)


def test_repr_names_the_sizes():
    assert repr(NormalizedLinear(5, 3)) == "NormalizedLinear(in_features=5, out_features=3, bias=True)"


@pytest.mark.parametrize("case", ["common_head_last_fn_nobias", "common_head_last_fn_bias"])
def test_equals_the_oracle(oracle, case):
    meta, arrays = oracle[case]
    bias = "bias" in arrays
    head = NormalizedLinear(meta["hyper"]["in_channels"], meta["hyper"]["out_channels"], bias=bias)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(torch.from_numpy(arrays[name]))
    x = torch.from_numpy(arrays["x"]).requires_grad_()
    out = head(x)
    out.backward(torch.from_numpy(arrays["dout"]))
    got = {"out": out.detach(), "grad_x": x.grad} | {f"grad_{n}": p.grad for n, p in head.named_parameters()}
    for name, value in got.items():
        torch.testing.assert_close(value, torch.from_numpy(arrays[name]), **meta["tolerance"])
