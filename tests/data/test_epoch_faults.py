"""Errors, lost workers and full resources: the loop gets its batches, and an error at the batch it belongs to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from tests.data.test_epoch import Images, Lazy, assert_as_stock, train
from torchboost.data import pipes
from torchboost.data.loader import loader
from torchboost.data.pipes import OWN, Variant


class Failing(Images):
    """Raises for one sample."""

    def __getitem__(self, index: int) -> Any:
        if index == 77:
            raise KeyError("sample 77")
        return torch.tensor(index)


def test_an_error_of_the_data_set_is_raised_at_its_batch(eager):
    def run(wrap: Callable[[DataLoader], Any]) -> list[Any]:
        seen: list[Any] = []
        batches = wrap(DataLoader(Failing(), batch_size=1))
        for _ in range(6):
            iterator = iter(batches)
            while True:
                try:
                    seen.append(next(iterator).item())
                except StopIteration:
                    break
                except KeyError as error:
                    seen.append(str(error))
        return seen

    assert run(loader) == run(lambda plain: plain)


def test_an_error_of_a_sampler_is_raised_at_its_batch(eager):
    class Breaks(Lazy):
        def __iter__(self) -> Iterator[int]:
            yield from range(40)
            raise KeyError("sampler")

    def run(wrap: Callable[[DataLoader], Any]) -> list[Any]:
        seen: list[Any] = []
        batches = wrap(DataLoader(Images(), batch_size=1, sampler=Breaks()))
        for _ in range(12):
            try:
                for batch in batches:
                    seen.append(batch["name"])  # noqa: PERF401
            except KeyError as error:
                seen.append(str(error))
        return seen

    ahead = run(lambda plain: loader(plain, read_ahead=True))
    assert ahead == run(lambda plain: plain)


def test_a_worker_that_dies(eager, monkeypatch):
    monkeypatch.setattr("torchboost.data.loader.PATIENCE", 0.5)

    class Dies(Images):
        def __getitem__(self, index: int) -> Any:
            if index == 80 and get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.tensor(index)

    boosted = assert_as_stock(lambda: DataLoader(Dies(), batch_size=1))
    assert boosted.choice == OWN
    assert "the workers failed" in boosted.explain()


def test_a_worker_that_hangs(eager, monkeypatch):
    monkeypatch.setattr("torchboost.data.loader.PATIENCE", 0.5)

    class Hangs(Images):
        def __getitem__(self, index: int) -> Any:
            if get_worker_info() is not None:
                time.sleep(60)
            return torch.tensor(index)

    boosted = assert_as_stock(lambda: DataLoader(Hangs(), batch_size=1))
    assert "the workers failed" in boosted.explain()


def test_a_loop_that_keeps_its_batches(eager, monkeypatch):
    monkeypatch.setattr("torchboost.data.loader._EVERY", 8)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (len(os.listdir("/proc/self/fd")), 4096))
    boosted = assert_as_stock(lambda: DataLoader(Images(), batch_size=2))
    assert "the loop keeps batches" in boosted.explain()


def test_little_shared_memory(eager, monkeypatch):
    monkeypatch.setattr("torchboost.data.loader._shared_memory", lambda: 100)
    boosted = assert_as_stock(lambda: DataLoader(Images(), batch_size=2))
    assert "shared memory" in boosted.explain()


def test_workers_end_with_the_loader(eager):
    boosted = loader(DataLoader(Images(), batch_size=2))
    train(boosted)
    assert boosted.choice.workers
    workers = [child.pid for child in torch.multiprocessing.active_children()]
    assert workers
    del boosted
    assert not torch.multiprocessing.active_children()


def test_processes_that_cannot_start(eager, monkeypatch):
    monkeypatch.setattr(pipes.Pipe, "begin", lambda *_: (_ for _ in ()).throw(OSError("Cannot allocate memory")))
    boosted = assert_as_stock(lambda: DataLoader(Images(), batch_size=2))
    assert "cannot be started (OSError: Cannot allocate memory)" in boosted.explain()


@pytest.mark.filterwarnings("ignore:.*no accelerator is found")
def test_pinned_memory_is_tried_with_workers(eager, monkeypatch):
    """Without an accelerator torch leaves it out with a warning; the way of the batches is the same."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # in some versions it asks torch.cuda
    boosted = assert_as_stock(lambda: DataLoader(Images(), batch_size=2, shuffle=True))
    assert boosted.choice == Variant(2, 4, pin=True)
    assert assert_as_stock(lambda: DataLoader(Images(), collate_fn=tuple)).choice == Variant(2, 4)
