"""What the tests ask of older versions of torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchboost.core.torch_private import guards_of_every_flag
from torchboost.core.torch_versions import compiler_follows_flags

__all__ = ["GROUPS_OF_REPLICATE", "flags_are_followed"]

GROUPS_OF_REPLICATE = 2 if torch.__version__ < (2, 10) else 1
"""How often ``replicate`` reduces a gradient: torch 2.9 also does so in a group of one rank, which sends nothing."""


def flags_are_followed() -> AbstractContextManager[Any]:
    """Within it what a program compiles follows ``requires_grad``, as the documentation says how before torch 2.12."""
    return nullcontext() if compiler_follows_flags() else guards_of_every_flag()
