"""Stochastic gradient descent, with and without momentum, on torch's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd
from typing_extensions import Unpack

from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.options import Common, check_fused, rule_arguments
from torchboost.optim.tensors import writable


class Forms(Common, total=False):
    """The arguments of :class:`Common`, and the form of the update: lists of tensors, or torch's fused kernel."""

    foreach: bool | None
    fused: bool | None


class SGD(UpdateRule):
    """``a = momentum * a + (1 - dampening) * g``, ``w -= lr * a``. The first ``a`` is ``g``.

    Equal to ``torch.optim.SGD`` bit for bit, in each of its forms. Checkpoints load both ways. MindSpore's ``SGD`` is
    the same rule. State: ``momentum_buffer`` if ``momentum`` is above 0, 4 bytes per float32 weight.

    Other arguments, and errors, are those of :class:`~torchboost.optim.UpdateRule`.

    Args:
        momentum: At least 0.
        dampening: Reduces the weight of the gradient from the second update on.
        weight_decay: Factor of the weights added to the gradient.
        nesterov: ``w -= lr * (g + momentum * a)``. Requires a momentum and no dampening.
        foreach: Update lists of tensors. None chooses as torch does.
        fused: Use torch's fused kernel.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = SGD(model.parameters(), lr=lambda update: 0.1 / (1 + update), momentum=0.9)
    """

    kernel_unscales = True
    late = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: Any = 0.0,
        nesterov: bool = False,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**rule_arguments(locals()))

    def check_grad(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Accept sparse gradients if no option of the group makes the update dense."""
        dense = group["momentum"] or group["weight_decay"] or group["fused"] or group["foreach"]
        if dense or grad.layout is not torch.sparse_coo:
            super().check_grad(param, grad, group)
        check_fused(param, group, torch.optim.SGD)

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries of the state."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return None as buffer. The first gradient becomes the buffer."""
        return dict.fromkeys(self.state_keys(group))

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place."""
        if group["fused"]:
            batch.align(self.state_keys(group))
        if group["nesterov"]:  # the list form adds to the gradients
            batch.grads[:] = list(map(writable, batch.grads))
        buffers = [state.get("momentum_buffer") for state in batch.states]
        fused, scale, found_inf = group["fused"], getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        fresh = bool(group["momentum"]) and NoneType in set(map(type, buffers))
        if fused and fresh:
            # torch's kernel does not write new buffers if it skips an overflow, ...
            if found_inf is not None and bool(found_inf):
                return
            # ... and needs buffers for all parameters or for none. Some may start late, as after freezing.
            if any(buffer is not None for buffer in buffers):
                fused = False
                batch.grads[:] = [grad if scale is None else grad / scale.to(grad.device) for grad in batch.grads]
                scale = found_inf = None
        torch_sgd(
            batch.params,
            batch.grads,
            buffers,
            has_sparse_grad=any(map(attrgetter("is_sparse"), batch.grads)),
            foreach=group["foreach"],
            fused=fused,
            grad_scale=scale,
            found_inf=found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if fresh:
            for state, buffer in zip(batch.states, buffers, strict=True):
                state["momentum_buffer"] = buffer


class Momentum(SGD):
    """SGD with momentum: ``a = momentum * a + g``, ``w -= lr * a``, or ``w -= lr * (g + momentum * a)`` (``nesterov``).

    MindSpore's ``Momentum`` is this rule. MindSpore ignores its ``use_nesterov`` on CPU, but here it works. Arguments
    and errors are those of :class:`SGD`.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        momentum: float = 0.9,
        weight_decay: Any = 0.0,
        nesterov: bool = False,
        **options: Unpack[Forms],
    ) -> None:
        super().__init__(params, lr, momentum, 0.0, weight_decay, nesterov, **options)
