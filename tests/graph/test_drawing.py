"""Generators are put back where they were used, and left alone where they were not."""

from __future__ import annotations

import random
import threading

import torch
from torch.nn import functional as F

from torchboost.graph.drawing import generators_kept


def test_draws_are_forgotten():
    before, python = torch.get_rng_state(), random.getstate()
    with generators_kept():
        torch.randn(3)
        F.dropout(torch.ones(8))
        torch.empty(2).uniform_()
        random.random()
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python


def test_draws_of_an_error_are_forgotten_too():
    before = torch.get_rng_state()
    try:
        with generators_kept():
            torch.rand(2)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_of_other_threads_stay():
    before = torch.get_rng_state()
    with generators_kept():
        torch.ones(3).relu()
        thread = threading.Thread(target=torch.rand, args=(4,))
        thread.start()
        thread.join()
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
