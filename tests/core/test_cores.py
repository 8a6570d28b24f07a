"""Processors by affinity, by the quota of a container, and by ranks."""

from __future__ import annotations

import os

import pytest

from torchboost.core.hardware import usable_cores


@pytest.fixture(autouse=True)
def eight(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_affinity(tmp_path):
    assert usable_cores(tmp_path) == 8


@pytest.mark.parametrize(("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", 8), ("rubbish", 8), ("", 8)])
def test_quota_of_version_2(tmp_path, text, cores):
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("-1", 8)])
def test_quota_of_version_1(tmp_path, quota, cores):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(tmp_path) == cores


def test_without_affinity(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize(("ranks", "cores"), [("4", 2), ("0", 8), ("many", 8)])
def test_ranks_share(tmp_path, monkeypatch, ranks, cores):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert usable_cores(tmp_path) == cores
