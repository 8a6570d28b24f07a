"""The public loader: what it tells, and that it is otherwise the loader."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchboost
from torchboost.data.loader import Loader, loader
from torchboost.data.pipes import OWN


class Sleeping(Dataset):
    def __init__(self, seconds: float, count: int = 400) -> None:
        self.seconds, self.count = seconds, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if self.seconds:
            time.sleep(self.seconds)
        return index


def run(batches: Any, step: float, epochs: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(epochs):
        for _batch in batches:
            time.sleep(step)
    return time.perf_counter() - start


@pytest.mark.slow
def test_a_planted_slow_loader_becomes_fast():
    plain = DataLoader(Sleeping(0.004), batch_size=2, shuffle=True)
    batches = loader(DataLoader(Sleeping(0.004), batch_size=2, shuffle=True))
    for _ in range(8):
        run(batches, 0.004)
        if batches._trial.phase == "decided":
            break
    assert batches.choice.workers >= 2, batches.explain()
    ratios = sorted(run(plain, 0.004) / run(batches, 0.004) for _ in range(3))
    assert ratios[1] > 1.8, batches.explain()
    assert batches.waiting < 0.4
    first, second = batches.explain().split("\n")
    assert first.startswith("waiting for data: 6")
    assert "compared, all equal" in first
    assert "a step takes" in second


def test_a_loader_that_is_no_bottleneck():
    batches = loader(DataLoader(Sleeping(0.0, 80), batch_size=2))
    run(batches, 0.01)
    assert batches.choice == OWN
    assert "not the bottleneck, nothing changed" in batches.explain()
    assert not torch.multiprocessing.active_children()


def test_it_is_otherwise_the_loader():
    data = TensorDataset(torch.arange(10))
    plain = DataLoader(data, batch_size=3)
    batches = torchboost.loader(plain)
    assert len(batches) == 4
    assert batches.dataset is data
    assert batches.batch_size == 3
    assert not hasattr(batches, "state_dict")
    assert not hasattr(batches, "_iterator")
    assert "not judged yet, after 0 batches" in batches.explain()
    assert [x.tolist() for (x,) in batches] == [x.tolist() for (x,) in plain]
    with pytest.raises(AttributeError):
        pickle.loads(pickle.dumps(Loader.__new__(Loader))).dataset  # noqa: B018


class Resumable:
    """An iterable with a state, as the loader of torchdata has."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < 6:
            self.position += 1
            yield self.position
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_loader_that_resumes_within_an_epoch():
    batches = loader(Resumable())
    iterator = iter(batches)
    assert [next(iterator) for _ in range(3)] == [1, 2, 3]
    state = batches.state_dict()
    resumed = loader(Resumable())
    resumed.load_state_dict(state)
    assert list(resumed) == [4, 5, 6]
    assert list(resumed) == [1, 2, 3, 4, 5, 6]


def test_torchdata_resumes_within_an_epoch():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    batches = loader(stateful(range(20), batch_size=2))
    iterator = iter(batches)
    seen = [next(iterator).tolist() for _ in range(4)]
    resumed = loader(stateful(range(20), batch_size=2))
    resumed.load_state_dict(batches.state_dict())
    seen += [batch.tolist() for batch in resumed]
    assert seen == [[i, i + 1] for i in range(0, 20, 2)]


@pytest.mark.parametrize("source", [[1, 2], range(2), (i for i in range(2))])
def test_any_iterable(source):
    batches = loader(source)
    assert len(list(batches)) == 2
    assert "not judged yet" in batches.explain()


def test_an_iterable_that_is_slow_is_told():
    def slow() -> Any:
        for index in range(40):
            time.sleep(0.005)
            yield index

    batches = loader(slow())
    run(batches, 0.001)
    assert "a generator is only measured" in batches.explain()
    assert batches
    with pytest.raises(TypeError):
        len(batches)


def test_closed_workers_start_again(eager):
    batches = loader(DataLoader(Sleeping(0.0, 60), batch_size=1))
    for _ in range(8):
        assert len(list(batches)) == 60
    assert batches.choice.workers
    batches.close()
    assert not torch.multiprocessing.active_children()
    assert len(list(batches)) == 60
    assert torch.multiprocessing.active_children()
