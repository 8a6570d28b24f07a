"""The reference's ``LessBN``: a module around a network whose BatchNorms are really gone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.conv_nets import ForeignNames, names_of_norms, vgg
from torchboost.compat.wrappers import LessBN
from torchboost.core.normalized_linear import NormalizedLinear
from torchboost.errors import IncompatibleError, NoEffectWarning


def test_passes_through_to_the_network_it_changed():
    network = ForeignNames()
    wrapped = LessBN(network)
    x = torch.randn(2, 3, 8, 8)
    assert wrapped.network is network
    assert torch.equal(wrapped(x), network(x))
    assert len(names_of_norms(wrapped)) == 2
    assert wrapped.report.removed == ("main", "linear")
    assert set(wrapped.parameters()) == set(network.parameters())


def test_normalises_one_head_and_keeps_its_bias():
    """Regression: the reference replaces the last dense layer of every container and drops the bias."""
    body = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    network = nn.Sequential(body, nn.Linear(4, 3))
    bias = network[1].bias
    wrapped = LessBN(network, True)
    heads = [m for m in wrapped.modules() if isinstance(m, NormalizedLinear)]
    assert len(heads) == 1
    assert heads[0] is network[1]
    assert heads[0].bias is bias
    assert sum(type(m) is nn.Linear for m in wrapped.modules()) == 2
    assert wrapped(torch.randn(5, 4)).shape == (5, 3)


def test_settings_and_optimizer_are_passed_on():
    network = vgg()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    wrapped = LessBN(network, fn_flag=True, keep_every=7, optimizer=optimizer)
    assert len(wrapped.report.removed) == 5
    assert wrapped.report.head == "28"
    assert set(optimizer.param_groups[0]["params"]) == set(wrapped.parameters())


def test_nothing_to_do_warns_and_wrapped_networks_are_refused():
    with pytest.warns(NoEffectWarning):
        LessBN(nn.Linear(2, 2))
    with pytest.raises(IncompatibleError, match="DataParallel"):
        LessBN(nn.DataParallel(vgg()))
