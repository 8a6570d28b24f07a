"""The one owner of the speed levers of a boosted pair: which are on, why, and who said so."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.algorithms.unpad import Unpad
from torchboost.calibration.calibration import (
    UNSEEN,
    WORTH_A_WORD,
    Calibrate,
    Calibration,
    changes_model,
    decide,
    deciding_ranks,
    obstacle_to_passes,
    tell,
)
from torchboost.calibration.choice import WASTE, Choice, Verdict
from torchboost.calibration.waste import NOTABLE, WasteReport, padded_share, waste_of
from torchboost.calibration.watch import Call, Gate, is_training_call, shapes_of, uninterrupted
from torchboost.core.algorithm import Algorithm, AlreadyOn, Target, attach_all
from torchboost.core.hardware import accelerators, device_of, streams_kept
from torchboost.core.torch_private import AnyBatchNorm
from torchboost.core.wrapping import hookable
from torchboost.distributed.topology import Topology
from torchboost.earlier import check_against_o1, watch_for_o1
from torchboost.errors import IncompatibleError, warn_no_effect
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.wrapping_optimizer import WrappingOptimizer
from torchboost.plan import COMPILED, Plan, why_idle
from torchboost.registry import REGISTRY, Host
from torchboost.sheet import Explanation, Row, percent
from torchboost.tokens.call import PartialForward

_LOG = logging.getLogger("torchboost")

State = Literal["waiting", "decided", "removed"]

_ENDED = "training has ended and the hooks are off; it ran with:"
_WAITS = "waits: the trial at the first training call decides"


class Levers:
    """Attaches the algorithms of a plan. Decides once about its speed levers, and then attaches them.

    Levers that are not measured are attached at boost: those that the user has named, all of them with
    ``calibrate=False``, and those that cannot change any more once the model is wrapped. The other levers wait. The
    first training call measures them on the plain pair, or takes the choice of a checkpoint. If the first update comes
    without such a call, they are chosen by the kind of machine and model. The levers that are on are checked at the
    first training call, and once more on inputs of other shapes. For that they are detached for a moment.

    Attributes:
        asked: The plan, without the algorithms that change nothing for this pair.
        attached: All attachments, also of algorithms that are not levers.
        state: Of the levers.
        due: Whether the first training call has still to come.
        choice: The choice of the trial, or of a checkpoint. None before, and if nothing is measured.
        checks: Lever -> how far its step is from the plain one, in words.
        withdrawn: Algorithms that were taken out of the run -> the reason.
        final: The states of the attachments when a trainer said that the training had ended. None before.
    """

    def __init__(
        self,
        plan: Plan,
        target: Target,
        *,
        calibrate: Calibrate,
        verify: bool,
        wrapper: str | None,
        host: Host,
    ) -> None:
        self._target, self.due, self._unseen = target, False, False
        self._titles = " and ".join(map(_title, target.optimizers))  # a loop may change the rates in them
        self.choice: Choice | None = None
        self.checks: dict[str, str] = {}
        self.withdrawn: dict[str, str] = {}
        self.final: dict[str, dict[str, Any]] | None = None
        self._decisions: dict[str, tuple[bool, str]] = {}
        self._waste: WasteReport | None = None
        self._padded = 0.0
        self._host = host
        self._gate: Gate | None = None
        pair, levers = (target.model, *target.optimizers), frozenset(lever.name for lever in plan.levers)
        self.asked = plan.fit(*pair, but=levers)
        settings: dict[str, Any] = {"calibrate": calibrate, "wrapper": wrapper, "verify": verify}
        self._calibrated = functools.partial(Calibration.of, **settings, forward=host.forward)
        self._calibration = self._calibrated(self.asked)
        obstacle = None if self._calibration is None else self._calibration.obstacle(target)
        fixed = {} if self._calibration is None else self._calibration.fixed
        waits = levers - fixed.keys() if self._measures and obstacle is None else frozenset[str]()
        self.state: State = "waiting" if waits else "decided"
        self._look_at(levers - waits)
        if self._measures and (calibration := self._calibration) is not None:
            reasons = {name: f"not measured: {fixed.get(name, obstacle)}" for name in levers - waits}
            for lever in self.asked.levers:
                on = lever.name in calibration.prior - waits
                self._decisions[lever.name] = on, reasons.get(lever.name, _WAITS)
        plan = self.plan
        self.attached = plan.attach(target)
        self.attached.with_undo(self._note_removal).with_levers(
            self._saved,
            lambda levers: self.follow(Choice.saved({"levers": levers})),
            lambda state: check_against_o1(state, target.model, {*self.attached, *self.withdrawn}),
        )
        norms = sum(isinstance(module, AnyBatchNorm) for module in target.model.modules())
        if plan.level == "O1" and norms:
            self.attached.with_undo(watch_for_o1(target.optimizers, norms).remove)
        aside = wrapper is not None and self._calibration is None
        if aside or not verify:
            why = f"measured or checked: wrapped by {wrapper} before boost" if aside else "checked: verify=False"
            self.checks = {a.name: f"not {why}" for a in plan.algorithms if REGISTRY[a.name].lever}
        self.due = self._calibration is not None
        if self.due:
            self._gate = Gate(target.model, self._meet)

    def _look_at(self, names: frozenset[str]) -> None:
        """Drop the levers among ``names`` that would change nothing for this pair."""
        if not names:
            return
        target, before = self._target, {lever.name for lever in self.asked.levers}
        others = frozenset(a.name for a in (*self.asked.algorithms, *self.asked.levers)) - names
        self.asked = self.asked.fit(target.model, *target.optimizers, but=others)
        for name in before - {lever.name for lever in self.asked.levers}:
            self._decisions.pop(name, None)
        self._refresh()

    @property
    def plan(self) -> Plan:
        """The algorithms that run, and those that were dropped, with the reasons."""
        decisions = {name: decision for name, decision in self._decisions.items() if name not in self.withdrawn}
        return self.asked.without(self.withdrawn).chosen(decisions)

    def explanation(self) -> Explanation:
        """Return the requests, the decisions, and the results of the checks."""
        plan = self.plan.explanation(self._titles)
        gone = _ENDED if self.final is not None else "removed; before, this was so:"
        removed = (gone,) if self.state == "removed" else ()
        measured = self.choice.measured if self.choice is not None else ""
        measured = "; ".join(text for text in (measured, self._untimed) if measured and text)
        if self.choice is None and self._unseen:
            measured = f"not {'measured' if self._measures else 'checked'}: {UNSEEN}"
        elif self._calibration is not None and not self._measures:
            measured = "nothing is measured: calibrate=False"
        shared = self._shared_reason
        rows = tuple(self._told(row, shared) for row in plan.rows)
        waits = _WAITS if any(row.state == "waits" for row in rows) else ""
        longer = "" if self.choice is None else self.choice.longer(self._host.call, but=self.withdrawn)
        return replace(
            plan,
            heading=(*removed, *plan.heading, *filter(None, (measured, shared))),
            rows=rows,
            notes=(*filter(None, (waits, longer)), *plan.notes, *self._advice, *self._stays()),
            ask=self._ask(),
        )

    @property
    def _shared_reason(self) -> str:
        """Why several levers were not measured, if it is the same reason, which is said once. Empty otherwise."""
        if self.choice is None or self.choice.source != "prior":
            return ""
        counts = Counter(verdict.reason for verdict in self.choice.verdicts if not verdict.before)
        return next((reason for reason, count in counts.most_common(1) if count > 1), "")

    def _told(self, row: Row, shared: str) -> Row:
        """Return a row of the plan with the details of this run, but for a reason that it shares with others."""
        if row.name in self._waiting and row.name not in self.withdrawn:
            lever = next(lever for lever in self.asked.levers if lever.name == row.name)
            pair = self._target.model, [hookable(one) for one in self._target.optimizers]
            reason = why_idle(lever, *pair)  # for this pair as it is now. The first call asks again
            if isinstance(reason, AlreadyOn):
                return row._replace(state="was on before", did=str(reason))
            if reason is not None:
                return row._replace(state="off", did=f"does not apply: {reason}")
            return row._replace(state="waits", did=REGISTRY[row.name].summary)
        verdicts = () if self.choice is None or row.name in self.withdrawn else self.choice.verdicts
        verdict = next((verdict for verdict in verdicts if verdict.lever == row.name), None)
        if verdict is not None:
            found = "not measured" if verdict.reason == shared else verdict.found
            did = found if verdict.pairs or not verdict.kept else f"{row.did}; {found}"
            row = row._replace(did=did, state="was on before" if verdict.before else row.state)
        if row.state != "on":
            return row
        course = self.attached[row.name].course if row.name in self.attached else ""
        remark = f"not in effect: {text}" if (text := self.remarks.get(row.name)) else ""
        notes = filter(None, (row.did, self._done.get(row.name), course, remark))
        state = "idle" if remark else row.state
        return row._replace(state=state, did="; ".join(notes), exact=self.checks.get(row.name, row.exact))

    def _ask(self) -> str:
        """Return the line that the user would type next. Empty if there is none."""
        if self.state == "removed":
            return ""
        if self.due:
            return "train; print(boosted.explain()) after the first step says what was found"
        if self.asked.total_steps is None and self.asked.levers:
            call = f'torchboost.boost(model, optimizer, "{self.asked.level}", total_steps=...)'
            return f"{call}, with the number of updates: some switches only pay in a long run"
        if not len(self.attached):
            short = self.choice is not None and self.choice.longer()
            return f"{WASTE} shows what a step spends its time on" if self.asked.levers and not short else ""
        if self.choice is None or self.choice.source != "trial":
            return "train; save boosted.state_dict() in your checkpoints"
        return 'boosted.plan.save("boost.json"); boost(..., config="boost.json") then repeats this without measuring'

    @property
    def _done(self) -> dict[str, str]:
        """Algorithm -> how much it has changed in the model, for those that can count it."""
        return {a.name: done for a in self.plan.algorithms if (done := REGISTRY[a.name].done(self._target.model))}

    @property
    def _advice(self) -> list[str]:
        """A line for each algorithm that has changed the model, if the user should do something about it."""
        return [f"{name}: {advice}" for name in self._done if (advice := REGISTRY[name].advice)]

    @property
    def _untimed(self) -> str:
        """The algorithms that are on in addition to switches, which every timed step had. Empty if there are none."""
        done, on = self._done, [a.name for a in self.plan.algorithms if not REGISTRY[a.name].lever]
        named = ", ".join(f"{name} ({done[name]})" if name in done else name for name in on)
        return f"also on, not timed: {named}" if named else ""

    @property
    def remarks(self) -> dict[str, str]:
        """Attached algorithm -> why it is not in effect, for those that are not."""
        remarks = {name: self.attached[name].remark for name in self.attached}
        length = self.asked.total_steps
        for name in remarks:
            if length is not None and self.attached[name].idle_until >= length:
                remarks[name] += f", and this run ends before, after {length:,} updates"
        return {name: remark for name, remark in remarks.items() if remark}

    @property
    def _in_effect(self) -> list[str]:
        return [name for name in self.attached if name not in self.remarks]

    def _stays(self) -> list[str]:
        """Return a line for each kind of waste above 10 % of a step that remains."""
        if self.state == "removed":
            return []
        on = self._in_effect
        if self._waste is not None:
            return [f"waste: {waste}" for waste in self._waste.without(on).notable]
        if self._padded <= NOTABLE or Unpad.name in on:
            return []
        return [f"waste: padding: {percent(self._padded)} of the positions of the first batch, and {Unpad.name} is off"]

    def waste(self, call: Call) -> WasteReport:
        """Measure the waste of a step on a training call. See :meth:`torchboost.Boosted.waste`."""
        target = self._target
        if not is_training_call(target.model, call):
            raise IncompatibleError(
                "found another call than one of a training; call it in training mode, with gradients, outside of "
                "compilers, transforms and modes, with the inputs of a training step."
            )
        alone, on = Topology.current().world_size == 1, self._in_effect
        reason = obstacle_to_passes(target) if alone else "other ranks would wait; measure it on one process"
        if reason is not None:
            raise IncompatibleError(f"the waste is not measured: {reason}.")
        partial = [a for a in self.attached.algorithms if isinstance(self.attached[a.name], PartialForward)]
        unseen = self._gate.open() if self._gate is not None else nullcontext()
        with unseen, self._changed():
            self._put_on(partial)  # the passes run beneath them, and they know what the loop reads
            report = waste_of(target, call, forward=self._host.forward)
        self._waste = report
        return report.without(on)

    @property
    def _measures(self) -> bool:
        """Whether a trial decides about the levers, or a choice that one made."""
        return self._calibration is not None and self._calibration.calibrate is not False

    @property
    def _waiting(self) -> frozenset[str]:
        return frozenset(name for name, (_, reason) in self._decisions.items() if reason == _WAITS)

    def _meet(self, call: Call) -> bool:
        """Decide on a training call, before it runs. If this is interrupted, the next call decides."""
        calibration, target = self._calibration, self._target
        if calibration is None or self.state == "removed" or not is_training_call(target.model, call):
            return calibration is None or self.state == "removed"
        ranks = deciding_ranks(calibration, target)
        if ranks == [] and self.choice is None:
            return False
        self._look_at(self._waiting)
        if self._calibration is None:
            return True
        calibration = self._calibration
        if not self._measures:
            calibration = replace(calibration, prior=frozenset(self.attached))
        elif ranks is not None and not calibration.sharded:
            calibration = calibration.with_formats_as(self.attached)
        with self._changed() as (kept, detach):
            choice, kept[:] = decide(target, calibration, call, self.choice, detach)
        self._settle(choice, call)
        return True

    @contextmanager
    def _changed(self) -> Iterator[tuple[list[Algorithm], Callable[[], None]]]:
        """Yield the levers that are on and may change, as a list, and a function that detaches them.

        At the end the levers in the list are attached, or if the block raises, those that were attached before.
        """
        model, calibration = self._target.model, self._calibration
        names = {lever.name for lever in (*calibration.levers, *calibration.asked)} if calibration is not None else {}
        on = [algorithm for algorithm in self.attached.algorithms if algorithm.name in names]
        unchecked = [a for a in self.attached.algorithms if REGISTRY[a.name].lever and a.name not in names]
        kept, memory = list(on), [(parameter, parameter.data) for parameter in model.parameters()]
        try:
            yield kept, functools.partial(self._put_on, unchecked)
        except BaseException:
            kept[:] = on
            raise
        finally:
            with uninterrupted(), streams_kept(accelerators(model.parameters())):
                self._put_on([*kept, *unchecked])
                _back_into(memory)

    def _put_on(self, levers: Sequence[Algorithm]) -> None:
        """Attach these levers and no others."""
        names = {lever.name for lever in levers}
        for name in [name for name in self.attached if REGISTRY[name].lever and name not in names]:
            self.attached.detach(name)
        missing = [lever for lever in levers if lever.name not in self.attached]
        if missing:
            with torch.inference_mode(False):
                self.attached.adopt(attach_all(self._target, missing))

    def _settle(self, choice: Choice, call: Call) -> None:
        self.due, self._unseen, self._gate = False, False, None
        self.state = "decided"
        calibration, target = self._calibration, self._target
        self._padded = padded_share(target, call)
        alone = Topology.current().world_size == 1  # other ranks may have inputs of the same shapes, and would not come
        if alone and calibration is not None and calibration.verify and choice.kept:
            self._shapes = shapes_of(call)
            self._gate = Gate(target.model, self._meet_other_shapes)
        if calibration is not None:
            self._note_checks(choice.verdicts, calibration.asked)
        choice = choice.only(self.asked.levers)
        if not self._measures or calibration is None:
            off = [verdict for verdict in choice.verdicts if not verdict.kept]
            self._decisions |= {v.lever: (False, AlreadyOn(v.reason) if v.before else v.reason) for v in off}
            return
        self.choice = choice
        self._decisions |= {v.lever: (v.kept, v.reason) for v in choice.verdicts}
        self.asked = replace(self.asked, levers=calibration.in_form(choice, device_of(target.model)).levers)
        failed = choice.source == "prior" and choice.budget > 0
        nothing = failed or (choice.source == "trial" and not choice.gains)
        said = f"{self.asked.level}: {choice.summary(self._untimed)}"
        announced = nothing or (choice.source == "trial" and choice.budget >= WORTH_A_WORD)
        details = said if nothing else str(self.explanation().sheet)
        tell(said if announced else "", details, warns=nothing)

    def _meet_other_shapes(self, call: Call) -> bool:
        """Check the levers that are on once more, on the first inputs of other shapes."""
        calibration = self._calibration
        if calibration is None or shapes_of(call) == self._shapes or not is_training_call(self._target.model, call):
            return calibration is None
        with self._changed() as (kept, detach):
            calibration = replace(calibration, calibrate=False, levers=(), asked=tuple(kept))
            nothing = Choice(verdicts=(), source="prior")
            choice, kept[:] = decide(self._target, calibration, call, nothing, detach)
        self._note_checks(choice.verdicts, calibration.asked)
        return True

    def _note_checks(self, verdicts: Iterable[Verdict], asked: Iterable[Algorithm]) -> None:
        """Keep the results of the checks, and withdraw levers that were asked for and must go."""
        names = {lever.name for lever in asked}
        for verdict in verdicts:
            if verdict.kept:
                self.checks[verdict.lever] = verdict.check
            elif verdict.lever in names:
                self.withdraw(verdict.lever, verdict.reason)
                text = "It is off from now on, and the training continues without it."
                warn_no_effect(f"{verdict.lever}: {verdict.reason}. {text}")

    def note_update(self) -> None:
        """Note an update. Without a training call before it, which may never come, the prior decides."""
        if not self.due or self._unseen or self.choice is not None:
            return
        self._unseen = True
        self._look_at(self._waiting)
        if self.state == "waiting" and (calibration := self._calibration) is not None:
            self.state, why = "decided", f"not measured: {UNSEEN}"
            self._decisions |= {lever.name: (lever.name in calibration.prior, why) for lever in calibration.levers}
            self._put_on([a for a in self.plan.algorithms if REGISTRY[a.name].lever])

    def _saved(self) -> dict[str, bool | str]:
        """Return the levers that a resumed run must have. Empty if the first training call has still to decide."""
        if self.state != "decided":
            return {}
        forms = self.choice.levers if self.choice is not None else {}
        levers = self.asked.without(self.withdrawn).levers
        return {lever.name: lever.name in self.attached and (forms.get(lever.name) or True) for lever in levers}

    def follow(self, choice: Choice | None) -> None:
        """Compute as a checkpoint did, without a trial: bfloat16 may be found faster or slower here."""
        measures = self._measures
        if choice is None or self.state == "removed" or (measures and not self.due):
            return
        if measures:
            self._look_at(self._waiting)
            if (calibration := self._calibration) is None:
                return
            kept = [lever for lever in calibration.levers if lever.name in choice.kept]
            if any(REGISTRY[lever.name].once for lever in kept):  # earlier versions kept the others next to it
                off: dict[str, Any] = {"kept": False, "reason": COMPILED, "ratio": None}
                choice = choice.changed({lever.name: off for lever in kept if lever.traits.eager})
            self.state, self.choice = "decided", choice.only(calibration.levers)
            device = device_of(self._target.model)
            self.asked = replace(self.asked, levers=calibration.in_form(choice, device).levers)
            levers = [a for a in self.asked.levers if a.name not in calibration.fixed]
            if text := choice.measured_elsewhere(device):
                _LOG.warning("%s: %s", self.asked.level, text)
        else:
            levers = [a for a in self.asked.levers if not (changes_model(a) or REGISTRY[a.name].once)]
        written = {verdict.lever: verdict.kept for verdict in choice.verdicts}
        levers = [lever for lever in levers if lever.name in written and lever.name not in self.withdrawn]
        changes = [lever for lever in levers if written[lever.name] is not (lever.name in self.attached)]
        reason = "the checkpoint was trained without it"
        self._decisions |= {lever.name: (written[lever.name], reason) for lever in (levers if measures else changes)}
        for lever in changes:
            on_or_off = "on" if written[lever.name] else "off"
            _LOG.info("%s: %s is %s, as in the checkpoint.", self.asked.level, lever.name, on_or_off)
        self._put_on([a for a in self.plan.algorithms if REGISTRY[a.name].lever])

    def withdraw(self, name: str, reason: str) -> None:
        """Take one algorithm out of the run. See :meth:`torchboost.Boosted.withdraw`."""
        plan = self.asked.without(self.withdrawn)
        if name not in {one.name for one in (*plan.algorithms, *plan.levers)}:
            return
        self.withdrawn[name] = reason
        self.attached.detach(name)
        self._refresh()

    def end(self) -> None:
        """Remove everything that was attached, because the training has ended. Trainers may save it even later."""
        if self.state != "removed":
            self.final = self.attached.state_dict()
        self.attached.remove()

    def _refresh(self) -> None:
        """Decide nothing about levers that are gone. If none remains, stop waiting."""
        if self._calibration is not None:
            self._calibration = self._calibrated(self.asked.without(self.withdrawn))
        if self._calibration is None:
            self._stop()
        if self.state == "waiting" and not self._measures:
            self.state = "decided"

    def _stop(self) -> None:
        self.due = False
        if self._gate is not None:
            self._gate.remove()
            self._gate = None

    def _note_removal(self) -> None:
        if self.state == "waiting":
            self._decisions |= dict.fromkeys(self._waiting, (False, "removed before the first training call"))
        self._stop()
        self.state = "removed"


def _title(optimizer: Optimizer) -> str:
    inner = hookable(optimizer)
    while isinstance(inner, WrappingOptimizer):
        inner = inner.opt
    return inner.title if isinstance(inner, UpdateRule) else type(inner).__name__


def _back_into(memory: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Let parameters have the memory that they had, if it has their strides: the loop may hold other views of it."""
    for parameter, before in memory:
        same = (parameter.shape, parameter.stride(), parameter.dtype) == (before.shape, before.stride(), before.dtype)
        if same and parameter.data_ptr() != before.data_ptr():
            parameter.data = before.copy_(parameter.detach())
