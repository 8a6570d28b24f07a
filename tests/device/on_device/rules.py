"""Optimizer rules on the device: the numbers of the CPU, checkpoints from and to either device, no waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.device.on_device._rules import DEVICES, RULES, numbers, resumed, step, trained
from tests.support.pretend_device.waits import Waits
from torchboost.optim import Adam
from torchboost.optim.rules.missed_steps import CHUNK, new_past, record, replay

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


MISSED: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "amsgrad": True},
]


@pytest.mark.parametrize("options", MISSED, ids=str)
def test_rows_make_up_for_missed_steps_with_one_wait_per_chunk(options):
    group = Adam([torch.zeros(1)], lr=0.01, **options).param_groups[0]
    past, steps, rows = new_past(group), 300, 200
    record(past, 1, group)
    generator = torch.Generator("cpu").manual_seed(0)
    last = torch.randint(steps, (rows,), generator=generator, dtype=torch.int32, device="cpu")
    tables = {"weight": torch.randn(rows, 3, generator=generator, device="cpu", dtype=torch.float64)}
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if group["amsgrad"] else 2]:
        tables[name] = torch.rand(rows, 3, generator=generator, device="cpu", dtype=torch.float64)
    there = {name: table.to("cuda") for name, table in tables.items()}
    replay(tables, last, steps, past)
    with Waits() as waits:
        replay(there, last.to("cuda"), steps, past)
    assert waits.total <= 2 + math.ceil(steps / CHUNK), waits.seen
    torch.testing.assert_close(numbers(there.values()), list(tables.values()))
