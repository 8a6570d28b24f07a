"""Token dropping."""

from __future__ import annotations

from torchboost.algorithms.token_drop.algorithm import TokenDrop, drop_tokens

__all__ = ["TokenDrop", "drop_tokens"]
