"""Steps leave nothing behind, and the fused one needs no temporary of the size of the gradients."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.support.memory import live_tensors
from tests.support.optimizers import CASES, RULES, give_grads, parameters
from torchboost.optim.rules import masters, muon
from torchboost.optim.transforms import Centralize, ClipNorm, Unscale

STEPS = 60
ALLOWED = STEPS * 4 // 5  # blocks of Python's memory: less than one object per step
QUICK = ["Adam-fused"]
SLOW = ["SGD-fused", "Adam-foreach", "Adam-nesterov", "AdamWeightDecay-default", "LARS-default", "Lamb"]
SLOW += ["RMSProp-centered", "FTRL"]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_hundreds_of_steps_leave_nothing_behind(name):
    params = parameters([(4, 3), (4,)])
    optimizer = CASES[name](params, lr=lambda step: 1e-3, transforms=(Unscale(1.0), Centralize(), ClipNorm(1.0)))
    give_grads(params, 0)
    optimizer.step()  # makes the state
    tensors, blocks = [live_tensors()[0]], [sys.getallocatedblocks()]
    for _ in range(5):
        for _ in range(STEPS):
            optimizer.step()
        tensors.append(live_tensors()[0])
        blocks.append(sys.getallocatedblocks())
    # Caches fill and threads come and go now and then. What a step leaves behind is there each time.
    assert min(tensors[1:]) <= tensors[0]
    assert min(after - before for before, after in itertools.pairwise(blocks)) < ALLOWED


def peak(step: Any) -> int:
    """Bytes of tensors that one call has at most above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    level = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        level += event.nbytes()
        most = max(most, level)
    return most


SIZE = 4 * (256 * 256 + 64 * 64)


def test_the_peak_of_a_step():
    """In shares of the size of all gradients."""
    for name, shares in [
        ("Adam-fused", 0.01),
        ("AdamWeightDecay-fused", 0.01),
        ("SGD-fused", 0.01),
        ("Momentum-fused", 0.01),
        ("SGD-plain", 0.01),
        ("Adam-foreach", 1.01),  # for the decay, as in torch
        ("Adam-nesterov", 3.01),
        ("Lamb", 2.01),
        ("RMSProp", 2.01),
        ("RMSProp-centered", 1.01),
        ("FTRL", 2.01),
    ]:
        params = parameters([(256, 256), (64, 64)])
        optimizer = CASES[name](params)
        give_grads(params, 0)
        optimizer.step()
        assert peak(optimizer.step) <= shares * SIZE
        assert peak(lambda: torch.ones(1000)) == 4000  # the measure measures


def test_on_the_cpu_the_peak_is_that_of_a_piece():
    for name in ["Adam-nesterov", "Lamb", "Lamb-eps_in_root", "RMSProp-centered", "FTRL", "ScheduleFreeAdamW"]:
        params = parameters([(256, 256)] * 12)
        optimizer = CASES[name](params)
        give_grads(params, 0)
        optimizer.step()
        assert peak(optimizer.step) <= 4.01 * 4 * masters.IN_CACHE < 4.01 * 4 * 12 * 256 * 256 / 5


def test_the_peak_of_muon_is_that_of_a_piece(monkeypatch):
    for shape in [(256, 256), (128, 512), (512, 128), (64, 64, 3, 3)]:
        for dtype in [torch.float32, torch.bfloat16]:
            monkeypatch.setattr(muon, "PIECE", 2**17)
            params = parameters([shape] * 12)
            optimizer = RULES["Muon"](params, ns_dtype=dtype)
            give_grads(params, 0)
            optimizer.step()
            assert peak(optimizer.step) <= 6.01 * 4 * muon.PIECE


def test_the_state_has_the_documented_size():
    for rule in RULES:
        wanted = {"SGD": 0, "Momentum": 1, "LARS": 1, "RMSProp": 1}
        wanted |= {"Muon": 1, "MixedOptimizer": 1, "ScheduleFreeSGD": 1}
        params = parameters([(16, 16)])
        optimizer = RULES[rule](params)
        give_grads(params, 0)
        optimizer.step()
        kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim]
        assert sum(v.numel() for v in kept) == wanted.get(rule, 2) * 256


def test_transforms_in_place_take_no_copy_of_the_gradients():
    for rule in ["Adam", "SGD"]:
        params = parameters([(256, 256), (64, 64)])
        options = {"momentum": 0.9} if rule == "SGD" else {}
        optimizer = RULES[rule](params, fused=True, transforms=(Unscale(2.0), Centralize(), ClipNorm(1.0)), **options)
        give_grads(params, 0)
        optimizer.step()
        assert peak(optimizer.step) <= 0.05 * SIZE
        assert torch.isfinite(params[0]).all()


def test_masters_take_float32_copies_of_one_piece_of_the_gradients(monkeypatch):
    monkeypatch.setattr(masters, "PIECE", 128 * 128)
    for name, copies in (("Adam-fused", 3), ("SGD-fused", 2)):
        params = parameters([(128, 128)] * 8, dtype=torch.bfloat16)
        optimizer = CASES[name](params, master_weights=True)
        give_grads(params, 0)
        optimizer.step()
        assert peak(optimizer.step) <= 1.01 * 4 * 128 * 128, name
        kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.ndim]
        assert sum(v.numel() * v.element_size() for v in kept) == copies * 4 * 8 * 128 * 128
