"""The peak memory of a trial is what ``Choice.peak_bytes`` says, and it is given back at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

PROGRAM = r"""
import json, sys
import torch
from torch import nn
from torchboost.algorithms import Autocast, ChannelsLast, FusedOptimizer
from torchboost.calibration import calibration as module
from torchboost.calibration.search import search
from torchboost.core.algorithm import Target
from torchboost.levers import Levers
from torchboost.registry import Host
from torchboost.plan import Plan

def resident(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what + ":"))

def step():
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def peak(work):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins at the present size
    work()
    return resident("VmHWM")

class Bench:
    # Runs the trial's own steps; a scripted time lets it build and sample each lever as often on any machine.
    def __init__(self, trial): self.trial, self.now, self.own = trial, 0.0, 1.0
    def build(self, levers, **kwargs):
        self.own = 0.8 if levers else 1.2  # each lever pays
        return self.trial.build(levers, **kwargs)
    def promote(self): self.trial.promote()
    def elapsed(self): return self.now
    def sample(self, **kwargs):
        if int(self.now) % 7 == 0:  # so that each lever has one, since the first look is after 7
            self.trial.sample(**kwargs)
        self.now += 1.0
        return 1.0, self.own

torch.set_num_threads(1)
module.search = lambda levers, trial, **kwargs: search(levers, Bench(trial), **{**kwargs, "budget": lambda *_: 100.0})
sizes = [nn.Linear(2000, 2000) for _ in range(4)]
model = nn.Sequential(*[layer for linear in sizes for layer in (linear, nn.ReLU())])
make = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[sys.argv[1]]
optimizer = make(model.parameters(), lr=1e-4)
inputs = torch.randn(8, 2000)
step()
step()
before, plain = resident("VmRSS"), peak(step)
levers = (ChannelsLast(), Autocast(), FusedOptimizer())
plan = Plan(level="O1", mode="auto", algorithms=(), levers=levers, total_steps=10**6)
owner = Levers(plan, Target(model, optimizer), calibrate=100.0, verify=True, wrapper=None, host=Host())
during = peak(step)
print(json.dumps({
    "parameters": sum(p.numel() * 4 for p in model.parameters()),
    "extra": during - plain,
    "left": resident("VmRSS") - before,
    "stated": owner.choice.peak_bytes,
    "kept": len(owner.choice.kept),
}))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of a process is not readable")
@pytest.mark.parametrize("optimizer", [pytest.param("AdamW", marks=pytest.mark.slow), "SGD"])
def test_a_trial_takes_at_most_the_stated_memory_and_gives_it_back(optimizer: str, tmp_path: Path) -> None:
    """The peak of plain training has a gradient; a snapshot remains, and another gradient or parts of the optimizer."""
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "MALLOC_MMAP_THRESHOLD_": "65536",  # so that memory that is freed leaves the process
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, optimizer],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    parameters = found["parameters"]
    assert 60e6 < parameters < 70e6
    assert found["kept"] == 2  # a network without convolutions has nothing to store channels-last
    assert found["extra"] <= found["stated"]
    assert parameters <= found["extra"] <= 4 * parameters
    assert found["left"] <= parameters // 2  # the kernels of bfloat16 and the levers are loaded once
