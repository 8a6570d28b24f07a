from itertools import combinations, pairwise

import numpy as np
import pytest

from torchboost.algorithms.grad_freeze.schedule import (
    BACKWARD_SHARE,
    Schedule,
    continuous,
    earliest,
    interval,
    length_of,
    progressive,
    repeated,
    snapped,
)


def listed(schedule, count: int) -> list[int]:
    return [schedule(step) for step in range(count)]


def drawn(groups: int, share: float, steps: int, *, seed: int) -> list[int]:
    return listed(interval(groups, share, length_of(steps), seed), length_of(steps))


def moments(schedule: Schedule, steps: int) -> dict[int, int]:
    """Each number of frozen groups but 0, and the first update that has it."""
    first: dict[int, int] = {}
    for step, index in enumerate(listed(schedule, steps)):
        first.setdefault(index, step)
    first.pop(0, None)
    return first


def one_by_one(groups: int, share: float, steps: int, seed: int) -> list[int]:
    """As MindSpore does it: a draw from NumPy's global generator for each update."""
    random = np.random.RandomState(seed)
    weights = np.arange(1, groups)
    sequence, frozen = [0], 0
    while len(sequence) < length_of(steps):
        due = frozen / len(sequence) < 1 - share
        index = int(random.choice(np.arange(groups - 1, 0, -1), p=weights / weights.sum())) if due else 0
        frozen += index > 0
        sequence.append(index)
    return sequence


def test_continuous_repeats_a_period():
    assert listed(continuous(4, 0.5), 12) == [0, 0, 0, 1, 2, 3] * 2
    assert listed(continuous(4, 0.0), 3) == [1, 2, 3]
    assert listed(continuous(1, 0.7), 3) == [0] * 3
    assert [continuous(4, share).prefixes for share in (0.5, 0.0)] == [4, 3]
    assert continuous(10, 1 - 1e-12)(10**6) == 0


def test_interval_freezes_the_wanted_share_with_small_numbers_likeliest():
    sequence = drawn(10, 0.7, 4000, seed=1)
    assert len(sequence) == 4040
    assert sequence[0] == 0
    assert sequence.count(0) / len(sequence) == pytest.approx(0.7, abs=0.001)
    counts = [sequence.count(index) for index in range(1, 10)]
    assert counts[0] > counts[4] > counts[8] > 0


@pytest.mark.parametrize(("groups", "share", "steps"), [(10, 0.7, 9000), (2, 0.25, 300), (7, 0.0, 300), (3, 0.9, 500)])
def test_interval_is_what_single_draws_give(groups, share, steps):
    assert drawn(groups, share, steps, seed=5) == one_by_one(groups, share, steps, 5)


def test_interval_is_a_function_of_its_seed():
    assert drawn(5, 0.5, 50, seed=3) == drawn(5, 0.5, 50, seed=3)
    assert drawn(5, 0.5, 50, seed=3) != drawn(5, 0.5, 50, seed=4)
    assert drawn(1, 0.5, 50, seed=3) == [0] * 50


def test_interval_makes_only_the_entries_that_are_asked_for():
    schedule = interval(10, 0.7, length_of(10**15), 0)
    assert schedule.prefixes == 10
    assert schedule(100) == interval(10, 0.7, 101, 0)(100)
    again = interval(5, 0.5, 20, 3)
    assert listed(again, 40) == listed(again, 20) * 2


def test_a_list_begins_again():
    assert [repeated((0, 2, 1))(step) for step in range(5)] == [0, 2, 1, 0, 2]


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
    chosen = moments(found, steps)
    assert saving(costs, allowed, steps, list(chosen)) == pytest.approx(best)
    assert chosen == {index: allowed[index] for index in chosen}
    assert found.prefixes == len(chosen) + 1
    assert found(10 * steps) == max(chosen)


def test_a_progressive_schedule_is_monotone_and_never_freezes_the_last_group():
    found = progressive([0.1] * 10, 0.2, 500)
    assert listed(found, 500) == sorted(listed(found, 500))
    assert len(moments(found, 500)) == 6
    assert max(moments(found, 500)) == 9


def test_a_progressive_schedule_says_when_it_begins():
    schedule = progressive([0.25] * 4, 0.5, 100, switches=2)
    assert schedule.begins == min(moments(schedule, 100).values()) == 64
    assert progressive([1.0], 0.5, 100).begins is None


def test_one_group_is_never_frozen():
    assert listed(progressive([1.0], 0.5, 100), 200) == [0] * 200


def test_snapping_rounds_down_to_few_evenly_spread_indices():
    assert listed(snapped(repeated(tuple(range(6))), 6, 3), 6) == [0, 0, 2, 2, 4, 4]
    assert listed(snapped(repeated((3, 0, 1)), 4, 4), 3) == [3, 0, 1]
    ten = snapped(repeated(tuple(range(10))), 10, 3)
    assert len(set(listed(ten, 10))) == ten.prefixes == 3
    assert all(after <= before for before, after in zip(range(10), listed(ten, 10), strict=True))
