"""Optimizers with a gradient pipeline, schedules of the learning rate, and parameter groups.

Names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchboost.lazy import exports

if TYPE_CHECKING:
    from torchboost.optim import lr_scheduler as lr_scheduler
    from torchboost.optim.adam import Adam, AdamW, AdamWeightDecay
    from torchboost.optim.base import Batch, UpdateRule
    from torchboost.optim.basis_sources import principal_basis
    from torchboost.optim.ftrl import FTRL
    from torchboost.optim.group_rules import GroupRule, layer_wise_decay, no_decay, param_groups
    from torchboost.optim.lamb import Lamb
    from torchboost.optim.lars import LARS, TrustRatio
    from torchboost.optim.lazy_adam import LazyAdam
    from torchboost.optim.learning_rates import Listed, ScheduleLR, factor
    from torchboost.optim.offload import AdamOffload, OffloadPlan
    from torchboost.optim.pipeline import GradientPipeline, Gradients, GradientTransform
    from torchboost.optim.rmsprop import RMSProp, RMSprop
    from torchboost.optim.schedules import (
        Constant,
        CosineDecay,
        ExponentialDecay,
        InverseDecay,
        NaturalExponentialDecay,
        PerEpoch,
        PiecewiseConstant,
        PolynomialDecay,
        Warmup,
        as_list,
    )
    from torchboost.optim.sgd import SGD, Momentum
    from torchboost.optim.snapshots import CheckpointFiles, SnapshotBuffer
    from torchboost.optim.subspace import SubspaceOptimizer
    from torchboost.optim.subspace_basis import SubspaceBasis
    from torchboost.optim.transforms import Centralize, ClipNorm, ClipValue, Coalesce, Decay, Unscale

__all__ = [
    "FTRL",
    "LARS",
    "SGD",
    "Adam",
    "AdamOffload",
    "AdamW",
    "AdamWeightDecay",
    "Batch",
    "Centralize",
    "CheckpointFiles",
    "ClipNorm",
    "ClipValue",
    "Coalesce",
    "Constant",
    "CosineDecay",
    "Decay",
    "ExponentialDecay",
    "GradientPipeline",
    "GradientTransform",
    "Gradients",
    "GroupRule",
    "InverseDecay",
    "Lamb",
    "LazyAdam",
    "Listed",
    "Momentum",
    "NaturalExponentialDecay",
    "OffloadPlan",
    "PerEpoch",
    "PiecewiseConstant",
    "PolynomialDecay",
    "RMSProp",
    "RMSprop",
    "ScheduleLR",
    "SnapshotBuffer",
    "SubspaceBasis",
    "SubspaceOptimizer",
    "TrustRatio",
    "Unscale",
    "UpdateRule",
    "Warmup",
    "as_list",
    "factor",
    "layer_wise_decay",
    "no_decay",
    "param_groups",
    "principal_basis",
]

_HOMES = {
    "torchboost.optim.adam": ("Adam", "AdamW", "AdamWeightDecay"),
    "torchboost.optim.base": ("Batch", "UpdateRule"),
    "torchboost.optim.basis_sources": ("principal_basis",),
    "torchboost.optim.ftrl": ("FTRL",),
    "torchboost.optim.group_rules": ("GroupRule", "layer_wise_decay", "no_decay", "param_groups"),
    "torchboost.optim.lamb": ("Lamb",),
    "torchboost.optim.lars": ("LARS", "TrustRatio"),
    "torchboost.optim.lazy_adam": ("LazyAdam",),
    "torchboost.optim.learning_rates": ("Listed", "ScheduleLR", "factor"),
    "torchboost.optim.offload": ("AdamOffload", "OffloadPlan"),
    "torchboost.optim.pipeline": ("GradientPipeline", "GradientTransform", "Gradients"),
    "torchboost.optim.rmsprop": ("RMSProp", "RMSprop"),
    "torchboost.optim.schedules": (
        *("Constant", "CosineDecay", "ExponentialDecay", "InverseDecay", "NaturalExponentialDecay", "PerEpoch"),
        *("PiecewiseConstant", "PolynomialDecay", "Warmup", "as_list"),
    ),
    "torchboost.optim.sgd": ("SGD", "Momentum"),
    "torchboost.optim.snapshots": ("CheckpointFiles", "SnapshotBuffer"),
    "torchboost.optim.subspace": ("SubspaceOptimizer",),
    "torchboost.optim.subspace_basis": ("SubspaceBasis",),
    "torchboost.optim.transforms": ("Centralize", "ClipNorm", "ClipValue", "Coalesce", "Decay", "Unscale"),
}
_find, _names = exports(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    # A module, as torch.optim has it; no name of this package, so that a star import stays cheap.
    return import_module(f"{__name__}.{name}") if name == "lr_scheduler" else _find(name)


def __dir__() -> list[str]:
    return [*globals(), "lr_scheduler", *_names()]
