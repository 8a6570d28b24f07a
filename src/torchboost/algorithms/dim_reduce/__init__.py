"""Training in a subspace of a few directions."""

from __future__ import annotations

from torchboost.algorithms.dim_reduce.algorithm import SubspaceDescent
from torchboost.algorithms.dim_reduce.basis import SubspaceBasis
from torchboost.algorithms.dim_reduce.basis_sources import principal_basis
from torchboost.algorithms.dim_reduce.optimizer import SubspaceOptimizer
from torchboost.algorithms.dim_reduce.snapshots import CheckpointFiles, SnapshotBuffer

__all__ = [
    "CheckpointFiles",
    "SnapshotBuffer",
    "SubspaceBasis",
    "SubspaceDescent",
    "SubspaceOptimizer",
    "principal_basis",
]
