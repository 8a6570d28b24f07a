"""What the zoo concludes from times that are made up."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import pytest

from tests.support.reports import report
from torchboost.measure.evidence import BenchReport, Contestant
from torchboost.measure.statistics import bootstrap_median, paired_ratio

verdict = importlib.import_module("zoo_verdict")

STOCK = [0.100, 0.104, 0.096, 0.101, 0.099, 0.100, 0.103, 0.097]


def times(share: float) -> list[float]:
    """Steps that take so large a share of stock's in the same round."""
    return [share * seconds for seconds in STOCK]


def timed(name: str, samples: Sequence[float]) -> Contestant:
    kind = "stock" if name == "stock" else "level" if name in ("O1", "O2") else "hand"
    return Contestant(name=name, kind=kind, step_seconds=bootstrap_median(samples), samples=list(samples))


def result(network: str = "mlp", /, **shares: float) -> BenchReport:
    """A result in which each contestant takes a constant share of stock's time."""
    parts = [timed("stock", STOCK), *(timed(name, times(share)) for name, share in shares.items())]
    return report().model_copy(update={"workload": f"zoo-{network}", "contestants": parts, "notes": []})


def test_a_row_has_the_fastest_cell_and_both_levels_against_it():
    row = verdict.row_of(result(fused_optimizer=0.8, autocast=2.0, O1=0.84, O2=0.5))
    assert (row.network, row.best) == ("mlp", "fused_optimizer")
    assert row.stock_seconds == pytest.approx(0.1)
    assert row.best_ratio == pytest.approx(1.25)
    assert row.levels["O1"].regret == pytest.approx(0.05)
    assert row.levels["O1"].stock.mid == pytest.approx(1 / 0.84)
    assert row.levels["O2"].regret == pytest.approx(0.5 / 0.8 - 1)
    assert row.levels["O2"].crossed == pytest.approx(0.5 / 0.8 - 1)


def test_what_is_no_better_cell_than_stock():
    """A slower cell, a second stock loop, which shows the noise, and a cell that was not timed in pairs."""
    row = verdict.row_of(result(fused_optimizer=1.1, O1=1.0, O2=1.0))
    assert (row.best, row.best_ratio, row.levels["O1"].regret) == ("stock", 1.0, 0.0)
    again = timed("stock again", times(0.97)).model_copy(update={"kind": "hand"})
    for other in (again, timed("autocast", [0.001, 0.001])):
        found = result(O1=1.0, O2=1.0)
        row = verdict.row_of(found.model_copy(update={"contestants": [*found.contestants, other]}))
        assert row.best == "stock"
        if other is again:
            assert row.noise == pytest.approx(-0.03)
            assert verdict.table([row]).rows[0][2] == "-3.0"


def test_the_crossed_regret_counts_a_difference_and_not_the_luck_of_the_best_cell():
    stock = 12 * [1.0]
    # Each cell is lucky in one pair of rounds and otherwise like stock.
    lucky = {f"cell {k}": [0.9 if j // 2 == k else 1.0 for j in range(12)] for k in range(6)}
    assert verdict.crossed_regret({"stock": stock} | lucky, stock) == 0.0
    for rounds in (2, 3, 4, 9):
        cells = {"stock": rounds * [1.0], "fused_optimizer": rounds * [0.5]}
        assert verdict.crossed_regret(cells, rounds * [0.6]) == pytest.approx(0.2)


def test_the_average_regret_lets_no_network_pay_for_another():
    assert verdict.average_regret([0.0, -0.5]) == 0.0
    assert verdict.average_regret([0.21, -0.5]) == pytest.approx(0.1)


def test_each_part_of_the_requirement_is_named():
    for shares, words in (
        ({"fused_optimizer": 0.8, "O1": 0.81, "O2": 0.8}, []),
        ({"O1": 1.03, "O2": 1.0}, ["mlp O1 is 0.971x stock", "O1 is 3.0% behind the best cells on the geometric"]),
        ({"O1": 1.0, "O2": 1.06}, ["mlp O2 is 0.943x", "mlp O2 has 0.943x stock as its lower end", "mlp O2 is 6.0%"]),
        ({"fused": 0.5, "O1": 0.5, "O2": 0.54}, ["mlp O2 is 8.0% behind the best cell, fused, allowed 5%"]),
        ({"O1": 1.0}, ["mlp O2 gave no result"]),
    ):
        said = verdict.violations([verdict.row_of(result(**shares))])
        assert bool(said) == bool(words)
        assert all(any(line.startswith(text) for line in said) for text in words), said
    table = verdict.table([verdict.row_of(result(O1=1.0))])
    assert all(len(row) == len(table.headings) for row in table.rows)
    assert table.rows[0][6] == table.rows[0][8] == "\N{EN DASH}"


def test_a_wide_interval_breaks_the_requirement():
    noisy = [seconds * (1.0 if k % 2 else 1.2) for k, seconds in enumerate(STOCK)]
    found = result(O2=1.0)
    found = found.model_copy(update={"contestants": [*found.contestants, timed("O1", noisy)]})
    assert paired_ratio(STOCK, noisy).low < 0.95
    assert any("lower end" in text for text in verdict.violations([verdict.row_of(found)]))


def test_the_second_level_must_beat_the_best_loop_by_hand_on_the_bottleneck_network():
    slow, fast = result("bottleneck", fused=0.8, O1=0.8, O2=0.7), result("bottleneck", fused=0.8, O1=0.8, O2=0.6)
    (text,) = verdict.violations([verdict.row_of(slow)])
    assert text == "bottleneck O2 is 1.14x the best loop by hand, needed 1.2"
    assert verdict.violations([verdict.row_of(fast)]) == []


def test_the_conclusion_shows_means_and_lost_networks():
    reports = [result("mlp", fused=0.5, O1=0.5, O2=0.5), result("unet", O1=1.0, O2=1.0)]
    text = verdict.conclusion(reports)
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["unet", "mlp"]
    assert "geometric mean" in lines[4]
    assert lines[4].split()[2:5] == ["1.41", "1.41", "1.41"]
    assert "The requirement holds" in text
    assert "- gpt2 gave no result" in verdict.conclusion(reports, ["gpt2"])
    assert "does not hold" in verdict.conclusion(reports, ["gpt2"])
