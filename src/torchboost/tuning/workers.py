"""Processes that train several runs of a tuning at the same time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import torch
from typing_extensions import Self

from torchboost.bench.factory import packed, unpacked
from torchboost.core.hardware import usable_cores
from torchboost.errors import FactoryError, IncompatibleError
from torchboost.tuning.report import Run
from torchboost.tuning.runs import Job
from torchboost.tuning.training import Training

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable with the GPUs that a process sees."""

GRACE = 10.0
"""Seconds in which a process that has nothing to do ends by itself."""

AT_START = (
    "as it started. Define make in a file, and let a script call tune under `if __name__ == '__main__':`, or leave "
    "processes out."
)
IN_A_RUN = (
    "in the run of {}, seed {}. A negative code is a signal, and -9 often means that memory ran out. Finished runs are "
    "in the report: continue with resume=True (--resume), if need be with fewer processes."
)


class Shares(NamedTuple):
    """What each process gets of the machine: threads of the CPU, and a GPU. On a CPU ``gpus`` are empty."""

    threads: int
    gpus: Sequence[str]


def shares(processes: int, device: torch.device) -> Shares:
    """Divide a machine: on a CPU the threads, and otherwise the GPUs.

    Raises:
        ValueError: There are fewer cores or GPUs than processes, or several processes cannot use the device.
    """
    threads = torch.get_num_threads()
    if processes == 1:
        return Shares(threads, ())
    if device.type == "cpu":
        most, what = max(1, int(usable_cores())), "core"
    elif device.type == "cuda" and device.index is None:
        most, what = torch.cuda.device_count(), "GPU"
    else:
        raise ValueError(
            f"processes: found {processes} with the device '{device}'; give 1, or the device 'cpu' or 'cuda', without "
            "a number: each process gets a GPU."
        )
    if processes > most:
        raise ValueError(f"processes: found {processes}; give at most {most}, one for each {what}.")
    if what == "core":
        return Shares(max(1, threads // processes), ())
    named = os.environ.get(VISIBLE)
    return Shares(threads, (named.split(",") if named else [str(number) for number in range(most)])[:processes])


class Workers:
    """Trains at the same time, in processes that live as long as its ``with`` block.

    Each process loads the factory once. It takes some seconds to start, and has its own copy of the data. If this
    process ends in any way, they end too. ``told`` of the training is called when a run begins.
    """

    def __init__(self, training: Training, processes: int, share: Shares) -> None:
        self._training, self._processes, self._share = training, processes, share
        self._open: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> Self:
        """Start the processes.

        Raises:
            FactoryError: They cannot load the factory.
        """
        training = self._training
        given = (packed(training.make), training.steps, training.device, self._share.threads)
        context = multiprocessing.get_context("spawn")
        try:
            for gpu in self._share.gpus or [None] * self._processes:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, *given))
                with _seeing(gpu):
                    process.start()
                self._open[ours] = process
                theirs.close()
            for connection in self._open:
                self._received(connection, AT_START)
        except BaseException:
            self._end(0.0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(GRACE if kind is None else 0.0)

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Run]:
        """Train at the same time, one job per process at most, and yield the runs as they end.

        Each is charged with the seconds since the one before it. If one fails, the others are finished first.

        Raises:
            FactoryError: A training of stock raised an error. The text has its traceback.
            IncompatibleError: A process was ended from outside.
        """
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # a process shares this GPU
        last, waiting, failures = time.perf_counter(), dict[Connection, str](), list[Exception]()
        for connection, job in zip(self._open, jobs, strict=False):
            candidate, seed, _ = job
            self._training.told(candidate, seed)
            with contextlib.suppress(OSError):  # if the process is gone, no answer comes either
                connection.send(job)
            waiting[connection] = IN_A_RUN.format(candidate.label, seed)
        while waiting:
            ready = wait(list(waiting))
            for connection in [one for one in waiting if one in ready]:
                try:
                    run = self._received(connection, waiting.pop(connection))
                except (FactoryError, IncompatibleError) as error:
                    failures.append(error)
                    continue
                assert run is not None
                before, last = last, time.perf_counter()
                yield run.model_copy(update={"charged_seconds": last - before})
        if failures:
            raise failures[0]

    def _received(self, connection: Connection, if_ended: str) -> Run | None:
        try:
            answer: Run | str | None = connection.recv()
        except (EOFError, OSError) as error:
            process = self._open[connection]
            process.join(GRACE)
            raise IncompatibleError(f"a process ended with exit code {process.exitcode} {if_ended}") from error
        if isinstance(answer, str):
            raise FactoryError(answer)
        return answer

    def _end(self, grace: float) -> None:
        """End the processes. They have so many seconds to do so by themselves."""
        for connection in self._open:
            connection.close()
        for process in self._open.values():
            process.join(grace)
            process.kill()
            process.join()
        self._open.clear()


@contextlib.contextmanager
def _seeing(gpu: str | None) -> Iterator[None]:
    """Let a process that is started see this GPU alone. Its modules may ask for one when they are imported."""
    before = {name: value for name, value in os.environ.items() if name == VISIBLE}
    os.environ.update({} if gpu is None else {VISIBLE: gpu})
    try:
        yield
    finally:
        os.environ.pop(VISIBLE, None)
        os.environ.update(before)


def _serve(connection: Connection, sent: tuple[str, bytes], steps: int, device: torch.device, threads: int) -> None:
    """Train what the first process asks for, until that closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the first process, which ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    # Standard output is for the answer. The first process closes the connection at the end.
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(EOFError, OSError):
        try:
            training = Training(make=unpacked(sent), steps=steps, device=device)
        except FactoryError as error:
            connection.send(str(error))
            return
        connection.send(None)
        while True:
            connection.send(_run_or_error(training, connection.recv()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _run_or_error(training: Training, job: Job) -> Run | str:
    try:
        return training(*job)
    except FactoryError as error:
        return str(error)
    except (Exception, SystemExit):
        return f"the training of {job[0].label} with seed {job[1]} raised an error:\n{traceback.format_exc()}"
