"""A host says how the loop computes."""

from __future__ import annotations

import torch
from torch import nn

from torchboost.calibration.host import Host


def test_facts_are_those_of_the_loop():
    facts = Host(loop="transformers", precision="bf16").facts(nn.Linear(2, 2))
    assert (facts.loop, facts.precision) == ("transformers", "bf16")
    assert Host().facts(nn.Conv2d(1, 1, 1)).convolutions == 1


def test_a_single_rank_takes_its_own_measurement(bfloat16):
    bfloat16(2.0, 2.0)
    assert Host(together=True).facts(nn.Linear(8, 8)).half_precision is True
    with Host().forward():
        assert torch.is_grad_enabled()
