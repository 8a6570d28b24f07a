"""Bucket sizes for DistributedDataParallel from positions in the list of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchboost.errors import IncompatibleError

__all__ = ["bucket_options"]

_MEBI = 1 << 20
_ARGUMENT = "bucket_cap_mb_list"


def bucket_options(parameters: Sequence[Tensor], points: Sequence[int]) -> dict[str, Any]:
    """Return arguments with which ``DistributedDataParallel`` starts a new bucket at each position.

    DDP fills buckets in the order in which gradients become ready, which is the reverse order of the parameters. A
    bucket is closed when it holds the bytes of its part. If gradients become ready in that order, the boundaries are
    exact from the second pass on.

    Args:
        parameters: The trainable parameters of the model, in order of registration.
        points: Increasing positions of 1 or more; positions past the end have no effect.

    Raises:
        IncompatibleError: The parameters have several types or devices, for each of which DDP has separate buckets;
            or DDP of this torch has no ``bucket_cap_mb_list``.
    """
    if _ARGUMENT not in inspect.signature(DistributedDataParallel).parameters:
        raise IncompatibleError(
            f"gradient_split_groups: DistributedDataParallel of torch {torch.__version__} has no {_ARGUMENT}; use a "
            "newer torch, or leave gradient_split_groups out."
        )
    kinds = sorted({f"{parameter.dtype} on {parameter.device}" for parameter in parameters})
    if len(kinds) > 1:
        raise IncompatibleError(
            f"gradient_split_groups: the parameters are {', '.join(kinds)}, and DistributedDataParallel keeps "
            "separate buckets for each of these; leave gradient_split_groups out."
        )
    edges = [0, *(point for point in points if 0 < point < len(parameters)), len(parameters)]
    sizes = [sum(p.numel() * p.element_size() for p in parameters[start:stop]) for start, stop in pairwise(edges)]
    return {_ARGUMENT: [size / _MEBI for size in reversed(sizes)]}
