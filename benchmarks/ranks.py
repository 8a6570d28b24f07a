"""Claim: what a rank does in an update grows at most with the logarithm of the number of ranks, or the page says so.

Calls, bytes and requests to the store of rank 0 are counted over torch's fake process group of 2 to 1,024 ranks, which
sends nothing. Seconds are measured on real gloo ranks of this machine, of which two run at a time.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from options import Options, parser, run_own, save_result
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchboost.algorithms.adaptive_sum import adasum_
from torchboost.algorithms.dim_reduce.basis import DimReduceBasis, rows_of
from torchboost.algorithms.dim_reduce.optimizer import Subspace
from torchboost.algorithms.grad_accumulation import Accumulator
from torchboost.bench.report.table import Table
from torchboost.distributed import agreement, checkpoint
from torchboost.distributed.agreement import Agreement
from torchboost.distributed.topology import NodeGroups, Topology

RANKS = (2, 8, 64, 1024)
PROCESSES = (2, 8, 64)
FIGURES = {"updates": 1, "frozen groups": 0, "parameters not reached yet": 0, "parameters": 100, "seed": 0}
WEIGHTS, DIRECTIONS = 100_000, 32


class Counts:
    """Calls of this rank that others take part in, the bytes it sends or gets in them, and requests to the store."""

    def __init__(self) -> None:
        self.calls = self.bytes = self.requests = 0
        self._all_reduce = dist.all_reduce

    def note(self, size: int) -> None:
        self.calls, self.bytes = self.calls + 1, self.bytes + size

    def __call__(self, act: Callable[[], Any]) -> list[int]:
        """Return what ``act`` adds."""
        before = [self.calls, self.bytes, self.requests]
        act()
        return [now - then for now, then in zip((self.calls, self.bytes, self.requests), before, strict=True)]

    # The calls of torch.distributed, with an answer as if all ranks had the same.

    def all_reduce(self, tensor: torch.Tensor, *options: Any, **named: Any) -> Any:
        self.note(tensor.nbytes)
        return self._all_reduce(tensor, *options, **named)

    def all_gather(self, found: list[torch.Tensor], own: torch.Tensor, **_: Any) -> None:
        self.note(len(found) * own.nbytes)
        for each in found:
            each.copy_(own)

    def all_gather_object(self, found: list[Any], own: Any, **_: Any) -> None:
        self.note(len(found) * len(pickle.dumps(own)))
        found[:] = [own] * len(found)

    def broadcast_object_list(self, found: list[Any], *_: Any, **__: Any) -> None:
        self.note(len(pickle.dumps(found)))

    def all_to_all_single(
        self, into: torch.Tensor, out_of: torch.Tensor, received: list[int], sent: list[int], **_: Any
    ) -> None:
        self.note(sum(sent) - sent[0])
        into.zero_()

    def new_group(self, *_: Any, **__: Any) -> Any:
        self.note(0)
        return dist.group.WORLD


class Group:
    """A gloo group whose other ranks have what this one has."""

    def __init__(self, counts: Counts) -> None:
        self.counts, self.sent = counts, torch.empty(0)

    def send(self, tensors: list[torch.Tensor], *_: int) -> Group:
        self.counts.note(tensors[0].nbytes)
        self.sent = tensors[0]
        return self

    def recv(self, tensors: list[torch.Tensor], *_: int) -> Group:
        tensors[0].copy_(self.sent)
        return self

    def wait(self, *_: Any) -> None:
        """There is nothing to wait for."""


class Store:
    """A store that counts requests, in which every other rank has said nothing."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts

    def get(self, _: str) -> bytes:
        self.counts.requests += 1
        return b""

    def set(self, *_: Any) -> None:
        self.counts.requests += 1

    wait = set


@contextmanager
def faked(ranks: int) -> Iterator[Counts]:
    """Be rank 0 of so many."""
    counts = Counts()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    names = "all_reduce all_gather all_gather_object broadcast_object_list all_to_all_single new_group"
    with ExitStack() as patched:
        for name in names.split():
            patched.enter_context(patch.object(dist, name, getattr(counts, name)))
        patched.enter_context(patch.object(dist.distributed_c10d, "new_group", counts.new_group))
        patched.enter_context(patch.object(agreement, "lazy_gloo", lambda *_: Group(counts)))
        patched.enter_context(patch.object(agreement, "own_store", lambda *_: Store(counts)))
        yield counts
    dist.destroy_process_group()


def agreeing(counts: Counts, ranks: int) -> dict[str, list[int]]:
    made: list[Agreement] = []
    setup = counts(lambda: made.append(Agreement(range(ranks), subject="ranks")))
    return {
        "trial, set-up": setup,
        "trial, a pair of steps": counts(lambda: made[0].largest([1.0, 2.0], step="sample")),
        "freezing, set-up": setup,
        "freezing, an update": counts(lambda: made[0].check(FIGURES, hint="")),
    }


