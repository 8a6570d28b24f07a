"""Gradient freezing: train only the later blocks of a network on a schedule, and skip the backward pass of the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args
from zlib import crc32

from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.freezing import schedule as freeze_schedule
from torchboost.algorithms.freezing.freezer import (
    Freezing,
    Norms,
    check_freezable,
    compiled_prefixes,
    prefixes_of,
)
from torchboost.algorithms.freezing.prefix.activation_cache import ActivationCache
from torchboost.algorithms.freezing.prefix.frozen_prefix import FastPrefix, fast_prefix
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.wrapping import is_compiled, wrapper_of
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.graph.blocks import Block, blocks_of, group_starts

__all__ = ["BlockFreeze", "Pattern", "freeze_blocks"]

Pattern = Literal["continuous", "interval", "progressive", "fixed"]


@dataclass(frozen=True, kw_only=True)
class BlockFreeze(Algorithm):
    """Train only the blocks from the k-th group on, with k changing from update to update.

    The reference's ``freeze_p`` is ``full_share`` here: the share of updates that train everything. Patterns:

    - ``"continuous"`` (type 0): a stretch of full training, then 1, 2, ... groups frozen, over and over.
    - ``"interval"`` (type 1): at random updates a random number of groups, small numbers likeliest.
    - ``"progressive"`` (type 2): full training first, then groups are frozen for good from the front, on FreezeOut's
      cubic schedule, at the few moments that save most.
    - ``"fixed"``: the first ``frozen`` groups from beginning to end, for fine-tuning.

    Where forward : backward is 1 : 2, freezing blocks worth the share f of a step saves at most 2 f / 3 of it.

    Args:
        groups: Number of groups the blocks are divided into; at most one per block.
        pattern: See above.
        full_share: Share of updates that train everything, 0 or more and below 1.
        total_steps: Updates of the whole run.
        norms: Whether BatchNorms of frozen blocks go on updating their statistics (``"update"``, as in the reference)
            or run in eval mode (``"eval"``).
        prefixes: Most different numbers of frozen groups, full training included; each is one graph of a compiled
            model. By default 3 for a compiled model, 7 for a progressive pattern, else no limit.
        costs: Share of the computation in each block, for the progressive pattern; equal by default. See
            :func:`torchboost.graph.blocks.block_costs`.
        step_seconds: Time of a full step, and
        recompile_seconds: of a compilation: the progressive pattern leaves out moments that do not repay one.
        frozen: Fixed: how many groups are frozen.
        cache_mebibytes: Budget for what the frozen part gives for each sample, which then is computed once; 0 keeps
            nothing. The loop names its samples: ``with attached["grad_freeze"].fast.samples(ids): ...``. Right only
            if a sample is the same tensor in every epoch. Needs ``norms="eval"`` and a model that is not compiled; see
            :func:`torchboost.algorithms.freezing.prefix.frozen_prefix.fast_prefix`.
        cache_path: Folder for a memory-mapped file that holds them; None holds them in memory.
        agree_within: On several ranks that train one model: seconds after which a rank that does not come to the next
            pass is a :class:`torchboost.errors.RankDisagreementError` on all others. Raise it where one rank evaluates
            or saves alone for longer; 0 compares nothing.
    """

    name: ClassVar[str] = "grad_freeze"
    # After compilation, which it must know about; its hook comes after all others that look at gradients.
    traits: ClassVar[Traits] = Traits(order=95)

    groups: int = 10
    pattern: Pattern = "interval"
    full_share: float = 0.7
    total_steps: int = 65536
    norms: Norms = "update"
    prefixes: int | None = None
    costs: tuple[float, ...] | None = None
    step_seconds: float = 0.0
    recompile_seconds: float = 0.0
    frozen: int = 0
    cache_mebibytes: int = 0
    cache_path: str | None = None
    agree_within: float = 600.0

    def __post_init__(self) -> None:
        if self.pattern not in get_args(Pattern):
            raise ValueError(f"pattern={self.pattern!r}: allowed are {', '.join(map(repr, get_args(Pattern)))}.")
        if self.norms not in ("update", "eval"):
            raise ValueError(f"norms={self.norms!r}: allowed are 'update' and 'eval'.")
        if not 0 <= self.full_share < 1:
            raise ValueError(
                f"full_share={self.full_share}: a share of updates that train everything, 0 or more and below 1; "
                "1 would never freeze: leave the algorithm out instead."
            )
        for name in ("groups", "total_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: an integer of 1 or more.")
        if self.total_steps > freeze_schedule.MOST_STEPS:
            raise ValueError("total_steps: found more than 2**53; give the number of updates of the run.")
        if self.prefixes is not None and self.prefixes < 2:
            raise ValueError(f"prefixes={self.prefixes}: 2 or more (full training and one other), or None.")
        if not 0 <= self.frozen < self.groups:
            raise ValueError(f"frozen={self.frozen}: 0 or more and below the number of groups, {self.groups}.")
        if self.agree_within < 0:
            raise ValueError(f"agree_within={self.agree_within}: seconds, or 0 to compare nothing.")
        if self.frozen and self.pattern != "fixed":
            raise ValueError(f"frozen={self.frozen} with pattern={self.pattern!r}: only 'fixed' reads it.")
        if self.cache_mebibytes < 0:
            raise ValueError(f"cache_mebibytes={self.cache_mebibytes}: 0 or more.")
        if self.cache_mebibytes and self.norms != "eval":
            raise ValueError(
                "cache_mebibytes with norms='update': BatchNorms that go on updating give a sample another result in "
                "each epoch; use norms='eval'."
            )
        if self.costs is not None:
            object.__setattr__(self, "costs", tuple(self.costs))
            if not all(cost >= 0 for cost in self.costs) or not sum(self.costs):
                raise ValueError(f"costs={self.costs}: one number of 0 or more for each block, not all 0.")

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Say so where there is one block only, which can never be frozen."""
        return "the model is a single block, which always trains" if len(blocks_of(model)) < 2 else None

    def check(self, target: Target) -> None:
        """Refuse wrappers and compilers that cannot follow, and settings that do not fit the model."""
        check_freezable(target.model, target.optimizer)
        if self.costs is not None:
            _check_costs(self.costs, blocks_of(target.model))
        wrapper = wrapper_of(target.model)
        if self.cache_mebibytes and wrapper is not None:
            raise IncompatibleError(
                f"grad_freeze: found a model wrapped by {wrapper}, whose forward the cache cannot cover; attach to "
                "the bare model and wrap it in DDP afterwards, or set cache_mebibytes=0."
            )

    def attach(self, target: Target) -> Attachment:
        """Freeze what the schedule says for the first update, and follow it from then on.

        Raises:
            IncompatibleError: The wrapper or the compiler of the model cannot follow.
            ValueError: ``costs`` are not one per block.
        """
        return freeze_blocks(target.model, target.optimizer, self, seed=target.seed)

    def schedule(self, costs: Sequence[float], *, seed: int = 0, prefixes: int | None = None) -> Callable[[int], int]:
        """Return the number of frozen groups as a function of the update.

        Args:
            costs: Share of the computation in each group.
            seed: Of the interval pattern; the same on all ranks.
            prefixes: Most different numbers, 0 included; None is no limit.
        """
        if self.pattern == "progressive":
            return freeze_schedule.progressive(
                costs,
                self.full_share,
                self.total_steps,
                switches=(prefixes or 7) - 1,
                step_seconds=self.step_seconds,
                recompile_seconds=self.recompile_seconds,
            )
        if self.pattern == "fixed":
            return freeze_schedule.Repeated((min(self.frozen, len(costs) - 1),))
        schedule: freeze_schedule.Schedule
        if self.pattern == "continuous":
            schedule = freeze_schedule.Continuous(len(costs), self.full_share)
        else:
            length = freeze_schedule.length_of(self.total_steps)
            schedule = freeze_schedule.Interval(len(costs), self.full_share, length, seed)
        return schedule if prefixes is None else freeze_schedule.Snapped(schedule, len(costs), prefixes)


