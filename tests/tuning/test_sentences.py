from __future__ import annotations

from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import environment
from torchboost.tuning.evidence import Candidate, Finding, TuneReport
from torchboost.tuning.sentences import cost, headline, horizon, rows

FAST = Candidate(name="fast", extra={"channels_last": True})


def finding(outcome: str | None, reason: str = "") -> Finding:
    return Finding(
        candidate=FAST,
        outcome=outcome,  # pyright: ignore[reportArgumentType]
        reason=reason,
        seeds=5,
        speed=Interval(low=1.4, mid=1.5, high=1.6),
        memory=0.8,
        difference=Interval(low=-0.004, mid=0.001, high=0.006),
        detectable=0.002,
    )


def report(**given: object) -> TuneReport:
    about = {"title": "a model", "model": "Net", "parameters": 10, "drop": 0.005, "budget_seconds": 60.0}
    about |= {"steps": 100, "total_steps": 1000, "most_seeds": 12, "error": 0.05, "environment": environment()}
    return TuneReport(**(about | {"state": "complete"} | given))  # pyright: ignore[reportArgumentType]


def test_the_headline_is_the_answer():
    kept = report(findings=[finding("kept")], whole=[finding("kept")])
    assert headline(kept) == "Turn on fast. A training then takes 67% of the time."
    assert cost(kept) == (
        "The metric changes by +0.001, at worst -0.004 at 95.0% confidence, over 5 seeds; 0.005 was accepted."
    )
    lost = report(findings=[finding("lost", "it costs")])
    assert cost(lost) == ""
    assert headline(lost).startswith("Nothing is turned on: no candidate was shown to save time and keep the metric")
    unsure = report(findings=[finding("kept")], whole=[finding("not shown", "the budget was spent")])
    assert "(the budget was spent)" in headline(unsure)
    assert headline(report(state="interrupted")).startswith("Not finished: 0 runs")


def test_the_horizon_says_what_could_not_be_seen():
    said = horizon(report(findings=[finding("kept")]))
    assert "Runs of 100 steps" in said
    assert "the answer is for 1,000 steps" in said
    assert "0.002 beyond the accepted one" in said


def test_rows_name_the_final_test():
    found = rows(report(findings=[finding("kept", "because")], whole=[finding(None)]))
    assert found[0] == ["fast", "kept", "1.50x", "0.80x", "+0.0010 (-0.0040 to +0.0060)", "5", "because"]
    assert found[1][:2] == ["together", "open"]
    assert found[1][-1].startswith("fast: ")


def test_a_recipe_that_passed_is_named_and_not_turned_on():
    kept = finding("kept").model_copy(update={"candidate": Candidate(name="half", recipe=True, share=0.5)})
    said = headline(report(findings=[kept], state="complete"))
    assert said.startswith("Nothing is turned on: no candidate was shown")
    assert said.endswith("The recipe half keeps the metric in 67% of the time.")