def adding(counts: Counts, ranks: int) -> dict[str, list[int]]:
    nodes = Topology(rank=0, world_size=ranks, devices_per_node=min(8, ranks // 2))
    tensors = [torch.ones(WEIGHTS // 10) for _ in range(10)]
    return {
        "AdaSum, set-up": counts(lambda: NodeGroups.of(nodes)),
        "AdaSum, an update": counts(lambda: adasum_(tensors)),
    }


def accumulating(counts: Counts, _: int) -> dict[str, list[int]]:
    def exchanged(_, bucket):  # torch reads annotations, and takes no strings
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = nn.parallel.DistributedDataParallel(nn.Linear(10, 10))
    model.register_comm_hook(None, exchanged)  # what DDP sends is not counted
    accumulator = Accumulator(2, model)

    def window() -> None:
        for count in (4, 3):
            with accumulator.micro_step():
                accumulator.share(accumulator.model(torch.ones(count, 10)).mean(), count).backward()

    return {"accumulation, a window": counts(window)}


def reducing(counts: Counts, ranks: int) -> dict[str, list[int]]:
    group = dist.group.WORLD
    assert group is not None
    rows = torch.eye(DIRECTIONS, WEIGHTS)[list(rows_of(DIRECTIONS, 0, ranks))]
    weights = nn.Parameter(torch.ones(WEIGHTS))
    subspace = Subspace([weights], DimReduceBasis(rows, group, DIRECTIONS))
    meeting: list[Agreement] = []

    def meet() -> None:
        meeting.append(Agreement(range(ranks), subject="ranks"))
        meeting[0].check({"settings": 0}, hint="")
        meeting[0].largest([0.0], step="basis")

    def step() -> None:
        subspace.step(lambda: weights.square().mean())

    step()
    return {
        "dimension reduction, set-up": counts(meet),
        "dimension reduction, a step": counts(step),
    }


def saving(counts: Counts, _: int) -> dict[str, list[int]]:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def written(content: Any, checkpoint_id: Path, **_: Any) -> None:
        checkpoint_id.mkdir()
        (checkpoint_id / ".metadata").touch()

    with tempfile.TemporaryDirectory() as folder, patch.object(checkpoint.state_dict_saver, "save", written):
        return {"checkpoint, a save": counts(lambda: checkpoint.save(folder, 1, model, optimizer))}


def timed(rank: int, ranks: int, port: int, times: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    begun = perf_counter()
    together = Agreement(range(ranks), subject="ranks", timeout=300)
    setup, checks = perf_counter() - begun, []
    for update in range(30):
        begun = perf_counter()
        together.check({**FIGURES, "updates": update}, hint="")
        checks.append(perf_counter() - begun)
    together.close()
    dist.barrier()
    if rank == 0:
        times.put((setup, median(checks)))
    dist.destroy_process_group()


def seconds(ranks: int) -> list[float]:
    """Return the seconds of the set-up of an agreement and of a comparison, on real ranks."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torchboost.distributed.agreement", "__main__"])
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    times = context.SimpleQueue()
    workers = [context.Process(target=timed, args=(rank, ranks, server.port, times)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return list(times.get())


def measure(options: Options) -> Path:
    found: dict[str, dict[str, list[int]]] = {}
    for ranks in RANKS:
        for part in (agreeing, adding, accumulating, reducing, saving):
            with faked(ranks) as counts:
                for name, counted in part(counts, ranks).items():
                    found.setdefault(name, {})[str(ranks)] = counted
    times = {str(ranks): seconds(ranks) for ranks in (PROCESSES[:1] if options.smoke else PROCESSES)}
    return save_result(options.file("ranks", "counts"), **{"counts": found, "seconds of an agreement": times})


def table(file: Path) -> Table:
    """Return calls, bytes and requests to the store of one rank."""
    whole = json.loads(file.read_text(encoding="utf-8"))

    def said(counted: list[int]) -> str:
        calls, size, requests = counted
        plural = "s" if calls > 1 else ""
        parts = [f"{calls} call{plural}, {size:,} B" if calls else "", f"{requests} requests" if requests else ""]
        return "; ".join(filter(None, parts)) or "nothing"

    lines = [(name, *(said(by[str(ranks)]) for ranks in RANKS)) for name, by in whole["counts"].items()]
    times = whole["seconds of an agreement"]
    for place, what in enumerate(("seconds of the set-up of an agreement", "seconds of a comparison")):
        cells = [f"{times[str(ranks)][place]:.2g} s" if str(ranks) in times else "not run" for ranks in RANKS]
        lines.append((what, *cells))
    return Table(headings=("of one rank", *(f"{ranks:,} ranks" for ranks in RANKS)), rows=tuple(lines))


if __name__ == "__main__":
    run_own(measure, parser(__doc__).parse_args())
