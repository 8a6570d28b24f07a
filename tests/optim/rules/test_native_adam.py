import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchboost import IncompatibleError
from torchboost.optim.gradient_pass import BLOCK_ENTRIES
from torchboost.optim.rules.adam import Adam, AdamWeightDecay
from torchboost.optim.rules.native_adam import Pipeline
from torchboost.optim.transforms import Centralize, ClipNorm, ClipValue, Coalesce, Decay, Unscale

FULL = (Unscale(4.0), Decay(0.02), Centralize(), ClipNorm(0.7), ClipValue(0.05))
RULES = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"amsgrad": True},
    {"nesterov": True, "eps_uncorrected": True, "eps": 1e-3},
    {"bias_correction": False, "maximize": True},
]


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 3, 3, 3), (6,), (5, 24), (5,), (4, 2, 3), (), (1, 1)]
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    made[0].data = made[0].data.contiguous(memory_format=torch.channels_last)
    return made


def gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in params]


def train(optimizer, params, steps=6):
    for step in range(steps):
        for param, grad in zip(params, gradients(params, step), strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("length", range(len(FULL) + 1))
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_transforms_one_after_the_other(rule, length):
    transforms = FULL[:length]
    ours = parameters()
    exact = parameters(torch.float64)
    moved = train(Adam(ours, lr=0.01, native=True, transforms=transforms, **rule), ours)
    wanted = train(Adam(exact, lr=0.01, transforms=transforms, **rule), exact)
    for got, want in zip(moved, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("betas", [(0.9, 0.9999), (0.999, 0.99999), (0.0, 0.0)])
def test_betas_near_one_are_as_exact_as_torchs(betas):
    """In float32, 1 - 0.9999 is off by 1 in 10,000."""
    ours, theirs, exact = parameters(), parameters(), parameters(torch.float64)
    native = Adam(ours, lr=0.01, betas=betas, native=True)
    plain = torch.optim.Adam(theirs, lr=0.01, betas=betas)
    wanted = torch.optim.Adam(exact, lr=0.01, betas=betas)
    for optimizer, params in ((native, ours), (plain, theirs), (wanted, exact)):
        train(optimizer, params, steps=3)
    for key in ("exp_avg", "exp_avg_sq"):
        right = [state[key] for state in wanted.state.values()]
        mine, torchs = (
            max(
                float((state[key].double() - value).abs().max() / value.abs().max())
                for state, value in zip(optimizer.state.values(), right, strict=True)
            )
            for optimizer in (native, plain)
        )
        assert mine <= max(1e-6, 2 * torchs), (key, mine, torchs)


def test_state_equals_that_of_the_other_forms_and_continues_in_torch():
    ours, theirs = parameters(), parameters()
    native = AdamWeightDecay(ours, lr=0.01, eps=1e-8, weight_decay=0.1, bias_correction=True, native=True)
    plain = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    train(native, ours), train(plain, theirs)
    for a, b in zip(native.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=1e-7)
    plain.load_state_dict(native.state_dict())
    train(plain, theirs)
    assert plain.state_dict()["state"][0]["step"] == 12


def test_parameters_larger_than_a_block_are_cut_at_rows_only_where_they_must_be():
    shapes = [(3 * BLOCK_ENTRIES + 17,), (7, BLOCK_ENTRIES // 3 + 5), (2, BLOCK_ENTRIES + 1)]
    ours = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    plain = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    transforms = (Centralize(), ClipNorm(1.0))
    for got, want in zip(
        train(Adam(ours, native=True, transforms=transforms), ours, 2),
        train(Adam(plain, transforms=transforms), plain, 2),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_gradients_stay_as_they_are():
    params = parameters()
    optimizer = Adam(params, native=True, transforms=FULL)
    given_grads = gradients(params, 0)
    for param, grad in zip(params, given_grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, given_grads, strict=True))


def test_the_same_bits_with_any_number_of_threads():
    before = torch.get_num_threads()
    seen = []
    try:
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            params = [nn.Parameter(torch.ones(300, 1000)), *parameters()]
            seen.append(train(Adam(params, native=True, transforms=FULL), params, 3))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for later in seen[1:] for a, b in zip(seen[0], later, strict=True))


def test_resume_at_every_step_is_bit_identical_also_from_a_pickle():
    params = parameters()
    optimizer = Adam(params, native=True, transforms=FULL, weight_decay=0.1)
    for step in range(5):
        weights = [p.detach().clone() for p in params]
        again = [nn.Parameter(w.clone(memory_format=torch.preserve_format)) for w in weights]
        other = Adam(again, native=True, transforms=FULL, weight_decay=0.1)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        copied, copied_params = copy.deepcopy((optimizer, params))
        reread, reread_params = pickle.loads(pickle.dumps((optimizer, params)))
        for made, its in ((optimizer, params), (other, again), (copied, copied_params), (reread, reread_params)):
            for param, grad in zip(its, gradients(params, step), strict=True):
                param.grad = grad
            made.step()
        for its in (again, copied_params, reread_params):
            assert all(torch.equal(a, b) for a, b in zip(params, its, strict=True))


def test_grad_scaler_leaves_the_scale_to_the_kernel_and_skips_overflows():
    ours, plain = parameters(), parameters()
    native = Adam(ours, native=True, transforms=(Centralize(), ClipNorm(0.5)))
    eager = Adam(plain, transforms=(Centralize(), ClipNorm(0.5)))
    for optimizer, params in ((native, ours), (eager, plain)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            scaler.scale(torch.ones(()))
            for param, grad in zip(params, gradients(params, step), strict=True):
                param.grad = grad * scaler.get_scale()
            if step == 2:
                params[0].grad[0, 0, 0, 0] = float("inf")
            before = [p.detach().clone() for p in params]
            scaler.step(optimizer)
            scaler.update()
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True)) == (step == 2)
        assert optimizer.state[params[0]]["step"] == 3
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_skipped_or_raised_or_passed_on(bad):
    for nonfinite in ("skip", "raise", "ignore"):
        params = parameters()
        optimizer = Adam(params, native=True, transforms=(ClipNorm(1.0),), nonfinite=nonfinite)
        train(optimizer, params, 1)
        before = [p.detach().clone() for p in params]
        for param, grad in zip(params, gradients(params, 5), strict=True):
            param.grad = grad
        params[2].grad[1, 3] = bad
        if nonfinite == "raise":
            with pytest.raises(FloatingPointError, match="inf or nan"):
                optimizer.step()
        else:
            optimizer.step()
        same = all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
        assert same == (nonfinite != "ignore")
        assert optimizer.state[params[0]]["step"] == (1 if same else 2)
    strict = Adam(params, native=True, transforms=(ClipNorm(1.0, error_if_nonfinite=True),))
    with pytest.raises(RuntimeError, match="norm of the gradients is not finite"):
        strict.step()


def test_float32_masters_of_bfloat16_parameters():
    params = parameters(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = Adam(params, lr=0.01, native=True, master_weights=True, transforms=(Centralize(), ClipNorm(1.0)))
    plain = Adam(wide, lr=0.01, native=True, transforms=(Centralize(), ClipNorm(1.0)))
    for step in range(4):
        for param, copied, grad in zip(params, wide, gradients(params, step), strict=True):
            param.grad = grad.bfloat16()
            copied.grad = grad.bfloat16().float()
        optimizer.step(), plain.step()
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(params, wide, strict=True))


def test_a_gradient_of_another_layout_is_taken_over():
    params = parameters()
    optimizer = Adam(params, native=True)
    params[0].grad = torch.randn(6, 3, 3, 3)
    assert params[0].grad.stride() != params[0].stride()
    other = parameters()
    other[0].grad = params[0].grad.contiguous(memory_format=torch.channels_last)
    optimizer.step()
    Adam(other, native=True).step()
    assert torch.equal(params[0], other[0])


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ((Centralize(), Decay(0.1)), "found the transforms Centralize, Decay; the kernel takes Unscale, Decay"),
        ((ClipNorm(1.0), ClipNorm(2.0)), "each at most once, in this order"),
        ((Coalesce(),), "found the transforms Coalesce"),
        ((ClipNorm(1.0, norm_type=3.0),), "norm_type=3.0"),
    ],
)
def test_transforms_the_kernel_does_not_know(transforms, message):
    with pytest.raises(ValueError, match=message):
        Adam(parameters(), native=True, transforms=transforms)


