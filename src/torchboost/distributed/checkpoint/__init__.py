"""Checkpoints of training on several ranks."""

from __future__ import annotations

from torchboost.distributed.checkpoint.checkpoint import Part, latest, load, save

__all__ = ["Part", "latest", "load", "save"]
