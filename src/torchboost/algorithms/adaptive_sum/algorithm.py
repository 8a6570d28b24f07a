"""AdaSum: what the nodes agree on is averaged, what they disagree on is added."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchboost.algorithms.adaptive_sum.gradient_hooks import Packing, bucket_packs, check_no_hook
from torchboost.algorithms.adaptive_sum.rule import adasum_
from torchboost.algorithms.adaptive_sum.update_sum import UpdateSum, before_first_step, held
from torchboost.algorithms.loss_scale_group.scalers import LossScaler
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import is_integer
from torchboost.core.averaging import check_mesh, check_ranks, data_parallel, sharded_units
from torchboost.core.wrapping import unwrap
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.optim.rules.base import has_master
from torchboost.optim.rules.lazy_adam import LazyAdam

__all__ = ["AdaptiveSum", "AdaptiveSumming", "adasum"]

On: TypeAlias = Literal["delta", "gradient"]


def adasum(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    on: On = "delta",
    split_groups: int | Sequence[int] | None = None,
    devices_per_node: int | None = None,
) -> AdaptiveSumming:
    """Combine the updates or gradients of the nodes by AdaSum, in your own loop; see :class:`AdaptiveSum`.

    Every rank must call this at the same point, after wrapping the model. Call ``remove()`` to undo it.

    Args:
        model: The model as the loop calls it.
        optimizer: The optimizer of the model.
        on: Combine the updates (``"delta"``) or the gradients (``"gradient"``).
        split_groups: Positions in the model's list of parameters at which a new pack of collectives begins.
        devices_per_node: Ranks per node; None takes it from the launcher.

    Raises:
        IncompatibleError, TypeError, ValueError: See :class:`AdaptiveSum`.

    Warns:
        NoEffectWarning: There is only one node.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> summing = torchboost.adasum(model, optimizer)  # on one node it warns and changes nothing
        >>> summing.remove()
    """
    algorithm = AdaptiveSum(on=on, split_groups=split_groups, devices_per_node=devices_per_node)
    target = Target(model, optimizer)
    algorithm.check(target)
    return algorithm.attach(target)


class AdaptiveSumming(Attachment):
    """AdaSum attached to one model. It has no state to save.

    DDP's communication hook cannot be removed; after :meth:`remove` it averages, as DDP without a hook does.

    Attributes:
        on: ``"delta"`` or ``"gradient"``.
    """

    def __init__(self, on: On, names: Sequence[str]) -> None:
        super().__init__()
        self.on = on
        self._names = names
        self._noted: list[tuple[Sequence[int], Tensor]] = []

    @property
    def active(self) -> bool:
        """Whether nodes are combined: there are several, and :meth:`remove` was not called."""
        return bool(self._handles)

    @property
    def cosines(self) -> dict[str, float]:
        """The cosine between nodes per parameter at the last update, averaged over the pairs of the tree.

        It is 0 if one side did not change. With FSDP2 on gradients, it is per unit. Reading it synchronises the device.
        """
        return {
            self._name(place): value
            for places, cosines in self._noted
            for place, value in zip(places, cosines.mean(0).tolist(), strict=True)
        }

    @property
    def agreement(self) -> float:
        """The mean of :attr:`cosines`: 1 if all nodes agree, 0 if they are orthogonal.

        NaN before the first update. Reading it synchronises the device.
        """
        found = self.cosines.values()
        return sum(found) / len(found) if found else float("nan")

    def check_scaler(self, scaler: Any) -> None:
        """Refuse a loss scaler that could skip the step on one node while the others wait for it.

        Raises:
            IncompatibleError: The scaler does not agree on overflows with all other ranks.
        """
        if self.active and self.on == "delta":
            _check_scaler(scaler)

    def _name(self, place: int) -> str:
        return self._names[place] if place < len(self._names) else f"parameter {place}"

    def _begin(self) -> None:
        self._noted = []

    def _note(self, places: Sequence[int], cosines: Tensor) -> None:
        self._noted.append((places, cosines))

    def _replace(self, unit: int, cosines: Tensor) -> None:
        self._noted = [entry for entry in self._noted if entry[0] != (unit,)] + [((unit,), cosines)]


@dataclass(frozen=True, kw_only=True)
class AdaptiveSum(Algorithm):
    """Mean inside a node, adaptive sum across nodes, parameter by parameter.

    On updates (``on="delta"``) every node steps its own optimizer on its own gradients; the changes of the weights are
    then combined, ``weights = old - combined(old - new)``. This is right for any optimizer. Gradients must be averaged
    over the node alone: DDP built with ``process_group=NodeGroups.of(...).inside``, FSDP2 on the mesh of the node, or a
    bare model, whose updates are averaged inside the node. Each node has its own optimizer state, so a checkpoint must
    hold one per node. Buffers, such as the statistics of BatchNorm, are left alone.

    On gradients (``on="gradient"``) they are combined in the backward pass: under DDP over all ranks by its
    communication hook, under FSDP2 on the mesh of the node by its all-reduce hook, with one dot product per unit.

    Args:
        on: ``"delta"`` or ``"gradient"``.
        split_groups: Positions in the model's list of parameters at which a new pack, with its own collectives, begins;
            positions past the end have no effect. None makes one pack. Under FSDP2 on gradients the units are the
            packs.
        devices_per_node: Ranks per node; None takes it from the launcher.

    Raises:
        TypeError, ValueError: A setting is not valid.

    Cost: the traffic of :func:`~torchboost.algorithms.adaptive_sum.rule.hierarchical_adasum_`; on updates one more copy
    of the weights, and two copies of a pack while it is combined. Communication does not overlap with the backward
    pass.
    """

    name: ClassVar[str] = "adasum"
    # Its post-step hook must run before that of grad_freeze, which switches to the next blocks.
    traits: ClassVar[Traits] = Traits(order=93)

    on: On = "delta"
    split_groups: int | Sequence[int] | None = None
    devices_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.on not in ("delta", "gradient"):
            raise ValueError(f"on: found {self.on!r}; pass 'delta' or 'gradient'.")
        per_node = self.devices_per_node
        if per_node is not None and (not is_integer(per_node) or per_node < 1):
            raise ValueError(f"devices_per_node: found {per_node!r}; pass an integer of 1 or more, or None.")
        if self.split_groups is not None:
            object.__setattr__(self, "split_groups", _points(self.split_groups))

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that there is only one node."""
        return _one_node(Topology.current(self.devices_per_node))

    def check(self, target: Target) -> None:
        """Refuse a target that :meth:`attach` cannot work on.

        Raises:
            IncompatibleError: The nodes differ in size; gradients are averaged over other ranks than ``on`` needs; the
                model uses FSDP1, native HSDP or another communication hook; or, on updates, the optimizer keeps a
                second copy of the weights, or the loss scaler does not agree over all ranks. Nothing was changed.
        """
        topology = self._topology(target)
        topology.check_full()
        if topology.nodes == 1:
            return
        _check_parameters(target)
        ddp, sharded = data_parallel(target.model), check_mesh(target.model, topology)
        if self.on == "gradient":
            _check_exchange(target.model, ddp, sharded, topology)
            return
        if ddp is not None:
            node = f"torchboost.NodeGroups.of(torchboost.Topology.current({topology.devices_per_node})).inside"
            advice = (
                "every node must average over its own ranks only; otherwise all updates are equal. Build it with "
                f"process_group={node}, or use on='gradient'."
            )
            check_ranks(ddp, topology.node, advice)
        _check_optimizer(target.optimizer)
        _check_scaler(target.scaler)

    def attach(self, target: Target) -> AdaptiveSumming:
        """Create the process groups and register the hooks. Every rank must call this at the same point.

        Warns:
            NoEffectWarning: There is only one node, and no hook is registered; or, at the first update, all nodes made
                the same one.
        """
        topology = self._topology(target)
        named: dict[Tensor, str] = {param: name for name, param in unwrap(target.model).named_parameters()}
        for param in held(target.optimizer):
            named.setdefault(param, f"parameter {len(named)}")
        places = {param: place for place, param in enumerate(named)}
        live = AdaptiveSumming(self.on, list(named.values()))
        reason = _one_node(topology)
        if reason is not None:
            warnings.warn(f"adasum: {reason}.", NoEffectWarning, stacklevel=2)
            return live
        groups = NodeGroups.of(topology, checked=True)
        ddp = data_parallel(target.model)
        if self.on == "delta":
            updates = UpdateSum(target.optimizer, places, self._pack, groups, live._begin, live._note)
            return live.with_undo(updates.remove)
        if ddp is not None:
            packs = bucket_packs(ddp)
            packs.packing = Packing(places, self._pack, groups, live._begin, live._note)
            return live.with_undo(packs.switch_off)
        return _hook_units(live, target, groups)

    def _topology(self, target: Target) -> Topology:
        return target.topology if self.devices_per_node is None else Topology.current(self.devices_per_node)

    def _pack(self, place: int) -> int:
        points = self.split_groups
        return bisect_right(points, place) if isinstance(points, tuple) else 0


