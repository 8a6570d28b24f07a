"""Flags that change on several ranks: rebuild the reducers of DDP and check that the ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchboost.core.algorithm import Attachment
from torchboost.core.covering import plain_hook
from torchboost.core.torch_private import active_ddp, build_again, built_in_comm_hook, comm_hooks, store_in_order
from torchboost.distributed.agreement import Agreement, ranks_of_shards, several
from torchboost.errors import IncompatibleError

__all__ = ["Replicas", "check_reducer", "rebuild_reducer"]

_HINT = (
    "Flags must change on all ranks at the same update: use the same settings, seed and checkpoint on all ranks, and "
    "let all of them take or skip an update together."
)


def check_reducer(model: nn.Module) -> None:
    """Refuse a DDP, as the model or inside it, whose reducer cannot be rebuilt.

    Raises:
        IncompatibleError: DDP has ``static_graph=True``, a communication hook with its own state, or one built into the
            reducer.
    """
    for ddp in _replicas_in(model):
        if ddp.static_graph:
            raise IncompatibleError(
                "freezing: DistributedDataParallel was built with static_graph=True, and freezing changes the graph; "
                "build it with static_graph=False."
            )
        # Only the reducer holds such a hook; DDP logs its name.
        built_in = None if comm_hooks(ddp) else built_in_comm_hook(ddp)
        if built_in:
            raise IncompatibleError(
                f"freezing: DistributedDataParallel has the built-in communication hook {built_in}, which cannot be "
                "moved to another reducer; register one from torch.distributed.algorithms.ddp_comm_hooks, such as "
                "fp16_compress_hook."
            )
        for hook, state in comm_hooks(ddp):
            if not (state is None or isinstance(state, dist.ProcessGroup)):
                raise IncompatibleError(
                    f"freezing: DistributedDataParallel has the communication hook {hook.__qualname__} with a state "
                    f"({type(state).__name__}), which may hold data per bucket, and freezing changes the buckets; use "
                    "a hook whose state is None or a process group, such as fp16_compress_hook."
                )


def rebuild_reducer(ddp: DistributedDataParallel) -> None:
    """Rebuild the reducer of DDP for exactly the parameters that require a gradient now.

    DDP does the same when it is unpickled. Hooks of the old reducer are dropped, gradients and the process group stay,
    and communication hooks are registered again. Call it on all ranks with the same flags, when no backward pass is
    pending.

    Cost: milliseconds, and briefly a second set of buckets. The second pass after this reorders the buckets by the
    order of the gradients, as after construction, with one small broadcast.
    """
    hooks = list(comm_hooks(ddp))
    build_again(ddp)
    for hook, hook_state in hooks:
        ddp.register_comm_hook(hook_state, hook)


class Replicas(Attachment):
    """The ranks that train a model together, seen from its forward passes.

    Before a pass with gradients, the reducer of each DDP (the model itself, inside it, or around it) is rebuilt if
    flags have changed, and all ranks compare ``figures``. The model may be wrapped in DDP later: it checks at each pass
    whether it runs inside one. A pass in eval mode is compared only while updates come from such passes; after a pass
    in training mode it counts as an evaluation, which a rank may run alone.

    Args:
        model: The model as the loop calls it, or as it is wrapped later.
        version: A number that grows with each change of flags.
        figures: Numbers that must be equal on all ranks before a pass.
        within: Seconds to wait for a rank before an error is raised; 0 disables the comparison.

    Raises:
        IncompatibleError: See :func:`check_reducer`; raised from a pass if the model was wrapped later.
    """

    def __init__(
        self, model: nn.Module, version: Callable[[], int], figures: Callable[[], Mapping[str, int]], *, within: float
    ) -> None:
        check_reducer(model)
        self._model = model
        self._version, self._figures, self._within = version, figures, within
        self._built: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
        self._agreements: dict[tuple[int, ...], Agreement] = {}
        self._trained = False  # whether there was a pass in training mode since the last update
        self._trains_in_eval = True
        super().__init__()
        self.watch()

    def watch(self) -> None:
        """Register the hook once there is a process group. Call it after each update."""
        self._trains_in_eval, self._trained = not self._trained, False
        if self._handles or not several():
            return
        hook: Callable[..., None] = torch.compiler.disable(self._before_pass)  # pyright: ignore
        for module in _replicas_in(self._model) or [self._model]:
            self._handles.append(plain_hook(module, module.register_forward_pre_hook(hook, prepend=True)))
            store_in_order(module)

    def release(self) -> None:
        """Rebuild the reducers for the current flags and free the group, after the hooks are removed."""
        if dist.is_initialized():
            for ddp in list(self._built):
                self._follow(ddp)
        for agreement in self._agreements.values():
            agreement.close()

    @cached_property
    def _shards(self) -> list[int]:
        return ranks_of_shards(self._model.parameters())

    def _before_pass(self, module: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        ddp = module if isinstance(module, DistributedDataParallel) else active_ddp()
        if module.training:
            self._trained, self._trains_in_eval = True, False
        if ddp is not None and ddp not in self._built:
            check_reducer(ddp)
        # All ranks run a pass that sends gradients together; other passes may run on one rank.
        trains = module.training or self._trains_in_eval
        if self._within and trains and (ddp is None or ddp.require_backward_grad_sync):
            ranks = tuple(self._shards if ddp is None else dist.get_process_group_ranks(ddp.process_group))
            if len(ranks) > 1:
                if ranks not in self._agreements:
                    self._agreements[ranks] = Agreement(ranks, subject="freezing", timeout=self._within)
                self._agreements[ranks].check(self._figures(), hint=_HINT)
        if ddp is not None:
            self._follow(ddp)

    def _follow(self, ddp: DistributedDataParallel) -> None:
        # A DDP that is seen for the first time may have been built with other flags.
        if self._built.get(ddp) != self._version():
            rebuild_reducer(ddp)
            self._built[ddp] = self._version()


def _replicas_in(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
