"""The requirements of freezing on models, optimizers, gradients and ranks, and the reducers of DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchboost.core.algorithm import Attachment, Removable
from torchboost.core.forward import plain_hook
from torchboost.core.step import needs_closure
from torchboost.core.torch_private import (
    active_ddp,
    build_again,
    built_in_comm_hook,
    comm_hooks,
    compiler_follows_flags,
    follows_flags,
    not_traced,
    store_in_order,
)
from torchboost.core.wrapping import compiled_parts, is_compiled
from torchboost.distributed.agreement import Agreement, ranks_of_shards, several
from torchboost.errors import IncompatibleError

_HINT = (
    "Flags must change on all ranks at the same update: use the same settings, seed and checkpoint on all ranks, and "
    "let all of them take or skip an update together."
)


def check_freezable(model: nn.Module | None, optimizer: Optimizer) -> None:
    """Refuse models and optimizers that do not support changing ``requires_grad``.

    Raises:
        IncompatibleError: The model is wrapped by DDP with ``static_graph=True``, or with a communication hook that has
            a state or is built into the reducer. Or the program compiles the model, and this torch keeps using the
            graph of the old flags. Or the ``step`` of the optimizer needs a closure, as in LBFGS, which moves
            parameters without a gradient.
    """
    if model is not None:
        check_reducer(model)
        if not all(map(follows_flags, compiled_parts(model))) and not compiler_follows_flags():
            raise IncompatibleError(
                f"freezing: torch.compile of torch {torch.__version__} keeps using the old graph when requires_grad "
                "changes (pytorch#139476), so unfrozen layers would never train; set torch._dynamo.config."
                "skip_tensor_guards_with_matching_dict_tags = False at the start of the program, or update to 2.12."
            )
    if needs_closure(optimizer):
        raise IncompatibleError(
            f"freezing: {type(optimizer).__name__}.step needs a closure; such an optimizer, for example LBFGS, also "
            "moves parameters without a gradient. Use an optimizer that skips them, or leave freezing out."
        )


class GradientChecks(Attachment):
    """Finds uses of gradients that freezing does not support, at the first update.

    A loop that sets ``.grad`` from ``torch.autograd.grad(loss, parameters)`` or ``torch.func.grad`` names the
    parameters in each update, and autograd raises an error for frozen ones.

    ``torch.utils.checkpoint`` with ``use_reentrant=True`` gives gradients only if an input of the checkpointed part
    requires one, which is not so after a frozen prefix. Such a part runs under ``no_grad`` inside a pass that records
    gradients, and gets gradients nonetheless, or gets none because the blocks before it are frozen.

    Until the first update each parameter that trains has a hook, and so has each module during the first pass.
    """

    def __init__(self, model: nn.Module | None, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._stale = self._any_gradient()  # older gradients carry no information
        self._accumulated = self._seen = False  # by a backward pass, and whether a whole pass was watched
        self._suspects: dict[str, list[Tensor]] = {}
        self._recorded: set[str] = set()
        self._inner: list[Removable] = []
        handles: list[Removable] = [p.register_post_accumulate_grad_hook(self._note) for p in self._parameters]
        if model is not None:
            handles.append(plain_hook(model, model.register_forward_pre_hook(self._enter)))
            handles.append(plain_hook(model, model.register_forward_hook(self._leave, always_call=True)))
        super().__init__(*handles, undo=self._end_pass)

    def observe(self, frozen: bool) -> bool | None:
        """Check an update, after it and before the flags change.

        Return whether a backward pass made the gradients, which ends the checks, or None if this update cannot tell.
        """
        stale, self._stale = self._stale, False
        if stale or not self._any_gradient():
            return None
        self.remove()
        for name, parameters in self._suspects.items():
            trained = [p for p in parameters if p.requires_grad]
            if trained and (frozen or any(p.grad is not None for p in trained)):
                raise IncompatibleError(
                    f"freezing: '{name}' runs without gradients inside a pass that records them, as under "
                    "torch.utils.checkpoint with use_reentrant=True. It gets no gradients while the blocks before it "
                    "are frozen. Pass use_reentrant=False to the checkpointing, or leave freezing out."
                )
        return self._accumulated

    def _any_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def _note(self, _: Tensor) -> None:
        self._accumulated = True

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._seen or self._inner or is_compiled(module):
            return  # hooks do not see the parts of a compiled pass
        if not (torch.is_grad_enabled() and module.training):
            return
        for name, part in module.named_modules():
            trained: list[Tensor] = [p for p in part.parameters(recurse=False) if p.requires_grad]
            if trained:
                self._inner.append(part.register_forward_pre_hook(partial(self._inside, name, trained)))

    def _inside(self, name: str, trained: list[Tensor], module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._recorded.add(name)
        else:
            self._suspects[name] = trained

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._inner:
            return
        self._end_pass()
        self._suspects = {name: p for name, p in self._suspects.items() if name not in self._recorded}
        self._seen = output is not None

    def _end_pass(self) -> None:
        while self._inner:
            self._inner.pop().remove()


def check_reducer(model: nn.Module) -> None:
    """Refuse a DDP, as the model or inside it, whose reducer cannot be rebuilt. See :func:`check_freezable`."""
    for ddp in _replicas_in(model):
        if ddp.static_graph:
            raise IncompatibleError(
                "freezing: DDP has static_graph=True, but freezing changes the graph; build it with static_graph=False."
            )
        # Only the reducer holds such a hook. DDP logs its name.
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
    """Rebuild the reducer of DDP for exactly the parameters that require a gradient now, as DDP does when unpickled.

    Hooks of the old reducer are dropped, communication hooks are registered again. Call it on all ranks with the same
    flags, when no backward pass is pending.

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
    whether it runs inside one. A pass in eval mode is compared only while updates come from such passes. After a pass
    in training mode it counts as an evaluation, which a rank may run alone.

    ``version`` returns a number that grows with each change of flags. Ranks wait for each other ``within`` seconds, or
    compare nothing if that is 0. If the model is wrapped later, a pass raises the errors of the wrapper.
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
        hook = not_traced(self._before_pass)
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
        # All ranks run a pass that sends gradients together. Other passes may run on one rank.
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
