"""Optimizer rules on the device: the numbers of the CPU, checkpoints from and to either device, no waits."""

from __future__ import annotations

import pytest
import torch

from tests.device.on_device._rules import DEVICES, RULES, numbers, resumed, step, trained
from tests.support.pretend_device.waits import Waits

ALL = pytest.mark.parametrize("name", RULES)


@ALL
def test_a_rule_computes_what_it_computes_on_the_cpu(name):
    ours, wanted = (numbers(trained(name, device)[1]) for device in reversed(DEVICES))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@ALL
def test_a_steady_step_does_not_wait_for_the_device(name):
    optimizer, params = trained(name, "cuda")
    with Waits() as waits:
        optimizer.step()
    assert waits.seen == {}
    assert all(param.is_cuda for param in params)


@ALL
@pytest.mark.parametrize("location", DEVICES)
def test_a_resumed_run_continues_bit_for_bit_and_does_not_wait(name, location):
    optimizer, params = trained(name, "cuda")
    step(optimizer, params, 3)
    other, copies = resumed(name, location)
    step(other, copies, 3)
    assert all(map(torch.equal, numbers(copies), numbers(params)))
    with Waits() as waits:
        other.step()
    assert waits.seen == {}


@ALL
def test_a_rule_works_under_a_default_device(name):
    wanted = numbers(trained(name, "cpu")[1])
    torch.set_default_device("cuda")
    try:
        params = trained(name, "cuda")[1]
        optimizer, copies = resumed(name, "cuda")
        with Waits() as waits:
            optimizer.step()
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(numbers(params), wanted, rtol=1e-5, atol=1e-6)
    assert len(copies) == len(params)
    assert waits.seen == {}
