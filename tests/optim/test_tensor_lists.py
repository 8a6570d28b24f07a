from __future__ import annotations

from pathlib import Path

import torch
from torch.autograd.profiler import profile

import torchboost
from torchboost.core.torch_private import foreach
from torchboost.optim.tensor_lists import together


def test_lists_of_tensors_are_not_read_entry_by_entry():
    lists = [[torch.ones(40, 3) for _ in range(2)] for _ in range(2)]
    with profile(use_kineto=False) as trace:
        foreach.add_(*lists)
    names = [event.name for event in trace.function_events or ()]
    assert names
    assert not {"aten::select", "aten::item", "aten::is_nonzero"} & set(names)
    assert len(names) < 10


def test_no_module_goes_around_it():
    package = Path(torchboost.__file__).parent
    found = [path.name for path in package.rglob("*.py") if "aten._foreach" in path.read_text(encoding="utf-8")]
    assert found == []


def test_numbers_of_one_kind_are_worked_on_together_and_others_one_by_one():
    calls = []

    def ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(above.shape))
        return above / below

    numbers = [torch.tensor(float(i)) for i in range(1, 4)]
    assert together(ratio, numbers, numbers[::-1]) == [torch.tensor(v) for v in (1 / 3, 1.0, 3.0)]
    mixed = [*numbers, torch.tensor(2.0, dtype=torch.float64)]
    assert [r.dtype for r in together(ratio, mixed, mixed)] == [torch.float32] * 3 + [torch.float64]
    assert calls == [(3,), (), (), (), ()]
    assert together(ratio, [], []) == []
