"""One pass that divides gradients and finds overflow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from torchboost.algorithms.loss_scale_group.unscaling import check_scaled, last_bad, overflow_anywhere, unscale_
from torchboost.errors import IncompatibleError

CPU = torch.device("cpu")


def param(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    made.grad = torch.tensor(values, dtype=dtype)
    return made


def test_each_part_is_divided_by_its_scale_and_found_out_by_itself():
    parts = [([param(8.0, 4.0), param(2.0, dtype=torch.bfloat16)], 2.0), ([param(math.inf)], 4.0), ([param(6.0)], 3.0)]
    found = unscale_(parts)
    assert overflow_anywhere(found, 3, CPU, agree=True) == [False, True, False]
    assert [p.grad.tolist() for p in parts[0][0]] == [[4.0, 2.0], [1.0]]
    assert parts[2][0][0].grad.tolist() == [2.0]


def test_complex_gradients():
    plain, lazy = param(8 + 4j, dtype=torch.complex64), param(1j, dtype=torch.complex64)
    lazy.grad = torch.tensor([4 + 2j]).conj()
    assert overflow_anywhere(unscale_([([plain, lazy], 2.0)]), 1, CPU, agree=False) == [False]
    assert [p.grad.tolist() for p in (plain, lazy)] == [[4 + 2j], [2 - 1j]]
    broken = param(complex(1.0, math.nan), dtype=torch.complex64)
    assert overflow_anywhere(unscale_([([broken], 1.0)]), 1, CPU, agree=False) == [True]
    assert last_bad([broken, plain]) == 0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_every_kind_of_overflow(value):
    assert overflow_anywhere(unscale_([([param(1.0, value)], 1.0)]), 1, CPU, agree=False) == [True]


def test_sparse_gradients_and_parameters_without_one():
    table = nn.Embedding(4, 2, sparse=True)
    (table(torch.tensor([1, 1])).sum() * 8.0).backward()
    bare = nn.Parameter(torch.zeros(2))
    assert overflow_anywhere(unscale_([([table.weight, bare], 8.0)]), 1, CPU, agree=False) == [False]
    assert table.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]
    assert overflow_anywhere(unscale_([([bare], 8.0)]), 1, CPU, agree=False) == [False]


def test_gradients_in_float16_are_refused_unchanged():
    parts = [([param(4.0), param(4.0, dtype=torch.float16)], 2.0)]
    with pytest.raises(IncompatibleError, match=r"shape \(1,\) has its gradient in float16.*under torch.autocast"):
        check_scaled(parts)
    assert parts[0][0][0].grad.tolist() == [4.0]


def test_the_last_bad_gradient():
    assert last_bad([param(math.nan), param(1.0), param(math.inf), nn.Parameter(torch.zeros(1))]) == 2
    assert last_bad([param(1.0)]) is None
