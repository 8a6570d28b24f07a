"""What a report of a benchmark says in sentences."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.support.reports import contestant, report, winning_report
from torchboost.bench.report.table import result_table
from torchboost.bench.verdict import NO_STOCK, headline, summarise, target_of, verdicts
from torchboost.measure.evidence import BenchReport, Contestant, Interval, Quality, Ratio

STOCK = contestant("stock", "stock", 0.05)


def plain(text: str) -> str:
    return text.replace("\N{MULTIPLICATION SIGN}", "x").replace("\N{MINUS SIGN}", "-")


def sentences(whole: BenchReport, name: str = "O1") -> list[tuple[str, str]]:
    return [(each.tone, plain(each.text)) for each in verdicts(whole)[name]]


def level(step: float = 0.02, final: float = 0.97, name: str = "O1", **more: Any) -> Contestant:
    return contestant(name, "level", step, final, stock=0.05, **more)


def judged(each: Contestant, low: float, mid: float, high: float, **more: Any) -> Contestant:
    """The contestant with a stored judgement against stock."""
    known = {"margin": 0.005, "seeds": 4, "passed": False, "detectable": 0.001, **more}
    quality = Quality(baseline="stock", difference=Interval(low=low, mid=mid, high=high), **known)
    return each.model_copy(update={"quality": [quality]})


def nan_losses(each: Contestant) -> Contestant:
    """The contestant with losses that are not numbers and the metrics it had: classes of NaN logits are counted too."""
    curves = [curve.model_copy(update={"train_loss": [math.nan] * len(curve.epochs)}) for curve in each.curves]
    return each.model_copy(update={"curves": curves})


def shaky() -> Contestant:
    each = level(seeds=2)
    last = each.curves[1].model_copy(update={"metric": [*each.curves[1].metric[:-1], 0.95]})
    return each.model_copy(update={"curves": [each.curves[0], last]})


def test_the_headline_names_the_fastest_that_keeps_its_metric_and_admits_what_is_open() -> None:
    hand = contestant("hand", "hand", 0.02, stock=0.05)
    untrained = STOCK.model_copy(update={"curves": []})
    same = [contestant(name, "level", 0.05, stock=0.1) for name in ("O1", "O1+again")]  # as O1 and O2 in short runs
    for whole, tone, start, end in (
        (winning_report(), "good", "O2 trains 3.57x as fast as the stock loop and 1.43x", "the best hand-tuned one."),
        (report(STOCK, level(0.04), level(0.01, 0.5, "O2")), "good", "O1 trains 1.25x", "loop."),
        (report(STOCK, level(spread=0.4)), "good", "O1 trains 1.50x to 3.50x as fast", "loop."),
        (report(STOCK, hand, level(0.03, hand=("hand", 0.02))), "open", "O1", "but a hand-tuned loop is faster still."),
        (report(STOCK, hand, level(hand=("hand", 0.02))), "good", "O1", "best hand-tuned one was shown."),
        (report(STOCK, level(seeds=1)), "open", "O1", "Whether its accuracy holds is not decided."),
        (report(untrained, level(seeds=0)), "open", "O1", "Whether its accuracy holds is not decided."),
        (report(STOCK, level(seeds=1), level(0.03, name="O2")), "good", "O2 trains 1.67x", "loop."),
        (report(STOCK, level(), metric="metric"), "open", "O1", "is not known here, so that is not judged."),
        (report(contestant("stock", "stock", 0.1), *same), "good", "O1 (O1 and O1+again turned on the same)", "loop."),
        (report(STOCK, level(0.0499), level(0.06, name="O2")), "bad", "Nothing measured here is worth", "turning on."),
        (report(STOCK, level(0.048, spread=0.5)), "open", "Nothing measured here was shown", "does not exclude it."),
        (report(STOCK, level(0.048, 0.8, spread=0.5)), "bad", "Nothing measured here is worth", "turning on."),
    ):
        answer = headline(whole)
        assert answer.tone == tone
        assert plain(answer.text).startswith(start)
        assert plain(answer.text).endswith(end)
    assert "turned on the same" not in headline(winning_report()).text


def test_without_the_stock_loop_the_headline_does_not_say_that_nothing_pays() -> None:
    hand = contestant("hand", "hand", 0.04)
    fast = contestant("O1", "level", 0.02, hand=("hand", 0.04))
    assert headline(report(hand, fast)) == ("open", NO_STOCK)
    assert headline(report(hand, STOCK)).text == "Nothing measured here is worth turning on."


def test_a_configuration_is_judged_by_its_whole_runs() -> None:
    """Its steps are slower than those of stock. It needs fewer of them."""
    tuned = contestant("boost.json", "config", 0.06, 0.97, stock=0.05, hand=("hand", 0.04))
    quick = [curve.model_copy(update={"seconds": [s / 2 for s in curve.seconds]}) for curve in STOCK.curves]
    hand = contestant("hand", "hand", 0.04, stock=0.05)
    whole = report(STOCK, hand, tuned.model_copy(update={"curves": quick}))
    assert plain(headline(whole).text).startswith("A whole run of boost.json takes 0.51x the time of the stock loop's")
    said = sentences(whole, "boost.json")
    assert any(tone == "good" and "0.51x (0.51 to 0.51) the time of stock's" in text for tone, text in said), said
    assert not any("promises" in text for _, text in said)
    slow = [curve.model_copy(update={"seconds": [2 * s for s in curve.seconds]}) for curve in STOCK.curves]
    whole = report(STOCK, tuned.model_copy(update={"curves": slow}))
    assert headline(whole).tone == "bad"
    # Two runs that happen to be faster show nothing: their range is not an interval of 95 %.
    both = zip(STOCK.curves[:2], (0.9, 0.98), strict=True)
    chance = [curve.model_copy(update={"seconds": [s * factor for s in curve.seconds]}) for curve, factor in both]
    whole = report(STOCK, tuned.model_copy(update={"curves": chance}))
    (said,) = [each for each in sentences(whole, "boost.json") if "whole run" in each[1]]
    assert said[0] == "open"
    assert headline(whole).tone == "open"


def test_speed_is_good_bad_or_open() -> None:
    ratio = Ratio(baseline="stock", interval=Interval(low=0.99, mid=1.0, high=1.01), pairs=9, detectable=0.021)
    for each, tone, text in (
        (level(0.0499), "open", "O1 shows no speed difference to the stock loop: 1.00x"),
        (level(0.06), "bad", "O1 is slower than the stock loop: 0.83x (0.82 to 0.85). Not worth it here."),
        (level(0.0495, spread=0.001), "bad", "less than 3 %"),  # sure, but tiny
        (level(0.05).model_copy(update={"ratios": [ratio]}), "open", "A gain of 2.1 % or more would most likely have"),
    ):
        found = sentences(report(STOCK, each))[0]
        assert found[0] == tone
        assert text in found[1]


def test_too_few_rounds_say_nothing_about_the_speed() -> None:
    ratio = Ratio(baseline="stock", interval=Interval(low=1.2, mid=8.64, high=20.0), pairs=5, detectable=40.89)
    few = report(STOCK, level(warmup=90.0).model_copy(update={"ratios": [ratio]}))
    said = sentences(few)
    assert said[0] == (
        "open",
        "5 rounds of step timing cannot tell O1 from the stock loop in speed; time at least 6, with --pairs.",
    )
    assert not any("promises" in text or "repaid" in text or "%" in text for _, text in said if "accuracy" not in text)
    assert headline(few).text == "5 rounds of step timing decide nothing about the speed."
    assert result_table(few).rows[1][2] == "8.64\N{MULTIPLICATION SIGN}"
    noisy = ratio.model_copy(update={"pairs": 9, "interval": Interval(low=0.5, mid=1.0, high=2.0)})
    (tone, text), *_ = sentences(report(STOCK, level().model_copy(update={"ratios": [noisy]})))
    assert tone == "open"
    assert text.endswith("not even twice the speed would have shown; time more, with --pairs.")


def test_promises_are_kept_missed_or_open() -> None:
    hand, behind = contestant("hand", "hand", 0.02, stock=0.05), level(0.03, hand=("hand", 0.02))
    without = report(STOCK, level(seeds=0))
    for whole, tone, end in (
        (winning_report(), "good", "O1 promises to be no slower than stock and to lose at most 0.5 points: kept here."),
        (report(STOCK, level(0.06)), "bad", "missed here, it is slower."),
        (report(STOCK, level(0.02, 0.9)), "bad", "missed here, it loses more."),
        (report(STOCK, level(0.0505)), "open", "neither shown nor refuted by this run."),
        (report(STOCK, hand, behind), "bad", "at most 5 % behind the best loop by hand: missed here."),
        (without, "open", "at nearly the same metric: this run did not judge the metric."),
    ):
        found = sentences(whole)[-1]
        assert found[0] == tone
        assert found[1].endswith(end)
    assert sentences(report(STOCK, level(0.016, name="O1+compile")), "O1+compile")[-1][1].endswith("kept here.")
    near = report(STOCK, hand, level(0.0202, hand=("hand", 0.02)))
    assert not any("missed" in text for _, text in sentences(near))


def test_the_metric_is_kept_lost_or_open() -> None:
    few, two = contestant("stock", "stock", 0.05, seeds=1), contestant("stock", "stock", 0.05, seeds=2)
    early = judged(level(), -math.inf, 0.001, math.inf, seeds=2, detectable=math.inf)
    for whole, tone, text in (
        (report(few, level(seeds=1)), "open", "on one seed: too few to say anything."),
        (report(two, shaky()), "open", "2 seeds cannot rule out"),
        (
            report(STOCK, judged(level(0.02, 0.5), -0.004, 0.001, 0.006, margin=0.01, seeds=9, passed=True)),
            "good",
            "O1 keeps accuracy within 1 points of stock: +0.10 points, at worst -0.40 points (9 seeds).",
        ),
        (report(STOCK, level(0.02, 0.9)), "bad", "O1 costs more accuracy than the 0.5 points allowed"),
        (
            report(STOCK, early),
            "open",
            "+0.10 points from stock in accuracy over 2 seeds. Fewer than three seeds decide nothing; give --decide",
        ),
    ):
        texts = sentences(whole)
        assert any(found == tone and text in said for found, said in texts)
        assert not any("inf" in said for _, said in texts)
        assert text.startswith("O1 keeps") or not any("kept here" in said for _, said in texts)


def test_divergence_is_said_and_nothing_is_kept_against_a_stock_loop_that_diverged() -> None:
    without = nan_losses(level())
    for broken in (level(0.02, math.nan), without, judged(without, 0.0, 0.0, 0.0, passed=True)):
        texts = sentences(report(STOCK, broken))
        assert ("bad", "O1 diverged on at least one seed: its loss or accuracy is not a number.") in texts
        assert texts[-1][0] == "bad"
        assert texts[-1][1].endswith("lose at most 0.5 points: missed here, the training diverged.")
        assert headline(report(STOCK, broken)).tone == "bad"
    for each in (level(), nan_losses(level())):
        whole = report(nan_losses(STOCK), each)
        texts = sentences(whole)
        said = "stock diverged on at least one seed: its loss or accuracy is not a number, so the accuracy of O1 cannot"
        assert ("open", f"{said} be compared with it.") in texts
        assert texts[-1][1].endswith("not decided, since stock diverged.")
        assert "kept" not in " ".join(text for _, text in texts)
        assert target_of(whole) is None


def test_a_metric_in_its_own_units_where_lower_is_better() -> None:
    def lower(*contestants: Contestant, metric: str) -> BenchReport:
        return report(*contestants, metric=metric).model_copy(update={"metric_higher_is_better": False})

    difference = summarise(lower(contestant("stock", "stock", 0.05, 5.0), level(0.02, 4.0), metric="perplexity"))[1]
    assert difference.difference is not None
    assert difference.difference.mean == pytest.approx(1.0, abs=0.01)
    assert difference.difference.worst > 0
    assert difference.difference.margin is None
    bits = judged(level(0.02, 1.7), -0.03, -0.01, 0.01, margin=0.02, seeds=3)
    texts = sentences(lower(contestant("stock", "stock", 0.05, 1.7), bits, metric="bits per character"))
    assert any(
        "ends 0.01 worse than stock in bits per character; 3 seeds cannot rule out 0.03 worse. Allowed: 0.02." in text
        for _, text in texts
    )
    promise = "O1 promises to be no slower than stock and to lose at most 0.02: neither shown nor refuted by this run."
    assert ("open", promise) in texts
    # "+0.1" next to a metric of which lower is better would read as worse
    table = result_table(lower(contestant("stock", "stock", 0.05, 1.7), bits, metric="bits per character"))
    assert "better than stock by" in table.headings
    assert "difference to stock" not in table.headings


def test_a_metric_of_unknown_units_is_neither_kept_nor_missed() -> None:
    texts = sentences(report(contestant("stock", "stock", 0.05, 0.64), level(0.02, 0.6), metric="metric"))
    assert {tone for tone, _ in texts[1:]} == {"open"}
    assert texts[1][1].startswith("O1 ends -0.0")
    assert " from stock in the metric over 4 seeds, with 95 % bounds -0.0" in texts[1][1]
    assert texts[-1][1] == (
        "O1 promises to lose at most 0.5 points of accuracy, which has no meaning in the units of this metric; "
        "`torchboost tune --drop` tests a limit of your own."
    )
    again = STOCK.model_copy(update={"name": "O1", "kind": "level", "ratios": level().ratios})
    assert "+0" in result_table(report(STOCK, again, metric="metric")).rows[1]
    assert sentences(report(STOCK, again, metric="metric"))[1] == (
        "open",
        "O1 ends +0 from stock in the metric over 4 seeds. The difference is the same on each, which gives no bounds.",
    )
    slow = sentences(report(STOCK, level(0.06), metric="metric"))[-1]
    assert slow == ("bad", "O1 promises to be no slower than stock: missed here, it is slower.")


def test_set_up_target_and_baselines() -> None:
    whole = winning_report()
    summary = {each.contestant.name: each for each in summarise(whole)}
    assert (summary["compile"].repaid_after, summary["stock"].repaid_after) == (3000, None)
    assert any("repaid after 3,000 steps" in text for _, text in sentences(whole, "compile"))
    assert target_of(whole) == pytest.approx(0.97 - 0.005, abs=0.001)
    assert summary["O1"].seconds_to_target == pytest.approx(0.5 + 100 * 0.016 * 5)
    assert summary["freeze"].seconds_to_target is None
    curve = summary["O1"].contestant.curves[0]
    assert summary["O1"].run_seconds == pytest.approx(curve.setup_seconds + curve.seconds[-1])
    assert "stock" not in verdicts(report(STOCK))
    assert summarise(report(level()))[0].difference is None
