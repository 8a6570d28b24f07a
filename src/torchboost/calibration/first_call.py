"""What happens at the first training call: the levers are chosen and checked on its inputs, then the call runs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchboost.calibration.cache import ChoiceCache, key_of
from torchboost.calibration.calibration import Calibration, Decision, device_of, exchange_in
from torchboost.calibration.choice import Choice, Machine
from torchboost.calibration.next_call import Gate, entries_in
from torchboost.calibration.passes import Call, Passes, reshard
from torchboost.calibration.snapshot import Snapshot, plain, streams_kept
from torchboost.calibration.trial import Pair, Reduce, free_bytes, needed_bytes
from torchboost.core.algorithm import Algorithm, AttachedAlgorithms, Target, attach_all
from torchboost.core.containers import tensors_in
from torchboost.core.torch_private import (
    active_ddp,
    keep_step_pre_hook_places,
    overrides_dispatch,
    step_pre_hook_keys,
)
from torchboost.core.wrapping import unwrap
from torchboost.distributed.agreement import Agreement
from torchboost.distributed.shared import ranks_of_shards

__all__ = ["FirstCall", "OtherShapes", "attach_levers", "check_again"]

_LOG = logging.getLogger("torchboost")

_MOST_OF_FREE = 0.5
"""If a snapshot and the gradients need more of the free memory, nothing is measured or checked."""
_READ_ONCE = "the inputs or the model hold an iterator, which can be read only once"
_WITHOUT_DDP = "several ranks decide together only under DDP or FSDP2"
_ELSEWHERE = "another rank has a reason not to, which its explain() gives"
_RANKS_TIMEOUT = 600.0
"""Seconds that a rank waits for another one; a rank may compile for minutes."""


class FirstCall(Gate):
    """Waits in front of a model for the first training call, decides about the levers, and lets the call run.

    Calls in eval mode, without gradients, inside a compiler, a tracer, a checkpoint, a mode or a transform of
    ``torch.func``, or with tensors other than plain ones pass.

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
        super().__init__(target.model)
        self._target, self._attached = target, attached
        self._calibration, self._decided = calibration, decided
        self.given: Choice | None = None
        self._before, self._again, self.key = before, again is not None, again

    def is_meant(self, call: Call) -> bool:
        """Whether this call decides. Of several ranks only all of them can, in the same call of DDP."""
        if self.given is None and _on_ranks(self._calibration, self._target)[1] == []:
            return False
        return super().is_meant(call)

    def meet(self, call: Call) -> None:
        """Choose, and attach what was chosen. If this is interrupted, the next training call decides."""
        calibration, ranks = _on_ranks(self._calibration, self._target)
        if calibration.calibrate is False:
            calibration = replace(calibration, prior=frozenset(self._attached))
        if ranks is None and self.key is None and calibration.calibrate is not False:
            self.key = _key(calibration, self._target, call)
        choice = self.given
        if choice is None and self.key and not self._again:
            choice = ChoiceCache().load(self.key)
        try:
            with _ranks_agree(calibration, ranks, self._target, choice) as agreed:
                decision = _on_the_plain_pair(self._target, self._attached, agreed, call, self._before)
        except BaseException:
            self.key = self.key if self._again else None
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


class OtherShapes(Gate):
    """Waits for the first training call with inputs of other shapes.

    Args:
        model: The bare model.
        call: The call whose shapes are known.
        seen: Called once with the other call, before it runs.
    """

    def __init__(self, model: nn.Module, call: Call, seen: Callable[[Call], None]) -> None:
        super().__init__(model)
        self._shapes, self._seen = _shapes(call), weakref.WeakMethod(seen)

    def is_meant(self, call: Call) -> bool:
        """Whether this is the call that the gate waits for."""
        return _shapes(call) != self._shapes and super().is_meant(call)

    def meet(self, call: Call) -> None:
        """Report it."""
        seen = self._seen()
        if seen is not None:
            seen(call)


