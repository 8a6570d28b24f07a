"""AdaSum: what the ranks agree on is averaged, what they disagree on is added.

Two vectors become ``(1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b``: orthogonal vectors are added, parallel ones
averaged (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021). More than two are combined
along a binary tree of ranks, per tensor. Each rank gets the same piece of all vectors, combines these along the whole
tree, and sends the result to the others. Only the dot products are summed over the ranks, once per level. So a rank
sends ``2 (1 - 1/n)`` times its vector for any number n of ranks, as in an all-reduce, and a few dot products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.distributed.topology import NodeGroups

__all__ = ["adasum_", "hierarchical_adasum_"]

_CHUNK = 1 << 18  # numbers converted to float64 at a time: 2 MiB, which fits in the cache


def adasum_(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, *, shards: dist.ProcessGroup | None = None
) -> Tensor:
    """Replace every tensor by its adaptive sum over the ranks of a group; all ranks get the same bits.

    Args:
        tensors: Floating point, dense, on one device, of the same shapes and dtypes in the same order on all ranks.
        group: Ranks to combine, any number; None is the default group.
        shards: Ranks that hold the other parts of the same tensors, as under FSDP2: dot products are summed over them.

    Returns:
        The cosine between the two sides of each pair of the tree, leaves first, for each tensor, of shape
        ``(ranks - 1, tensors)``, float64, on the device of the tensors; 0 if a side is zero.

    Raises:
        TypeError: A tensor is not dense floating point.
        ValueError: The tensors lie on several devices.

    Cost: each rank sends ``2 (1 - 1/n)`` times its bytes in two exchanges, and takes part in ``log2 n`` all-reduces, of
    ``24 n`` bytes per tensor together; all this for each dtype. Memory: a copy of the tensors, and another one unless
    they are contiguous in memory, as in a DDP bucket. Half precision is added in float32 and rounded at every level of
    the tree.
    """
    tensors = list(tensors)
    cosines = _no_cosines(tensors, group)
    for members in _by_dtype(tensors):
        chosen = [tensors[i] for i in members]
        joined = _joined(chosen)
        flat = _flattened(chosen) if joined is None else joined
        cosines[:, members] = _combine(flat, [tensor.numel() for tensor in chosen], group, shards)
        if joined is None:
            _write_back(flat, chosen)
    return cosines


def hierarchical_adasum_(tensors: Iterable[Tensor], groups: NodeGroups) -> Tensor:
    """Replace every tensor by its mean over the ranks of a node, adaptively summed over the nodes.

    Inside a node the tensors are reduce-scattered, so each rank sends only its share between nodes. It sends
    ``2 (1 - 1/m)`` times its bytes inside a node of m ranks, and half as much again with gloo, which has no
    reduce-scatter and uses an all-reduce.

    Args:
        tensors: See :func:`adasum_`.
        groups: The ranks of this node, and the ranks at this position in the other nodes.

    Returns:
        As :func:`adasum_`, with nodes in place of ranks.

    Raises:
        TypeError: A tensor is not dense floating point.
        ValueError: The tensors lie on several devices.
    """
    inside, across = dist.get_world_size(groups.inside), dist.get_world_size(groups.across)
    if inside == 1:
        return adasum_(tensors, groups.across)
    tensors = list(tensors)
    place = dist.get_rank(groups.inside)
    cosines = _no_cosines(tensors, groups.across)
    for members in _by_dtype(tensors):
        chosen = [tensors[i] for i in members]
        flat = _flattened(chosen, multiple=inside * across).div_(inside)
        shares = list(flat.chunk(inside))
        share = torch.empty_like(shares[place])
        dist.reduce_scatter(share, shares, group=groups.inside)
        low, high = place * len(share), (place + 1) * len(share)
        ends = [min(max(end, low), high) for end in accumulate((tensor.numel() for tensor in chosen), initial=0)]
        sizes = [end - begin for begin, end in pairwise(ends)]
        cosines[:, members] = _combine(share, sizes, groups.across, groups.inside)
        shares[place].copy_(share)
        _exchange([shares[place]] * inside, shares, groups.inside)
        _write_back(flat, chosen)
    return cosines


def _combine(
    flat: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None, shards: dist.ProcessGroup | None
) -> Tensor:
    """Combine flat vectors in place and return the cosines; ``sizes`` are the lengths of the tensors in them.

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
                _add_(rows[left][part], rows[right][part], alpha[tensor], beta[tensor])
        aa, ab, bb = dots.unbind(-1)
        lengths = aa.sqrt() * bb.sqrt()
        cosines.append(torch.where(lengths == 0, 0.0, ab / lengths).clamp(-1, 1))
    pieces[rank].copy_(rows[0])
    _exchange([pieces[rank]] * ranks, pieces, group)
    return torch.cat(cosines)


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Send and receive one tensor to and from each other rank; the sizes agree, and empty ones do not travel."""
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


def _add_(a: Tensor, b: Tensor, alpha: Tensor, beta: Tensor) -> None:
    """Replace ``a`` by ``alpha a + beta b``, computed in the dtype of the weights."""
    if a.dtype == alpha.dtype:
        a.mul_(alpha).addcmul_(b, beta)
    else:
        a.copy_(a.to(alpha.dtype).mul_(alpha).addcmul_(b.to(alpha.dtype), beta))


def _no_cosines(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.zeros(dist.get_world_size(group) - 1, len(tensors), dtype=torch.float64, device=device)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the tensors of each dtype, in the same order on every rank."""
    for i, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            raise TypeError(f"tensors[{i}]: found {tensor.layout} {tensor.dtype}; pass dense floating point tensors.")
        if tensor.device != tensors[0].device:
            raise ValueError(f"tensors[{i}]: found {tensor.device} after {tensors[0].device}; call once per device.")
    kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[i for i, tensor in enumerate(tensors) if tensor.dtype == kind] for kind in kinds]


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one flat view of tensors that are contiguous in memory, as in a DDP bucket; otherwise None."""
    storage, start = tensors[0].untyped_storage().data_ptr(), tensors[0].storage_offset()
    ends = list(accumulate((tensor.numel() for tensor in tensors), initial=start))
    for tensor, begin in zip(tensors, ends, strict=False):
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        if not tensor.is_contiguous() or place != (storage, begin):
            return None
    return tensors[0].detach().as_strided((ends[-1] - start,), (1,), start)


def _flattened(tensors: Sequence[Tensor], multiple: int = 1) -> Tensor:
    """Return all tensors in one flat copy, padded with zeros to a multiple of ``multiple`` numbers."""
    padding = tensors[0].new_zeros(-sum(tensor.numel() for tensor in tensors) % multiple)
    return torch.cat([*(tensor.detach().reshape(-1) for tensor in tensors), padding])


def _write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat[: sum(tensor.numel() for tensor in tensors)].split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
