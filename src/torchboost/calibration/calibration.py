"""Decide about the levers of a plan at the first training call: measure them, or take an earlier choice, and check."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchboost.calibration.certificate import Result, verified
from torchboost.calibration.choice import Choice, Verdict, machine_of
from torchboost.calibration.passes import Passes, on_real_inputs, reshard
from torchboost.calibration.search import SET_ASIDE, Price, search
from torchboost.calibration.trial import Reduce, Trial, free_bytes, needed_bytes, obstacle_to_updates
from torchboost.calibration.watch import Call
from torchboost.core.algorithm import Algorithm, AlreadyOn, Form, Target
from torchboost.core.hardware import device_of
from torchboost.core.torch_private import (
    active_ddp,
    all_reduce_hooks,
    holds_back_gradients,
    in_forward_of_fsdp2,
    overrides_dispatch,
)
from torchboost.core.wrapping import parameters_of, sharded_units, unwrap
from torchboost.distributed.agreement import Agreement, ranks_of_shards
from torchboost.distributed.topology import Topology
from torchboost.errors import RankDisagreementError, in_a_line
from torchboost.plan import Plan, own_settings
from torchboost.registry import REGISTRY
from torchboost.sheet import percent

Calibrate = bool | float | Literal["auto"]
"""``"auto"`` or True: a trial within 1 % of the run and 60 s, but within 40 steps if these are at most 4 % of the run.
False: none. A number: its seconds."""

UNSEEN = (
    "the optimizer was stepped, but no training call of the model was seen. Either it is in evaluation mode (call "
    "model.train()), or it was compiled after boost, only a part of it is called, all calls are inside a checkpoint, "
    "several ranks call it without DDP, or DataParallel calls replicas of it"
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
WORTH_A_WORD = 2.0
"""A trial that may take so many seconds is announced."""
_COMPILE_SECONDS, _COMPILE_SECONDS_PER_MODULE = 8.0, 0.15
"""Expected price of a compilation, before it is measured."""
_COMPILE_RATIO = 1.5
_WORTH = 3.0
"""On a GPU a trial takes as much longer as a price, if the run is expected to save this multiple of the price."""
_MOST_SHARE_WITH_PRICE = 0.05
_MOST_OF_FREE = 0.5
"""If a snapshot and the gradients need more of the free memory, nothing is measured or checked."""
_READ_ONCE = "the inputs or the model hold an iterator, which can be read only once"
_WITHOUT_DDP = "several ranks decide together only under DDP or FSDP2"
_ELSEWHERE = "another rank has a reason not to, which its explain() gives"
_RANKS_TIMEOUT = 600.0
"""Seconds that a rank waits for another one. A rank may compile for minutes."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The facts about a run that the first training call needs.

    Args:
        levers: The algorithms that a trial may switch on and off.
        fixed: Levers that the prior decides, with the reason.
        prior: Names of those that are on without a trial.
        calibrate: Whether and how long to measure.
        total_steps: Updates of the run. None if unknown.
        graphs: The most graphs of a compiled model over the run. The trial compiles one of them.
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
        """Return the decisions and checks of the first training call. None if there are none.

        A model inside a ``wrapper`` is not bare, unless FSDP2 shards it in place.
        """
        sharded = wrapper == "fully_shard"
        on = {algorithm.name for algorithm in plan.algorithms}
        levers = {lever.name for lever in plan.levers}
        asked = tuple(a for a in plan.algorithms if REGISTRY[a.name].lever and a.name not in levers)
        fixed: dict[str, str] = {}
        for lever in plan.levers:
            if sharded and (REGISTRY[lever.name].once or changes_model(lever)):
                fixed[lever.name] = _SHARDED
            elif Topology.current().world_size > 1 and changes_model(lever):
                fixed[lever.name] = _BUCKETS
        verify = verify and not sharded
        checks = verify and (asked or levers & on)
        if (
            (wrapper is not None and not sharded)
            or any(algorithm.traits.replaces_optimizer for algorithm in plan.algorithms)
            or not (levers or asked)
            or (calibrate is False and not checks)
        ):
            return None
        return cls(
            levers=plan.levers,
            prior=frozenset(n for n in on & levers if calibrate is False or n in fixed or not REGISTRY[n].once),
            calibrate=calibrate if levers else False,
            total_steps=plan.total_steps,
            fixed=fixed,
            graphs=max((algorithm.graphs() for algorithm in plan.algorithms), default=1),
            forward=forward,
            asked=asked,
            verify=verify,
            sharded=sharded,
        )

    def in_form(self, choice: Choice | None, device: torch.device) -> Calibration:
        """Return the same with the levers in the forms of a choice. A form that does not exist here is not used."""
        chosen = {} if choice is None else {verdict.lever: verdict.form for verdict in choice.verdicts}
        forms = [(lever, _forms_of(lever, device).get(chosen.get(lever.name, ""))) for lever in self.levers]
        return replace(self, levers=tuple(lever if form is None else form[1].algorithm for lever, form in forms))

    def with_formats_as(self, on: Iterable[str]) -> Calibration:
        """Return the same with the present memory formats, because DDP has laid out its buckets."""
        formats = frozenset(lever.name for lever in self.levers if changes_model(lever))
        return replace(
            self,
            fixed={**self.fixed, **dict.fromkeys(formats, _BUCKETS)},
            prior=(self.prior - formats) | (formats & frozenset(on)),
        )

    @property
    def settings(self) -> list[float]:
        """The settings that all ranks must share, as numbers of which the largest one counts."""
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
            prior=frozenset(lever.name for lever, off in zip(self.levers, absent, strict=True) if not off),
        )

    def seconds(self, step_seconds: float, price: Price | None = None, spent: float = 0.0) -> float:
        """Return the budget of a trial, by the time of a plain step.

        For the price of a lever it may take longer, up to 5 % of the run, if the run is expected to repay it. ``spent``
        are the seconds that the trial has spent before it tries this price.
        """
        if not isinstance(self.calibrate, (bool, str)):
            return float(self.calibrate)
        if self.total_steps is None:
            return min(_MOST_SECONDS, _STEPS_WITHOUT_LENGTH * step_seconds)
        usual = min(_MOST_SECONDS, _steps_of_trial(self.total_steps) * step_seconds)
        if price is None or (not spent and price.expected <= SET_ASIDE * usual):
            return usual
        wanted, run = spent + price.expected / SET_ASIDE, self.total_steps * step_seconds
        wanted = wanted if spent else max(usual + price.expected, wanted)
        pays = run * (1 - 1 / price.best_ratio) >= _WORTH * price.times * price.expected
        return wanted if pays and wanted <= _MOST_SHARE_WITH_PRICE * run else usual

    def obstacle(self, target: Target) -> str | None:
        """Return why no trial takes place. None if it does."""
        if self.calibrate is False:
            return "calibrate=False"
        if any(REGISTRY[name].once for name in {*(lever.name for lever in self.asked), *(self.prior & {*self.fixed})}):
            return "compile was asked for, and the trial runs the other switches uncompiled"
        counts_steps = self.total_steps is not None and isinstance(self.calibrate, (bool, str))
        if counts_steps and _steps_of_trial(self.total_steps or 0) < _LEAST_STEPS:
            return (
                f"a run of {self.total_steps:,} steps is short: a trial may take {percent(_MOST_SHARE)} of it, and "
                f"needs {_LEAST_STEPS} steps; calibrate=10 measures for up to 10 s"
            )
        return obstacle_to_updates(target.optimizers) or exchange_in(target.model)

    def without_trial(self, reason: str) -> Choice:
        """Return the choice of the prior, with the reason why nothing was measured."""
        levers = [a.name for a in self.levers if self.calibrate is not False or a.name in self.prior]

        def verdict(name: str) -> Verdict:
            why = self.fixed.get(name, reason)
            before = isinstance(why, AlreadyOn)
            text = str(why) if before else f"not measured: {why}"
            return Verdict(lever=name, kept=name in self.prior, reason=text, before=before)

        return Choice(verdicts=tuple(map(verdict, levers)), source="prior")

    def measure(self, target: Target, passes: Passes, reduce: Reduce = list) -> Choice:
        """Try the levers on the plain pair, which does not change, with passes of its model on a training call."""
        model, device = target.model, device_of(target.model)
        levers = {lever.name: lever for lever in self.levers if lever.name not in self.fixed}
        base = [lever for lever in self.levers if lever.name in self.fixed and lever.name in self.prior]
        prices, tried, forms = self._prices(levers, model)
        budgets: list[float] = []

        try:
            options: dict[str, Any] = {"scaler": target.scaler, "reduce": reduce, "interrupt": not self.sharded}
            with closing(Trial(passes, target.optimizers, tried, base=base, **options)) as trial:
                if reduce([float(self.verify and passes.draws)])[0]:  # the check compiles once more, without dropout
                    prices = {name: replace(price, times=price.times + 1) for name, price in prices.items()}
                # On a GPU it may take longer to try compilation: there a step takes less time, and the price does not.
                granted = next(iter(prices.values()), None) if device.type in ("cuda", "xpu") else None

                def budget(step_seconds: float, price: Price | None = granted, spent: float = 0.0) -> float:
                    budgets.append(self.seconds(step_seconds, price, spent))
                    return budgets[-1]

                if budget(trial.step_seconds) >= WORTH_A_WORD:
                    count = f"{len(levers)} switch{'es' if len(levers) > 1 else ''}"
                    most = f"at most {budgets[0]:.0f} s{', longer if compilation pays' if forms else ''} ..."
                    tell(f"trying {count} on your model ({', '.join(levers)}), {most}")
                verdicts, ratio = search(
                    sorted(levers, key=lambda name: name not in self.prior),  # levers that may take long come last
                    trial,
                    budget=budget,
                    steps=self.total_steps,
                    prices=prices,
                    undecided={name: name in self.prior for name in levers},
                    forms=forms,
                    inert=[lever.name for lever in self.levers if lever.traits.eager],
                    step_seconds=trial.step_seconds,
                )
            for name in trial.built - {verdict.form or verdict.lever for verdict in verdicts if verdict.kept}:
                tried[name].forget()
        except RankDisagreementError:
            raise
        except Exception as error:  # a trial must never end a training
            failed = self.without_trial(f"the trial raised {in_a_line(error)}")
            return failed.model_copy(update={"budget": max(budgets, default=0.0)})
        measured = {verdict.lever: verdict for verdict in verdicts}
        return Choice(
            verdicts=tuple(measured.get(fixed.lever, fixed) for fixed in self.without_trial("").verdicts),
            source="trial",
            seconds=trial.elapsed(),
            budget=max(budgets),
            peak_bytes=needed_bytes(model),
            step_seconds=trial.step_seconds,
            ratio=ratio,
            machine=machine_of(device),
        )

    def _prices(
        self, levers: Mapping[str, Algorithm], model: nn.Module
    ) -> tuple[dict[str, Price], dict[str, Algorithm], dict[str, list[str]]]:
        """Return the prices of levers and of their forms, both by name, and the forms that may replace each of them."""
        leaves = sum(1 for module in model.modules() if not any(True for _ in module.children()))
        expected = _COMPILE_SECONDS + _COMPILE_SECONDS_PER_MODULE * leaves
        compilation = Price(expected=expected, best_ratio=_COMPILE_RATIO, times=self.graphs)
        prices = {name: compilation for name in levers if REGISTRY[name].once}
        tried, forms = dict(levers), dict[str, list[str]]()
        for name in list(prices):
            for label, (current, form) in _forms_of(levers[name], device_of(model)).items():
                tried[label] = form.algorithm
                own = {"expected": expected * form.price, "best_ratio": form.best_ratio, "of_host": form.of_host}
                prices[label] = replace(compilation, **own)
                forms.setdefault(current, []).append(label)
        return prices, tried, forms

    def fitted(self, passes: Passes) -> Calibration:
        """Return the same with levers that are fitted to a pass of a real call."""

        def fit(lever: Algorithm) -> Algorithm:
            if type(lever).fitted is Algorithm.fitted:
                return lever
            try:
                return passes.shown_to(lever.fitted)
            except Exception:  # an error here occurs in the passes too, which report it
                return lever

        return replace(self, levers=tuple(map(fit, self.levers)), asked=tuple(map(fit, self.asked)))

    def positions(self, passes: Passes) -> list[Tensor]:
        """Return masks of the positions that the levers compute, if some do not compute all."""
        partial = [a for a in (*self.levers, *self.asked) if type(a).positions is not Algorithm.positions]
        return [mask for lever in partial if not lever.without_effect for mask in passes.shown_to(lever.positions)]

    def without_effect(self, reduce: Reduce = list) -> Calibration:
        """Return the same without those levers that change nothing, as the first call has shown on every rank."""
        somewhere = reduce([float(not lever.without_effect) for lever in self.levers])
        none = [lever for lever, some in zip(self.levers, somewhere, strict=True) if not some]
        reasons = {lever.name: lever.without_effect for lever in none}
        return replace(self, fixed={**self.fixed, **reasons}, prior=self.prior - reasons.keys())

    def not_before(self, choice: Choice, reduce: Reduce = list) -> Choice:
        """Return a choice of rules without levers that the loop has, as the first call has shown on every rank."""
        elsewhere = reduce([float(not isinstance(lever.without_effect, AlreadyOn)) for lever in self.levers])
        before = [lever for lever, other in zip(self.levers, elsewhere, strict=True) if not other]
        off: dict[str, Any] = {"kept": False, "before": True}
        return choice.changed({lever.name: off | {"reason": str(lever.without_effect)} for lever in before})

    def unchecked(self, choice: Choice, reason: str = "") -> Choice:
        """Return a choice with the reason why its levers were not compared with the plain step."""
        text = f"not checked: {reason or (_UNCHECKED if self.sharded else 'verify=False')}"
        choice = self._with_asked(choice)
        return choice.changed({name: {"check": text} for name in choice.kept})

    def check(self, choice: Choice, target: Target, passes: Passes, reduce: Reduce = list) -> Choice:
        """Compare the plain step with a step of the chosen levers, and drop levers with which it differs too much."""
        choice = self._with_asked(choice)
        on = [lever for lever in (*self.levers, *self.asked) if lever.name in choice.kept]
        if not on or not self.verify:
            return self.unchecked(choice)
        try:
            results = verified(on, passes, target.optimizers, scaler=target.scaler)
        except Exception as error:  # a check must never end a training
            results = {lever.name: Result(True, f"not checked: {in_a_line(error)}") for lever in on}
        gone = reduce([float(not results[lever.name].kept) for lever in on])
        changes: dict[str, dict[str, Any]] = {name: {"check": result.text} for name, result in results.items()}
        for lever in (lever for lever, goes in zip(on, gone, strict=True) if goes):
            lever.forget()
            result = results[lever.name]
            reason = "another rank left it out" if result.kept else result.text
            changes[lever.name] = {"kept": False, "reason": reason, "longer": 0}
        if any("kept" in changes.get(lever.name, ()) for lever in self.levers):
            choice = choice.model_copy(update={"ratio": None})
        return choice.changed(changes)

    def _with_asked(self, choice: Choice) -> Choice:
        names = {lever.name for lever in self.asked}
        asked = [Verdict(lever=lever.name, kept=True, reason="asked for") for lever in self.asked]
        verdicts = (*(v for v in choice.verdicts if v.lever not in names), *asked)
        return choice.model_copy(update={"verdicts": verdicts})


