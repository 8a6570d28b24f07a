"""Gradient freezing: train only the later blocks of a network on a schedule, and skip the backward pass of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.grad_freeze import schedule as freeze_schedule
from torchboost.algorithms.grad_freeze.cache import FastPrefix, check_cacheable
from torchboost.algorithms.grad_freeze.checks import check_freezable
from torchboost.algorithms.grad_freeze.freezer import Freezing, Norms, compiled_prefixes, prefixes_of
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.errors import warn_no_effect
from torchboost.graph.blocks import blocks_of, group_starts
from torchboost.optim.fusing import care_for_fused

Pattern = Literal["continuous", "interval", "progressive", "fixed"]
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "pattern": get_args(Pattern),
    "norms": get_args(Norms),
    "cache_by": ("name", "content"),
    "cache_dtype": ("bfloat16", None),
}
_LEAST = {
    "groups": (1, "an integer of 1 or more"),
    "total_steps": (1, "an integer of 1 or more"),
    "prefixes": (2, "2 or more (full training and one other), or None"),
    "agree_within": (0, "seconds, or 0 to disable the comparison"),
    "cache_mebibytes": (0, "0 or more"),
}


@dataclass(frozen=True, kw_only=True)
class GradFreeze(Algorithm):
    """Train only the blocks from the k-th group on, with k changing from update to update.

    ``full_share``, MindSpore's ``freeze_p``, is the share of updates that train everything. Patterns:

    - ``"progressive"`` (type 2), the default: full training first, then groups are frozen permanently from the input
      on, by FreezeOut's cubic schedule, at the few steps that save most.
    - ``"continuous"`` (type 0): full training, then 1, 2, ... groups frozen, repeated.
    - ``"interval"`` (type 1): a random number of groups at random updates. Small numbers are the most likely.
    - ``"fixed"``: the first ``frozen`` groups for the whole run, for fine-tuning.

    If a backward pass costs two forward passes, freezing blocks that take the share f of a step saves at most 2 f / 3
    of it.

    Args:
        groups: Number of groups of blocks, at most one per block.
        pattern: See above.
        full_share: Share of updates that train everything, 0 or more and below 1.
        total_steps: Number of updates of the whole run. Only the pattern ``"fixed"`` needs none.
        norms: Whether BatchNorms of frozen blocks keep updating their statistics (``"update"``, as in MindSpore) or run
            in eval mode (``"eval"``).
        prefixes: Maximum number of different numbers of frozen groups, full training included. Each is one graph of a
            compiled model. The default is 3 for a compiled model, 7 for the progressive pattern, otherwise unlimited.
        frozen: Number of frozen groups, for the fixed pattern.
        cache_mebibytes: Memory for caching the output of the frozen part per sample, which is then computed once. 0
            disables the cache. It needs ``norms="eval"`` and a model that is not compiled. See
            :class:`torchboost.algorithms.grad_freeze.cache.FastPrefix`.
        cache_by: Whether the loop names its samples (``"name"``), ``with attached["grad_freeze"].fast.samples(ids):
            ...``, which is correct only if a sample is the same tensor in every epoch. Or samples are known by a hash
            of their content (``"content"``), and the loop does not change.
        cache_dtype: ``"bfloat16"`` rounds the output of the frozen part to half the memory. None keeps it exact.
        agree_within: Seconds that the ranks of one model wait for each other before a pass. If a rank does not arrive,
            all others raise :class:`torchboost.errors.RankDisagreementError`. Increase it if one rank evaluates or
            saves alone for longer. 0 disables the comparison.
    """

    name: ClassVar[str] = "grad_freeze"
    # After compilation, which it must detect. Its hook runs after all others that read gradients.
    traits: ClassVar[Traits] = Traits(order=95, withdrawn=1)

    groups: int = 10
    pattern: Pattern = "progressive"
    full_share: float = 0.7
    total_steps: int | None = None
    norms: Norms = "update"
    prefixes: int | None = None
    frozen: int = 0
    cache_mebibytes: int = 0
    cache_by: Literal["name", "content"] = "name"
    cache_dtype: Literal["bfloat16"] | None = None
    agree_within: float = 600.0

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}.")
        for name, (least, meaning) in _LEAST.items():
            number, optional = getattr(self, name), getattr(type(self), name) is None
            if number is None and optional:
                continue
            if number is None or number < least:
                raise ValueError(f"{name}={number}: pass {meaning}.")
        if not 0 <= self.full_share < 1:
            raise ValueError(
                f"full_share={self.full_share}: the share of updates that train everything must be 0 or more and below "
                "1; 1 never freezes, so leave the algorithm out instead."
            )
        if self.total_steps is not None and self.total_steps > freeze_schedule.MOST_STEPS:
            raise ValueError("total_steps: found more than 2**53; pass the number of updates of the run.")
        if not 0 <= self.frozen < self.groups:
            raise ValueError(f"frozen={self.frozen}: pass 0 or more and less than the number of groups, {self.groups}.")
        if self.frozen and self.pattern != "fixed":
            raise ValueError(f"frozen={self.frozen} with pattern={self.pattern!r}: only 'fixed' reads it.")
        if self.cache_mebibytes and self.norms != "eval":
            raise ValueError(
                "cache_mebibytes with norms='update': BatchNorms then change results in each epoch; use norms='eval'."
            )

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that a single block can never be frozen."""
        return "the model is a single block, which always trains" if len(blocks_of(model)) < 2 else None

    def graphs(self) -> int:
        """Return the number of prefixes: each set of flags is a graph of its own."""
        return 1 if self.pattern == "fixed" else min(self.groups, self.prefixes or compiled_prefixes())

    def check(self, target: Target) -> None:
        """Refuse wrappers and compilers that do not support freezing, and settings that do not fit the model."""
        _check_length(self)
        check_freezable(target.model, target.optimizer)
        if self.cache_mebibytes:
            check_cacheable(target.model)

    def attach(self, target: Target) -> Attachment:
        """Freeze the groups of the first update and follow the schedule from then on. See :func:`freeze_blocks`."""
        freezing = freeze_blocks(target.model, target.optimizer, self, seed=target.seed)
        return freezing.with_undo(care_for_fused(target.optimizer).remove)  # momentum that starts later

    def schedule(self, costs: Sequence[float], *, seed: int = 0, prefixes: int | None = None) -> Callable[[int], int]:
        """Return the number of frozen groups as a function of the update.

        Args:
            costs: Share of the computation per group.
            seed: Seed of the interval pattern, the same on all ranks.
            prefixes: Maximum number of different values, 0 included. None is unlimited.
        """
        if self.pattern == "fixed" or self.total_steps is None:
            return freeze_schedule.repeated([min(self.frozen, len(costs) - 1)])
        if self.pattern == "progressive":
            return freeze_schedule.progressive(costs, self.full_share, self.total_steps, switches=(prefixes or 7) - 1)
        if self.pattern == "continuous":
            schedule = freeze_schedule.continuous(len(costs), self.full_share)
        else:
            length = freeze_schedule.length_of(self.total_steps)
            schedule = freeze_schedule.interval(len(costs), self.full_share, length, seed)
        return schedule if prefixes is None else freeze_schedule.snapped(schedule, len(costs), prefixes)


