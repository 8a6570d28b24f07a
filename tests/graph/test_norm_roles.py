"""Blocks, branches and stacks are found for what they are."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.conv_nets import Basic, ForeignNames, InvertedResidual, PreActNet, vgg
from tests.support.models import BottleneckNet
from torchboost.graph.dataflow import trace
from torchboost.graph.norm_roles import plain_stacks, reasons_to_stay, residual_blocks, was_trained


def labels(flow, indices):
    return [flow.nodes[i].label for i in indices]


def test_main_branch_and_shortcut_by_weight_not_by_name():
    flow = trace(ForeignNames())
    (block,) = residual_blocks(flow)
    assert [labels(flow, norms) for norms in block.norms] == [["linear", "conv1"]]
    assert labels(flow, block.shortcut_norms) == ["main"]
    assert block.projects


def test_identity_shortcuts_project_nothing():
    assert [b.projects for b in residual_blocks(trace(nn.Sequential(Basic(3, 3), Basic(3, 4), Basic(4, 4, 2))))] == [
        False,
        True,
        True,
    ]


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


def test_a_stack_runs_through_pooling_and_gates():
    flow = trace(vgg((2, 1)))
    (stack,) = plain_stacks(flow, [])
    assert labels(flow, stack.layers) == ["0", "3", "7", "13", "15"]
    assert [norm is not None for norm in stack.norms] == [True, True, True, False, False]

    flow = trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), InvertedResidual(4, 6, 2)))
    first = plain_stacks(flow, residual_blocks(flow))[0]
    assert labels(flow, first.layers) == ["0", "3.expand.0", "3.depth.0", "3.project.0"]


def test_a_linear_end_closes_a_stack():
    net = nn.Sequential(
        InvertedResidual(3, 4, 2), InvertedResidual(4, 4), InvertedResidual(4, 6, 2), nn.Conv2d(6, 3, 1)
    )
    flow = trace(net)
    blocks = residual_blocks(flow)
    with_norms = [s for s in plain_stacks(flow, blocks) if any(n is not None for n in s.norms)]
    assert len(blocks) == 1
    assert [(labels(flow, s.layers)[-1], s.linear_end) for s in with_norms] == [
        ("0.project.0", True),
        ("2.project.0", True),
    ]


def kept(model, **settings):
    flow = trace(model)
    default = {"keep": "last", "keep_shortcut": False, "keep_every": 2, "blocks_per_norm": 1}
    reasons = reasons_to_stay(flow, residual_blocks(flow), **default | settings)
    return {flow.nodes[i].label: r for i, r in sorted(reasons.items())}


def test_pre_activation_keeps_the_last_of_the_branch():
    found = kept(PreActNet())
    assert {name for name, reason in found.items() if reason} == {"blocks.0.bn2", "blocks.1.bn2", "blocks.2.bn2"}
    assert [name for name, reason in found.items() if not reason] == ["blocks.0.bn1", "blocks.2.bn1"]


def test_every_nth_block_counts_from_the_last_that_kept():
    net = nn.Sequential(*[Basic(3, 3) for _ in range(4)], Basic(3, 4), *[Basic(4, 4) for _ in range(4)])
    last = {n: r for n, r in kept(net, blocks_per_norm=3).items() if n.endswith("bn2")}
    assert [bool(r) for r in last.values()] == [False, False, True, False, True, False, False, True, True]


def test_keep_every_counts_from_the_end():
    for every, expected in ((1, 7), (2, 4), (3, 3), (7, 2)):
        assert sum(bool(r) for r in kept(vgg(), keep_every=every).values()) == expected


def test_keep_every_of_one_keeps_the_blocks_without_skip_too():
    layers = [part for _ in range(3) for part in (nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())]
    model = nn.Sequential(*layers[:-1], nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    assert [sum(bool(r) for r in kept(model, keep_every=every).values()) for every in (1, 2)] == [3, 2]


def test_flow_of_an_untouched_tensor_is_stable():
    torch.manual_seed(0)
    assert kept(ForeignNames()) == kept(ForeignNames())


def test_the_narrowest_of_a_branch_stays_where_asked():
    model = BottleneckNet()
    blocks = sorted(name for name, reason in kept(model).items() if reason == "the last of its residual branch")
    reasons = kept(model, keep="narrowest")
    narrow = sorted(name for name, reason in reasons.items() if reason == "the narrowest of its residual branch")
    assert [name[-3:] for name in blocks] == ["bn3", "bn3"]
    assert [name[-3:] for name in narrow] == ["bn2", "bn2"]
    assert all(reasons[name] is None for name in blocks)
    assert kept(nn.Sequential(Basic(3, 3)), keep="narrowest").keys() == kept(nn.Sequential(Basic(3, 3))).keys()


def test_a_network_was_trained_where_statistics_or_counter_moved():
    norm, still = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=0.0)
    assert was_trained(nn.Linear(2, 2)) is None
    assert was_trained(nn.BatchNorm1d(3, track_running_stats=False)) is None
    for fresh in (norm, still, nn.LazyBatchNorm1d(), nn.BatchNorm1d(3, device="meta"), nn.Sequential(norm, norm)):
        assert was_trained(fresh) is False
    for model in (norm, still):
        model(torch.randn(4, 3))
        assert was_trained(nn.Sequential(nn.BatchNorm1d(3), model)) is True
    restored = nn.BatchNorm1d(3)
    restored.running_var.fill_(2.0)
    assert was_trained(restored) is True