def tell(text: str, details: str = "", *, warns: bool = False) -> None:
    """Tell the user what the first step does: details by the logger, or if logging is not set up, a line on stderr."""
    log = logging.getLogger("torchboost")
    if log.hasHandlers() or log.level:
        log.log(logging.WARNING if warns else logging.INFO, "%s", details or text)
    elif text and Topology.current().rank == 0:
        print(f"torchboost: {'warning: ' if warns else ''}{text}", file=sys.stderr, flush=True)


def decide(
    target: Target, calibration: Calibration, call: Call, choice: Choice | None, detach: Callable[[], None]
) -> tuple[Choice, list[Algorithm]]:
    """Measure the levers if there is no choice yet, and check the chosen ones. The pair does not change.

    ``detach`` takes off the levers that are on. It is called unless there is a choice that is not checked.

    Returns:
        The choice, also about levers that were asked for. Those that are on, in the chosen form and fitted to a pass.
    """
    model, ranks = target.model, deciding_ranks(calibration, target)
    with _comparing(ranks) as reduce:
        no_trial = calibration.obstacle(target)
        no_pass = _WITHOUT_DDP if ranks == [] else obstacle_to_passes(target)
        flags = [float(flag) for flag in (choice is None, no_trial is not None, no_pass is not None)]
        missing, no_trials, no_passes, *settings = reduce([*flags, *calibration.settings])
        calibration = calibration.agreed(settings)
        no_pass = no_pass or (_ELSEWHERE if no_passes else None)
        if missing:
            no_trial = calibration.obstacle(target) or (_ELSEWHERE if no_trials else None)
            choice = None if no_trial is None else calibration.without_trial(no_trial)
        if choice is None or calibration.verify:
            if no_pass is None:
                reshard(model)  # after an evaluation its parameters may still be whole
            detach()
        choice, calibration = _decided(target, calibration, call, choice, no_pass, reduce)
    return choice, [lever for lever in (*calibration.levers, *calibration.asked) if lever.name in choice.kept]


