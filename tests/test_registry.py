"""The registry and the level table are consistent, read-only data."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from tests.support.conv_nets import vgg
from torchboost.config import BoostConfig
from torchboost.plan import Plan
from torchboost.registry import LEVELS, REGISTRY, Facts
from torchboost.workloads.models import BasicBlock, ResNet


def test_the_tables_are_consistent_and_read_only():
    for name, entry in REGISTRY.items():
        assert entry.name == name == entry.algorithm.name
        assert entry.algorithm.__dataclass_params__.frozen  # pyright: ignore[reportAttributeAccessIssue]
        assert entry.summary
        if entry.section:
            section = BoostConfig.model_fields[entry.section].default
            settings = {f.name for f in dataclasses.fields(entry.algorithm)}  # pyright: ignore[reportArgumentType]
            assert {*entry.words, *entry.brings} <= set(type(section).model_fields)
            assert set(entry.words.values()) <= settings
        assert set(entry.brings.values()) <= set(REGISTRY)
    for row in LEVELS.values():
        for name, settings in row.items():
            REGISTRY[name].algorithm(**settings)
            json.dumps(dict(settings))
    for table in (REGISTRY, LEVELS, LEVELS["O1"]):
        with pytest.raises(TypeError):
            table["O1"] = {}


def test_o1_has_switches_only_and_o2_has_them_too():
    switches = {name for name in LEVELS["O1"] if REGISTRY[name].lever}
    assert switches == set(LEVELS["O1"]) == {name for name, entry in REGISTRY.items() if entry.lever}
    assert set(LEVELS["O2"]) - switches == {"less_bn", "gradient_centralization", "grad_freeze"}


def test_measure_looks_at_the_model():
    assert Facts.measure(nn.Linear(2, 2)).convolutions == 0
    assert Facts.measure(nn.Linear(2, 2)).trained is None
    assert Facts.measure(nn.BatchNorm1d(2)).trained is False
    one = Facts.measure(nn.Sequential(nn.Conv1d(2, 2, 1)))
    assert (one.convolutions, one.other_dimensions) == (1, 1)
    assert Facts.measure(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv2d(2, 2, 1))).other_dimensions == 1
    assert Facts.measure(nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 4))).largest_matrix == 32
    assert Facts.measure(nn.LSTM(16, 32)).largest_matrix == 4 * 32 * 32
    assert Facts.measure(nn.ReLU()).largest_matrix == 0
    bare = Facts.measure()
    assert (bare.convolutions, bare.device, bare.world_size, bare.nodes) == (None, "cpu", 1, 1)


def test_small_layers_compute_in_float32_unless_a_trial_says_otherwise():
    """The casts of small layers take longer than bfloat16 saves: a perceptron of width 64 took twice the time."""
    fast = {"half_precision": True, "convolutions": 0, "total_steps": 100}
    small, large = (Plan.of("O1", facts=Facts(largest_matrix=size, **fast)) for size in (65_535, 65_536))
    assert "autocast" not in {one.name for one in small.algorithms}
    assert "autocast" in {one.name for one in large.algorithms}
    assert "autocast" in {one.name for one in small.levers}
    said = {entry.name: entry.reason for entry in small.dropped}["autocast"]
    assert "the largest matrix has 65,535 entries" in said
    on_cuda = Plan.of("O1", facts=Facts(largest_matrix=1, device="cuda", **fast))
    assert "autocast" in {one.name for one in on_cuda.algorithms}
    asked = Plan.of("O1", {"extra": {"autocast": True}}, Facts(largest_matrix=1, **fast))
    assert "autocast" in {one.name for one in asked.algorithms}


def test_what_changes_the_training_is_for_networks_of_the_kind_that_it_was_measured_on():
    """On five one-dimensional convolutions LessBN cost 0.7 points."""
    layers, plans = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d)}, {}
    for dimension, (layer, batch_norm) in layers.items():
        stack = [part for _ in range(5) for part in (layer(4, 4, 3, padding=1), batch_norm(4), nn.ReLU())]
        facts = Facts.measure(nn.Sequential(*stack), total_steps=10_000)
        plans[dimension] = Plan.of("O2", facts=facts)
    parts = {"less_bn", "gradient_centralization", "grad_freeze"}
    assert parts <= {one.name for one in plans[2].algorithms}
    assert not parts & {one.name for one in plans[1].algorithms}
    said = {entry.name: entry.reason for entry in plans[1].dropped}
    assert all("two-dimensional convolutions with BatchNorm only" in said[name] for name in parts)
    asked = Plan.of("O2", {"extra": {"less_bn": True}}, Facts(convolutions=3, other_dimensions=3))
    assert "less_bn" in {one.name for one in asked.algorithms}


def test_a_network_without_batch_norms_is_not_frozen():
    """A transformer of patches, or a ConvNeXt, has convolutions too; freezing was measured on none."""
    patches = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 10))
    plan = Plan.of("O2", facts=Facts.measure(patches, total_steps=10_000))
    assert "grad_freeze" not in {one.name for one in plan.algorithms}
    assert "with BatchNorm only" in {entry.name: entry.reason for entry in plan.dropped}["grad_freeze"]


@pytest.mark.parametrize(
    "trunk",
    [
        [nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)],
        [nn.Conv3d(8, 8, 3, padding=1), nn.BatchNorm3d(8)],
        [nn.Linear(8, 8), nn.BatchNorm1d(8)],
    ],
)
def test_one_convolution_of_images_does_not_make_a_network_of_images(trunk):
    """Such as the front end of a network of speech whose blocks are one-dimensional."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), *trunk)
    on = {one.name for one in Plan.of("O2", facts=Facts.measure(model, total_steps=10_000)).algorithms}
    assert not on & {"less_bn", "gradient_centralization", "grad_freeze"}


def test_a_network_of_depthwise_convolutions_keeps_its_batch_norms():
    """On a MobileNetV2 LessBN cost 4 to 6 points."""
    convolutions = (nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3))
    plans = [Plan.of("O2", facts=Facts.measure(nn.Sequential(one, nn.BatchNorm2d(4)))) for one in convolutions]
    assert ["less_bn" in {one.name for one in plan.algorithms} for plan in plans] == [False, True]
    assert "depthwise" in {entry.name: entry.reason for entry in plans[0].dropped}["less_bn"]
    asked = Plan.of("O2", {"extra": {"less_bn": True}}, Facts(convolutions=3, grouped_convolutions=1))
    assert "less_bn" in {one.name for one in asked.algorithms}


def test_o2_removes_batch_norms_of_residual_blocks_only():
    """Without those of a plain stack a VGG was not shown to keep its accuracy."""
    networks = vgg(), ResNet(BasicBlock, [1, 1], width=8)
    left_out = []
    for model in networks:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan.of("O2", facts=Facts.measure(model, total_steps=10_000)).fit(model, optimizer)
        left_out.append({entry.name: entry.reason for entry in plan.dropped}.get("less_bn"))
    assert "residual blocks" in (left_out[0] or "")
    assert left_out[1] is None


def test_what_does_nothing_in_compiled_code_is_off_if_compilation_was_asked_for():
    asked = {"unpad": True, "sparse_head": True}
    plan = Plan.of("O0", {"extra": {**asked, "compile": True}})
    assert {a.name for a in plan.algorithms} == {"compile"}
    assert all("takes whole tensors" in dict(plan.dropped)[name] for name in asked)
    assert {a.name for a in Plan.of("O0", {"extra": {**asked, "compile": False}}).algorithms} == set(asked)
    assert "unpad" in {a.name for a in Plan.of("O1").algorithms}  # there the trial compiles in its place
