"""What a report of a benchmark says in sentences."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from tests.support.reports import contestant, report, winning_report
from torchboost.bench.verdict import best_hand, headline, stock_of, summarise, target_of, verdicts
from torchboost.measure.evidence import Contestant, Interval, Quality, Ratio

STOCK = contestant("stock", "stock", 0.05)


def said(made, name):
    return [(v.tone, v.text) for v in verdicts(made)[name]]


def judged(made: Contestant, low: float, mid: float, high: float, **more: Any) -> Contestant:
    """The contestant with a stored judgement against stock."""
    known = {"margin": 0.005, "seeds": 4, "passed": False, "detectable": 0.001, **more}
    quality = Quality(baseline="stock", difference=Interval(low=low, mid=mid, high=high), **known)
    return made.model_copy(update={"quality": [quality]})


def test_headline_names_the_fastest_that_keeps_its_accuracy():
    found = headline(winning_report())
    assert found.tone == "good"
    text = "O2 trains 3.57x as fast as the stock loop and 1.43x as fast as the best hand-tuned one."
    assert found.text.replace("\N{MULTIPLICATION SIGN}", "x") == text
    made = report(STOCK, contestant("O1", "level", 0.04, stock=0.05), contestant("O2", "level", 0.01, 0.5, stock=0.05))
    assert headline(made).text.startswith("O1 trains 1.25")


def test_a_wide_interval_stands_in_the_headline():
    made = report(STOCK, contestant("O1", "level", 0.02, stock=0.05, spread=0.4))
    assert headline(made).text.startswith(
        "O1 trains 1.50\N{MULTIPLICATION SIGN} to 3.50\N{MULTIPLICATION SIGN} as fast"
    )


def test_a_hand_tuned_loop_that_is_faster_or_may_be_equal_is_admitted():
    tuned = contestant("hand", "hand", 0.02, stock=0.05)
    for step, end in ((0.03, "but a hand-tuned loop is faster still."), (0.02, "best hand-tuned one was shown.")):
        made = report(STOCK, tuned, contestant("O1", "level", step, stock=0.05, hand=("hand", 0.02)))
        assert headline(made).text.endswith(end)
    faster = report(STOCK, tuned, contestant("O1", "level", 0.03, stock=0.05, hand=("hand", 0.02)))
    assert headline(faster).tone == "open"


def test_an_undecided_metric_is_in_the_headline_and_loses_to_a_proven_one():
    undecided = contestant("O1", "level", 0.02, stock=0.05, seeds=1)
    assert headline(report(STOCK, undecided)).text.endswith("Whether its accuracy holds is not decided.")
    proven = contestant("O2", "level", 0.03, stock=0.05)
    assert headline(report(STOCK, undecided, proven)).text.startswith("O2 trains 1.67")
    made = report(STOCK.model_copy(update={"curves": []}), contestant("O1", "level", 0.02, stock=0.05, seeds=0))
    assert headline(made).tone == "open"
    assert headline(made).text.endswith("Whether its accuracy holds is not decided.")


def test_nothing_gained_is_said():
    made = report(STOCK, contestant("O1", "level", 0.0499, stock=0.05), contestant("O2", "level", 0.06, stock=0.05))
    assert headline(made).text == "Nothing measured here is worth turning on."
    assert said(made, "O1")[0][0] == "open"
    assert said(made, "O2")[0] == (
        "bad",
        "O2 is slower than the stock loop: 0.83\N{MULTIPLICATION SIGN} (0.82 to 0.85). Not worth it here.",
    )
    made = report(STOCK, contestant("O1", "level", 0.0495, stock=0.05, spread=0.001))  # sure, but tiny
    assert said(made, "O1")[0][0] == "bad"
    assert "less than 3 %" in said(made, "O1")[0][1]


def test_what_could_have_been_seen_is_said():
    ratio = Ratio(baseline="stock", interval=Interval(low=0.99, mid=1.0, high=1.01), pairs=9, detectable=0.021)
    made = report(STOCK, contestant("O1", "level", 0.05).model_copy(update={"ratios": [ratio]}))
    assert "A gain of 2.1 % or more would most likely have shown." in said(made, "O1")[0][1]


def test_promise_kept_missed_and_open():
    kept = ("good", "O1 promises to be no slower than stock and to lose at most 0.5 points: kept here.")
    assert kept in said(winning_report(), "O1")
    assert kept in said(report(STOCK, contestant("O1+compile", "level", 0.016, stock=0.05)), "O1+compile")
    slow = report(STOCK, contestant("O1", "level", 0.06, stock=0.05))
    assert said(slow, "O1")[-1][0] == "bad"
    assert said(slow, "O1")[-1][1].endswith("missed here, it is slower.")
    lossy = report(STOCK, contestant("O1", "level", 0.02, 0.9, stock=0.05))
    assert said(lossy, "O1")[-1][1].endswith("missed here, the metric falls by more.")
    unsure = report(STOCK, contestant("O1", "level", 0.0505, stock=0.05))
    assert said(unsure, "O1")[-1][1].endswith("neither shown nor refuted by this run.")


def test_too_few_seeds_prove_nothing():
    made = report(contestant("stock", "stock", 0.05, seeds=1), contestant("O1", "level", 0.02, stock=0.05, seeds=1))
    texts = said(made, "O1")
    assert any(tone == "open" and "on one seed: too few to say anything" in text for tone, text in texts)
    assert not any("kept here" in text for _, text in texts)


def test_a_wide_bound_is_open_and_not_good():
    stock = contestant("stock", "stock", 0.05, seeds=2)
    shaky = contestant("O1", "level", 0.02, stock=0.05, seeds=2)
    last = shaky.curves[1].model_copy(update={"metric": [*shaky.curves[1].metric[:-1], 0.95]})
    made = report(stock, shaky.model_copy(update={"curves": [shaky.curves[0], last]}))
    assert any(tone == "open" and "cannot rule out" in text for tone, text in said(made, "O1"))


def test_a_stored_judgement_is_used():
    level = contestant("O1", "level", 0.02, 0.5, stock=0.05)
    level = judged(level, -0.004, 0.001, 0.006, margin=0.01, seeds=9, passed=True)
    text = "O1 keeps accuracy within 1 points of stock: +0.10 points, at worst \N{MINUS SIGN}0.40 points (9 seeds)."
    assert ("good", text) in said(report(STOCK, level), "O1")


def test_a_decision_before_its_first_look_says_what_is_missing():
    level = contestant("O1", "level", 0.02, stock=0.05)
    made = report(STOCK, judged(level, -math.inf, 0.001, math.inf, seeds=2, detectable=math.inf))
    text = (
        "O1 ends +0.10 points from stock in accuracy over 2 seeds. Fewer than three seeds decide nothing; "
        "give --decide more time."
    )
    assert ("open", text) in said(made, "O1")
    assert not any("inf" in text for _, text in said(made, "O1"))


def nan_losses(made: Contestant) -> Contestant:
    """The contestant with losses that are not numbers and the metrics it had: classes of NaN logits are counted too."""
    curves = [curve.model_copy(update={"train_loss": [math.nan] * len(curve.epochs)}) for curve in made.curves]
    return made.model_copy(update={"curves": curves})


def test_divergence_is_said():
    without = nan_losses(contestant("O1", "level", 0.02, stock=0.05))
    for broken in (
        contestant("O1", "level", 0.02, math.nan, stock=0.05),
        without,
        judged(without, 0.0, 0.0, 0.0, passed=True),
    ):
        texts = said(report(STOCK, broken), "O1")
        assert ("bad", "O1 diverged on at least one seed: its loss or accuracy is not a number.") in texts
        assert texts[-1][0] == "bad"
        assert texts[-1][1].endswith("lose at most 0.5 points: missed here, the training diverged.")
        assert headline(report(STOCK, broken)).tone == "bad"


def test_nothing_is_kept_against_a_stock_loop_that_diverged():
    made = report(nan_losses(STOCK), contestant("O1", "level", 0.02, stock=0.05))
    texts = said(made, "O1")
    assert any(tone == "open" and text.startswith("stock diverged on at least one seed") for tone, text in texts)
    assert texts[-1][1].endswith("not decided, since stock diverged.")
    assert target_of(made) is None
    both = report(nan_losses(STOCK), nan_losses(contestant("O1", "level", 0.02, stock=0.05)))
    assert not any(tone == "good" and "promises" in text for tone, text in said(both, "O1"))
    assert any(text.startswith("stock diverged") for _, text in said(both, "O1"))
    assert "kept" not in " ".join(text for _, text in said(both, "O1"))


def test_a_metric_where_lower_is_better():
    stock = contestant("stock", "stock", 0.05, 5.0)
    better = contestant("O1", "level", 0.02, 4.0, stock=0.05)
    made = report(stock, better, metric="perplexity").model_copy(update={"metric_higher_is_better": False})
    found = summarise(made)[1].difference
    assert found is not None
    assert found.mean == pytest.approx(1.0, abs=0.01)
    assert found.worst > 0
    assert found.margin is None


def test_a_margin_in_the_units_of_the_metric():
    level = judged(contestant("O1", "level", 0.02, 1.7, stock=0.05), -0.03, -0.01, 0.01, margin=0.02, seeds=3)
    made = report(contestant("stock", "stock", 0.05, 1.7), level, metric="bits per character")
    made = made.model_copy(update={"metric_higher_is_better": False})
    texts = [text for _, text in said(made, "O1")]
    assert any("cannot rule out \N{MINUS SIGN}0.03. Allowed: 0.02." in text for text in texts)
    assert (
        "O1 promises to be no slower than stock and to lose at most 0.02: neither shown nor refuted by this run."
        in texts
    )


def test_a_metric_of_unknown_units_is_neither_kept_nor_missed():
    level = contestant("O1", "level", 0.02, 0.6, stock=0.05)
    made = report(contestant("stock", "stock", 0.05, 0.64), level, metric="metric")
    texts = said(made, "O1")
    (difference,) = [text for _, text in texts if " ends " in text]
    pattern = r"O1 ends -0.0\d+ from stock in the metric over 4 seeds, with 95 % bounds -0.0\d+ to -0.0\d+; above 0"
    assert re.match(pattern, difference.replace("\N{MINUS SIGN}", "-")), difference
    assert texts[-1] == (
        "open",
        "O1 promises to lose at most 0.5 points of accuracy, which has no meaning in the units of this metric; "
        "`torchboost tune --drop` tests a limit of your own.",
    )
    assert {tone for tone, _ in texts[1:]} == {"open"}
    slow = report(contestant("stock", "stock", 0.05), contestant("O1", "level", 0.06, stock=0.05), metric="metric")
    assert said(slow, "O1")[-1] == ("bad", "O1 promises to be no slower than stock: missed here, it is slower.")


def test_setup_is_repaid_after_so_many_steps():
    found = {s.contestant.name: s for s in summarise(winning_report())}
    assert found["compile"].repaid_after == 3000
    assert found["stock"].repaid_after is None
    assert any("repaid after 3,000 steps" in text for _, text in said(winning_report(), "compile"))


def test_time_to_target_counts_set_up_and_stock_is_the_baseline():
    made = winning_report()
    found = {s.contestant.name: s for s in summarise(made)}
    stock = stock_of(made)
    assert stock is not None
    assert (stock.name, best_hand(made).name) == ("stock", "hand")
    assert "stock" not in verdicts(report(STOCK))
    assert summarise(report(contestant("O1", "level", 0.02)))[0].difference is None
    assert target_of(made) == pytest.approx(0.97 - 0.005, abs=0.001)
    reached = found["O1"].seconds_to_target
    assert reached is not None
    assert reached == pytest.approx(0.5 + 100 * 0.016 * 5)
    assert found["freeze"].seconds_to_target is None


def test_levels_that_turned_on_the_same_are_one_answer():
    """In short runs O1 and O2 are the same training."""
    same = [contestant(name, "level", 0.05, stock=0.1) for name in ("O1", "O1+again")]
    assert "(O1 and O1+again turned on the same)" in headline(report(contestant("stock", "stock", 0.1), *same)).text
    assert "turned on the same" not in headline(winning_report()).text


def test_a_level_far_behind_the_loop_by_hand_misses_its_promise():
    loops = contestant("stock", "stock", 0.1), contestant("hand", "hand", 0.05, stock=0.1)
    behind = contestant("O1", "level", 0.06, stock=0.1, hand=("hand", 0.05))
    near = contestant("O1", "level", 0.0502, stock=0.1, hand=("hand", 0.05))
    assert any(
        "at most 5% behind the best loop by hand: missed" in text for _, text in said(report(*loops, behind), "O1")
    )
    assert not any("missed" in text for _, text in said(report(*loops, near), "O1"))
