"""Training in a subspace of a few directions."""

from __future__ import annotations

from torchboost.algorithms.subspace.algorithm import SubspaceDescent
from torchboost.algorithms.subspace.basis import SubspaceBasis
from torchboost.algorithms.subspace.basis_sources import principal_basis
from torchboost.algorithms.subspace.optimizer import SubspaceOptimizer
from torchboost.algorithms.subspace.snapshots import CheckpointFiles, SnapshotBuffer

__all__ = [
    "CheckpointFiles",
    "SnapshotBuffer",
    "SubspaceBasis",
    "SubspaceDescent",
    "SubspaceOptimizer",
    "principal_basis",
]