def check_again(
    target: Target, attached: AttachedAlgorithms, calibration: Calibration, call: Call, choice: Choice | None = None
) -> Decision:
    """Check the levers that are on, in the forms of a choice, with another call, and detach those that must go."""
    calibration, ranks = _on_ranks(calibration.in_form(choice, device_of(target.model)), target)
    levers = [lever for lever in (*calibration.levers, *calibration.asked) if lever.name in attached]
    calibration = replace(calibration, calibrate=False, levers=(), asked=tuple(levers))
    with _ranks_agree(calibration, ranks, target, Choice(verdicts=(), source="prior")) as agreed:
        return _on_the_plain_pair(target, attached, agreed, call)


@dataclass(frozen=True)
class _Agreed:
    """What the ranks decide together.

    Args:
        calibration: About what.
        choice: What is chosen without a trial; None if there is one.
        obstacle: Why there can be no passes; None if there can.
        reduce: How ranks compare numbers; None if each decides for itself.
    """

    calibration: Calibration
    choice: Choice | None
    obstacle: str | None
    reduce: Reduce | None = None


def _on_the_plain_pair(
    target: Target, attached: AttachedAlgorithms, agreed: _Agreed, call: Call, before: Pair | None = None
) -> Decision:
    """Measure if there is no choice, check it, and attach what stays. If this fails, attach what was there."""
    calibration, choice = agreed.calibration, agreed.choice
    levers = [*calibration.levers, *calibration.asked]
    on = [lever for lever in levers if lever.name in attached]
    if choice is None and agreed.obstacle is None:
        reshard(target.model)  # after an evaluation its parameters may still be whole
    places, memory = _places(target), [(p, p.data) for p in target.model.parameters()]
    kept = on
    try:
        for lever in on:
            if choice is None or calibration.verify or lever.name not in choice.kept:
                attached.detach(lever.name)
        decision, calibration = _decided(target, agreed, call, before)
        levers = [*calibration.levers, *calibration.asked]
        names = {*decision.choice.kept, *(lever.name for lever in calibration.asked)} - set(decision.refused)
        kept = [lever for lever in levers if lever.name in names]
        return decision
    finally:
        with streams_kept(target.model):
            attach_levers(target, attached, [lever for lever in kept if lever.name not in attached], places)
        _back_into(memory)


