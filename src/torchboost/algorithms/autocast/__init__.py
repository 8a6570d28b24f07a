"""Half precision inside a forward."""

from __future__ import annotations

from torchboost.algorithms.autocast.algorithm import Autocast, autocast_forward

__all__ = ["Autocast", "autocast_forward"]
