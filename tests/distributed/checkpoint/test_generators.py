from __future__ import annotations

import torch

from tests.support.models import mlp
from torchboost.distributed.checkpoint.generators import generator_states, set_generator_states


def test_random_numbers_go_on_where_they_stood():
    model = mlp()
    torch.manual_seed(0)
    torch.rand(5)
    states = generator_states(model)
    wanted = torch.rand(5)
    assert not torch.equal(torch.rand(5), wanted)
    set_generator_states(states, model)
    assert torch.equal(torch.rand(5), wanted)


def test_what_was_noted_does_not_move():
    model = mlp()
    states = generator_states(model)
    before = [state.clone() for state in states]
    torch.rand(5)
    assert all(map(torch.equal, states, before))


def test_a_model_on_the_cpu_notes_no_other_generator_and_takes_none():
    model = mlp()
    (state,) = generator_states(model)
    torch.rand(1)
    set_generator_states([state, torch.zeros(16, dtype=torch.uint8)], model)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_on_an_accelerator_notes_its_generator_too():
    kind = torch.accelerator.current_accelerator(check_available=True)
    model = mlp().to(kind or "cpu")
    states = generator_states(model)
    assert len(states) == (1 if kind is None else 2)
    wanted = torch.rand(3, device=kind)
    set_generator_states(states, model)
    assert torch.equal(torch.rand(3, device=kind), wanted)
