"""Fold BatchNorm into the adjacent layer, so that the network computes the same in eval mode with fewer operations."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from torchboost.core.arguments import check_module
from torchboost.core.forward import own_forward
from torchboost.core.torch_private import AnyBatchNorm, AnyConv, conv_forward, parameter_slots
from torchboost.core.wrapping import wrapper_of
from torchboost.errors import IncompatibleError
from torchboost.graph.flow import Dataflow
from torchboost.graph.norms import WEIGHTED, is_customised, why_unknown
from torchboost.graph.removed_norm import fused_weights, put_removed_norm
from torchboost.graph.surgery import changing, held_elsewhere
from torchboost.graph.trace import evaluate, first_run, record_run, trace, trace_paths

_Region = tuple[nn.Module, list[Dataflow]]

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
            output. None if nothing was folded or the network could not be run on ``sample`` or a guessed input.
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


def fold_batch_norms(model: nn.Module, optimizer: Optimizer | None = None, *, sample: Any = None) -> FoldReport:
    """Fold every BatchNorm in eval mode into the convolution or linear layer before it, exactly and in place.

    A BatchNorm is folded if it is certain that in every call it is the only consumer of a layer's output. See
    :func:`plan_folds`. The scale is multiplied into the weight and the shift added to the bias
    (``w' = w g / sqrt(v + eps)``, ``b' = (b - m) g / sqrt(v + eps) + beta``, computed in float64). Modules that a
    subclass of BatchNorm runs after the normalisation, such as a dropout and an activation, are kept. The outputs
    before and after are compared. If they differ by more than rounding, everything is restored.

    Limits: arguments without a default are assumed to be tensors, and Python attributes that the forward reads are
    assumed not to change.

    Args:
        model: Changed in place. BatchNorms in training mode are kept.
        optimizer: The parameters of folded layers are removed from it. New biases join the group of their weight.
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
    norms: dict[nn.Module, str] = {m: name for name, m in model.named_modules() if isinstance(m, AnyBatchNorm)}
    if not norms:
        return FoldReport()
    flow = trace(model, sample=sample)
    plan = plan_folds(model, flow=flow, sample=sample)
    plan |= {norm: "it is in training mode; call model.eval() first" for norm in norms if norm.training}
    folds = {norm: layer for norm, layer in plan.items() if isinstance(layer, nn.Module)}
    return FoldReport(
        folded=tuple(norms[norm] for norm in folds),
        kept={norms[norm]: reason for norm, reason in plan.items() if isinstance(reason, str)},
        largest_difference=fold_pairs(model, folds, sample, () if optimizer is None else (optimizer,)),
        traced=flow.traced,
    )


def plan_folds(model: nn.Module, *, flow: Dataflow, sample: Any = None) -> dict[nn.Module, nn.Module | str]:
    """Return for every BatchNorm the layer that it can be folded into with certainty, or why there is none.

    In every call the norm must read the layer's output on the axis of the layer's channels, and nothing else may read
    it. A symbolic trace of a forward whose arguments have no defaults proves this for all tensors, if every decision by
    a value or a shape was followed both ways. Such a forward is searched from the outside inwards: first the model's,
    then the forwards of its parts, provided that the norm and the layer run inside it in the traced pass. If the model
    runs on ``sample`` or on a guessed input, that pass must show the same pair. After a linear layer it must also show
    two dimensions, as the channels might be on another axis. Without ``sample``, a convolution or a flattening that
    fixes their number must come before.

    Hooks, a ``forward`` set on an instance, parametrizations, shared weights, modules that run twice, and norms that
    plain attributes outside the module tree hold are refused. Limits: those of :func:`fold_batch_norms`.

    Args:
        model: Bare, in any mode. Its forward in eval mode is examined. It is not changed.
        flow: Its data flow.
        sample: Input of a forward pass: a tensor, a tuple or a dict. Every call is assumed to give the same arguments
            with the same number of dimensions.

    Returns:
        A layer or a reason for every BatchNorm, in the order of registration.

    Cost: a symbolic trace of each part that is not certain in ``flow``, and a pass on ``sample`` or a guessed input.
    """
    norms = [module for module in model.modules() if isinstance(module, AnyBatchNorm)]
    passes, regions = [flow], []
    if flow.traced != "structure":
        ran = None if flow.traced == "run" else first_run(model, sample, record_run)
        passes += [] if ran is None else [ran]
        regions = list(_regions(model, flow, sample))
    shared, elsewhere = shared_weights(model), held_elsewhere(model)
    return {
        norm: f"{elsewhere[norm]} also holds it"
        if norm in elsewhere
        else _fold_of(norm, passes, regions, shared, exemplary=sample is not None)
        for norm in norms
    }