@pytest.mark.parametrize("other", ["fused", "foreach", "capturable"])
def test_native_is_a_form_of_its_own(other):
    with pytest.raises(ValueError, match=f"native and {other}"):
        Adam(parameters(), native=True, **{other: True})


@pytest.mark.parametrize("made", ["double", "strided", "sparse"])
def test_tensors_the_kernel_cannot_take_change_nothing(made):
    first = nn.Parameter(torch.ones(3))
    second = {
        "double": lambda: nn.Parameter(torch.ones(3, dtype=torch.float64)),
        "strided": lambda: nn.Parameter(torch.ones(4, 6)[:, ::2]),
        "sparse": lambda: nn.Parameter(torch.ones(3, 3)),
    }[made]()
    first.grad, second.grad = torch.ones(3), torch.ones_like(second)
    if made == "sparse":
        second.grad = second.grad.to_sparse(1)
    optimizer = Adam([first, second], native=True)
    with pytest.raises(IncompatibleError):
        optimizer.step()
    assert torch.equal(first.detach(), torch.ones(3))


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 70),
    shift=st.floats(-50, 50),
    limit=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**31),
)
def test_the_norm_is_that_of_the_centralised_gradient(rows, columns, shift, limit, seed):
    """Rows with a mean far larger than their spread are where a one-pass formula would lose everything."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(rows, columns, generator=generator) + shift
    ours, exact = nn.Parameter(torch.zeros(rows, columns)), nn.Parameter(torch.zeros(rows, columns).double())
    ours.grad, exact.grad = grad.clone(), grad.double()
    transforms = (Centralize(), ClipNorm(limit))
    first, second = Adam([ours], native=True, transforms=transforms), Adam([exact], transforms=transforms)
    first.step(), second.step()
    scale = float(second.state[exact]["exp_avg"].norm())
    difference = float((first.state[ours]["exp_avg"].double() - second.state[exact]["exp_avg"]).norm())
    assert difference <= 1e-5 * scale + 1e-6 * abs(shift) * 0.1 * columns**0.5 * rows**0.5


def test_nothing_to_update_and_empty_parameters():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0, 3))]
    optimizer = Adam(params, native=True, transforms=(Centralize(), ClipNorm(1.0)), nonfinite="raise")
    optimizer.step()
    params[1].grad = torch.ones(0, 3)
    optimizer.step()
    params[0].grad = torch.ones(2)
    optimizer.step()
    assert (params[0] < 1).all()


def test_pipeline_of_nothing():
    assert Pipeline.of(()) == Pipeline()


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (torch.zeros(64, 65, dtype=torch.uint8), "torch.uint8"),
        (torch.zeros(64, 65, dtype=torch.float64), "torch.float64"),
        (torch.zeros(3), r"\(3,\)"),
    ],
)
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"])
def test_a_state_that_the_kernel_cannot_read_is_refused_before_anything_is_changed(key, entry, found):
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(64, 65))]
    optimizer = Adam(params, native=True, amsgrad=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state[params[1]][key] = entry
    before = [param.detach().clone() for param in params]
    with pytest.raises(IncompatibleError, match=f"{key}.*{found}"):
        optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert optimizer.state[params[0]]["step"] == 1
