"""Small networks of every shape that people train, for tests that hold for all of them. Plain torch, CPU."""

from __future__ import annotations

from tests.support.zoo.habits import HABITS
from tests.support.zoo.images import IMAGES
from tests.support.zoo.network import Batch, Network
from tests.support.zoo.sequences import SEQUENCES

__all__ = ["ZOO", "Batch", "Network"]

ZOO = {network.name: network for network in (*IMAGES, *SEQUENCES, *HABITS)}
"""Every network under its name."""
