"""A goal lets a run end that has stock's metric, hardly ever another one, and says what it cannot judge."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.reports import contestant, report
from tests.tuning.test_report import report as tuning
from torchboost import Goal
from torchboost.measure.evidence import Curve
from torchboost.tuning.report import FRESH_SEED, Rate, Run

FINALS = [0.912, 0.915, 0.911, 0.914, 0.913]
SPREAD = math.sqrt(2.5e-6)
"""The standard deviation of these finals."""


def end(goal: Goal, metrics: Any) -> int | None:
    """Return the evaluation at which the run ends."""
    return next((place for place, metric in enumerate(metrics) if goal.update(float(metric))), None)


def drawn(draw: np.random.Generator, seeds: int, drop: float) -> Goal:
    """Return a goal whose stock ends at 0 on average over its seeds, with the spread 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few seeds that differ much
        return Goal(draw.standard_normal(seeds).tolist(), drop=drop)


@pytest.mark.filterwarnings("ignore:metric. the first evaluation")  # by chance
@pytest.mark.parametrize("seeds", [3, 8])
def test_a_run_that_never_gets_there_hardly_ever_ends(seeds: int):
    """Its level stays at stock minus the drop, where a single comparison per evaluation would soon be wrong."""
    flat, evaluations = -1.0, 80
    noises = {
        "as stock's": lambda draw: draw.standard_normal(evaluations),
        "small": lambda draw: 0.1 * draw.standard_normal(evaluations),
        "with outliers": lambda draw: draw.standard_t(3, evaluations),
        "shrinking": lambda draw: np.linspace(1, 0.05, evaluations) * draw.standard_normal(evaluations),
        "growing": lambda draw: np.linspace(0.05, 2, evaluations) * draw.standard_normal(evaluations),
        "rising": lambda draw: 0.3 * draw.standard_normal(evaluations) - 10 * np.exp(-np.arange(evaluations) / 8),
    }
    for kind, noise in noises.items():
        draw = np.random.default_rng(0)
        ended = [end(drawn(draw, seeds, 1.0), flat + noise(draw)) is not None for _ in range(100)]
        assert sum(ended) <= 5, kind


def test_a_run_that_gets_there_ends_soon_and_not_before():
    levels = -10 * np.exp(-np.arange(60) / 6)  # ends as stock does
    for drop, seeds, noise, within in ((2.0, 8, 0.3, 20), (4.0, 5, 0.3, 15), (4.0, 5, 1.0, 25)):
        draw, crossed = np.random.default_rng(0), int(np.argmax(levels > -drop))
        goals = [drawn(draw, seeds, drop) for _ in range(100)]
        ended = [end(goal, levels + noise * draw.standard_normal(60)) for goal in goals]
        assert sum(place is not None and crossed <= place <= crossed + within for place in ended) >= 85, (drop, seeds)
        assert not any(place is not None and place < crossed for place in ended)


@pytest.mark.filterwarnings("ignore:metric. the first evaluation")
def test_a_dip_or_an_early_outlier_does_not_blind_the_goal():
    noise = 0.0005 * np.random.default_rng(0).standard_normal(100)
    for before in ([0.92] * 3 + [0.6] * 20, [0.95, 0.1], [1e160, 1e160, 0.1]):
        place = end(Goal(FINALS, drop=0.005), [*before, *(0.913 + noise)])
        assert place is not None
        assert len(before) + 7 <= place <= len(before) + 20


def test_the_target_is_the_upper_bound_of_stocks_mean_less_the_drop():
    bound = 2.3329 * SPREAD / math.sqrt(5)  # Student's quantile of 0.96 with 4 degrees of freedom
    assert Goal(FINALS, drop=0.004).target == pytest.approx(0.913 + bound - 0.004, abs=1e-6)
    lower = Goal([-value for value in FINALS], drop=0.004, higher_is_better=False)
    assert lower.target == pytest.approx(-0.913 - bound + 0.004, abs=1e-6)
    rising = np.linspace(0.9, 0.93, 40)
    assert end(lower, -rising) == end(Goal(FINALS, drop=0.004), rising) is not None
    # a third of the drop counts as the spread of finals that hardly differ
    assert Goal([1.0, 1.0, 1.0], drop=0.3).target == pytest.approx(1 + 3.3198 * 0.1 / math.sqrt(3) - 0.3, abs=1e-4)