def _hook_units(live: AdaptiveSumming, target: Target, groups: NodeGroups) -> AdaptiveSumming:
    """Combine the shards of each FSDP2 unit across nodes; FSDP2 has averaged them over the node."""
    units = sharded_units(target.model)
    live._names = list(units)

    def hook_of(place: int) -> Callable[[Tensor], None]:
        return lambda shards: live._replace(place, adasum_([shards], groups.across, shards=groups.inside))

    def release() -> None:
        start.remove()
        for unit in units.values():
            unit.set_all_reduce_hook(None)

    start = before_first_step(target.optimizer, groups)
    for place, unit in enumerate(units.values()):
        unit.set_all_reduce_hook(hook_of(place))
    return live.with_undo(release)


def _points(value: Any) -> tuple[int, ...]:
    points = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if any(not is_integer(point) for point in points):
        raise TypeError(f"split_groups: found {value!r}; pass positions in the list of parameters, or None.")
    if not points or points[0] < 1 or list(points) != sorted(set(points)):
        raise ValueError(f"split_groups: found {value!r}; pass increasing positions of 1 or more, or None.")
    return points


def _one_node(topology: Topology) -> str | None:
    if topology.nodes > 1:
        return None
    ranks = "1 rank" if topology.world_size == 1 else f"{topology.world_size} ranks"
    return (
        f"one node of {ranks} has no other node to combine with; start more nodes, or set devices_per_node to the "
        "number of ranks per node"
    )