def _decided(
    target: Target, calibration: Calibration, call: Call, choice: Choice | None, no_pass: str | None, reduce: Reduce
) -> tuple[Choice, Calibration]:
    """Return the choice, and the levers fitted to a pass."""
    device = device_of(target.model)
    calibration = calibration.in_form(choice, device)
    if choice is not None and not calibration.verify:
        return calibration.unchecked(choice), calibration
    if no_pass is not None:
        return calibration.unchecked(choice or calibration.without_trial(no_pass), no_pass), calibration
    with on_real_inputs(target, call, calibration.forward) as passes:
        if reduce([float(passes.snapshot.has_iterator)])[0]:
            return calibration.unchecked(choice or calibration.without_trial(_READ_ONCE), _READ_ONCE), calibration
        calibration = calibration.fitted(passes)
        passes.unread = calibration.positions(passes)
        if choice is None:
            calibration = calibration.without_effect(reduce)
            choice = calibration.measure(target, passes, reduce)
            calibration = calibration.in_form(choice, device)
        elif choice.source == "prior":
            choice = calibration.not_before(choice, reduce)
        return calibration.check(choice, target, passes, reduce), calibration


def deciding_ranks(calibration: Calibration, target: Target) -> list[int] | None:
    """Return the ranks that must decide the same. None for a single process, empty if they cannot decide together."""
    if Topology.current().world_size == 1:
        return None
    if calibration.sharded:
        return ranks_of_shards(parameters_of(*target.optimizers))  # the model's may be whole
    ddp = active_ddp()
    if ddp is None or unwrap(ddp) is not target.model:
        return []
    return dist.get_process_group_ranks(ddp.process_group)


