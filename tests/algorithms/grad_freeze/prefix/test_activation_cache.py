"""Rows by sample id: nothing lost, nothing past the budget, nothing left behind, and a full disk is no disaster."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import ROOT
from torchboost.algorithms.grad_freeze.prefix import activation_cache
from torchboost.algorithms.grad_freeze.prefix.activation_cache import ActivationCache, sample_ids
from torchboost.errors import CacheSpaceWarning

PLACES = ["memory", "file"]
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def cache_in(place: str, folder: Path, budget: int = 2**20) -> ActivationCache:
    return ActivationCache(budget, path=folder if place == "file" else None)


def row(ids: Any, width: int = 4) -> tuple[Tensor]:
    return (torch.as_tensor(ids, dtype=torch.float32)[:, None] + torch.arange(width) / 8,)


@pytest.mark.parametrize("place", PLACES)
def test_every_type_and_shape_comes_back(place: str, tmp_path: Path) -> None:
    cache = cache_in(place, tmp_path)
    values = (*(torch.randn(5, 3, 2).mul(4).to(kind) for kind in KINDS), torch.randn(5), torch.ones(5, 0, 2))
    assert cache.store([9, 2, 2**62, 0, 7], values) == 5
    rows = cache.read(cache.find(torch.tensor([0, 2**62, 0])))
    for kept, value in zip(rows, values, strict=True):
        assert kept.dtype is value.dtype
        assert torch.equal(kept, value[[3, 2, 3]])
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_channels_last_stays_channels_last_and_rows_are_copies() -> None:
    cache = ActivationCache(2**20)
    value = torch.randn(4, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    cache.store(range(4), (value,))
    expected = value.clone()
    (kept,) = cache.read(cache.find([1, 3]))
    assert kept.is_contiguous(memory_format=torch.channels_last)
    assert kept.stride() == value[[1, 3]].contiguous(memory_format=torch.channels_last).stride()
    kept.zero_()
    value.zero_()
    assert torch.equal(cache.read(cache.find(range(4)))[0], expected)


@pytest.mark.parametrize("place", PLACES)
def test_the_budget_is_kept_first_come_first_kept(place: str, tmp_path: Path) -> None:
    cache = cache_in(place, tmp_path, budget=10 * 16 + 15)
    assert cache.store(range(8), row(range(8))) == 8
    assert not cache.full
    assert cache.store([7, 20, 21, 20, 22], row([7, 20, 21, 20, 22])) == 2
    assert (cache.rows, cache.bytes, cache.row_bytes, cache.full) == (10, 160, 16, True)
    assert sum(os.stat(file).st_blocks * 512 // 4096 for file in tmp_path.iterdir()) <= 1
    assert all(file.stat().st_size <= cache.budget_bytes for file in tmp_path.iterdir())
    assert cache.store([30], row([30])) == 0
    slots = cache.find([20, 22, 21, 0])
    assert (slots >= 0).tolist() == [True, False, True, True]
    assert (cache.hits, cache.misses) == (3, 1)
    assert torch.equal(cache.read(slots[[0, 2, 3]])[0], row([20, 21, 0])[0])
    assert torch.equal(cache.read(slots, row([22]))[0], row([20, 22, 21, 0])[0])


@pytest.mark.parametrize("place", PLACES)
@given(batches=st.lists(st.lists(st.integers(0, 60), max_size=12), max_size=12), capacity=st.integers(1, 50))
def test_it_agrees_with_a_dictionary(
    place: str, tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], capacity: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_cache, "_FIRST_CHUNK", 64)
        patch.setattr(activation_cache, "_LARGEST_CHUNK", 128)
        patch.setattr(activation_cache, "_RECENT", 5)
        cache = cache_in(place, tmp_path_factory.getbasetemp(), budget=16 * capacity)
        model: dict[int, int] = {}
        for number, batch in enumerate(batches):
            for sample in batch:
                if sample not in model and len(model) < capacity:
                    model[sample] = number
            cache.store(batch, row([100 * sample + number for sample in batch]))
        assert cache.rows == len(model)
        slots = cache.find(range(61))
        assert (slots >= 0).nonzero().flatten().tolist() == sorted(model)
        kept = sorted(model)
        expected = row([100 * sample + model[sample] for sample in kept]) if kept else ()
        if kept:
            assert torch.equal(cache.read(slots[kept])[0], expected[0])
        cache.close()


def test_clear_takes_other_shapes_and_counts_anew(tmp_path: Path) -> None:
    cache = cache_in("file", tmp_path)
    cache.store([1], row([1]))
    cache.find([1, 2])
    cache.clear()
    assert (cache.rows, cache.bytes, cache.hits, cache.misses) == (0, 0, 0, 0)
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [0]
    assert cache.store([1], row([1], width=7)) == 1
    assert torch.equal(cache.read(cache.find([1]))[0], row([1], width=7)[0])


def test_the_file_comes_with_the_first_row_and_goes_with_its_owner(tmp_path: Path) -> None:
    cache = cache_in("file", tmp_path)
    assert list(tmp_path.iterdir()) == []
    cache.store([1], row([1]))
    assert len(list(tmp_path.iterdir())) == 1
    del cache
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    cache = cache_in("file", tmp_path)
    cache.store([1], row([1]))
    cache.close()
    cache.close()
    assert cache.store([1], row([1])) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_warns_once_and_what_is_held_stays_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_cache, "_FIRST_CHUNK", 64)
    cache = cache_in("file", tmp_path)
    cache.store(range(4), row(range(4)))

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(CacheSpaceWarning, match="No space left") as caught:
        assert cache.store(range(2, 8), row(range(2, 8))) == 0
    assert len(caught) == 1
    text = str(caught[0].message)
    for part in ("64 bytes", str(tmp_path), "bytes free", "Training continues", "4 rows held", "budget_bytes"):
        assert part in text
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.store([9], row([9])) == 0
    assert cache.full
    assert torch.equal(cache.read(cache.find(range(4)))[0], row(range(4))[0])


def test_a_file_size_limit_of_the_system_is_met_while_reserving(tmp_path: Path) -> None:
    code = f"""
