"""The adaptive sum on real ranks, held against its definition in float64 and the bytes it may send."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.adasum import (
    CASES,
    LAYOUTS,
    LINUX,
    PARAMETERS,
    SHAPES,
    Answer,
    OfNodes,
    alike,
    answered,
    formula,
    of_node,
    of_rank,
    pair_cosines,
)
from tests.support.ranks import run_ranks
from torchboost.algorithms.adaptive_sum.rule import combined, pair_weights

COUNTS = (2, 4, 6)  # one pair, whole nodes, and a tree with sides of different size
TRAFFIC = 2.2  # times the bytes of the vector that a rank may send
F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


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
EXACT += ("all ranks are zero", "one tensor is zero", "small", "large", "empty", "nothing", "strided", "end to end")
ROUNDED = {"float64": 1e-14, "float16": 2**-11, "bfloat16": 2**-8}


@pytest.mark.dist
def test_ranks_get_the_formula_rounded_once_a_level(done):
    for name in EXACT:
        check(done[name], expected(name, done.count))
    levels = math.ceil(math.log2(done.count))
    for name, precision in ROUNDED.items():
        check(done[name], expected(name, done.count), 3 * levels * precision)


@pytest.mark.dist
def test_each_tensor_of_a_mixture_keeps_its_dtype_and_precision(done):
    found, wanted = done["mixed"], expected("mixed", done.count)
    assert [tensor.dtype for tensor in found] == [F32, BF16, F64, F16, F32, F32]
    for tensor, exact, precision in zip(found, wanted, [1e-6, 0.04, 1e-14, 0.005, 1e-6, 1e-6], strict=True):
        check([tensor], [exact], precision)


@pytest.mark.dist
def test_all_ranks_get_the_same_bits(done):
    for name in CASES:
        first, *others = [answer.outcomes[name] for answer in done.answers]
        for other in others:
            assert bits(other.tensors) == bits(first.tensors), name
            assert bits([other.cosines]) == bits([first.cosines]), name


@pytest.mark.dist
def test_denormal_numbers_follow_the_formula_to_their_last_place(done):
    for tensor, exact in zip(done["denormal"], expected("denormal", done.count), strict=True):
        assert (tensor.double() - exact).abs().max() <= 16 * 2.0**-149
        assert exact.abs().max() > 1e-41


@pytest.mark.dist
def test_vectors_whose_square_underflows_are_added(done):
    inputs = [CASES["square underflows"](rank, done.count) for rank in range(done.count)]
    check(done["square underflows"], [torch.stack(vectors).sum(0) for vectors in zip(*inputs, strict=True)], 1e-14)


@pytest.mark.dist
def test_a_vector_that_is_far_too_short_for_its_weight_leaves_the_sum_finite(done):
    apart, plain = done["far apart"]
    ratio = apart / alike()
    assert ratio.max() - ratio.min() < 1e-5
    # Between what it is for a vector of that direction and what it is for zero.
    rest = [alike() if rank else torch.zeros(97) for rank in range(done.count)]
    low, high = ((formula(vectors) / alike())[0] for vectors in ([alike() * 1e-20, *rest[1:]], rest))
    assert low - 1e-5 <= ratio[0] <= high + 1e-5
    check([plain], expected("far apart", done.count)[1:])


@pytest.mark.dist
def test_what_is_not_finite_on_one_rank_shows_on_all_in_that_tensor_alone(done):
    for name in ("nan", "inf", "-inf"):
        before, spoilt, after = done[name]
        wanted = expected(name, done.count)
        check([before, after], [wanted[0], wanted[2]])
        assert not spoilt.isfinite().any()
        cosines = done.answers[0].outcomes[name].cosines
        assert cosines[:, [0, 2]].isfinite().all()
        assert cosines[-1, 1].isnan()


@pytest.mark.dist
def test_cosines_are_those_of_the_pairs_leaves_first(done):
    inputs = [CASES["float32"](rank, done.count) for rank in range(done.count)]
    cosines = done.answers[0].outcomes["float32"].cosines
    assert cosines.shape == (done.count - 1, len(SHAPES))
    assert cosines.dtype == F64
    for i, vectors in enumerate(zip(*inputs, strict=True)):
        torch.testing.assert_close(cosines[:, i], torch.tensor(pair_cosines(list(vectors)), dtype=F64))


@pytest.mark.dist
def test_cosines_of_parallel_vectors_are_at_most_one_and_of_zeros_zero(done):
    outcomes = done.answers[0].outcomes
    parallel = outcomes["parallel"].cosines
    assert parallel.max() <= 1
    torch.testing.assert_close(parallel, torch.ones_like(parallel))
    assert outcomes["all ranks are zero"].cosines.eq(0).all()
    assert outcomes["nothing"].cosines.shape == (done.count - 1, 0)


@pytest.mark.dist
def test_a_call_makes_a_few_collectives_and_no_more(done):
    levels = math.ceil(math.log2(done.count))
    for answer in done.answers:
        assert answer.calls == {"all_reduce": 2 * levels, "all_to_all_single": 2 * 2}


@pytest.mark.dist
def test_tensors_that_lie_end_to_end_are_combined_where_they_are(done):
    for found in done.answers:
        assert found.in_place == (True, False, True)


@pytest.mark.dist
def test_errors_come_before_anything_is_changed(done):
    for answer in done.answers:
        whole, sparse, elsewhere = answer.refused
        assert whole == ("TypeError", whole[1], True)
        assert whole[1].startswith("tensors[1]: found torch.strided torch.int64; pass dense")
        assert sparse == ("TypeError", sparse[1], True)
        assert sparse[1].startswith("tensors[1]: found torch.sparse_coo torch.float32; pass dense")
        assert elsewhere == ("ValueError", "tensors[1]: found meta after cpu; call once per device.", True)


@pytest.mark.dist
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


@pytest.mark.dist
def test_combined_gives_what_the_ranks_get(done):
    for name in ("float32", "float64", "float16", "bfloat16", "parallel", "one rank is zero", "strided", "far apart"):
        inputs = [CASES[name](rank, done.count) for rank in range(done.count)]
        for found, vectors in zip(done[name], zip(*inputs, strict=True), strict=True):
            before = [vector.clone() for vector in vectors]
            alone = combined(vectors)
            assert all(torch.equal(vector, kept) for vector, kept in zip(vectors, before, strict=True))
            assert alone.shape == found.shape
            assert alone.dtype == found.dtype
            # Dot products differ in the last place, so that one number in half precision may round the other way.
            precision = torch.finfo(found.dtype).eps
            torch.testing.assert_close(alone, found, rtol=8 * precision, atol=8 * precision)


def by_place(done: Ranks) -> Iterator[tuple[int, list[OfNodes]]]:
    """Return for each layout of these ranks how many there are per node, and what every rank found."""
    for count, per_node in LAYOUTS:
        if count == done.count:
            yield per_node, [answer.nodes[per_node] for answer in done.answers]


@pytest.mark.dist
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


@pytest.mark.dist
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


@pytest.mark.dist
@linux_only
def test_a_rank_of_a_node_sends_its_share_between_nodes(done):
    for per_node, found in by_place(done):
        nodes = done.count // per_node
        # With gloo a reduction that is scattered costs an all-reduce; then come the share between nodes and the gather.
        inside, across = 3 * (1 - 1 / per_node), 2 * (1 - 1 / nodes) / per_node
        for _, _, _, sent in found:
            assert sent / (4 * PARAMETERS) == pytest.approx(inside + across, rel=0.01)


def test_combined_needs_vectors_and_copies_a_single_one():
    with pytest.raises(ValueError, match=r"found no vectors; pass one per rank\."):
        combined([])
    vector = torch.arange(3.0, requires_grad=True)
    assert combined([vector]).data_ptr() != vector.data_ptr()
    assert torch.equal(combined([vector]), vector)


numbers = st.floats(-1e6, 1e6).map(lambda x: round(x, 3))
vectors = st.lists(numbers, min_size=4, max_size=4).map(lambda x: torch.tensor(x, dtype=F64))
counts = st.integers(1, 9)


def dots(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((a @ a, a @ b, b @ b))


@given(vectors, vectors, counts, counts)
def test_swapping_the_sides_swaps_the_weights(a, b, left, right):
    one, two = pair_weights(dots(a, b), left, right), pair_weights(dots(b, a), right, left)
    assert one[0] == two[1]
    assert one[1] == two[0]


@given(vectors, vectors, st.integers(-60, 60), counts, counts)
def test_weights_do_not_depend_on_a_common_scale(a, b, power, left, right):
    scaled = pair_weights(dots(a * 2.0**power, b * 2.0**power), left, right)
    assert [float(w) for w in scaled] == [float(w) for w in pair_weights(dots(a, b), left, right)]


@given(vectors, st.floats(0.01, 100), counts, counts)
def test_parallel_sides_are_averaged_by_their_ranks(a, times, left, right):
    b = a * times
    alpha, beta = pair_weights(dots(a, b), left, right)
    if a.any():
        wanted = (left * a + right * b) / (left + right)
        torch.testing.assert_close(alpha * a + beta * b, wanted, rtol=1e-9, atol=1e-9 * float(wanted.abs().max()))
    else:
        assert alpha == beta == 1


@given(vectors, vectors, counts, counts)
def test_orthogonal_sides_are_added(a, b, left, right):
    zeros = torch.zeros(4, dtype=F64)
    alpha, beta = pair_weights(dots(torch.cat((a, zeros)), torch.cat((zeros, b))), left, right)
    assert alpha == beta == 1


@given(st.lists(vectors, min_size=1, max_size=9))
def test_combined_is_the_formula(found):
    exact = formula(found)
    # A side far shorter than the other has a large weight, so that errors count against the longest vector.
    longest = max(float(vector.abs().max()) for vector in found)
    torch.testing.assert_close(combined(found), exact, rtol=0, atol=1e-9 * longest)


@given(st.lists(vectors, min_size=1, max_size=9), st.integers(-60, 60))
def test_combined_scales_with_its_vectors(found, power):
    scaled = combined([vector * 2.0**power for vector in found])
    assert torch.equal(scaled, combined(found) * 2.0**power)


def test_weights_keep_the_shape_of_the_dots():
    alpha, beta = pair_weights(torch.ones(2, 5, 3))
    assert alpha.shape == beta.shape == (2, 5)
    assert alpha.eq(0.5).all()
    assert pair_weights(torch.tensor([1.0, math.nan, 1.0]))[0].isnan()
    assert pair_weights(torch.tensor([math.nan, math.nan, 1.0]))[0].isnan()
    assert [float(weight) for weight in pair_weights(torch.tensor([0.0, 0.0, 4.0]))] == [1.0, 1.0]
