"""What each transform of gradients or updates does, in every layout and precision, and what it refuses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchboost.errors import IncompatibleError
from torchboost.optim import (
    SGD,
    Centralize,
    ClipNorm,
    ClipValue,
    Coalesce,
    Decay,
    GradientPipeline,
    Gradients,
    GradientTransform,
    Unscale,
)
from torchboost.optim.transforms import has_rows

SHAPES = [(5,), (4, 7), (6, 3, 3, 3), (6, 5, 1, 1), (2, 3, 4), (3, 2, 2, 2, 2), (1, 1), ()]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def gradients(shapes: Any = SHAPES, dtype: torch.dtype = torch.float32, **group: Any) -> Gradients:
    generator = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    grads = [torch.randn(shape, generator=generator).to(dtype) + 0.5 for shape in shapes]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return Gradients(list(params), grads, [group] * len(params))


def of(param: Tensor, grad: Tensor, **group: Any) -> Gradients:
    return Gradients([param], [grad], [group])


def embedded(rows: Any, *, sparse: bool = True) -> Gradients:
    """The gradients of a table of which these rows were looked up, and of a vector."""
    table = nn.Embedding(6, 2, sparse=sparse)
    (table(torch.tensor(rows)) * torch.arange(2.0 * len(rows)).view(-1, 2)).sum().backward()
    dense = nn.Parameter(torch.ones(3))
    dense.grad = torch.ones(3)
    return Gradients([table.weight, dense], [table.weight.grad, dense.grad], [{}, {}])


def run(transform: GradientTransform, inputs: Gradients) -> list[Tensor]:
    before = list(inputs.grads)
    with torch.no_grad():
        transform(inputs)
    assert all(a is b for a, b in zip(before, inputs.grads, strict=True)), "must work in place"
    return inputs.grads


def centred(grad: Tensor) -> Tensor:
    wide = grad.double()
    return wide - wide.mean(tuple(range(1, grad.ndim)), keepdim=True) if grad.ndim > 1 and grad[0].numel() > 1 else wide


def test_centralize_subtracts_the_mean_of_every_row_and_unscale_divides_exactly():
    for dtype in DTYPES:
        inputs = gradients(dtype=dtype)
        expected = [centred(grad) for grad in inputs.grads]
        for got, want in zip(run(Centralize(), inputs), expected, strict=True):
            error = (got.double() - want).abs().max()
            assert error <= 2 * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
        expected = [grad / 64 for grad in inputs.grads]
        assert all(map(torch.equal, run(Unscale(64), inputs), expected))


def test_centralize_in_any_memory_format_works_in_place():
    base = torch.randn(6, 5, 3, 3)
    bucket = torch.empty(600)  # as DDP has one
    bucket[100:370].copy_(base.flatten())
    for grad in (
        base.to(memory_format=torch.channels_last),
        base.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0),
        torch.zeros(6, 5, 3, 6)[..., ::2].copy_(base),
        bucket[100:370].view(6, 5, 3, 3),
    ):
        layout = grad.stride(), grad.data_ptr()
        run(Centralize(), of(nn.Parameter(torch.zeros(6, 5, 3, 3)), grad))
        torch.testing.assert_close(grad, centred(base).float())
        assert (grad.stride(), grad.data_ptr()) == layout
    assert not torch.equal(bucket[100:370].view(6, 5, 3, 3), base)


def changed_by(transform: Centralize, inputs: Gradients) -> list[bool]:
    before = [grad.clone() for grad in inputs.grads]
    return [not torch.equal(a, b) for a, b in zip(before, run(transform, inputs), strict=True)]


def test_what_centralize_does_not_change():
    inputs = gradients()
    assert changed_by(Centralize(skip=[inputs.params[1]]), inputs) == [False, False, *[True] * 4, False, False]
    for shape in [(3, 1), (3, 1, 1), (3, 1, 1, 1), (0, 4), (4, 0), (1, 3, 1, 1), (1, 1, 3)]:
        inputs = gradients([shape])  # rows of one entry, and vectors
        assert changed_by(Centralize(), inputs) == [False]
        assert not has_rows(inputs.params[0])
    for transform in (Centralize(), Centralize(flag="gc"), Centralize(flag="grad_centralization")):
        assert changed_by(transform, gradients([(4, 7)], grad_centralization=False, gc=True)) == [False]
    inputs = gradients([(4, 7), (4, 16), (4, 3, 16)])
    inputs.groups = [{"gc": True}, {"gc": True}, {"gc": True}]
    assert changed_by(Centralize(flag="gc", multiple_of=16), inputs) == [False, True, False]
    inputs = gradients([(4, 7), (4, 16), (4, 3, 16)])
    inputs.groups = [{"gc": False}, {}, {"gc": True}]
    assert changed_by(Centralize(flag="gc"), inputs) == [False, False, True]
    with pytest.raises(TypeError, match="grad_centralization: found 1; give True or False"):
        Centralize()(gradients([(4, 7)], grad_centralization=1))


def test_centralize_sparse_rows_equals_dense():
    dense, sparse = nn.Embedding(6, 4), nn.Embedding(6, 4, sparse=True)
    for table in (dense, sparse):
        (table(torch.tensor([1, 1, 3, 5, 3])) * torch.arange(20.0).view(5, 4)).sum().backward()
    run(Centralize(), of(sparse.weight, sparse.weight.grad))
    torch.testing.assert_close(sparse.weight.grad.to_dense(), centred(dense.weight.grad).float(), check_dtype=False)
    single = nn.Embedding(5, 1, sparse=True)
    (single(torch.tensor([1, 3, 3])) * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    run(Centralize(), of(single.weight, single.weight.grad))
    assert single.weight.grad.to_dense().flatten().tolist() == [0.0, 1.0, 0.0, 5.0, 0.0]


def test_a_group_that_asks_for_centralisation_gets_it_after_the_decay():
    own, gc = Centralize(flag="grad_centralization"), Centralize(flag="gc")
    for transforms, expected in (
        ((Unscale(2.0), Decay(0.1), ClipNorm(1.0)), (Unscale(2.0), Decay(0.1), own, ClipNorm(1.0))),
        ((), (own,)),
        ((Decay(0.1),), (Decay(0.1), own)),
        ((Centralize(),), (Centralize(),)),
        ((own,), (own,)),
        ((gc,), (own, gc)),
    ):
        optimizer = SGD([nn.Parameter(torch.ones(2, 2))], lr=0.1, transforms=transforms)
        assert optimizer.chain == transforms
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "grad_centralization": False})
        assert optimizer.chain == transforms
        optimizer.param_groups[0]["grad_centralization"] = True
        assert optimizer.chain == expected


def test_sparse_gradients_are_refused_where_they_have_no_meaning():
    def step(grad: Tensor, *transforms: GradientTransform) -> Tensor:
        param = nn.Parameter(torch.ones(6, 4))
        optimizer = torch.optim.SGD([param], lr=0.1)
        GradientPipeline(*transforms).attach(optimizer)
        param.grad = grad
        optimizer.step()
        return param.grad

    rows = torch.ones(6, 4).to_sparse(1)
    with pytest.raises(IncompatibleError, match=r"Decay needs dense gradients.*sparse=False"):
        step(rows, Decay(0.1))
    assert step(rows, Coalesce(dense=True), Decay(0.1)).layout is torch.strided
    with pytest.raises(IncompatibleError, match=r"shape \(6, 4\).*'skip'"):
        step(torch.ones(6, 4).to_sparse(), Centralize())
    with pytest.raises(IncompatibleError, match=r"ClipValue needs real gradients, found torch.complex64"):
        ClipValue(1.0).check(of(torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)))


def test_sparse_rows_count_as_if_they_were_dense():
    for transform in [ClipNorm(1.0), ClipNorm(0.5, 1.0), ClipNorm(0.1, math.inf), ClipValue(0.3), Unscale(8.0)]:
        grads = []
        for sparse in (False, True):
            inputs = embedded([1, 3, 1, 1], sparse=sparse)
            with torch.no_grad():
                transform(inputs)
            assert inputs.grads[0].is_sparse is sparse
            grads.append([grad.to_dense() for grad in inputs.grads])
        torch.testing.assert_close(*grads)


def test_coalesce_merges_rows_and_leaves_dense_gradients():
    for dense, rows in itertools.product([False, True], ([1, 1, 4], [5, 0, 2], [3])):
        inputs = embedded(rows)
        before = list(inputs.grads)
        Coalesce(dense=dense)(inputs)
        assert inputs.grads[1] is before[1]
        assert torch.equal(inputs.grads[0].to_dense(), before[0].to_dense())
        if dense:
            assert inputs.grads[0].layout is torch.strided
        else:
            assert inputs.grads[0].is_coalesced()
            assert inputs.grads[0]._values().shape[0] == len(set(rows))


def test_decay_adds_the_weights_by_group_and_against_the_direction_of_the_optimizer():
    inputs = gradients([(3,), (3,), (4, 2)])
    inputs.groups = [{"coupled_weight_decay": 0.5}, {"coupled_weight_decay": 0.0}, {}]
    factors = zip((0.5, 0.0, 0.1), inputs.params, inputs.grads, strict=True)
    expected = [grad + factor * param.detach() for factor, param, grad in factors]
    torch.testing.assert_close(run(Decay(0.1), inputs), expected)
    inputs.groups = [{"coupled_weight_decay": math.nan}] * 3
    for call in (Decay(0.1), Decay(0.1).check):
        with pytest.raises(ValueError, match="coupled_weight_decay: found nan"):
            call(inputs)
    for maximize in (False, True):
        param = nn.Parameter(torch.tensor([2.0, -2.0]))
        param.grad = torch.zeros(2)
        optimizer = torch.optim.SGD([param], lr=0.5, maximize=maximize)
        GradientPipeline(Decay(0.5)).attach(optimizer)
        optimizer.step()
        assert param.tolist() == [1.5, -1.5]


def test_clipping_equals_torch_bit_for_bit():
    for norm_type, max_norm in itertools.product((1, 2.0, 3.0, math.inf), (0.1, 1e4)):
        ours, theirs = gradients(), gradients()
        nn.utils.clip_grad_norm_(theirs.params, max_norm, norm_type)
        run(ClipNorm(max_norm, norm_type), ours)
        assert all(torch.equal(got, param.grad) for got, param in zip(ours.grads, theirs.params, strict=True))
    ours, theirs = gradients(), gradients()
    nn.utils.clip_grad_value_(theirs.params, 0.3)
    run(ClipValue(0.3), ours)
    assert all(torch.equal(got, param.grad) for got, param in zip(ours.grads, theirs.params, strict=True))


def test_nothing_empty_and_not_finite():
    for transform in (ClipNorm(1.0), Unscale(2.0), ClipValue(1.0), Centralize(), Decay(0.1)):
        run(transform, gradients([]))
    for order in (2.0, math.inf):
        inputs = gradients([(0, 3), (4,)])
        assert run(ClipNorm(0.1, order), inputs)[1].norm(order) == pytest.approx(0.1, rel=1e-4)
        run(ClipNorm(0.1, order), gradients([(0,)]))
    inputs = gradients([(3,)])
    inputs.grads[0][0], inputs.grads[0][1] = math.inf, math.nan
    found = run(Unscale(2.0), inputs)[0]
    assert math.isinf(found[0])
    assert math.isnan(found[1])
    run(ClipNorm(1.0), inputs)


def test_scale_free_is_what_it_says():
    for transform in [Centralize(), Unscale(8.0), Coalesce(), Decay(0.1), ClipNorm(0.5), ClipValue(0.3)]:
        scaled, plain = gradients(dtype=torch.float64), gradients(dtype=torch.float64)
        torch._foreach_mul_(scaled.grads, 1024.0)
        run(transform, scaled)
        run(transform, plain)
        same = all(torch.allclose(a / 1024, b) for a, b in zip(scaled.grads, plain.grads, strict=True))
        assert same is transform.scale_free


NUMBERS = (Decay, ClipNorm, ClipValue, Unscale, lambda x: ClipNorm(1.0, x))


def test_bad_settings_are_refused_and_others_are_values():
    param = nn.Parameter(torch.ones(2))
    assert Centralize(skip=[param]) == Centralize(skip=(param,))
    assert hash(ClipNorm(1.0)) == hash(ClipNorm(1.0))
    assert Decay(0.1) != Decay(0.2)
    wrong: Any = torch.ones(3)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: ClipNorm(math.inf), ValueError, "clips nothing; leave ClipNorm out"),
        (lambda: Centralize(flag=3), TypeError, "flag"),
        (lambda: Centralize(multiple_of=True), TypeError, "multiple_of"),
        (lambda: Centralize(multiple_of=0), ValueError, "multiple_of"),
    ]
    for wrong in (None, True, "1", [1.0], 1j, torch.ones(())):
        cases += [(lambda build=build, wrong=wrong: build(wrong), TypeError, "found") for build in NUMBERS]
    for wrong in (-1, -1e-300, math.nan, -math.inf, -(10**400)):
        cases += [(lambda build=build, wrong=wrong: build(wrong), ValueError, "found") for build in NUMBERS]
    cases += [(lambda build=build: build(math.inf), ValueError, "found inf") for build in NUMBERS[:4]]
    cases += [(lambda build=build: build(0), ValueError, "above 0") for build in NUMBERS[1:]]
    cases += [(lambda wrong=wrong: Unscale(wrong), ValueError, "scale: found") for wrong in (5e-324, 10**400)]
    cases += [(lambda wrong=wrong: Coalesce(dense=wrong), TypeError, "dense: found") for wrong in ("yes", 1, None)]
    for wrong in ("weight", 3, ["weight"], torch.ones(3), iter([torch.ones(3)])):
        cases.append((lambda wrong=wrong: Centralize(skip=wrong), TypeError, "skip: found"))
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
