"""The meaning of a report: derived figures per contestant, and sentences computed from them.

Speed is judged by the paired ratio: a gain counts if the whole interval is above 1. The metric is judged by
non-inferiority: the difference to stock is paired by seed, and its one-sided bound must be above minus the margin. "No
difference seen" is never taken for "no difference".
"""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchboost.bench.factory import ACCURACY_DROPS
from torchboost.bench.report import wording
from torchboost.measure.evidence import BenchReport, Contestant, Interval, Ratio
from torchboost.measure.statistics import mean_of, mean_ratio, paired_difference
from torchboost.sheet import percent

MARGIN = ACCURACY_DROPS[0]
"""Largest drop of a share metric that counts as unchanged, unless a level promises another: half a point."""

PROMISES: dict[str, float] = dict(zip(("O1", "O2"), ACCURACY_DROPS, strict=True))
"""Level -> the drop that it promises not to exceed. Besides, a level promises to be never slower than stock."""

MIN_GAIN = 1.03
"""A gain of less than 3 % is not worth the complexity."""

LEAST_PAIRS = 6
"""Fewer paired rounds give no interval of 95 %, so nothing is said about the speed."""

BEHIND_HAND = 0.05
"""How much slower than the best loop by hand the levels may be."""

NO_STOCK = "The stock loop was not measured, so no gain is known: add stock to --contestants."

COARSE = 0.2
"""A headline gives both ends of a ratio if its interval is wider than this share of the ratio."""

Tone = Literal["good", "bad", "open"]


