"""RMSProp in the form of MindSpore and TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from torchboost.core.arguments import check_number
from torchboost.core.torch_private import foreach
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.options import Common, rule_arguments


class RMSProp(UpdateRule):
    """``s = alpha s + (1 - alpha) g^2``, ``b = momentum b + lr g / sqrt(s + eps)``, ``w -= b``. ``s`` starts at 1.

    The form of MindSpore and TensorFlow. ``torch.optim.RMSprop`` starts ``s`` at 0, adds ``eps`` outside the root, and
    keeps the learning rate out of ``b``. Prefer it unless you must match a run of MindSpore or TensorFlow. With
    ``centered`` the root is taken of ``s - m^2 + eps``, and ``m`` is the mean of the gradients. State: ``square_avg``,
    with ``momentum`` ``momentum_buffer``, with ``centered`` ``grad_avg``, each 4 bytes per float32 weight. Cost: one
    temporary of the size of the parameters, another one for the weight decay.

    Source: T. Tieleman, G. Hinton, Lecture 6.5, "Neural Networks for Machine Learning", 2012. ``centered``: A. Graves,
    "Generating Sequences With Recurrent Neural Networks", arXiv 1308.0850, equations 38 to 45.

    Other arguments, and errors, are those of :class:`~torchboost.optim.UpdateRule`.

    Args:
        alpha: Decay of the averages, at least 0 and below 1.
        eps: Added under the root, above 0.
        weight_decay: Factor of the weights added to the gradient.
        momentum: At least 0.
        centered: Divide by an estimate of the standard deviation, not of the root mean square.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = RMSProp(model.parameters(), lr=1e-2, momentum=0.9)
    """

    in_pieces = real_only = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-2,
        alpha: float = 0.9,
        eps: float = 1e-10,
        weight_decay: Any = 0.0,
        momentum: float = 0.0,
        *,
        centered: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**rule_arguments(locals()))

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse an ``alpha`` or ``eps`` out of range."""
        check_number("alpha", group["alpha"])
        if group["alpha"] >= 1:
            raise ValueError(f"alpha: found {group['alpha']!r}; give a number, at least 0 and below 1.")
        check_number("eps", group["eps"], above=True)

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries of the state."""
        optional = {"momentum_buffer": group["momentum"], "grad_avg": group["centered"]}
        return ("square_avg", *(key for key, used in optional.items() if used))

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a mean square of 1 and zeros for the other entries."""
        state = super().init_state(param, group)
        state["square_avg"].fill_(1)
        return state

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place."""
        params, grads = batch.params, batch.grads
        alpha, square = float(group["alpha"]), batch.state("square_avg")
        if group["maximize"]:
            grads = list(foreach.neg(grads))
        if group["weight_decay"]:
            grads = list(foreach.add(grads, params, alpha=float(group["weight_decay"])))
        foreach.mul_(square, alpha)
        foreach.addcmul_(square, grads, grads, 1 - alpha)
        if group["centered"]:
            mean = batch.state("grad_avg")
            foreach.lerp_(mean, grads, 1 - alpha)
            root = foreach.addcmul(square, mean, mean, -1.0)
            # Below 0 only by rounding, when the gradients hardly vary.
            foreach.clamp_min_(root, 0.0)
            foreach.add_(root, float(group["eps"]))
        else:
            root = foreach.add(square, float(group["eps"]))
        foreach.sqrt_(root)
        if not group["momentum"]:
            foreach.addcdiv_(params, grads, root, -float(group["lr"]))
            return
        buffers = batch.state("momentum_buffer")
        foreach.mul_(buffers, float(group["momentum"]))
        foreach.addcdiv_(buffers, grads, root, float(group["lr"]))
        foreach.sub_(params, buffers)
