from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from torchboost.errors import IncompatibleError
from torchboost.optim.executor import Chain
from torchboost.optim.gradients import Gradients, GradientTransform
from torchboost.optim.transforms import (
    Centralize,
    ClipNorm,
    ClipValue,
    Coalesce,
    Decay,
    Unscale,
    has_rows,
    with_centralization,
)

SHAPES = [(5,), (4, 7), (6, 3, 3, 3), (6, 5, 1, 1), (2, 3, 4), (3, 2, 2, 2, 2), (1, 1), ()]


def gradients(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, **group: Any) -> Gradients:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    grads = [torch.randn(shape, generator=generator).to(dtype) + 0.5 for shape in shapes]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return Gradients(params, grads, [group] * len(params), [{} for _ in params])


def run(transform: GradientTransform, given: Gradients) -> list[Tensor]:
    before = list(given.grads)
    with torch.no_grad():
        transform(given)
    assert all(a is b for a, b in zip(before, given.grads, strict=True)), "must work in place"
    return given.grads


def centred(grad: Tensor) -> Tensor:
    wide = grad.double()
    return wide - wide.mean(tuple(range(1, grad.ndim)), keepdim=True) if grad.ndim > 1 and grad[0].numel() > 1 else wide


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_centralize_subtracts_the_mean_of_every_row(dtype):
    given = gradients(dtype=dtype)
    expected = [centred(grad) for grad in given.grads]
    for got, want in zip(run(Centralize(), given), expected, strict=True):
        error = (got.double() - want).abs().max()
        assert error <= 2 * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("form", ["channels_last", "transposed", "expanded_stride"])
def test_centralize_in_any_memory_format_stays_in_place(form):
    base = torch.randn(6, 5, 3, 3)
    if form == "channels_last":
        grad = base.to(memory_format=torch.channels_last)
    elif form == "transposed":
        grad = base.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    else:
        grad = torch.zeros(6, 5, 3, 6)[..., ::2].copy_(base)
    stride, address = grad.stride(), grad.data_ptr()
    given = Gradients([nn.Parameter(torch.zeros(6, 5, 3, 3))], [grad], [{}], [{}])
    expected = centred(grad).float()
    run(Centralize(), given)
    torch.testing.assert_close(grad, expected)
    assert (grad.stride(), grad.data_ptr()) == (stride, address)


def test_centralize_changes_a_view_into_a_bucket():
    bucket = torch.randn(12) + 1
    given = Gradients([nn.Parameter(torch.zeros(2, 6))], [bucket.view(2, 6)], [{}], [{}])
    run(Centralize(), given)
    torch.testing.assert_close(bucket.view(2, 6).mean(1), torch.zeros(2), atol=1e-6, rtol=0)


def test_centralize_twice_is_centralize_once():
    given = gradients(dtype=torch.float64)
    once = [grad.clone() for grad in run(Centralize(), given)]
    for a, b in zip(run(Centralize(), given), once, strict=True):
        torch.testing.assert_close(a, b, atol=1e-15, rtol=0)


def test_centralize_leaves_what_it_is_told_to():
    given = gradients()
    before = [grad.clone() for grad in given.grads]
    run(Centralize(skip=[given.params[1]]), given)
    changed = [not torch.equal(a, b) for a, b in zip(before, given.grads, strict=True)]
    assert changed == [False, False, True, True, True, True, False, False]


ROWS_OF_ONE = [(3, 1), (3, 1, 1), (3, 1, 1, 1), (0, 4), (4, 0), (1, 3, 1, 1), (1, 1, 3)]


@pytest.mark.parametrize("shape", ROWS_OF_ONE, ids=str)
def test_centralize_leaves_rows_of_one_entry_and_vectors_alone(shape):
    given = gradients([shape])
    before = given.grads[0].clone()
    assert torch.equal(run(Centralize(), given)[0], before)
    assert not has_rows(given.params[0])


