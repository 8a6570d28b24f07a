"""AdaSum: what the ranks agree on is averaged, what they do not is added.

Two vectors become ``(1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b``: orthogonal ones are added, parallel ones averaged
(Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021). More than two are combined along a
binary tree of ranks, per tensor. The vectors are halved on the way up and gathered at its end, so that a rank sends
``2 (1 - 1/n)`` times its vector for any number n of ranks, as an all-reduce does, and a few dot products.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchboost.distributed.topology import NodeGroups

__all__ = ["adasum_", "combined", "hierarchical_adasum_", "pair_weights"]

_CHUNK = 1 << 18  # numbers that are converted to float64 at a time: 2 MiB, which stays in the cache


def pair_weights(dots: Tensor, left: int = 1, right: int = 1) -> tuple[Tensor, Tensor]:
    """Return the weights of a and b in their adaptive sum.

    Where the sides stand for different numbers of ranks, as in a tree over three, the share of each side takes the
    place of the published 1/2, so that parallel vectors are averaged over all ranks alike.

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
    """Return in one process what :func:`adasum_` gives to ranks that hold these vectors.

    Args:
        vectors: One per rank, of one shape and dtype; left alone.
    """
    if len(vectors) == 1:
        return vectors[0].clone()
    middle = _middle(len(vectors))
    a, b = combined(vectors[:middle]), combined(vectors[middle:])
    alpha, beta = pair_weights(_dots(a.flatten(), b.flatten()), middle, len(vectors) - middle)
    return _weighted(a, b, alpha, beta)


def adasum_(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, *, shards: dist.ProcessGroup | None = None
) -> Tensor:
    """Replace every tensor by the adaptive sum of what the ranks of a group hold; all ranks get the same bits.

    Args:
        tensors: Floating point, dense, on one device, of the same shapes and dtypes in the same order on all ranks.
        group: Ranks to combine, any number of them; the default group where None.
        shards: Ranks that hold the other parts of the same tensors, as under FSDP2: dot products are summed over them.

    Returns:
        The cosine between the two sides of each pair of the tree, leaves first, for each tensor: shape
        ``(ranks - 1, tensors)``, on the device of the tensors; 0 where a side is zero.

    Raises:
        TypeError: A tensor is not dense floating point.

    Cost: each rank sends ``2 (1 - 1/n)`` times its bytes in ``log2 n`` exchanges and one all-gather, and ``log2 n``
    all-reduces of at most ``12 n`` bytes per tensor; one copy of the tensors, half a copy beside it.
    """
    tensors = list(tensors)
    ranks = dist.get_world_size(group)
    cosines = _no_cosines(ranks, tensors)
    for chosen in _by_dtype(tensors):
        flat = _flattened([tensors[i] for i in chosen], ranks)
        cosines[:, chosen] = _combine(flat, [tensors[i].numel() for i in chosen], group, shards)
        _write_back(flat, [tensors[i] for i in chosen])
    return cosines


def hierarchical_adasum_(tensors: Iterable[Tensor], groups: NodeGroups) -> Tensor:
    """Replace every tensor by its mean over the ranks of a node, adaptively summed over the nodes.

    Inside a node the tensors are reduced and scattered, so that each rank carries only its share between nodes.

    Args:
        tensors: See :func:`adasum_`.
        groups: Ranks of this node, and ranks at this place in the other nodes.

    Returns:
        As :func:`adasum_`, with nodes for ranks.

    Raises:
        TypeError: A tensor is not dense floating point.
    """
    inside, across = dist.get_world_size(groups.inside), dist.get_world_size(groups.across)
    if inside == 1:
        return adasum_(tensors, groups.across)
    tensors = list(tensors)
    place = dist.get_rank(groups.inside)
    cosines = _no_cosines(across, tensors)
    for chosen in _by_dtype(tensors):
        flat = _flattened([tensors[i] for i in chosen], inside * across).div_(inside)
        shares = list(flat.chunk(inside))
        share = torch.empty_like(shares[place])
        dist.reduce_scatter(share, shares, group=groups.inside)
        ends = [0, *accumulate(tensors[i].numel() for i in chosen)]
        low, high = place * share.numel(), (place + 1) * share.numel()
        inner = [min(max(end, low), high) for end in ends]
        sizes = [b - a for a, b in pairwise(inner)]
        cosines[:, chosen] = _combine(share, sizes, groups.across, groups.inside)
        dist.all_gather(shares, share, group=groups.inside)
        _write_back(flat, [tensors[i] for i in chosen])
    return cosines


class _Side(NamedTuple):
    """Consecutive ranks that have combined their vectors; each holds one piece of the result."""

    first: int
    ranks: int

    def piece(self, rank: int, length: int) -> tuple[int, int]:
        """Return where in the vector the piece of ``rank`` lies."""
        place = _places(self.ranks).index(rank - self.first)
        return length * place // self.ranks, length * (place + 1) // self.ranks

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self.first <= rank < self.first + self.ranks

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.ranks))


def _middle(ranks: int) -> int:
    return (ranks + 1) // 2


def _places(ranks: int) -> list[int]:
    """Return who holds the first piece, the second, ...: the ranks of both sides in turn.

    So every piece lies within the piece that its holder had before the sides were combined.
    """
    if ranks == 1:
        return [0]
    middle = _middle(ranks)
    order = [0] * ranks
    order[::2] = _places(middle)
    order[1::2] = [middle + place for place in _places(ranks - middle)]
    return order


