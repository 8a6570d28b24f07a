"""The trial at the first training call: choose the levers of a plan on the inputs that arrive, then train."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from torchboost.calibration.cache import ChoiceCache, key_of
from torchboost.calibration.choice import Choice, Machine, Source, Verdict
from torchboost.calibration.next_call import entries_in, is_training_call
from torchboost.calibration.passes import Call, Passes
from torchboost.calibration.search import Price, search
from torchboost.calibration.snapshot import Snapshot, plain, streams_kept
from torchboost.calibration.trial import Pair, Reduce, Trial, copied, free_bytes, needed_bytes
from torchboost.calibration.verify import Checked, verified
from torchboost.core.algorithm import Algorithm, AttachedAlgorithms, Target, attach_all
from torchboost.core.torch_private import (
    Interceptor,
    active_ddp,
    compiled_call,
    interceptor_of,
    keep_step_pre_hook_places,
    set_compiled_call,
    step_pre_hook_keys,
)
from torchboost.core.wrapping import unwrap
from torchboost.distributed.agreement import Agreement
from torchboost.errors import RankDisagreementError
from torchboost.graph.recording import tensors_in
from torchboost.measure.evidence import Interval
from torchboost.registry import REGISTRY

__all__ = [
    "UNSEEN",
    "Calibrate",
    "Calibration",
    "Decision",
    "FirstCall",
    "OtherShapes",
    "attach_levers",
    "check_again",
    "check_calibrate",
    "describe",
    "explain",
    "gain",
    "measured_elsewhere",
    "resolved",
]

_LOG = logging.getLogger("torchboost")

Calibrate = bool | float | Literal["auto"]
"""``"auto"`` or True: a trial within 1 % of the run and 60 s, but within 40 steps if these are at most 4 % of the run.
False: none. A number: its seconds."""

UNSEEN = (
    "not measured: the optimizer was stepped, but no training call of the model was seen. It was compiled after boost, "
    "only a part of it is called, or all calls are inside a checkpoint"
)
"""Why nothing is measured if updates come before the first training call."""

_SWITCH = "TORCHBOOST_CALIBRATE"
"""Environment variable. If it is 0, ``"auto"`` measures nothing."""
_SHARE_OF_RUN = 0.01
_MOST_SHARE, _FEW_STEPS = 0.04, 40
"""A short run gives a larger share of its time, since 1 % of it would decide nothing."""
_MOST_SECONDS = 60.0
_STEPS_WITHOUT_LENGTH = 30
_LEAST_STEPS = 12
"""A trial of fewer steps could not decide about any lever."""
_MOST_OF_FREE = 0.5
"""If a snapshot and the gradients need more of the free memory, nothing is measured or checked."""
_READ_ONCE = "the inputs or the model hold an iterator, which can be read only once"
_RANKS_TIMEOUT = 600.0
"""Seconds that a rank waits for another one; a rank may compile for minutes."""
_COMPILE_SECONDS, _COMPILE_SECONDS_PER_MODULE = 8.0, 0.15
"""Expected price of a compilation, before it is measured."""
_COMPILE_RATIO = 1.5


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

    def without(self, name: str) -> Calibration:
        """Return the same without one lever."""
        return replace(
            self,
            levers=tuple(lever for lever in self.levers if lever.name != name),
            asked=tuple(lever for lever in self.asked if lever.name != name),
            compiled=self.compiled and not REGISTRY[name].once,
        )

    def seconds(self, step_seconds: float) -> float:
        """Return the budget of a trial, from the time of a plain step."""
        if not isinstance(self.calibrate, (bool, str)):
            return float(self.calibrate)
        if self.total_steps is None:
            return min(_MOST_SECONDS, _STEPS_WITHOUT_LENGTH * step_seconds)
        return min(_MOST_SECONDS, _steps_of_trial(self.total_steps) * step_seconds)

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
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if together and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
            return "SyncBatchNorm exchanges numbers within a step, which a trial must not interrupt on one rank"
        return None

    def before(self, algorithms: Iterable[Algorithm], target: Target) -> Pair | None:
        """Return copies of a pair for the trial to compare with, if other algorithms than levers change the model."""
        levers = {lever.name for lever in self.levers}
        changing = any(a.needs_transform(target.model) for a in algorithms if a.name not in levers)
        if self.calibrate is False or not changing:
            return None
        try:
            return copied(target.model, *target.optimizers)
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
        """Try the levers on the plain pair, which stays as it is.

        Args:
            target: Model and optimizer without levers.
            passes: Passes of the model on a training call, under a snapshot.
            reduce: Takes the largest of each number over the ranks.
            before: Copies from before boost, if the level has changed the model.
        """
        model, device = target.model, _device(target.model)
        obstacle = self.obstacle(model)
        if obstacle is not None:
            return self.without_trial(obstacle)
        if before is not None and _device(before[0]) != device:
            before = None
        levers = {lever.name: lever for lever in self.levers if lever.name not in self.fixed}
        base = [lever for lever in self.levers if lever.name in self.fixed and lever.name in self.prior]
        try:
            with closing(
                Trial(
                    *(passes, target.optimizer, levers),
                    scaler=target.scaler,
                    base=base,
                    reduce=reduce,
                    before=None if before is None else (passes.of(before[0]), *before[1:]),
                    others=target.others,
                )
            ) as trial:
                verdicts, ratio = search(
                    sorted(levers, key=lambda name: name not in self.prior),  # what may take long comes last
                    trial,
                    seconds=(budget := self.seconds(trial.step_seconds)),
                    steps=self.total_steps,
                    prices={name: _price(model, self.graphs) for name in levers if REGISTRY[name].once},
                    undecided={name: name in self.prior for name in levers},
                    step_seconds=trial.step_seconds,
                    changed=before is not None,
                )
        except RankDisagreementError:
            raise
        except Exception as error:  # a trial must never end a training
            return self.without_trial(f"the trial raised {_in_a_line(error)}")
        found = {verdict.lever: verdict for verdict in verdicts}
        return Choice(
            verdicts=tuple(found.get(lever.name) or self._unmeasured(lever, "") for lever in self.levers),
            source="trial",
            seconds=trial.elapsed(),
            budget=budget,
            peak_bytes=needed_bytes(model),
            step_seconds=trial.step_seconds,
            ratio=ratio,
            machine=Machine.of(device),
        )

    def unchecked(self, choice: Choice, reason: str) -> Decision:
        """Return a choice as it is, with the reason why its levers were not compared with the plain step."""
        on = [*choice.kept, *(lever.name for lever in self.asked)]
        return Decision(choice, checks=dict.fromkeys(on, f"not checked: {reason}"))

    def check(
        self, choice: Choice, target: Target, passes: Passes, snapshot: Snapshot, reduce: Reduce | None = None
    ) -> Decision:
        """Compare the plain step with that of the chosen levers, and leave out those with which it differs too much."""
        everything = {lever.name: lever for lever in (*self.levers, *self.asked)}
        asked = {lever.name for lever in self.asked}
        wanted = [lever for name, lever in everything.items() if name in choice.kept or name in asked]
        if not wanted or not self.verify:
            return self.unchecked(choice, "verify=False")
        checked = self._checked(wanted, target, passes, snapshot)
        flags = [float(lever.name not in checked.kept) for lever in wanted]
        flags = reduce(flags) if reduce is not None else flags
        gone = {lever.name for lever, flag in zip(wanted, flags, strict=True) if flag}
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
            if snapshot.has_iterator:
                raise ValueError(_READ_ONCE)
            return verified(wanted, passes, snapshot, target.optimizer, scaler=target.scaler, others=target.others)
        except Exception as error:  # a check must never end a training
            return Checked(names, dict.fromkeys(names, f"not checked: {_in_a_line(error)}"))


def _off(verdict: Verdict, reason: str) -> Verdict:
    return verdict.model_copy(update={"kept": False, "reason": reason})


def _in_a_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300]


class FirstCall(Interceptor):
    """Waits in front of a model for the first training call, decides about the levers, and lets the call run.

    It answers each call of the model until then. Calls in eval mode, without gradients, inside a compiler, a tracer, a
    checkpoint or a transform of ``torch.func``, or with tensors other than plain ones pass through.

    Args:
        target: The pair. Its levers are attached as the prior says.
        attached: All attachments of the pair; the levers among them are replaced.
        calibration: What to decide and at what price.
        decided: Called after the levers were attached, with what was decided on which call.
        before: Copies from before boost, if the level has changed the model. They are freed with this object.
        again: The key in the cache of a choice that is measured once more and replaced; None for a first choice.

    Attributes:
        given: The choice of a checkpoint, which is used instead of a trial.
    """

    def __init__(
        self,
        target: Target,
        attached: AttachedAlgorithms,
        calibration: Calibration,
        decided: Callable[[Decision, Call], None],
        *,
        before: Pair | None = None,
        again: str | None = None,
    ) -> None:
        self._target, self._attached = target, attached
        self._calibration, self._decided = calibration, decided
        self._model = target.model
        self.given: Choice | None = None
        self._before, self._again, self.key = before, again is not None, again
        self.compiled = compiled_call(self._model)
        set_compiled_call(self._model, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the model."""
        if is_training_call(self._model, args, kwargs):
            self.decide((args, kwargs))
            return self._model(*args, **kwargs)
        return self.pass_on(self._model, *args, **kwargs)

    def decide(self, call: Call) -> None:
        """Choose, and attach what was chosen. If this is interrupted, the next training call decides."""
        calibration, ranks = _on_ranks(self._calibration, self._model)
        if calibration.calibrate is False:
            calibration = replace(calibration, prior=frozenset(self._attached))
        if ranks is None and self.key is None and calibration.calibrate is not False:
            self.key = _key(calibration, self._target, call)
        choice = self.given
        if choice is None and self.key and not self._again:
            choice = ChoiceCache().load(self.key)
        if choice is None and (obstacle := calibration.obstacle(self._model)) is not None:
            choice = calibration.without_trial(obstacle)
        self.remove()
        try:
            with _ranks_agree(calibration, ranks) as (calibration, reduce):
                if choice is None and ranks == []:
                    choice = calibration.without_trial("several ranks decide together only under DDP")
                decision = _on_the_plain_pair(
                    *(self._target, self._attached, calibration, choice, call, reduce), before=self._before
                )
        except BaseException:
            self.key = self.key if self._again else None
            self.compiled = compiled_call(self._model)
            set_compiled_call(self._model, self)
            raise
        choice = decision.choice
        if self.key and choice.source == "trial" and not any(v.interrupted for v in choice.verdicts):
            ChoiceCache().store(self.key, choice)
        self._before = None
        entries = None if self.given is not None else entries_in(*call)
        self._decided(replace(decision, entries=entries), call)

    def give(self, choice: Choice) -> None:
        """Use a choice that was made earlier instead of a trial. Levers that are not among ours are ignored."""
        self.given = choice.only(self._calibration.levers)

    def withdraw(self, name: str) -> None:
        """Decide nothing about one lever. If none is left, stop waiting."""
        self._calibration = self._calibration.without(name)
        if not (self._calibration.levers or self._calibration.asked):
            self.remove()
            self._before = None

    def remove(self) -> None:
        """Stop waiting. A second call does nothing."""
        if interceptor_of(self._model) is self:
            set_compiled_call(self._model, self.compiled)


