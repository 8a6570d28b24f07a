"""Choose the levers of a plan by a trial, and check them: the settings, the decision, and what is said about it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from torchboost.calibration.choice import Choice, Machine, Source, Verdict
from torchboost.calibration.passes import Passes
from torchboost.calibration.search import SET_ASIDE, Price, search
from torchboost.calibration.snapshot import Snapshot
from torchboost.calibration.trial import Pair, Reduce, Trial, needed_bytes, outline, with_memory
from torchboost.calibration.verify import Checked, verified
from torchboost.core.algorithm import Algorithm, Form, Target
from torchboost.core.torch_private import all_reduce_hooks, holds_back_gradients, in_forward_of_fsdp2
from torchboost.core.wrapping import sharded_units
from torchboost.errors import RankDisagreementError
from torchboost.measure.evidence import Interval
from torchboost.plan import Plan, own_settings
from torchboost.registry import REGISTRY

__all__ = [
    "UNSEEN",
    "Calibrate",
    "Calibration",
    "Decision",
    "check_calibrate",
    "describe",
    "device_of",
    "exchange_in",
    "explain",
    "gain",
    "measured_elsewhere",
    "resolved",
]

Calibrate = bool | float | Literal["auto"]
"""``"auto"`` or True: a trial within 1 % of the run and 60 s, but within 40 steps if these are at most 4 % of the run.
False: none. A number: its seconds."""

UNSEEN = (
    "the optimizer was stepped, but no training call of the model was seen. It was compiled after boost, only a part "
    "of it is called, all calls are inside a checkpoint, or several ranks call it without DDP"
)
"""Why nothing is measured or checked if updates come before the first training call."""

_BUCKETS = "kernels must have their format before DistributedDataParallel lays out its buckets"
_SHARDED = "FSDP2 shards contiguous kernels, and no rank must stop to compile while others wait for it"
_UNCHECKED = "under FSDP2 all ranks would have to repeat a pass that one of them doubts"
_SWITCH = "TORCHBOOST_CALIBRATE"
"""Environment variable. If it is 0, ``"auto"`` measures nothing."""
_SHARE_OF_RUN = 0.01
_MOST_SHARE, _FEW_STEPS = 0.04, 40
"""A short run gives a larger share of its time, since 1 % of it would decide nothing."""
_MOST_SECONDS = 60.0
_STEPS_WITHOUT_LENGTH = 30
_LEAST_STEPS = 12
"""A trial of fewer steps could not decide about any lever."""
_COMPILE_SECONDS, _COMPILE_SECONDS_PER_MODULE = 8.0, 0.15
"""Expected price of a compilation, before it is measured."""
_COMPILE_RATIO = 1.5
_WORTH = 3.0
"""On a GPU a trial takes as much longer as a price, if the run is expected to save this multiple of the price."""
_MOST_SHARE_WITH_PRICE = 0.05


@dataclass(frozen=True)
class Decision:
    """What the first training call decides.

    Args:
        choice: About the levers of the level.
        refused: Levers of the user that must go -> the reason.
        checks: Levers that are on -> how far their step is from the plain one, in words.
        entries: Of the inputs on which it was decided; None if an earlier choice was taken.
    """

    choice: Choice
    refused: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, str] = field(default_factory=dict)
    entries: int | None = None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the first training call needs to know about a run.

    Args:
        levers: The algorithms that a trial may switch on and off.
        fixed: Levers that stay as the prior says, with the reason.
        prior: Names of those that are on without a trial.
        calibrate: Whether and how long to measure.
        total_steps: Updates of the run; None if unknown.
        compiled: Whether the model is compiled whatever the levers are.
        graphs: The most graphs of a compiled model over the run; the trial compiles one of them.
        forward: Makes the context in which a trainer computes each forward pass.
        asked: Levers that the user has named. They are not measured, but checked.
        verify: Whether the levers that are on are compared with the plain step.
        sharded: Whether FSDP2 shards the model, so that the ranks exchange something in each pass.
    """

    levers: tuple[Algorithm, ...]
    prior: frozenset[str]
    calibrate: Calibrate
    total_steps: int | None
    fixed: Mapping[str, str] = field(default_factory=dict)
    compiled: bool = False
    graphs: int = 1
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    asked: tuple[Algorithm, ...] = ()
    verify: bool = True
    sharded: bool = False

    @classmethod
    def of(
        cls,
        plan: Plan,
        calibrate: Calibrate,
        wrapper: str | None,
        *,
        verify: bool,
        forward: Callable[[], AbstractContextManager[Any]],
    ) -> Calibration | None:
        """Return what the first training call has to decide and to check; None if there is nothing.

        A model inside a ``wrapper`` is not bare, unless FSDP2 shards it in place.
        """
        sharded = wrapper == "fully_shard"
        on = {algorithm.name for algorithm in plan.algorithms}
        levers = {lever.name for lever in plan.levers}
        asked = tuple(a for a in plan.algorithms if REGISTRY[a.name].lever and a.name not in levers)
        fixed = {a.name: _SHARDED for a in plan.levers if sharded and (REGISTRY[a.name].once or _changes_model(a))}
        if not sharded and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            fixed = {a.name: _BUCKETS for a in plan.levers if _changes_model(a)}
        replaced = {
            a.name: REGISTRY[a.name].instead_of for a in plan.levers if REGISTRY[a.name].instead_of in on - levers
        }
        fixed |= {name: f"{better} is on and leaves it little to do" for name, better in replaced.items()}
        verify = verify and not sharded
        aside = wrapper is not None and not sharded
        if (
            aside
            or any(algorithm.traits.replaces_optimizer for algorithm in plan.algorithms)
            or not (levers or asked)
            or (calibrate is False and not (verify and (asked or levers & on)))
        ):
            return None
        return cls(
            levers=plan.levers,
            prior=frozenset(n for n in on & levers if calibrate is False or n in fixed or not REGISTRY[n].once),
            calibrate=calibrate if levers else False,
            total_steps=plan.total_steps,
            fixed=fixed,
            compiled=any(REGISTRY[name].once for name in on if name in fixed or name not in levers),
            graphs=max((algorithm.graphs() for algorithm in plan.algorithms), default=1),
            forward=forward,
            asked=asked if verify else (),
            verify=verify,
            sharded=sharded,
        )

    def in_form(self, choice: Choice | None, device: torch.device) -> Calibration:
        """Return the same with the levers in the forms of a choice. A form that does not exist here is not used."""
        chosen = {} if choice is None else {verdict.lever: verdict.form for verdict in choice.verdicts}
        found = [(lever, _forms_of(lever, device).get(chosen.get(lever.name, ""))) for lever in self.levers]
        return replace(self, levers=tuple(lever if form is None else form[1].algorithm for lever, form in found))

    def with_formats_as(self, on: Iterable[str]) -> Calibration:
        """Return the same with the memory formats as they are, for DDP has laid out its buckets."""
        formats = frozenset(lever.name for lever in self.levers if _changes_model(lever))
        return replace(
            self,
            fixed={**self.fixed, **dict.fromkeys(formats, _BUCKETS)},
            prior=(self.prior - formats) | (formats & frozenset(on)),
        )

    def without(self, name: str) -> Calibration:
        """Return the same without one lever."""
        return replace(
            self,
            levers=tuple(lever for lever in self.levers if lever.name != name),
            asked=tuple(lever for lever in self.asked if lever.name != name),
            compiled=self.compiled and not REGISTRY[name].once,
        )

    @property
    def settings(self) -> list[float]:
        """What all ranks must have in common, as numbers of which the largest one counts."""
        length = math.inf if self.total_steps is None else self.total_steps
        seconds = math.inf if isinstance(self.calibrate, (bool, str)) else self.calibrate
        absent = [lever.name not in self.prior for lever in self.levers]
        return [float(number) for number in (-length, -seconds, self.graphs, not self.verify, *absent)]

    def agreed(self, settings: Sequence[float]) -> Calibration:
        """Return the same with the settings of all ranks: the shortest run and trial, and no check if one has none.

        A lever is on without a trial if all ranks expect it to pay: each measures the speed of bfloat16 for itself.
        """
        length, seconds, graphs, unchecked, *absent = settings
        return replace(
            self,
            total_steps=None if length == -math.inf else int(-length),
            calibrate=self.calibrate if self.calibrate is False or seconds == -math.inf else -seconds,
            graphs=int(graphs),
            verify=not unchecked,
            asked=() if unchecked else self.asked,
            prior=frozenset(lever.name for lever, off in zip(self.levers, absent, strict=True) if not off),
        )

    def seconds(self, step_seconds: float, price: Price | None = None) -> float:
        """Return the budget of a trial.

        Args:
            step_seconds: Time of a plain step.
            price: Of a lever for which the trial may take longer, up to 5 % of the run; None without one.
        """
        if not isinstance(self.calibrate, (bool, str)):
            return float(self.calibrate)
        if self.total_steps is None:
            return min(_MOST_SECONDS, _STEPS_WITHOUT_LENGTH * step_seconds)
        usual = min(_MOST_SECONDS, _steps_of_trial(self.total_steps) * step_seconds)
        if price is None or price.expected <= SET_ASIDE * usual:
            return usual
        return self._granted(step_seconds, price, max(usual + price.expected, price.expected / SET_ASIDE)) or usual

    def longer(self, spent: float, step_seconds: float, price: Price) -> float:
        """Return the budget of a trial that has spent some of it and tries one more price; 0 if it gets no more."""
        if not isinstance(self.calibrate, (bool, str)):
            return 0.0
        return self._granted(step_seconds, price, spent + price.expected / SET_ASIDE)

    def _granted(self, step_seconds: float, price: Price, wanted: float) -> float:
        """Return the wanted budget if the run is expected to repay it, otherwise 0."""
        run = (self.total_steps or 0) * step_seconds
        pays = run * (1 - 1 / price.best_ratio) >= _WORTH * price.times * price.expected
        return wanted if pays and wanted <= _MOST_SHARE_WITH_PRICE * run else 0.0

    @property
    def too_short(self) -> str | None:
        """Why the run is too short for a trial; None if it is not."""
        if self.total_steps is None or not isinstance(self.calibrate, (bool, str)):
            return None
        if _steps_of_trial(self.total_steps) >= _LEAST_STEPS:
            return None
        return (
            f"{_MOST_SHARE:.0%} of {self.total_steps:,} steps is less than the {_LEAST_STEPS} steps that a trial "
            "needs; allow more with calibrate=seconds"
        )

    def obstacle(self, model: nn.Module) -> str | None:
        """Return why no trial takes place; None if it does."""
        if self.calibrate is False:
            return "calibrate=False"
        if self.compiled:
            return "compile was asked for, and the trial runs the other levers uncompiled"
        too_short = self.too_short
        if too_short is not None:
            return too_short
        return exchange_in(model)

    def before(self, algorithms: Iterable[Algorithm], target: Target) -> Pair | None:
        """Return the outline of a pair for the trial to compare with, if others than levers will change the model."""
        levers = {lever.name for lever in self.levers}
        changing = any(a.needs_transform(target.model) for a in algorithms if a.name not in levers)
        if self.calibrate is False or not changing:
            return None
        try:
            return outline(target.model, *target.optimizers)
        except TypeError:  # then this comparison does not take place
            return None

    def without_trial(self, reason: str, source: Source = "prior") -> Choice:
        """Return the choice of the prior, with the reason why nothing was measured."""
        levers = self.levers if self.calibrate is not False else [a for a in self.levers if a.name in self.prior]
        return Choice(verdicts=tuple(self._unmeasured(lever, reason) for lever in levers), source=source)

    def _unmeasured(self, lever: Algorithm, reason: str) -> Verdict:
        reason = self.fixed.get(lever.name, reason)
        return Verdict(lever=lever.name, kept=lever.name in self.prior, reason=f"not measured: {reason}")

    def measure(
        self, target: Target, passes: Passes, reduce: Reduce | None = None, *, before: Pair | None = None
    ) -> Choice:
        """Try the levers on the plain pair, which does not change.

        Args:
            target: Model and optimizer without levers.
            passes: Passes of the model on a training call, under a snapshot.
            reduce: Takes the largest of each number over the ranks.
            before: The outline from before boost, if the level has changed the model.
        """
        model, device = target.model, device_of(target.model)
        obstacle = self.obstacle(model)
        if obstacle is not None:
            return self.without_trial(obstacle)
        if before is not None:
            before = with_memory(before, model)
        levers = {lever.name: lever for lever in self.levers if lever.name not in self.fixed}
        base = [lever for lever in self.levers if lever.name in self.fixed and lever.name in self.prior]
        prices = {name: _price(model, self.graphs) for name in levers if REGISTRY[name].once}
        granted = next(iter(prices.values()), None) if _grants_price(device) else None
        tried, forms, budgets = dict(levers), dict[str, list[str]](), list[float]()
        for name, price in list(prices.items()):
            for label, (current, form) in _forms_of(levers[name], device).items():
                tried[label] = form.algorithm
                prices[label] = replace(price, expected=price.expected * form.price, best_ratio=form.best_ratio)
                forms.setdefault(current, []).append(label)

        def longer(spent: float, step_seconds: float, price: Price) -> float:
            budgets.append(self.longer(spent, step_seconds, price))
            return budgets[-1]

        try:
            with closing(
                Trial(
                    *(passes, target.optimizer, tried),
                    scaler=target.scaler,
                    base=base,
                    reduce=reduce,
                    before=None if before is None else (passes.of(before[0]), *before[1:]),
                    others=target.others,
                    interrupt=not self.sharded,
                )
            ) as trial:
                budgets.append(self.seconds(trial.step_seconds, granted))
                verdicts, ratio = search(
                    sorted(levers, key=lambda name: name not in self.prior),  # what may take long comes last
                    trial,
                    seconds=budgets[0],
                    steps=self.total_steps,
                    prices=prices,
                    undecided={name: name in self.prior for name in levers},
                    instead_of={name: REGISTRY[name].instead_of for name in levers},
                    forms=forms,
                    longer=None if granted is None else longer,
                    step_seconds=trial.step_seconds,
                    changed=before is not None,
                )
            for name in trial.built - {verdict.form or verdict.lever for verdict in verdicts if verdict.kept}:
                tried[name].forget()
        except RankDisagreementError:
            raise
        except Exception as error:  # a trial must never end a training
            return self.without_trial(f"the trial raised {_in_a_line(error)}")
        found = {verdict.lever: verdict for verdict in verdicts}
        return Choice(
            verdicts=tuple(found.get(lever.name) or self._unmeasured(lever, "") for lever in self.levers),
            source="trial",
            seconds=trial.elapsed(),
            budget=max(budgets),
            peak_bytes=needed_bytes(model),
            step_seconds=trial.step_seconds,
            ratio=ratio,
            machine=Machine.of(device),
        )

    def fitted(self, passes: Passes) -> Calibration:
        """Return the same with levers that know what a pass of a real call shows."""

        def fit(lever: Algorithm) -> Algorithm:
            if type(lever).fitted is Algorithm.fitted:
                return lever
            try:
                return passes.shown_to(lever.fitted)
            except Exception:  # what fails here fails in the passes too, which say it
                return lever

        return replace(self, levers=tuple(map(fit, self.levers)), asked=tuple(map(fit, self.asked)))

    def unchecked(self, choice: Choice, reason: str = "") -> Decision:
        """Return a choice as it is, with the reason why its levers were not compared with the plain step."""
        reason = reason or (_UNCHECKED if self.sharded else "verify=False")
        on = [*choice.kept, *(lever.name for lever in self.asked)]
        return Decision(choice, checks=dict.fromkeys(on, f"not checked: {reason}"))

    def check(
        self, choice: Choice, target: Target, passes: Passes, snapshot: Snapshot, reduce: Reduce | None = None
    ) -> Decision:
        """Compare the plain step with a step of the chosen levers, and drop levers with which it differs too much."""
        everything = {lever.name: lever for lever in (*self.levers, *self.asked)}
        asked = {lever.name for lever in self.asked}
        wanted = [lever for name, lever in everything.items() if name in choice.kept or name in asked]
        if not wanted or not self.verify:
            return self.unchecked(choice)
        checked = self._checked(wanted, target, passes, snapshot)
        flags = [float(lever.name not in checked.kept) for lever in wanted]
        flags = reduce(flags) if reduce is not None else flags
        gone = {lever.name for lever, flag in zip(wanted, flags, strict=True) if flag}
        for name in gone:
            everything[name].forget()
        said = {name: checked.said.get(name) or "another rank left it out" for name in gone} | checked.said
        verdicts = tuple(_off(v, said[v.lever]) if v.kept and v.lever in gone else v for v in choice.verdicts)
        changed = any(v.kept and v.lever in gone for v in choice.verdicts)
        choice = choice.model_copy(update={"verdicts": verdicts} | ({"ratio": None} if changed else {}))
        refused = {name: said[name] for name in sorted(gone & asked)}
        checks = {lever.name: said[lever.name] for lever in wanted if lever.name not in gone}
        return Decision(choice, refused=refused, checks=checks)

    def _checked(self, wanted: Sequence[Algorithm], target: Target, passes: Passes, snapshot: Snapshot) -> Checked:
        names = [lever.name for lever in wanted]
        try:
            return verified(wanted, passes, snapshot, target.optimizer, scaler=target.scaler, others=target.others)
        except Exception as error:  # a check must never end a training
            return Checked(names, dict.fromkeys(names, f"not checked: {_in_a_line(error)}"))


