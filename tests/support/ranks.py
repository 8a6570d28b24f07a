"""Run a function on several gloo ranks of this machine."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Collection
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NoReturn

import torch
import torch.distributed as dist

__all__ = ["RankError", "RankKilledError", "run_ranks", "server_of_forks"]


class RankError(AssertionError):
    """A rank raised, died or did not answer; carries the first traceback."""


class RankKilledError(RankError):
    """A signal ended a rank, for instance a crash of native code."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, dying: Collection[int] = ()
) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a fresh gloo group and return what the ranks returned, in rank order.

    ``fn`` must be importable (a module-level function); it asks ``torch.distributed`` for its rank. ``args`` and
    the return values are pickled. A rank that is still running after ``timeout`` seconds is killed.
    Ranks that are ``dying`` may end without an answer, which is then None; the others do not wait for them at the end.

    Gloo crashes once in many thousands of groups. If a signal ends a rank, all ranks are started once more, and a
    warning tells of it; a second time is an error.

    Raises:
        RankError: With the traceback of the rank that failed first, or the ranks that did not answer in time.
    """
    try:
        return _run_once(fn, world_size, *args, timeout=timeout, dying=dying)
    except RankKilledError as error:
        warnings.warn(f"a signal ended a rank, so all were started once more: {error}", stacklevel=2)
        return _run_once(fn, world_size, *args, timeout=timeout, dying=dying)


def _run_once(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float, dying: Collection[int]) -> list[Any]:
    context = server_of_forks()
    # The server binds a port of the system's choice before the ranks start, so that no other process can take it.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    readers = [reader for reader, _ in pipes]
    workers: list[BaseProcess] = []
    try:
        for rank, (_, writer) in enumerate(pipes):
            environment = dict(os.environ) | _launcher(rank, world_size, server.port)
            call = (environment, timeout, writer, fn, args, bool(dying))
            workers.append(context.Process(target=_run, args=call, daemon=True))
            workers[-1].start()
            writer.close()
        results = _collect(readers, workers, timeout, dying)
        for worker in workers:
            worker.join(timeout=10)
        return results
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()
        for reader, writer in pipes:
            reader.close()
            writer.close()


def _collect(
    readers: list[Connection], workers: list[BaseProcess], timeout: float, dying: Collection[int]
) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = monotonic() + timeout
    while len(results) < len(readers):
        pending = {reader: rank for rank, reader in enumerate(readers) if rank not in results}
        ready = wait(list(pending), timeout=max(0.0, deadline - monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(pending.values())} did not answer within {timeout:g} s")
        failures = []
        for reader in readers:
            if reader in ready:
                rank = pending[reader]
                failed, when, value = (False, 0.0, None) if rank in dying else _receive(reader, workers[rank])
                results[rank] = value
                if failed:
                    failures.append((when, f"rank {rank} {value}"))
        if failures:
            # A failing rank makes its peers fail in their next collective; the earliest failure is the cause.
            _raise(min(failures)[1], workers)
    return [results[rank] for rank in range(len(readers))]


def _raise(cause: str, workers: list[BaseProcess]) -> NoReturn:
    for rank, worker in enumerate(workers):
        worker.join(timeout=0.2)  # a rank that a signal ends is the cause, although its peers may answer first
        if worker.exitcode is not None and worker.exitcode < 0:
            raise RankKilledError(f"rank {rank} was ended by {signal.Signals(-worker.exitcode).name}; {cause}")
    raise RankError(cause)


def _receive(reader: Connection, worker: BaseProcess) -> tuple[bool, float, Any]:
    try:
        return pickle.loads(reader.recv_bytes())
    except EOFError:
        when = monotonic()
        worker.join(timeout=10)
        return True, when, f"ended without an answer, with exit code {worker.exitcode}"


def _run(
    environment: dict[str, str],
    timeout: float,
    writer: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    some_die: bool,
) -> None:
    faulthandler.enable()
    gc.freeze()  # what the server has imported is never garbage
    os.environ.update(environment)  # the server that forked this process has that of its first call
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore("127.0.0.1", int(environment["MASTER_PORT"]), is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        # Plain pickle copies tensors; the sharing pickler of torch would need this process to outlive the reader.
        answer = pickle.dumps((False, 0.0, fn(*args)))
        if not some_die:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((True, monotonic(), f"failed:\n{traceback.format_exc()}"))
    writer.send_bytes(answer)


def _launcher(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what a launcher would set in the environment of a rank."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
    }


@cache
def server_of_forks() -> ForkServerContext:
    """Start the process that ranks are forked from: it has imported torch, which takes longer than most tests.

    It is single-threaded, so a fork is safe; OpenMP reads its variable when torch is loaded, that is here.
    """
    context = mp.get_context("forkserver")
    preload = ["torch", "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
    # Optimizers and DDP load the compiler when they are first used, and a first compilation loads its backends.
    preload += ["torch.nn.parallel", "torch._dynamo", "torch._dynamo.backends.debugging", "torch._inductor.lowering"]
    preload += ["pytest", "hypothesis", "torchboost.plan"]  # what test modules import
    context.set_forkserver_preload(preload)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context
