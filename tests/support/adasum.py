"""Vectors to combine, what ranks make of them, and the definition of AdaSum to hold it against."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.traffic import bytes_sent
from torchboost.algorithms.adaptive_sum.rule import adasum_, hierarchical_adasum_
from torchboost.distributed.topology import NodeGroups, Topology

__all__ = [
    "CASES",
    "LAYOUTS",
    "LINUX",
    "PARAMETERS",
    "SHAPES",
    "Answer",
    "OfNodes",
    "alike",
    "answered",
    "formula",
    "normal",
    "of_node",
    "of_rank",
    "pair_cosines",
]

SHAPES = ((1000,), (3, 7), (1,), (), (0,), (64, 33), (2, 0, 3), (5,))
LAYOUTS = ((2, 2), (4, 2), (4, 4), (4, 1), (6, 2))  # ranks, ranks per node
PARAMETERS, TENSORS = 1_000_000, 20
ALONE = ("float32", "long", "end to end", "empty", "nothing")  # cases combined in a call of their own
LINUX = sys.platform == "linux"
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


def normal(rank: int, *shapes: tuple[int, ...], dtype: torch.dtype = F32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + rank)
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]


def alike(shape: tuple[int, ...] = (97,)) -> Tensor:
    return normal(-1, shape)[0]


def basis(rank: int, count: int) -> Tensor:
    """Return a vector that shares no place with those of the other ranks."""
    vector = torch.zeros(count, 13)
    vector[rank] = normal(rank, (13,))[0]
    return vector


def with_one(value: float, rank: int, holder: int) -> list[Tensor]:
    tensors = normal(rank, (50,), (60,), (70,))
    if rank == holder:
        tensors[1][17] = value
    return tensors


def strided(rank: int) -> list[Tensor]:
    one, two, three = normal(rank, (12, 10), (30,), (4, 3, 2))
    return [one.t(), two[::3], three.permute(2, 0, 1)]


def parts(vector: Tensor) -> list[Tensor]:
    """Return tensors that lie end to end, with three numbers before and behind them."""
    return [vector[3:103], vector[103:103], vector[103:104].view(()), vector[104:204].view(10, 10)]


def trained(rank: int) -> list[Tensor]:
    weights = [tensor.requires_grad_() for tensor in normal(rank, (20, 3), (7,))]
    return [*weights, weights[0] * 2]


CASES: dict[str, Callable[[int, int], list[Tensor]]] = {
    "float32": lambda rank, ranks: normal(rank, *SHAPES),
    "float64": lambda rank, ranks: normal(rank, *SHAPES, dtype=F64),
    "float16": lambda rank, ranks: normal(rank, *SHAPES, dtype=F16),
    "bfloat16": lambda rank, ranks: normal(rank, *SHAPES, dtype=BF16),
    "mixed": lambda rank, ranks: [
        *(normal(rank, (31,), dtype=kind)[0] for kind in (F32, BF16, F64, F16)),
        *normal(rank + 50, (8, 4), (3,)),
    ],
    "long": lambda rank, ranks: normal(rank, (600_077,), (10,)) if ranks == 2 else [],
    "orthogonal": lambda rank, ranks: [basis(rank, ranks), basis(ranks - 1 - rank, ranks)],
    "parallel": lambda rank, ranks: [(rank + 1) * alike(), alike((5, 5)), alike(()) * 2.0**-rank],
    "one rank is zero": lambda rank, ranks: [t * (rank != 1) for t in normal(rank, (40,), (9, 9))],
    "all but one rank are zero": lambda rank, ranks: [t * (rank == 1) for t in normal(rank, (40,), (9, 9))],
    "all ranks are zero": lambda rank, ranks: [torch.zeros(40), torch.zeros(())],
    "one tensor is zero": lambda rank, ranks: [normal(rank, (40,))[0], torch.zeros(30), normal(rank, (41,))[0]],
    "small": lambda rank, ranks: [1e-30 * t for t in normal(rank, (40,), (9, 9))],
    "large": lambda rank, ranks: [1e30 * t for t in normal(rank, (40,), (9, 9))],
    "denormal": lambda rank, ranks: [1e-40 * t for t in normal(rank, (40,), (9, 9))],
    "square underflows": lambda rank, ranks: [1e-300 * t for t in normal(rank, (40,), (), dtype=F64)],
    "far apart": lambda rank, ranks: [alike() * (1e-40 if rank == 0 else 1.0), normal(rank, (8,))[0]],
    "nan": lambda rank, ranks: with_one(math.nan, rank, ranks - 1),
    "inf": lambda rank, ranks: with_one(math.inf, rank, 0),
    "-inf": lambda rank, ranks: with_one(-math.inf, rank, 1),
    "empty": lambda rank, ranks: [torch.zeros(0), torch.zeros(3, 0)],
    "nothing": lambda rank, ranks: [],
    "end to end": lambda rank, ranks: parts(normal(rank, (207,))[0]),
    "strided": lambda rank, ranks: strided(rank),
    "trained": lambda rank, ranks: trained(rank),
}


class Outcome(NamedTuple):
    tensors: list[Tensor]
    cosines: Tensor


class OfNodes(NamedTuple):
    place: int
    whole: Outcome
    shards: Outcome
    sent: int


class Answer(NamedTuple):
    outcomes: dict[str, Outcome]
    calls: dict[str, int]
    refused: list[tuple[str, str, bool]]
    sent: dict[str, int]
    nodes: dict[int, OfNodes]
    in_place: tuple[bool, bool, bool]


def answered() -> Answer:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    lists = {name: make(rank, ranks) for name, make in CASES.items()}
    outcomes = {name: together({name: lists.pop(name)})[name] for name in ALONE}
    outcomes |= together(lists)
    sent = {}
    if LINUX:
        tensors = normal(rank, *[(PARAMETERS // TENSORS,)] * TENSORS)
        flat = torch.cat(tensors)
        sent = {
            "adasum": bytes_sent(lambda: adasum_(tensors)),
            "all-reduce": bytes_sent(lambda: dist.all_reduce(flat)),
            "nothing": bytes_sent(lambda: None),
        }
    nodes = {per_node: in_nodes(per_node) for count, per_node in LAYOUTS if count == ranks}
    return Answer(outcomes, calls(rank), refused(), sent, nodes, in_place(rank))


def together(lists: dict[str, list[Tensor]]) -> dict[str, Outcome]:
    """Combine the tensors of several cases in one call."""
    tensors = [tensor for case in lists.values() for tensor in case]
    before = [(t.requires_grad, t.is_leaf, t.stride(), t.data_ptr()) for t in tensors]
    cosines = adasum_(iter(tensors))
    assert [(t.requires_grad, t.is_leaf, t.stride(), t.data_ptr()) for t in tensors] == before
    outcomes, at = {}, 0
    for name, case in lists.items():
        here = slice(at, at := at + len(case))
        outcomes[name] = Outcome([tensor.detach().contiguous() for tensor in case], cosines[:, here])
    return outcomes


def calls(rank: int) -> dict[str, int]:
    """Count the calls for tensors of two dtypes."""
    counts: dict[str, int] = {"all_reduce": 0, "all_to_all_single": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            patch.setattr(dist, name, counted(counts, name))
        adasum_([*normal(rank, (800,), (7,)), *normal(rank, (900,), dtype=F64)])
    return counts


def counted(counts: dict[str, int], name: str) -> Callable[..., object]:
    real = getattr(dist, name)

    def call(*args: object, **settings: object) -> object:
        counts[name] += 1
        return real(*args, **settings)

    return call


def in_place(rank: int) -> tuple[bool, bool, bool]:
    """Tell whether tensors end to end and scattered ones are sent from their place; whether others stay as they are."""
    vector = normal(rank, (207,))[0]
    before = vector.clone()
    found = [sent_from(vector, parts(vector)), sent_from((scattered := strided(rank))[0], scattered)]
    outside = torch.ones(207, dtype=torch.bool)
    outside[3:204] = False
    return found[0], found[1], torch.equal(vector[outside], before[outside])


def sent_from(memory: Tensor, tensors: list[Tensor]) -> bool:
    sources = []
    with pytest.MonkeyPatch.context() as patch:
        real = dist.all_to_all_single

        def seen(into: Tensor, out_of: Tensor, *args: object, **settings: object) -> object:
            sources.append(out_of.untyped_storage().data_ptr())
            return real(into, out_of, *args, **settings)

        patch.setattr(dist, "all_to_all_single", seen)
        adasum_(tensors)
    return memory.untyped_storage().data_ptr() in sources


def refused() -> list[tuple[str, str, bool]]:
    """Return for each list that is not allowed the error, its text, and whether the others were left alone."""
    found = []
    for bad in (torch.zeros(3, dtype=torch.int64), torch.eye(3).to_sparse(), torch.zeros(2, device="meta")):
        good = torch.arange(4.0)
        with pytest.raises((TypeError, ValueError)) as error:
            adasum_([good, bad])
        found.append((error.type.__name__, str(error.value), torch.equal(good, torch.arange(4.0))))
    return found


def in_nodes(per_node: int) -> OfNodes:
    """Combine the same tensors over nodes as they are, and as shards that the ranks of a node hold."""
    topology = Topology.current(per_node)
    groups = NodeGroups.of(topology)
    node, place = divmod(topology.rank, per_node)
    tensors = of_rank(topology.rank)
    cosines = hierarchical_adasum_(tensors, groups)
    shards = [tensor.tensor_split(per_node)[place].clone() for tensor in of_node(node)]
    of_shards = adasum_(shards, groups.across, shards=groups.inside)
    large = normal(topology.rank, (PARAMETERS,))
    sent = bytes_sent(lambda: hierarchical_adasum_(large, groups)) if LINUX else 0
    dist.barrier()
    groups.destroy()
    return OfNodes(place, Outcome(tensors, cosines), Outcome(shards, of_shards), sent)


def of_rank(rank: int) -> list[Tensor]:
    return [*normal(rank, *SHAPES), *normal(rank, (40,), dtype=BF16)]


def of_node(node: int) -> list[Tensor]:
    return normal(node, (10, 3), (1, 4), (64, 2))


def formula(vectors: list[Tensor]) -> Tensor:
    """The definition: a tree over halves, the first of which takes the odd vector."""
    if len(vectors) == 1:
        return vectors[0].double()
    middle = -(-len(vectors) // 2)
    a, b = formula(vectors[:middle]), formula(vectors[middle:])
    share = middle / len(vectors)
    ab, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    left = a if aa == 0 else a - share * ab / aa * a
    right = b if bb == 0 else b - (1 - share) * ab / bb * b
    return left + right


def pair_cosines(vectors: list[Tensor]) -> list[float]:
    """Return the cosine of every pair by the height at which the tree splits it, deepest first, from left to right."""
    found: list[tuple[int, float]] = []

    def visit(part: list[Tensor], depth: int) -> None:
        if len(part) > 1:
            middle = -(-len(part) // 2)
            a, b = formula(part[:middle]), formula(part[middle:])
            length = float(a.norm() * b.norm())
            found.append((depth, float((a * b).sum()) / length if length else 0.0))
            visit(part[:middle], depth + 1)
            visit(part[middle:], depth + 1)

    visit(vectors, 0)
    return [cosine for _, cosine in sorted(found, key=lambda entry: -entry[0])]
