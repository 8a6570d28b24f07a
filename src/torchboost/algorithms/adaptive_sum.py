"""AdaSum: average the parts on which the nodes agree, and add the parts on which they disagree.

Two vectors become ``(1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b``: orthogonal vectors are added, parallel ones
averaged (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021). More than two are combined
along a binary tree of ranks, per tensor. Each rank gets the same piece of all vectors, combines these along the whole
tree, and sends the result to the others. Only the dot products are summed over the ranks, once per level. So a rank
sends ``2 (1 - 1/n)`` times its vector for any number n of ranks, as in an all-reduce, and a few dot products.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import is_integer
from torchboost.core.torch_private import not_traced
from torchboost.core.wrapping import check_mesh, check_ranks, data_parallel, parameters_of, unwrap
from torchboost.distributed.agreement import bit_sum, local_part
from torchboost.distributed.topology import NodeGroups, Topology
from torchboost.errors import IncompatibleError, warn_no_effect
from torchboost.optim.rules.base import UpdateRule, has_master
from torchboost.optim.rules.lazy_adam import LazyAdam

_CHUNK = 1 << 18  # numbers converted to float64 at a time: 2 MiB, which fits in the cache


def adasum(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    split_groups: int | Sequence[int] | None = None,
    devices_per_node: int | None = None,
) -> AdaptiveSumming:
    """Combine the updates of the nodes by AdaSum, in your own loop. See :class:`AdaptiveSum`.

    Every rank must call this at the same point, after wrapping the model. Call ``remove()`` to undo it.

    Args:
        model: The model as the loop calls it.
        optimizer: The optimizer of the model.
        split_groups: See :class:`AdaptiveSum`.
        devices_per_node: See :class:`AdaptiveSum`.

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
    algorithm = AdaptiveSum(split_groups=split_groups, devices_per_node=devices_per_node)
    target = Target(model, optimizer)
    algorithm.check(target)
    return algorithm.attach(target)