def run(name: str, seed: int, metric: float) -> Run:
    return Run(name=name, seed=seed, steps=100, metric=metric, setup_seconds=0, seconds=1, wall_seconds=1)


def curve(seed: int, metric: float) -> Curve:
    return Curve(seed=seed, epochs=[1, 2], seconds=[1, 2], train_loss=[1, 1], metric=[0.5, metric])


def test_the_finals_come_from_a_list_or_a_report(tmp_path: Path):
    runs = [run("stock, 0.5 times the rate", FRESH_SEED + seed, metric) for seed, metric in enumerate(FINALS)]
    others = [
        run("stock, 0.5 times the rate", 0, 0.99),
        run("stock", FRESH_SEED, 0.8),
        run("Muon at 0.02", FRESH_SEED, 0.7),
    ]
    tuned = tuning(runs=[*others, *runs], rate=Rate(best=0.5))
    assert tuned.stock.label == "stock, 0.5 times the rate"
    curves = [curve(seed, metric) for seed, metric in enumerate(FINALS)]
    stock = contestant("stock", "stock", 0.05).model_copy(update={"curves": curves})
    benched = report(contestant("O1", "level", 0.02), stock).model_copy(update={"metric_higher_is_better": False})
    (tmp_path / "list.json").write_text(json.dumps(FINALS))
    files = [tmp_path / "list.json", tuned.save(tmp_path / "tune.json"), benched.save(tmp_path / "bench.json")]
    expected = Goal(FINALS, drop=0.004).target
    for like in (FINALS, torch.tensor(FINALS, dtype=torch.float64), str(files[0]), files[0], files[1]):
        assert Goal(like, drop=0.004).target == expected  # pyright: ignore[reportArgumentType]
    assert Goal(files[2], drop=0.004).target == Goal(FINALS, drop=0.004, higher_is_better=False).target
    for file, higher in ((files[1], False), (files[2], True)):
        with pytest.raises(ValueError, match=r"says that .* values of the metric are better, and higher_is_better is"):
            Goal(file, drop=0.004, higher_is_better=higher)


def test_what_holds_no_finals_of_stock_is_refused(tmp_path: Path):
    texts = {
        "an empty tuning": (tuning().model_dump_json(), "found 0 final metrics of stock; a goal needs at least two"),
        "a single run": ("[0.9]", "found 1 final metrics"),
        "no report": ('{"extra": {}}', "holds no finals of stock; give a report of torchboost tune or bench, or"),
        "no JSON": ("0.9, 0.8", "cannot be read: (.|\n)*; give a report"),
        "a broken report": ('{"runs": [], "format": 7}', "cannot be read: (.|\n)*; give a report"),
        "a diverged run": ("[0.9, NaN]", "found finals that are not finite"),
    }
    for name, (text, said) in texts.items():
        file = tmp_path / f"{name}.json"
        file.write_text(text)
        with pytest.raises(ValueError, match=said) as raised:
            Goal(file, drop=0.004)
        assert f"{name}.json" in str(raised.value)
    with pytest.raises(FileNotFoundError):
        Goal(tmp_path / "missing.json", drop=0.004)


