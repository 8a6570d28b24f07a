from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.support.optimizers import FORMS, give_grads, parameters, same, train, values
from torchboost.errors import IncompatibleError
from torchboost.optim import SGD, Momentum
from torchboost.optim.rules.options import miscomputes


def test_momentum_is_sgd_with_momentum():
    for form, nesterov in itertools.product(FORMS.values(), (False, True)):
        mine, other = parameters(), parameters()
        left = Momentum(mine, 0.1, 0.8, 0.1, nesterov, **form)
        right = SGD(other, 0.1, 0.8, weight_decay=0.1, nesterov=nesterov, **form)
        train(left, mine, range(4))
        train(right, other, range(4))
        assert values(left) == values(right)


def embedding(weight: torch.Tensor) -> nn.Embedding:
    table = nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    return table


def test_sparse_gradients_without_momentum_equal_torch():
    for form in [{}, {"foreach": False}]:
        weight = torch.randn(5, 3)
        mine, other = embedding(weight), embedding(weight)
        SGD(mine.parameters(), lr=0.1, **form).step()
        torch.optim.SGD(other.parameters(), lr=0.1, **form).step()
        assert same([mine.weight], [other.weight])
        assert not torch.equal(mine.weight, weight)


def test_rows_of_a_master_are_written_into_the_weights():
    table = embedding(torch.ones(5, 3).bfloat16())
    optimizer = SGD(table.parameters(), lr=1e-3, master_weights=True)
    for _ in range(8):
        optimizer.step()
    assert table.weight[:, 0].tolist() == [1.0, 1 - 2**-6, 1.0, 1 - 2**-7, 1.0]  # each step alone would be rounded away


def test_sparse_gradients_where_the_rule_is_dense():
    for options in [{"momentum": 0.9}, {"weight_decay": 0.1}, {"fused": True}, {"foreach": True}]:
        table = embedding(torch.ones(5, 3))
        with pytest.raises(IncompatibleError, match="SGD needs dense gradients"):
            SGD(table.parameters(), lr=0.1, **options).step()
        assert torch.equal(table.weight, torch.ones(5, 3))


def test_momentum_may_be_turned_on_and_off():
    params = parameters()
    optimizer = SGD(params, lr=0.1)
    train(optimizer, params, [0])
    optimizer.param_groups[0]["momentum"] = 0.9
    give_grads(params, 1)
    optimizer.step()
    assert same([optimizer.state[p]["momentum_buffer"] for p in params], [p.grad for p in params])
    optimizer.param_groups[0]["momentum"] = 0.0
    before = [param.detach().clone() for param in params]
    give_grads(params, 2)
    optimizer.step()
    for param, old in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), old - 0.1 * param.grad)


def test_late_buffers_and_a_first_overflow_are_right_in_the_fused_form():
    """torch's kernel takes buffers for all or for none, and leaves new ones unwritten where it skips an overflow."""
    for overflows in [(), (0,), (0, 3), (2,)]:
        runs = []
        for fused in (True, False):
            params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))]
            optimizer = SGD(params, lr=0.1, momentum=0.9, dampening=0.2, fused=fused)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for step in range(5):
                generator = torch.Generator().manual_seed(step)
                scaler.scale(torch.ones(()))
                for late, param in enumerate(params):
                    grad = torch.randn(param.shape, generator=generator) * scaler.get_scale()
                    param.grad = grad if not late or step > 2 else None
                if step in overflows:
                    params[0].grad[0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
            runs.append(params)
        for ours, plain in zip(*runs, strict=True):
            assert ours.isfinite().all()
            torch.testing.assert_close(ours, plain)


def test_fused_kernels_never_see_a_parameter_with_gaps():
    whole = torch.ones(4, 6)
    param = nn.Parameter(whole[:, ::2])
    param.grad = torch.ones(4, 3)
    with pytest.raises(IncompatibleError, match="without gaps in memory"):
        SGD([param], lr=0.1, fused=True).step()
    assert torch.equal(whole, torch.ones(4, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_kernel_that_computes_wrong_steps_is_refused_before_anything_changes(dtype):
    if not miscomputes(torch.optim.SGD, dtype, torch.device("cpu")):
        pytest.skip("this torch computes right steps")
    param = nn.Parameter(torch.ones(64, dtype=dtype))
    param.grad = torch.ones_like(param)
    optimizer = SGD([param], lr=0.1, momentum=0.9, fused=True)
    with pytest.raises(IncompatibleError, match="computes wrong steps"):
        optimizer.step()
    assert torch.equal(param, torch.ones_like(param))
    assert not optimizer.state
    SGD([param], lr=0.1, momentum=0.9, fused=True, master_weights=True).step()
    torch.testing.assert_close(param, torch.full_like(param, 0.9))


def test_nesterov_takes_expanded_gradients():
    for form in FORMS.values():
        param = nn.Parameter(torch.zeros(3))
        optimizer = SGD([param], lr=0.1, momentum=0.9, nesterov=True, **form)
        for _ in range(3):
            param.grad = torch.ones(()).expand(3)
            optimizer.step()
        torch.testing.assert_close(param, torch.full_like(param, -0.8049))