def _levels(ranks: int) -> list[list[tuple[_Side, _Side]]]:
    """Return the pairs of the tree, leaves first; those of one level are combined at the same time."""
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
    """Combine flat vectors in place; ``sizes`` are the lengths of the tensors in them. Return the cosines."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    exact = _exact(flat.device)
    ends = list(accumulate(sizes))
    cosines = []
    for pairs in _levels(ranks):
        dots = torch.zeros(len(pairs), len(sizes), 3, dtype=exact, device=flat.device)
        mine = next((i for i, (left, right) in enumerate(pairs) if rank in left or rank in right), None)
        low, high, parts = 0, 0, []
        if mine is not None:
            left, right = pairs[mine]
            low, high = _Side(left.first, left.ranks + right.ranks).piece(rank, flat.numel())
            other = _exchanged(flat, rank, left, right, group)
            sides = (flat[low:high], other) if rank in left else (other, flat[low:high])
            parts = [(i, sides[0][a:b], sides[1][a:b]) for i, a, b in _segments(ends, low, high)]
            for i, a, b in parts:
                dots[mine, i] = _dots(a, b, exact)
        dist.all_reduce(dots, group=group)
        if shards is not None:
            dist.all_reduce(dots, group=shards)
        if mine is not None:
            left, right = pairs[mine]
            alpha, beta = pair_weights(dots[mine], left.ranks, right.ranks)
            start = low
            for i, a, b in parts:
                flat[start : start + a.numel()] = _weighted(a, b, alpha[i], beta[i])
                start += a.numel()
        cosines.append(_cosines(dots))
    if ranks > 1:
        whole = _Side(0, ranks)
        pieces = [flat[slice(*whole.piece(r, flat.numel()))] for r in range(ranks)]
        dist.all_gather(pieces, pieces[rank].clone(), group=group)
    return torch.cat(cosines) if cosines else torch.zeros(0, len(sizes), dtype=exact, device=flat.device)


def _exchanged(flat: Tensor, rank: int, left: _Side, right: _Side, group: dist.ProcessGroup | None) -> Tensor:
    """Send the other side what it goes on with of my piece; return its part of what I go on with."""
    ours, theirs = (left, right) if rank in left else (right, left)
    both = _Side(left.first, left.ranks + right.ranks)
    before, after = ours.piece(rank, flat.numel()), both.piece(rank, flat.numel())
    received = flat.new_empty(after[1] - after[0])
    calls = []
    for peer in theirs:
        low, high = _overlap(before, both.piece(peer, flat.numel()))
        if low < high:
            calls.append(dist.P2POp(dist.isend, flat[low:high], group=group, group_peer=peer))
        low, high = _overlap(after, theirs.piece(peer, flat.numel()))
        if low < high:
            part = received[low - after[0] : high - after[0]]
            calls.append(dist.P2POp(dist.irecv, part, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return received


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])


def _segments(ends: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Return which tensors lie in a piece, and where in it; what is behind the last one is padding."""
    at = low
    for i in range(bisect_right(ends, low), len(ends)):
        if at >= high:
            return
        end = min(ends[i], high)
        if end > at:
            yield i, at - low, end - low
        at = end


def _dots(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``a.a``, ``a.b`` and ``b.b`` of two flat tensors, computed in ``dtype``."""
    dots = torch.zeros(3, dtype=dtype, device=a.device)
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        x, y = x.to(dtype), y.to(dtype)
        dots += torch.stack((x.dot(x), x.dot(y), y.dot(y)))
    return dots


def _weighted(a: Tensor, b: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return ``alpha a + beta b``, computed in float32 at least, in the dtype of ``a``."""
    exact = torch.promote_types(a.dtype, torch.float32)
    return (a.to(exact) * alpha.to(exact)).addcmul_(b.to(exact), beta.to(exact)).to(a.dtype)


def _exact(device: torch.device) -> torch.dtype:
    """Return the dtype of dot products: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _no_cosines(ranks: int, tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.zeros(ranks - 1, len(tensors), dtype=_exact(device), device=device)


def _cosines(dots: Tensor) -> Tensor:
    aa, ab, bb = dots.unbind(-1)
    length = aa.sqrt() * bb.sqrt()
    return torch.where(length == 0, 0.0, ab / length)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the tensors of each dtype, in the same order on every rank."""
    for i, tensor in enumerate(tensors):
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            raise TypeError(f"tensors[{i}]: found {tensor.layout} {tensor.dtype}; give dense floating point tensors.")
    kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[i for i, tensor in enumerate(tensors) if tensor.dtype == kind] for kind in kinds]


def _flattened(tensors: Sequence[Tensor], multiple: int) -> Tensor:
    """Return all tensors in one flat copy, with zeros behind up to a multiple of so many numbers."""
    length = sum(tensor.numel() for tensor in tensors)
    padding = tensors[0].new_zeros(-length % multiple)
    return torch.cat([*(tensor.detach().reshape(-1) for tensor in tensors), padding])


def _write_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    at = 0
    for tensor in tensors:
        tensor.detach().copy_(flat[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()