def test_a_goal_checks_what_it_is_given():
    refused: list[tuple[type[Exception], dict[str, Any], str]] = [
        (TypeError, {"like": 0.9}, "give the metrics of stock at the end of its runs"),
        (TypeError, {"like": ["a", "b"]}, "give the metrics of stock at the end of its runs"),
        (TypeError, {"like": dict(enumerate(FINALS))}, "give the metrics of stock at the end of its runs"),
        (ValueError, {"like": [1.0, 1.0], "drop": 0}, "found 2 equal finals and drop=0"),
        (ValueError, {"drop": -0.1}, "drop: found -0.1"),
        (ValueError, {"error": 1.5}, "error: found 1.5"),
        (TypeError, {"higher_is_better": "max"}, "higher_is_better: found 'max'"),
        (TypeError, {"log": "goal.log"}, "log: found 'goal.log'"),
    ]
    for kind, wrong, said in refused:
        with pytest.raises(kind, match=said):
            Goal(**({"like": FINALS, "drop": 0.004} | wrong))
    with pytest.raises(ValueError, match=r"metric: found the shape \(2,\); give one number"):
        Goal(FINALS, drop=0.004).update(torch.ones(2))
    with pytest.warns(UserWarning, match=r"the 2 finals of stock, 0\.915 on average, .* better than that by 0\.03"):
        Goal([0.92, 0.91], drop=0.005)
    Goal([0.92, 0.91], drop=0)  # asks for more than stock


def test_a_goal_resumes_from_a_checkpoint_and_says_once_that_it_is_reached():
    metrics = (0.913 + 0.001 * np.sin(np.arange(40))).tolist()
    said: list[str] = []
    whole = Goal(FINALS, drop=0.005, log=said.append)
    place = end(whole, metrics)
    assert place is not None
    assert all(whole.update(0.0) for _ in range(3))
    assert said == [
        f"goal: reached after {place + 1} evaluations: the last one is {metrics[place]:.4g}, stock ends at 0.913, the "
        f"mean of 5 runs, and the level must be above {whole.target:.4g}."
    ]
    assert whole.figures() == {"goal/target": whole.target, "goal/evidence": pytest.approx(100, 1), "goal/reached": 1.0}
    first, resumed = Goal(FINALS, drop=0.005), Goal(FINALS, drop=0.005)
    assert end(first, metrics[:5]) is None
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert end(resumed, metrics[5:]) == place - 5
    before = resumed.state_dict()
    other = Goal(FINALS, drop=0.006).state_dict()
    for damaged, reason in (({}, "not complete"), (before | {"test": 1}, "damaged"), (other, "with the target 0.909")):
        with pytest.raises(ValueError, match=reason):
            resumed.load_state_dict(damaged)
        assert resumed.state_dict() == before


def test_a_metric_that_is_not_finite_discards_the_evidence():
    goal = Goal(FINALS, drop=0.005)
    good = (0.913 + 0.0005 * np.sin(np.arange(60))).tolist()
    place = end(Goal(FINALS, drop=0.005), good)
    assert place is not None
    late = end(goal, [*good[: place - 1], math.nan, *good[place:]])
    assert late is not None
    assert late >= 2 * place - 1
    assert end(Goal(FINALS, drop=0.005), [math.inf] * 60) is None
    lost = Goal(FINALS, drop=0.005)
    assert end(lost, [math.nan] * 1200) is None  # half of the error so often would be 0
    assert end(lost, good) is not None


def test_other_units_and_the_wrong_direction_are_said_at_the_first_evaluation():
    """Both would end a run that has learned nothing after eight evaluations."""
    for like, first, lower in ((FINALS, 10.0, False), ([0.31, 0.3, 0.32], 2.3, False), ([31.0, 30.0, 32.0], 0.9, True)):
        goal = Goal(like, drop=0.1 * like[0], higher_is_better=not lower)
        with pytest.warns(UserWarning, match=r"is far (higher|lower), and so better, than all finals.*give both"):
            goal.update(first)
        goal.update(first)  # once
    goal = Goal(FINALS, drop=0.005)
    goal.update(0.1)
    goal.update(0.99)
    Goal(FINALS, drop=0.005).update(0.917)  # continues a good run
