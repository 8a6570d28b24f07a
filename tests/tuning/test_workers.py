"""Several processes that train: their part of the machine, their errors and their end."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import textwrap
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from torchboost.bench.factory import function_at
from torchboost.errors import FactoryError, IncompatibleError
from torchboost.tuning import workers as module
from torchboost.tuning.report import STOCK, Candidate, Run
from torchboost.tuning.runs import Watch
from torchboost.tuning.training import Training
from torchboost.tuning.workers import Shares, Workers, shares

CPU = torch.device("cpu")
STOCKS = Candidate(name=STOCK)
FACTORY = textwrap.dedent(
    """
    import os, signal, time
    from pathlib import Path
    import torch
    from torch import nn

    FOLDER = Path(__file__).parent
    print("loaded")

    def make(seed):
        if seed == 7:
            raise KeyError("no such column")
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(64, 8, generator=draw)
        targets = (inputs.sum(1) > 0).long()
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        batches = list(zip(inputs.split(8), targets.split(8)))

        def evaluate(model):
            if seed == 8:
                while not (FOLDER / "go").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            if seed == 9:
                return 1000 * torch.get_num_threads() + int(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
            return (model(inputs) - targets[:, None]).square().mean()

        return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, batches, evaluate
    """
)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    (tmp_path / "train.py").write_text(FACTORY, encoding="utf-8")
    return Training(make=function_at(f"{tmp_path / 'train.py'}:make"), steps=6, device=CPU)


def jobs(*seeds: int) -> list[tuple[Candidate, int, Watch]]:
    return [(STOCKS, seed, Watch()) for seed in seeds]


def timeless(run: Run) -> dict[str, Any]:
    times = {"setup_seconds", "seconds", "wall_seconds", "charged_seconds", "peak_bytes"}
    return run.model_dump(exclude=times)


def test_two_processes_train_as_this_one_does_and_leave_nothing_behind(training, tmp_path, capfd):
    finished, go = list[int](), tmp_path / "go"

    def collect(*seeds: int) -> None:
        finished.clear()
        for run in workers(jobs(*seeds)):
            finished.append(run.seed)
            go.touch()

    with ExitStack() as block:
        workers = block.enter_context(Workers(training, 2, Shares(1, ["5", "3"])))
        began = time.perf_counter()
        found = list(workers(jobs(0, 1)))
        spent = time.perf_counter() - began
        assert {run.seed: timeless(run) for run in found} == {seed: timeless(training(STOCKS, seed)) for seed in (0, 1)}
        assert all(run.charged_seconds is not None and run.charged_seconds > 0 for run in found)
        assert sum(run.charge for run in found) <= spent
        assert sorted(run.metric for run in workers(jobs(9, 9))) == [1003, 1005]
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
        with pytest.raises(FactoryError, match=r"training of stock with seed 7 raised an error:(.|\n)*no such column"):
            collect(7, 1)
        assert (finished, len(multiprocessing.active_children())) == ([1], 2)
        with pytest.raises(IncompatibleError, match=r"exit code -9 in the run of stock, seed 8\..*with resume=True"):
            collect(8, 2)
        assert finished == [2]
        go.unlink()
        main = threading.get_ident()
        threading.Timer(0.5, signal.pthread_kill, [main, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt) as interrupt:
            collect(3, 8)  # the first process is gone, and the other one waits
        (process,) = multiprocessing.active_children()
        assert process.is_alive()
        block.pop_all().__exit__(interrupt.type, interrupt.value, None)
    assert (multiprocessing.active_children(), process.exitcode) == ([], -signal.SIGKILL)
    said = capfd.readouterr()
    assert (said.out, said.err.count("loaded")) == ("", 2)  # standard output is for an answer


def test_a_factory_that_another_process_cannot_load_is_refused_before_any_run(training):
    inside = lambda seed: None  # noqa: E731
    for make in (inside, functools.partial(inside, 0)):
        with (
            pytest.raises(FactoryError, match=r"cannot load the factory: .*Define it at the top level of a file"),
            Workers(Training(make=make, steps=6, device=CPU), 2, Shares(1, ())),
        ):
            raise AssertionError
    assert multiprocessing.active_children() == []


def test_the_machine_is_divided(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 4.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda = torch.device("cuda")
    assert (shares(1, cuda), shares(1, torch.device("cuda:1"))) == (Shares(8, ()), Shares(8, ()))
    assert [shares(count, CPU).threads for count in (2, 3, 4)] == [4, 2, 2]
    assert shares(2, cuda) == Shares(8, ["0", "1"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-8,7")
    assert shares(2, cuda) == Shares(8, ["6", "GPU-8"])
    for count, device, said in (
        (5, "cpu", "found 5; give at most 4, one for each core"),
        (4, "cuda", "found 4; give at most 3, one for each GPU"),
        (2, "cuda:1", r"found 2 with the device 'cuda:1'; give 1, or the device 'cpu' or 'cuda'"),
        (2, "meta", "found 2 with the device 'meta'"),
    ):
        with pytest.raises(ValueError, match=said):
            shares(count, torch.device(device))
