"""Generators are put back where they were used, and left alone where they were not."""

from __future__ import annotations

import random
import threading
import types

import torch
from torch.nn import functional as F

from torchboost.graph.drawing import accelerators, generator_states, generators_kept, set_generator_states


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


def test_the_generators_of_every_kind_of_accelerator_are_read_and_set(monkeypatch):
    states = {"cuda:0": torch.tensor([1]), "cuda:1": torch.tensor([2]), "mps:0": torch.tensor([3])}
    module = types.SimpleNamespace(
        get_rng_state=lambda device: states[str(device)],
        set_rng_state=lambda state, device: states.update({str(device): state}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    devices = [torch.device(name) for name in ("mps:0", "cpu", "cuda:1", "meta", "cuda:0", "cuda:1")]
    found = accelerators([types.SimpleNamespace(device=device) for device in devices])  # type: ignore
    assert list(map(str, found)) == ["cuda:0", "cuda:1", "mps:0"]
    before = generator_states(found)
    assert [int(state) for state in before[1:]] == [1, 2, 3]
    states.update(dict.fromkeys(states, torch.tensor([9])))
    set_generator_states(before, found)
    assert [int(state) for state in states.values()] == [1, 2, 3]
