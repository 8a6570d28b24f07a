"""Remove the BatchNorm layers that are not needed."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Traits
from torchboost.core.arguments import check_module
from torchboost.core.torch_private import AnyBatchNorm, parameter_slots
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError, warn_no_effect
from torchboost.graph.copies import copies_of
from torchboost.graph.flow import Dataflow
from torchboost.graph.folding import fold_pairs, plan_folds, shared_weights
from torchboost.graph.norms import (
    WEIGHTED,
    NormalizedLinear,
    ResidualBlock,
    is_customised,
    plain_stacks,
    rescale_layers,
    residual_blocks,
    was_trained,
    why_unknown,
)
from torchboost.graph.removed_norm import RemovedNorm, put_removed_norm
from torchboost.graph.surgery import (
    averages_of,
    changing,
    held_elsewhere,
    need_copies,
    optimizers_holding,
    replace_module,
)
from torchboost.graph.trace import trace
from torchboost.optim.rules.base import UpdateRule
from torchboost.optim.rules.muon import Muon

Keep = Literal["last", "narrowest"]
Init = Literal["unit_variance", "keep"]
_MOST_IN_BRANCH = 3
"""BatchNorms in a residual branch. One of so many was shown to suffice, in basic and in bottleneck blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LessBnReport:
    """The findings and changes of :func:`less_bn`. Printing it gives a table.

    Args:
        found: Names of all BatchNorm layers, in the order of the forward pass.
        removed: Names of the layers that are gone.
        kept: Name of every other one -> why it was kept.
        folded: Whether the network was trained before, so that removed layers live on in the weights next to them.
        rescaled: Names of layers whose weights were rescaled because their BatchNorm is gone (from scratch only).
        head: Name of the linear layer that was replaced by a normalised one, or None if none was.
        largest_difference: Of the outputs in eval mode before and after folding, relative to the largest output (before
            the head is replaced). None if nothing was folded or the network could not be run.
        traced: How the data flow was found: ``"fx"``, ``"run"``, ``"structure"`` (not at all), or ``"-"``.
    """

    found: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    folded: bool = False
    rescaled: tuple[str, ...] = ()
    head: str | None = None
    largest_difference: float | None = None
    traced: str = "-"

    def __str__(self) -> str:
        fate = "folded into the layer before" if self.folded else "identity"
        width = max((len(name) for name in self.found), default=0)
        lines = [f"{len(self.removed)} of {len(self.found)} BatchNorm layers removed (data flow: {self.traced})"]
        lines += [
            f"  {name:<{width}}  " + (f"removed: {fate}" if name in self.removed else f"kept: {self.kept[name]}")
            for name in self.found
        ]
        if self.rescaled:
            lines.append(f"  {len(self.rescaled)} layers rescaled to unit variance")
        if self.head is not None:
            lines.append(f"  {self.head}: normalised head")
        if self.largest_difference is not None:
            lines.append(f"  largest relative difference of the outputs in eval mode: {self.largest_difference:.1e}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class LessBn(Algorithm):
    """Train with fewer BatchNorm layers: only one of every residual branch is kept, and the stem's.

    See :func:`less_bn`, which does the work, for mechanism and cost.

    Args:
        normalize_head: Replace the last linear layer of the forward pass by
            :class:`~torchboost.graph.norms.NormalizedLinear`, which keeps its parameters.
        keep: Which BatchNorm of a residual branch is kept. ``"narrowest"``: the one over the fewest channels (of
            several the last), in a bottleneck a quarter of the cost of the last one. The branch then ends without one,
            see ``blocks_per_norm`` for how it starts. ``"last"``, as in MindSpore: the one right before the addition,
            in pre-activation blocks the one before the last convolution.
        keep_shortcut: Keep the BatchNorms of the shortcuts.
        keep_every: In plain stacks, keep one of every ``keep_every``. 1 keeps all of them, all of the inverted
            residuals without skip, and all of a residual branch with more than 3, which is a stack inside a skip.
        blocks_per_norm: Above 1, only one of so many consecutive residual blocks keeps its BatchNorm. Blocks with a
            projection and the last block keep theirs. In untrained networks a branch that no longer ends in one starts
            at ``1 / sqrt(number of residual blocks)`` of unit scale.
        init: ``"unit_variance"`` rescales the layers that lose their BatchNorm in an untrained network. ``"keep"`` does
            not change the weights.
        head_multiplier: Start value of the normalised head's trainable factor.
    """

    name: ClassVar[str] = "less_bn"
    traits: ClassVar[Traits] = Traits(order=10, each_optimizer=True)

    normalize_head: bool = False
    keep: Keep = "narrowest"
    keep_shortcut: bool = False
    keep_every: int = 2
    blocks_per_norm: int = 1
    init: Init = "unit_variance"
    head_multiplier: float = 1.0

    def __post_init__(self) -> None:
        for name in ("keep_every", "blocks_per_norm"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}; 1 is the mildest setting.")
        if not 0 < self.head_multiplier < math.inf:
            raise ValueError(f"head_multiplier must be a number above 0, found {self.head_multiplier}; 1.0 is usual.")
        for name, kind in (("keep", Keep), ("init", Init)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}; found {getattr(self, name)!r}.")

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain why nothing would be removed, or return None if something would be."""
        if not any(isinstance(module, AnyBatchNorm) for module in model.modules()) and not self.normalize_head:
            return "the model has no BatchNorm"
        if self.needs_transform(model):
            return None
        if self.keep_every == 1 and not self.applied(model):
            return "no BatchNorm of the model can go: its residual blocks, if any, need theirs, and others stay"
        return "the model has no BatchNorm left that can go"

    def applied(self, model: nn.Module) -> bool:
        """Whether a layer was removed from the model, or its head normalised."""
        return any(isinstance(module, (RemovedNorm, NormalizedLinear)) for module in model.modules())

    def needs_transform(self, model: nn.Module) -> bool:
        """Whether a layer can still be removed or the head is still to be normalised.

        Traces the bare model, inside a wrapper too. One that is sharded or compiled in place cannot be run for that: it
        counts as done if something was removed from it.
        """
        inner = unwrap(model)
        if wrapper_of(inner) is None:
            return _plan(inner, self, None).changes
        return not self.applied(inner) and any(isinstance(m, AnyBatchNorm) for m in inner.modules())

    def transform(self, model: nn.Module, optimizer: Optimizer | None = None, *others: Optimizer) -> None:
        """Remove the BatchNorms. See :func:`less_bn` for errors and warnings."""
        _check(model)
        _reduce(model, [one for one in (optimizer, *others) if one is not None], self, None)


def less_bn(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    normalize_head: bool = False,
    keep: Keep = "narrowest",
    keep_shortcut: bool = False,
    keep_every: int = 2,
    blocks_per_norm: int = 1,
    init: Init = "unit_variance",
    head_multiplier: float = 1.0,
    sample: Any = None,
    dry_run: bool = False,
) -> LessBnReport:
    """Remove, in place, the BatchNorm layers that are not needed, so that every step costs less.

    The data flow is traced. These are kept: in every residual block the BatchNorm of the main branch over the fewest
    channels, the network's first one, the last one of an inverted residual without skip, in plain stacks one of every
    ``keep_every`` convolutions, counted from the end, and those not directly behind a convolution or linear layer.

    In an untrained network (all statistics and counters at their initial values) a removed layer becomes the identity
    and the weights in front, which are not drawn again, are scaled by one number per layer so that activations keep
    unit variance: ``mean_filter(sum w^2) E[x^2] = 1``, where ``E[x^2]`` is followed through the graph (half behind a
    ReLU, one behind a BatchNorm, a sum behind an addition). In a trained network the removed layer's statistics and
    affine are folded into the weights in front. Its output in eval mode is unchanged, and the largest difference is
    measured. A BatchNorm that cannot be folded is kept.

    Cost: one trace, and three forward passes in trained networks. Limits: a fold is exact in eval mode only. Training
    on continues without batch statistics, so use a lower learning rate. Optimizer checkpoints from before no
    longer fit.

    Args:
        model: A bare module, in training or eval mode. The mode is kept.
        optimizer: Forgets the parameters that are gone. New ones (biases, the head's factor) join the group of
            the weight they belong to. Needed if it was made before this call.
        normalize_head: Normalise the last linear layer. See :class:`LessBn` for this and the next six.
        keep: Which BatchNorm of a residual branch is kept.
        keep_shortcut: Keep the BatchNorms of the shortcuts.
        keep_every: In plain stacks, keep one of so many.
        blocks_per_norm: Keep a BatchNorm in one of so many residual blocks only.
        init: Treatment of the weights of an untrained network.
        head_multiplier: Start value of the head's trainable factor.
        sample: Input of a forward pass (tensor, tuple or dict), guessed from the first layer if missing.
        dry_run: Change nothing (work on a copy) and return the report.

    Returns:
        The layers that were found, removed and kept, and why.

    Raises:
        TypeError: Not a module.
        ValueError: A setting out of range, or the model does not run on ``sample``.
        IncompatibleError: The model is wrapped, sharded or compiled, folding changed its outputs, or the rule of
            ``optimizer`` cannot follow: Muon for the weight of a layer that gets a vector, or a schedule-free rule or
            FTRL with a state.

    After any error, and after an interrupt, model and optimizer are as they were.

    Warns:
        NoEffectWarning: There was nothing to do, or there are new parameters, ``optimizer`` was not given, and one
            that exists does not train them.
        UserWarning: An ``AveragedModel`` that was made before averages this model, or one of the same shapes.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        ...     torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        ...     torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        ... )
        >>> torchboost.less_bn(model).removed
        ('4',)
    """
    settings = LessBn(
        normalize_head=normalize_head,
        keep=keep,
        keep_shortcut=keep_shortcut,
        keep_every=keep_every,
        blocks_per_norm=blocks_per_norm,
        init=init,
        head_multiplier=head_multiplier,
    )
    _check(model)
    if dry_run:
        with copies_of(model):
            return _reduce(copy.deepcopy(model), [], settings, sample, dry_run=True)
    return _reduce(model, [] if optimizer is None else [optimizer], settings, sample)


class _Plan(NamedTuple):
    """The changes to make."""

    flow: Dataflow  # empty if there is nothing to look for
    names: dict[nn.Module, str]  # of all modules, BatchNorms first, in the order in which they run
    kept: dict[nn.Module, str]  # BatchNorms, and why
    removed: list[AnyBatchNorm]  # the others
    folds: Mapping[nn.Module, nn.Module | str]  # in a trained network: the layer that takes each in, or why none does
    bare_ends: dict[int, float]  # last layers of branches whose sum is not normalised any more: initial variance
    head: nn.Linear | None  # to replace by a normalised one

    @property
    def changes(self) -> bool:
        return bool(self.removed) or self.head is not None


def _reduce(
    model: nn.Module, optimizers: Sequence[Optimizer], settings: LessBn, sample: Any, *, dry_run: bool = False
) -> LessBnReport:
    plan = _plan(model, settings, sample)
    rescaled: tuple[str, ...] = ()
    difference = None
    if not plan.changes:
        also = " and no linear layer to normalise" if settings.normalize_head else ""
        warn_no_effect(f"less_bn: found no BatchNorm that can go{also}; nothing was changed.", above=2)
    else:
        before = set(model.parameters())
        averages = [] if dry_run else averages_of(model)
        _check_optimizers(optimizers, plan)
        with changing(model, optimizers, written=_in_front(plan)):
            if plan.folds:
                folds = {norm: layer for norm in plan.removed if isinstance(layer := plan.folds[norm], nn.Module)}
                difference = fold_pairs(model, folds, sample)
            else:
                rescaled = _drop(model, plan, settings)
            if plan.head is not None:
                replace_module(model, plan.head, NormalizedLinear(plan.head, settings.head_multiplier))
            _tell_others(model, before, bool(optimizers), averages)
    return LessBnReport(
        found=tuple(name for module, name in plan.names.items() if isinstance(module, AnyBatchNorm)),
        removed=tuple(plan.names[norm] for norm in plan.removed),
        kept={plan.names[norm]: reason for norm, reason in plan.kept.items()},
        folded=bool(plan.folds and plan.removed),
        rescaled=rescaled,
        head=None if plan.head is None else plan.names[plan.head],
        largest_difference=difference,
        traced=plan.flow.traced,
    )


def _check_optimizers(optimizers: Sequence[Optimizer], plan: _Plan) -> None:
    """Refuse a rule that computes the weights from its state, and Muon for a weight whose layer gets a vector."""
    written = _in_front(plan)
    layers = [layer for norm in plan.removed if isinstance(layer := plan.folds.get(norm), nn.Module)]
    growing = [layer for layer in layers if parameter_slots(layer).get("bias") is None]
    joined = {parameter_slots(layer).get("weight") for layer in (*growing, plan.head) if layer is not None}
    for one in optimizers:
        for group in one.param_groups:
            rule = one.rule_for(group) if isinstance(one, UpdateRule) else one
            reason = ""
            if isinstance(rule, UpdateRule) and rule.keeps_weights and any(one.state.get(p) for p in written):
                reason = f"{type(rule).__name__} computes the weights from its state, which is of those before"
            elif isinstance(rule, (Muon, torch.optim.Muon)) and not joined.isdisjoint(group["params"]):
                reason = "Muon trains matrices alone, and a layer of one gets a new vector"
            if reason:
                raise IncompatibleError(f"less_bn: {reason}; call it before the optimizer is built.")


def _in_front(plan: _Plan) -> list[Tensor]:
    """The parameters of the layers that absorb the BatchNorms after them."""
    nodes, calls = plan.flow.nodes, plan.flow.calls
    layers = dict.fromkeys(nodes[nodes[calls(norm)[0]].inputs[0]].module for norm in plan.removed)
    weighted = [layer for layer in layers if isinstance(layer, WEIGHTED)]
    return [parameter for layer in weighted for parameter in parameter_slots(layer).values() if parameter is not None]


def _tell_others(model: nn.Module, before: set[nn.Parameter], given: bool, averages: Collection[nn.Module]) -> None:
    """Warn about an optimizer that does not train new parameters, and an average that pairs them wrongly."""
    new = [name for name, parameter in model.named_parameters() if parameter not in before]
    if not given and new and optimizers_holding(before):
        names = ", ".join(new[:3]) + (", ..." if len(new) > 3 else "")
        warn_no_effect(
            f"less_bn: the existing optimizer of this model does not hold its new parameters ({names}), so they will "
            "not train; pass optimizer=, or create the optimizer after this call.",
            above=3,
        )
    after = set(model.parameters())
    if averages and before != after:
        warnings.warn(
            f"less_bn: found an AveragedModel over a {type(model).__name__} with the {len(before)} parameters that "
            f"this one had, and this one now has {len(after)}. If it averages this model, make it after this change: "
            "update_parameters pairs the parameters by position, so it would fail, or average wrong ones.",
            UserWarning,
            4,
        )


def _check(model: nn.Module) -> None:
    check_module(model)
    wrapper = wrapper_of(model)
    if wrapper is not None:
        raise IncompatibleError(
            f"less_bn changes the modules of the model, but it is already wrapped by {wrapper}; call "
            "less_bn (or plan.transform) on the bare model before wrapping."
        )


def _plan(model: nn.Module, settings: LessBn, sample: Any) -> _Plan:
    """Decide everything and change nothing."""
    names = {module: name for name, module in model.named_modules()}
    norms = [module for module in names if isinstance(module, AnyBatchNorm)]
    searched = norms or (settings.normalize_head and any(isinstance(module, nn.Linear) for module in names))
    flow = trace(model, sample=sample) if searched else Dataflow("-")
    norms.sort(key=lambda norm: next(iter(flow.calls(norm)), len(flow.nodes)))
    names = {m: names[m] for m in norms} | names
    blocks = residual_blocks(flow)
    reasons = _reasons(flow, blocks, settings)
    folds = plan_folds(model, flow=flow, sample=sample) if was_trained(model) else {}
    elsewhere = held_elsewhere(model)
    kept: dict[nn.Module, str] = {}
    removed: list[AnyBatchNorm] = []
    for norm in norms:
        reason = f"{elsewhere[norm]} also holds it" if norm in elsewhere else _reason(flow, norm, reasons)
        if reason is None and isinstance(fold := folds.get(norm), str):
            reason = fold
        if reason is None and norm is not model:
            removed.append(norm)
        else:
            kept[norm] = reason or "it is the model itself"
    gone = {flow.calls(norm)[0] for norm in removed}
    bare_ends = {
        layers[-1]: 1 / len(blocks)
        for block in blocks
        for layers, norms in zip(block.mains, block.norms, strict=True)
        if norms and (gone.issuperset(norms) or (norms[-1] in gone and norms[-1] > layers[-1]))
    }
    head = _head(flow, model, elsewhere) if settings.normalize_head else None
    return _Plan(flow, names, kept, removed, folds, bare_ends, head)


def _reason(flow: Dataflow, norm: AnyBatchNorm, reasons: Mapping[int, str | None]) -> str | None:
    """Return why a BatchNorm is kept, by its own properties first, then its position, or None if it is removed."""
    if (reason := why_unknown(flow, norm)) is not None:
        return reason
    return reasons.get(flow.calls(norm)[0], "not directly after a convolution or linear layer")


def _reasons(flow: Dataflow, blocks: list[ResidualBlock], settings: LessBn) -> dict[int, str | None]:
    """Return for every BatchNorm node in a block or stack why it is needed, or None if it is not."""
    every = settings.keep_every
    reasons = _reasons_in_blocks(flow, blocks, settings)
    first = next((node.index for node in flow.instances(AnyBatchNorm)), None)
    stem = None if first in reasons else first
    for norms, linear_end in plain_stacks(flow, blocks):
        last = max((at for at, norm in enumerate(norms) if norm is not None), default=0)
        for at, norm in enumerate(norms):
            if norm is None:
                continue
            reasons[norm] = None
            if at == last:
                reasons[norm] = "the last of a block without skip" if linear_end else "the last of its run"
            elif (every == 1 or not linear_end) and (last - at) % every == 0:
                reasons[norm] = "in a plain stack" if every == 1 else f"one of every {every} in a plain stack"
    if stem is not None:
        reasons[stem] = "the first of the network"
    return reasons


def _reasons_in_blocks(flow: Dataflow, blocks: list[ResidualBlock], settings: LessBn) -> dict[int, str | None]:
    def width(norm: int) -> int:
        module: Any = flow.nodes[norm].module
        return module.num_features

    most = _MOST_IN_BRANCH if settings.keep_every == 1 else len(flow.nodes)
    in_shortcut = "in a shortcut (keep_shortcut)" if settings.keep_shortcut else None
    reasons: dict[int, str | None] = {}
    since = 0
    for block in blocks:
        since += 1
        due = since >= settings.blocks_per_norm or block.projects or block is blocks[-1]
        since = 0 if due else since
        for norms in block.norms:
            long = len(norms) > most
            reasons |= dict.fromkeys(norms, f"in a branch of more than {most}, a stack inside a skip" if long else None)
            if due and norms and not long:
                stays = norms[-1] if settings.keep == "last" else min(reversed(norms), key=width)
                reasons[stays] = f"the {settings.keep} of its residual branch"
        reasons |= dict.fromkeys(block.shortcut_norms, in_shortcut)
    return reasons


def _head(flow: Dataflow, model: nn.Module, elsewhere: Mapping[nn.Module, str]) -> nn.Linear | None:
    """The last linear layer of the forward pass, if it can be replaced by a normalised one."""
    layers = flow.instances((nn.Linear, NormalizedLinear))
    last = layers[-1].module if layers else None
    if not isinstance(last, nn.Linear) or type(last).forward is not nn.Linear.forward or last is model:
        return None
    if last in elsewhere or is_customised(last) or len(flow.calls(last)) != 1:
        return None
    return last if parameter_slots(last).get("weight") is not None else None


def _drop(model: nn.Module, plan: _Plan, settings: LessBn) -> tuple[str, ...]:
    """Remove the BatchNorms of an untrained network. Return the names of the layers that were rescaled."""
    flow, shared = plan.flow, shared_weights(model)
    places = {norm: flow.calls(norm)[0] for norm in plan.removed}
    fronts = {norm: _only_layer_before(flow, place, shared) for norm, place in places.items()}
    rescaled: tuple[str, ...] = ()
    if settings.init == "unit_variance":
        targets = {layer: plan.bare_ends.get(layer, 1.0) for layer in fronts.values() if layer is not None}
        rescaled = tuple(plan.names[module] for module in rescale_layers(flow, targets, places.values()))
    copies = need_copies(flow, places.values())
    for norm, front in fronts.items():
        layer = None if front is None else flow.nodes[front].module
        put_removed_norm(model, norm, copies=places[norm] in copies, layer=layer)
    return rescaled


def _only_layer_before(flow: Dataflow, norm: int, shared: set[Tensor]) -> int | None:
    """The layer before a BatchNorm, if it feeds nothing else and does not share its weight."""
    before = flow.nodes[flow.nodes[norm].inputs[0]]
    module = before.module
    if not isinstance(module, WEIGHTED) or flow.consumers[before.index] != (norm,) or len(flow.calls(module)) != 1:
        return None
    weight = parameter_slots(module).get("weight")
    return None if weight is None or weight in shared else before.index
