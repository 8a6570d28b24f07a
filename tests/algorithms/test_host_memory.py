"""Freed memory stays in the process: the second use of large blocks faults no page."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch
from torch import nn

from torchboost.algorithms import host_memory
from torchboost.algorithms.host_memory import HostMemory, retain_host_memory
from torchboost.errors import IncompatibleError

glibc = pytest.mark.skipif(host_memory._obstacle() is not None, reason="needs glibc")

FAULTS = """
import resource, torch
from torchboost.algorithms.host_memory import retain_host_memory
torch.set_num_threads(1)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(24 * 2**20, dtype=torch.uint8) for _ in range(4)] + [torch.ones(40 * 2**20, dtype=torch.uint8)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
stock = [faults() for _ in range(3)][-1]
effect = retain_host_memory()
faults()
kept = [faults() for _ in range(3)][-1]
effect.remove()
faults()
again = [faults() for _ in range(3)][-1]
print(stock, kept, again)
"""


@glibc
def test_pages_are_faulted_once_and_again_after_remove():
    """In a process of its own, as the setting is the process's."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    stock, kept, again = map(int, done.stdout.split())
    mapped = 40 * 2**20 // resource.getpagesize()  # glibc maps blocks above 32 MiB anew each time
    assert stock >= mapped
    assert kept < mapped // 100
    assert again >= mapped


def test_another_c_library_is_said(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(IncompatibleError, match=r"glibc.*leave it out"):
        retain_host_memory()
    model = nn.Linear(2, 2)
    assert "glibc" in HostMemory().idle(model, torch.optim.SGD(model.parameters(), lr=0.1))
