"""Borders between groups of modules: identity forward, and backward a change of the scale of the gradients.

A group is a set of modules. Inside of them gradients carry the scale of the group, everywhere else the scale of the
rest of the model. A border stands at every tensor that enters a module of a group as an argument and at every one it
returns, so the gradients are right however the modules are connected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.forward import with_tensors
from torchboost.core.torch_private import module_hooks, store_in_order
from torchboost.errors import IncompatibleError


class Ratios:
    """The factors of the borders: the scale of one group divided by the scale of another.

    The numbers are read when the backward pass comes to a border, so they can be set after the forward pass, also in
    a compiled model, which keeps the memory they stand in and not their values.
    """

    def __init__(self, groups: int) -> None:
        # On the host, in float32: kernels then multiply in float32, even if the gradient is in half precision and could
        # not hold the ratio, and no device has to be waited for.
        self._numbers = torch.ones(groups, groups, device="cpu")
        self._table = [list(row.unbind()) for row in self._numbers.unbind()]

    def between(self, into: int, out_of: int) -> Tensor:
        """Return the factor for gradients that flow from group ``out_of`` into group ``into``."""
        return self._table[into][out_of]

    def set(self, scales: Sequence[float] | None) -> None:
        """Set the scales between which the borders convert. None passes gradients unchanged."""
        # Through .data, as autograd would take the change of a tensor it saved for a mistake.
        if scales is None:
            self._numbers.data.fill_(1.0)
        else:
            table = [[into / out_of for out_of in scales] for into in scales]
            self._numbers.data.copy_(torch.tensor(table, device="cpu"))


class LossScaleGroupBorder(torch.autograd.Function):
    """torch names this class in the error of an in-place change of the output, which would bypass the border."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ratio: Tensor, widen: bool, leaves: int) -> Tensor:
        """Return the values of ``x``."""
        ctx.ratio, ctx.dtype = ratio, x.dtype
        if leaves:
            # For a module of a group that gets this very tensor next: one border will do, see _enter.
            ctx.torchboost_border = (leaves, x)
        return x.float() if widen and x.dtype is torch.float16 else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None, None]:
        """Multiply the gradient by the ratio."""
        ctx.torchboost_border = None
        return (grads[0] * ctx.ratio).to(ctx.dtype), None, None, None


def change_scale(x: Tensor, ratio: Tensor, *, widen: bool = False, leaves: int = 0) -> Tensor:
    """Return ``x``. Its gradient will be multiplied by ``ratio``, which is read in the backward pass.

    With ``widen`` float16 is returned in float32, so that gradients outside may be of any size. ``leaves`` is the group
    that ``x`` comes from, 0 if it comes from none.
    """
    if not torch.is_grad_enabled() or not x.requires_grad:
        return x
    border: Any = LossScaleGroupBorder.apply(x, ratio, widen, leaves)
    return border


class _Gate:
    """The hooks of one module of a group. An object of a class, so that the model can be copied and pickled."""

    def __init__(self, module: nn.Module, group: int, name: str, ratios: Ratios) -> None:
        self.module, self.group, self.name = module, group, name
        self.called, self.live = False, True
        self._ratios = ratios

    def __getstate__(self) -> dict[str, Any]:
        """Drop the border: a copy of the model alone has no scaler. See ScaleBorders.__setstate__."""
        return {**self.__dict__, "live": False}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.live:
            return None
        self.called = True
        return _mapped(args, self._enter, self.name), _mapped(kwargs, self._enter, self.name)

    def leave(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        if not self.live:
            return None
        ratio = self._ratios.between(self.group, 0)
        return _mapped(outputs, lambda x: change_scale(x, ratio, widen=True, leaves=self.group), self.name)

    def _enter(self, x: Tensor) -> Tensor:
        group = 0
        # A compiled graph does not know of autograd's nodes. There both borders are kept, which is as right.
        if not torch.compiler.is_compiling() and x.requires_grad:
            left = getattr(x.grad_fn, "torchboost_border", None)
            group, x = left or (0, x)
        return x if group == self.group else change_scale(x, self._ratios.between(group, self.group))


class ScaleBorders:
    """The borders of a model, as hooks on modules. A copy of the model has some if this object was copied with it.

    Groups count from 1. Group 0 of the ratios is the rest of the model.
    """

    def __init__(self, groups: Sequence[Mapping[str, nn.Module]], ratios: Ratios) -> None:
        gates = [
            _Gate(module, index, name, ratios)
            for index, modules in enumerate(groups, start=1)
            for name, module in modules.items()
        ]
        self._gates, self._unseen = gates, gates
        self._handles = []
        for gate in gates:
            # The outermost of all hooks, so that tensors seen by the others are inside the group.
            self._handles.append(gate.module.register_forward_pre_hook(gate.enter, with_kwargs=True, prepend=True))
            self._handles.append(gate.module.register_forward_hook(gate.leave))
            store_in_order(gate.module)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for gate in self._gates:
            gate.live = bool(self._handles)

    def check_called(self) -> None:
        """Refuse a module whose parameters got gradients although it was never called itself: it has no border."""
        self._unseen = [gate for gate in self._unseen if not gate.called]
        for gate in self._unseen:
            if any(param.grad is not None for param in gate.module.parameters()):
                raise IncompatibleError(
                    f"loss_scale_group: the module '{gate.name}' is in a group but is never called itself; the model "
                    "calls its parts, which have no borders. Name the parts, or the enclosing module that is called."
                )

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()


def has_borders(model: nn.Module) -> bool:
    """Whether borders stand at any module inside of a model."""
    hooks = (hook for module in model.modules() for hook in module_hooks(module)[1].values())
    gates = (getattr(hook, "__self__", None) for hook in hooks)
    return any(isinstance(gate, _Gate) and gate.live for gate in gates)


def _mapped(value: Any, change: Callable[[Tensor], Tensor], name: str) -> Any:
    """Change the tensors inside nested containers. Refuse anything else that holds tensors with gradients."""

    def refuse(strange: Any) -> None:
        contents = [*getattr(strange, "__dict__", {}).values()]
        if isinstance(strange, Mapping):
            contents += strange.values()
        elif isinstance(strange, (list, tuple, Set)):
            contents += strange
        if torch.is_grad_enabled() and any(isinstance(entry, Tensor) and entry.requires_grad for entry in contents):
            raise IncompatibleError(
                f"loss_scale_group: the module '{name}' takes or returns a {type(strange).__name__} that holds "
                "tensors; borders cannot be set there. Put the modules that exchange it into one group."
            )

    return with_tensors(value, change, refuse)