@contextmanager
def _comparing(ranks: list[int] | None) -> Iterator[Reduce]:
    """Yield a function that takes the largest of each number over the ranks."""
    if not ranks:
        yield list
        return
    with closing(Agreement(ranks, subject="the trial of the switches", timeout=_RANKS_TIMEOUT)) as agreement:
        yield lambda numbers: agreement.largest(numbers, step="sample")


def obstacle_to_passes(target: Target) -> str | None:
    """Return why there can be no passes: too little memory for them, or something that other processes take part in."""
    exchange = exchange_in(target.model)
    if exchange is not None:
        return exchange
    if any(p.device.type == "cpu" and p.is_shared() for p in target.model.parameters() if not overrides_dispatch(p)):
        return "the parameters are in shared memory, and other processes may train them meanwhile"
    available, needed = free_bytes(device_of(target.model)), needed_bytes(target.model)
    if available is None or needed <= _MOST_OF_FREE * available:
        return None
    return (
        f"a snapshot and the gradients need about {needed / 2**20:,.0f} MiB, and {available / 2**20:,.0f} MiB are free"
    )


def changes_model(lever: Algorithm) -> bool:
    """Whether a lever changes the memory of parameters."""
    return type(lever).transform is not Algorithm.transform


def exchange_in(model: nn.Module) -> str | None:
    """Return why a trial must not run passes of a model, which wait for other ranks. None if it may."""
    together = Topology.current().world_size > 1
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


