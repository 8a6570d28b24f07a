"""Checks of the options of a parameter group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from torchboost.core.arguments import check_number

__all__ = ["check_options"]

NOT_NEGATIVE = ("lr", "weight_decay", "eps", "momentum", "max_ratio")
FLAGS = ("amsgrad", "nesterov", "maximize", "capturable", "bias_correction", "master_weights", "decoupled_weight_decay")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values no update can be right with. Tensors on a device are not looked at: that would wait for it.

    Raises:
        TypeError: A value of another type.
        ValueError: A value out of range.
    """
    for name in NOT_NEGATIVE:
        if name in options:
            _check_scalar(name, options[name])
    if "betas" in options:
        _check_betas(options["betas"])
    dampening = options.get("dampening", 0.0)
    if isinstance(dampening, bool) or not isinstance(dampening, Real) or not math.isfinite(float(dampening)):
        raise ValueError(f"dampening: found {dampening!r}; give a finite number.")
    for name in FLAGS:
        if name in options and not isinstance(options[name], bool):
            raise TypeError(f"{name}: found {options[name]!r}; give True or False.")
    if options.get("foreach") and options.get("fused"):
        raise ValueError("foreach and fused are two ways to do the same; set one of them.")
    if options.get("foreach") and isinstance(options.get("lr"), Tensor) and not options.get("capturable"):
        raise ValueError("lr: found a tensor, which foreach takes with capturable=True only.")
    if options.get("nesterov") and "dampening" in options and (not options["momentum"] or options["dampening"]):
        raise ValueError("nesterov: needs a momentum above 0 and dampening=0.")


def _check_scalar(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        check_number(name, value)
        return
    if value.numel() != 1:
        raise ValueError(f"{name}: found a tensor of shape {tuple(value.shape)}; give one with one element.")
    if value.device.type == "cpu":
        check_number(name, value.item())


def _check_betas(betas: object) -> None:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas: found {betas!r}; give two numbers, at least 0 and below 1.")
    for value in betas:
        number = value.item() if isinstance(value, Tensor) and value.device.type == "cpu" else value
        if isinstance(number, Tensor):
            continue
        if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < 1:
            raise ValueError(f"betas: found {betas!r}; give two numbers, at least 0 and below 1.")
