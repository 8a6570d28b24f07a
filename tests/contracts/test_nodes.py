"""Two agents of two ranks each, as on two machines."""

from __future__ import annotations

import json

import pytest
import torch

from tests.conftest import ROOT
from tests.support.torchrun import torchrun
from tests.support.two_nodes import trained


@pytest.mark.dist
@pytest.mark.slow
def test_two_nodes_of_two_ranks_are_seen_and_train_like_one_process(tmp_path):
    torchrun(ROOT / "tests" / "support" / "two_nodes.py", tmp_path, ranks=2, nodes=2)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    wanted = trained("single")
    for rank, one in enumerate(seen):
        assert one["rank"] == rank
        assert (one["world_size"], one["devices_per_node"], one["nodes"]) == (4, 2, 2)
        for kind in ("ddp", "fsdp"):
            assert one[kind] == seen[0][kind]
            torch.testing.assert_close(one[kind], wanted, rtol=0, atol=1e-6)