def test_centralize_leaves_sparse_rows_of_one_entry_alone():
    table = nn.Embedding(5, 1, sparse=True)
    (table(torch.tensor([1, 3, 3])) * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    grad = table.weight.grad
    run(Centralize(), Gradients([table.weight], [grad], [{}], [{}]))
    assert grad.to_dense().flatten().tolist() == [0.0, 1.0, 0.0, 5.0, 0.0]


@pytest.mark.parametrize("transform", [Centralize(), Centralize(flag="gc"), Centralize(flag="grad_centralization")])
def test_a_group_that_refuses_centralisation_is_left_alone(transform):
    given = gradients([(4, 7)], grad_centralization=False, gc=True)
    before = given.grads[0].clone()
    assert torch.equal(run(transform, given)[0], before)


def test_what_a_group_says_about_centralisation_is_a_boolean():
    with pytest.raises(TypeError, match="grad_centralization: found 1; give True or False"):
        Centralize()(gradients([(4, 7)], grad_centralization=1))


def test_a_group_that_asks_for_centralisation_gets_it_behind_the_decay():
    asked, transforms = [{"grad_centralization": True}], (Unscale(2.0), Decay(0.1), ClipNorm(1.0))
    own = Centralize(flag="grad_centralization")
    assert with_centralization(transforms, [{}, {"grad_centralization": False}]) == transforms
    assert with_centralization(transforms, asked) == (*transforms[:2], own, transforms[2])
    assert with_centralization((), asked) == (own,)
    assert with_centralization((Decay(0.1),), asked) == (Decay(0.1), own)
    for present in (Centralize(), own):
        assert with_centralization((present,), asked) == (present,)
    other = Centralize(flag="gc")
    assert with_centralization((other,), asked) == (own, other)


def test_centralize_by_group_flag_and_width():
    given = gradients([(4, 7), (4, 16), (4, 3, 16)])
    given.groups = [{"gc": True}, {"gc": True}, {"gc": True}]
    before = [grad.clone() for grad in given.grads]
    run(Centralize(flag="gc", multiple_of=16), given)
    assert [not torch.equal(a, b) for a, b in zip(before, given.grads, strict=True)] == [False, True, False]
    given.groups = [{"gc": False}, {}, {"gc": True}]
    run(Centralize(flag="gc"), given)
    assert torch.equal(given.grads[0], before[0])
    torch.testing.assert_close(given.grads[2], centred(before[2]).float())


def test_centralize_sparse_rows_equals_dense():
    dense, sparse = nn.Embedding(6, 4), nn.Embedding(6, 4, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    for table in (dense, sparse):
        weights = torch.arange(20.0).view(5, 4)
        (table(torch.tensor([1, 1, 3, 5, 3])) * weights).sum().backward()
    grad = sparse.weight.grad
    run(Centralize(), Gradients([sparse.weight], [grad], [{}], [{}]))
    torch.testing.assert_close(grad.to_dense(), centred(dense.weight.grad).float(), check_dtype=False)


def test_sparse_gradients_are_refused_where_they_have_no_meaning():
    table = nn.Embedding(6, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    given = Gradients([table.weight], [table.weight.grad], [{}], [{}])
    with pytest.raises(IncompatibleError, match=r"Decay needs dense gradients.*sparse=False"):
        Chain([Decay(0.1)]).check(given)
    assert Chain([Coalesce(dense=True), Decay(0.1)]).check(given)[0].layout is torch.strided
    entries = Gradients([table.weight], [torch.ones(6, 4).to_sparse()], [{}], [{}])
    with pytest.raises(IncompatibleError, match=r"shape \(6, 4\).*'skip'"):
        Chain([Centralize()]).check(entries)


@pytest.mark.parametrize(
    "transform", [ClipNorm(1.0), ClipNorm(0.5, 1.0), ClipNorm(0.1, math.inf), ClipValue(0.3)], ids=repr
)
def test_clipping_beside_sparse_rows_equals_dense(transform):
    grads = []
    for sparse in (False, True):
        given = embedded([1, 3, 1, 1], sparse=sparse)
        with torch.no_grad():
            Chain([transform]).check(given)
            transform(given)
        assert given.grads[0].is_sparse is sparse
        grads.append([grad.to_dense() for grad in given.grads])
    for dense, rows in zip(*grads, strict=True):
        torch.testing.assert_close(dense, rows)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_clip_norm_of_tensors_without_entries(order):
    given = gradients([(0, 3), (4,)])
    run(ClipNorm(0.1, order), given)
    assert given.grads[1].norm(order) == pytest.approx(0.1, rel=1e-4)
    run(ClipNorm(0.1, order, error_if_nonfinite=True), gradients([(0,)]))


def test_an_infinite_limit_is_refused():
    with pytest.raises(ValueError, match="clips nothing; leave ClipNorm out"):
        ClipNorm(math.inf)


def embedded(rows: Any, size: int = 6, *, sparse: bool = True) -> Gradients:
    table = nn.Embedding(size, 2, sparse=sparse)
    (table(torch.tensor(rows)) * torch.arange(2.0 * len(rows)).view(-1, 2)).sum().backward()
    dense = nn.Parameter(torch.ones(3))
    dense.grad = torch.ones(3)
    return Gradients([table.weight, dense], [table.weight.grad, dense.grad], [{}, {}], [{}, {}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_unscale_divides_exactly_by_a_power_of_two(dtype):
    given = gradients(dtype=dtype)
    expected = [grad / 64 for grad in given.grads]
    for got, want in zip(run(Unscale(64), given), expected, strict=True):
        assert torch.equal(got, want)
    run(Unscale(2.0), gradients([]))


def test_unscale_sparse_rows_too():
    given = embedded([1, 1, 4])
    expected = [grad.to_dense() / 8 for grad in given.grads]
    for got, want in zip(run(Unscale(8.0), given), expected, strict=True):
        assert torch.equal(got.to_dense(), want)


def test_unscale_keeps_what_overflowed():
    given = gradients([(3,)])
    given.grads[0][0], given.grads[0][1] = math.inf, math.nan
    got = run(Unscale(2.0), given)[0]
    assert math.isinf(got[0])
    assert math.isnan(got[1])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("rows", [[1, 1, 4], [5, 0, 2], [3]])
def test_coalesce_merges_rows_and_leaves_dense_gradients(rows, dense):
    given = embedded(rows)
    before = list(given.grads)
    Coalesce(dense=dense)(given)
    assert given.grads[1] is before[1]
    assert torch.equal(given.grads[0].to_dense(), before[0].to_dense())
    if dense:
        assert given.grads[0].layout is torch.strided
    else:
        assert given.grads[0].is_coalesced()
        assert given.grads[0]._values().shape[0] == len(set(rows))


def test_decay_pulls_towards_zero_where_the_optimizer_goes_up():
    weights = []
    for maximize in (False, True):
        param = nn.Parameter(torch.tensor([2.0, -2.0]))
        param.grad = torch.zeros(2)
        optimizer = torch.optim.SGD([param], lr=0.5, maximize=maximize)
        given = Gradients([param], [param.grad], optimizer.param_groups, [{}])
        run(Decay(0.5), given)
        optimizer.step()
        weights.append(param.tolist())
    assert weights == [[1.5, -1.5], [1.5, -1.5]]


def test_decay_adds_the_weights():
    given = gradients()
    expected = [g + 0.1 * p.detach() for p, g in zip(given.params, given.grads, strict=True)]
    for got, want in zip(run(Decay(0.1), given), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_a_group_may_decay_differently():
    given = gradients([(3,), (3,), (3,)])
    given.groups = [{"coupled_weight_decay": 0.5}, {"coupled_weight_decay": 0.0}, {}]
    expected = [g + f * p.detach() for f, p, g in zip((0.5, 0.0, 0.1), given.params, given.grads, strict=True)]
    for got, want in zip(run(Decay(0.1), given), expected, strict=True):
        torch.testing.assert_close(got, want)
    given.groups = [{"coupled_weight_decay": math.nan}] * 3
    with pytest.raises(ValueError, match="coupled_weight_decay: found nan"):
        run(Decay(0.1), given)


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e4])
def test_clip_norm_equals_torch_bit_for_bit(norm_type, max_norm):
    ours, theirs = gradients(), gradients()
    nn.utils.clip_grad_norm_(theirs.params, max_norm, norm_type)
    run(ClipNorm(max_norm, norm_type), ours)
    for got, param in zip(ours.grads, theirs.params, strict=True):
        assert torch.equal(got, param.grad)


def test_clip_norm_refuses_nonfinite_on_request_and_accepts_no_gradients():
    run(ClipNorm(1.0), gradients([]))
    given = gradients([(3,)])
    given.grads[0][0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        run(ClipNorm(1.0, error_if_nonfinite=True), given)
    run(ClipNorm(1.0), given)


def test_clip_value_equals_torch():
    ours, theirs = gradients(), gradients()
    nn.utils.clip_grad_value_(theirs.params, 0.3)
    for got, param in zip(run(ClipValue(0.3), ours), theirs.params, strict=True):
        assert torch.equal(got, param.grad)


@pytest.mark.parametrize(
    "transform", [Centralize(), Unscale(8.0), Coalesce(), Decay(0.1), ClipNorm(0.5), ClipValue(0.3)], ids=repr
)
def test_scale_free_is_what_it_says(transform):
    scaled, plain = gradients(dtype=torch.float64), gradients(dtype=torch.float64)
    torch._foreach_mul_(scaled.grads, 1024.0)
    run(transform, scaled)
    run(transform, plain)
    same = all(torch.allclose(a / 1024, b) for a, b in zip(scaled.grads, plain.grads, strict=True))
    assert same is transform.scale_free


NOT_NUMBERS = st.one_of(st.none(), st.booleans(), st.text(), st.lists(st.floats()), st.complex_numbers())
BAD_NUMBERS = st.one_of(st.floats(max_value=-1e-300), st.just(math.nan), st.just(math.inf), st.integers(max_value=-1))


@given(NOT_NUMBERS)
def test_what_is_no_number_is_refused(bad):
    for build in (Decay, ClipNorm, ClipValue, Unscale, lambda x: ClipNorm(1.0, x)):
        with pytest.raises(TypeError, match="found"):
            build(bad)


@given(BAD_NUMBERS)
def test_numbers_out_of_range_are_refused(bad):
    for build in (Decay, ClipNorm, ClipValue, Unscale):
        with pytest.raises(ValueError, match="found"):
            build(bad)


@given(st.one_of(st.text(), st.integers(), st.just(torch.ones(3)), st.lists(st.text(), min_size=1)))
def test_what_is_no_collection_of_parameters_is_refused(bad):
    with pytest.raises(TypeError, match="skip: found"):
        Centralize(skip=bad)


def test_zero_limits_and_other_bad_settings_are_refused():
    for build in (ClipNorm, ClipValue, Unscale, lambda x: ClipNorm(1.0, x)):
        with pytest.raises(ValueError, match="above 0"):
            build(0)
    with pytest.raises(TypeError, match="error_if_nonfinite"):
        ClipNorm(1.0, error_if_nonfinite="yes")
    for bad in (5e-324, 10**400):
        with pytest.raises(ValueError, match="scale: found"):
            Unscale(bad)
    for bad in ("yes", 1, None):
        with pytest.raises(TypeError, match="dense: found"):
            Coalesce(dense=bad)
    with pytest.raises(TypeError, match="flag"):
        Centralize(flag=3)
    with pytest.raises(TypeError, match="multiple_of"):
        Centralize(multiple_of=True)
    with pytest.raises(ValueError, match="multiple_of"):
        Centralize(multiple_of=0)


def test_settings_are_values():
    param = nn.Parameter(torch.ones(2))
    assert Centralize(skip=[param]) == Centralize(skip=(param,))
    assert hash(ClipNorm(1.0)) == hash(ClipNorm(1.0))
    assert Decay(0.1) != Decay(0.2)
