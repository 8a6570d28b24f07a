"""Flags that change on several ranks: the reducers of DDP follow them, and the ranks agree on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchboost.core.algorithm import Attachment
from torchboost.distributed.agreement import Agreement
from torchboost.errors import IncompatibleError

__all__ = ["Replicas", "check_reducer", "rebuild_reducer", "several_ranks"]

_HINT = (
    "Flags must change on all ranks at the same update: give all ranks the same settings, seed and checkpoint, and let "
    "all take or skip an update together."
)


def check_reducer(model: nn.Module) -> None:
    """Refuse a DDP, as the model or inside it, whose reducer cannot be built again.

    A state that copes with other buckets at any pass says so in an attribute ``follows_buckets``.

    Raises:
        IncompatibleError: ``static_graph=True``, a communication hook with a state of its own, or one of those built
            into the reducer.
    """
    for ddp in _replicas_in(model):
        if ddp.static_graph:
            raise IncompatibleError(
                "freezing: DistributedDataParallel was built with static_graph=True, and freezing changes the graph; "
                "build it with static_graph=False."
            )
        # Only the reducer holds such a hook, but DDP logs its name.
        built_in = None if _hooks_of(ddp) else ddp._get_ddp_logging_data().get("comm_hook")
        if built_in:
            raise IncompatibleError(
                f"freezing: DistributedDataParallel has the built-in communication hook {built_in}, which cannot be "
                "given to another reducer; register one from torch.distributed.algorithms.ddp_comm_hooks, such as "
                "fp16_compress_hook."
            )
        for hook, state in _hooks_of(ddp):
            if not (state is None or isinstance(state, dist.ProcessGroup) or getattr(state, "follows_buckets", False)):
                raise IncompatibleError(
                    f"freezing: DistributedDataParallel has the communication hook {hook.__qualname__} with a state "
                    f"({type(state).__name__}), which may hold figures of each bucket, and freezing changes the "
                    "buckets; use a hook whose state is None or a process group, such as fp16_compress_hook."
                )


def rebuild_reducer(ddp: DistributedDataParallel) -> None:
    """Let DDP reduce exactly the parameters that require a gradient now; nothing of the others is sent any more.

    This is what DDP does when it is unpickled, in place: hooks of the old reducer go with it, gradients stay, the
    process group is the same, and communication hooks are registered again. To be called where no backward pass is
    due, on all ranks with the same flags.

    Cost: milliseconds and a second set of buckets for a moment; the next pass but one puts the buckets into the order
    of the gradients, as after construction, which is one small broadcast.
    """
    state = dict(vars(ddp))  # with the process group, which ``__getstate__`` leaves out
    hooks, state["_comm_hooks"] = _hooks_of(ddp), []
    ddp.__setstate__(state)
    for hook, hook_state in hooks:
        ddp.register_comm_hook(hook_state, hook)


class Replicas(Attachment):
    """The ranks that train a model together, seen from its forward passes.

    Before a pass with gradients, the reducer of each DDP (the model itself, inside it, or around it) is built again if
    flags have changed since, and all ranks compare ``figures``. DDP around a bare model may come later: the model asks
    at each pass whether it runs inside one. A pass in eval mode is compared while updates come from such passes; after
    one in training mode it is taken for an evaluation, which a rank may make alone.

    Args:
        model: What the loop calls, or what is wrapped later.
        version: A number that grows with each change of flags.
        figures: What must be alike on all ranks before a pass.
        within: Seconds in which a rank that does not come is an error; 0 compares nothing.

    Raises:
        IncompatibleError: See :func:`check_reducer`; from a pass, where DDP came later.
    """

    def __init__(
        self, model: nn.Module, version: Callable[[], int], figures: Callable[[], Mapping[str, int]], *, within: float
    ) -> None:
        check_reducer(model)
        self._model = model
        self._version, self._figures, self._within = version, figures, within
        self._built: WeakKeyDictionary[DistributedDataParallel, int] = WeakKeyDictionary()
        self._agreements: dict[tuple[int, ...], Agreement] = {}
        self._sharded_over: list[int] | None = None
        self._trained = False  # whether there was a pass in training mode since the last update
        self._trains_in_eval = True
        self._watching = False
        super().__init__()
        self.watch()

    def watch(self) -> None:
        """Hook into the passes once there is a process group; to be called after each update."""
        self._trains_in_eval, self._trained = not self._trained, False
        if self._watching or not _grouped():
            return
        self._watching = True
        hook: Callable[..., None] = torch.compiler.disable(self._before_pass)  # pyright: ignore
        for module in _replicas_in(self._model) or [self._model]:
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def release(self) -> None:
        """Build the reducers for the flags of now, and free the group; after the hooks are gone."""
        if dist.is_initialized():
            for ddp in list(self._built):
                self._follow(ddp)
        for agreement in self._agreements.values():
            agreement.close()

    def _before_pass(self, module: nn.Module, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        ddp = module if isinstance(module, DistributedDataParallel) else self._around()
        if module.training:
            self._trained, self._trains_in_eval = True, False
        # A pass that sends gradients is made by all ranks at once; others need not be.
        trains = module.training or self._trains_in_eval
        if self._within and trains and (ddp is None or ddp.require_backward_grad_sync):
            ranks = self._ranks_of(ddp)
            if len(ranks) > 1:
                self._agreement_of(ranks).check(self._figures(), hint=_HINT)
        if ddp is not None:
            self._follow(ddp)

    def _around(self) -> DistributedDataParallel | None:
        """The DDP in whose forward pass this is, as it tells the compiler."""
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None and ddp not in self._built:
            check_reducer(ddp)
        return ddp

    def _follow(self, ddp: DistributedDataParallel) -> None:
        # One that was seen for the first time may have been built under other flags.
        if self._built.get(ddp) != self._version():
            rebuild_reducer(ddp)
            self._built[ddp] = self._version()

    def _ranks_of(self, ddp: DistributedDataParallel | None) -> Sequence[int]:
        return self._sharding() if ddp is None else dist.get_process_group_ranks(ddp.process_group)

    def _agreement_of(self, ranks: Sequence[int]) -> Agreement:
        key = tuple(ranks)
        if key not in self._agreements:
            self._agreements[key] = Agreement(ranks, subject="freezing", timeout=self._within)
        return self._agreements[key]

    def _sharding(self) -> list[int]:
        """The ranks that FSDP2 spreads the parameters over; none where nothing is sharded."""
        if self._sharded_over is not None:
            return self._sharded_over
        meshes = (getattr(parameter, "device_mesh", None) for parameter in self._model.parameters())
        mesh = next((mesh for mesh in meshes if mesh is not None), None)
        self._sharded_over = found = [] if mesh is None else mesh.mesh.flatten().tolist()
        return found


def several_ranks() -> bool:
    """Whether this process is one of several ranks, which need not train one model."""
    return _grouped() and dist.get_world_size() > 1


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def _replicas_in(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _hooks_of(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], Any]]:
    return list(ddp._comm_hooks)