import resource, warnings, torch
from torchboost.algorithms.grad_freeze.prefix.activation_cache import ActivationCache
resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 2**20, 20 * 2**20))
cache = ActivationCache(2**30, path={str(tmp_path)!r})
value = torch.randn(8, 2**18)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    stored = [cache.store(range(8 * i, 8 * i + 8), (value + i,)) for i in range(5)]
assert sum(stored) == cache.rows == 16, stored
assert [w.category.__name__ for w in caught] == ["CacheSpaceWarning"], caught
assert "File too large" in str(caught[0].message), caught[0].message
assert torch.equal(cache.read(cache.find(range(8, 16)))[0], value + 1)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_may_not_be_written_to_warns(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    cache = cache_in("file", folder)
    folder.rmdir()
    with pytest.warns(CacheSpaceWarning, match="free space unknown"):
        assert cache.store([1], row([1])) == 0
    assert (cache.rows, cache.find([1]).tolist()) == (0, [-1])


@pytest.mark.parametrize(
    ("ids", "error"),
    [([-1], ValueError), ([[1]], ValueError), ([0.5], TypeError), ([True], TypeError)],
)
def test_bad_ids_are_refused(ids: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="sample ids: found"):
        sample_ids(ids)
    with pytest.raises(error, match="sample ids: found"):
        ActivationCache(64).find(ids)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for budget in (0, -1):
        with pytest.raises(ValueError, match="budget_bytes: found"):
            ActivationCache(budget)
    with pytest.raises(ValueError, match="not a directory"):
        ActivationCache(1, path=tmp_path / "absent")
    cache = ActivationCache(2**10)
    for values in ((), row([1, 2]), (torch.ones(()),)):
        with pytest.raises(ValueError, match="one row per id"):
            cache.store([1], values)
    cache.store([1], row([1]))
    with pytest.raises(ValueError, match="the rows held"):
        cache.store([2], row([2], width=5))
    with pytest.raises(IndexError, match="slots: found"):
        cache.read(torch.tensor([1]))
    with pytest.raises(IndexError, match="slots: found"):
        cache.read(torch.tensor([-1]))
    assert sample_ids([]).dtype is torch.int64
    assert cache.find([]).tolist() == []
