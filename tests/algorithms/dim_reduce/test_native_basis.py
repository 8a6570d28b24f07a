import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchboost import IncompatibleError
from torchboost.algorithms.dim_reduce import native_basis
from torchboost.algorithms.dim_reduce.native_basis import PART, lift, project

LENGTHS = st.one_of(st.integers(1, 100), st.integers(PART - 20, PART + 20), st.integers(3 * PART - 2, 3 * PART + 40))


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 35), LENGTHS, st.integers(0, 5))
def test_projects_as_float64_does(k, n, offset):
    rows = numbers(k, n + 7)[:, offset : n + offset]  # neither aligned nor without gaps between the rows
    vector = numbers(n + 5, seed=1)[offset : n + offset]
    wanted = rows.double() @ vector.double()
    size = rows.double().abs() @ vector.double().abs()
    assert ((project(rows, vector) - wanted).abs() <= 1e-6 * size).all()


@given(st.integers(0, 35), LENGTHS, st.integers(1, 5), st.integers(0, 5))
def test_lifts_as_float64_does_and_writes_nothing_else(k, n, vectors, offset):
    rows, coordinates = numbers(k, n + 7)[:, offset : n + offset], numbers(vectors, k, seed=1)
    whole = torch.full((vectors, n + 7), float("nan"))  # what lay there must not be read either
    lift(rows, coordinates, whole[:, offset : n + offset])
    out = whole[:, offset : n + offset].double()
    wanted = coordinates.double() @ rows.double()
    assert ((out - wanted).abs() <= 3e-6 * (coordinates.double().abs() @ rows.double().abs())).all()
    assert whole[:, :offset].isnan().all()
    assert whole[:, n + offset :].isnan().all()


def test_the_bits_do_not_depend_on_the_number_of_threads():
    rows, vector, coordinates = numbers(13, 5 * PART + 3), numbers(5 * PART + 3, seed=1), numbers(2, 13, seed=2)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out = torch.empty(2, rows.shape[1])
            lift(rows, coordinates, out)
            found.append((project(rows, vector), out))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


@pytest.mark.parametrize("place", [0, 20])  # in a register, and behind the last full one
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives(value, place):
    rows, vector, out = torch.ones(3, 21), torch.ones(21), torch.empty(2, 21)
    vector[place] = value
    assert not project(rows, vector).isfinite().any()
    lift(rows, torch.tensor([[value, 1, 1], [1, 1, 1]]), out)
    assert not out[0].isfinite().any()
    assert (out[1] == 3).all()


@pytest.mark.parametrize(
    ("rows", "vector", "said"),
    [
        (torch.ones(2, 4), torch.ones(3), r"vector: found shape \(3,\).*it is \(4,\)"),
        (torch.ones(2, 4), torch.ones(4).double(), r"vector: .*torch.float64 on cpu.*of torch.float32"),
        (torch.ones(2, 4).bfloat16(), torch.ones(4), r"rows: .*torch.bfloat16"),
        (torch.ones(4, 2).T, torch.ones(4), r"rows: found strides \(1, 2\)"),
        (torch.ones(2, 4, device="meta"), torch.ones(4), "rows: .* on meta"),
    ],
)
def test_what_the_kernel_cannot_walk_through_is_refused(rows, vector, said):
    with pytest.raises(ValueError, match=said):
        project(rows, vector)


@pytest.mark.parametrize(
    ("coordinates", "out", "said"),
    [
        (torch.ones(1, 3), torch.ones(1, 4), r"coordinates: found shape \(1, 3\).*it is \(1, 2\)"),
        (torch.ones(2, 2), torch.ones(1, 4), r"out: found shape \(1, 4\).*it is \(2, 4\)"),
        (torch.ones(2, 2), torch.ones(2, 4).double(), r"out: .*torch.float64"),
        (torch.ones(2, 2), torch.ones(4, 2).T, "out: found strides"),
    ],
)
def test_a_place_that_does_not_fit_is_refused_and_untouched(coordinates, out, said):
    with pytest.raises(ValueError, match=said):
        lift(torch.ones(2, 4), coordinates, out)
    assert (out == 1).all()


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("meta", torch.float32)])
def test_other_rows_are_refused_beforehand(device, dtype):
    with pytest.raises(IncompatibleError, match=f"found {dtype} on {device}.*Leave native out"):
        native_basis.check(torch.device(device), dtype)
