"""The reference's ``LessBN``, whose BatchNorms are really gone, and ``GradientAccumulation``, fed with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.conv_nets import ForeignNames, names_of_norms, train_a_little, vgg
from torchboost import GradientAccumulation, LessBN
from torchboost.errors import NoEffectWarning


def test_passes_through_to_the_network_it_changed():
    network = ForeignNames()
    wrapped = LessBN(network)
    x = torch.randn(2, 3, 8, 8)
    assert wrapped.network is network
    assert torch.equal(wrapped(x), network(x))
    assert len(names_of_norms(wrapped)) == 2
    assert wrapped.report.removed == ("main", "linear")
    assert set(wrapped.parameters()) == set(network.parameters())


def test_settings_and_optimizer_are_passed_on():
    network = vgg()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    wrapped = LessBN(network, fn_flag=True, keep_every=7, optimizer=optimizer)
    assert len(wrapped.report.removed) == 5
    assert wrapped.report.head == "28"
    assert set(optimizer.param_groups[0]["params"]) == set(wrapped.parameters())


def test_new_parameters_that_an_optimizer_misses_are_announced():
    network = vgg()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with pytest.warns(NoEffectWarning, match=r"new parameters \(28.multiplier\).*will not train; pass optimizer="):
        LessBN(network, fn_flag=True)
    assert optimizer.param_groups
    trained = vgg()
    optimizer = train_a_little(trained)
    with pytest.warns(NoEffectWarning, match=r"\(3.bias, 10.bias, 17.bias\)"):
        LessBN(trained)
    later = vgg()
    LessBN(later, fn_flag=True)  # the optimizer is made afterwards
    torch.optim.SGD(later.parameters(), lr=0.1)


def test_gradient_accumulation_is_the_window_under_its_old_name():
    model = nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = GradientAccumulation(2, optimizer)
    assert accumulate.steps == 2
    for expected in (False, True):
        accumulate("a loss of any kind", [torch.ones(2, 4), None])
        assert accumulate.updated == expected
    torch.testing.assert_close(model.weight.detach(), before - 0.1)
    accumulate.steps = 1
    accumulate("a loss of any kind", [None, torch.ones(2)])
    assert accumulate.updated
    for steps in (0, True, 1.5, "2"):
        with pytest.raises(ValueError, match=f"steps: found {steps!r}"):
            GradientAccumulation(steps, optimizer)
