"""What the tests ask of older versions of torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from torchboost.core.torch_private import compiler_follows_flags, guards_of_every_flag

__all__ = [
    "COPIES_LAST_RATES",
    "GROUPS_OF_REPLICATE",
    "SYNC_NORM_NEEDS_A_GPU",
    "flags_are_followed",
    "needs_gradient_dtypes",
]

_VERSION: Any = torch.__version__
COPIES_LAST_RATES = _VERSION >= (2, 10)
"""Whether ``get_last_lr`` of torch's schedulers returns copies of learning rates that are tensors."""
SYNC_NORM_NEEDS_A_GPU = _VERSION < (2, 10)
"""Whether ``SyncBatchNorm`` refuses tensors of the CPU also on one rank."""

GROUPS_OF_REPLICATE = 2 if _VERSION < (2, 10) else 1
"""How often ``replicate`` reduces a gradient: torch 2.9 also does so in a group of one rank, which sends nothing."""

needs_gradient_dtypes = pytest.mark.skipif(
    _VERSION < (2, 10), reason="a gradient may have another dtype than its parameter from torch 2.10 on"
)


def flags_are_followed() -> AbstractContextManager[Any]:
    """Within it what a program compiles follows ``requires_grad``, as the documentation says how before torch 2.12."""
    return nullcontext() if compiler_follows_flags() else guards_of_every_flag()
