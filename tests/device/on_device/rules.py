"""Optimizer rules on the device: the numbers of the CPU, checkpoints from and to either device, no waits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.device.on_device._rules import DEVICES, RULES, numbers, resumed, step, trained
from tests.device.on_device._training import default_device
from tests.support.pretend_device.waits import Waits
from torchboost.optim import Adam
from torchboost.optim.rules.lazy_adam import CHUNK, form_of, replay

ALL = pytest.mark.parametrize("name", RULES)


@ALL
def test_a_rule_computes_what_it_computes_on_the_cpu_also_under_a_default_device(name):
    wanted = numbers(trained(name, "cpu")[1])
    torch.testing.assert_close(numbers(trained(name, "cuda")[1]), wanted, rtol=1e-5, atol=1e-6)
    with default_device("cuda"):
        params = trained(name, "cuda")[1]
        optimizer, _ = resumed(name, "cuda")
        with Waits() as waits:
            optimizer.step()
    torch.testing.assert_close(numbers(params), wanted, rtol=1e-5, atol=1e-6)
    assert waits.seen == {}


@ALL
def test_a_steady_and_a_resumed_run_are_equal_bit_for_bit_and_do_not_wait(name):
    optimizer, params = trained(name, "cuda")
    assert all(param.is_cuda for param in params)
    step(optimizer, params, 3)
    continued = numbers(params)
    optimizers = [optimizer]
    for location in DEVICES:
        other, copies = resumed(name, location)
        step(other, copies, 3)
        assert all(map(torch.equal, numbers(copies), continued)), location
        optimizers.append(other)
    for each in optimizers:
        with Waits() as waits:
            each.step()
        assert waits.seen == {}


MISSED: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True, "amsgrad": True},
]


@pytest.mark.parametrize("options", MISSED, ids=str)
def test_rows_make_up_for_missed_steps_with_one_wait_per_chunk(options):
    group = Adam([torch.zeros(1)], lr=0.01, **options).param_groups[0]
    past = {"form": form_of(group), "options": [(1, 0.01, group["weight_decay"], *group["betas"], group["eps"])]}
    steps, rows = 300, 200
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
