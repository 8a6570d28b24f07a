"""AdaSum: what the nodes agree on is averaged, what they disagree on is added."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchboost.algorithms.adaptive_sum.rule import adasum_, hierarchical_adasum_
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import is_integer
from torchboost.core.torch_private import comm_hooks
from torchboost.core.wrapping import check_mesh, check_ranks, data_parallel, unhooked_units, unwrap
from torchboost.distributed.agreement import bit_sum
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.optim.rules.base import has_master
from torchboost.optim.rules.lazy_adam import LazyAdam

__all__ = ["AdaptiveSum", "AdaptiveSumming", "adasum"]

On: TypeAlias = Literal["delta", "gradient"]
_Entry: TypeAlias = tuple[int, Callable[[], Tensor]]


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
        on: See :class:`AdaptiveSum`, as for the following.
        split_groups: Likewise.
        devices_per_node: Likewise.

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

    def __init__(self, on: On, names: Sequence[str], points: Sequence[int], groups: NodeGroups | None) -> None:
        super().__init__()
        self.on = on
        self._names, self._points, self._groups = names, points, groups
        self._cosines: dict[tuple[int, ...], Tensor] = {}
        self._compared = False

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
            self._names[place] if place < len(self._names) else f"parameter {place}": value
            for places, cosines in self._cosines.items()
            for place, value in zip(places, cosines.mean(0).tolist(), strict=True)
        }

    @property
    def agreement(self) -> float:
        """The mean of :attr:`cosines`: 1 if all nodes agree, 0 if they are orthogonal.

        NaN before the first update. Reading it synchronises the device.
        """
        cosines = self.cosines.values()
        return sum(cosines) / len(cosines) if cosines else float("nan")

    def check_scaler(self, scaler: Any) -> None:
        """Refuse a loss scaler that could skip the step on one node while the others wait for it.

        Raises:
            IncompatibleError: The scaler does not agree on overflows with all other ranks.
        """
        if self.active and self.on == "delta":
            _check_scaler(scaler)

    def _combine(self, entries: Sequence[_Entry], *, sharded: bool = False) -> Iterator[Tensor]:
        """Yield the combined tensors of places in the list of parameters, which are sorted, pack by pack.

        A tensor is made when its pack is combined, in place.
        """
        assert self._groups is not None
        self._cosines = {}
        for _, pack in groupby(entries, key=lambda entry: bisect_right(self._points, entry[0])):
            places, makers = zip(*pack, strict=True)
            tensors = [make() for make in makers]
            if sharded:
                cosines = adasum_(tensors, self._groups.across, shards=self._groups.inside)
            else:
                cosines = hierarchical_adasum_(tensors, self._groups)
            self._cosines[places] = cosines
            yield from tensors

    def _warn_if_equal(self, sizes: Sequence[int]) -> None:
        """Warn if all nodes made the same update; vectors of one number are always parallel."""
        cosines = torch.cat(list(self._cosines.values()), dim=1)
        cosines = cosines[:, torch.tensor(sizes, device=cosines.device) > 1]
        if bool((cosines != 0).any()) and bool(((cosines > 1 - 1e-12) | (cosines == 0)).all()):
            warnings.warn(
                "adasum: all nodes made the same update, so AdaSum has no effect. This happens if the nodes read the "
                "same data, or if gradients are averaged over all ranks: average them over the node alone, "
                "DistributedDataParallel(model, process_group=NodeGroups.of(Topology.current()).inside).",
                NoEffectWarning,
                stacklevel=2,
            )

    @torch.no_grad()
    def _compare_once(self, optimizer: Optimizer) -> None:
        """Raise :class:`IncompatibleError` if the weights of the ranks differ before the first step.

        Nodes that average gradients over the node alone would not notice that they started differently.
        """
        if self._compared:
            return
        assert self._groups is not None
        params = _parameters(optimizer)
        low = torch.stack([bit_sum(param) for param in params])
        high = low.clone()
        sharded = any(hasattr(param, "device_mesh") for param in params)
        for group in (self._groups.across,) if sharded else (self._groups.across, self._groups.inside):
            dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
        differing = (low != high).to(torch.int32)
        dist.all_reduce(differing, dist.ReduceOp.MAX, group=self._groups.inside)
        if bool(differing.any()):
            raise IncompatibleError(
                f"{int(differing.sum())} of {len(params)} parameters differ between the ranks before the first update; "
                "start all ranks from the same seed or the same checkpoint."
            )
        self._compared = True


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
        per_node, points = self.devices_per_node, self.split_groups
        if per_node is not None and (not is_integer(per_node) or per_node < 1):
            raise ValueError(f"devices_per_node: found {per_node!r}; pass an integer of 1 or more, or None.")
        if points is None:
            return
        listed: tuple[Any, ...] = tuple(points) if isinstance(points, (list, tuple)) else (points,)
        if not all(map(is_integer, listed)):
            raise TypeError(f"split_groups: found {points!r}; pass positions in the list of parameters, or None.")
        if not listed or listed[0] < 1 or list(listed) != sorted(set(listed)):
            raise ValueError(f"split_groups: found {points!r}; pass increasing positions of 1 or more, or None.")
        object.__setattr__(self, "split_groups", listed)

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
        params = [*target.model.parameters(), *_parameters(target.optimizer)]
        devices = sorted({str(param.device) for param in params})
        if len(devices) > 1 or not all(param.is_floating_point() for param in params):
            problem = f"lie on {', '.join(devices)}" if len(devices) > 1 else "are not all real numbers"
            raise IncompatibleError(
                f"the parameters {problem}; AdaSum needs real floating point parameters on one device per rank: leave "
                "it out here."
            )
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
        reason = _one_node(topology)
        if reason is not None:
            warnings.warn(f"adasum: {reason}.", NoEffectWarning, stacklevel=2)
            return AdaptiveSumming(self.on, [], (), None)
        named: dict[Tensor, str] = {param: name for name, param in unwrap(target.model).named_parameters()}
        for param in _parameters(target.optimizer):
            named.setdefault(param, f"parameter {len(named)}")
        places = {param: place for place, param in enumerate(named)}
        groups = NodeGroups.of(topology)
        points = self.split_groups if isinstance(self.split_groups, tuple) else ()
        summing, ddp = AdaptiveSumming(self.on, list(named.values()), points, groups), data_parallel(target.model)
        if self.on == "delta":
            return summing.with_undo(_UpdateHooks(target.optimizer, places, summing).remove)
        if ddp is not None:
            hook = _bucket_hook(ddp)
            hook.places, hook.summing = places, summing
            return summing.with_undo(hook.average)
        return _hook_units(summing, groups, target)

    def _topology(self, target: Target) -> Topology:
        return target.topology if self.devices_per_node is None else Topology.current(self.devices_per_node)


class _UpdateHooks:
    """Saves the weights before each step and sets them to ``old - combined(old - new)`` after it.

    Parameters that FSDP2 shards are combined shard by shard, with dot products over whole parameters. Parameters that
    are frozen at a step are not sent. Cost: one lasting copy of the weights, and two more of the pack being combined.
    """

    def __init__(self, optimizer: Optimizer, places: dict[Tensor, int], summing: AdaptiveSumming) -> None:
        self._places, self._summing = places, summing
        self._old: dict[Tensor, Tensor] = {}
        self._moving: list[tuple[int, Tensor]] = []
        self._warned = False
        self._handles = [
            optimizer.register_step_pre_hook(_untraced(self._keep)),
            optimizer.register_step_post_hook(_untraced(self._combine)),
        ]

    def remove(self) -> None:
        """Remove the hooks and the copy of the weights."""
        for handle in self._handles:
            handle.remove()
        self._old, self._moving = {}, []

    @torch.no_grad()
    def _keep(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._summing._compare_once(optimizer)
        params = [param for param in _parameters(optimizer) if param.requires_grad or param.grad is not None]
        # A group that was added later lies behind the others.
        places = [self._places.setdefault(param, len(self._places)) for param in params]
        self._moving = sorted(zip(places, params, strict=True), key=lambda entry: entry[0])
        for param in params:
            if param not in self._old:
                self._old[param] = torch.empty_like(_local(param))
            self._old[param].copy_(_local(param))

    @torch.no_grad()
    def _combine(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        old, params = self._old, [param for _, param in self._moving]
        entries = [(place, lambda param=param: old[param] - _local(param)) for place, param in self._moving]
        sharded = any(hasattr(param, "device_mesh") for param in params)
        for param, delta in zip(params, self._summing._combine(entries, sharded=sharded), strict=True):
            _local(param).copy_(old[param] - delta)
        if params and not self._warned:
            self._warned = True
            self._summing._warn_if_equal([param.numel() for param in params])


class _BucketHook:
    """The state of DDP's communication hook: collects the buckets of a backward pass and combines them at the last.

    The collectives run inside the hook and do not overlap with the backward pass. DDP never drops a hook. While no
    ``summing`` is set, this one averages, as DDP does without a hook.
    """

    follows_buckets = True
    """The set of parameters may change between passes, as under freezing."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.summing: AdaptiveSumming | None = None
        self.places: dict[Tensor, int] = {}
        self._group = group
        self._buckets: list[tuple[torch.futures.Future[Tensor], Any]] = []

    def average(self) -> None:
        """Combine no longer."""
        self.summing, self._buckets = None, []

    def receive(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Receive a bucket (``torch.distributed.GradBucket``) and return a future of its gradients."""
        buffer = bucket.buffer()
        if self.summing is None:
            buffer.div_(dist.get_world_size(self._group))
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])  # pyright: ignore[reportOptionalMemberAccess]
        if bucket.index() == 0:
            self._buckets = []
        devices = [] if buffer.device.type == "cpu" else [buffer.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._buckets.append((future, bucket))
        if bucket.is_last():
            gradients = [
                (self.places.get(param, len(self.places)), lambda gradient=gradient: gradient)
                for _, part in self._buckets
                for param, gradient in zip(part.parameters(), part.gradients(), strict=True)
            ]
            # In model order, so the result does not depend on the buckets.
            for _ in self.summing._combine(sorted(gradients, key=lambda entry: entry[0])):
                pass
            for waiting, part in self._buckets:
                waiting.set_result(part.buffer())
            self._buckets = []
        return future


def _bucket_hook(ddp: DistributedDataParallel) -> _BucketHook:
    """Return the state of our hook on ``ddp``; register it if there is none.

    Raises:
        IncompatibleError: DDP has another communication hook.
    """
    for _, state in comm_hooks(ddp):
        if isinstance(state, _BucketHook):
            return state
    _check_no_hook(ddp)
    hook = _BucketHook(ddp.process_group)
    try:
        # A lambda: DDP compares annotations with classes, and the annotations of this module are strings.
        ddp.register_comm_hook(hook, lambda state, bucket: state.receive(bucket))
    except RuntimeError as error:  # a built-in hook, which only the reducer knows
        comm_hooks(ddp).pop()
        raise IncompatibleError(_ONE_HOOK) from error
    return hook


def _check_no_hook(ddp: DistributedDataParallel) -> None:
    """Raise :class:`IncompatibleError` if ``ddp`` has a communication hook that is not ours."""
    if any(not isinstance(state, _BucketHook) for _, state in comm_hooks(ddp)):
        raise IncompatibleError(_ONE_HOOK)


_ONE_HOOK = (
    "DistributedDataParallel already has a communication hook, such as gradient compression, and accepts only one; "
    "build it without that hook, or use on='delta', which needs none."
)


def _hook_units(summing: AdaptiveSumming, groups: NodeGroups, target: Target) -> AdaptiveSumming:
    """Combine the shards of each FSDP2 unit across nodes; FSDP2 has averaged them over the node."""
    units = unhooked_units(target.model)
    summing._names = list(units)

    def combine(place: int, shards: Tensor) -> None:
        summing._cosines[(place,)] = adasum_([shards], groups.across, shards=groups.inside)

    def release() -> None:
        compared.remove()
        for unit in units.values():
            unit.set_all_reduce_hook(None)

    compare = _untraced(lambda optimizer, args, kwargs: summing._compare_once(optimizer))
    compared = target.optimizer.register_step_pre_hook(compare)
    for place, unit in enumerate(units.values()):
        unit.set_all_reduce_hook(partial(combine, place))
    return summing.with_undo(release)


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
        _check_no_hook(ddp)
        if getattr(ddp, "skip_all_reduce_unused_params", False):
            raise IncompatibleError(
                "DistributedDataParallel was built with skip_all_reduce_unused_params=True, which skips buckets; build "
                "it without that, or use on='delta'."
            )
    elif sharded:
        unhooked_units(model)
    else:
        raise IncompatibleError(
            "on='gradient' acts on the gradients that ranks exchange, but the model is bare; wrap it in "
            "DistributedDataParallel before attaching, or use on='delta'."
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
    agree, ranks = getattr(scaler, "agree", None), getattr(scaler, "ranks", world)
    if agree and ranks < world:
        raise IncompatibleError(
            f"{ranks} of {world} ranks agree on overflows in this {type(scaler).__name__}, so it may skip the step on "
            "one node while the others wait for it; build it without process_group, so that all ranks agree, or use "
            "on='gradient'."
        )
    if agree is False or (agree is None and isinstance(scaler, torch.amp.GradScaler)):
        raise IncompatibleError(
            f"a {type(scaler).__name__} may skip the step on one node while the others wait for it; use "
            "torchboost.DynamicLossScale(), whose ranks agree on overflows, or on='gradient'."
        )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def _local(param: Any) -> Tensor:
    """Return the part of a parameter that this rank holds."""
    return param.to_local() if hasattr(param, "to_local") else param


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep the compiler out of the collectives if the step around them is compiled."""
    return torch.compiler.disable(hook)  # pyright: ignore[reportReturnType]