def freeze_blocks(model: nn.Module, optimizer: Optimizer, settings: GradFreeze, *, seed: int = 0) -> Freezing:
    """Freeze the leading blocks of a network in your own loop, which does not change.

    Args:
        model: The model as the loop calls it, wrapped in DDP before or after this. Compile it before.
        optimizer: The optimizer of the model.
        settings: See :class:`GradFreeze`.
        seed: Seed of the interval pattern, the same on all ranks.

    Returns:
        The live effect: ``step``, ``index``, ``frozen``. Save ``state_dict()`` in the checkpoint. ``remove()`` trains
        everything again.

    Raises:
        IncompatibleError: The wrapper or the compiler of the model does not support changing ``requires_grad``.
        ValueError: ``total_steps`` is missing.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> settings = GradFreeze(groups=8, total_steps=1000)
        >>> freezing = freeze_blocks(model, optimizer, settings)
    """
    _check_length(settings)
    blocks = blocks_of(model)
    starts, asked = group_starts(len(blocks), settings.groups), settings.groups != GradFreeze.groups
    if len(starts) < min(2, settings.groups):
        warn_no_effect("grad_freeze: the model is a single block, so nothing is frozen.")
    elif len(starts) < settings.groups and asked and settings.pattern in ("continuous", "interval"):
        warn_no_effect(
            f"grad_freeze: found groups={settings.groups}, but the model has {len(blocks)} blocks; {len(starts)} "
            "groups are used."
        )
    check_freezable(model, optimizer)
    prefixes = prefixes_of(blocks, starts, settings.norms)
    fast = None
    if settings.cache_mebibytes:
        rounded, by_content = torch.bfloat16 if settings.cache_dtype else None, settings.cache_by == "content"
        fast = FastPrefix(model, settings.cache_mebibytes * 2**20, by_content=by_content, dtype=rounded)
    shared = replace(settings, cache_mebibytes=0, cache_by="name", cache_dtype=None)  # the cache may differ per rank
    alike = {"seed": seed, "checksum of the settings": crc32(repr(shared).encode())}
    shares = (1 / len(blocks),) * len(blocks)
    costs = [sum(shares[a:b]) for a, b in zip(starts, [*starts[1:], len(blocks)], strict=True)]
    few = None if settings.prefixes else settings.schedule(costs, seed=seed, prefixes=compiled_prefixes())
    return Freezing(
        model,
        optimizer,
        prefixes,
        settings.schedule(costs, seed=seed, prefixes=settings.prefixes),
        compiled=few,
        fast=fast,
        total_steps=None if settings.pattern == "fixed" else settings.total_steps,
        judged_at=None if settings.total_steps is None else -(-2 * settings.total_steps // 3),
        alike=alike,
        agree_within=settings.agree_within,
    )


def _check_length(settings: GradFreeze) -> None:
    if settings.total_steps is None and settings.pattern != "fixed":
        raise ValueError(
            f"total_steps: found none, and the pattern {settings.pattern!r} depends on the length of the run; pass the "
            "number of updates of the whole run."
        )
