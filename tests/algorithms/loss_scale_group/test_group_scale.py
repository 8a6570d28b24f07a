"""Scales per group: who moves, who stays, what a checkpoint holds."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from torchboost.algorithms.loss_scale_group.borders import Ratios
from torchboost.algorithms.loss_scale_group.group_scale import GROUP_RULE, GroupScaler, checked_scales
from torchboost.algorithms.loss_scale_group.rule import ScaleRule


class Scaler(GroupScaler):
    def __init__(self, *groups: list[nn.Parameter], **options) -> None:
        self.groups = groups
        self.ratios = Ratios(len(groups) + 1)
        names = ["rest", *(f"g{i}" for i in range(len(groups)))]
        super().__init__(names, [2.0**10] * len(names), self.ratios, **options)

    def parameters_of(self, group: int):
        return self.groups[group - 1]


def params(n: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(n)]


def play(scaler: GroupScaler, optimizer: torch.optim.Optimizer, values: list[float]) -> None:
    own = [p for group in optimizer.param_groups for p in group["params"]]
    scaler.scale(torch.ones(()))
    for param, value in zip(own, values, strict=True):
        param.grad = torch.full((2,), value)
    scaler.step(optimizer)
    scaler.update()


def test_the_group_that_overflows_shrinks_and_the_others_grow():
    a, b, rest = params(3)
    optimizer = torch.optim.SGD([a, b, rest], lr=1.0)
    scaler = Scaler([a], [b], pinned=False)
    play(scaler, optimizer, [1024.0, math.inf, 1024.0])
    assert [p.tolist() for p in (a, b, rest)] == [[1.0, 1.0]] * 3
    found = {status.name: status for status in scaler.report}
    grown, shrunk = 2.0**10 * 2 ** (1 / 1000), 2.0**9.5
    assert [found[n].scale for n in ("rest", "g0", "g1")] == pytest.approx([grown, grown, shrunk])
    assert [found[n].overflows for n in ("rest", "g0", "g1")] == [0, 0, 1]
    assert scaler.get_scale() == pytest.approx(shrunk)
    assert scaler.overflowed
    # 2 ** 9.5 multiplies as 2 ** 9.
    play(scaler, optimizer, [1024.0, 512.0, 1024.0])
    assert [p.tolist() for p in (a, b, rest)] == [[0.0, 0.0]] * 3
    assert not scaler.overflowed


def test_a_pinned_rest_stays_one():
    a, rest = params(2)
    optimizer = torch.optim.SGD([a, rest], lr=1.0)
    scaler = Scaler([a])
    play(scaler, optimizer, [1024.0, 1.0])
    assert [p.tolist() for p in (a, rest)] == [[0.0, 0.0]] * 2
    assert [status.name for status in scaler.report] == ["g0"]


def test_the_borders_are_open_only_between_scale_and_update():
    (a,) = params(1)
    optimizer = torch.optim.SGD([a], lr=1.0)
    scaler = Scaler([a])
    assert scaler.ratios.between(1, 0) == 1
    scaler.scale(torch.ones(()))
    assert scaler.ratios.between(1, 0) == 2.0**10
    assert scaler.ratios.between(0, 1) == 2.0**-10
    a.grad = torch.ones(2)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.ratios.between(1, 0) == 1


def test_replaced_parameters_find_their_group():
    old, new = params(2)
    scaler = Scaler([old])
    play(scaler, torch.optim.SGD([old], lr=1.0), [1024.0])
    scaler.groups = ([new],)
    play(scaler, torch.optim.SGD([new], lr=1.0), [1024.0])
    assert new.tolist() == [0.0, 0.0]


def test_a_checkpoint_goes_on_and_another_is_refused():
    a, b = params(2)
    optimizer = torch.optim.SGD([a, b], lr=0.0)
    rule = ScaleRule(growth=2.0, shrink=0.5, window=3)
    scaler, again = (Scaler([a], [b], rule=rule) for _ in range(2))
    for values in ([1.0, 1.0], [1.0, math.nan], [1.0, 1.0]):
        play(scaler, optimizer, values)
    scaler.scale(torch.ones(()))
    again.load_state_dict(copy.deepcopy(scaler.state_dict()))
    assert again.ratios.between(1, 0) == scaler.ratios.between(1, 0) == 2.0**11
    for each in (scaler, again):
        play(each, optimizer, [1.0, 1.0])
        play(each, optimizer, [1.0, 1.0])
    assert scaler.state_dict() == again.state_dict()
    other = Scaler([a])
    with pytest.raises(
        ValueError, match=r"holds the groups \['rest', 'g0', 'g1'\], but this scaler has \['rest', 'g0'\]"
    ):
        other.load_state_dict(scaler.state_dict())


@pytest.mark.parametrize(
    ("scales", "error", "text"),
    [
        ([1.0], ValueError, "found 1 scales for 2 groups"),
        ([1.0, -1.0], ValueError, "above 0"),
        ("4", TypeError, "init_scale"),
        (0.5, ValueError, "floor"),
    ],
)
def test_bad_scales(scales, error, text):
    with pytest.raises(error, match=text):
        checked_scales(scales, 2, GROUP_RULE)
