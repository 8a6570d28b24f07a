"""What modules tell without a pass through the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.conv_nets import Basic, InvertedResidual, RefusesTracing, vgg
from tests.support.removal_nets import NormAct
from torchboost.graph.structure import assume, norm_tail
from torchboost.workloads.models import Bottleneck, ResNet


def is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def test_residual_blocks_become_additions():
    flow = assume(RefusesTracing(), is_leaf)
    joins = [flow.branches(n.index) for n in flow.nodes if n.kind == "add"]
    sizes = [sorted(len(path) for path in branches.paths) for branches in joins]
    assert flow.traced == "structure"
    assert sizes == [[0, 5], [2, 5], [0, 5]]


def test_projections_are_recognised_before_or_behind_the_main_branch():
    class Reversed(Basic):
        def __init__(self):
            super().__init__(4, 8, 2)
            shortcut = self.downsample
            del self.downsample
            inner = dict(self.named_children())
            for name in inner:
                delattr(self, name)
            self.shortcut = shortcut
            for name, child in inner.items():
                setattr(self, name, child)

    flow = assume(nn.Sequential(Reversed()), is_leaf)
    join = next(n.index for n in flow.nodes if n.kind == "add")
    main, shortcut = flow.branches(join).paths
    assert [type(flow.nodes[i].module).__name__ for i in sorted(shortcut)] == ["Conv2d", "BatchNorm2d"]
    assert len(main) == 5


def test_counts_the_blocks_of_a_bottleneck_network():
    flow = assume(ResNet(Bottleneck, [1, 2, 1], width=4), is_leaf)
    assert sum(n.kind == "add" for n in flow.nodes) == 4


def test_squeeze_and_excitation_does_not_hide_a_block():
    flow = assume(nn.Sequential(InvertedResidual(4, 4), InvertedResidual(4, 8, 2)), is_leaf)
    assert sum(n.kind == "add" for n in flow.nodes) == 1


def test_plain_stacks_stay_plain():
    flow = assume(vgg(), is_leaf)
    assert not any(n.kind == "add" for n in flow.nodes)
    assert all(n.inputs == (n.index - 1,) for n in flow.nodes[1:])


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


@pytest.mark.parametrize("kind", list(customised()))
def test_a_batch_norm_that_someone_extended_is_not_understood(kind):
    assert norm_tail(customised()[kind]) is None
