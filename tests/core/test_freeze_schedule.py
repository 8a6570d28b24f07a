from itertools import combinations, pairwise

import pytest

from torchboost.core.freeze_schedule import (
    BACKWARD_SHARE,
    Repeated,
    Switches,
    continuous,
    earliest,
    interval,
    progressive,
    snapped,
)


def test_continuous_repeats_a_period_and_keeps_it_whole():
    assert continuous(4, 0.5, 7) == [0, 0, 0, 1, 2, 3] * 2
    assert continuous(4, 0.0, 3) == [1, 2, 3]
    assert continuous(1, 0.7, 100) == [0] * 101


def test_interval_freezes_the_wanted_share_with_small_numbers_likeliest():
    sequence = interval(10, 0.7, 4000, seed=1)
    assert len(sequence) == 4040
    assert sequence[0] == 0
    assert sequence.count(0) / len(sequence) == pytest.approx(0.7, abs=0.001)
    counts = [sequence.count(index) for index in range(1, 10)]
    assert counts[0] > counts[4] > counts[8] > 0


def test_interval_is_a_function_of_its_seed():
    assert interval(5, 0.5, 50, seed=3) == interval(5, 0.5, 50, seed=3)
    assert interval(5, 0.5, 50, seed=3) != interval(5, 0.5, 50, seed=4)
    assert interval(1, 0.5, 50, seed=3) == [0] * 50


def test_a_list_begins_again():
    assert [Repeated((0, 2, 1))(step) for step in range(5)] == [0, 2, 1, 0, 2]


def test_switches_hold_from_their_step_on():
    switches = Switches(steps=(3, 5), indices=(1, 4))
    assert [switches(step) for step in range(7)] == [0, 0, 0, 1, 1, 4, 4]
    assert Switches(steps=(), indices=())(100) == 0


def test_the_cubic_schedule_starts_at_the_full_share_and_ends_at_the_end():
    allowed = earliest(11, 0.5, 1000)
    assert allowed[:2] == [0, 500]
    assert allowed[-1] < 1000
    gaps = [after - before for before, after in pairwise(allowed[1:])]
    assert gaps == sorted(gaps)
    assert earliest(1, 0.5, 1000) == [0]


def saving(costs, allowed, steps, chosen):
    ends = [*(allowed[index] for index in chosen[1:]), steps]
    return sum(
        BACKWARD_SHARE * sum(costs[:index]) * (end - allowed[index]) for index, end in zip(chosen, ends, strict=True)
    )


@pytest.mark.parametrize("switches", [1, 2, 3])
def test_the_moments_are_those_that_save_most(switches):
    costs, steps = [0.05, 0.3, 0.1, 0.2, 0.15, 0.1, 0.1], 997
    found = progressive(costs, 0.3, steps, switches=switches)
    allowed = earliest(len(costs), 0.3, steps)
    every = [c for count in range(1, switches + 1) for c in combinations(range(1, len(costs)), count)]
    best = max(saving(costs, allowed, steps, chosen) for chosen in every)
    assert saving(costs, allowed, steps, found.indices) == pytest.approx(best)
    assert found.steps == tuple(allowed[index] for index in found.indices)


def test_a_progressive_schedule_is_monotone_and_never_freezes_the_last_group():
    found = progressive([0.1] * 10, 0.2, 500)
    assert len(found.steps) == 6
    assert list(found.steps) == sorted(found.steps)
    assert list(found.indices) == sorted(found.indices)
    assert max(found.indices) == 9


def test_moments_that_do_not_repay_a_compilation_are_left_out():
    costs = [0.1] * 10
    counts = [
        len(progressive(costs, 0.5, 1000, step_seconds=0.05, recompile_seconds=seconds).steps)
        for seconds in (0.0, 1.0, 3.0, 100.0)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 6
    assert counts[-1] == 0


def test_one_group_is_never_frozen():
    assert progressive([1.0], 0.5, 100) == Switches(steps=(), indices=())


def test_snapping_rounds_down_to_few_evenly_spread_indices():
    assert snapped([0, 1, 2, 3, 4, 5], 3) == [0, 0, 2, 2, 4, 4]
    assert snapped([3, 0, 1], 4) == [3, 0, 1]
    assert len(set(snapped(list(range(10)), 3))) == 3
    assert all(after <= before for before, after in zip(range(10), snapped(list(range(10)), 3), strict=True))
