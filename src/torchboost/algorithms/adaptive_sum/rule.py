"""AdaSum: what the ranks agree on is averaged, what they disagree on is added.

Two vectors become ``(1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b``: orthogonal vectors are added, parallel ones
averaged (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021). More than two are combined
along a binary tree of ranks, per tensor. Each rank gets the same piece of all vectors, combines these along the whole
tree, and sends the result to the others. Only the dot products are summed over the ranks, once per level. So a rank
sends ``2 (1 - 1/n)`` times its vector for any number n of ranks, as in an all-reduce, and a few dot products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.distributed.topology import NodeGroups

__all__ = ["adasum_", "combined", "hierarchical_adasum_", "pair_weights"]

_CHUNK = 1 << 18  # numbers converted to float64 at a time: 2 MiB, which fits in the cache


def pair_weights(dots: Tensor, left: int = 1, right: int = 1) -> tuple[Tensor, Tensor]:
    """Return the weights of a and b in their adaptive sum.

    If the sides stand for different numbers of ranks, as in a tree over three, the share of each side replaces the
    published 1/2, so that parallel vectors are averaged over all ranks with equal weight.

    Args:
        dots: ``a.a``, ``a.b`` and ``b.b`` in the last dimension, shape ``(..., 3)``.
        left: Number of ranks that a stands for.
        right: Number of ranks that b stands for.

    Returns:
        Two tensors of shape ``(...)``. A vector whose square underflows counts as zero: both weights are 1.
    """
    aa, ab, bb = dots.unbind(-1)
    limits = torch.finfo(dots.dtype)
    weights = []
    for square, ranks in ((aa, left), (bb, right)):
        there = square > limits.tiny / limits.eps
        ratio = ab / torch.where(there, square, 1.0)
        weights.append(torch.where(there | square.isnan(), 1.0 - ranks / (left + right) * ratio, 1.0))
    return weights[0], weights[1]


def combined(vectors: Sequence[Tensor]) -> Tensor:
    """Compute in one process what :func:`adasum_` returns to ranks that hold these vectors.

    Args:
        vectors: One per rank, of the same shape and dtype; not changed.

    Raises:
        ValueError: No vectors.
    """
    if not vectors:
        raise ValueError("found no vectors; pass one per rank.")
    rows = torch.stack([vector.detach().flatten() for vector in vectors])
    _along_the_tree(rows, [(0, 0, rows.shape[1])], 1, lambda dots: None)
    return rows[0].view(vectors[0].shape).clone()


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
        ``(ranks - 1, tensors)``, on the device of the tensors; 0 if a side is zero.

    Raises:
        TypeError: A tensor is not dense floating point.
        ValueError: The tensors lie on several devices.

    Cost: each rank sends ``2 (1 - 1/n)`` times its bytes in two all-to-all exchanges, and takes part in ``log2 n``
    all-reduces, of ``24 n`` bytes per tensor together; all this for each dtype. Memory: a copy of the tensors, and
    another one unless they are contiguous in memory, as in a DDP bucket. Half precision is added in float32 and rounded
    at every level of the tree.
    """
    tensors = list(tensors)
    ranks = dist.get_world_size(group)
    cosines = _no_cosines(ranks, tensors)
    for chosen in _by_dtype(tensors):
        members = [tensors[i] for i in chosen]
        joined = _joined(members)
        flat = _flattened(members) if joined is None else joined
        cosines[:, chosen] = _combine(flat, [tensor.numel() for tensor in members], group, shards)
        if joined is None:
            _write_back(flat, members)
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
    cosines = _no_cosines(across, tensors)
    for chosen in _by_dtype(tensors):
        flat = _flattened([tensors[i] for i in chosen], inside * across).div_(inside)
        share = torch.empty_like(flat[: len(flat) // inside])
        dist.reduce_scatter(share, list(flat.chunk(inside)), group=groups.inside)
        low, high = place * len(share), (place + 1) * len(share)
        ends = [min(max(end, low), high) for end in accumulate((tensors[i].numel() for i in chosen), initial=0)]
        sizes = [end - begin for begin, end in pairwise(ends)]
        cosines[:, chosen] = _combine(share, sizes, groups.across, groups.inside)
        dist.all_gather(list(flat.chunk(inside)), share, group=groups.inside)
        _write_back(flat, [tensors[i] for i in chosen])
    return cosines


def _levels(ranks: int) -> list[list[tuple[int, int, int]]]:
    """Return the pairs of the tree, leaves first: the first rank of each side, and one past the last of both."""
    levels, sides = [], [(0, ranks)]
    while pairs := [(first, (first + end + 1) // 2, end) for first, end in sides if end - first > 1]:
        levels.insert(0, pairs)
        sides = [side for first, middle, end in pairs for side in ((first, middle), (middle, end))]
    return levels


def _along_the_tree(
    rows: Tensor, segments: Sequence[tuple[int, int, int]], tensors: int, add_up: Callable[[Tensor], object]
) -> Tensor:
    """Combine the rows, one per rank, into the first of them; return the cosines. All rows are overwritten.

    Args:
        rows: The same piece of the vector of each rank, shape ``(ranks, numbers)``.
        segments: Which tensors lie in the piece: number, start and end.
        tensors: Number of tensors in the whole vector.
        add_up: Sums dot products over the pieces, in place.
    """
    exact = _exact(rows.device)
    cosines = [torch.zeros(0, tensors, dtype=exact, device=rows.device)]
    for pairs in _levels(len(rows)):
        dots = torch.zeros(len(pairs), tensors, 3, dtype=exact, device=rows.device)
        for place, (left, right, _) in enumerate(pairs):
            for tensor, begin, end in segments:
                dots[place, tensor] = _dots(rows[left, begin:end], rows[right, begin:end], exact)
        add_up(dots)
        for place, (left, right, last) in enumerate(pairs):
            alpha, beta = _weights(dots[place], right - left, last - right, rows.dtype)
            for tensor, begin, end in segments:
                _add_(rows[left, begin:end], rows[right, begin:end], alpha[tensor], beta[tensor])
        cosines.append(_cosines(dots))
    return torch.cat(cosines)


def _combine(
    flat: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None, shards: dist.ProcessGroup | None
) -> Tensor:
    """Combine flat vectors in place and return the cosines; ``sizes`` are the lengths of the tensors in them."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = [flat.numel() * (i + 1) // ranks - flat.numel() * i // ranks for i in range(ranks)]
    low = sum(pieces[:rank])
    rows = flat.new_empty(ranks, pieces[rank])

    def add_up(dots: Tensor) -> None:
        for ranks_of_pieces in (group, shards) if shards is not None else (group,):
            dist.all_reduce(dots, group=ranks_of_pieces)

    _exchange(rows.view(-1), flat, [pieces[rank]] * ranks, pieces, group)
    cosines = _along_the_tree(rows, list(_segments(sizes, low, low + pieces[rank])), len(sizes), add_up)
    rows[1:] = rows[:1]
    _exchange(flat, rows.view(-1), pieces, [pieces[rank]] * ranks, group)
    return cosines


def _exchange(
    into: Tensor, out_of: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup | None
) -> None:
    """Send consecutive parts of one vector to the ranks, and receive one from each. They travel as bytes."""
    size = into.element_size()
    parts = [[size * numbers for numbers in split] for split in (received, sent)]
    dist.all_to_all_single(into.view(torch.uint8), out_of.view(torch.uint8), *parts, group=group)


def _segments(sizes: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield which tensors lie in a piece and their range in it; the rest after the last one is padding."""
    for tensor, (begin, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        begin, end = max(begin, low), min(end, high)
        if begin < end:
            yield tensor, begin - low, end - low


def _dots(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``a.a``, ``a.b`` and ``b.b`` of two flat tensors, computed in ``dtype``."""
    dots = []
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        x, y = x.to(dtype), y.to(dtype)
        dots.append(torch.stack((x.dot(x), x.dot(y), y.dot(y))))
    return dots[0] if len(dots) == 1 else torch.stack(dots).sum(0)


def _weights(dots: Tensor, left: int, right: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Return the weights of both sides for each tensor, in the dtype in which ``dtype`` is added.

    If one side is very short, its weight may overflow that dtype. It is then clamped to the largest number, which lies
    between the weight for a nonzero vector and the weight for zero.
    """
    adding = _adding(dtype)
    most = torch.finfo(adding).max
    return [weight.clamp(-most, most).to(adding).unbind() for weight in pair_weights(dots, left, right)]


def _adding(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _add_(a: Tensor, b: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Replace ``a`` by ``alpha a + beta b``, computed in the dtype of the weights."""
    if a.dtype == alpha.dtype:
        return a.mul_(alpha).addcmul_(b, beta)
    return a.copy_(a.to(alpha.dtype).mul_(alpha).addcmul_(b.to(alpha.dtype), beta))


def _exact(device: torch.device) -> torch.dtype:
    """Return the dtype of dot products: float64 if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _no_cosines(ranks: int, tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.zeros(ranks - 1, len(tensors), dtype=_exact(device), device=device)


def _cosines(dots: Tensor) -> Tensor:
    aa, ab, bb = dots.unbind(-1)
    length = aa.sqrt() * bb.sqrt()
    return torch.where(length == 0, 0.0, ab / length).clamp(-1, 1)


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
    at = start
    for tensor in tensors:
        if (
            not tensor.is_contiguous()
            or tensor.storage_offset() != at
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        at += tensor.numel()
    return tensors[0].detach().as_strided((at - start,), (1,), start)


def _flattened(tensors: Sequence[Tensor], multiple: int = 1) -> Tensor:
    """Return all tensors in one flat copy, padded with zeros to a multiple of ``multiple`` numbers."""
    length = sum(tensor.numel() for tensor in tensors)
    padding = tensors[0].new_zeros(-length % multiple)
    return torch.cat([*(tensor.detach().reshape(-1) for tensor in tensors), padding])


def _write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    at = 0
    for tensor in tensors:
        tensor.detach().copy_(flat[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()