class OtherShapes(Interceptor):
    """Waits for the first training call with inputs of other shapes. The call then runs as if nothing had been there.

    Args:
        model: The bare model.
        call: The call whose shapes are known.
        seen: Called once with the other call, before it runs.

    Cost: one call of a Python function per call until then, and one look at the inputs.
    """

    def __init__(self, model: nn.Module, call: Call, seen: Callable[[Call], None]) -> None:
        self._model, self._shapes, self._seen = model, _shapes(call), weakref.WeakMethod(seen)
        self.compiled = compiled_call(self._model)
        set_compiled_call(self._model, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the model."""
        if _shapes((args, kwargs)) == self._shapes or not is_training_call(self._model, args, kwargs):
            return self.pass_on(self._model, *args, **kwargs)
        self.remove()
        seen = self._seen()
        if seen is not None:
            seen((args, kwargs))
        return self._model(*args, **kwargs)

    def remove(self) -> None:
        """Stop waiting. A second call does nothing."""
        if interceptor_of(self._model) is self:
            set_compiled_call(self._model, self.compiled)


def check_again(target: Target, attached: AttachedAlgorithms, calibration: Calibration, call: Call) -> Decision:
    """Check the levers that are on with another call, and detach those that must go."""
    calibration, ranks = _on_ranks(calibration, target.model)
    levers = [lever for lever in (*calibration.levers, *calibration.asked) if lever.name in attached]
    calibration = replace(calibration, calibrate=False, levers=(), asked=tuple(levers))
    with _ranks_agree(calibration, ranks) as (calibration, reduce):
        return _on_the_plain_pair(target, attached, calibration, Choice(verdicts=(), source="prior"), call, reduce)


def _on_the_plain_pair(
    target: Target,
    attached: AttachedAlgorithms,
    calibration: Calibration,
    choice: Choice | None,
    call: Call,
    reduce: Reduce | None,
    *,
    before: Pair | None = None,
) -> Decision:
    """Measure if there is no choice, check it, and attach what stays. If this fails, attach what was there."""
    levers = [*calibration.levers, *calibration.asked]
    on = [lever for lever in levers if lever.name in attached]
    places = _places(target)
    kept = on
    try:
        for lever in on:
            if choice is None or calibration.verify or lever.name not in choice.kept:
                attached.detach(lever.name)
        decision = _decided(target, calibration, choice, call, reduce, before)
        names = {*decision.choice.kept, *(lever.name for lever in calibration.asked)} - set(decision.refused)
        kept = [lever for lever in levers if lever.name in names]
        return decision
    finally:
        with streams_kept(target.model):
            attach_levers(target, attached, [lever for lever in kept if lever.name not in attached], places)


def _decided(
    target: Target,
    calibration: Calibration,
    choice: Choice | None,
    call: Call,
    reduce: Reduce | None,
    before: Pair | None,
) -> Decision:
    if choice is not None and not calibration.verify:
        return calibration.unchecked(choice, "verify=False")
    short = _shortage(target, reduce)
    if short is not None:
        return calibration.unchecked(calibration.without_trial(short) if choice is None else choice, short)
    with _on_real_inputs(calibration, target, call) as (passes, snapshot):
        if choice is None and snapshot.has_iterator:
            choice = calibration.without_trial(_READ_ONCE)
        elif choice is None:
            choice = calibration.measure(target, passes, reduce, before=before)
        return calibration.check(choice, target, passes, snapshot, reduce)


def _shapes(call: Call) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(list(call))]


def _places(target: Target) -> list[list[int]]:
    return [step_pre_hook_keys(optimizer) for optimizer in target.optimizers]


def attach_levers(
    target: Target,
    attached: AttachedAlgorithms,
    levers: Sequence[Algorithm],
    places: Sequence[Sequence[int]] | None = None,
) -> None:
    """Attach levers to a pair that has attachments. Hooks of the user keep their places before and after them.

    Args:
        target: The pair.
        attached: Its attachments, to which the new ones are added.
        levers: Algorithms that are not attached.
        places: Keys of the hooks of each optimizer, if levers were detached before; None takes those of now.
    """
    places = _places(target) if places is None else places
    attached.adopt(attach_all(target, levers))
    for optimizer, keys in zip(target.optimizers, places, strict=True):
        keep_step_pre_hook_places(optimizer, keys)


def _on_ranks(calibration: Calibration, model: nn.Module) -> tuple[Calibration, list[int] | None]:
    """Return what may be decided, and the ranks that must decide the same; None for a single process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return calibration, None
    ddp = active_ddp()
    if ddp is None or unwrap(ddp) is not model:
        return calibration, []
    reason = "DistributedDataParallel has laid out its buckets for the kernels as they are"
    fixed = {a.name: reason for a in calibration.levers if type(a).transform is not Algorithm.transform}
    return replace(calibration, fixed=fixed), dist.get_process_group_ranks(ddp.process_group)


@contextmanager
def _ranks_agree(calibration: Calibration, ranks: list[int] | None) -> Iterator[tuple[Calibration, Reduce | None]]:
    """Yield what the ranks decide together, and how they do it; None if each decides for itself."""
    if not ranks:
        yield calibration, None
        return
    agreement = Agreement(ranks, subject="the trial of the speed levers", timeout=_RANKS_TIMEOUT)
    try:
        # The speed of bfloat16 is measured on each rank, so the ranks may expect different levers to pay.
        absent = agreement.largest([float(a.name not in calibration.prior) for a in calibration.levers], step="prior")
        common = frozenset(a.name for a, missing in zip(calibration.levers, absent, strict=True) if not missing)
        yield replace(calibration, prior=common), lambda numbers: agreement.largest(numbers, step="sample")
    finally:
        agreement.close()


def _shortage(target: Target, reduce: Reduce | None) -> str | None:
    """Return why there is too little memory for a snapshot and passes; None if there is enough."""
    available, needed = free_bytes(_device(target.model)), needed_bytes(target.model)
    short = available is not None and needed > _MOST_OF_FREE * available
    if not (reduce([float(short)])[0] if reduce is not None else short):
        return None
    free = "too little is" if available is None else f"{available / 2**20:,.0f} MiB are"
    return f"a snapshot and the gradients need about {needed / 2**20:,.0f} MiB, and {free} free"


@contextmanager
def _on_real_inputs(calibration: Calibration, target: Target, call: Call) -> Iterator[tuple[Passes, Snapshot]]:
    """Yield passes of the plain model on a call, and the snapshot from which everything is restored at the end."""
    model = target.model
    held = {id(p) for p in model.parameters()}
    groups = [group for optimizer in target.optimizers for group in optimizer.param_groups]
    outside = [p for group in groups for p in group["params"] if id(p) not in held]
    device = _device(model)
    free = free_bytes(device) if device.type == "cuda" else None
    with streams_kept(model), plain(model):
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        snapshot = Snapshot(model, call, outside, elsewhere=free is not None and 4 * size > free)
        try:
            yield Passes(model, call, snapshot, others=outside, forward=calibration.forward), snapshot
        finally:
            if snapshot.restore() == "":
                _LOG.warning(
                    "A pass of the trial changed a large array or tensor that the model holds as an attribute, and it "
                    "was not restored. Register it as a buffer, or use boost(..., calibrate=False, verify=False)."
                )


def _key(calibration: Calibration, target: Target, call: Call) -> str | None:
    """Return the name of the choice in the cache, from the pair as the prior has it; None without a cache."""
    if ChoiceCache().folder is None:
        return None
    return key_of(
        target.model,
        target.optimizer,
        call,
        candidates=calibration.levers,
        machine=Machine.of(_device(target.model)),
        conditions={"total_steps": calibration.total_steps, "calibrate": calibration.calibrate},
        others=target.others,
    )


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
    lines = [f"measured at the first training call, {choice.seconds:.1f} s:" if choice.source == "trial" else "levers:"]
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
    differences = "" if choice.machine is None else choice.machine.differences(Machine.of(_device(model)))
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


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