def freeze_blocks(
    model: nn.Module, optimizer: Optimizer, settings: BlockFreeze | None = None, *, seed: int = 0
) -> Freezing:
    """Freeze leading blocks of a network in a loop of your own, which stays as it is.

    Args:
        model: What the loop calls, wrapped in DDP before or after this. Compile it before.
        optimizer: Over the parameters of the model.
        settings: See :class:`BlockFreeze`.
        seed: Of the random pattern; the same on all ranks.

    Returns:
        The live effect: ``step``, ``index``, ``frozen``; ``state_dict()`` belongs into the checkpoint, ``remove()``
        trains everything again.

    Raises:
        IncompatibleError: The wrapper or the compiler of the model cannot follow.
        ValueError: ``costs`` are not one per block.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(8)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> settings = BlockFreeze(pattern="progressive", groups=8, full_share=0.5, total_steps=1000)
        >>> freezing = freeze_blocks(model, optimizer, settings)
    """
    settings = settings if settings is not None else BlockFreeze()
    blocks = blocks_of(model)
    if settings.costs is not None:
        _check_costs(settings.costs, blocks)
    starts = group_starts(len(blocks), settings.groups)
    if len(starts) < min(2, settings.groups):
        warnings.warn(
            "grad_freeze: the model is a single block, nothing will be frozen.", NoEffectWarning, stacklevel=2
        )
    elif len(starts) < settings.groups and settings.pattern in ("continuous", "interval"):
        warnings.warn(
            f"grad_freeze: {settings.groups} groups were asked for, the model has {len(blocks)} blocks; there are "
            f"{len(starts)} groups.",
            NoEffectWarning,
            stacklevel=2,
        )
    check_freezable(model, optimizer)
    prefixes = prefixes_of(blocks, starts)
    fast = _cached_prefix(model, settings) if settings.cache_mebibytes else None
    alike = {"seed": seed, "checksum of the settings": _fingerprint(settings)}
    shares = settings.costs or (1 / len(blocks),) * len(blocks)
    costs = [sum(shares[a:b]) for a, b in zip(starts, [*starts[1:], len(blocks)], strict=True)]
    limit = settings.prefixes or (compiled_prefixes() if is_compiled(model) else None)
    return Freezing(
        model,
        optimizer,
        prefixes,
        settings.schedule(costs, seed=seed, prefixes=limit),
        norms=settings.norms,
        fast=fast,
        total_steps=None if settings.pattern == "fixed" else settings.total_steps,
        alike=alike,
        agree_within=settings.agree_within,
    )


def _fingerprint(settings: BlockFreeze) -> int:
    """A number that differs between ranks whose flags might; where and how much a rank caches is its own affair."""
    return crc32(repr(replace(settings, cache_mebibytes=0, cache_path=None)).encode())


def _check_costs(costs: Sequence[float], blocks: Sequence[Block]) -> None:
    if len(costs) != len(blocks):
        raise ValueError(
            f"costs: found {len(costs)}, the model has {len(blocks)} blocks "
            f"({', '.join(block.name for block in blocks)}); give one for each."
        )


def _cached_prefix(model: nn.Module, settings: BlockFreeze) -> FastPrefix:
    cache = ActivationCache(settings.cache_mebibytes * 2**20, path=settings.cache_path)
    fast = fast_prefix(model, cache=cache)
    fast.with_undo(cache.close)
    return fast