class Difference(NamedTuple):
    """Difference of the final metric to stock. Above 0 is better.

    Args:
        mean: Over the common seeds. NaN if one of the two diverged.
        worst, best: One-sided bounds. Infinite with fewer than two seeds.
        seeds: Their number.
        margin: Largest allowed drop. None if it is not defined.
    """

    mean: float
    worst: float
    best: float
    seeds: int
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The derived figures of one contestant. A figure is None if the report does not hold its data.

    Args:
        contestant: The contestant.
        stock: Ratio against the stock loop.
        hand: Ratio against the best hand-tuned loop.
        final: Mean final metric over the seeds.
        difference: Final metric against stock.
        run_seconds: Training time of a whole run including set-up, the mean over the seeds.
        run: Ratio of the times of whole runs, stock's over its own, paired by seed. None with fewer than two seeds.
        run_by_hand: The same against the best hand-tuned loop.
        seconds_to_target: Training time including set-up until the mean metric reaches the target of the report.
        repaid_after: Number of steps that repay the longer warm-up compared with stock.
        peak_bytes: How far the memory rose in a training run, the median over the seeds.
        stock_diverged: Whether a training of stock ended without a finite metric.
    """

    contestant: Contestant
    stock: Ratio | None
    hand: Ratio | None
    final: float | None
    difference: Difference | None
    run_seconds: float | None
    run: Interval | None
    run_by_hand: Interval | None
    seconds_to_target: float | None
    repaid_after: int | None
    peak_bytes: float | None
    stock_diverged: bool


class Sentence(NamedTuple):
    """One sentence, and whether it is good, bad or open."""

    tone: Tone
    text: str


def stock_of(report: BenchReport) -> Contestant | None:
    """Return the stock loop of a report, the first baseline."""
    return next((c for c in report.contestants if c.kind == "stock"), None)


def best_hand(report: BenchReport) -> Contestant | None:
    """Return the fastest hand-tuned loop, the second baseline."""
    hands = [c for c in report.contestants if c.kind == "hand"]
    return min(hands, key=lambda c: c.step_seconds.mid, default=None)


def target_of(report: BenchReport) -> float | None:
    """Return the target metric: the mean final metric of stock, minus half a point for a share."""
    stock = stock_of(report)
    finals = list(finals_of(stock).values()) if stock else []
    if stock is None or not finals or _diverged(stock):
        return None
    target = mean_of(finals) - (MARGIN if wording.is_share(report) else 0.0)
    return target if math.isfinite(target) else None


def summarise(report: BenchReport) -> list[Summary]:
    """Return the derived figures of every contestant, in the order of the report."""
    stock, hand, target = stock_of(report), best_hand(report), target_of(report)
    sign, share = 1.0 if report.metric_higher_is_better else -1.0, wording.is_share(report)
    summaries = []
    for contestant in report.contestants:
        ratios = {r.baseline: r for r in contestant.ratios}
        finals = list(finals_of(contestant).values())
        runs = list(_run_seconds(contestant).values())
        peaks = [curve.peak_bytes for curve in contestant.curves if curve.peak_bytes is not None]
        other = stock is not None and contestant is not stock
        summaries.append(
            Summary(
                contestant=contestant,
                stock=ratios.get(stock.name) if stock and other else None,
                hand=ratios.get(hand.name) if hand and contestant is not hand else None,
                final=mean_of(finals) if finals else None,
                difference=_difference(contestant, stock, sign, share) if stock and other else None,
                run_seconds=mean_of(runs) if runs else None,
                run=_run_ratio(contestant, stock) if stock and other else None,
                run_by_hand=_run_ratio(contestant, hand) if hand and contestant is not hand else None,
                seconds_to_target=None if target is None else _seconds_to(contestant, target, sign),
                repaid_after=_repaid_after(contestant, stock) if stock and other else None,
                peak_bytes=statistics.median(peaks) if peaks else None,
                stock_diverged=stock is not None and _diverged(stock),
            )
        )
    return summaries


def finals_of(contestant: Contestant) -> dict[int, float]:
    """Return the last metric of each seed."""
    return {curve.seed: curve.final for curve in contestant.curves if curve.metric}


def _run_seconds(contestant: Contestant) -> dict[int, float]:
    return {curve.seed: curve.setup_seconds + curve.seconds[-1] for curve in contestant.curves if curve.seconds}


def _run_ratio(contestant: Contestant, baseline: Contestant) -> Interval | None:
    ours, theirs = _run_seconds(contestant), _run_seconds(baseline)
    seeds = [seed for seed in ours if seed in theirs]
    if len(seeds) < 2:
        return None
    return mean_ratio([theirs[seed] for seed in seeds], [ours[seed] for seed in seeds])


def _diverged(contestant: Contestant) -> bool:
    return not all(map(math.isfinite, finals_of(contestant).values()))


def _promise_of(contestant: Contestant) -> float | None:
    """Return the drop that a level promises, also with additions such as ``O1+compile``, or None for others."""
    return PROMISES.get(contestant.name.partition("+")[0]) if contestant.kind == "level" else None


def _difference(contestant: Contestant, stock: Contestant, sign: float, share: bool) -> Difference | None:
    judged = next((q for q in contestant.quality if q.baseline == stock.name), None)
    if judged is not None and not _diverged(contestant) and not _diverged(stock):
        bounds = judged.difference
        return Difference(bounds.mid, bounds.low, bounds.high, judged.seeds, judged.margin)
    margin = _promise_of(contestant) or MARGIN if share else None
    ours, theirs = finals_of(contestant), finals_of(stock)
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return None
    mean = sign * mean_of(ours[seed] - theirs[seed] for seed in seeds)
    if len(seeds) < 2 or not math.isfinite(mean):
        return Difference(mean, -math.inf, math.inf, len(seeds), margin)
    bounds = paired_difference([sign * theirs[seed] for seed in seeds], [sign * ours[seed] for seed in seeds])
    return Difference(bounds.mid, bounds.low, bounds.high, len(seeds), margin)


def _seconds_to(contestant: Contestant, target: float, sign: float) -> float | None:
    for k in range(min((len(curve.metric) for curve in contestant.curves), default=0)):
        if sign * mean_of(curve.metric[k] for curve in contestant.curves) >= sign * target:
            return mean_of(curve.setup_seconds + curve.seconds[k] for curve in contestant.curves)
    return None


def _repaid_after(contestant: Contestant, stock: Contestant) -> int | None:
    saved = stock.step_seconds.mid - contestant.step_seconds.mid
    return max(0, math.ceil((contestant.warmup_seconds - stock.warmup_seconds) / saved)) if saved > 0 else None


def verdicts(report: BenchReport) -> dict[str, list[Sentence]]:
    """Return contestant name -> sentences. A baseline that is compared only with itself has none."""
    share, stock, hand = wording.is_share(report), stock_of(report), best_hand(report)
    verdict: dict[str, list[Sentence]] = {}
    for summary in summarise(report):
        contestant = summary.contestant
        sentences = [
            _speed(contestant.name, summary.stock, "the stock loop"),
            _speed(contestant.name, summary.hand, f"the best hand-tuned loop ({hand.name})")
            if hand and contestant.kind in ("level", "config")
            else None,
            _whole_run(summary, hand),
            _metric(summary, report.metric_name, share, higher=report.metric_higher_is_better),
            _promise(summary, report.metric_name, share),
            _setup(summary, stock),
        ]
        if any(sentences):
            verdict[contestant.name] = [sentence for sentence in sentences if sentence is not None]
    return verdict


def _speed(name: str, ratio: Ratio | None, baseline: str) -> Sentence | None:
    if ratio is None:
        return None
    if ratio.pairs < LEAST_PAIRS:
        found = f"{wording.count(ratio.pairs, 'round')} of step timing"
        text = f"{found} cannot tell {name} from {baseline} in speed; time at least {LEAST_PAIRS}, with --pairs."
        return Sentence("open", text)
    interval = ratio.interval
    shown = wording.ratio_interval(interval)
    if _pays(ratio):
        return Sentence("good", f"{name} runs at {shown} the speed of {baseline}.")
    if interval.high < 1:
        return Sentence("bad", f"{name} is slower than {baseline}: {shown}. Not worth it here.")
    if interval.low > 1:
        return Sentence("bad", f"{name} gains less than 3 % on {baseline}: {shown}. Not worth it here.")
    text = f"{name} shows no speed difference to {baseline}: {shown}."
    if ratio.detectable is not None and ratio.detectable < 1:
        percent = 100 * ratio.detectable
        text += f" A gain of {percent:.{0 if percent >= 10 else 1}f} % or more would most likely have shown."
    elif ratio.detectable is not None:
        text += " The rounds differ so much that not even twice the speed would have shown; time more, with --pairs."
    return Sentence("open", text)


def _whole_run(summary: Summary, hand: Contestant | None) -> Sentence | None:
    """Say how long a run of a configuration takes, which may have another number of steps."""
    run, name = summary.run, summary.contestant.name
    if run is None or summary.contestant.kind != "config":
        return None
    text = f"A whole run of {name} takes {wording.ratio_interval(run.inverse)} the time of stock's"
    if hand is not None and summary.run_by_hand is not None:
        text += f", and {wording.ratio_interval(summary.run_by_hand.inverse)} that of {hand.name}"
    return Sentence("good" if run.low > 1 else "bad" if run.high < 1 else "open", f"{text}.")


def _faster(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.pairs >= LEAST_PAIRS and ratio.interval.low > 1


def _pays(ratio: Ratio | None) -> bool:
    return ratio is not None and _faster(ratio) and ratio.interval.mid >= MIN_GAIN


def _metric(summary: Summary, metric: str, share: bool, *, higher: bool) -> Sentence | None:
    difference, name = summary.difference, summary.contestant.name
    if difference is None:
        return None
    if summary.stock_diverged:
        text = f"stock diverged on at least one seed: its loss or {metric} is not a number, so the {metric} of {name}"
        return Sentence("open", f"{text} cannot be compared with it.")
    if _diverged(summary.contestant):
        return Sentence("bad", f"{name} diverged on at least one seed: its loss or {metric} is not a number.")
    signed = functools.partial(wording.difference, share=share) if higher else wording.better
    mean, worst, best = map(signed, difference[:3])
    own, seeds = wording.has_own_units(metric), wording.count(difference.seeds, "seed")
    ends = f"{name} ends {mean} {'from' if higher else 'than'} stock in {'the metric' if own else metric}"
    if difference.seeds < 2:
        return Sentence("open", f"{ends} on one seed: too few to say anything.")
    if math.isinf(difference.worst):
        text = f"{ends} over {seeds}. Fewer than three seeds decide nothing; give --decide more time."
        return Sentence("open", text)
    if difference.margin is None and difference.worst == difference.best:
        text = f"{ends} over {seeds}. The difference is the same on each, which gives no bounds."
        return Sentence("open", text)
    if difference.margin is None:
        text = f"{ends} over {seeds}, with 95 % bounds {worst} to {best}{'; above 0 is better' if higher else ''}."
        return Sentence("bad" if difference.best < 0 and not own else "open", text)
    allowed = wording.amount(difference.margin, share=share)
    if difference.worst > -difference.margin:
        text = f"{name} keeps {metric} within {allowed} of stock: {mean}, at worst {worst} ({seeds})."
        return Sentence("good", text)
    if difference.best < -difference.margin:
        return Sentence("bad", f"{name} costs more {metric} than the {allowed} allowed: {mean} ({seeds}).")
    return Sentence("open", f"{ends}; {seeds} cannot rule out {worst}. Allowed: {allowed}.")


def _promise(summary: Summary, metric: str, share: bool) -> Sentence | None:
    level, difference = summary.contestant.name.partition("+")[0], summary.difference
    promise = _promise_of(summary.contestant)
    if promise is None or summary.stock is None or summary.stock.pairs < LEAST_PAIRS:
        return None
    margin, interval = difference.margin if difference else None, summary.stock.interval
    asked = f"{level} promises to be no slower than stock"
    if margin is not None:
        asked += f" and to lose at most {wording.amount(margin, share=share)}"
    if interval.high < 1:
        return Sentence("bad", f"{asked}: missed here, it is slower.")
    if summary.hand is not None and summary.hand.interval.high < 1 - BEHIND_HAND:
        behind = f"{level} promises to be at most {percent(BEHIND_HAND)} behind the best loop by hand"
        return Sentence("bad", f"{behind}: missed here.")
    if summary.stock_diverged:
        return Sentence("open", f"{asked}: not decided, since stock diverged.")
    if _diverged(summary.contestant):
        return Sentence("bad", f"{asked}: missed here, the training diverged.")
    if difference is not None and wording.has_own_units(metric):
        text = (
            f"{level} promises to lose at most {wording.amount(promise, share=True)} of accuracy, "
            "which has no meaning in the units of this metric; `torchboost tune --drop` tests a limit of your own."
        )
        return Sentence("open", text)
    if difference is None or margin is None:
        return Sentence("open", f"{asked}, at nearly the same metric: this run did not judge the metric.")
    if difference.best < -margin:
        return Sentence("bad", f"{asked}: missed here, it loses more.")
    if interval.low * MIN_GAIN >= 1 and difference.worst > -margin:
        return Sentence("good", f"{asked}: kept here.")
    return Sentence("open", f"{asked}: neither shown nor refuted by this run.")


def _setup(summary: Summary, stock: Contestant | None) -> Sentence | None:
    if stock is None or summary.repaid_after is None or summary.stock is None or not _faster(summary.stock):
        return None
    extra = summary.contestant.warmup_seconds - stock.warmup_seconds
    if extra < 1.0:
        return None
    text = (
        f"{summary.contestant.name} needs {wording.seconds(extra)} more to start, repaid after "
        f"{wording.count(summary.repaid_after, 'step')}; shorter trainings are faster without it."
    )
    return Sentence("open", text)


def headline(report: BenchReport) -> Sentence:
    """Return the headline.

    Of the contestants that are measurably faster, it names the fastest that kept its metric, otherwise the fastest
    whose metric is undecided. If there is none, it says that nothing paid, that nothing was shown to, or that nothing
    was compared with stock.
    """
    if stock_of(report) is None:
        return Sentence("open", NO_STOCK)
    share, metric = wording.is_share(report), report.metric_name
    paying: dict[Tone, list[Summary]] = {"good": [], "open": [], "bad": []}
    may_pay = False
    for summary in summarise(report):
        gain, kept = _gain(summary), _metric(summary, metric, share, higher=report.metric_higher_is_better)
        tone = kept.tone if kept else "open"
        if gain is not None and gain.low > 1 and gain.mid >= MIN_GAIN:
            paying[tone].append(summary)
        may_pay = may_pay or (gain is not None and gain.low <= 1 and gain.high >= MIN_GAIN and tone != "bad")
    candidates = paying["good"] or paying["open"]
    most = max((ratio.pairs for contestant in report.contestants for ratio in contestant.ratios), default=LEAST_PAIRS)
    if most < LEAST_PAIRS:
        return Sentence("open", f"{wording.count(most, 'round')} of step timing decide nothing about the speed.")
    if not candidates and may_pay:
        text = "Nothing measured here was shown to be worth turning on, but this run does not exclude it."
        return Sentence("open", text)
    if not candidates:
        return Sentence("bad", "Nothing measured here is worth turning on.")
    best = max(candidates, key=lambda summary: gain.mid if (gain := _gain(summary)) else 0.0)
    text, hand = _praise(report, best), _gain_by_hand(best)
    if paying["good"]:
        return Sentence("open" if hand is not None and hand.high < 1 else "good", f"{text}.")
    if wording.has_own_units(metric):
        return Sentence("open", f"{text}. How much of the metric it may cost is not known here, so that is not judged.")
    return Sentence("open", f"{text}. Whether its {metric} holds is not decided.")


def _gain(summary: Summary) -> Interval | None:
    """Return how many times as fast as stock a contestant is, or None for a baseline or an unknown speed.

    Contestants train the same number of steps, so the time of a step tells, except for configurations.
    """
    kind, ratio = summary.contestant.kind, summary.stock
    if kind == "config":
        return summary.run
    known = kind in ("level", "algorithm") and ratio is not None and ratio.pairs >= LEAST_PAIRS
    return ratio.interval if known and ratio else None


def _gain_by_hand(summary: Summary) -> Interval | None:
    if summary.contestant.kind == "config":
        return summary.run_by_hand
    return summary.hand.interval if summary.hand else None


def _praise(report: BenchReport, best: Summary) -> str:
    """Return how fast the best contestant is, without a full stop."""
    chosen, gain, hand = best.contestant, _gain(best), _gain_by_hand(best)
    assert gain is not None
    if chosen.kind == "config":
        text = f"A whole run of {chosen.name} takes {_times(gain.inverse)} the time of the stock loop's"
        return text if hand is None else f"{text}, and {_times(hand.inverse)} that of the best hand-tuned one"
    same = [c.name for c in report.contestants if c.kind == "level" and c.algorithms == chosen.algorithms]
    text = chosen.name
    if chosen.kind == "level" and len(same) > 1:
        text += f" ({' and '.join(same)} turned on the same)"
    text += f" trains {_times(gain)} as fast as the stock loop"
    if hand is None:
        return text
    if hand.low > 1:
        return f"{text} and {_times(hand)} as fast as the best hand-tuned one"
    slower = hand.high < 1
    return text + (
        ", but a hand-tuned loop is faster still" if slower else "; no difference to the best hand-tuned one was shown"
    )


def _times(interval: Interval) -> str:
    """Return one figure, or both ends of the interval if one figure would be too precise."""
    if interval.high < interval.low * (1 + COARSE):
        return wording.ratio(interval.mid)
    return f"{wording.ratio(interval.low)} to {wording.ratio(interval.high)}"
