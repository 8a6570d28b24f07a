"""AdaSum: what the ranks agree on is averaged, what they disagree on is added.

Two vectors become ``(1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b``: orthogonal vectors are added, parallel ones
averaged (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021). More than two are combined
along a binary tree of ranks, per tensor. The vectors are halved at each level and gathered at the end, so a rank sends
``2 (1 - 1/n)`` times its vector for any number n of ranks, as in an all-reduce, and a few dot products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.distributed.topology import NodeGroups

__all__ = ["adasum_", "combined", "hierarchical_adasum_", "pair_weights"]

_Bounds = tuple[int, tuple[int, int]]
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
    if len(vectors) == 1:
        return vectors[0].detach().clone()
    middle = _middle(len(vectors))
    a, b = combined(vectors[:middle]), combined(vectors[middle:])
    dots = _dots(a.flatten(), b.flatten(), _exact(a.device))
    (alpha,), (beta,) = _weights(dots.view(1, 3), middle, len(vectors) - middle, a.dtype)
    return _add_(a, b, alpha, beta)


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

    Cost: each rank sends ``2 (1 - 1/n)`` times its bytes in ``2 log2 n`` exchanges, and takes part in ``log2 n``
    all-reduces, of ``24 n`` bytes per tensor together; all this for each dtype. Memory: a copy of the tensors, and
    another one unless they are contiguous in memory, as in a DDP bucket. Half precision is added in
    float32 and rounded at every level of the tree.
    """
    tensors = list(tensors)
    ranks = dist.get_world_size(group)
    cosines = _no_cosines(ranks, tensors)
    for chosen in _by_dtype(tensors):
        own = [tensors[i] for i in chosen]
        joined = _joined(own)
        flat = _flattened(own) if joined is None else joined
        cosines[:, chosen] = _combine(flat, [tensor.numel() for tensor in own], group, shards)
        if joined is None:
            _write_back(flat, own)
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
        bounds = [flat.numel() * i // inside for i in range(inside + 1)]
        low, high = bounds[place : place + 2]
        share = torch.empty_like(flat[low:high])
        dist.reduce_scatter(share, list(flat.chunk(inside)), group=groups.inside)
        flat[low:high] = share
        ends = [min(max(end, low), high) for end in accumulate((tensors[i].numel() for i in chosen), initial=0)]
        sizes = [end - begin for begin, end in pairwise(ends)]
        cosines[:, chosen] = _combine(flat[low:high], sizes, groups.across, groups.inside)
        _gather(flat, dict(enumerate(pairwise(bounds))), groups.inside)
        _write_back(flat, [tensors[i] for i in chosen])
    return cosines


class _Side(NamedTuple):
    """Consecutive ranks that have combined their vectors; each holds one piece of the result."""

    first: int
    ranks: int

    def pieces(self, length: int) -> dict[int, tuple[int, int]]:
        """Return the range of each rank's piece in the vector."""
        bounds = [length * place // self.ranks for place in range(self.ranks + 1)]
        return dict(zip([self.first + rank for rank in _places(self.ranks)], pairwise(bounds), strict=True))


class _Part(NamedTuple):
    """The part of one tensor that this rank combines: its own numbers and those of the other side."""

    tensor: int
    own: Tensor
    other: Tensor


def _middle(ranks: int) -> int:
    return (ranks + 1) // 2


def _places(ranks: int) -> list[int]:
    """Return the ranks in the order of the pieces they hold; the two sides alternate.

    Each piece then lies within the piece that its rank held before the sides were combined.
    """
    if ranks == 1:
        return [0]
    middle = _middle(ranks)
    order = [0] * ranks
    order[::2] = _places(middle)
    order[1::2] = [middle + place for place in _places(ranks - middle)]
    return order


def _levels(ranks: int) -> list[list[tuple[_Side, _Side]]]:
    """Return the pairs of the tree, leaves first; the pairs of one level are combined at the same time."""
    levels, sides = [], [_Side(0, ranks)]
    while any(side.ranks > 1 for side in sides):
        split = [side for side in sides if side.ranks > 1]
        pairs = []
        for side in split:
            middle = _middle(side.ranks)
            pairs.append((_Side(side.first, middle), _Side(side.first + middle, side.ranks - middle)))
        levels.insert(0, pairs)
        sides = [half for pair in pairs for half in pair]
    return levels


def _combine(
    flat: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None, shards: dist.ProcessGroup | None
) -> Tensor:
    """Combine flat vectors in place and return the cosines; ``sizes`` are the lengths of the tensors in them."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    exact = _exact(flat.device)
    if ranks & (ranks - 1):
        # Some ranks skip the first exchange, but NCCL needs all of them in the first call of a group.
        dist.all_reduce(torch.zeros(1, device=flat.device), group=group)
    cosines = [torch.zeros(0, len(sizes), dtype=exact, device=flat.device)]
    for pairs in _levels(ranks):
        dots = torch.zeros(len(pairs), len(sizes), 3, dtype=exact, device=flat.device)
        # A rank without a pair at this level only takes part in the sums.
        mine = next((i for i, (left, right) in enumerate(pairs) if left.first <= rank < right.first + right.ranks), 0)
        left, right = pairs[mine]
        parts = _exchanged(flat, sizes, left, right, rank, group)
        if parts:
            found = torch.stack([_dots(part.own, part.other, exact) for part in parts])
            dots[mine, [part.tensor for part in parts]] = found if rank < right.first else found.flip(-1)
        dist.all_reduce(dots, group=group)
        if shards is not None:
            dist.all_reduce(dots, group=shards)
        weights = _weights(dots[mine], left.ranks, right.ranks, flat.dtype)
        if rank >= right.first:
            weights.reverse()
        for part in parts:
            _add_(part.own, part.other, weights[0][part.tensor], weights[1][part.tensor])
        cosines.append(_cosines(dots))
    _gather(flat, _Side(0, ranks).pieces(flat.numel()), group)
    return torch.cat(cosines)


def _exchanged(
    flat: Tensor, sizes: Sequence[int], left: _Side, right: _Side, rank: int, group: dist.ProcessGroup | None
) -> list[_Part]:
    """Swap pieces with the other side; return this rank's next part, empty if it belongs to neither."""
    length = flat.numel()
    both = _Side(left.first, left.ranks + right.ranks).pieces(length)
    if rank not in both:
        return []
    ours, theirs = left.pieces(length), right.pieces(length)
    if rank in theirs:
        ours, theirs = theirs, ours
    low, high = both[rank]
    received = flat.new_empty(high - low)
    given = [(peer, _overlap(ours[rank], both[peer])) for peer in theirs]
    bounds = [(peer, _overlap(both[rank], piece)) for peer, piece in theirs.items()]
    taken = [(peer, (begin - low, end - low)) for peer, (begin, end) in bounds]
    _transfer((flat, given), (received, taken), group)
    own = flat[low:high]
    return [_Part(i, own[begin:end], received[begin:end]) for i, begin, end in _segments(sizes, low, high)]


def _transfer(
    source: tuple[Tensor, Iterable[_Bounds]], target: tuple[Tensor, Iterable[_Bounds]], group: dist.ProcessGroup | None
) -> None:
    """Send parts of one vector and receive parts of another; each peer maps to their start and end."""
    calls = [
        dist.P2POp(way, vector[low:high], group=group, group_peer=peer)
        for way, (vector, parts) in ((dist.isend, source), (dist.irecv, target))
        for peer, (low, high) in parts
        if low < high
    ]
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()


def _gather(flat: Tensor, pieces: dict[int, tuple[int, int]], group: dist.ProcessGroup | None) -> None:
    """Give every rank all pieces: the bytes of an all-gather. Each exchange doubles what a rank has."""
    rank, ranks, has = dist.get_rank(group), len(pieces), 1
    while has < ranks:
        ours, theirs = (
            [pieces[(first + i) % ranks] for i in range(min(has, ranks - has))] for first in (rank, rank + has)
        )
        given = torch.cat([flat[low:high] for low, high in ours])
        taken = flat.new_empty(sum(high - low for low, high in theirs))
        to, source = (rank - has) % ranks, (rank + has) % ranks
        _transfer((given, [(to, (0, len(given)))]), (taken, [(source, (0, len(taken)))]), group)
        for (low, high), part in zip(theirs, taken.split([high - low for low, high in theirs]), strict=True):
            flat[low:high] = part
        has += len(theirs)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])


def _segments(sizes: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Return which tensors lie in a piece and their range in it; the rest after the last one is padding."""
    for i, (begin, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
        begin, end = _overlap((begin, end), (low, high))
        if begin < end:
            yield i, begin - low, end - low


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