def _changes_model(lever: Algorithm) -> bool:
    return type(lever).transform is not Algorithm.transform


def exchange_in(model: nn.Module) -> str | None:
    """Return what in a model waits for other ranks in each pass, which a trial must not run; None without."""
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    units = sharded_units(model)
    if any(in_forward_of_fsdp2(unit) for unit in units):
        return "the call is inside another FSDP2 forward"
    if any(holds_back_gradients(unit) for unit in units):
        return "FSDP2 adds up the gradients of several passes before it averages them, and a trial would end that"
    if any(hook is not None for unit in units for hook in all_reduce_hooks(unit)):
        return "FSDP2 has an all-reduce hook, which may exchange gradients with other ranks"
    if together and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        return "SyncBatchNorm exchanges numbers within a step, which a trial must not interrupt on one rank"
    return None


def _off(verdict: Verdict, reason: str) -> Verdict:
    return verdict.model_copy(update={"kept": False, "reason": reason})


def _in_a_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300]


def _steps_of_trial(total_steps: int) -> float:
    return max(_SHARE_OF_RUN * total_steps, min(_FEW_STEPS, _MOST_SHARE * total_steps))


def check_calibrate(calibrate: Any) -> None:
    """Refuse a value that is not ``"auto"``, a bool or a positive number of seconds.

    Raises:
        ValueError: Another value.
    """
    number = isinstance(calibrate, (int, float)) and not isinstance(calibrate, bool)
    if calibrate == "auto" or isinstance(calibrate, bool) or (number and 0 < calibrate < float("inf")):
        return
    raise ValueError(
        f'calibrate: found {calibrate!r}; pass "auto", False for no trial, or the seconds that a trial may take.'
    )


