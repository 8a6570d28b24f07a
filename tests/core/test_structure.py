"""What the module tree suggests where a model can be neither traced nor run."""

from __future__ import annotations

from torch import nn

from tests.support.conv_nets import Basic, InvertedResidual, RefusesTracing, vgg
from torchboost.core.structure import assume
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
