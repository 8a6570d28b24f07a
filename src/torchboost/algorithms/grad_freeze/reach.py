"""What the gradients of past updates say about freezing: which prefixes leave something to train, and which fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Attachment, Removable
from torchboost.core.covering import plain_hook
from torchboost.core.torch_private import version
from torchboost.core.wrapping import is_compiled
from torchboost.distributed.agreement import several
from torchboost.errors import IncompatibleError

__all__ = ["GradientChecks", "Reach"]

_NEVER = 1 << 62


class Reach:
    """Records for each index of a schedule whether something trains there, from the gradients so far.

    An index is usable if the optimizer has a parameter after its prefix that the user trains, and if every informative
    update gave one of those a gradient. A module that the forward pass does not use, one that no loss depends on, and a
    head that only some batches use therefore never become the last part that trains. A weight that also has a use that
    is cut off does not count, since its gradient may have come from there.

    Later updates may reach parameters that none has reached yet, such as a head that is used in turns. These stay
    trainable at every index (:meth:`spared`). This costs nothing while they have no gradients.

    A gradient of zeros left by ``zero_grad(set_to_none=False)`` does not count. Checking this synchronises the device
    once per update; on several ranks it is not checked.

    Args:
        optimizer: The optimizer whose parameters count. Held weakly.
        frozen: The parameters of the prefix of each index.
        cut: The modules whose outputs are detached, see :class:`torchboost.graph.blocks.Block`.
        may_train: Whether the user trains a parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        frozen: Sequence[Sequence[Tensor]],
        cut: Iterable[nn.Module],
        may_train: Callable[[Tensor], bool],
    ) -> None:
        self._optimizer = ref(optimizer)
        self._frozen = [frozenset(map(id, parameters)) for parameters in frozen]
        self._tied = {id(p) for module in cut for p in module.parameters(recurse=False)}
        self._may_train = may_train
        self._behind: list[list[Tensor]] = []
        self._size = 0
        self._versions: dict[int, int] = {}
        self._closed: set[int] = set()
        self._unreached = frozenset[int]()  # could have been reached
        self._pending: list[Tensor] = []  # not reached yet, whether or not they could have been
        self._trained()

    def usable(self, index: int, state: Mapping[str, Any] | None = None) -> int:
        """Return the largest usable index up to ``index``; 0 always is.

        Args:
            index: The wanted index.
            state: The state of a checkpoint, used instead of what was recorded here.
        """
        behind = self._trained()
        closed = self._closed if state is None else {*state["closed"], *state.get("doubtful", ())}
        while index and (index in closed or not any(map(self._may_train, behind[index]))):
            index -= 1
        return index

    def spared(self, index: int) -> frozenset[int]:
        """Return the ``id`` of what stays trainable at ``index``: it could have had a gradient but never did."""
        return self._frozen[index] & self._unreached

    @property
    def known(self) -> list[Tensor]:
        """The parameters of the optimizer, last one first."""
        return self._trained()[0]

    def observe(self, index: int) -> bool:
        """Record the gradients of an update made at ``index``; return whether there were any.

        Cost: microseconds; each index reads the parameters from the last one back to one with a gradient.
        """
        behind = self._trained()
        if not any(p.grad is not None and p.requires_grad for p in behind[0]):
            return False
        self._pending = [p for p in self._pending if p.grad is None]
        self._unreached = frozenset(id(p) for p in self._pending if p.requires_grad)
        reached: dict[int, bool] = {}
        for other in range(1, len(behind)):
            if other in self._closed or not self._frozen[index] <= self._frozen[other]:
                continue  # parts of what trains there are frozen now
            if not any(self._reached(p, reached) for p in behind[other]):
                self._closed.add(other)
        return True

    def _reached(self, parameter: Tensor, reached: dict[int, bool]) -> bool:
        key, grad = id(parameter), parameter.grad
        if key not in reached:
            reached[key] = False
            if grad is not None and parameter.requires_grad and key not in self._tied:
                # A gradient tensor that is kept is written in place at each update; a new one starts again.
                before, now = self._versions.get(key, _NEVER), version(grad)
                self._versions[key] = now
                readable = now > before and grad.layout is torch.strided and not several()
                reached[key] = not readable or bool(grad.any())
        return reached[key]

    def close(self) -> None:
        """Freeze nothing from now on."""
        self._closed.update(range(1, len(self._frozen)))

    def state_dict(self) -> dict[str, Any]:
        """Return which indices are not usable, and which parameters of the optimizer were not reached."""
        forward, pending = self.known[::-1], set(map(id, self._pending))
        return {
            "closed": sorted(self._closed),
            "pending": [place for place, p in enumerate(forward) if id(p) in pending],
            "unreached": [place for place, p in enumerate(forward) if id(p) in self._unreached],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from :meth:`state_dict`."""
        self._closed = {*state["closed"], *state.get("doubtful", ())}  # earlier versions had both
        forward = self.known[::-1]
        self._pending = [forward[place] for place in state.get("pending", ())]
        self._unreached = frozenset(id(forward[place]) for place in state.get("unreached", ()))

    def _trained(self) -> list[list[Tensor]]:
        """Return for each index the parameters of the optimizer after its prefix, last one first.

        If the optimizer is gone, return its last known ones.
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return self._behind
        groups = [group["params"] for group in optimizer.param_groups]
        size = sum(map(len, groups))
        if size != self._size:
            known = [p for group in reversed(groups) for p in reversed(group)]
            self._behind = [[p for p in known if id(p) not in frozen] for frozen in self._frozen]
            self._pending += known[: max(0, size - self._size)]  # groups that are added come last
            self._size = size
        return self._behind


class GradientChecks(Attachment):
    """Finds uses of gradients that freezing does not support, at the first update.

    A loop that sets ``.grad`` from ``torch.autograd.grad(loss, parameters)`` or ``torch.func.grad`` names the
    parameters in each update, and autograd raises an error for frozen ones.

    ``torch.utils.checkpoint`` with ``use_reentrant=True`` gives gradients only if an input of the checkpointed part
    requires one, which is not so after a frozen prefix. Such a part runs under ``no_grad`` inside a pass that records
    gradients, and gets gradients nonetheless, or gets none because the blocks before it are frozen.

    Args:
        model: The model whose first pass is watched through hooks on its modules; None watches none.
        parameters: Parameters that may train. Each one that trains has a hook until the first update.
    """

    def __init__(self, model: nn.Module | None, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._stale = self._any_gradient()  # older gradients carry no information
        self._accumulated = False
        self._suspects: dict[str, list[Tensor]] = {}
        self._recorded: set[str] = set()
        self._inner: list[Removable] = []
        handles: list[Removable] = [p.register_post_accumulate_grad_hook(self._note) for p in self._parameters]
        if model is not None:
            handles.append(plain_hook(model, model.register_forward_pre_hook(self._enter)))
            handles.append(plain_hook(model, model.register_forward_hook(self._leave, always_call=True)))
        self._seen = False  # whether a whole pass was watched
        super().__init__(*handles, undo=self._end_pass)

    def observe(self, frozen: bool) -> bool | None:
        """Check an update. Call it after the update, before the flags change.

        Returns:
            Whether a backward pass made the gradients; None if this update cannot tell. Otherwise the checks are over.

        Raises:
            IncompatibleError: A part of the model is checkpointed with ``use_reentrant=True``.
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