def _check_exchange(model: nn.Module, ddp: DistributedDataParallel | None, sharded: bool, topology: Topology) -> None:
    """Refuse ``on="gradient"`` if there is no gradient exchange that it can replace."""
    if ddp is not None:
        advice = "on='gradient' combines over the nodes itself; build it over all ranks, without process_group."
        check_ranks(ddp, range(topology.world_size), advice)
        check_no_hook(ddp)
        if getattr(ddp, "skip_all_reduce_unused_params", False):
            raise IncompatibleError(
                "DistributedDataParallel was built with skip_all_reduce_unused_params=True, which skips buckets; build "
                "it without that, or use on='delta'."
            )
    elif sharded:
        sharded_units(model)
    else:
        raise IncompatibleError(
            "on='gradient' acts on the gradients that ranks exchange, but the model is bare; wrap it in "
            "DistributedDataParallel before attaching, or use on='delta'."
        )


def _check_parameters(target: Target) -> None:
    params = [*target.model.parameters(), *held(target.optimizer)]
    devices = {str(param.device) for param in params}
    if len(devices) > 1 or not all(param.is_floating_point() for param in params):
        found = f"lie on {', '.join(sorted(devices))}" if len(devices) > 1 else "are not all real numbers"
        raise IncompatibleError(
            f"the parameters {found}; AdaSum needs real floating point parameters on one device per rank: leave it out "
            "here."
        )


def _check_optimizer(optimizer: Optimizer) -> None:
    masters = any(has_master(p, group) for group in optimizer.param_groups for p in group["params"])
    late = isinstance(optimizer, LazyAdam) and any(group["exact"] for group in optimizer.param_groups)
    if masters or late:
        what = "keeps float32 master weights" if masters else "changes weights outside of its step (exact=True)"
        raise IncompatibleError(
            f"{type(optimizer).__name__} {what}, which would undo the combined update; turn that off, or use "
            "on='gradient'."
        )


def _check_scaler(scaler: Any) -> None:
    world = Topology.current().world_size
    if isinstance(scaler, LossScaler) and scaler.agree and scaler.ranks < world:
        raise IncompatibleError(
            f"{scaler.ranks} of {world} ranks agree on overflows in this {type(scaler).__name__}, so it may skip the "
            "step on one node while the others wait for it; build it without process_group, so that all ranks agree, "
            "or use on='gradient'."
        )
    deaf = not scaler.agree if isinstance(scaler, LossScaler) else isinstance(scaler, torch.amp.GradScaler)
    if deaf:
        raise IncompatibleError(
            f"a {type(scaler).__name__} may skip the step on one node while the others wait for it; use "
            "torchboost.DynamicLossScale(), whose ranks agree on overflows, or on='gradient'."
        )
