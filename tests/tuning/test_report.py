"""The report of a tuning: its data, its sentences and its page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.support.pages import HOSTILE, Page, looked_at
from tests.support.planted import Effect, Planted, race
from torchboost.errors import ConfigError
from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import environment
from torchboost.tuning.report import (
    STOCK,
    Candidate,
    Finding,
    Rate,
    Run,
    TuneReport,
    cost,
    headline,
    horizon,
    notes,
    rate_rows,
    rows,
    tune_page,
)

LEVERS = Candidate(name="levers: autocast", extra={"autocast": True})
MUON = Candidate(name="Muon", extra={"autocast": True}, recipe={"optimizer": "muon", "lr": 0.02})
NORMS = Candidate(name="less_bn as in O2", extra={"autocast": True, "less_bn": True})
LONG = Candidate(name="levers: unpad, fused_optimizer, channels_last", share=0.95)
SMALL = Interval(low=-0.00565, mid=0.000179, high=0.00601)
PLANTED = {
    "levers: autocast": Effect(time=0.6, best=0.5),
    STOCK: Effect(best=0.5),
    "Muon": Effect(time=0.65, points=1.0, needed=0.5, best=2.0),
    "less_bn as in O2": Effect(time=0.6, points=-2.0),
}


def report(**changes: object) -> TuneReport:
    about = {"title": "a model", "model": "Net", "parameters": 10, "drop": 0.005, "budget_seconds": 60.0}
    about |= {"steps": 100, "total_steps": 1000, "most_seeds": 12, "error": 0.05, "environment": environment()}
    return TuneReport(**(about | {"state": "complete"} | changes))  # pyright: ignore[reportArgumentType]


def finding(outcome: str | None, reason: str = "") -> Finding:
    return Finding(
        candidate=Candidate(name="fast", extra={"channels_last": True}),
        outcome=outcome,  # pyright: ignore[reportArgumentType]
        reason=reason,
        seeds=5,
        speed=Interval(low=1.4, mid=1.5, high=1.6),
        memory=0.8,
        difference=Interval(low=-0.004, mid=0.001, high=0.006),
        detectable=0.002,
    )


def tuned(title: str = "train.py:make", *, budget: float = 3000.0) -> TuneReport:
    made = race(Planted(PLANTED, noise=0.2), recipes=[LEVERS, MUON, NORMS], budget=budget)
    chosen = made.decide() or Candidate(name=STOCK)
    search, runs = made.search, made.search.runs
    steps = {"steps": 101, "total_steps": 101, "drop": 0.01, "budget_seconds": budget, "spent_seconds": runs.spent}
    known = {"findings": list(search.findings.values()), "whole": made.whole, "runs": list(runs.made.values())}
    answer = {"extra": chosen.extra, "recipe": chosen.section, "rate": search.rate, "levers": ["autocast"]}
    return report(title=title, **steps, **known, **answer)


def test_a_printed_report_begins_with_the_answer() -> None:
    shown = str(report(findings=[finding("kept")], whole=[finding("kept")]))
    assert shown.startswith("Turn on fast, with channels_last.")
    assert len(shown.splitlines()) < 20


def test_the_headline_is_the_answer() -> None:
    kept = report(findings=[finding("kept")], whole=[finding("kept")])
    assert headline(kept) == "Turn on fast, with channels_last. A training then takes 67 % of the time."
    wide = finding("kept").model_copy(update={"speed": Interval(low=0.94, mid=1.22, high=2.23)})
    assert headline(report(whole=[wide])).endswith("A training then takes 82 % of the time (45 % to 106 %).")
    assert cost(kept) == (
        "Against stock the metric is 0.001 better, at worst 0.004 worse, at 95 % confidence, over 5 seeds; "
        "0.005 was accepted."
    )
    lost = report(findings=[finding("lost", "it costs")])
    assert cost(lost) == ""
    assert headline(lost).startswith("Nothing is turned on: no recipe was found that saves time and keeps the metric")
    spent, untested = finding("not shown", "the budget was spent"), Finding(candidate=LEVERS, outcome="not tried")
    assert headline(report(findings=[finding("kept")], whole=[spent, untested])) == (
        "Nothing is turned on: fast, with channels_last was not shown to keep the metric with fresh seeds (the budget "
        "was spent). Continue with a longer --budget and --resume to decide it."
    )
    assert headline(report(findings=[], whole=[finding("lost", "it costs")])).endswith("fresh seeds (it costs).")
    assert headline(report(state="interrupted")).startswith("Not finished: 0 runs")
    made = tuned()
    share = made.whole[-1].candidate.share
    assert headline(made).startswith(f"Turn on Muon at 0.04, {100 * share:.0f} % of the steps, with autocast.")
    assert made.recipe == {"optimizer": "muon", "lr": 0.04, "rate": 0.5, "length": share}


def test_a_budget_in_which_nothing_can_be_tried_is_said_once() -> None:
    made = race(Planted(PLANTED), recipes=[LEVERS, MUON, NORMS], budget=60.0, aside=15.0)
    assert made.decide() is None
    ended = report(findings=[*made.search.findings.values(), Finding(candidate=MUON, outcome="not usable")])
    (needed,) = re.findall(r"at least (\d+) s", headline(ended))
    said = f"Nothing was tried: the budget of 60 s is too short; at least {needed} s are needed."
    assert headline(ended) == said
    assert headline(ended.model_copy(update={"extra": {"autocast": True}})).endswith(f"rounding. {said}")
    second, first = rows(ended)
    assert first[:2] == ["3 recipes", "not tried"]
    assert "and 15 s were spent before the first" in first[-1]
    assert all(one.name in first[-1] for one in (LEVERS, MUON, NORMS))
    assert second[:2] == ["Muon", "not usable"]
    enough = race(Planted(PLANTED), recipes=[LEVERS, MUON, NORMS], budget=float(needed), aside=15.0)
    enough.decide()
    assert enough.search.runs.made
    cut = report(findings=[finding("not tried", "the budget was spent")], runs=list(enough.search.runs.made.values()))
    assert headline(cut) == "No recipe was tried to its end: the budget was spent."


def test_the_users_rate_is_the_first_finding() -> None:
    for rate, said in (
        (Rate(best=1.0), "Your rate is at its best."),
        (
            Rate(best=0.25, change=0.041, seeds=3, fresh=True),
            "Your rate is 4 times too high: +0.041 at 0.25 of it, with 3 fresh seeds.",
        ),
        (
            Rate(best=2.0, change=0.01, seeds=2),
            "Your rate is 2 times too low: +0.01 at 2 of it, with 2 seeds of the search.",
        ),
        (Rate(best=4.0), "Your rate is 4 times too low."),
        (
            Rate(best=0.5, change=-0.002, seeds=3, fresh=True),
            "The search preferred 0.5 times your rate, but the metric is not higher there: \N{MINUS SIGN}0.002, with 3 "
            "fresh seeds.",
        ),
        (None, ""),
    ):
        assert cost(report(rate=rate)) == said
    said = cost(tuned())
    assert said.startswith("Your rate is 2 times too high: +0.0")
    assert "Against stock at its best rate the metric is" in said


def test_when_a_tuning_is_repaid() -> None:
    times = {"seed": 0, "steps": 100, "setup_seconds": 1.0, "seconds": 9.9, "wall_seconds": 11.0}
    runs = [Run(name=STOCK, metric=0.9, **times), Run(name="fast", metric=0.9, **times)]
    known = {"runs": runs, "spent_seconds": 505.0, "findings": [finding("kept")], "whole": [finding("kept")]}
    # 1,000 steps take 100.9 s, of which a third is saved.
    assert cost(report(**known)).endswith(
        "The tuning took as long as 5.0 runs of stock, and is repaid after 16 further runs."
    )
    assert cost(report(**known | {"whole": []})) == "The tuning took as long as 5.0 runs of stock."


def test_a_candidate_names_its_runs_and_its_section() -> None:
    plain = Candidate(name=STOCK)
    assert (plain.label, plain.section) == ("stock", {})
    assert plain.at(0.25, 0.5).label == "stock, 0.25 times the rate, 50% of the steps"
    assert plain.at(0.25, 0.5).words == "stock, 0.25 times the rate, 50 % of the steps"
    assert plain.at(0.25, 0.5).section == {"rate": 0.25, "length": 0.5}
    muon = MUON.model_copy(update={"recipe": {**MUON.recipe, "rate": 0.5}})
    assert muon.at(0.25).section == {"optimizer": "muon", "lr": 0.005, "rate": 0.5}
    assert muon.words == MUON.words == "Muon at 0.02"
    labels = {MUON.model_copy(update={"recipe": {**MUON.recipe, "rate": rate}}).label for rate in (0.5, 1.0)}
    assert len({MUON.label, *labels}) == 3
    old = {"name": "half", "recipe": True, "share": 0.5, "skips_work": True}  # of a report of an earlier version
    assert Candidate.model_validate(old) == Candidate(name="half", share=0.5)


def test_the_horizon_says_what_could_not_be_seen() -> None:
    said = horizon(report(whole=[finding("kept")]))
    for words in ("Runs of 100 steps", "the answer is for 1,000 steps", "0.002 beyond the accepted one"):
        assert words in said


def test_rows_name_the_confirmation() -> None:
    found = rows(report(findings=[finding("kept", "because")], whole=[finding(None)]))
    metric = "+0.001 (\N{MINUS SIGN}0.004 to +0.006)"
    numbers = [cell.replace("\N{MULTIPLICATION SIGN}", "x") for cell in found[0]]
    assert numbers == ["fast", "kept", "1x", "100 %", "1.50x", "0.80x", metric, "5", "because"]
    assert found[1][:2] == ["confirmation", "open"]
    assert found[1][-1].startswith("fast: ")
    unused = Finding(candidate=MUON, outcome="not usable", reason="no matrix")
    assert rows(report(findings=[unused]))[0][2:4] == ["", ""]
    muon = next(row for row in rows(tuned()) if row[0] == "Muon")
    assert muon[2] == "0.04"
    norms = next(row for row in rows(tuned()) if row[0].startswith("less_bn"))
    assert norms[1:4] == ["not chosen", "", ""]
    both = next(row for row in rows(tuned()) if row[0].startswith("Muon with"))
    assert both[1:4] == ["no gain", "0.04", ""]


def test_rows_tell_the_attempts_of_one_recipe_apart_whatever_became_of_them() -> None:
    half, times = LEVERS.at(1.0, 0.5), "\N{MULTIPLICATION SIGN}"
    made = [Finding(candidate=half, outcome="lost", reason="its training diverged")]
    made += [Finding(candidate=half.at(1.0, 0.65), outcome="not tried", reason="no time")]
    first, second, third = rows(report(findings=[finding("not tried", "no time")], whole=made))
    assert first[1:6] == ["not tried", f"1{times}", "100 %", f"1.50{times}", f"0.80{times}"]
    assert second[1:4] == ["lost", f"1{times}", "50 %"]
    assert third[1:4] == ["not tried", f"1{times}", "65 %"]


def test_rows_of_rates_have_a_cell_per_multiple() -> None:
    one = Finding(candidate=MUON, rates={1.0: 0.8, 0.5: -math.inf})
    two = Finding(candidate=LEVERS, rates={1.0: 0.75, 2.0: 0.5})
    head, first, second = rate_rows(report(findings=[one, two, finding("kept")]))
    assert head == ["recipe", *(f"{multiple}\N{MULTIPLICATION SIGN}" for multiple in ("0.5", "1", "2"))]
    assert first == ["Muon", "stopped", "0.8000", ""]
    assert second == ["levers: autocast", "", "0.7500", "0.5000"]


def test_notes_name_the_levers() -> None:
    known = report(levers=["autocast"], left_out={"compile": "too slow"}, notes=["more"])
    assert notes(known) == [
        "Every recipe but stock has the switches autocast.",
        "The trial of the switches left out compile (too slow).",
        "More.",
    ]


def test_notes_say_how_the_result_is_used() -> None:
    assert notes(report(recipe={"length": 0.5}))[0].startswith("Build the schedule after boost, on boosted.optimizer")
    free = {"optimizer": "schedule_free_adamw", "lr": 0.001}
    assert notes(report(recipe=free))[0].startswith(
        "Leave the schedule out, call optimizer.eval() before an evaluation"
    )


def test_the_answer_comes_first_and_every_recipe_and_run_is_on_the_page() -> None:
    made = tuned()
    text = tune_page(made)
    page = Page(text)
    assert page.is_safe()
    assert text.index("Turn on Muon") < text.index("What was tried") < text.index("Rates") < text.index("Raw numbers")
    for name in (LEVERS.name, MUON.name, f"Muon with {NORMS.name}"):
        assert text.count(f'<th scope="row">{name}</th>') >= 2
    assert f"All {len(made.runs)} runs" in text
    assert len(page.of_class("mark")) == len(made.whole)
    places = [attrs["style"] for attrs in page.of_class("whisker")]
    assert all(style is not None and "nan" not in style for style in places)


def test_the_first_sentence_is_the_headline_and_the_rest_stands_below() -> None:
    text = tune_page(tuned())
    first, more = headline(tuned()).split(". ", 1)
    assert f'<p class="headline">{first}.</p>\n<p class="more">{more}</p>' in text
    assert '<p class="more">' not in tune_page(report(state="running"))
    assert '<p class="headline long">' in tune_page(report(state="complete", whole=[finding("lost", "a reason " * 9)]))


def test_the_bounds_of_a_difference_stand_below_it() -> None:
    text = tune_page(tuned())
    assert re.search('data-head="metric against stock">[+\N{MINUS SIGN}][0-9.]+<small>[^<(]+</small></td>', text)


def test_text_of_the_user_is_escaped() -> None:
    page = Page(tune_page(report(title=HOSTILE, notes=[HOSTILE], findings=[finding("kept", HOSTILE)])))
    assert page.is_safe()
    assert HOSTILE in page.words


def test_a_tuning_without_a_comparison_has_no_figure() -> None:
    text = tune_page(tuned(budget=30.0))
    assert "<figure" not in text
    assert "Nothing was tried" in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_no_sideways_scroll_and_no_console_errors(tmp_path: Path, width: int) -> None:
    made = tuned("a-long-name-" * 12 + ".py:make")
    whole = [one.model_copy(update={"candidate": LONG, "difference": SMALL}) for one in made.whole]
    findings = [
        one.model_copy(update={"candidate": LONG, "difference": SMALL, "seeds": 12}) if one.difference else one
        for one in made.findings
    ]
    seen = looked_at(tmp_path, tune_page(made.model_copy(update={"whole": whole, "findings": findings})), width)
    assert seen.wanted <= seen.room
    assert (seen.figures, seen.cut) == (1, 0)
    assert width < 1280 or seen.scrolled == 0


def test_a_report_is_written_and_read(tmp_path: Path) -> None:
    made = tuned()
    path = made.save(tmp_path / "new" / "boost.report.json")
    assert TuneReport.load(path) == made
    assert [file.name for file in path.parent.iterdir()] == ["boost.report.json"]
    diverged = made.model_copy(update={"runs": [made.runs[0].model_copy(update={"metric": math.nan})]})
    assert math.isnan(TuneReport.load(diverged.save(path)).runs[0].metric)
    path.write_text('{"format": 2}', encoding="utf-8")
    with pytest.raises(ValidationError):
        TuneReport.load(path)


def test_a_report_that_was_edited_is_refused(tmp_path: Path) -> None:
    made = tuned()
    path = made.save(tmp_path / "boost.report.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    content["runs"][0]["losses"] = [0.1]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"boost\.report\.json.* was changed after it was written"):
        TuneReport.load(path)
    made.save(path)
    saved = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(dict(reversed(saved.items()))), encoding="utf-8")  # in another order and layout
    assert TuneReport.load(path) == made
    del saved["seal"], saved["lr"], saved["starts"]  # as of an earlier version
    path.write_text(json.dumps(saved), encoding="utf-8")
    assert TuneReport.load(path) == made


def test_set_up_is_paid_once_and_the_rest_per_step() -> None:
    run = Run(name="a", seed=0, steps=11, metric=1.0, setup_seconds=5.0, seconds=10.0, wall_seconds=16.0)
    assert (run.projected(11), run.projected(101), run.projected(1)) == (15.0, 105.0, 5.0)


def test_the_losses_of_stock_are_the_mean_of_its_complete_runs_at_every_step() -> None:
    def losses(curves: list[list[float]], steps: int) -> list[float]:
        times = {"setup_seconds": 0.1, "seconds": 1.0, "wall_seconds": 1.2, "steps": steps, "metric": 0.5}
        runs = [Run(name="stock", seed=seed, losses=curve, **times) for seed, curve in enumerate(curves)]
        other = Run(name="other", seed=0, losses=[9.0] * (steps // 20), **times)
        return report(steps=steps, total_steps=steps, runs=[*runs, other]).stock_losses()

    assert losses([[1.0, 0.5], [2.0, 0.7]], 45) == [1.5] * 20 + [0.6] * 20
    assert losses([[1.0, 0.5], [2.0]], 45) == [1.0] * 20 + [0.5] * 20  # one diverged
    with pytest.raises(ValueError, match="no losses of stock: found 1 complete runs of 12 steps"):
        losses([[]], 12)
