"""Rescaled weights give activations of unit mean square."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.conv_nets import Basic
from torchboost.graph.dataflow import trace
from torchboost.graph.norm_roles import WEIGHTED
from torchboost.graph.variance import rescale_layers


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


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_a_deep_stack_keeps_unit_scale(scale):
    layers = [nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()) for _ in range(12)]
    model = nn.Sequential(*layers)
    for layer in layers:
        nn.init.normal_(layer[0].weight, std=scale)
    draw = layers[3][0].weight.detach().clone()
    flow = trace(model)
    changed = rescale_layers(flow, {n.index: 1.0 for n in flow.instances(WEIGHTED)})
    assert changed == [layer[0] for layer in layers]
    assert all(0.5 < s < 2 for s in mean_squares(model, torch.randn(256, 256), nn.Linear))
    ratio = layers[3][0].weight / draw
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(64, 32, 3, bias=False),
        nn.Conv2d(64, 32, 3, groups=4, bias=False),
        nn.Conv2d(64, 64, 3, groups=64, bias=False),
        nn.Conv3d(64, 32, 2, bias=False),
        nn.ConvTranspose2d(64, 32, 4, stride=2, bias=False),
    ],
    ids=["1d", "grouped", "depthwise", "3d", "transposed"],
)
def test_every_kind_of_layer(layer):
    model = nn.Sequential(layer)
    flow = trace(model)
    rescale_layers(flow, {flow.calls(layer)[0]: 1.0})
    x = torch.randn(8, 64, *[12] * len(layer.kernel_size))
    assert mean_squares(model, x, type(layer))[0] == pytest.approx(1, rel=0.25)


def test_a_projection_brings_the_stream_back_to_one():
    """Two additions double the stream; the next projection starts from one again."""
    blocks = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), *[Basic(32, 32) for _ in range(3)])
    last = Basic(32, 64, 2)
    model = nn.Sequential(blocks, last)
    projection, norm = last.downsample
    flow = trace(model)
    removed = {flow.calls(norm)[0]}
    rescale_layers(flow, {flow.calls(projection)[0]: 1.0}, removed)
    of_projection = mean_squares(model.train(), torch.randn(16, 3, 16, 16), nn.Conv2d)[-3]
    assert of_projection == pytest.approx(1, rel=0.5)


def test_zero_weights_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    nn.init.zeros_(model[0].weight)
    flow = trace(model)
    assert rescale_layers(flow, {flow.calls(model[0])[0]: 1.0}) == []
    assert not model[0].weight.any()
