"""FTRL-Proximal: weights that become exactly 0, for sparse linear models and wide embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchboost.core.arguments import check_number, is_number
from torchboost.core.torch_private import foreach
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.options import Common, rule_arguments

SMALLEST_LR = 1e-30
"""The rule divides by the learning rate. With a smaller one the result overflows float32."""


class FTRL(UpdateRule):
    """Follow the regularised leader, per weight, with ``p = -lr_power``.

    ``n' = n + g^2``, ``z += g - (n'^p - n^p) / lr * w``, and then
    ``w = 0`` if ``|z| <= l1``, else ``w = (sign(z) l1 - z) / (n'^p / lr + 2 l2)``.

    Each update recomputes the weights from ``z``, which starts at 0. So initial weights have little effect, and a
    gradient of 0 in the first update sets a weight to 0. State: ``accumulator`` (``n``) and ``linear`` (``z``), 8 bytes
    per float32 weight. Cost: two temporaries of the size of the parameters.

    Source: H. B. McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1, whose
    ``lambda2`` is ``2 l2`` here, as in MindSpore and TensorFlow.

    Other arguments, and errors, are those of :class:`~torchboost.optim.UpdateRule`.

    Args:
        lr: Learning rate, at least 1e-30, or 0 for no change.
        lr_power: From -1 to 0. With -0.5 rates decrease with the square root of the sum of squares.
        l1: Strength of the L1 term, at least 0.
        l2: Strength of the L2 term, at least 0.
        weight_decay: Factor of the weights added to the gradient.
        initial_accumulator_value: Initial value of ``n``, above 0.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = FTRL(model.parameters(), lr=0.1, l1=1e-3)
    """

    in_pieces = real_only = keeps_weights = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        lr_power: float = -0.5,
        l1: float = 0.0,
        l2: float = 0.0,
        weight_decay: Any = 0.0,
        *,
        initial_accumulator_value: float = 0.1,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**rule_arguments(locals()))

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of the range of this rule."""
        check_number("initial_accumulator_value", group["initial_accumulator_value"], above=True)
        lr = group["lr"]
        if not isinstance(lr, Tensor) or lr.device.type == "cpu":
            check_number("lr", float(lr))
            if 0 < lr < SMALLEST_LR:
                raise ValueError(f"lr: found {float(lr)!r}; give a number, at least {SMALLEST_LR:g}, or 0.")
        power = group["lr_power"]
        if not is_number(power):
            raise TypeError(f"lr_power: found {power!r}; give a number from -1 to 0, such as -0.5.")
        if not -1 <= power <= 0:
            raise ValueError(f"lr_power: found {power!r}; give a number from -1 to 0, such as -0.5.")

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries of the state."""
        return ("accumulator", "linear")

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sum of squares at its initial value and a linear term of 0."""
        state = super().init_state(param, group)
        state["accumulator"].fill_(float(group["initial_accumulator_value"]))
        return state

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place."""
        lr, power, l1 = float(group["lr"]), -float(group["lr_power"]), float(group["l1"])
        if lr == 0:  # the rule divides by it, and other rules do not move the weights either
            return
        params, grads = batch.params, batch.grads
        total, linear = batch.state("accumulator"), batch.state("linear")
        if group["maximize"]:
            grads = list(foreach.neg(grads))
        if group["weight_decay"]:
            grads = list(foreach.add(grads, params, alpha=float(group["weight_decay"])))
        before = foreach.pow(total, power)
        foreach.addcmul_(total, grads, grads)
        steepness = list(foreach.pow(total, power))
        foreach.sub_(before, steepness)
        foreach.add_(linear, grads)
        foreach.addcmul_(linear, before, params, 1 / lr)
        del before
        foreach.div_(steepness, lr)
        foreach.add_(steepness, 2 * float(group["l2"]))
        # z after the threshold l1: sign(z) * max(|z| - l1, 0).
        foreach.copy_(params, [torch.nn.functional.softshrink(z, l1) for z in linear])
        foreach.neg_(params)
        foreach.div_(params, steepness)
