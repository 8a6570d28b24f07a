"""Everything a model holds, taken down so that two moments can be compared. Plain torch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["changes", "generators", "portrait"]

Portrait = dict[str, Any]


def portrait(model: nn.Module) -> Portrait:
    """Return every attribute of every module under ``module.attribute``: values for plain ones, identity for objects.

    Of a tensor it says identity, type, shape, strides, whether it trains, and its bytes; of a dictionary, list or tuple
    what is inside. Hooks are listed one by one.
    """
    found: Portrait = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}.{key}".lstrip(".")] = _of(value)
    return found


def changes(before: Portrait, after: Portrait) -> dict[str, tuple[Any, Any]]:
    """Return what differs, with both values; None stands for what was not there."""
    keys = before.keys() | after.keys()
    return {key: (before.get(key), after.get(key)) for key in sorted(keys) if before.get(key) != after.get(key)}


def generators() -> tuple[Any, ...]:
    """Return where the global random generators stand."""
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (kind, bytes(keys), *rest)


def _of(value: Any) -> Any:
    if isinstance(value, Tensor):
        looks = (type(value).__name__, value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
        return ("tensor", id(value), *looks, value.detach().resolve_conj().numpy().tobytes())
    if isinstance(value, nn.Module):
        return ("module", id(value))
    if isinstance(value, dict):
        return ("dict", {key: _of(inner) for key, inner in value.items()})
    if isinstance(value, (list, tuple, set, frozenset)):
        return (type(value).__name__, [_of(inner) for inner in value])
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)):
        return value
    return ("object", type(value).__name__, id(value))
