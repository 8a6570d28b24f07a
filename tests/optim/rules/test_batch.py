"""Gradients and states are brought into the memory layout of their parameters."""

from __future__ import annotations

import torch

from torchboost.optim.rules.batch import Batch


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
