"""When the kernel is used, what it refuses, and that its results do not depend on threads or blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchboost.core import native
from torchboost.optim import gradient_pass
from torchboost.optim.gradient_pass import Pass, cuts_of, fills_rows
from torchboost.optim.pipeline import Gradients
from torchboost.optim.pipeline import GradientPipeline
from torchboost.optim.rules.adam import Adam, AdamW
from torchboost.optim.rules.mixed import MixedOptimizer
from torchboost.optim.transforms import Centralize, ClipNorm, ClipValue, Decay, Unscale


def gradients(*shapes: tuple[int, ...], **options: Any) -> Gradients:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(**options)) for shape in shapes]
    grads = [torch.randn(shape, generator=generator).to(**options) for shape in shapes]
    return Gradients(list(params), grads, [{} for _ in params], [])


def test_the_longest_start_in_the_kernels_order_is_taken():
    lengths = {
        (Unscale(2.0), Decay(0.1), Centralize(), ClipNorm(1.0), ClipValue(1.0)): 4,
        (Centralize(), Unscale(2.0)): 1,
        (Centralize(), Centralize(flag="x")): 1,
        (ClipNorm(1.0), ClipNorm(2.0)): 1,
    }
    for chain, length in lengths.items():
        found = Pass.of(chain)
        assert found is not None
        assert found.length == length
    assert Pass.of(()) is None
    assert Pass.of((ClipValue(1.0), Centralize())) is None
    assert Pass.of((ClipNorm(1.0, norm_type=math.inf),)) is None


def first(*chain: Any) -> Pass:
    found = Pass.of(chain)
    assert found is not None
    return found


def test_other_tensors_are_left_to_the_transforms():
    kernel = first(Decay(0.1), Centralize())
    assert kernel.fits(gradients((4, 3), (3,)))
    assert not kernel.fits(gradients((4, 3), dtype=torch.float64))
    assert not kernel.fits(gradients((4, 3), dtype=torch.bfloat16))
    assert not kernel.fits(gradients())
    sparse = gradients((4, 3))
    sparse.grads[0] = sparse.grads[0].to_sparse(1)
    assert not kernel.fits(sparse)
    turned = gradients((4, 3))
    turned.grads[0] = turned.grads[0].T.contiguous().T
    assert not kernel.fits(turned)

    class Other(Tensor):
        pass

    special = gradients((4, 3))
    special.grads[0] = special.grads[0].as_subclass(Other)
    assert not kernel.fits(special)


def test_filters_in_channels_last_are_centralised_in_their_memory():
    given = gradients((6, 3, 3, 3))
    given.grads[0] = given.grads[0].to(memory_format=torch.channels_last)
    wanted = given.grads[0] - given.grads[0].mean((1, 2, 3), keepdim=True)
    assert first(Centralize()).fits(given)
    assert not first(Decay(0.1), Centralize()).fits(given)  # the parameter lies differently
    first(Centralize()).run(given, hand_over=False, grad_scale=1.0)
    assert given.grads[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(given.grads[0], wanted)


def test_threads_and_blocks_do_not_change_the_bits(monkeypatch):
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        given = gradients((700, 300), (1 << 18,), (5,))
        left = first(Centralize(), ClipNorm(1.0)).run(given, hand_over=True, grad_scale=1.0)
        found.append((left, *(grad.clone() for grad in given.grads)))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert other[0] == found[0][0]
        assert all(map(torch.equal, other[1:], found[0][1:]))


def test_writes_are_counted_as_torch_counts_them():
    given = gradients((4, 3))
    version = given.grads[0]._version
    first(Centralize()).run(given, hand_over=False, grad_scale=1.0)
    assert given.grads[0]._version > version


def test_a_plan_follows_shapes_parameters_and_flags():
    kernel = first(Centralize(), ClipNorm(100.0))
    for given in (gradients((4, 3), (3,)), gradients((4, 6), (3,)), gradients((4, 3))):
        wanted = [g - g.mean(1, keepdim=True) if g.ndim > 1 else g.clone() for g in given.grads]
        kernel.run(given, hand_over=False, grad_scale=1.0)
        torch.testing.assert_close(given.grads, wanted)
    given = gradients((4, 3))
    kernel.run(given, hand_over=False, grad_scale=1.0)
    given.grads[0], given.groups[0]["grad_centralization"] = torch.ones(4, 3), False
    kernel.run(given, hand_over=False, grad_scale=1.0)
    assert torch.equal(given.grads[0], torch.ones(4, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_reach_the_weights_as_in_torch(bad):
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(4, 3)
        param.grad[1, 1] = bad
    ours, theirs = torch.optim.SGD(params[:1], lr=0.1, fused=True), torch.optim.SGD(params[1:], lr=0.1, fused=True)
    GradientPipeline(ClipNorm(1.0)).attach(ours)
    ours.step()
    torch.nn.utils.clip_grad_norm_(params[1:], 1.0)
    theirs.step()
    torch.testing.assert_close(params[0], params[1], equal_nan=True)


def test_without_a_compiler_the_transforms_run_one_by_one(monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    native.compiled.cache_clear()
    gradient_pass._kernel.cache_clear()
    try:
        assert not first(Centralize()).fits(gradients((4, 3)))
        param = nn.Parameter(torch.ones(2, 3))
        optimizer = AdamW([param], lr=0.1, transforms=(Centralize(), ClipNorm(1.0)))
        param.grad = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 9.0]])
        optimizer.step()
        assert param.grad.sum(1).abs().max() < 1e-5
    finally:
        native.compiled.cache_clear()
        gradient_pass._kernel.cache_clear()


KINDS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, AdamW]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_fused_optimizer_moves_as_by_hand_and_keeps_clipped_gradients(kind, fused):
    found = []
    for by_hand in (False, True):
        given = gradients((20, 8), (8,), (4, 3, 3, 3))
        optimizer = kind(given.params, lr=0.01, fused=fused)
        if not by_hand:
            GradientPipeline(Centralize(), ClipNorm(0.5)).attach(optimizer)
        for step in range(4):
            for param, grad in zip(given.params, given.grads, strict=True):
                param.grad = grad * (step + 1)
            if by_hand:
                for param in given.params:
                    if param.ndim > 1:
                        param.grad -= param.grad.mean(tuple(range(1, param.ndim)), keepdim=True)
                torch.nn.utils.clip_grad_norm_(given.params, 0.5)
            optimizer.step()
            assert not hasattr(optimizer, "grad_scale")
        found.append([p.detach().clone() for p in given.params] + [p.grad.clone() for p in given.params])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_clipping_is_left_to_the_fused_kernel(kind):
    given = gradients((20, 8))
    torch.optim.Adam(given.params), Adam(given.params)  # torch wraps the step of each class when it is first built
    optimizer = kind(given.params, lr=0.01, fused=True)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(float(optimizer.grad_scale)))
    GradientPipeline(ClipNorm(0.1)).attach(optimizer)
    given.params[0].grad = given.grads[0].clone()
    optimizer.step()
    assert seen == [pytest.approx(float(given.grads[0].norm()) / 0.1, rel=1e-4)]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_grad_scalers_scale_is_folded_into_the_pass(kind):
    found = []
    for scale in (1.0, 1024.0):
        given = gradients((20, 8), (8,))
        optimizer = kind(given.params, lr=0.01, fused=True)
        GradientPipeline(Centralize(), ClipNorm(0.5)).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(4):
            scaler.scale(torch.zeros(()))
            for param, grad in zip(given.params, given.grads, strict=True):
                param.grad = grad * scaler.get_scale()
            if step == 2:
                given.params[0].grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(optimizer, "grad_scale")
        found.append([param.detach() for param in given.params])
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, AdamW])
def test_grad_scaler_that_has_unscaled_already(kind):
    """It leaves ``grad_scale = None``, and deletes the attribute after the step."""
    found = []
    for scale in (1.0, 8.0):
        given = gradients((20, 8))
        optimizer = kind(given.params, lr=0.01, fused=True)
        GradientPipeline(ClipNorm(1.0)).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for factor in (1e-3, 10.0, 1.0):
            scaler.scale(torch.zeros(()))
            given.params[0].grad = given.grads[0] * factor * scaler.get_scale()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(optimizer, "grad_scale")
        found.append(given.params[0].detach())
    torch.testing.assert_close(*found)


def test_a_large_loss_scale_does_not_overflow_the_squares():
    given = gradients((20, 8))
    optimizer = torch.optim.SGD(given.params, lr=1.0, fused=True)
    GradientPipeline(ClipNorm(1.0)).attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scaler.scale(torch.zeros(()))
    before = given.params[0].detach().clone()
    given.params[0].grad = given.grads[0] * 1e10 * scaler.get_scale()
    scaler.step(optimizer)
    assert float((given.params[0].detach() - before).norm()) == pytest.approx(1.0, rel=1e-4)


def test_a_step_that_calls_the_step_of_its_base_class_is_transformed_once():
    """torch runs the hooks of both."""

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    for kind in (Own, torch.optim.SGD, Own):
        given = gradients((6, 4))
        optimizer = kind(given.params, lr=1.0, fused=True)
        GradientPipeline(Unscale(10.0), ClipNorm(1e9)).attach(optimizer)
        for _ in range(2):
            before = given.params[0].detach().clone()
            given.params[0].grad = given.grads[0].clone()
            optimizer.step()
            torch.testing.assert_close(before - given.params[0].detach(), given.grads[0] / 10)


def test_a_parameter_that_moves_to_another_group_follows_its_flag():
    given = gradients((4, 3), (4, 3))
    own = [{"grad_centralization": True}, {"grad_centralization": False}]
    kernel = first(Centralize())
    for groups in (own, own[::-1], [own[1], own[1]]):
        given.grads, given.groups = [torch.arange(12.0).view(4, 3) for _ in range(2)], groups
        kernel.run(given, hand_over=False, grad_scale=1.0)
        for grad, group in zip(given.grads, groups, strict=True):
            assert bool(grad.mean(1).any()) is not group["grad_centralization"]
    flagged = first(Centralize(flag="gc"))
    for value in (1.0, 0.0):
        given.grads, given.groups = [torch.arange(12.0).view(4, 3) for _ in range(2)], [{"gc": value}, {"gc": value}]
        flagged.run(given, hand_over=False, grad_scale=1.0)
        assert bool(given.grads[0].mean(1).any()) is not bool(value)


def test_a_step_that_raises_leaves_no_scale_behind():
    given = gradients((20, 8))
    optimizer = torch.optim.AdamW(given.params, lr=0.01, fused=True)
    attachment = GradientPipeline(ClipNorm(0.1)).attach(optimizer)
    given.params[0].grad = given.grads[0]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    attachment.remove()
    assert not hasattr(optimizer, "grad_scale")


def test_hooks_after_the_pipeline_see_clipped_gradients():
    given = gradients((20, 8))
    optimizer = torch.optim.AdamW(given.params, lr=0.01, fused=True)
    GradientPipeline(ClipNorm(0.1)).attach(optimizer)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(given.params[0].grad.norm())))
    given.params[0].grad = given.grads[0]
    optimizer.step()
    assert seen == [pytest.approx(0.1, rel=1e-4)]


def test_two_pipelines_clip_twice():
    given = gradients((20, 8))
    optimizer = torch.optim.SGD(given.params, lr=1.0, fused=True)
    for most in (0.5, 0.1):
        GradientPipeline(ClipNorm(most)).attach(optimizer)
    before = given.params[0].detach().clone()
    given.params[0].grad = given.grads[0]
    optimizer.step()
    assert float((given.params[0].detach() - before).norm()) == pytest.approx(0.1, rel=1e-4)


def test_a_mixed_optimizer_clips_before_its_rules():
    given = gradients((6, 4), (4,))
    groups = [{"params": given.params[:1], "rule": "sgd", "fused": True, "lr": 1.0}]
    groups.append({"params": given.params[1:], "rule": "sgd", "fused": True, "lr": 1.0})
    optimizer = MixedOptimizer(groups, weight_decay=0.0, transforms=(ClipNorm(0.1),))
    before = [param.detach().clone() for param in given.params]
    for param, grad in zip(given.params, given.grads, strict=True):
        param.grad = grad
    optimizer.step()
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(given.params, before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.1, rel=1e-4)


def test_cuts_cover_everything_once_and_keep_rows_whole():
    for entries, rows, central in ((10, 1, False), (1 << 20, 1, False), (1 << 20, 64, True), (1 << 20, 2, True)):
        cuts = cuts_of(entries, rows, central)
        ends = [0]
        for offset, count, columns in cuts.tolist():
            assert offset == ends[-1]
            assert not central or columns == entries // rows
            ends.append(offset + count * columns)
        assert ends[-1] == entries
    assert fills_rows(torch.ones(3, 4))
    assert not fills_rows(torch.ones(3, 4).T)
    assert not fills_rows(torch.ones(3, 8)[:, ::2])