def _regions(module: nn.Module, flow: Dataflow, sample: Any) -> Iterator[_Region]:
    """Yield the modules whose forward was traced for all tensors, and the data flow of every path through it."""
    if not any(isinstance(inner, AnyBatchNorm) for inner in module.modules()):
        return
    if sample is not None or _has_fixed_arguments(module):
        is_root = any(node.running[:1] == (module,) for node in flow.nodes)
        paths = [flow] if flow.traced == "fx" and is_root else trace_paths(module, sample)
        if paths is not None:
            yield module, paths
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


def _fold_of(
    norm: AnyBatchNorm, passes: list[Dataflow], regions: list[_Region], shared: set[Tensor], *, exemplary: bool
) -> nn.Module | str:
    """Return the layer to fold a norm into. ``exemplary``: every call has the dimensions of the passes."""
    layer = _layer_before(passes[0], norm, shared)
    if isinstance(layer, str):
        return layer
    around = (one for one in regions if any(path.calls(norm) and path.calls(layer) for path in one[1]))
    region, paths = next(around, (None, []))
    if region is None:
        return (
            "a forward around it takes optional arguments or cannot be traced, so other calls may take another path; "
            "pass an input as sample="
        )
    paths = [path for path in paths if path.calls(norm) or path.calls(layer)]
    if any(_layer_before(path, norm, shared) is not layer for path in paths):
        return "the data flow around it depends on values or shapes"
    calls = [one.nodes[one.calls(norm)[0]] for one in passes if one.calls(norm)]
    if any(_layer_before(one, norm, shared) is not layer for one in passes) or any(
        region not in node.running for node in calls
    ):
        return "the data flow around it depends on how the model is called"
    if any(region not in one.nodes[one.calls(layer)[0]].running for one in passes):
        return f"the {type(layer).__name__} next to it is called from elsewhere"
    flat = any(node.flat for node in calls)  # in the pass that was run
    if isinstance(layer, nn.Linear) and not (flat and (exemplary or _has_fixed_shape(passes, norm))):
        return (
            "whether it normalises the features of the linear layer depends on the number of dimensions; flatten "
            "the input of the layer, or pass an input as sample="
        )
    return layer


def _has_fixed_shape(passes: list[Dataflow], norm: AnyBatchNorm) -> bool:
    """Whether a convolution or a flattening before a norm fixes its number of dimensions, whatever the input has."""
    before = (node for one in passes for node in one.before(one.calls(norm)[0]))
    return any(
        isinstance(node.module, (AnyConv, nn.Flatten)) or (node.module is None and node.label == "flatten")
        for node in before
    )


def shared_weights(model: nn.Module) -> set[Tensor]:
    """Return the parameters that more than one module holds."""
    owners = Counter(p for module in model.modules() for p in parameter_slots(module).values() if p is not None)
    return {parameter for parameter, count in owners.items() if count > 1}


