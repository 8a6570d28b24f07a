"""Ranks of gloo on this machine, one thread each."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from torchboost.distributed.topology import shutdown


def on_ranks(ranks: int, work: Callable[[bool], object], smoke: bool) -> Any:
    """Call ``work`` on so many ranks and return what it returned on rank 0, which JSON can hold."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        spawn(_on_this_rank, (ranks, server.port, smoke, out, work), nprocs=ranks)
        return json.loads(out.read_text(encoding="utf-8"))


def _on_this_rank(rank: int, ranks: int, port: int, smoke: bool, out: Path, work: Callable[[bool], object]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found = work(smoke)
    if rank == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    shutdown()
