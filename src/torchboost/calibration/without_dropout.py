"""Compute without dropout, so that passes whose random numbers come in another order can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["WithoutDropout"]

_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout),
)
_POSITIONS: Mapping[Any, int] = {
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: 10,
    torch.lstm: 5,
    torch.gru: 5,
    torch.rnn_tanh: 5,
    torch.rnn_relu: 5,
}
"""Function -> position of its probability."""
_LIKE = (torch.rand_like, torch.randn_like, torch.bernoulli)


class WithoutDropout(TorchFunctionMode):
    """Inside of it the probability of every dropout is 0, in modules, in functions and inside attention.

    Compiled and eager code draw the masks of dropout differently, and so do tensors in different memory formats. The
    compiler traces through this mode, into a graph of its own.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _LIKE and args:  # the order in which numbers are drawn follows the memory
            args = (args[0].contiguous(), *args[1:])
        place = _POSITIONS.get(func)
        if place is not None:
            if len(args) > place and isinstance(args[place], float):
                args = (*args[:place], 0.0, *args[place + 1 :])
            if "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)
