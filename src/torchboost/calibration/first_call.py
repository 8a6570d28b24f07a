"""What happens at the first training call: the levers are chosen and checked on its inputs, on the plain pair."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from torchboost.calibration.calibration import Calibration, Decision, device_of, exchange_in
from torchboost.calibration.choice import Choice
from torchboost.calibration.passes import Call, Passes, reshard
from torchboost.calibration.snapshot import Snapshot, plain, streams_kept
from torchboost.calibration.trial import Pair, Reduce, free_bytes, needed_bytes
from torchboost.core.algorithm import Algorithm, Target
from torchboost.core.torch_private import active_ddp, overrides_dispatch
from torchboost.core.wrapping import unwrap
from torchboost.distributed.agreement import Agreement, ranks_of_shards

__all__ = ["decide", "deciding_ranks"]

_LOG = logging.getLogger("torchboost")

_MOST_OF_FREE = 0.5
"""If a snapshot and the gradients need more of the free memory, nothing is measured or checked."""
_READ_ONCE = "the inputs or the model hold an iterator, which can be read only once"
_WITHOUT_DDP = "several ranks decide together only under DDP or FSDP2"
_ELSEWHERE = "another rank has a reason not to, which its explain() gives"
_RANKS_TIMEOUT = 600.0
"""Seconds that a rank waits for another one; a rank may compile for minutes."""


def deciding_ranks(calibration: Calibration, target: Target) -> list[int] | None:
    """Return the ranks that must decide the same; None for a single process, empty if they cannot decide together."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if calibration.sharded:
        held = [p for optimizer in target.optimizers for group in optimizer.param_groups for p in group["params"]]
        return ranks_of_shards(held)  # those of the model may be whole
    ddp = active_ddp()
    if ddp is None or unwrap(ddp) is not target.model:
        return []
    return dist.get_process_group_ranks(ddp.process_group)


def decide(
    target: Target,
    calibration: Calibration,
    call: Call,
    choice: Choice | None,
    detach: Callable[[], None],
    *,
    before: Pair | None = None,
) -> tuple[Decision, Sequence[Algorithm]]:
    """Measure the levers if there is no choice, and check what is chosen. The pair stays as it is.

    Args:
        target: The pair.
        calibration: What to decide and at what price.
        call: A training call.
        choice: An earlier choice, which is used instead of a trial; None without one.
        detach: Detaches the levers that are on. Called unless there is a choice that is not checked.
        before: The outline from before boost, if the level has changed the model.

    Returns:
        The decision, and the levers in the chosen form, with what a pass has shown of them.
    """
    with _ranks_agree(calibration, deciding_ranks(calibration, target), target, choice) as agreed:
        if agreed.choice is None or agreed.calibration.verify:
            if agreed.obstacle is None:
                reshard(target.model)  # after an evaluation its parameters may still be whole
            detach()
        decision, calibration = _decided(target, agreed, call, before)
    return decision, [*calibration.levers, *calibration.asked]


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
        iterators = [float(snapshot.has_iterator)]
        if (iterators if reduce is None else reduce(iterators))[0]:
            choice = calibration.without_trial(_READ_ONCE) if choice is None else choice
            return calibration.unchecked(choice, _READ_ONCE), calibration
        calibration = calibration.fitted(passes)
        if choice is None:
            choice = calibration.measure(target, passes, reduce, before=before)
            calibration = calibration.in_form(choice, device)
        return calibration.check(choice, target, passes, snapshot, reduce), calibration


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
    inside = {id(p) for p in model.parameters()}
    groups = [group for optimizer in target.optimizers for group in optimizer.param_groups]
    outside = [p for group in groups for p in group["params"] if id(p) not in inside]
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