def _steps_of_trial(total_steps: int) -> float:
    return max(_SHARE_OF_RUN * total_steps, min(_FEW_STEPS, _MOST_SHARE * total_steps))


def resolved(calibrate: Calibrate) -> Calibrate:
    """Return what ``"auto"`` means in this environment: False if ``TORCHBOOST_CALIBRATE`` is 0.

    Raises:
        ValueError: Not ``"auto"``, a bool or a positive number of seconds.
    """
    if calibrate == "auto":
        return False if os.environ.get(_SWITCH, "").strip() == "0" else calibrate
    if isinstance(calibrate, bool) or (isinstance(calibrate, (int, float)) and 0 < calibrate < math.inf):
        return calibrate
    raise ValueError(
        f'calibrate: found {calibrate!r}; pass "auto", False for no trial, or the seconds that a trial may take.'
    )


def _forms_of(lever: Algorithm, device: torch.device, name: str = "") -> dict[str, tuple[str, Form]]:
    """Return every form that may replace a lever, by its name, with the name of its rival."""
    forms: dict[str, tuple[str, Form]] = {}
    for form in lever.forms(device):
        label = f"{lever.name}({own_settings(form.algorithm)})"
        forms |= {label: (name or lever.name, form), **_forms_of(form.algorithm, device, label)}
    return forms
