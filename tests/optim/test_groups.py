from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchboost.optim.groups import FusionIndex, listed, rebuild_groups, split_group


def parameters(count: int) -> list[Tensor]:
    return [nn.Parameter(torch.full((2,), float(i))) for i in range(count)]


def positions(group: dict, all_params: list[Tensor]) -> list[int]:
    return [next(i for i, p in enumerate(all_params) if p is param) for param in group["params"]]


def test_split_group_keeps_options_and_order():
    ps = parameters(4)
    group = {"params": ps, "lr": 0.1, "gc": True, "param_names": list("abcd")}
    inside, outside = split_group(group, {ps[2], ps[0]}, {"gc": True})
    assert positions(inside, ps) == [0, 2]
    assert positions(outside, ps) == [1, 3]
    assert (inside["lr"], inside["gc"], inside["param_names"]) == (0.1, True, ["a", "c"])
    assert (outside["lr"], outside["param_names"]) == (0.1, ["b", "d"])
    assert "gc" not in outside
    assert len(group["params"]) == 4


def test_split_group_leaves_out_empty_parts():
    ps = parameters(2)
    assert [positions(g, ps) for g in split_group({"params": ps}, set(ps), {"gc": True})] == [[0, 1]]
    assert [positions(g, ps) for g in split_group({"params": iter(ps)}, set(), {"gc": True})] == [[0, 1]]


def test_rebuild_keeps_names_only_when_all_have_one():
    ps = parameters(3)
    origin = [{"params": ps[:1], "param_names": ["a"]}, {"params": ps[1:2], "param_names": ["b"], "lr": 1.0}]
    assert [group["param_names"] for group in rebuild_groups(ps[1:2], origin)] == [[], ["b"]]
    rebuilt = rebuild_groups(ps, origin)
    assert all("param_names" not in group for group in rebuilt)
    assert [positions(group, ps) for group in rebuilt] == [[0], [1], [2]]
    assert rebuilt[2]["lr"] == 1.0
    torch.optim.SGD(rebuilt, lr=0.1)


def test_listed_takes_a_tensor_or_any_iterable():
    ps = parameters(2)
    assert listed(ps[0])[0] is ps[0]
    assert len(listed(iter(ps))) == 2


@given(st.integers(1, 30), st.data())
def test_every_parameter_has_an_index_that_rises_at_the_points(count, data):
    points = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    index = FusionIndex.split(count, points)
    steps = [b - a for a, b in zip((1, *index.indices), index.indices, strict=False)]
    assert [i for i, step in enumerate(steps) if step] == points
    assert set(steps) <= {0, 1}
    ps = parameters(count)
    segments = index.segments(ps)
    assert [id(p) for segment in segments for p in segment] == [id(p) for p in ps]
    assert len(segments) == len(set(index.indices))


@pytest.mark.parametrize("points", [[3], [-1], [1, 1], [2, 1]])
def test_points_outside_or_out_of_order_are_refused(points):
    with pytest.raises(ValueError, match="split points: found"):
        FusionIndex.split(3, points)


def test_other_bad_indices_are_refused():
    with pytest.raises(TypeError, match="split points"):
        FusionIndex.split(3, [1.5])
    with pytest.raises(TypeError, match="indices"):
        FusionIndex((1, True))
    with pytest.raises(ValueError, match="indices"):
        FusionIndex((0, 1))
    with pytest.raises(ValueError, match="found 1 parameters for 2 indices"):
        FusionIndex((1, 2)).segments(parameters(1))
