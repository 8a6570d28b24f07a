import copy

import pytest
import torch
from torch import nn

from torchboost.core.plasticity import Plasticity


def groups(count: int = 3) -> list[list[nn.Parameter]]:
    return [[nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((2, 2), 2.0))] for _ in range(count)]


def move(group: list[nn.Parameter], share: float) -> None:
    with torch.no_grad():
        for parameter in group:
            parameter.mul_(1 + share)


def test_a_leading_group_that_moves_less_than_the_average_is_frozen():
    parameters = groups()
    plasticity = Plasticity(parameters, threshold=1.0, tolerance=0.1)
    for group, share in zip(parameters, (0.01, 0.2, 0.3), strict=True):
        move(group, share)
    assert plasticity.decide(0) == 1
    assert plasticity.measured == pytest.approx([0.01, 0.2, 0.3], rel=1e-4)


def test_one_that_moves_more_goes_on_training_whatever_comes_behind_it():
    parameters = groups()
    plasticity = Plasticity(parameters, threshold=1.0, tolerance=0.1)
    for group, share in zip(parameters, (0.3, 0.01, 0.2), strict=True):
        move(group, share)
    assert plasticity.decide(0) == 0


def test_the_threshold_is_a_multiple_of_the_average():
    for threshold, frozen in ((0.4, 0), (0.6, 1)):
        parameters = groups(2)
        plasticity = Plasticity(parameters, threshold=threshold, tolerance=0.1)
        for group, share in zip(parameters, (0.1, 0.3), strict=True):
            move(group, share)
        assert plasticity.decide(0) == frozen


def test_the_last_group_is_never_frozen():
    parameters = groups(2)
    plasticity = Plasticity(parameters, threshold=10.0, tolerance=0.1)
    assert plasticity.decide(0) == 1
    assert plasticity.decide(1) == 1


def test_a_rising_loss_trains_everything_again_and_then_waits():
    plasticity = Plasticity(groups(4), threshold=10.0, tolerance=0.1)
    plasticity.observe(torch.tensor(1.0))
    assert plasticity.decide(0) == 1
    plasticity.observe(torch.tensor(1.05))
    assert plasticity.decide(1) == 2
    plasticity.observe(torch.tensor(1.0))
    plasticity.observe(torch.tensor(1.3))
    assert plasticity.decide(2) == 0
    for frozen in (0, 0, 1):
        plasticity.observe(torch.tensor(0.9))
        assert plasticity.decide(0) == frozen


def test_each_window_is_measured_from_its_own_start():
    parameters = groups(2)
    plasticity = Plasticity(parameters, threshold=0.0, tolerance=0.1)
    move(parameters[0], 0.5)
    plasticity.decide(0)
    move(parameters[1], 0.1)
    plasticity.decide(0)
    assert plasticity.measured == pytest.approx([0.0, 0.1], abs=1e-6)


def test_state_continues_in_mid_window():
    parameters = groups()
    plasticity = Plasticity(parameters, threshold=1.0, tolerance=0.1)
    plasticity.observe(torch.tensor(1.0))
    plasticity.decide(0)
    plasticity.observe(torch.tensor(3.0))
    move(parameters[1], 0.1)
    state = copy.deepcopy(plasticity.state_dict())
    again = Plasticity(parameters, threshold=1.0, tolerance=0.1)
    again.load_state_dict(state)
    move(parameters[2], 0.2)
    assert again.decide(2) == plasticity.decide(2) == 0
    assert again.measured == plasticity.measured


def test_a_checkpoint_of_other_groups_is_refused():
    state = Plasticity(groups(2), threshold=1.0, tolerance=0.1).state_dict()
    with pytest.raises(ValueError, match="other groups"):
        Plasticity(groups(3), threshold=1.0, tolerance=0.1).load_state_dict(state)
