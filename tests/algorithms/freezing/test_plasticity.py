import copy

import pytest
import torch
from torch import nn

from torchboost.algorithms.freezing.plasticity import Plasticity


def groups(count: int = 3) -> list[list[nn.Parameter]]:
    return [[nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((2, 2), 2.0))] for _ in range(count)]


def move(group: list[nn.Parameter], share: float) -> None:
    with torch.no_grad():
        for parameter in group:
            parameter.mul_(1 + share)


def windows(plasticity: Plasticity, parameters: list[list[nn.Parameter]], *shares: tuple[float, ...]) -> list[int]:
    """Move the groups by ``shares`` in one window after the other; what is decided at the end of each."""
    frozen, decided = 0, []
    for window in shares:
        for group, share in zip(parameters, window, strict=True):
            move(group, share)
        frozen = plasticity.decide(frozen)
        decided.append(frozen)
    return decided


def test_a_leading_group_that_slowed_down_more_than_the_average_is_frozen():
    parameters = groups()
    plasticity = Plasticity(parameters, threshold=1.0, tolerance=0.1)
    assert windows(plasticity, parameters, (0.4, 0.2, 0.1), (0.1, 0.1, 0.1)) == [0, 1]
    distances = [(0.4, 1.4 * 0.1), (0.2, 1.2 * 0.1), (0.1, 1.1 * 0.1)]
    expected = [last / max(first, last) for first, last in distances]
    assert plasticity.measured == pytest.approx(expected, rel=1e-4)


def test_one_that_is_as_lively_goes_on_training_whatever_comes_behind_it():
    parameters = groups()
    plasticity = Plasticity(parameters, threshold=1.0, tolerance=0.1)
    assert windows(plasticity, parameters, (0.1, 0.4, 0.1), (0.1, 0.01, 0.1), (0.1, 0.01, 0.1)) == [0, 0, 0]


def test_nothing_is_known_after_one_window():
    parameters = groups()
    plasticity = Plasticity(parameters, threshold=1.0, tolerance=0.1)
    assert windows(plasticity, parameters, (0.01, 0.4, 0.3)) == [0]


def test_the_threshold_is_a_multiple_of_the_average():
    for threshold, frozen in ((0.4, 0), (0.8, 1)):
        parameters = groups(2)
        plasticity = Plasticity(parameters, threshold=threshold, tolerance=0.1)
        assert windows(plasticity, parameters, (1.0, 0.1), (0.25, 0.2))[-1] == frozen


def test_it_may_be_told_to_measure_only():
    parameters = groups(2)
    plasticity = Plasticity(parameters, threshold=10.0, tolerance=0.1)
    move(parameters[0], 0.1)
    assert plasticity.decide(0, may_freeze=False) == 0
    assert plasticity.measured == [1.0, 0.0]


def test_the_last_group_is_never_frozen():
    parameters = groups(2)
    plasticity = Plasticity(parameters, threshold=10.0, tolerance=0.1)
    assert windows(plasticity, parameters, (0.1, 0.1), (0.1, 0.1), (0.1, 0.1)) == [1, 1, 1]


def test_a_rising_loss_trains_everything_again_and_then_waits():
    parameters = groups(4)
    plasticity = Plasticity(parameters, threshold=10.0, tolerance=0.1)
    frozen, decided = 0, []
    for losses in ([1.0], [1.05], [1.0, 1.3], [0.9], [0.9], [0.9]):
        for loss in losses:
            plasticity.observe(torch.tensor(loss))
        for group in parameters:
            move(group, 0.1)
        frozen = plasticity.decide(frozen)
        decided.append(frozen)
    assert decided == [1, 2, 0, 0, 0, 1]


def test_each_window_is_measured_from_its_own_start():
    parameters = groups(2)
    plasticity = Plasticity(parameters, threshold=0.0, tolerance=0.1)
    move(parameters[0], 0.5)
    plasticity.decide(0)
    move(parameters[1], 0.1)
    plasticity.decide(0)
    assert plasticity.measured == [0.0, 1.0]


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


def test_parameters_of_every_type_are_measured():
    moved = []
    for dtype in (torch.float32, torch.float64, torch.complex64, torch.bfloat16):
        parameter = nn.Parameter(torch.ones(4, dtype=dtype))
        plasticity = Plasticity([[parameter], [parameter]], threshold=1.0, tolerance=0.1)
        with torch.no_grad():
            parameter.add_(0.5j if dtype.is_complex else 0.5)
        plasticity.decide(0)
        moved.append(plasticity.state_dict()["farthest"])
    assert moved == [[1.0, 1.0]] * 4
    small = nn.Parameter(torch.ones(4, dtype=torch.float64))
    plasticity = Plasticity([[small], [small]], threshold=1.0, tolerance=0.1)
    with torch.no_grad():
        small.add_(1e-9)
    plasticity.decide(0)
    assert plasticity.state_dict()["farthest"] == pytest.approx([2e-9] * 2)