def _back_into(memory: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Let parameters have the memory that they had, if it has their strides: the loop may hold other views of it."""
    for parameter, before in memory:
        same = (parameter.shape, parameter.stride(), parameter.dtype) == (before.shape, before.stride(), before.dtype)
        if same and parameter.data_ptr() != before.data_ptr():
            parameter.data = before.copy_(parameter.detach())


def _decided(target: Target, agreed: _Agreed, call: Call, before: Pair | None) -> tuple[Decision, Calibration]:
    """Return the decision, and the levers with what a pass has shown of them."""
    calibration, choice, obstacle, reduce = agreed.calibration, agreed.choice, agreed.obstacle, agreed.reduce
    device = device_of(target.model)
    if choice is not None:
        calibration = calibration.in_form(choice, device)
        if not calibration.verify:
            return calibration.unchecked(choice), calibration
    if obstacle is not None:
        choice = calibration.without_trial(obstacle) if choice is None else choice
        return calibration.unchecked(choice, obstacle), calibration
    with _on_real_inputs(calibration, target, call) as (passes, snapshot):
        found = [float(snapshot.has_iterator)]
        if (found if reduce is None else reduce(found))[0]:
            choice = calibration.without_trial(_READ_ONCE) if choice is None else choice
            return calibration.unchecked(choice, _READ_ONCE), calibration
        calibration = calibration.fitted(passes)
        if choice is None:
            choice = calibration.measure(target, passes, reduce, before=before)
            calibration = calibration.in_form(choice, device)
        return calibration.check(choice, target, passes, snapshot, reduce), calibration


def _shapes(call: Call) -> list[tuple[torch.Size | int, torch.dtype]]:
    return [(t.shape if not t.is_nested else t.numel(), t.dtype) for t in tensors_in(list(call))]


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


def _on_ranks(calibration: Calibration, target: Target) -> tuple[Calibration, list[int] | None]:
    """Return what may be decided, and the ranks that must decide the same; None for a single process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return calibration, None
    if calibration.sharded:
        held = [p for optimizer in target.optimizers for group in optimizer.param_groups for p in group["params"]]
        return calibration, ranks_of_shards(held)  # those of the model may be whole
    ddp = active_ddp()
    if ddp is None or unwrap(ddp) is not target.model:
        return calibration, []
    reason = "DistributedDataParallel has laid out its buckets for the kernels as they are"
    fixed = {a.name: reason for a in calibration.levers if type(a).transform is not Algorithm.transform}
    return replace(calibration, fixed={**calibration.fixed, **fixed}), dist.get_process_group_ranks(ddp.process_group)


@contextmanager
def _ranks_agree(
    calibration: Calibration, ranks: list[int] | None, target: Target, choice: Choice | None
) -> Iterator[_Agreed]:
    """Yield what the ranks decide together, from the choice of this one."""
    no_trial = calibration.obstacle(target.model)
    no_pass = _WITHOUT_DDP if ranks == [] else _obstacle(target)
    if not ranks:
        choice = calibration.without_trial(no_trial) if choice is None and no_trial is not None else choice
        yield _Agreed(calibration, choice, no_pass)
        return
    agreement = Agreement(ranks, subject="the trial of the speed levers", timeout=_RANKS_TIMEOUT)
    try:
        flags = [float(flag) for flag in (choice is None, no_trial is not None, no_pass is not None)]
        missing, no_trials, no_passes, *settings = agreement.largest([*flags, *calibration.settings], step="settings")
        calibration = calibration.agreed(settings)
        if missing:
            reason = calibration.obstacle(target.model) or (_ELSEWHERE if no_trials else None)
            choice = None if reason is None else calibration.without_trial(reason)
        no_pass = no_pass or (_ELSEWHERE if no_passes else None)
        yield _Agreed(calibration, choice, no_pass, lambda numbers: agreement.largest(numbers, step="sample"))
    finally:
        agreement.close()


def _obstacle(target: Target) -> str | None:
    """Return why there can be no passes: too little memory for them, or something that other processes take part in."""
    if exchange_in(target.model) is not None:
        return exchange_in(target.model)
    if any(p.device.type == "cpu" and p.is_shared() for p in target.model.parameters() if not overrides_dispatch(p)):
        return "the parameters are in shared memory, and other processes may train them meanwhile"
    available, needed = free_bytes(device_of(target.model)), needed_bytes(target.model)
    if available is None or needed <= _MOST_OF_FREE * available:
        return None
    return (
        f"a snapshot and the gradients need about {needed / 2**20:,.0f} MiB, and {available / 2**20:,.0f} MiB are free"
    )


@contextmanager
def _on_real_inputs(calibration: Calibration, target: Target, call: Call) -> Iterator[tuple[Passes, Snapshot]]:
    """Yield passes of the plain model on a call, and the snapshot from which everything is restored at the end."""
    model = target.model
    held = {id(p) for p in model.parameters()}
    groups = [group for optimizer in target.optimizers for group in optimizer.param_groups]
    outside = [p for group in groups for p in group["params"] if id(p) not in held]
    kept = [v for optimizer in target.optimizers for v in vars(optimizer).values() if isinstance(v, nn.Module)]
    device = device_of(model)
    free = free_bytes(device) if device.type != "cpu" else None
    with streams_kept(model), plain(model):
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        snapshot = Snapshot(model, (call, kept), outside, elsewhere=free is not None and 4 * size > free)
        passes = Passes(model, call, snapshot, others=outside, forward=calibration.forward)
        try:
            yield passes, snapshot
        finally:
            if passes.unequal:
                _LOG.warning(
                    "Something that the model uses moves on in each call and could not be restored after those of the "
                    "trial, such as an iterator or a file: two equal calls differed by %.1e of an output. If the run "
                    "must repeat another one, use boost(..., calibrate=False, verify=False).",
                    passes.unequal,
                )
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
        machine=Machine.of(device_of(target.model)),
        conditions={"total_steps": calibration.total_steps, "calibrate": calibration.calibrate},
        others=target.others,
    )
