"""Every generator that moves is named."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from torchboost.data.draws import Draws, generators_behind, is_of_process, is_own, state_of


def test_generators_of_the_process():
    draws = Draws()
    for draw, name in ((lambda: torch.rand(1), "torch"), (np.random.rand, "NumPy"), (random.random, "Python")):
        assert draws.moved() == ""
        draw()
        assert draws.moved() == f"{name}'s generator"
    np.random.seed(3)
    assert draws.moved() == "NumPy's generator"


HELD = {
    "torch": (torch.Generator(), lambda g: torch.rand(1, generator=g)),
    "python": (random.Random(1), lambda g: g.random()),
    "numpy": (np.random.default_rng(1), lambda g: g.random()),
    "mersenne": (np.random.Generator(np.random.MT19937(1)), lambda g: g.random()),
    "old numpy": (np.random.RandomState(1), lambda g: g.rand()),
    "bits": (np.random.PCG64(1), lambda g: g.random_raw()),
}


@pytest.mark.parametrize(("generator", "draw"), HELD.values(), ids=HELD)
def test_held_generators(generator, draw):
    draws = Draws([generator])
    assert not is_own(draws.moved())
    before = state_of(generator)
    assert state_of(generator) == before
    draw(generator)
    torch.rand(1)
    assert is_own(draws.moved()), "an own one is named first"
    assert state_of(generator) != before
    assert draws.moved() == ""
    assert not is_of_process(generator)


GLOBAL = np.random.default_rng(1)


def helper() -> float:
    return next(GLOBAL.random() for _ in range(1))


class Reaches:
    @property
    def value(self) -> float:
        return (lambda: helper())()


class Inherits(Reaches):
    pass


def test_generators_behind_functions():
    assert generators_behind([helper]) == [GLOBAL]
    assert generators_behind([3, Inherits, helper]) == [GLOBAL]
    assert generators_behind([test_held_generators, Draws]) == []


def test_generators_of_the_process_are_known():
    shared = [torch.default_generator, random.random.__self__, np.random.rand.__self__]
    assert all(map(is_of_process, shared))
