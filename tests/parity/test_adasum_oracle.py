"""AdaSum against the vectors derived from the reference's source, on real ranks, one per node."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import run_ranks
from torchboost import AdaSum


def combine(deltas: list, olds: list) -> tuple[list, list]:
    rank, nodes = dist.get_rank(), dist.get_world_size()
    old = [torch.tensor(values, dtype=torch.float64) for values in olds]
    mine = [torch.tensor(values[rank], dtype=torch.float64) for values in deltas]
    parameters = [nn.Parameter(values - delta) for values, delta in zip(old, mine, strict=True)]
    combined = AdaSum(rank, 1, nodes, tuple(parameters))(mine, parameters, old)
    return [values.tolist() for values in combined], [param.tolist() for param in parameters]


@pytest.mark.dist
@pytest.mark.parametrize("case", ["adasum_2nodes", "adasum_4nodes"])
def test_nodes_combine_like_the_oracle(oracle, case):
    meta, arrays = oracle[case]
    count = len(meta["params"])
    deltas = [arrays[f"delta{i}"].tolist() for i in range(count)]
    olds = [arrays[f"old{i}"].tolist() for i in range(count)]
    tolerance = meta["tolerance"]
    for combined, parameters in run_ranks(combine, meta["hyper"]["group_number"], deltas, olds):
        for i in range(count):
            for found, name in ((combined[i], "adasum"), (parameters[i], "new_param")):
                wanted = torch.from_numpy(arrays[f"{name}{i}"])
                torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, **tolerance)
