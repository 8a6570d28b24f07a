"""The adaptive sum on real ranks, held against its definition in float64 and the bytes it may send."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_ranks
from tests.support.traffic import bytes_sent
from torchboost import NodeGroups, Topology
from torchboost.algorithms.adaptive_sum import adasum_

pytestmark = pytest.mark.dist

COUNTS = (2, 4, 6)  # one pair, whole nodes, and a tree with sides of different size
TRAFFIC = 2.2  # times the bytes of the vector that a rank may send
SHAPES = ((1000,), (3, 7), (1,), (), (0,), (64, 33), (2, 0, 3), (5,))
LAYOUTS = ((2, 2), (4, 2), (4, 4), (4, 1), (6, 2))  # ranks, ranks per node
PARAMETERS, TENSORS = 1_000_000, 20
ALONE = ("float32", "long", "empty", "nothing")  # cases combined in a call of their own
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
    calls: tuple[int, int]
    refused: list[tuple[str, str, bool]]
    sent: dict[str, int]
    nodes: dict[int, OfNodes]


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
    return Answer(
        outcomes,
        exchanges([*normal(rank, (800,), (7,)), *normal(rank, (900,), dtype=F64)]),
        refused(),
        sent,
        nodes,
    )


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


def exchanges(tensors: list[Tensor]) -> tuple[int, int]:
    """Return how many exchanges and sums a call makes."""
    with (
        mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as sent,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
    ):
        adasum_(tensors)
    return sent.call_count, sums.call_count


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
    cosines = adasum_(tensors, groups.across, groups.inside)
    shards = [tensor.tensor_split(per_node)[place].clone() for tensor in of_node(node)]
    of_shards = adasum_(shards, groups.across, groups.inside, sharded=True)
    large = normal(topology.rank, (PARAMETERS,))
    sent = bytes_sent(lambda: adasum_(large, groups.across, groups.inside)) if LINUX else 0
    dist.barrier()
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


def expected(name: str, ranks: int) -> list[Tensor]:
    inputs = [CASES[name](rank, ranks) for rank in range(ranks)]
    return [formula([tensor.detach() for tensor in of_ranks]) for of_ranks in zip(*inputs, strict=True)]


def check(found: list[Tensor], wanted: list[Tensor], relative: float = 2e-6) -> None:
    assert [t.shape for t in found] == [t.shape for t in wanted]
    for tensor, exact in zip(found, wanted, strict=True):
        if exact.numel():
            error = (tensor.double() - exact).abs().max()
            assert error <= relative * exact.abs().max(), (error, exact.abs().max())


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


linux_only = pytest.mark.skipif(not LINUX, reason="the count of bytes per socket is read as Linux has it")


class Ranks(NamedTuple):
    count: int
    answers: list[Answer]

    def __getitem__(self, name: str) -> list[Tensor]:
        return self.answers[0].outcomes[name].tensors


@pytest.fixture(scope="module", params=COUNTS)
def done(request) -> Ranks:
    return Ranks(request.param, run_ranks(answered, request.param))


EXACT = ("float32", "long", "parallel", "orthogonal", "one rank is zero", "all but one rank are zero", "trained")
EXACT += ("all ranks are zero", "one tensor is zero", "small", "large", "empty", "nothing", "strided")
ROUNDED = {"float64": 1e-14, "float16": 2**-11, "bfloat16": 2**-8}


def test_ranks_get_the_formula_rounded_once_a_level(done):
    for name in EXACT:
        check(done[name], expected(name, done.count))
    levels = math.ceil(math.log2(done.count))
    for name, precision in ROUNDED.items():
        check(done[name], expected(name, done.count), 3 * levels * precision)


def test_each_tensor_of_a_mixture_keeps_its_dtype_and_precision(done):
    found, wanted = done["mixed"], expected("mixed", done.count)
    assert [tensor.dtype for tensor in found] == [F32, BF16, F64, F16, F32, F32]
    for tensor, exact, precision in zip(found, wanted, [1e-6, 0.04, 1e-14, 0.005, 1e-6, 1e-6], strict=True):
        check([tensor], [exact], precision)


def test_all_ranks_get_the_same_bits(done):
    for name in CASES:
        first, *others = [answer.outcomes[name] for answer in done.answers]
        for other in others:
            assert bits(other.tensors) == bits(first.tensors), name
            assert bits([other.cosines]) == bits([first.cosines]), name


def test_denormal_numbers_follow_the_formula_to_their_last_place(done):
    for tensor, exact in zip(done["denormal"], expected("denormal", done.count), strict=True):
        assert (tensor.double() - exact).abs().max() <= 16 * 2.0**-149
        assert exact.abs().max() > 1e-41


def test_vectors_whose_square_underflows_are_added(done):
    inputs = [CASES["square underflows"](rank, done.count) for rank in range(done.count)]
    check(done["square underflows"], [torch.stack(vectors).sum(0) for vectors in zip(*inputs, strict=True)], 1e-14)


def test_a_vector_that_is_far_too_short_for_its_weight_leaves_the_sum_finite(done):
    apart, plain = done["far apart"]
    ratio = apart / alike()
    assert ratio.max() - ratio.min() < 1e-5
    # Between what it is for a vector of that direction and what it is for zero.
    rest = [alike() if rank else torch.zeros(97) for rank in range(done.count)]
    low, high = ((formula(vectors) / alike())[0] for vectors in ([alike() * 1e-20, *rest[1:]], rest))
    assert low - 1e-5 <= ratio[0] <= high + 1e-5
    check([plain], expected("far apart", done.count)[1:])


def test_what_is_not_finite_on_one_rank_shows_on_all_in_that_tensor_alone(done):
    for name in ("nan", "inf", "-inf"):
        before, spoilt, after = done[name]
        wanted = expected(name, done.count)
        check([before, after], [wanted[0], wanted[2]])
        assert not spoilt.isfinite().any()
        cosines = done.answers[0].outcomes[name].cosines
        assert cosines[:, [0, 2]].isfinite().all()
        assert cosines[-1, 1].isnan()


def test_cosines_are_those_of_the_pairs_leaves_first(done):
    inputs = [CASES["float32"](rank, done.count) for rank in range(done.count)]
    cosines = done.answers[0].outcomes["float32"].cosines
    assert cosines.shape == (done.count - 1, len(SHAPES))
    assert cosines.dtype == F64
    for i, vectors in enumerate(zip(*inputs, strict=True)):
        torch.testing.assert_close(cosines[:, i], torch.tensor(pair_cosines(list(vectors)), dtype=F64))


def test_cosines_of_parallel_vectors_are_at_most_one_and_of_zeros_zero(done):
    outcomes = done.answers[0].outcomes
    parallel = outcomes["parallel"].cosines
    assert parallel.max() <= 1
    torch.testing.assert_close(parallel, torch.ones_like(parallel))
    assert outcomes["all ranks are zero"].cosines.eq(0).all()
    assert outcomes["nothing"].cosines.shape == (done.count - 1, 0)


def test_a_call_makes_a_few_collectives_and_no_more(done):
    levels = math.ceil(math.log2(done.count))
    for answer in done.answers:
        assert answer.calls == (2 * 2, 2 * levels), "two exchanges and the sums of the levels, for each of two dtypes"


def test_errors_come_before_anything_is_changed(done):
    for answer in done.answers:
        whole, sparse, elsewhere = answer.refused
        assert whole == ("TypeError", whole[1], True)
        assert whole[1].startswith("tensors[1]: found torch.strided torch.int64; pass dense")
        assert sparse == ("TypeError", sparse[1], True)
        assert sparse[1].startswith("tensors[1]: found torch.sparse_coo torch.float32; pass dense")
        assert elsewhere == ("ValueError", "tensors[1]: found meta after cpu; call once per device.", True)


@linux_only
def test_no_rank_sends_more_than_an_all_reduce_does(done):
    size = 4 * PARAMETERS
    share = 2 * (1 - 1 / done.count)
    for answer in done.answers:
        sent = answer.sent
        idle = sent["nothing"]
        assert idle < 0.001 * size
        assert 0.99 * share * size < sent["all-reduce"] - idle < 1.05 * share * size
        assert 0.99 * share * size < sent["adasum"] - idle < 1.02 * share * size
        assert sent["adasum"] - idle < TRAFFIC * size


def by_place(done: Ranks) -> Iterator[tuple[int, list[OfNodes]]]:
    """Return for each layout of these ranks how many there are per node, and what every rank found."""
    for count, per_node in LAYOUTS:
        if count == done.count:
            yield per_node, [answer.nodes[per_node] for answer in done.answers]


def test_nodes_are_combined_after_a_mean_inside(done):
    inputs = [of_rank(rank) for rank in range(done.count)]
    for per_node, found in by_place(done):
        nodes = [inputs[first : first + per_node] for first in range(0, done.count, per_node)]
        means = [[torch.stack(tensors).double().mean(0) for tensors in zip(*node, strict=True)] for node in nodes]
        wanted = [formula(list(vectors)) for vectors in zip(*means, strict=True)]
        for _, (tensors, cosines), _, _ in found:
            check(tensors[:-1], wanted[:-1])
            check(tensors[-1:], wanted[-1:], 0.04)
            assert bits([*tensors, cosines]) == bits([*found[0].whole.tensors, found[0].whole.cosines])
            assert cosines.shape == (len(nodes) - 1, len(wanted))
            for i, vectors in enumerate(zip(*means, strict=True)):
                exact = torch.tensor(pair_cosines(list(vectors)), dtype=F64)
                torch.testing.assert_close(cosines[:, i], exact, rtol=0, atol=1e-6 if i < len(SHAPES) else 0.03)


def test_shards_are_combined_as_the_tensors_they_are_part_of(done):
    for per_node, found in by_place(done):
        nodes = [of_node(node) for node in range(done.count // per_node)]
        wanted = [formula(list(vectors)) for vectors in zip(*nodes, strict=True)]
        for place, _, (shards, cosines), _ in found:
            for shard, exact in zip(shards, wanted, strict=True):
                part = exact.tensor_split(per_node)[place]
                assert shard.shape == part.shape
                torch.testing.assert_close(shard.double(), part, rtol=0, atol=1e-6 * float(exact.abs().max()))
            for i, vectors in enumerate(zip(*nodes, strict=True)):
                torch.testing.assert_close(cosines[:, i], torch.tensor(pair_cosines(list(vectors)), dtype=F64))


@linux_only
def test_a_rank_of_a_node_sends_its_share_between_nodes(done):
    for per_node, found in by_place(done):
        nodes = done.count // per_node
        # With gloo a reduction that is scattered costs an all-reduce; then come the share between nodes and the gather.
        inside, across = 3 * (1 - 1 / per_node), 2 * (1 - 1 / nodes) / per_node
        for _, _, _, sent in found:
            assert sent / (4 * PARAMETERS) == pytest.approx(inside + across, rel=0.01)