def _layer_before(flow: Dataflow, norm: AnyBatchNorm, shared: set[Tensor]) -> nn.Module | str:
    """Return the layer before a BatchNorm in this data flow, into which it can be folded, or why it cannot."""
    if (reason := why_unknown(flow, norm)) is not None:
        return reason
    node = flow.nodes[flow.calls(norm)[0]]
    before = flow.nodes[node.inputs[0]] if len(node.inputs) == 1 else None
    layer = None if before is None else before.module
    if before is None or not isinstance(layer, WEIGHTED):
        return "no convolution or linear layer directly before it"
    if flow.consumers[before.index] != (node.index,):
        return f"the output of {before.label} is also used elsewhere"
    neighbour = f"the {type(layer).__name__} next to it"
    if len(flow.calls(layer)) != 1:
        return f"{neighbour} is used {len(flow.calls(layer))} times"
    weight, inner = parameter_slots(layer).get("weight"), conv_forward(layer)
    if type(layer).forward not in _STOCK_FORWARDS or inner not in (None, *_STOCK_FORWARDS) or weight is None:
        return f"{neighbour} recomputes its weight or has its own forward"
    if is_customised(layer):
        return f"{neighbour} has hooks, or a forward set on the instance"
    if weight in shared or parameter_slots(layer).get("bias") in shared:
        return f"{neighbour} shares its weight with another layer"
    channels = layer.out_channels if isinstance(layer, AnyConv) else layer.out_features
    if channels != norm.num_features:
        return f"it normalises {norm.num_features} channels, the layer before it has {channels}"
    return layer


def fold_pairs(
    model: nn.Module, folds: Mapping[Any, nn.Module], sample: Any = None, optimizers: Sequence[Optimizer] = ()
) -> float | None:
    """Fold each BatchNorm into its layer and compare the outputs in eval mode.

    If they differ, or on an error, everything is restored. Arguments are as in :func:`fold_batch_norms`.

    Returns:
        The largest difference relative to the largest output, or None if the model could not be run.

    Raises:
        IncompatibleError: The outputs differ by more than rounding. The model was restored.
        ValueError: The model does not run on ``sample``, or computes NaN or infinities.
    """
    if not folds:
        return None
    run = first_run(model, sample, lambda network, given: (network, given, evaluate(network, given)))
    network, given, before = run or (model, sample, [])
    if any(bool(one.isnan().any()) for one in before) or (before and not any(one.isfinite().any() for one in before)):
        raise ValueError("the model computes NaN or infinities, as after a divergence; no BatchNorm was changed.")
    slots = [parameter_slots(layer) for layer in folds.values()]
    written = [parameter for held in slots for parameter in held.values() if parameter is not None]
    with changing(model, optimizers, written=written):
        # A removed norm must know whether its layer had a bias, so all are put in before a layer gets one.
        removed = [put_removed_norm(model, norm, copies=False, layer=layer) for norm, layer in folds.items()]
        for (norm, layer), stand_in in zip(folds.items(), removed, strict=True):
            _fold(norm, layer)
            stand_in.hide_bias()
        difference = None if run is None else largest_difference(before, evaluate(network, given))
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if difference is not None and not difference <= max([1e-3, *(64 * torch.finfo(kind).eps for kind in kinds)]):
            raise IncompatibleError(
                f"folding BatchNorm changed the outputs by {difference:.1e} (relative), so the data flow is not what "
                "the trace shows; the model was restored. Pass an input that takes the usual path as sample=."
            )
    return difference


@torch.no_grad()
def _fold(norm: Any, layer: nn.Module) -> None:
    slots = parameter_slots(layer)
    weight, bias = slots["weight"], slots["bias"]
    assert weight is not None
    new_weight, new_bias = fused_weights(
        layer, bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    if bias is None:
        slots["bias"] = Parameter(new_bias.to(weight.dtype), requires_grad=weight.requires_grad)
    else:
        bias.copy_(new_bias)
    weight.copy_(new_weight)


def largest_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the largest change of an output, relative to the largest output, infinite if they cannot be compared.

    Infinities, such as in masks, must be at the same positions.
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
