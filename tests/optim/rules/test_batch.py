"""What a step remembers of its tensors: which gradients were checked, and in which layout they lie."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.optimizers import give_grads, parameters, same, train
from torchboost.errors import IncompatibleError
from torchboost.optim import SGD, Adam, Batch


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
