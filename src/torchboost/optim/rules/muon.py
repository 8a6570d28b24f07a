"""Muon: momentum whose update is the nearest orthogonal matrix, for hidden layers and filters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from torchboost.core.hardware import half_precision
from torchboost.core.torch_private import foreach, foreach_lerp
from torchboost.distributed.agreement import local_part, several
from torchboost.errors import IncompatibleError
from torchboost.optim.rules.base import Batch, UpdateRule
from torchboost.optim.rules.options import Common, rule_arguments
from torchboost.optim.tensors import places_by

Polynomial = tuple[float, float, float]
"""Coefficients ``(a, b, c)`` of one iteration: ``X <- a X + b (X X') X + c (X X')^2 X``."""

QUINTIC: Polynomial = (3.4445, -4.7750, 2.0315)
"""K. Jordan's coefficients, for any number of iterations."""

RESTART = 3
"""Iterations on one Gram matrix. After more, the rounding of small singular values grows too large."""

ELONGATED = 2
"""Ratio of the sides from which the Gram form needs fewer operations."""

PIECE = 2**22
"""Entries that are orthogonalised together: 16 MiB in float32, unless one matrix is larger."""

MOST_STEPS = 100


class Muon(UpdateRule):
    """``m = momentum * m + (1 - momentum) * g``, ``w -= lr * scale * orthogonal(m)``: every direction gets equal steps.

    ``orthogonal`` sets all singular values of a matrix to about 1
    (:func:`~torchboost.optim.rules.muon.orthogonalized`). The weights of embeddings, heads, norms and biases
    are no such matrices: :func:`~torchboost.optim.muon_groups` gives them to AdamW, in one
    :class:`~torchboost.optim.MixedOptimizer`.

    With the defaults the rule and its options match ``torch.optim.Muon``, and checkpoints load both ways. In
    addition filters and stacks of matrices are allowed, matrices of one shape are computed together, and parameters
    may be sharded by FSDP2: one rank orthogonalises each matrix.

    State: ``momentum_buffer``, 4 bytes per float32 weight. Cost per matrix of ``m <= n``: 5 iterations of
    ``2 m^2 n + m^3`` multiplications, fewer if ``n >= 2 m``. Memory during a step: at most 6 times 16 MiB, or 6 times
    the largest matrix. Under FSDP2 each rank sends the size of its shards in ``ns_dtype``, and gets as much back.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), and for the scale
    ``"match_rms_adamw"`` J. Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982.

    Other arguments, and errors, are those of :class:`~torchboost.optim.UpdateRule`.

    Args:
        params: Of at least two axes.
        weight_decay: ``w -= lr * weight_decay * w``.
        momentum: Decay rate of the average of the gradients, at least 0 and below 1.
        nesterov: Orthogonalise ``momentum * m + (1 - momentum) * g`` instead of ``m``.
        ns_coefficients: Three numbers for every iteration, or a list with three numbers per iteration.
        eps: Smallest norm by which a matrix is divided.
        ns_steps: Iterations, or the length of ``ns_coefficients`` if that is a list.
        adjust_lr_fn: Scale of the update of an ``A x B`` matrix: ``"original"`` (also None), ``sqrt(max(1, A / B))``,
            or ``"match_rms_adamw"``, ``0.2 sqrt(max(A, B))``, with which AdamW's learning rate fits.
        ns_dtype: Precision of the iteration, ``torch.float32`` or ``torch.bfloat16``. None measures which is faster on
            a CPU, and is bfloat16 elsewhere. The first step writes the choice into the group, so it is saved. Several
            processes on CPUs take float32.
        stacked: Parameters of three or more axes are stacks of matrices in the last two axes, such as experts.
            If False they are filters, whose axes after the first are joined.
        split: Several matrices in each parameter, which are orthogonalised each by itself, such as 4 gates: their
            number, or a list of their sizes along ``split_axis``. Sizes are repeated until the axis ends, and the
            pieces of one place in the list are one matrix: ``[16, 16, 16]`` splits 384 rows into three times 128.
        split_axis: Axis of the matrix that is split, 0 or 1: the axis of the outputs, which are the rows of a
            ``Linear`` layer. The update is the same as with a parameter for each matrix.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 2, bias=False))
        >>> optimizer = Muon(model.parameters(), lr=0.02)
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        weight_decay: Any = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Polynomial | Sequence[Polynomial] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        ns_dtype: torch.dtype | None = None,
        stacked: bool = False,
        split: int | Sequence[int] = 1,
        split_axis: int = 0,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(**rule_arguments(locals()))

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse invalid options, and parameters that are no matrices."""
        _polynomials(group)
        _check_split(group["split"], group["split_axis"])
        if group["momentum"] >= 1:
            raise ValueError(f"momentum: found {group['momentum']!r}; give a number from 0 to below 1.")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            name = group["adjust_lr_fn"]
            raise ValueError(f"adjust_lr_fn: found {name!r}; allowed are 'original', 'match_rms_adamw' and None.")
        if group["ns_dtype"] not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"ns_dtype: found {group['ns_dtype']!r}; give torch.float32, torch.bfloat16 or None.")
        for param in group.get("params", ()):
            if isinstance(param, Tensor) and (param.ndim < 2 or param.is_complex()):
                raise ValueError(
                    f"Muon updates real matrices and filters, found a parameter of shape {tuple(param.shape)} in "
                    f"{param.dtype}; use MixedOptimizer(muon_groups(model)), which gives the others to AdamW."
                )
            if isinstance(param, Tensor):
                _sizes(group, _matrices(param.shape, stacked=group["stacked"])[-2:])

    def check_grad(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Refuse sparse gradients, and shards of which no rank can assemble a matrix."""
        super().check_grad(param, grad, group)
        _layout(param, stacked=group["stacked"])

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the entries of the state."""
        return ("momentum_buffer",)

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        """Update in place."""
        if group["ns_dtype"] is None:
            group["ns_dtype"] = faster_dtype(batch.params[0].device)
        if group["maximize"]:
            batch.grads[:] = foreach.neg(batch.grads)
        for layout, part in _parts(group, batch):
            momentum, decay = float(group["momentum"]), float(group["lr"]) * float(group["weight_decay"])
            buffers = part.state("momentum_buffer")
            foreach.lerp_(buffers, part.grads, 1 - momentum)
            directions = list(foreach_lerp(part.grads, buffers, momentum) if group["nesterov"] else buffers)
            if decay:
                foreach.mul_(part.params, 1 - decay)
            _move(group, layout, part.params, directions)


@dataclass(frozen=True)
class _Layout:
    """How a parameter holds its matrices: in the last two axes, or with all axes but the first joined."""

    shape: tuple[int, ...]
    """Of the whole parameter, or of the shard of this rank if it consists of whole matrices."""
    stacked: bool
    axis: int = 0
    """Along which matrices are divided among ranks."""
    mesh: tuple[Any, int] | None = None
    """The device mesh and its dimension of these ranks. None if this rank holds whole matrices."""

    @property
    def matrices(self) -> tuple[int, ...]:
        """The shape as matrices: ``(..., m, n)``."""
        return _matrices(self.shape, stacked=self.stacked)

    @property
    def multiplications(self) -> int:
        """A number in proportion to the cost of an iteration."""
        return math.prod(self.shape) * min(self.matrices[-2:])

    def shards(self, ranks: int) -> list[tuple[int, ...]]:
        """Return the shape of the shard of each rank, as ``torch.chunk`` divides."""
        before, length, after = self.shape[: self.axis], self.shape[self.axis], self.shape[self.axis + 1 :]
        chunk = -(-length // ranks)
        return [(*before, min(chunk, max(0, length - chunk * rank)), *after) for rank in range(ranks)]


def _matrices(shape: Sequence[int], *, stacked: bool) -> tuple[int, ...]:
    return tuple(shape) if stacked and len(shape) > 2 else (shape[0], math.prod(shape[1:]))


def _layout(tensor: Any, *, stacked: bool) -> _Layout:
    """Return how a parameter holds its matrices. Refuse shards along two axes, or of another kind than ``Shard``."""
    stacked = stacked and tensor.ndim > 2
    placements = getattr(tensor, "placements", ())
    shards = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not shards:
        return _Layout(tuple(tensor.shape), stacked)
    from torch.distributed.tensor import Shard

    placement = placements[shards[0]]
    if len(shards) > 1 or type(placement) is not Shard:
        raise IncompatibleError(
            f"Muon needs parameters that are whole, or divided along one axis as by fully_shard; found the placements "
            f"{tuple(placements)}. Give these parameters another rule, such as rule='adamw'."
        )
    axis = placement.dim % tensor.ndim
    if stacked and axis < tensor.ndim - 2:
        return _Layout(tuple(local_part(tensor).shape), stacked)
    return _Layout(tuple(tensor.shape), stacked, axis, (tensor.device_mesh, shards[0]))


def _parts(group: Mapping[str, Any], batch: Batch) -> Iterator[tuple[_Layout, Batch]]:
    """Yield the parameters by how they are divided among ranks and by shape, in pieces that fit into memory.

    All shards of one mesh are one piece, because they are exchanged together.
    """
    batch = batch.select([at for at, param in enumerate(batch.params) if param.numel()])
    layouts = [_layout(param, stacked=group["stacked"]) for param in batch.params]
    pairs = zip(layouts, batch.params, strict=True)
    for places in places_by(one.mesh or (one.shape, param.dtype, param.device) for one, param in pairs).values():
        layout, first = layouts[places[0]], batch.params[places[0]]
        length = len(places) if layout.mesh else max(1, PIECE // first.numel())
        for start in range(0, len(places), length):
            yield layout, batch.select(places[start : start + length])


def _move(group: Mapping[str, Any], layout: _Layout, params: list[Tensor], directions: list[Tensor]) -> None:
    """Subtract the orthogonalised directions from the parameters, and empty their list."""
    polynomials, dtype, lr = _polynomials(group), group["ns_dtype"], float(group["lr"])

    def turned(matrices: Tensor) -> Tensor:
        rows, columns = matrices.shape[-2:]
        adamw = group["adjust_lr_fn"] == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if adamw else math.sqrt(max(1.0, rows / columns))
        return orthogonalized(matrices.to(dtype), polynomials, eps=float(group["eps"])).mul_(-lr * scale)

    def turned_apart(matrices: Tensor) -> Tensor:
        sizes, axis = _sizes(group, matrices.shape[-2:]), group["split_axis"] - 2
        if len(sizes) == 1:
            return turned(matrices)
        result = torch.empty_like(matrices, dtype=dtype)
        parts, places = (_cut(whole, sizes, axis) for whole in (matrices, result))
        for size in dict.fromkeys(sizes):
            chosen = [number for number, other in enumerate(sizes) if other == size]
            steps = turned(torch.stack([parts[number].flatten(axis - 1, axis) for number in chosen]))
            for number, step in zip(chosen, steps, strict=True):
                places[number].copy_(step.reshape(places[number].shape))
        return result

    params = list(map(local_part, params))
    if layout.mesh:
        layouts = [_layout(direction, stacked=group["stacked"]) for direction in directions]
        steps = _exchanged([local_part(one).detach().to(dtype) for one in directions], layouts, turned_apart)
    else:
        stack = torch.stack([local_part(one).reshape(layout.matrices) for one in directions])
        directions.clear()  # their memory is used again
        steps = [step.reshape(params[0].shape) for step in turned_apart(stack)]
    foreach.add_(params, [step.to(param.dtype) for step, param in zip(steps, params, strict=True)])


def _cut(matrices: Tensor, sizes: Sequence[int], axis: int) -> list[Tensor]:
    """Return views of the parts along an axis, counted from the end. Each has the repeats in the axis before it."""
    return list(matrices.unflatten(axis, (-1, sum(sizes))).split(list(sizes), axis))


def _sizes(group: Mapping[str, Any], sides: Sequence[int]) -> list[int]:
    """Return the sizes of the parts of a matrix with these sides, or one size if it is whole."""
    split, length = group["split"], sides[group["split_axis"]]
    number = split if isinstance(split, int) else sum(split)
    if length % number:
        raise ValueError(
            f"split: found {split!r} for a parameter with matrices of {sides[0]} x {sides[1]}, whose axis "
            f"{group['split_axis']} does not consist of such parts; give split=1, or sizes whose sum divides {length}."
        )
    return [length // split] * split if isinstance(split, int) else list(split)


def _check_split(split: Any, axis: Any) -> None:
    listed = list(split) if isinstance(split, (list, tuple)) else [split]
    if not listed or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in listed):
        raise ValueError(f"split: found {split!r}; give a number of equal parts, or a list of their sizes.")
    if isinstance(axis, bool) or axis not in (0, 1):
        raise ValueError(f"split_axis: found {axis!r}; give 0 for the rows of the matrices or 1 for their columns.")


def _exchanged(shards: Sequence[Tensor], layouts: Sequence[_Layout], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return this rank's shards of ``work(matrices)``. Every matrix is worked on by one rank.

    They are dealt by their number of multiplications, the largest first, and sent with two ``all_to_all_single``.
    """
    mesh: Any
    mesh, dim = layouts[0].mesh or (None, 0)
    group = mesh.get_group(dim)
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    loads, dealt = [0 for _ in ranks], [[] for _ in ranks]
    for at in sorted(range(len(layouts)), key=lambda at: (-layouts[at].multiplications, at)):
        owner = min(ranks, key=lambda rank: loads[rank])
        loads[owner] += layouts[at].multiplications
        dealt[owner].append(at)
    shapes = [layout.shards(len(ranks)) for layout in layouts]
    mine = [[shapes[at][other] for at in dealt[rank]] for other in ranks]
    arrived = _sent([[shards[at] for at in dealt[other]] for other in ranks], mine, shards[0], group)
    whole: dict[int, Tensor] = {}
    for at, parts in zip(dealt[rank], zip(*arrived, strict=True), strict=True):
        whole[at] = torch.cat(parts, dim=layouts[at].axis).reshape(layouts[at].matrices)
    for places in places_by(layouts[at].shape for at in dealt[rank]).values():
        alike = [dealt[rank][place] for place in places]
        whole.update(zip(alike, work(torch.stack([whole[at] for at in alike])), strict=True))
    cut = [
        whole[at].reshape(layouts[at].shape).split([shape[layouts[at].axis] for shape in shapes[at]], layouts[at].axis)
        for at in dealt[rank]
    ]
    theirs = [[shapes[at][rank] for at in positions] for positions in dealt]
    returned = _sent([[parts[other] for parts in cut] for other in ranks], theirs, shards[0], group)
    results = {at: part for pair in zip(dealt, returned, strict=True) for at, part in zip(*pair, strict=True)}
    return [results[at] for at in range(len(shards))]


def _sent(
    parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], like: Tensor, group: Any
) -> list[list[Tensor]]:
    """Send ``parts[rank]`` to each rank, and return the tensors from each rank, which have these shapes."""
    sizes = [list(map(math.prod, listed)) for listed in shapes]
    arriving, leaving = list(map(sum, sizes)), [sum(map(Tensor.numel, listed)) for listed in parts]
    sent = torch.cat([like.new_empty(0), *(part.reshape(-1) for listed in parts for part in listed)])
    received = like.new_empty(sum(arriving))
    dist.all_to_all_single(received, sent, arriving, leaving, group=group)
    return [
        [part.view(shape) for part, shape in zip(flat.split(counts), listed, strict=True)]
        for flat, counts, listed in zip(received.split(arriving), sizes, shapes, strict=True)
    ]


def _polynomials(group: Mapping[str, Any]) -> list[Polynomial]:
    """Return the coefficients of every iteration. Refuse other than numbers in threes, and too many iterations."""
    numbers, steps = group["ns_coefficients"], group["ns_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"ns_steps: found {steps!r}; give a whole number.")
    if not 0 < steps < MOST_STEPS:
        raise ValueError(f"ns_steps: found {steps}; give a number from 1 to {MOST_STEPS - 1}.")
    if not isinstance(numbers, (tuple, list)) or not numbers:
        raise TypeError(f"ns_coefficients: found {numbers!r}; give three numbers, or a list of three numbers each.")
    several = isinstance(numbers[0], (tuple, list))
    listed: list[Any] = [tuple(one) for one in numbers] if several else [tuple(numbers)] * steps
    for one in listed:
        if len(one) != 3 or not all(isinstance(number, (int, float)) and math.isfinite(number) for number in one):
            raise ValueError(f"ns_coefficients: found {one!r}; give three finite numbers per iteration.")
    return listed


def orthogonalized(matrices: Tensor, polynomials: Sequence[Polynomial], *, eps: float = 1e-7) -> Tensor:
    """Return ``U V'`` of the singular value decomposition of each matrix, approximately.

    With five iterations of :data:`QUINTIC` the singular values of the result are between about 0.7 and 1.2, for all
    that are at least 0.003 times the Frobenius norm of the matrix.

    Cost: per iteration ``2 m^2 n + m^3`` multiplications for a matrix of ``m <= n``. If ``n >= 2 m``, iterations work
    on the ``m x m`` Gram matrix, and the matrix itself is read twice per three iterations. In float32 both forms agree
    with float64 to 1e-5 of the norm of the result.

    Source: as :class:`Muon`, and for the Gram form with restarts "Gram Newton-Schulz" (Dao-AILab, 2026).

    Args:
        matrices: Shape ``(..., m, n)``, float32 or bfloat16, as the result.
        polynomials: One per iteration.
        eps: Smallest norm by which a matrix is divided.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    # Row by row first: over millions of entries torch's norm in float32 is wrong in the fifth digit.
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True, dtype=torch.float32)
    norm = torch.linalg.vector_norm(norms, dim=-2, keepdim=True).clamp(min=eps)
    unit = (wide / norm).to(matrices.dtype)
    flat = unit.reshape(-1, *unit.shape[-2:])
    rows, columns = flat.shape[-2:]
    turned = _by_gram(flat, polynomials) if columns >= ELONGATED * rows else _plainly(flat, polynomials)
    result = turned.reshape(wide.shape)
    return result.mT if tall else result


@torch.compiler.disable()
def faster_dtype(device: torch.device) -> torch.dtype:
    """Return the precision in which products of matrices are fast: bfloat16, except on CPUs that are slow in it.

    On a CPU this is measured, in 0.1 s, once per process. Several processes on CPUs take float32 without a measurement,
    because all of them must use one precision.
    """
    if device.type != "cpu":
        return torch.bfloat16
    alone = not several() or dist.get_world_size() == 1
    return torch.bfloat16 if alone and half_precision(device, 0).fast else torch.float32


def _plainly(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    for a, b, c in polynomials:
        gram = x @ x.mT
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, inner, x, beta=a)
    return x


def _by_gram(x: Tensor, polynomials: Sequence[Polynomial]) -> Tensor:
    """Iterate on ``X X'``, and apply the product of the polynomials to ``X`` every few iterations."""
    for start in range(0, len(polynomials), RESTART):
        part = polynomials[start : start + RESTART]
        gram, product = x @ x.mT, None
        for position, (a, b, c) in enumerate(part):
            inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            if position + 1 < len(part):  # X X' of the next iterate: all of these matrices commute
                half = torch.baddbmm(gram, inner, gram, beta=a)
                gram = torch.baddbmm(half, half, inner, beta=a)
            if product is None:
                product = inner
                product.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                product = torch.baddbmm(product, inner, product, beta=a)
        if product is not None:
            x = product @ x
    return x
