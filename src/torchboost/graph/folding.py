"""Fold BatchNorm into the adjacent layer, so that the network computes the same in eval mode with fewer operations."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from torchboost.core.arguments import check_module
from torchboost.core.covering import own_forward
from torchboost.core.torch_private import (
    AnyBatchNorm,
    AnyConv,
    conv_forward,
    parameter_slots,
)
from torchboost.core.wrapping import wrapper_of
from torchboost.errors import IncompatibleError
from torchboost.graph.copies import ReachesOriginal
from torchboost.graph.flow import Dataflow
from torchboost.graph.norms import WEIGHTED, is_customised, norm_tail
from torchboost.graph.removed_norm import Statistics, fused_weights, hide_biases, put_removed_norm
from torchboost.graph.surgery import held_elsewhere, may_collide, rebind_optimizer, undone_on_error
from torchboost.graph.trace import evaluate, runnable, trace, trace_all_paths, trace_run

__all__ = [
    "Fold",
    "FoldReport",
    "fold_batch_norms",
    "fold_obstacle",
    "fold_pairs",
    "largest_difference",
    "plan_folds",
    "shared_weights",
]

_STOCK_FORWARDS = (
    nn.Linear.forward,
    *(kind.forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    *(kind.forward for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
    *(conv_forward(kind) for kind in (AnyConv, nn.Conv1d, nn.Conv2d, nn.Conv3d)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldReport:
    """Result of :func:`fold_batch_norms`.

    Args:
        folded: Names of the BatchNorms that were folded.
        kept: Name of every other BatchNorm -> the reason why it was kept.
        largest_difference: Largest difference of the outputs before and after in eval mode, relative to the largest
            output; None if nothing was folded or the network could not be run on ``sample`` or a guessed input.
        traced: How the data flow was found: ``"fx"``, ``"run"``, ``"structure"``, or ``"-"`` without BatchNorms.
    """

    folded: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    largest_difference: float | None = None
    traced: str = "-"

    def __str__(self) -> str:
        difference = "not measured" if self.largest_difference is None else f"{self.largest_difference:.1e}"
        lines = [
            f"folded {len(self.folded)} of {len(self.folded) + len(self.kept)} BatchNorm layers; "
            f"largest relative difference {difference}; data flow from {self.traced}"
        ]
        return "\n".join(lines + [f"  kept {name}: {reason}" for name, reason in self.kept.items()])


class Fold(NamedTuple):
    """A BatchNorm and the layer before it to fold it into.

    ``copies`` says whether the module that replaces it must return a copy, see
    :func:`~torchboost.graph.surgery.may_collide`.
    """

    norm: nn.Module
    layer: nn.Module
    copies: bool = True


def fold_batch_norms(model: nn.Module, optimizer: Optimizer | None = None, *, sample: Any = None) -> FoldReport:
    """Fold every BatchNorm in eval mode into the convolution or linear layer before it, exactly and in place.

    A BatchNorm is folded if it is certain that in every call it is the only consumer of a layer's output; see
    :func:`plan_folds`. The scale is multiplied into the weight and the shift added to the bias
    (``w' = w g / sqrt(v + eps)``, ``b' = (b - m) g / sqrt(v + eps) + beta``, computed in float64). What a subclass of
    BatchNorm runs after the normalisation, such as a dropout and an activation, stays. The outputs before and after
    are compared; if they differ by more than rounding, everything is restored.

    Limits: arguments without a default are assumed to be tensors, and Python attributes that the forward reads are
    assumed not to change.

    Args:
        model: Changed in place. BatchNorms in training mode stay.
        optimizer: The parameters of folded layers are removed from it; new biases join the group of their weight.
        sample: Input for the trace and the comparison, of the kind that the model will be called with: the same
            arguments with the same number of dimensions. Without it only folds that hold for every kind of input are
            made, and the comparison uses a guessed input.

    Raises:
        TypeError: Not a module.
        IncompatibleError: The model is wrapped or sharded, or folding changed its outputs (the model is then restored).
        ValueError: The model does not run on ``sample``.
    """
    check_module(model)
    wrapper = wrapper_of(model)
    if wrapper is not None:
        raise IncompatibleError(f"found a model wrapped by {wrapper}; fold the bare model, then wrap it.")
    norms: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if isinstance(module, AnyBatchNorm)
    }
    if not norms:
        return FoldReport()
    flow = trace(model, sample=sample)
    planned = plan_folds(model, flow=flow, sample=sample)
    planned |= {norm: "it is in training mode; call model.eval() first" for norm in norms if norm.training}
    kept = {norms[norm]: found for norm, found in planned.items() if isinstance(found, str)}
    folds = [found for found in planned.values() if isinstance(found, Fold)]
    difference = fold_pairs(model, folds, optimizer=optimizer, sample=sample) if folds else None
    folded = tuple(norms[fold.norm] for fold in folds)
    return FoldReport(folded=folded, kept=kept, largest_difference=difference, traced=flow.traced)


def plan_folds(model: nn.Module, *, flow: Dataflow | None = None, sample: Any = None) -> dict[nn.Module, Fold | str]:
    """Return for every BatchNorm the layer that it can be folded into with certainty, or why there is none.

    In every call the norm must read the layer's output on the axis of the layer's channels, and nothing else may read
    it. A symbolic trace of a forward whose arguments have no defaults proves this for all tensors, if every decision by
    a value or a shape was followed both ways. Such a forward is searched from the outside inwards: first that of the
    model, then those of its parts, provided that the norm and the layer run inside it in the traced pass. If the model
    runs on ``sample`` or on a guessed input, that pass must show the same pair. After a linear layer the number of
    dimensions must also be certain, because the channels might be on another axis.

    Hooks, a ``forward`` set on an instance, parametrizations, shared weights, modules that run twice, and norms that
    plain attributes outside the module tree hold are refused.

    Args:
        model: Bare, in any mode; its forward in eval mode is examined. It is not changed.
        flow: Its data flow, if known.
        sample: Input of a forward pass: a tensor, a tuple or a dict. Every call is assumed to give the same arguments
            with the same number of dimensions.

    Returns:
        A fold or a reason for every BatchNorm, in the order of registration.

    Cost: a symbolic trace of the model or of parts of it, and a pass on ``sample`` or a guessed input.
    """
    flow = trace(model, sample=sample) if flow is None else flow
    proofs = _Proofs.of(model, flow, sample)
    shared, elsewhere = shared_weights(model), held_elsewhere(model)
    norms = [module for module in model.modules() if isinstance(module, AnyBatchNorm)]
    return {
        norm: f"{elsewhere[norm]} also holds it" if norm in elsewhere else _settled_fold(proofs, norm, shared)
        for norm in norms
    }


class _Region(NamedTuple):
    module: nn.Module
    paths: list[Dataflow]

    def holds(self, fold: Fold) -> bool:
        return any(path.calls(fold.norm) and path.calls(fold.layer) for path in self.paths)


class _Proofs(NamedTuple):
    """Known facts about the forward of a model.

    Args:
        seen: Passes of the whole model, traced or run.
        regions: Modules whose forward was traced for all tensors, with the data flow of every path.
        exemplary: Whether the number of dimensions in the recorded passes holds for every call.
    """

    seen: tuple[Dataflow, ...]
    regions: tuple[_Region, ...]
    exemplary: bool

    @classmethod
    def of(cls, model: nn.Module, flow: Dataflow, sample: Any) -> _Proofs:
        if flow.traced == "structure":
            return cls((flow,), (), False)
        ran = flow if flow.traced == "run" else trace_run(model, sample=sample)
        seen = (flow,) if ran is None or ran is flow else (flow, ran)
        return cls(seen, tuple(_regions(model, flow, sample)), sample is not None)


def _regions(module: nn.Module, flow: Dataflow, sample: Any) -> Iterator[_Region]:
    if not any(isinstance(inner, AnyBatchNorm) for inner in module.modules()):
        return
    if sample is not None or _has_fixed_arguments(module):
        is_root = any(node.running[:1] == (module,) for node in flow.nodes)
        paths = [flow] if flow.traced == "fx" and is_root else trace_all_paths(module, sample)
        if paths is not None:
            yield _Region(module, paths)
            return
    for child in module.children():
        yield from _regions(child, flow, None)


def _has_fixed_arguments(module: nn.Module) -> bool:
    """Whether every call of a forward gives the same arguments, so that one trace covers all calls."""
    if own_forward(module) is not None:
        return False
    arguments = list(inspect.signature(type(module).forward).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return all(a.kind in plain and a.default is a.empty for a in arguments)


def _settled_fold(proofs: _Proofs, norm: AnyBatchNorm, shared: set[Tensor]) -> Fold | str:
    obstacle = fold_obstacle(proofs.seen[0], norm, shared)
    if obstacle is not None:
        return obstacle
    found = Fold(norm, _layer_before(proofs.seen[0], norm))
    region = next((region for region in proofs.regions if region.holds(found)), None)
    if region is None:
        return (
            "a forward around it takes optional arguments or cannot be traced, so other calls may take another path; "
            "pass an input as sample="
        )
    paths = [path for path in region.paths if path.calls(norm) or path.calls(found.layer)]
    if any(_folded_into(path, norm, shared) is not found.layer for path in paths):
        return "the data flow around it depends on values or shapes"
    for seen in proofs.seen:
        call = next(iter(seen.calls(norm)), -1)
        if _folded_into(seen, norm, shared) is not found.layer or region.module not in seen.nodes[call].running:
            return "the data flow around it depends on how the model is called"
        if region.module not in seen.nodes[seen.calls(found.layer)[0]].running:
            return f"the {type(found.layer).__name__} next to it is called from elsewhere"
    if isinstance(found.layer, nn.Linear):
        certain = {path.nodes[path.calls(norm)[0]].rank for path in paths} == {2}
        shown = {seen.nodes[seen.calls(norm)[0]].rank for seen in proofs.seen if proofs.exemplary}
        if not certain and 2 not in shown:
            return (
                "whether it normalises the features of the linear layer depends on the number of dimensions; flatten "
                "the input of the layer, or pass an input as sample="
            )
    return found._replace(copies=any(may_collide(path, path.calls(norm)[0]) for path in (*paths, *proofs.seen)))


def _layer_before(flow: Dataflow, norm: AnyBatchNorm) -> nn.Module:
    layer = flow.nodes[flow.nodes[flow.calls(norm)[0]].inputs[0]].module
    assert layer is not None
    return layer


def _folded_into(flow: Dataflow, norm: AnyBatchNorm, shared: set[Tensor]) -> nn.Module | None:
    """Return the layer that a norm can be folded into in one data flow."""
    return _layer_before(flow, norm) if fold_obstacle(flow, norm, shared) is None else None


def shared_weights(model: nn.Module) -> set[Tensor]:
    """Return the parameters that more than one module holds."""
    owners = Counter(p for module in model.modules() for p in parameter_slots(module).values() if p is not None)
    return {parameter for parameter, count in owners.items() if count > 1}


def fold_obstacle(flow: Dataflow, norm: AnyBatchNorm, shared: set[Tensor]) -> str | None:
    """Return why a BatchNorm cannot be folded into the layer before it in this data flow; None if it can."""
    obstacle = _norm_obstacle(flow, norm)
    if obstacle is not None:
        return obstacle
    node = flow.nodes[flow.calls(norm)[0]]
    before = flow.nodes[node.inputs[0]] if len(node.inputs) == 1 else None
    if before is None or not isinstance(before.module, WEIGHTED):
        return "no convolution or linear layer directly before it"
    if flow.consumers[before.index] != (node.index,):
        return f"the output of {before.label} is also used elsewhere"
    return _layer_obstacle(flow, before.module, norm.num_features, shared)


def _norm_obstacle(flow: Dataflow, norm: AnyBatchNorm) -> str | None:
    calls = flow.calls(norm)
    if flow.traced == "structure":
        return "the data flow could not be traced; pass an input as sample="
    if norm_tail(norm) is None:
        return f"{type(norm).__name__} has its own forward, or hooks"
    if norm.running_mean is None or norm.running_var is None:
        return "it keeps no running statistics"
    if len(calls) != 1:
        return f"it is used {len(calls)} times" if calls else "the traced pass does not reach it"
    return None


def _layer_obstacle(flow: Dataflow, layer: nn.Module, width: int, shared: set[Tensor]) -> str | None:
    if len(flow.calls(layer)) != 1:
        return f"the {type(layer).__name__} next to it is used {len(flow.calls(layer))} times"
    weight = parameter_slots(layer).get("weight")
    if not _computes_as_torch(layer) or weight is None:
        return f"the {type(layer).__name__} next to it recomputes its weight or has its own forward"
    if is_customised(layer):
        return f"the {type(layer).__name__} next to it has hooks, or a forward set on the instance"
    if weight in shared or parameter_slots(layer).get("bias") in shared:
        return f"the {type(layer).__name__} next to it shares its weight with another layer"
    channels = layer.out_channels if isinstance(layer, AnyConv) else layer.out_features
    return None if channels == width else f"it normalises {width} channels, the layer before it has {channels}"


def _computes_as_torch(layer: nn.Module) -> bool:
    if type(layer).forward not in _STOCK_FORWARDS:
        return False
    inner = conv_forward(layer)
    return inner is None or inner in _STOCK_FORWARDS


def fold_pairs(
    model: nn.Module, folds: Sequence[Fold], *, optimizer: Optimizer | None = None, sample: Any = None
) -> float | None:
    """Fold the given pairs and compare the outputs in eval mode; restore everything if they differ or on an error.

    Returns:
        The largest difference relative to the largest output, or None if the model could not be run.

    Raises:
        IncompatibleError: The outputs differ by more than rounding; the model was restored.
        ValueError: The model does not run on ``sample``, or computes NaN or infinities.
    """
    try:
        run = runnable(model, sample)
    except ReachesOriginal:
        run = None
    before = evaluate(*run) if run is not None else []
    if any(bool(outputs.isnan().any()) for outputs in before) or (before and not any(map(_finite, before))):
        raise ValueError("the model computes NaN or infinities, as after a divergence; no BatchNorm was changed.")
    layers = dict.fromkeys(fold.layer for fold in folds)
    held = [(layer, parameter_slots(layer)["weight"], parameter_slots(layer)["bias"]) for layer in layers]
    inside = set(model.parameters())
    written = [parameter for _, *parameters in held for parameter in parameters if parameter is not None]
    with undone_on_error(model, optimizer, written=written):
        for fold in folds:  # before a layer gets a bias
            put_removed_norm(model, fold.norm, copies=fold.copies, layer=fold.layer)
        for fold in folds:
            _fold(fold)
        hide_biases(model)
        difference = largest_difference(before, evaluate(*run)) if run is not None else None
        if difference is not None and not difference <= _tolerance(model):
            raise IncompatibleError(
                f"folding BatchNorm changed the outputs by {difference:.1e} (relative), so the data flow is not what "
                "the trace shows; the model was restored. Pass an input that takes the usual path as sample=."
            )
        if optimizer is not None:
            added = [
                (layer.bias, weight, "bias")
                for layer, weight, bias in held
                if bias is None and isinstance(layer.bias, Parameter) and isinstance(weight, Parameter)
            ]
            rebind_optimizer(optimizer, removed=inside - set(model.parameters()), added=added)
    return difference


@torch.no_grad()
def _fold(fold: Fold) -> None:
    _set(fold.layer, *fused_weights(fold.layer, parameter_slots(fold.layer)["bias"], _statistics(fold.norm)))


def _statistics(norm: nn.Module) -> Statistics:
    assert isinstance(norm, AnyBatchNorm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return Statistics(norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)


def _set(layer: nn.Module, weight: Tensor, bias: Tensor) -> None:
    """Write the computed weight and bias; if a conversion fails, nothing is changed."""
    old_weight, old_bias = parameter_slots(layer)["weight"], parameter_slots(layer)["bias"]
    assert old_weight is not None
    if old_bias is None:
        parameter_slots(layer)["bias"] = Parameter(bias.to(old_weight.dtype), requires_grad=old_weight.requires_grad)
    else:
        old_bias.copy_(bias)
    old_weight.copy_(weight)


def largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest change of an output, relative to the largest output; infinite if they cannot be compared.

    Infinities, such as those of masks, must be at the same positions.
    """
    if [(a.shape, a.dtype) for a in before] != [(b.shape, b.dtype) for b in after]:
        return math.inf
    largest = change = 0.0
    for a, b in zip(before, after, strict=True):
        finite = torch.isfinite(a)
        if not torch.equal(a[~finite], b[~finite]) or not bool(torch.isfinite(b[finite]).all()):
            return math.inf
        if bool(finite.any()):
            largest = max(largest, float(a[finite].abs().max()))
            change = max(change, float((a[finite].double() - b[finite].double()).abs().max()))
    return change / largest if largest else change


def _finite(outputs: Tensor) -> bool:
    return bool(torch.isfinite(outputs).any())


def _tolerance(model: nn.Module) -> float:
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max([1e-3, *(64 * torch.finfo(kind).eps for kind in kinds)])