def resolved(calibrate: Calibrate) -> Calibrate:
    """Return what ``"auto"`` means in this environment: False if ``TORCHBOOST_CALIBRATE`` is 0."""
    check_calibrate(calibrate)
    return False if calibrate == "auto" and os.environ.get(_SWITCH, "").strip() == "0" else calibrate


def describe(choice: Choice) -> str:
    """Return the choice in one line."""
    parts = [f"{v.lever} {'on' if v.kept else 'off'} ({v.reason})" for v in choice.verdicts]
    where = {"trial": f"measured in {choice.seconds:.1f} s", "cache": "measured earlier on this machine"}
    whole = [] if choice.ratio is None else [f"together {gain(choice.ratio)}"]
    return f"{'; '.join(parts + whole)}. Source: {where.get(choice.source, choice.source)}."


def explain(choice: Choice) -> str:
    """Return the choice in one line per lever."""
    headings = {
        "trial": f"measured at the first training call, {choice.seconds:.1f} s:",
        "cache": "measured at an earlier start, from the cache:",
        "checkpoint": "from the checkpoint:",
    }
    lines = [headings.get(choice.source, "not measured:")]
    for verdict in choice.verdicts:
        interval = verdict.ratio
        figure = "" if interval is None else f" ({interval.low:.2f} to {interval.high:.2f}, {verdict.pairs} pairs)"
        check = f"; {verdict.check}" if verdict.check else ""
        lines.append(f"  {verdict.lever}  {'on' if verdict.kept else 'off'}: {verdict.reason}{figure}{check}")
    if choice.ratio is not None:
        lines.append(f"  together {gain(choice.ratio)}")
    return "\n".join(lines)


