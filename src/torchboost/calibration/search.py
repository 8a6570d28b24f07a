"""Decide which levers pay, from paired samples: greedy, sequential, within a budget of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchboost.calibration.choice import SEEMS_FASTER, Verdict, in_seconds
from torchboost.calibration.trial import Trial
from torchboost.errors import in_a_line
from torchboost.measure.evidence import Interval
from torchboost.measure.statistics import exact_median
from torchboost.sheet import percent

_LOOKS = (7, 11, 15, 20, 28, 40, 60, 90)
"""Numbers of pairs at which a lever may be decided."""
_ENOUGH = 40
_PROMISING = SEEMS_FASTER
"""After 40 pairs, only a lever that seems to gain 2 % is timed further."""
_CONFIDENCE = 0.98
"""Of one look. Over all looks, a lever that does nothing is kept in fewer than 1 of 20 trials."""
_CONFIDENCE_TOGETHER = 0.995
"""Of one look at a lever that gained nothing alone."""
_GRACE = 0.08
"""Share of the budget that may be added to time a lever whose price is paid, rather than to have paid for nothing."""
_LAST_SHARE = 0.05
"""Share of the budget that may be added to compare all together with the plain step."""
_EARLY = 4
"""Pairs after which a lever that is clearly slower in each of them is dropped."""
_CLEARLY_SLOWER = 0.93
_CLEARLY_FASTER = 1.5
"""A lever that is at least this much faster in each of the first pairs is kept."""
_CONFIRMED = 2
"""Number of those pairs for a lever that is on without a trial."""
_FIGURE = 5
"""Pairs from which on a ratio is shown as a number."""
_FOR_A_FIGURE = 0.05
"""Share of the budget that a lever of which fewer pairs said enough may take to get that number."""
_HOPELESSLY_SLOW = 0.3
"""If it is as slow as this, two pairs say so."""
_SLOWER_BY_FAR = 0.5
"""If it is as slow as this when its time is up, one pair says so."""
_HOPELESS = 0.9
"""A lever with a lower ratio is not tried a second time."""
_LEAST_GAIN = 1.01
"""A lever that makes a step less than 1 % faster is not kept. With a price, less than ``_PROMISING``."""
_NEUTRAL = 0.97
"""A lever that was dropped with at least this ratio is tried together with one that has a price."""
_AGAIN = 2.0
"""An undecided lever is tried again if this multiple of the price of the kept levers, which it pays again, remains."""
_PATIENCE = 30
"""A lever whose first steps take longer than this number of steps of the incumbent is not tried again."""
_FEW = 4.0
"""If a lever had less time than this number of steps, and was not timed, this says nothing about its speed."""
_OVERTIME = 0.5
"""Share of the time left that a lever may take to its first look after its own time is up."""
_HOST_BOUND = 0.7
"""If the host is done with a step after a smaller share of its time, it is ahead of the device."""
_ROUND = 10
"""From so many seconds on, advice is in multiples of them."""
SET_ASIDE = 0.75
"""Share of the budget for levers with a price, since a price that is paid in part is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The price that a lever costs once, such as for compilation. Unit: seconds.

    Args:
        expected: Estimate before the trial.
        best_ratio: The largest gain to hope for. A lever that could not repay its price with this gain is not tried.
        times: How often the run pays it, such as for each graph. The trial pays it once.
        of_host: Whether the lever saves only time of the host. If the device is the limit, it is not tried.
    """

    expected: float
    best_ratio: float = 2.0
    times: int = 1
    of_host: bool = False


@dataclass(slots=True)
class _Sample:
    ratios: list[float] = field(default_factory=list)
    incumbent: list[float] = field(default_factory=list)
    price: float = 0.0
    second: bool = False
    early: int | None = None
    """Number of pairs after which a clear gain decides."""

    @property
    def is_clearly_faster(self) -> bool:
        """Whether a lever is kept before its first look."""
        first = self.ratios[: self.early]
        return len(first) == self.early and min(first) >= _CLEARLY_FASTER

    @property
    def interval(self) -> Interval | None:
        least, confidence = (_LOOKS[1], _CONFIDENCE_TOGETHER) if self.second else (_LOOKS[0], _CONFIDENCE)
        return None if len(self.ratios) < least else exact_median(self.ratios, confidence=confidence)

    @property
    def is_shown(self) -> bool:
        """Whether there are enough pairs to show their ratio."""
        return len(self.ratios) >= _FIGURE

    @property
    def is_decided(self) -> bool:
        """Whether more samples would probably not change the verdict."""
        interval = self.interval
        if interval is None:
            return False
        pays = interval.low > 1 and interval.mid >= _LEAST_GAIN
        futile = len(self.ratios) >= _ENOUGH and interval.mid < _PROMISING
        return pays or futile or interval.high < _LEAST_GAIN


def search(
    levers: Sequence[str],
    bench: Trial,
    *,
    budget: Callable[..., float],
    steps: int | None = None,
    prices: Mapping[str, Price] | None = None,
    undecided: Mapping[str, bool] | None = None,
    forms: Mapping[str, Sequence[str]] | None = None,
    inert: Collection[str] = (),
    step_seconds: float,
) -> tuple[tuple[Verdict, ...], Interval | None]:
    """Try the levers one after the other on top of those that were kept, then those again that were dropped too early.

    A lever is kept if the 98 % interval of its paired ratio is above 1 and the ratio at least 1.01, or 1.02 with a
    price. Without a price it is also kept if it is at least 1.5 times as fast in each of the first four pairs, or of
    the first two if it is on without a trial. It is dropped if the interval excludes that, if it raises, or if its
    price is not repaid. A lever that was dropped before another one was kept is tried a second time on top of that one.
    Levers with a price come last, since each later try would pay the price again. Time is set aside for them. If one of
    those gains nothing, it is tried once more together with levers that cost nothing, since compiled code may need
    another memory format. If it was kept, its forms are tried in its place, by the same rules. If it cost more than
    expected, so do they. The remaining time goes to levers that were not decided. At the end the combination is
    compared with the plain step. If it is slower, nothing is kept.

    Args:
        levers: Names, in the order of the trial, except that levers with a price come last.
        bench: Its incumbent is the plain step. With several ranks, every number comes from the slowest rank.
        budget: Returns the seconds that the trial may take in a run whose steps take the given seconds. It is called
            again for faster steps, unless a lever with a price waits for its time, and for each form, with its price
            and the seconds that were spent.
        steps: Updates that remain in the run. None if unknown. Levers with a price are then not tried.
        prices: Lever -> its price.
        undecided: Lever -> whether to keep it if the budget does not suffice for a decision. Missing means no. A lever
            whose few samples speak against it is dropped, and so is one that was not timed although it had time.
        forms: Lever with a price, or one of its forms -> forms that may replace it. All of them have prices.
        inert: Levers that do nothing next to one with a price, such as in compiled code. It is tried in their place.
        step_seconds: Time of a plain step.

    Returns:
        One verdict for each lever, in the given order, and how many times as fast a step of the chosen combination is
        as a plain one. None if it was not measured.
    """
    told, seconds = (dict(prices or {}), dict(undecided or {}), dict(forms or {}), inert), budget(step_seconds)
    return _Search(list(levers), bench, budget, steps, *told, step_seconds, seconds, seconds, seconds).run()


def _pairs(sample: _Sample) -> str:
    count = len(sample.ratios)
    return f"{count} {'pair' if count == 1 else 'pairs'}"


def _in_each(what: str, sample: _Sample) -> str:
    each = "the only pair" if len(sample.ratios) == 1 else f"each of {_pairs(sample)}"
    return f"a step is clearly {what} in {each}"


def _without_gain(sample: _Sample, interval: Interval) -> str:
    """Say why a lever is not kept after its last look: it gains too little, nothing was found, or it is still open."""
    figure = f"{interval.mid:.2f} times as fast"
    if interval.low > 1:
        return f"it gains too little: {figure}"
    if interval.mid >= _PROMISING:
        return f"{_undecided(sample)}; left out"
    return f"no gain was found: {figure}"


def _undecided(sample: _Sample) -> str:
    """Say that a lever is still open, with its figure if there are enough pairs for one."""
    text, interval = f"{_pairs(sample)} did not decide", sample.interval
    if not sample.is_shown or interval is None:
        return text
    return f"{text} ({interval.mid:.2f} times as fast, {interval.low:.2f} to {interval.high:.2f})"


def _is_clearly_slower(ratios: Sequence[float]) -> bool:
    """Whether a lever is dropped before its first look: the slower it is, the fewer pairs say so."""
    least = _CLEARLY_SLOWER if len(ratios) >= _EARLY else _HOPELESSLY_SLOW if len(ratios) >= 2 else 0.0
    return max(ratios) < least


def _rounded(seconds: float) -> int:
    """Return a time that is at least as long, as people would give it."""
    return math.ceil(seconds) if seconds < _ROUND else math.ceil(seconds / _ROUND) * _ROUND


@dataclass(slots=True)
class _Search:
    levers: list[str]
    bench: Trial
    budget: Callable[..., float]
    steps: int | None
    prices: dict[str, Price]
    undecided: dict[str, bool]
    forms: dict[str, Sequence[str]]
    inert: Collection[str]
    last_step: float
    announced: float
    seconds: float
    until: float
    kept: list[str] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    assumed: set[str] = field(default_factory=set)

    def run(self) -> tuple[tuple[Verdict, ...], Interval | None]:
        free = [lever for lever in self.levers if lever not in self.prices]
        priced = [lever for lever in self.levers if lever in self.prices]
        for index, lever in enumerate(free):
            self._set_aside(priced)
            self._try(lever, share=self._left() / (len(free) - index))
        for lever in self._worth_a_second_try(free):
            self._set_aside(priced)
            self._try_again(lever)
        self.until = self.seconds
        for index, lever in enumerate(priced):
            self._try(lever, share=self._left() / (len(priced) - index))
            self._try_with_neutral(lever, free)
            self._try_forms(lever)
        for lever in [lever for lever in free if lever in self.open]:
            if self._left() > _AGAIN * sum(verdict.price for verdict in self.verdicts.values() if verdict.kept):
                self._try_again(lever)
        ratio = self._compare_with_plain()
        return tuple(self.verdicts[lever] for lever in self.levers), ratio

    def _try_again(self, lever: str) -> None:
        first = self.verdicts[lever]
        self._try(lever, share=self._left())
        verdict = self.verdicts[lever]
        if not verdict.kept and not (lever in self.assumed and verdict.pairs):
            self.verdicts[lever] = first

    def _try_with_neutral(self, lever: str, free: Sequence[str]) -> None:
        """Try a lever that gained nothing together with those that cost nothing: each may need the other."""
        first = self.verdicts[lever]
        tried = [other for other in free if other not in self.inert]
        dropped = [(other, self.verdicts[other].ratio) for other in tried if not self.verdicts[other].kept]
        neutral = [other for other, ratio in dropped if ratio is not None and ratio.mid >= _NEUTRAL]
        if first.kept or not (first.pairs and neutral) or self._left() <= _AGAIN * first.price:
            return
        self._try(lever, share=self._left(), also=neutral)
        if not self.verdicts[lever].kept:
            self.verdicts[lever] = first
            return
        self.kept += neutral
        for other in neutral:
            reason = f"only together with {lever}, where the two gain"
            self.verdicts[other] = self.verdicts[other].but(kept=True, reason=reason)

    def _try_forms(self, lever: str) -> None:
        """Try the forms of a lever that was kept in its place. Those of a form that is kept come next."""
        waiting = list(self.forms.get(lever, ())) if self.verdicts[lever].kept else []
        while waiting:
            form = waiting.pop(0)
            if self._try_form(lever, form):
                waiting = list(self.forms.get(form, ()))

    def _try_form(self, lever: str, form: str) -> bool:
        before, price = self.verdicts[lever], self.prices[form]
        dearer = max(1.0, before.price / self.prices[lever].expected)
        self.prices[form] = price = replace(price, expected=price.expected * dearer)
        self.until = self.seconds = max(self.seconds, self.budget(self.last_step, price, self.bench.elapsed()))
        current = before.form or lever
        place = self.kept.index(current)
        self.kept.remove(current)
        self._try(form, share=self._left())
        verdict = self.verdicts.pop(form)
        if not verdict.kept:
            self.kept.insert(place, current)
        self.verdicts[lever] = before.but(
            reason=f"{before.reason}; {form}: {verdict.reason}",
            price=before.price + verdict.price,
            form=form if verdict.kept else before.form,
            longer=max(before.longer, verdict.longer),
        )
        return verdict.kept

    def _set_aside(self, priced: Sequence[str]) -> None:
        """Leave time for those levers whose price the budget and the run allow. Without one a faster run gives less."""
        share = SET_ASIDE * self.seconds
        wanted = any(self.steps is not None and self._dear(lever, share) is None for lever in priced)
        if not wanted:
            self.seconds = min(self.seconds, self.budget(self.last_step))
        self.until = self.seconds - (share if wanted else 0.0)

    def _try(self, lever: str, share: float, also: Sequence[str] = ()) -> None:
        within = self._left()
        if lever in self.prices and (refusal := self._dear(lever, share)) is not None:
            self._decide(lever, False, refusal[0], longer=refusal[1])
            return
        if within <= 0:
            self._leave_open(lever, "the time for the trial was used up")
            return
        began = self.bench.elapsed()
        try:
            price = self.bench.build([*self._with(lever), *also, lever], within=within)
        except TimeoutError as error:
            if self._is_few(within):
                self._leave_open(lever, "the trial had no time left for its first steps")
                return
            took = max(within, self.bench.elapsed() - began)
            twice = 2 * (took / SET_ASIDE if lever in self.prices else self.seconds)
            self._decide(lever, False, str(error), longer=twice)
            if within < _PATIENCE * self.last_step:
                self.open.add(lever)
            return
        except Exception as error:  # a lever may raise anything. Training continues without it
            self._decide(lever, False, f"it raised {in_a_line(error)}")
            return
        sample = _Sample(price=price, second=bool(also))
        if lever not in self.prices:
            sample.early = _CONFIRMED if self.undecided.get(lever, False) else _EARLY
        deadline = min(self.bench.elapsed() + share, self.until)
        self._measure(sample, deadline, grace=_GRACE if lever in self.prices else 0.0)
        if not sample.ratios and self._is_few(self.bench.elapsed() - began):
            self._leave_open(lever, "the time for the trial was used up before its first pair of steps")
            return
        self._judge(lever, sample)

    def _is_few(self, seconds: float) -> bool:
        return seconds < _FEW * self.last_step

    def _leave_open(self, lever: str, reason: str) -> None:
        """Decide about a lever of which nothing is known as if there were no trial."""
        self.open.add(lever)
        usual = self.undecided.get(lever, False) and lever not in self.prices
        if usual:
            self.assumed.add(lever)
            reason = f"not measured: {reason}; on as usual"
        longer = _rounded(self._longer)
        self.verdicts[lever] = Verdict(lever=lever, kept=usual, reason=reason, untried=True, longer=longer)

    @property
    def _longer(self) -> float:
        """Seconds of a trial that is longer than this one: those that were announced, if faster steps left it less."""
        return self.announced if self.seconds < self.announced else 2 * self.seconds

    def _measure(self, sample: _Sample, deadline: float, *, stops: bool = True, grace: float = 0.0) -> None:
        """Add pairs to a sample until it is decided or the time is up. If it ``stops`` early, clear ones suffice."""
        began, grace = self.bench.elapsed(), grace * self.seconds
        while (left := self._left() + grace) > 0:
            base, challenger = self.bench.sample(within=left)
            if math.isinf(base) or (math.isinf(challenger) and left < _FEW * base):
                return
            sample.incumbent.append(base)
            sample.ratios.append(base / challenger if challenger > 0 and math.isfinite(challenger) else 0.0)
            done = len(sample.ratios)
            if stops and _is_clearly_slower(sample.ratios):
                return
            if stops and sample.is_clearly_faster and not self._gets_its_figure(done, began):
                return
            if (done in _LOOKS and sample.is_decided) or done >= _LOOKS[-1]:
                return
            if self.bench.elapsed() >= deadline + grace and not self._is_near_first_look(done, began):
                return

    def _gets_its_figure(self, done: int, began: float) -> bool:
        """Whether the pairs that a number still needs take little of the budget."""
        each = (self.bench.elapsed() - began) / done
        return done < _FIGURE and (_FIGURE - done) * each <= min(_FOR_A_FIGURE * self.seconds, self._left())

    def _is_near_first_look(self, done: int, began: float) -> bool:
        """Whether a lever whose time is up is decided soon, such as one that a pause of the machine kept from it."""
        each = (self.bench.elapsed() - began) / done
        return done < _LOOKS[0] and (_LOOKS[0] - done) * each <= _OVERTIME * self._left()

    def _left(self) -> float:
        return self.until - self.bench.elapsed()

    def _judge(self, lever: str, sample: _Sample) -> None:
        if not sample.ratios:
            # Even if it was on without a trial: its steps may have used up the time.
            text = "the time for the trial was used up before its first pair of steps"
            self._decide(lever, False, text, sample, longer=self._longer)
            return
        self.last_step = sorted(sample.incumbent)[len(sample.incumbent) // 2]
        middle = sorted(sample.ratios)[len(sample.ratios) // 2]
        least = _PROMISING if lever in self.prices else _LEAST_GAIN
        if _is_clearly_slower(sample.ratios) or max(sample.ratios) < _SLOWER_BY_FAR:
            text = f"a step takes {1 / middle:.2f} times as long" if middle else "a step did not end in the time left"
            self._decide(lever, False, text if sample.is_shown or not middle else _in_each("slower", sample), sample)
        elif sample.is_clearly_faster or (sample.interval is not None and sample.interval.low > 1 and middle >= least):
            saving, price = self._saving(middle), self._in_all(lever, sample.price)
            if lever in self.prices and saving is not None and saving <= price:
                text = f"{middle:.2f} times as fast, which saves {in_seconds(saving)} and costs {in_seconds(price)}"
                self._decide(lever, False, text, sample)
            else:
                text = f"a step is {middle:.2f} times as fast"
                self._decide(lever, True, text if sample.is_shown else _in_each("faster", sample), sample)
                self.last_step /= middle
        elif sample.interval is not None and (sample.is_decided or len(sample.ratios) >= _LOOKS[-1]):
            self._decide(lever, False, _without_gain(sample, sample.interval), sample)
        else:
            usual = self.undecided.get(lever, False)
            keep = usual and middle > 1
            what = "kept as usual" if keep else "left out, since they lean to slower" if usual else "left out"
            self._decide(lever, keep, f"{_undecided(sample)}; {what}", sample, longer=self._longer)
            self.verdicts[lever] = self.verdicts[lever].but(undecided=True)
            if keep:
                self.last_step /= middle
            else:
                self.open.add(lever)

    def _decide(
        self, lever: str, kept: bool, reason: str, sample: _Sample | None = None, *, longer: float = 0.0
    ) -> None:
        sample = sample or _Sample()
        self.verdicts[lever] = Verdict(
            lever=lever,
            kept=kept,
            reason=reason,
            ratio=sample.interval,
            pairs=len(sample.ratios),
            price=sample.price if lever in self.prices else 0.0,
            longer=_rounded(longer),
        )
        if kept:
            staying = self._with(lever)
            for other in self.kept:
                if other not in staying:
                    text = f"{self.verdicts[other].reason}; {lever} gains more, and this does nothing with it"
                    self.verdicts[other] = self.verdicts[other].but(kept=False, reason=text)
            if lever in self.prices:
                self.open.difference_update(self.inert)
            self.kept = [*staying, lever]
            self.bench.promote()

    def _with(self, lever: str) -> list[str]:
        """Return the kept levers that do something next to another one."""
        return [other for other in self.kept if lever not in self.prices or other not in self.inert]

    def _dear(self, lever: str, share: float) -> tuple[str, float] | None:
        """Return why the price of a lever is not paid, and seconds of a trial that pays it, if any. None if it is."""
        price = self.prices[lever]
        if price.of_host and (busy := self.bench.host_share()) < _HOST_BOUND:
            return f"it saves time of the host, which is busy for {percent(busy)} of a step", 0.0
        if self.steps is None:
            return "only a long run repays its price; pass boost(..., total_steps=...), the number of updates", 0.0
        saving = self._saving(price.best_ratio)
        if saving is not None and saving <= (cost := self._in_all(lever, price.expected)):
            costs = f"and it costs about {in_seconds(cost)}"
            return f"{self.steps:,} steps do not repay it: at best it saves {in_seconds(saving)}, {costs}", 0.0
        if price.expected > share:
            enough = (price.expected + 2 * _LOOKS[0] * self.last_step) / SET_ASIDE
            left = f"and the trial has {in_seconds(max(share, 0))} left"
            return f"to try it takes about {in_seconds(price.expected)}, {left}", enough
        return None

    def _in_all(self, lever: str, price: float) -> float:
        """Return the seconds that the run pays for a lever."""
        return price * self.prices[lever].times if lever in self.prices else 0.0

    def _saving(self, ratio: float) -> float | None:
        if self.steps is None:
            return None
        return self.steps * self.last_step * (1 - 1 / ratio)

    def _worth_a_second_try(self, levers: Sequence[str]) -> Iterator[str]:
        """Yield measured levers that were dropped before a lever was kept with which they were not tried."""
        for position, lever in enumerate(levers):
            verdict = self.verdicts[lever]
            later = any(self.verdicts[other].kept for other in levers[position + 1 :])
            if later and not verdict.kept and verdict.ratio is not None and verdict.ratio.mid >= _HOPELESS:
                yield lever

    def _compare_with_plain(self) -> Interval | None:
        """Return the gain of all together. Drop the levers if the plain step is faster than they are."""
        on = [lever for lever, verdict in self.verdicts.items() if verdict.kept]
        if len(on) > len(self.kept):  # one is on as usual, and was not timed
            return None
        if len(on) == 1 and not self.verdicts[on[0]].form:
            return self.verdicts[on[0]].ratio
        if not self.kept:
            return None
        self.until = max(self.until, self.bench.elapsed() + _LAST_SHARE * self.seconds)
        try:
            self.bench.build((), within=self._left())
        except Exception:  # the decisions stand. Only the gain of all together is unknown
            return None
        sample = _Sample()
        self._measure(sample, self.seconds, stops=False)
        plain = sample.interval
        if plain is None or plain.low <= 0:
            return None
        if plain.low <= 1:
            return plain.inverse
        for lever in on:
            beside = ", ".join(other for other in on if other != lever)
            text = f"together with {beside} it is slower than the plain step" if beside else "a step is slower with it"
            self.verdicts[lever] = self.verdicts[lever].but(kept=False, form="", reason=text)
        return None
