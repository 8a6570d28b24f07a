"""A rank whose last deed is a collective, ended in one of several ways: ``endings.py FOLDER WAY``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from torchboost.distributed.agreement import Agreement
from torchboost.distributed.topology import shutdown

if __name__ == "__main__":
    folder, way = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    # Names of the module live until the interpreter ends, and what they hold as well.
    kept = dist.group.WORLD
    ones = torch.ones(4)
    (folder / f"{dist.get_rank()}.txt").write_text("trained")
    if way == "agreement":
        agreement = Agreement(range(dist.get_world_size()), subject="ending")
        agreement.check({"update": 1}, hint="")
    else:
        dist.all_reduce(ones)
    if way == "shutdown":
        shutdown()
    elif way == "destroy":
        dist.barrier()
        dist.destroy_process_group()