def measured_elsewhere(choice: Choice, model: nn.Module) -> str:
    """Return how the machine of a checkpoint's choice differs from this one, and what to do; empty if it does not."""
    differences = "" if choice.machine is None else choice.machine.differences(Machine.of(device_of(model)))
    if not differences:
        return ""
    return (
        f"the levers of the checkpoint were measured elsewhere ({differences}). They are used without a new trial. To "
        'measure here, boost again and load the state without its key "choice"; to choose, name the levers in '
        'boost(..., config={"extra": {...}}).'
    )


def gain(ratio: Interval) -> str:
    """Return a ratio of step times as a clause."""
    return f"a step is {ratio.mid:.2f} times as fast as before boost ({ratio.low:.2f} to {ratio.high:.2f})"


def _price(model: nn.Module, graphs: int) -> Price:
    leaves = sum(1 for module in model.modules() if not any(True for _ in module.children()))
    expected = _COMPILE_SECONDS + _COMPILE_SECONDS_PER_MODULE * leaves
    return Price(expected=expected, best_ratio=_COMPILE_RATIO, times=graphs)


def _forms_of(lever: Algorithm, device: torch.device, name: str = "") -> dict[str, tuple[str, Form]]:
    """Return every form that may replace a lever, by its name, with the name of what it is tried against."""
    found: dict[str, tuple[str, Form]] = {}
    for form in lever.forms(device):
        label = f"{lever.name}({own_settings(form.algorithm)})"
        found |= {label: (name or lever.name, form), **_forms_of(form.algorithm, device, label)}
    return found


def _grants_price(device: torch.device) -> bool:
    """Whether a trial may take longer to try compilation: on a GPU a step takes less time, not the price."""
    return device.type in ("cuda", "xpu")


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
