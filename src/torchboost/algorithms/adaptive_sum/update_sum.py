"""AdaSum of the weight updates, for any optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from torchboost.algorithms.adaptive_sum.rule import adasum_, hierarchical_adasum_
from torchboost.distributed.agreement import bit_sum
from torchboost.distributed.topology import NodeGroups
from torchboost.errors import IncompatibleError, NoEffectWarning

__all__ = ["UpdateSum", "before_first_step", "held"]


class UpdateSum:
    """Saves the weights before each step and sets them to ``old - combined(old - new)`` after it.

    Parameters that FSDP2 shards are combined shard by shard, with dot products over whole parameters. Parameters that
    are frozen at a step are not sent.

    Args:
        optimizer: Gets a hook before and one after its ``step``.
        places: Parameter -> its position in the model; the same on all ranks.
        pack: Position -> number of its pack; one set of collectives per pack.
        groups: Mean inside, adaptive sum across.
        begin: Called after each step, before ``note``.
        note: Called with the positions in a pack and their cosines.

    Raises:
        IncompatibleError: At the first step, if the weights differ between the ranks; nothing was changed.

    Cost: one lasting copy of the weights, and two more of the pack being combined.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        places: Mapping[Tensor, int],
        pack: Callable[[int], int],
        groups: NodeGroups,
        begin: Callable[[], None],
        note: Callable[[Sequence[int], Tensor], None],
    ) -> None:
        self._places, self._pack, self._groups = dict(places), pack, groups
        self._begin, self._note = begin, note
        self._old: dict[Tensor, Tensor] = {}
        self._moving: list[Tensor] = []
        self._first = True
        self._handles = [
            before_first_step(optimizer, groups),
            optimizer.register_step_pre_hook(_untraced(self._keep)),
            optimizer.register_step_post_hook(_untraced(self._combine)),
        ]

    def remove(self) -> None:
        """Remove the hooks and the copy of the weights."""
        for handle in self._handles:
            handle.remove()
        self._old, self._moving = {}, []

    @torch.no_grad()
    def _keep(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        moving = [param for param in held(optimizer) if param.requires_grad or param.grad is not None]
        self._moving = sorted(moving, key=self._place)
        for param in self._moving:
            if param not in self._old:
                self._old[param] = torch.empty_like(_local(param))
            self._old[param].copy_(_local(param))

    @torch.no_grad()
    def _combine(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._begin()
        noted = []
        for _, members in groupby(self._moving, key=lambda param: self._pack(self._place(param))):
            params = list(members)
            deltas = [self._old[param] - _local(param) for param in params]
            if any(hasattr(param, "device_mesh") for param in params):
                cosines = adasum_(deltas, self._groups.across, shards=self._groups.inside)
            else:
                cosines = hierarchical_adasum_(deltas, self._groups)
            for param, delta in zip(params, deltas, strict=True):
                _local(param).copy_(self._old[param] - delta)
            self._note([self._place(param) for param in params], cosines)
            noted.append(cosines)
        if self._first and noted:
            self._first = False
            _warn_if_equal(torch.cat(noted, dim=1), [param.numel() for param in self._moving])

    def _place(self, param: Tensor) -> int:
        return self._places.setdefault(param, len(self._places))  # for a group that was added later


def held(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def before_first_step(optimizer: Optimizer, groups: NodeGroups) -> Any:
    """Compare the weights of all ranks once, before the first step; return the handle of the hook.

    Nodes that average gradients over the node alone would not notice that they started differently.
    """
    return optimizer.register_step_pre_hook(_FirstStep(groups))


class _FirstStep:
    """A hook of an optimizer; a class, so that other code can recognise it."""

    def __init__(self, groups: NodeGroups) -> None:
        self._groups = groups
        self._compared = False
        self._call = _untraced(self._compare)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._call(optimizer)

    def _compare(self, optimizer: Optimizer) -> None:
        if not self._compared:
            _check_equal(held(optimizer), self._groups)
        self._compared = True


@torch.no_grad()
def _check_equal(params: Sequence[Tensor], groups: NodeGroups) -> None:
    sums = torch.stack([bit_sum(param) for param in params])
    low, high = sums.clone(), sums
    sharded = any(hasattr(param, "device_mesh") for param in params)
    for group in (groups.across,) if sharded else (groups.across, groups.inside):
        dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    differing = (low != high).to(torch.int32)
    dist.all_reduce(differing, dist.ReduceOp.MAX, group=groups.inside)
    if bool(differing.any()):
        raise IncompatibleError(
            f"{int(differing.sum())} of {len(params)} parameters differ between the ranks before the first update; "
            "start all ranks from the same seed or the same checkpoint."
        )


def _warn_if_equal(cosines: Tensor, sizes: Sequence[int]) -> None:
    """Warn if all nodes made the same update; vectors of one number are always parallel."""
    cosines = cosines[:, torch.tensor(sizes, device=cosines.device) > 1]
    if bool((cosines != 0).any()) and bool(((cosines > 1 - 1e-12) | (cosines == 0)).all()):
        warnings.warn(
            "adasum: all nodes made the same update, so AdaSum has no effect. This happens if the nodes read the same "
            "data, or if gradients are averaged over all ranks: average them over the node alone, "
            "DistributedDataParallel(model, process_group=NodeGroups.of(Topology.current()).inside).",
            NoEffectWarning,
            stacklevel=2,
        )


def _local(param: Any) -> Tensor:
    """Return the part of a parameter that this rank holds."""
    return param.to_local() if hasattr(param, "to_local") else param


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep the compiler out of the collectives if the step around them is compiled."""
    return torch.compiler.disable(hook)  # pyright: ignore[reportReturnType]
