"""Planted effects: levers that gain, cost, do nothing, raise, or have a price."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

from torchboost.calibration import search as calibration_search
from torchboost.calibration.choice import Verdict
from torchboost.calibration.search import Price
from torchboost.measure.evidence import Interval


class Planted:
    """Steps of a length times the factors of the levers, with noise; the clock counts what was spent."""

    def __init__(
        self,
        factors: dict[str, float],
        *,
        step: float = 0.01,
        noise: float = 0.05,
        seed: int = 0,
        prices: dict[str, float] | None = None,
        pairs: dict[frozenset[str], float] | None = None,
        interrupts: bool = True,
        warm: int = 0,
    ) -> None:
        self.factors, self.noise, self.prices, self.together = factors, noise, prices or {}, pairs or {}
        self.step, self.interrupts, self.warm, self.longest = step, interrupts, warm, 0.0
        self.random = random.Random(seed)
        self.pauses: dict[str, float] = {}
        self.host = 1.0
        self.now = 0.0
        self.incumbent: tuple[str, ...] = ()
        self.challenger: tuple[str, ...] = ()
        self.built: list[tuple[str, ...]] = []

    def _step(self, levers: tuple[str, ...]) -> float:
        seconds = self.step
        for lever in levers:
            seconds *= self.factors[lever]
        for some, factor in self.together.items():
            seconds *= factor if some <= set(levers) else 1.0
        seconds *= self.random.lognormvariate(0.0, self.noise)
        if self.random.random() < 0.05:
            seconds *= 3  # a disturbance of a shared machine
        self.now += seconds
        return seconds

    def build(self, levers: Sequence[str], *, within: float) -> float:
        self.built += [tuple(levers)] if levers else []
        if "raises" in levers:
            raise RuntimeError("planted\nsecond line")
        price = sum(self.prices.get(lever, 0.0) for lever in levers)
        pause = self.pauses.pop(levers[-1], 0.0) if levers else 0.0
        steps = self.warm * self.step * math.prod(self.factors[lever] for lever in levers)
        seconds = price + pause + (steps or 0.02)
        self.longest = max(self.longest, seconds)
        self.now += min(seconds, within) if self.interrupts else seconds
        if self.interrupts and seconds > within:
            raise TimeoutError("its first steps take too long")
        self.challenger = tuple(levers)
        return price

    def sample(self, *, within: float) -> tuple[float, float]:
        start = self.now
        times = self._step(self.incumbent), self._step(self.challenger)
        self.longest = max(self.longest, self.now - start)
        if self.now - start <= within or not self.interrupts:
            return times
        self.now = start + within
        return (times[0] if times[0] <= within else math.inf), math.inf

    def promote(self) -> None:
        self.incumbent = self.challenger

    def host_share(self) -> float:
        return self.host

    def elapsed(self) -> float:
        return self.now


def search(
    levers: Sequence[str], bench: Planted, *, seconds: float = 0.0, **told: Any
) -> tuple[tuple[Verdict, ...], Interval | None]:
    """Search within a budget that does not depend on the steps."""
    told = {"step_seconds": bench.step, "budget": lambda *_: seconds, **told}
    return calibration_search.search(levers, bench, **told)  # pyright: ignore[reportArgumentType]


FACTORS = {"gains": 1 / 1.2, "costs": 1.2, "nothing": 1.0, "raises": 1.0}


def test_planted_effects_are_found_19_times_in_20():
    kept = dict.fromkeys(FACTORS, 0)
    for seed in range(150):
        for verdict in search(list(FACTORS), Planted(FACTORS, seed=seed), seconds=60)[0]:
            kept[verdict.lever] += verdict.kept
    assert kept["gains"] >= 142
    assert kept["costs"] == kept["raises"] == 0
    assert kept["nothing"] <= 9


def test_what_is_said_of_a_lever_that_is_off_is_what_its_interval_says():
    """A gain of half a percent in quiet steps, one of a third in wild ones, and none."""
    said: set[str] = set()
    for factor, noise in ((1 / 1.005, 1e-4), (1 / 1.3, 2.0), (1.0, 0.02)):
        for seed in range(10):
            ((verdict,), _) = search(["lever"], Planted({"lever": factor}, noise=noise, seed=seed), seconds=60)
            if verdict.kept or verdict.ratio is None:
                continue
            lead = next(lead for lead in ("it gains too little: ", "no gain was found: ", "") if lead in verdict.reason)
            said.add(lead or "open")
            assert lead != "no gain was found: " or (verdict.ratio.low <= 1 and verdict.ratio.mid < 1.02)
            assert lead != "it gains too little: " or (verdict.ratio.low > 1 and verdict.ratio.mid < 1.02)
            assert lead or f"{verdict.pairs} pairs did not decide ({verdict.ratio.mid:.2f} times" in verdict.reason
    assert said == {"it gains too little: ", "no gain was found: ", "open"}


SEQUENCES = (
    {"slow": 60.0, "nothing": 1.0, "gains": 0.8},
    {"gains": 0.8, "slow": 60.0, "compile": 0.7},
    {"nothing": 1.0, "gains": 0.9, "little": 0.97, "compile": 0.9},
    {"slow": 60.0, "slower": 80.0, "slowest": 400.0},
    {"costs": 1.1, "gains": 0.9, "compile": 60.0},
)


@pytest.mark.parametrize("interrupts", [True, False])
def test_no_sequence_of_levers_takes_more_than_its_share(interrupts):
    """If nothing can be interrupted, one build or pair of steps that was begun in time is completed."""
    built = 0
    for step, factors, budget, price in itertools.product((0.01, 0.5), SEQUENCES, (12, 30, 100, 1000), (0.1, 200.0)):
        seconds = min(60.0, budget * step)
        bench = Planted(factors, step=step, prices={"compile": price}, interrupts=interrupts, warm=2)
        prices, undecided = {"compile": Price(expected=5.0)}, dict.fromkeys(factors, True)
        verdicts, _ = search(
            list(factors), bench, seconds=seconds, steps=100 * budget, prices=prices, undecided=undecided
        )
        built += len(bench.built)
        assert bench.now <= 1.1 * seconds + (0.0 if interrupts else bench.longest)
        slow = [verdict for verdict in verdicts if verdict.kept and factors[verdict.lever] >= 60]
        # Nothing speaks against a lever for which no time was left; it is as without a trial.
        assert all("on as usual" in verdict.reason for verdict in slow), (step, factors, budget)
    assert built > 50


def test_an_error_is_the_reason():
    (verdict,) = search(["raises"], Planted(FACTORS), seconds=60)[0]
    assert not verdict.kept
    assert verdict.reason == "it raised RuntimeError: planted"


def test_what_is_kept_is_the_base_of_the_next():
    bench = Planted({"one": 0.5, "two": 0.5})
    assert all(verdict.kept for verdict in search(["one", "two"], bench, seconds=60)[0])
    assert bench.built[:2] == [("one",), ("one", "two")]


def test_a_lever_that_pays_only_with_a_later_one_is_tried_again():
    bench = Planted({"format": 1.0, "half": 0.8}, pairs={frozenset({"format", "half"}): 0.7})
    verdicts = {verdict.lever: verdict for verdict in search(["format", "half"], bench, seconds=60)[0]}
    assert verdicts["format"].kept
    assert verdicts["half"].kept


def test_levers_that_are_slower_together_than_nothing_go():
    """Each pays when it is added; the machine then changes, and all of it is slower than the plain step."""

    class Changing(Planted):
        def build(self, levers: Sequence[str], *, within: float) -> float:
            self.factors = self.factors if levers else {"one": 1.5, "two": 1.5}
            return super().build(levers, within=within)

    verdicts, ratio = search(["one", "two"], Changing({"one": 0.8, "two": 0.8}), seconds=60)
    assert not any(verdict.kept for verdict in verdicts)
    assert "slower than the plain step" in verdicts[0].reason
    assert ratio is None


@pytest.mark.parametrize(
    ("factors", "gain"), [({"one": 0.8, "two": 0.8}, 1 / 0.64), ({"one": 0.8, "two": 1.1}, 1.25), ({"one": 1.1}, None)]
)
def test_the_gain_of_all_together(factors, gain):
    _, ratio = search(list(factors), Planted(factors, noise=0.02), seconds=60)
    if gain is None:
        assert ratio is None
    else:
        assert ratio is not None
        assert ratio.mid == pytest.approx(gain, rel=0.05)


def test_a_price_must_be_repaid():
    for steps, kept, reason in (
        (None, False, "total_steps=..."),
        (500, False, "do not repay it"),
        (100_000, True, "times as fast"),
    ):
        bench = Planted({"nothing": 1.0, "compile": 0.7}, prices={"compile": 5.0})
        levers = ["compile"] if steps is None else ["nothing", "compile"]
        verdicts = search(levers, bench, seconds=60, steps=steps, prices={"compile": Price(expected=5.0)})[0]
        assert verdicts[-1].kept is kept
        assert reason in verdicts[-1].reason


def test_a_price_that_turns_out_higher_than_the_saving_drops_the_lever():
    bench = Planted({"nothing": 1.0, "compile": 0.9}, prices={"compile": 30.0})
    verdicts = search(["nothing", "compile"], bench, seconds=60, steps=10_000, prices={"compile": Price(expected=5.0)})[
        0
    ]
    assert not verdicts[-1].kept
    assert "costs 30 s" in verdicts[-1].reason
    assert [verdict.price for verdict in verdicts] == [0, 30]


@pytest.mark.parametrize(("times", "kept"), [(1, True), (3, False)])
def test_a_price_that_the_run_pays_for_each_graph_must_be_repaid_in_all(times, kept):
    bench = Planted({"nothing": 1.0, "compile": 0.9}, prices={"compile": 5.0})
    prices = {"compile": Price(expected=1.0, times=times)}
    verdicts = search(["nothing", "compile"], bench, seconds=60, steps=10_000, prices=prices)[0]
    assert verdicts[-1].kept is kept
    assert verdicts[-1].price == 5
    assert kept or "costs 15 s" in verdicts[-1].reason


def test_a_lever_that_takes_longer_than_the_trial_is_left_out():
    factors, given = {"nothing": 1.0, "compile": 0.5}, {"steps": 10**6, "prices": {"compile": Price(expected=5.0)}}
    bench = Planted(factors, prices={"compile": 30.0})
    verdicts, _ = search(["nothing", "compile"], bench, seconds=20, **given)
    assert not verdicts[1].kept
    assert bench.now <= 20 * (1 + 1e-9)
    longer = Planted(factors, prices={"compile": 30.0})
    assert search(["nothing", "compile"], longer, seconds=verdicts[1].longer, **given)[0][1].kept


def test_a_lever_whose_price_took_all_the_time_is_timed_nevertheless():
    """Within the tenth by which a budget may be exceeded."""
    bench = Planted({"compile": 0.5}, prices={"compile": 19.9})
    (verdict,), _ = search(["compile"], bench, seconds=20, steps=10**6, prices={"compile": Price(expected=5.0)})
    assert verdict.kept
    assert verdict.pairs >= 7
    assert 20 < bench.now <= 22


def test_a_price_above_what_is_left_is_not_paid():
    bench = Planted({"compile": 0.5}, prices={"compile": 50.0})
    (verdict,) = search(["compile"], bench, seconds=20, steps=10**6, prices={"compile": Price(expected=50.0)})[0]
    assert not verdict.kept
    assert bench.built == []
    given = {"steps": 10**6, "prices": {"compile": Price(expected=50.0)}}
    bench = Planted({"nothing": 1.0, "compile": 0.5}, prices={"compile": 50.0})
    assert search(["nothing", "compile"], bench, seconds=verdict.longer, **given)[0][1].kept


def test_an_undecided_lever_stays_as_it_was_unless_its_samples_speak_against_it():
    for factor, kept in ((0.9, True), (1.1, False)):
        bench = Planted({"lever": factor}, noise=0.001)
        (verdict,) = search(["lever"], bench, seconds=0.05, undecided={"lever": True})[0]
        assert verdict.kept is kept
        assert verdict.undecided
        assert verdict.reason.endswith(f"; {'kept as usual' if kept else 'left out, since they lean to slower'}")
        assert verdict.longer == 1
        assert verdict.ratio is None


def test_a_lever_without_time_stays_as_it_was():
    """The budget ends while the first lever is timed. The others are as without a trial, and nothing else is."""
    factors = {"first": 0.5, "second": 0.9, "third": 1.0}
    bench = Planted(factors, noise=0.001)
    undecided = {"first": True, "second": True, "third": False}
    bench.pauses = {"first": 0.1}
    verdicts, ratio = search(list(factors), bench, seconds=0.16, undecided=undecided, step_seconds=0.01)
    found = {verdict.lever: verdict for verdict in verdicts}
    assert (found["second"].kept, found["third"].kept) == (True, False)
    assert "not measured" in found["second"].reason
    assert "on as usual" in found["second"].reason
    assert found["second"].pairs == 0
    assert ratio is None


@pytest.mark.parametrize(
    ("shrinks", "longer"),
    [
        (True, 20),  # the 16 s that were announced, of which faster steps left 4
        (False, 4),  # twice the time that it had
    ],
)
def test_a_lever_without_time_is_told_why_and_how_it_gets_more(shrinks: bool, longer: int):
    bench = Planted({"unpad": 0.25, "second": 0.9}, step=0.1, noise=0.001)
    bench.pauses = {"unpad": 5.0 if shrinks else 1.7}
    verdicts, _ = calibration_search.search(
        ["unpad", "second"],
        bench,  # pyright: ignore[reportArgumentType]
        budget=lambda step: 160 * step if shrinks else 1.7,
        undecided={"unpad": False, "second": True},
        step_seconds=0.1,
    )
    assert verdicts[1].kept
    assert "not measured" in verdicts[1].reason
    assert verdicts[1].longer == longer


@pytest.mark.parametrize(("factor", "kept"), [(1.0, True), (200.0, False)])
def test_a_step_that_the_end_of_the_trial_interrupts_says_nothing_unless_it_had_time_for_several(factor, kept):
    bench = Planted({"lever": factor}, noise=0.001)
    told = {"undecided": {"lever": True}, "step_seconds": 0.01}
    (verdict,), _ = search(["lever"], bench, seconds=0.035 if kept else 1.0, **told)
    assert verdict.kept is kept
    assert "1000000" not in verdict.reason


def test_a_lever_that_stayed_without_time_is_dropped_if_it_is_timed_later():
    """The price that time was set aside for is not needed, so the lever is tried again."""
    bench = Planted({"slow": 1.3, "compile": 0.5}, step=0.01, noise=0.01, prices={"compile": 0.2})
    bench.pauses = {"slow": 0.0}
    given = {"undecided": {"slow": True}, "prices": {"compile": Price(expected=0.3)}, "step_seconds": 0.01}
    verdicts, _ = search(["slow", "compile"], bench, seconds=2.0, steps=10**6, **given)
    found = {verdict.lever: verdict for verdict in verdicts}
    assert not found["slow"].kept
    assert found["slow"].pairs > 0


@pytest.mark.parametrize(("price", "kept"), [(40.0, True), (70.0, False)])
def test_levers_that_do_nothing_leave_the_time_that_a_price_needs(price: float, kept: bool):
    factors = {f"nothing {k}": 1.0 for k in range(4)} | {"compile": 0.75}
    bench = Planted(factors, step=0.1, prices={"compile": price})
    verdicts, _ = search(list(factors), bench, seconds=60, steps=10**6, prices={"compile": Price(expected=20.0)})
    assert verdicts[-1].kept is kept
    assert all(verdict.pairs >= 7 for verdict in verdicts[:-1])
    assert bench.now <= 66


def test_no_time_is_set_aside_for_a_price_that_is_not_paid():
    """A lever that gains little needs more than a quarter of the budget for a decision."""
    for steps in (None, 100_000):
        bench = Planted({"little": 0.99, "compile": 0.5}, prices={"compile": 5.0})
        prices = {"compile": Price(expected=5.0)}
        verdicts, _ = search(["little", "compile"], bench, seconds=1.5, steps=steps, prices=prices)
        assert verdicts[0].pairs >= 28


@pytest.mark.parametrize("paused", [("first",), ("second",), ("first", "second")])
def test_a_pause_of_the_machine_does_not_decide_about_a_lever(paused: tuple[str, ...]):
    """Levers without a price have 15 s together, and the machine stands still for 7 s in all while they are built."""
    factors = {"first": 1 / 1.3, "second": 1 / 1.3, "compile": 0.8}
    lost = 0
    for seed in range(40):
        bench = Planted(factors, step=0.1, prices={"compile": 10.0}, seed=seed)
        bench.pauses = dict.fromkeys(paused, 7.0 / len(paused))
        prices = {"compile": Price(expected=20.0)}
        verdicts, _ = search(list(factors), bench, seconds=60, steps=10**6, prices=prices)
        lost += sum(not verdict.kept for verdict in verdicts)
        assert bench.now <= 66
    assert lost <= 2


def test_a_price_that_pays_only_with_a_lever_that_gains_nothing_alone():
    """As a compiled network of convolutions that is fast in another memory format only."""
    factors = {"format": 1.0, "costs": 1.2, "compile": 1.1}
    together = {frozenset({"format", "compile"}): 0.7}
    for budget, kept in ((60, ["format", "compile"]), (14, [])):
        bench = Planted(factors, pairs=together, prices={"compile": 5.0})
        prices = {"compile": Price(expected=5.0)}
        verdicts, ratio = search(list(factors), bench, seconds=budget, steps=10**6, prices=prices)
        assert [verdict.lever for verdict in verdicts if verdict.kept] == kept
        assert bench.now <= 1.1 * budget
        if kept:
            assert "together with compile" in verdicts[0].reason
            assert ratio.mid == pytest.approx(1 / (1.1 * 0.7), rel=0.05)
            assert ("format", "compile") in bench.built


def test_a_lever_that_had_no_time_before_compilation_has_it_after():
    """Steps of the first lever take so long that nothing is left for the second one until compilation is decided."""
    factors = {"slow": 20.0, "gains": 1 / 1.2, "compile": 0.8}
    bench = Planted(factors, step=0.2, prices={"compile": 1.0})
    bench.pauses = {"slow": 6.0}
    verdicts, _ = search(list(factors), bench, seconds=60, steps=10**6, prices={"compile": Price(expected=20.0)})
    assert [verdict.kept for verdict in verdicts] == [False, True, True]
    assert bench.built[-1] == ("compile", "gains")


def test_a_hopelessly_slow_lever_costs_two_pairs():
    bench = Planted({"slow": 15.0, "gains": 0.8})
    verdicts, _ = search(["slow", "gains"], bench, seconds=60)
    assert [verdict.kept for verdict in verdicts] == [False, True]
    assert verdicts[0].pairs == 2
    assert verdicts[0].reason == "a step is clearly slower in each of 2 pairs"


def compiled(**forms: float) -> Planted:
    """Compilation that takes 5 s and gains a quarter; its forms cost as much and change a step by these factors."""
    factors = {"compile": 0.8, **{name: 0.8 * factor for name, factor in forms.items()}}
    return Planted(factors, noise=0.02, prices=dict.fromkeys(factors, 5.0))


FORMS = {"compile": ["graphs", "tuned"], "graphs": ["both"]}
PRICES = {"compile": Price(expected=5.0)} | dict.fromkeys(["graphs", "tuned", "both"], Price(expected=5.0))


@pytest.mark.parametrize(
    ("factors", "form", "tried"),
    [
        ({"graphs": 0.8, "tuned": 1.0, "both": 0.6}, "both", ["compile", "graphs", "both"]),
        ({"graphs": 0.8, "tuned": 0.5, "both": 1.0}, "graphs", ["compile", "graphs", "both"]),
        ({"graphs": 1.0, "tuned": 0.8, "both": 0.5}, "tuned", ["compile", "graphs", "tuned"]),
        ({"graphs": 1.2, "tuned": 1.0, "both": 0.5}, "", ["compile", "graphs", "tuned"]),
    ],
)
def test_forms_of_a_lever_are_tried_in_its_place_one_after_the_other(factors, form, tried):
    bench = compiled(**factors)
    (verdict,), ratio = search(["compile"], bench, seconds=60, steps=10**6, prices=PRICES, forms=FORMS)
    assert verdict.kept
    assert verdict.form == form
    assert bench.built == [(name,) for name in tried]
    assert bench.incumbent == (form or "compile",)
    assert all(f"{name}: " in verdict.reason for name in tried[1:])
    assert verdict.price == pytest.approx(5.0 * len(tried))
    assert ratio is not None
    assert ratio.mid == pytest.approx(1.25 / factors.get(form, 1.0), rel=0.05)


@pytest.mark.parametrize(("host", "form"), [(0.5, "tuned"), (0.9, "graphs")])
def test_a_form_that_saves_time_of_the_host_is_tried_only_if_that_is_the_limit(host: float, form: str):
    prices = PRICES | {"graphs": Price(expected=5.0, of_host=True)}
    bench = compiled(graphs=0.8, tuned=0.8, both=1.0)
    bench.host = host
    (verdict,), _ = search(["compile"], bench, seconds=60, steps=10**6, prices=prices, forms=FORMS)
    assert verdict.form == form
    assert (("graphs",) in bench.built) is (host > 0.7)
    assert ("the host, which is busy for 50 % of a step" in verdict.reason) is (host == 0.5)


@pytest.mark.parametrize(("steps", "paid"), [(5_000, False), (10**6, True)])
def test_a_form_whose_price_is_not_repaid_is_not_paid(steps, paid):
    """The price that is expected of a form grows with the one that was measured: here threefold."""
    prices = PRICES | {"compile": Price(expected=5 / 3), "graphs": Price(expected=5 / 3, best_ratio=1.02)}
    bench = compiled(graphs=0.8)
    (verdict,), _ = search(["compile"], bench, seconds=60, steps=steps, prices=prices, forms={"compile": ["graphs"]})
    assert verdict.kept
    assert (("graphs",) in bench.built) is paid
    said = r"5,000 steps do not repay it: at best it saves 0\.\d s, and it costs about 5\.0 s"
    assert paid or re.search(said, verdict.reason), verdict.reason


@pytest.mark.parametrize("longer", [0.0, 40.0])
def test_a_form_gets_more_time_if_the_run_repays_it(longer):
    asked = []

    def answer(step_seconds: float, price: Price | None = None, spent: float = 0.0) -> float:
        asked.extend([(spent, step_seconds, price.expected)] if price is not None else [])
        return spent + longer if spent and longer else 8.0

    bench = compiled(graphs=0.8)
    forms = {"compile": ["graphs"]}
    (verdict,), _ = search(["compile"], bench, budget=answer, steps=10**6, prices=PRICES, forms=forms)
    assert verdict.kept
    assert (verdict.form == "graphs") is (longer > 0)
    assert longer or "to try it takes about 5.0 s, and the trial has" in verdict.reason
    ((spent, step_seconds, expected),) = asked
    assert 5 < spent < 8
    assert step_seconds == pytest.approx(0.01, rel=0.2)
    assert expected == pytest.approx(5.0)


def test_a_form_that_raises_leaves_the_lever_as_it_is():
    bench = Planted({"compile": 0.8, "raises": 0.5}, noise=0.02, prices={"compile": 5.0})
    prices = {"compile": Price(expected=5.0), "raises": Price(expected=5.0)}
    forms = {"compile": ["raises"]}
    (verdict,), ratio = search(["compile"], bench, seconds=60, steps=10**6, prices=prices, forms=forms)
    assert (verdict.kept, verdict.form) == (True, "")
    assert "raises: it raised RuntimeError: planted" in verdict.reason
    assert ratio == verdict.ratio


def test_a_lever_that_is_much_faster_in_each_of_four_pairs_is_kept_without_more():
    """A fifth one gives its number, if there is the time."""
    for seconds, pairs, said in (
        (60, 5, "a step is 2.98 times as fast"),
        (0.12, 4, "clearly faster in each of 4 pairs"),
    ):
        (verdict,), _ = search(["unpad"], Planted({"unpad": 1 / 3}, noise=0.01), seconds=seconds)
        assert (verdict.kept, verdict.pairs) == (True, pairs)
        assert said in verdict.reason


def test_fewer_than_five_pairs_show_no_ratio():
    for factor, seconds in ((1.2, 60.0), (0.83, 0.09), (5.0, 60.0)):
        (verdict,), _ = search(["autocast"], Planted({"autocast": factor}, noise=0.01), seconds=seconds)
        assert 0 < verdict.pairs < 5, (factor, verdict)
        assert "times as" not in verdict.reason
        assert f"{verdict.pairs} pairs" in verdict.reason


def test_a_lever_that_is_on_without_a_trial_needs_two_such_pairs():
    for seconds, pairs in ((60, 5), (0.5, 2)):
        bench = Planted({"unpad": 1 / 3}, noise=0.01)
        (verdict,), _ = search(["unpad"], bench, seconds=seconds, undecided={"unpad": True})
        assert (verdict.kept, verdict.pairs) == (True, pairs)


@pytest.mark.parametrize(("price", "waits"), [(None, False), (1e6, False), (0.5, True)])
def test_a_run_that_became_faster_gives_a_trial_less_time_unless_a_price_waits_for_it(price, waits):
    """The trial takes 100 of the steps that the run then has: 1 s, or 0.25 s after "unpad"."""
    bench = Planted({"unpad": 1 / 4, "nothing": 1.0, "compile": 0.8}, noise=0.01, prices={"compile": price or 0.0})
    prices = {} if price is None else {"compile": Price(expected=price)}
    calibration_search.search(
        ["unpad", "nothing", *prices],
        bench,  # pyright: ignore[reportArgumentType]
        budget=lambda step: 100 * step,
        steps=10**5,
        prices=prices,
        undecided={"unpad": True},
        step_seconds=bench.step,
    )
    assert (("unpad", "compile") in bench.built) == waits
    assert waits or bench.now < 0.5


def test_all_together_are_compared_with_the_plain_step_if_compilation_has_used_up_the_time():
    bench = Planted({"a": 0.6, "b": 0.8, "compile": 1.2}, noise=0.01, prices={"compile": 6.4})
    prices = {"compile": Price(expected=5.0)}
    verdicts, ratio = search(["a", "b", "compile"], bench, seconds=6.5, steps=10**6, prices=prices)
    assert [verdict.kept for verdict in verdicts] == [True, True, False]
    assert ratio is not None
    assert ratio.mid == pytest.approx(1 / 0.48, rel=0.05)
    assert bench.now < 1.05 * 6.5


@pytest.mark.parametrize(("compiled", "kept"), [(0.5, ("autocast", "compile")), (0.95, ("unpad", "autocast"))])
def test_a_lever_that_does_nothing_in_compiled_code_gives_way_to_it_or_stays(compiled: float, kept: tuple[str, ...]):
    """With it, a step takes 0.7 times as long. Compiled code lacks it, and is compared without it."""
    bench = Planted({"unpad": 0.7, "autocast": 0.8, "compile": compiled}, prices={"compile": 0.5})
    verdicts, ratio = search(
        ["unpad", "autocast", "compile"],
        bench,
        seconds=60,
        steps=10**6,
        prices={"compile": Price(expected=0.5)},
        inert=["unpad"],
    )
    assert tuple(verdict.lever for verdict in verdicts if verdict.kept) == kept
    assert ("autocast", "compile") in bench.built
    assert not any({"unpad", "compile"} <= {*levers} for levers in bench.built)
    assert ratio is not None
    assert ratio.low < 1 / (0.8 * (compiled if "compile" in kept else 0.7)) < ratio.high
    if "unpad" not in kept:
        assert "compile gains more, and this does nothing with it" in verdicts[0].reason


@pytest.mark.parametrize("inert", [[], ["unpad"]])
def test_a_lever_left_open_is_not_tried_again_where_it_does_nothing(inert: list[str]):
    bench = Planted({"unpad": 0.97, "compile": 0.5}, step=0.1, prices={"compile": 0.5})
    prices = {"compile": Price(expected=0.5)}
    verdicts, _ = search(["unpad", "compile"], bench, seconds=6, steps=10**6, prices=prices, inert=inert)
    assert [verdict.lever for verdict in verdicts if verdict.kept] == ["compile"]
    assert (("compile", "unpad") in bench.built) is (not inert)
