"""A normalisation may hand its input on only where nothing that shares the memory is written to."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.removal_nets import NormAct, PreAct, RepVGG
from torchboost.graph.aliasing import may_collide
from torchboost.graph.dataflow import trace


def conv() -> nn.Conv2d:
    return nn.Conv2d(4, 4, 1)


def collides(model: nn.Module, norm: nn.Module, **settings) -> bool:
    flow = trace(model, sample=torch.randn(2, 4, 6, 6))
    assert flow.traced in ("fx", "run")
    return may_collide(flow, flow.calls(norm)[0], **settings)


class Around(nn.Module):
    """``step`` gets the input, what the norm gives, and a convolution."""

    def __init__(self, step, traceable: bool):
        super().__init__()
        self.norm, self.conv, self.step, self.traceable = nn.BatchNorm2d(4), conv(), step, traceable

    def forward(self, x):
        if not self.traceable and x.sum() > float("inf"):
            return x
        x = x.tanh()
        return self.step(x, self.norm(x), self.conv)


def add_in_place(x, y, conv):
    y += conv(x)
    return conv(y)


def write_late(x, y, conv):
    x.mul_(2)
    return conv(y)


def write_to_a_view(x, y, conv):
    y.flatten(1).relu_()
    return conv(y) + x


def write_to_a_sibling(x, y, conv):
    first, second = y.chunk(2, 1)
    first.neg_()
    return conv(torch.cat([second, x[:, :2]], 1))


HARMLESS = {
    "reads": lambda x, y, conv: conv(y) + x,
    "activates": lambda x, y, conv: conv(torch.sigmoid(y)) + x,
    "adds": lambda x, y, conv: conv((y + x).contiguous()).relu_(),
    "writes to the branch": lambda x, y, conv: conv(y).add_(x),
}
HARMFUL = {
    "keyword": lambda x, y, conv: conv(F.relu(y, inplace=True)) + x,
    "positional": lambda x, y, conv: conv(F.hardtanh(y, -1.0, 1.0, True)) + x,
    "method": lambda x, y, conv: conv(y.relu_()) + x,
    "+=": add_in_place,
    "the input, later": write_late,
    "a view": write_to_a_view,
    "a sibling": write_to_a_sibling,
    "handed out": lambda x, y, conv: (conv(x), y),
}


@pytest.mark.parametrize("traceable", [True, False], ids=["symbolic", "run"])
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        *[pytest.param(step, False, id=name) for name, step in HARMLESS.items()],
        *[pytest.param(step, True, id=name) for name, step in HARMFUL.items()],
    ],
)
def test_by_what_happens_around_it(step, expected, traceable):
    model = Around(step, traceable)
    assert collides(model, model.norm) is expected


def test_behind_a_layer_that_feeds_nothing_else_all_is_safe():
    model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv())
    assert not collides(model, model[1])
    model[0].register_forward_hook(lambda *_: None)  # it may keep what it sees
    assert collides(model, model[1])


def test_blocks_that_write_in_place():
    for style, expected in {"module": True, "method": True, "keyword": True, "plain": False}.items():
        model = nn.Sequential(conv(), PreAct(4, style), conv())
        assert collides(model, model[1].bn1) is expected
        assert not collides(model, model[1].bn2)
    model = nn.Sequential(conv(), RepVGG(4), conv())
    assert collides(model, model[1].same)
    assert not collides(model, model[1].wide[1])


def test_another_norm_that_is_left_out_hands_the_memory_on():
    model = nn.Sequential(nn.Tanh(), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv())
    flow = trace(model)
    first, second = (flow.calls(model[at])[0] for at in (1, 2))
    assert not may_collide(flow, first)
    assert may_collide(flow, first, {first, second})


def test_an_activation_inside_the_norm_writes_too():
    model = nn.Sequential(nn.Tanh(), NormAct(4), conv())
    assert collides(model, model[1])
    model = nn.Sequential(conv(), NormAct(4), conv())
    assert not collides(model, model[1])
