"""The private names of torch are still there, and mean what they meant."""

from __future__ import annotations

import torch

from torchboost.core.torch_private import step_pre_hooks


def test_hooks_before_a_step_are_listed_in_order():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    seen = []
    first = optimizer.register_step_pre_hook(lambda *_: seen.append("first"))
    optimizer.register_step_pre_hook(lambda *_: seen.append("second"))
    for hook in step_pre_hooks(optimizer):
        hook(optimizer, (), {})
    assert seen == ["first", "second"]
    first.remove()
    assert len(step_pre_hooks(optimizer)) == 1