class AdaptiveSumming(Attachment):
    """AdaSum attached to one model. It has no state to save.

    Before each step it saves the weights, and after it sets them to ``old - combined(old - new)``. Parameters that
    FSDP2 shards are combined shard by shard, with dot products over whole parameters. Parameters that are frozen at a
    step are not sent. Cost: one lasting copy of the weights, and two more of the pack being combined.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Iterable[Tensor], points: Sequence[int], groups: NodeGroups | None
    ) -> None:
        hooks = []
        if groups is not None:  # there are several nodes
            hooks.append(optimizer.register_step_pre_hook(not_traced(self._keep)))
            hooks.append(optimizer.register_step_post_hook(not_traced(self._combine)))
        super().__init__(*hooks, undo=self._forget)
        self._points, self._groups = points, groups
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        self._forget()
        self._cosines: list[Tensor] = []
        self._compared = self._warned = False

    def _forget(self) -> None:
        self._old: dict[Tensor, Tensor] = {}
        self._moving: list[tuple[int, Tensor]] = []

    @property
    def active(self) -> bool:
        """Whether nodes are combined: there are several, and :meth:`remove` was not called."""
        return bool(self._handles)

    @property
    def agreement(self) -> float:
        """The mean cosine between nodes at the last update: 1 if all agree, 0 if they are orthogonal.

        It is averaged over the parameters and over the pairs of the tree, and counts 0 if one side did not change. NaN
        before the first update. Reading it synchronises the device.
        """
        return float(torch.cat(self._cosines, dim=1).mean()) if self._cosines else float("nan")

    def check_scaler(self, scaler: Any) -> None:
        """Refuse a loss scaler that could skip the step on one node while the others wait for it."""
        if self.active:
            _check_scaler(scaler)

    @torch.no_grad()
    def _keep(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._compare_once(optimizer)
        parameters = [param for param in parameters_of(optimizer) if param.requires_grad or param.grad is not None]
        # A group that was added later lies behind the others.
        places = [self._places.setdefault(param, len(self._places)) for param in parameters]
        self._moving = sorted(zip(places, parameters, strict=True), key=lambda entry: entry[0])
        for param in parameters:
            if param not in self._old:
                self._old[param] = torch.empty_like(local_part(param))
            self._old[param].copy_(local_part(param))

    @torch.no_grad()
    def _combine(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._groups is not None
        self._cosines = []
        for _, entries in groupby(self._moving, key=lambda entry: bisect_right(self._points, entry[0])):
            pack = [param for _, param in entries]
            deltas = [self._old[param] - local_part(param) for param in pack]
            sharded = any(hasattr(param, "device_mesh") for param in pack)
            self._cosines.append(adasum_(deltas, self._groups.across, self._groups.inside, sharded=sharded))
            for param, delta in zip(pack, deltas, strict=True):
                local_part(param).copy_(self._old[param] - delta)
        if self._moving and not self._warned:
            self._warned = True
            self._warn_if_equal()

    def _warn_if_equal(self) -> None:
        """Warn if all nodes made the same update. Vectors of one number are always parallel."""
        cosines = torch.cat(self._cosines, dim=1)
        cosines = cosines[:, torch.tensor([param.numel() > 1 for _, param in self._moving], device=cosines.device)]
        if bool((cosines != 0).any()) and bool(((cosines > 1 - 1e-12) | (cosines == 0)).all()):
            warn_no_effect(
                "adasum: all nodes made the same update, so AdaSum has no effect. This happens if the nodes read the "
                "same data, or if gradients are averaged over all ranks: average them over the node alone, "
                "DistributedDataParallel(model, process_group=NodeGroups.of(Topology.current()).inside)."
            )

    @torch.no_grad()
    def _compare_once(self, optimizer: Optimizer) -> None:
        """Raise :class:`IncompatibleError` if the weights of the ranks differ before the first step.

        Nodes that average gradients over the node alone would not notice that they started differently.
        """
        if self._compared:
            return
        assert self._groups is not None
        params = parameters_of(optimizer)
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

    Every node steps its own optimizer on its own gradients. The changes of the weights are then combined,
    ``weights = old - combined(old - new)``. This is right for any optimizer. Gradients must be averaged over the node
    alone: DDP built with ``process_group=NodeGroups.of(...).inside``, FSDP2 on the mesh of the node, or a bare model,
    whose updates are averaged inside the node. Each node has its own optimizer state, so a checkpoint must hold one per
    node. Buffers, such as the statistics of BatchNorm, are not changed.

    Args:
        split_groups: Positions in the model's list of parameters at which a new pack, with its own collectives, begins.
            Positions past the end have no effect. None makes one pack.
        devices_per_node: Ranks per node. None takes it from the launcher.

    Raises:
        TypeError, ValueError: A setting is not valid.

    Cost: the traffic of :func:`~torchboost.algorithms.adaptive_sum.adasum_`, one more copy of the weights,
    and two copies of a pack while it is combined.
    """

    name: ClassVar[str] = "adasum"
    # Its post-step hook must run before the hook of grad_freeze, which switches to the next blocks.
    traits: ClassVar[Traits] = Traits(order=93)

    split_groups: int | Sequence[int] | None = None
    devices_per_node: int | None = None

    def __post_init__(self) -> None:
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
            IncompatibleError: The nodes differ in size, gradients are averaged over other ranks than the node's,
                the model uses FSDP1 or native HSDP, the optimizer keeps other weights in its state, or the loss
                scaler does not agree over all ranks. Nothing was changed.
        """
        topology = self._topology(target)
        topology.check_full()
        if topology.nodes == 1:
            return
        params = [*target.model.parameters(), *parameters_of(target.optimizer)]
        devices = sorted({str(param.device) for param in params})
        if len(devices) > 1 or not all(param.is_floating_point() for param in params):
            problem = f"lie on {', '.join(devices)}" if len(devices) > 1 else "are not all real numbers"
            raise IncompatibleError(
                f"the parameters {problem}; AdaSum needs real numbers on one device per rank: leave it out here."
            )
        check_mesh(target.model, topology)
        ddp = data_parallel(target.model)
        if ddp is not None:
            node = f"torchboost.NodeGroups.of(torchboost.Topology.current({topology.devices_per_node})).inside"
            advice = (
                "every node must average over its own ranks only; otherwise all updates are equal. Build it with "
                f"process_group={node}."
            )
            check_ranks(ddp, topology.node, advice)
        _check_optimizer(target.optimizer)
        _check_scaler(target.scaler)

    def attach(self, target: Target) -> AdaptiveSumming:
        """Create the process groups and register the hooks. Every rank must call this at the same point.

        Warns:
            NoEffectWarning: There is only one node, and no hook is registered. Or all nodes made the same first update.
        """
        topology = self._topology(target)
        points = self.split_groups if isinstance(self.split_groups, tuple) else ()
        parameters = dict.fromkeys([*unwrap(target.model).parameters(), *parameters_of(target.optimizer)])
        if (reason := _one_node(topology)) is not None:
            warn_no_effect(f"adasum: {reason}.")
        groups = None if reason is not None else NodeGroups.of(topology)
        return AdaptiveSumming(target.optimizer, parameters, points, groups)

    def _topology(self, target: Target) -> Topology:
        return target.topology if self.devices_per_node is None else Topology.current(self.devices_per_node)


def _one_node(topology: Topology) -> str | None:
    if topology.nodes > 1:
        return None
    ranks = "1 rank" if topology.world_size == 1 else f"{topology.world_size} ranks"
    return (
        f"one node of {ranks} has no other node to combine with; start more nodes, or set devices_per_node to the "
        "number of ranks per node"
    )


def _check_optimizer(optimizer: Optimizer) -> None:
    masters = any(has_master(p, group) for group in optimizer.param_groups for p in group["params"])
    late = isinstance(optimizer, LazyAdam) and any(group["exact"] for group in optimizer.param_groups)
    rules = map(optimizer.rule_for, optimizer.param_groups) if isinstance(optimizer, UpdateRule) else ()
    faults = {
        "keeps float32 master weights": masters,
        "changes weights outside of its step (exact=True)": late,
        "computes the weights from its state": any(rule.keeps_weights for rule in rules),
    }
    if what := next((fault for fault, found in faults.items() if found), None):
        raise IncompatibleError(
            f"{type(optimizer).__name__} {what}, which would undo the combined update; turn that off or take "
            "another optimizer, or leave AdaSum out."
        )


def _check_scaler(scaler: Any) -> None:
    agree = getattr(scaler, "agree", None)
    if agree is False or (agree is None and isinstance(scaler, torch.amp.GradScaler)):
        raise IncompatibleError(
            f"a {type(scaler).__name__} may skip the step on one node while the others wait for it; use "
            "torchboost.DynamicLossScale(), whose ranks agree on overflows."
        )


def adasum_(
    tensors: Iterable[Tensor],
    across: dist.ProcessGroup | None = None,
    inside: dist.ProcessGroup | None = None,
    *,
    sharded: bool = False,
) -> Tensor:
    """Replace every tensor by its mean over the ranks of a node, adaptively summed over the nodes.

    All ranks get the same bits. Half precision is added in float32 and rounded at every level of the tree.

    Args:
        tensors: Floating point, dense, on one device, of the same shapes and dtypes in the same order on all ranks.
        across: The ranks at this position in all nodes, any number. None is the default group.
        inside: The ranks of this node. None: this rank is a node.
        sharded: The ranks of a node hold parts of the same tensors, as under FSDP2. Nothing is averaged over them, and
            dot products are over whole tensors.

    Returns:
        The cosine between the two sides of each pair of the tree, leaves first, for each tensor, of shape
        ``(nodes - 1, tensors)``, float64, on the device of the tensors. 0 if a side is zero.

    Raises:
        TypeError: A tensor is not dense floating point.
        ValueError: The tensors lie on several devices.

    Cost: between n nodes a rank sends ``2 (1 - 1/n)`` times its bytes in two exchanges, and takes part in ``log2 n``
    all-reduces, of ``24 n`` bytes per tensor together, for each dtype. Inside a node of m ranks the tensors are
    reduce-scattered, so each rank sends only its share between nodes, and ``2 (1 - 1/m)`` times its bytes inside, half
    as much again with gloo, which has no reduce-scatter and uses an all-reduce. Memory: two copies of the tensors.
    """
    tensors = list(tensors)
    node = 1 if inside is None else dist.get_world_size(inside)
    ranks = 1 if sharded else node
    place = dist.get_rank(inside) if ranks > 1 else 0
    device = tensors[0].device if tensors else torch.device("cpu")
    cosines = torch.zeros(dist.get_world_size(across) - 1, len(tensors), dtype=torch.float64, device=device)
    for members in _by_dtype(tensors):
        chosen = [tensors[i] for i in members]
        flat = _flattened(chosen, multiple=ranks * dist.get_world_size(across) if ranks > 1 else 1)
        shares = list(flat.chunk(ranks))
        share = shares[place]
        if ranks > 1:
            flat.div_(ranks)
            share = torch.empty_like(share)
            dist.reduce_scatter(share, shares, group=inside)
        low, high = place * len(share), (place + 1) * len(share)
        ends = [min(max(end, low), high) for end in accumulate((tensor.numel() for tensor in chosen), initial=0)]
        sizes = [end - begin for begin, end in pairwise(ends)]
        cosines[:, members] = _combine(share, sizes, across, inside if node > 1 else None)
        if ranks > 1:
            shares[place].copy_(share)
            _exchange([shares[place]] * ranks, shares, inside)
        _write_back(flat, chosen)
    return cosines


def _combine(
    flat: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None, shards: dist.ProcessGroup | None
) -> Tensor:
    """Combine flat vectors in place and return the cosines. ``sizes`` are the lengths of the tensors in them.

    Numbers after the last tensor are padding.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    bounds = [flat.numel() * i // ranks for i in range(ranks + 1)]
    low, high = bounds[rank : rank + 2]
    pieces = [flat[begin:end] for begin, end in pairwise(bounds)]
    rows = [pieces[rank] if i == rank else torch.empty_like(pieces[rank]) for i in range(ranks)]
    _exchange(pieces, rows, group)
    ends = [min(max(end, low), high) - low for end in accumulate(sizes, initial=0)]
    segments = [(i, slice(begin, end)) for i, (begin, end) in enumerate(pairwise(ends)) if begin < end]
    cosines = [torch.zeros(0, len(sizes), dtype=torch.float64, device=flat.device)]
    for pairs in _levels(ranks):
        dots = torch.zeros(len(pairs), len(sizes), 3, dtype=torch.float64, device=flat.device)
        for place, (left, right, _) in enumerate(pairs):
            for tensor, part in segments:
                dots[place, tensor] = _dots(rows[left][part], rows[right][part])
        dist.all_reduce(dots, group=group)
        if shards is not None:
            dist.all_reduce(dots, group=shards)
        for place, (left, right, end) in enumerate(pairs):
            alpha, beta = _weights(dots[place], right - left, end - right, flat.dtype)
            for tensor, part in segments:
                a, b = rows[left][part], rows[right][part].to(alpha[tensor].dtype)
                a.copy_(a.to(b.dtype).mul_(alpha[tensor]).addcmul_(b, beta[tensor]))  # in place, but in half precision
        aa, ab, bb = dots.unbind(-1)
        lengths = aa.sqrt() * bb.sqrt()
        cosines.append(torch.where(lengths == 0, 0.0, ab / lengths).clamp(-1, 1))
    pieces[rank].copy_(rows[0])
    _exchange([pieces[rank]] * ranks, pieces, group)
    return torch.cat(cosines)


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Send and receive one tensor to and from each other rank. The sizes agree, and empty ones do not travel."""
    rank = dist.get_rank(group)
    calls = [
        dist.P2POp(way, tensor, group=group, group_peer=peer)
        for way, tensors in ((dist.isend, sent), (dist.irecv, received))
        for peer, tensor in enumerate(tensors)
        if peer != rank and tensor.numel()
    ]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()


def _levels(ranks: int) -> list[list[tuple[int, int, int]]]:
    """Return the pairs of the tree, leaves first: the first rank of each side, and one past the last of both."""
    levels, sides = [], [(0, ranks)]
    while pairs := [(first, (first + end + 1) // 2, end) for first, end in sides if end - first > 1]:
        levels.insert(0, pairs)
        sides = [side for first, middle, end in pairs for side in ((first, middle), (middle, end))]
    return levels


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a.a``, ``a.b`` and ``b.b`` of two flat tensors, computed in float64."""
    dots = torch.zeros(3, dtype=torch.float64, device=a.device)
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        x, y = x.double(), y.double()
        dots += torch.stack((x.dot(x), x.dot(y), y.dot(y)))
    return dots


def _weights(dots: Tensor, left: int, right: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Return the weights of both sides for each tensor, in the dtype in which tensors of ``dtype`` are added.

    If the sides stand for different numbers of ranks, as in a tree over three, the share of each side replaces the
    published 1/2, so that parallel vectors are averaged over all ranks with equal weight. A vector whose square
    underflows counts as zero: both weights are 1. If one side is very short, its weight may overflow the dtype. It is
    then clamped to the largest number, which lies between the weight for a nonzero vector and the weight for zero.
    """
    adding = torch.promote_types(dtype, torch.float32)
    most, limits = torch.finfo(adding).max, torch.finfo(dots.dtype)
    aa, ab, bb = dots.unbind(-1)
    weights = []
    for square, ranks in ((aa, left), (bb, right)):
        there = square > limits.tiny / limits.eps
        weight = 1.0 - ranks / (left + right) * (ab / torch.where(there, square, 1.0))
        weight = torch.where(there | square.isnan(), weight, 1.0)
        weights.append(weight.clamp(-most, most).to(adding).unbind())
    return weights


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the tensors of each dtype, in the same order on every rank."""
    for i, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            raise TypeError(f"tensors[{i}]: found {tensor.layout} {tensor.dtype}; pass dense floating point tensors.")
        if tensor.device != tensors[0].device:
            raise ValueError(f"tensors[{i}]: found {tensor.device} after {tensors[0].device}; call once per device.")
    kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[i for i, tensor in enumerate(tensors) if tensor.dtype == kind] for kind in kinds]


def _flattened(tensors: Sequence[Tensor], multiple: int = 1) -> Tensor:
    """Return all tensors in one flat copy, padded with zeros to a multiple of ``multiple`` numbers."""
    padding = tensors[0].new_zeros(-sum(tensor.numel() for tensor in tensors) % multiple)
    return torch.cat([*(tensor.detach().reshape(-1) for tensor in tensors), padding])


def _write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat[: sum(tensor.numel() for tensor in tensors)].split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
