"""The number of threads: what the system offers, and that everything is put back."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import torchboost
from torchboost.algorithms import Threads, compute_with_threads
from torchboost.algorithms.threads import counts


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def machine(root: Path, monkeypatch: pytest.MonkeyPatch, *, cpus: int, hyper: bool, quota: str = "") -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cpus)), raising=False)
    for cpu in range(cpus):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        first = cpu % (cpus // 2) if hyper else cpu
        (folder / "thread_siblings_list").write_text(f"{first},{first + cpus // 2}\n" if hyper else f"{cpu}\n")
    if quota:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/cpu.max").write_text(quota)
    return root


@pytest.mark.parametrize(
    ("cpus", "hyper", "quota", "expected"),
    [
        (2, False, "", []),
        (4, True, "", [2]),
        (4, True, "max 100000", [2]),
        (4, True, "150000 100000", [2]),
        (4, False, "250000 100000", [3]),
        (4, False, "50000 100000", [1]),
        (4, False, "800000 100000", []),
    ],
)
def test_the_numbers_are_those_of_cores_and_quota(tmp_path, monkeypatch, cpus, hyper, quota, expected):
    root = machine(tmp_path, monkeypatch, cpus=cpus, hyper=hyper, quota=quota)
    torch.set_num_threads(cpus)
    assert counts(root) == expected
    torch.set_num_threads(cpus + 1)
    assert counts(root) == []  # the program has set it
    if hyper and not quota:
        torch.set_num_threads(cpus // 2)
        assert counts(root) == [cpus]


def test_the_quota_of_the_first_version_of_control_groups(tmp_path, monkeypatch):
    root = machine(tmp_path, monkeypatch, cpus=2, hyper=False)
    (root / "sys/fs/cgroup/cpu").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("100000\n")
    (root / "sys/fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000\n")
    assert counts(root) == [1]
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert counts(root) == []


def test_a_system_that_tells_nothing_has_its_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    assert counts(tmp_path) == []


def test_removal_restores_what_was_there_unless_the_program_has_set_another():
    with compute_with_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    effect = compute_with_threads(1)
    torch.set_num_threads(3)
    effect.remove()
    assert torch.get_num_threads() == 3
    with pytest.raises(ValueError, match="count"):
        compute_with_threads(0)


def test_what_the_program_has_chosen_stays(monkeypatch):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS=1" in (Threads().idle(model, optimizer) or "")
    assert Threads(count=1).idle(model, optimizer) is None


def test_a_level_tries_another_number_and_checks_it(monkeypatch):
    monkeypatch.setattr(torchboost.algorithms.threads, "counts", lambda: [1])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted = torchboost.boost(model, optimizer, level="O1", calibrate=2.0)
    boosted.model(torch.randn(16, 64)).sum().backward()
    boosted.optimizer.step()
    verdicts = {verdict.lever: verdict for verdict in boosted.choice.verdicts}
    assert verdicts["threads"].pairs > 0
    assert (torch.get_num_threads() == 1) is verdicts["threads"].kept
    boosted.remove()
    assert torch.get_num_threads() == 2
