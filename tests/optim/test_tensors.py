"""Memory layouts of tensors, lists of tensors, figures of gradients, and what a step remembers of its tensors."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.profiler import profile

import torchboost
from tests.support.optimizers import give_grads, parameters, same, train
from torchboost.core.torch_private import foreach
from torchboost.errors import IncompatibleError
from torchboost.optim import SGD, Adam, Batch
from torchboost.optim.rules.trust_ratio import together
from torchboost.optim.tensors import (
    aligned,
    all_finite,
    is_dense,
    same_layout,
    stand_in,
    writable,
)


def test_strides_of_axes_of_length_one_mean_nothing():
    plain = torch.randn(4, 1, 1, 1)
    odd = plain.as_strided((4, 1, 1, 1), (1, 7, 9, 11))
    assert same_layout(plain, plain.to(memory_format=torch.channels_last))
    assert same_layout(odd, plain)
    assert aligned(odd, plain) is odd


def test_a_copy_is_made_only_where_the_layout_differs():
    model = torch.randn(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    value = torch.randn(2, 3, 4, 5)
    copied = aligned(value, model)
    assert copied is not value
    assert torch.equal(copied, value)
    assert (copied.stride(), copied.dtype) == (model.stride(), torch.float32)
    assert aligned(copied, model) is copied
    for tensor in (torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(4, 6)[:, ::2], torch.eye(3).to_sparse()):
        assert writable(tensor) is tensor
    expanded = torch.ones(1, 2).expand(3, 2)
    copied = writable(expanded)
    assert torch.equal(copied, expanded)
    copied.mul_(2)
    assert bool((expanded == 1).all())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_order_in_memory(shape, data):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    turned = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    assert is_dense(turned)
    plain = turned.contiguous()
    flat = (turned.as_strided((turned.numel(),), (1,)), plain.flatten())
    assert not same_layout(turned, plain) or torch.equal(*flat)
    assert same_layout(turned, torch.empty_like(turned))


def test_gaps_are_seen():
    assert not is_dense(torch.zeros(4, 6)[:, ::2])
    assert not is_dense(torch.zeros(3).expand(2, 3))
    assert is_dense(torch.zeros(4, 6)[1:3])
    assert is_dense(torch.zeros(()))


def test_lists_of_tensors_are_not_read_entry_by_entry():
    lists = [[torch.ones(40, 3) for _ in range(2)] for _ in range(2)]
    with profile(use_kineto=False) as trace:
        foreach.add_(*lists)
    names = [event.name for event in trace.function_events or ()]
    assert names
    assert not {"aten::select", "aten::item", "aten::is_nonzero"} & set(names)
    assert len(names) < 10
    sources = Path(torchboost.__file__).parent.rglob("*.py")
    assert not [path for path in sources if "aten._foreach" in path.read_text(encoding="utf-8")]


def test_numbers_of_one_kind_are_worked_on_together_and_others_one_by_one():
    calls = []

    def ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(above.shape))
        return above / below

    numbers = [torch.tensor(float(i)) for i in range(1, 4)]
    assert together(ratio, numbers, numbers[::-1]) == [torch.tensor(v) for v in (1 / 3, 1.0, 3.0)]
    mixed = [*numbers, torch.tensor(2.0, dtype=torch.float64)]
    assert [r.dtype for r in together(ratio, mixed, mixed)] == [torch.float32] * 3 + [torch.float64]
    assert calls == [(3,), (), (), (), ()]
    assert together(ratio, [], []) == []


def test_checks_of_nothing_of_empty_and_of_sparse_gradients():
    empty, table = torch.ones(0, 3), nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert all_finite([])
    assert all_finite([empty, table.weight.grad])
    assert not all_finite([torch.ones(2), torch.tensor(math.nan)])
    mixed = [torch.ones(2, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
    assert all_finite([*mixed, torch.tensor(1e300, dtype=torch.float64)])
    assert not all_finite([*mixed, torch.tensor(math.inf, dtype=torch.float64)])
    found = stand_in(torch.ones(1000, 1000), torch.bfloat16)
    assert (found.shape, found.untyped_storage().nbytes()) == ((1000, 1000), 2)


class Counting(SGD):
    looked = 0

    def check_grad(self, param, grad, group):
        self.looked += 1
        super().check_grad(param, grad, group)


def looks(optimizer: Counting, params: list[nn.Parameter], step: int) -> int:
    before = optimizer.looked
    give_grads(params, step)
    optimizer.step()
    return optimizer.looked - before


def test_gradients_like_those_before_are_not_looked_at_again():
    params = parameters([(3, 2), (2,), (4, 4)])
    optimizer = Counting(params, lr=0.1)
    assert [looks(optimizer, params, step) for step in range(3)] == [3, 0, 0]
    optimizer.param_groups[0]["lr"] = 0.2
    assert looks(optimizer, params, 3) == 0
    optimizer.param_groups[0]["momentum"] = 0.5
    assert looks(optimizer, params, 4) == 3
    params[2].data = params[2].data.t().clone(memory_format=torch.preserve_format)
    assert looks(optimizer, params, 5) == 3
    more = parameters([(2, 2)])
    optimizer.add_param_group({"params": more})
    assert looks(optimizer, [*params, *more], 6) == 1
    params[0].grad = None
    optimizer.looked = 0
    optimizer.step()
    assert optimizer.looked == 2
    assert looks(copy.deepcopy(optimizer), params, 7) == 0  # the copy has parameters of its own, without gradients
    optimizer.load_state_dict(optimizer.state_dict())
    assert looks(optimizer, [*params, *more], 8) == 4


def test_a_gradient_of_another_kind_is_still_refused_and_nothing_is_changed():
    for kind in [Adam, SGD]:
        params = parameters([(3, 2), (2, 2)])
        optimizer = kind(params, lr=0.1, **({"momentum": 0.9} if kind is SGD else {}))
        before = train(optimizer, params, range(3))
        give_grads(params, 3)
        params[1].grad = params[1].grad.to_sparse()
        with pytest.raises(IncompatibleError, match="dense gradients"):
            optimizer.step()
        assert same(params, before)


def test_a_fused_step_follows_a_parameter_whose_layout_changes():
    ours, theirs = parameters([(4, 4), (3, 3)]), parameters([(4, 4), (3, 3)])
    left, right = Adam(ours, lr=0.1, fused=True), Adam(theirs, lr=0.1, foreach=False)
    for step in range(6):
        if step == 3:
            ours[0].data = ours[0].data.t().contiguous().t()
        train(left, ours, [step])
        train(right, theirs, [step])
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_other_kinds_of_tensors_and_mixed_precision_are_looked_at_each_time():
    class Own(nn.Parameter):
        pass

    for params in ([Own(torch.ones(2))], [*parameters([(2,)]), *parameters([(2,)], dtype=torch.bfloat16)]):
        optimizer = Counting(params, lr=0.1)
        assert [looks(optimizer, params, step) for step in range(2)] == [len(params)] * 2


def test_entries_that_lie_differently_are_copied_and_others_are_kept():
    filters = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    grad, kept = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    moved = torch.randn(4, 3, 2, 2)
    batch = Batch([filters], [grad], [{"kept": kept, "moved": moved, "none": None}])
    assert batch.state("kept") == [kept]
    batch.align(("kept", "moved", "none"))
    assert batch.grads[0].stride() == filters.stride()
    assert torch.equal(batch.grads[0], grad)
    assert batch.states[0]["kept"] is kept
    assert batch.states[0]["moved"].stride() == filters.stride()
    assert torch.equal(batch.states[0]["moved"], moved)
    assert batch.states[0]["none"] is None
