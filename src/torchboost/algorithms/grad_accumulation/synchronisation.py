"""Suspend the gradient synchronisation of DDP and FSDP2, and reduce single numbers over their ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from torchboost.core.torch_private import exchange_of_a_pass, inside_compiled
from torchboost.core.wrapping import only_ddp, wrapper_of
from torchboost.errors import IncompatibleError

__all__ = ["GradientSync"]


class GradientSync:
    """How the gradients of one model are averaged over the ranks: by DDP, by FSDP2, or not at all.

    Args:
        model: As the loop calls it: wrapped by DDP, containing one as in ``WithLoss(DDP(model))``, or compiled.

    Attributes:
        ranks: Number of ranks that gradients are averaged over; 1 for a bare model.
        sharded: Whether FSDP2 shards the model; gradients that are not yet reduced cannot be read then.

    Raises:
        IncompatibleError: DDP with ``static_graph=True``, several DDPs, or FSDP1.
    """

    def __init__(self, model: nn.Module) -> None:
        inside = inside_compiled(model)
        outer = model if inside is None else inside
        if wrapper_of(outer) == "FullyShardedDataParallel":
            raise IncompatibleError(
                "the model is sharded by FullyShardedDataParallel (FSDP1), which is not supported; use fully_shard "
                "(FSDP2)."
            )
        self._model = model
        self._ddp = only_ddp(outer)
        if self._ddp is not None and self._ddp.static_graph:
            raise IncompatibleError(
                "DistributedDataParallel was built with static_graph=True, under which a backward pass without "
                "synchronisation fails in torch; build it without static_graph."
            )
        self._shards = [module for module in outer.modules() if hasattr(module, "set_requires_gradient_sync")]
        self._group = self._ddp.process_group if self._ddp is not None else None
        self.sharded = bool(self._shards)
        self.ranks = dist.get_world_size(self._group) if self._ddp is not None or self.sharded else 1

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which gradients stay on their rank; the next pass outside it synchronises them."""
        if self._ddp is not None:
            with self._ddp.no_sync():
                yield
            return
        self._switch(False)
        try:
            yield
        finally:
            self._switch(True)

    def catch_up(self) -> None:
        """Take part in what DDP exchanges at the start of a pass, if other ranks ran a pass and this one did not.

        It does nothing on ranks that ran the pass. All ranks must call it.
        """
        if self._ddp is not None:
            # The order of the buckets and the buffers, which torch exchanges in suspended passes too.
            with torch.enable_grad(), self._ddp.no_sync():
                exchange_of_a_pass(self._ddp)

    def average(self) -> None:
        """Average every gradient that any rank holds, after suspended passes. Not for FSDP2.

        Parameters outside of DDP are left alone, as DDP does.
        """
        averaged = self._model if self._ddp is None else self._ddp
        parameters = [p for p in averaged.parameters() if p.requires_grad]
        if self.ranks == 1 or not parameters:
            return
        held = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        dist.all_reduce(held, dist.ReduceOp.MAX, group=self._group)
        for parameter, somewhere in zip(parameters, held.tolist(), strict=True):
            if somewhere:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient, group=self._group)
                parameter.grad = gradient.div_(self.ranks)

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return self._agreed(value, dist.ReduceOp.MAX)

    def mean(self, value: float) -> float:
        """Return the mean value of all ranks."""
        return self._agreed(value, dist.ReduceOp.SUM) / self.ranks

    def _switch(self, on: bool) -> None:
        for module in self._shards:
            module.set_requires_gradient_sync(on, recurse=False)  # pyright: ignore[reportCallIssue]

    def _agreed(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self.ranks == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=next(self._model.parameters()).device)
        dist.all_reduce(shared, operation, group=self._group)
        return float(shared)
