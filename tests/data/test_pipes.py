"""Indices are taken ahead only if nothing sees it."""

from __future__ import annotations

import time
import types

import pytest
import torch
from torch.utils.data import DataLoader

from torchboost.core import torch_private as private
from torchboost.data.pipes import OWN, Stock, Variant


def test_indices_that_were_taken_are_delivered_in_order():
    stock = Stock(DataLoader(range(6), batch_size=2))
    stock.take()
    stock.take()
    assert list(stock.pending) == [[0, 1], [2, 3]]
    assert [next(stock).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(StopIteration):
        next(stock)


def test_the_last_index_is_left_if_the_sampler_draws_there():
    generator = torch.Generator().manual_seed(1)
    stock = Stock(DataLoader(range(6), batch_size=3, shuffle=True, generator=generator))
    stock.take()
    state = generator.get_state()
    with pytest.raises(StopIteration):
        stock.take()
    assert torch.equal(state, generator.get_state())
    assert len([next(stock), next(stock)]) == 2


def test_names_of_variants():
    assert str(OWN) == "no workers"
    assert str(Variant(1)) == "1 worker, 2 batches ahead each"
    assert str(Variant(2, 4, pin=True)) == "2 workers, 4 batches ahead each and pinned memory"
    assert Variant(2, 4).ahead == 8


def test_indices_of_a_loader_can_be_taken_ahead():
    batches = iter(DataLoader(range(6), batch_size=2))
    assert private.next_index(batches) == [0, 1]
    assert private.load_index(batches, [5, 4]).tolist() == [5, 4]
    assert next(batches).tolist() == [2, 3]
    assert isinstance(private.iterator_of_indices(batches), types.GeneratorType)


def test_a_loader_with_a_way_of_its_own_is_seen():
    class Own(DataLoader):
        def __iter__(self):
            return iter([])

    class Named(DataLoader):
        pass

    assert private.loads_in_this_process(DataLoader(range(2)))
    assert private.loads_in_this_process(Named(range(2)))
    assert not private.loads_in_this_process(Own(range(2)))
    assert not private.loads_in_this_process(DataLoader(range(2), num_workers=1))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_worker_that_dies_raises_in_next_alone():
    loader = DataLoader(range(8), num_workers=1, persistent_workers=True, timeout=0.5, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    private.forgive_lost_workers(batches)
    private.stop_workers(batches)
    time.sleep(0.2)  # the signal of the dead worker would raise here
    with pytest.raises(RuntimeError, match="worker"):
        list(batches)
