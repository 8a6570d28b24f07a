from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from torchboost.algorithms.dim_reduce import basis_sources
from torchboost.algorithms.dim_reduce.basis import blocks_within
from torchboost.algorithms.dim_reduce.basis_sources import (
    MatrixFile,
    _Meeting,
    principal_basis,
    shared_basis,
    write_matrix,
)
from torchboost.algorithms.dim_reduce.principal_components import PrincipalComponents
from torchboost.algorithms.dim_reduce.snapshots import Layout, SnapshotBuffer

LAYOUT = Layout(("a", "b"), ((4, 3), (5,)))


def snapshots(count: int = 5, layout: Layout = LAYOUT) -> SnapshotBuffer:
    kept = SnapshotBuffer(layout, torch.float32)
    g = torch.Generator().manual_seed(0)
    for _ in range(count):
        kept.add([torch.randn(shape, generator=g) for shape in layout.shapes])
    return kept


def silent(*_: object) -> None:
    pass


def test_components_written_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "basis.npy"
    monkeypatch.setattr(basis_sources, "_AT_ONCE", 2 * 4 * LAYOUT.length)
    explained = write_matrix(path, snapshots(), 3, progress=silent)
    own = principal_basis(snapshots(), 3)
    assert np.array_equal(np.load(path), own.rows[0].numpy())
    assert json.loads(path.with_suffix(".json").read_text())["names"] == ["a", "b"]
    assert 0 < explained < 1
    assert torch.equal(MatrixFile(path, 3, LAYOUT).rows(0, range(1, 3)), own.rows[0][1:])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["basis.json", "basis.npy"]


def test_columns_follow_the_model_whatever_their_order_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "basis.npy"
    write_matrix(path, snapshots(), 2, progress=silent)
    turned = Layout(LAYOUT.names[::-1], LAYOUT.shapes[::-1])
    rows, plain = MatrixFile(path, 2, turned).rows(0, range(2)), MatrixFile(path, 2, LAYOUT).rows(0, range(2))
    assert torch.equal(rows, torch.cat([plain[:, 12:], plain[:, :12]], dim=1))
    path.with_suffix(".json").unlink()
    assert torch.equal(MatrixFile(path, 2, turned).rows(0, range(2)), plain)


def test_columns_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "basis.npy"
    write_matrix(path, snapshots(), 2, progress=silent)
    with pytest.raises(ValueError, match=r"2 parameters differ, among them b, c"):
        MatrixFile(path, 2, Layout(("a", "c"), LAYOUT.shapes))


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what.startswith("making"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_matrix(tmp_path / "basis.npy", snapshots(), 2, progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_budget_makes_blocks() -> None:
    layout = Layout(("w",), ((300_000,),))
    basis = principal_basis(snapshots(4, layout), 3, memory_mebibytes=2)
    assert len(basis.blocks) == 2
    assert basis.components == 3
    assert sum(rows.numel() * 4 for rows in basis.rows) <= 2 << 20


def _share(case: str) -> list[list[float]] | str:
    blocks = blocks_within(LAYOUT.length, 5, budget=4 * 5 * 10 if case == "blocks" else None)

    def make() -> PrincipalComponents:
        if case == "late":
            time.sleep(4)
        return PrincipalComponents(snapshots(6), blocks)

    try:
        basis = shared_basis(make, blocks, dist.group.WORLD, timeout=2 if case == "late" else 60)
    except TimeoutError as error:
        return str(error)
    return basis.lift(torch.eye(5, dtype=torch.float64)).tolist()


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_gets_its_rows(ranks: int) -> None:
    for case in ("dense", "blocks"):
        found = run_ranks(_share, ranks, case)
        blocks = blocks_within(LAYOUT.length, 5, budget=4 * 5 * 10 if case == "blocks" else None)
        alone = shared_basis(lambda blocks=blocks: PrincipalComponents(snapshots(6), blocks), blocks)
        assert (len(blocks) > 1) == (case == "blocks")
        for one in found:
            torch.testing.assert_close(torch.tensor(one), alone.lift(torch.eye(5, dtype=torch.float64)))


@pytest.mark.dist
def test_the_others_do_not_wait_for_ever() -> None:
    waited = run_ranks(_share, 2, "late", timeout=60)[1]
    assert "rank 1 of 2 waited 2 s for the basis" in waited
    assert "dim_reduce.timeout" in waited


def test_what_is_no_matrix_is_refused_in_one_way(tmp_path: Path) -> None:
    several = tmp_path / "several.npz"
    np.savez(several, a=np.eye(17))
    with pytest.raises(ValueError, match=r"several\.npz.*not an \.npy file"):
        MatrixFile(several, 2, LAYOUT)
    path = tmp_path / "basis.npy"
    np.save(path, np.eye(17, dtype=np.float32))
    for text in ('{"answer": 42}', "no json", "[]"):
        path.with_suffix(".json").write_text(text)
        with pytest.raises(ValueError, match=r"basis\.json: found no names and shapes of columns"):
            MatrixFile(path, 2, LAYOUT)


def test_a_prefix_of_all_names_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "basis.npy"
    wrapped = Layout(tuple(f"module.{name}" for name in LAYOUT.names), LAYOUT.shapes)
    write_matrix(path, snapshots(layout=wrapped), 2, progress=silent)
    assert torch.equal(MatrixFile(path, 2, LAYOUT).rows(0, range(2)), MatrixFile(path, 2, wrapped).rows(0, range(2)))


def _refused(case: str) -> str:
    class Given:
        def rows(self, block: int, chosen: range) -> torch.Tensor:
            rows = torch.eye(4, LAYOUT.length)
            if case == "NaN":
                rows[0, 0] = float("nan")
            elif case == "two alike":
                rows[3] = rows[0]
            return rows[chosen.start : chosen.stop]

    def make() -> Given:
        if case == "failed":
            raise RuntimeError("out of memory")
        if case == "unexpected":
            raise KeyError("names")
        return Given()

    try:
        shared_basis(make, blocks_within(LAYOUT.length, 4), dist.group.WORLD, timeout=20)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing wrong"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("none", "nothing wrong"),
        ("NaN", "ValueError: the basis .*holds NaN"),
        ("two alike", "ValueError: the rows of the basis are not orthonormal"),
        ("failed", "RuntimeError: out of memory"),
        ("unexpected", "KeyError: 'names'"),
    ],
)
def test_all_ranks_refuse_alike(case: str, said: str) -> None:
    one, two = run_ranks(_refused, 2, case)
    assert one == two
    assert re.match(said, one)


def _in_halves(both: bool) -> list[list[float]]:
    """Two groups that train two models of one job."""
    half = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    blocks = blocks_within(LAYOUT.length, 3 + half)
    found = []
    for _ in range(2 if both or half else 0):  # the second time in the same group
        basis = shared_basis(lambda: PrincipalComponents(snapshots(6), blocks), blocks, groups[half], timeout=20)
        found = basis.lift(torch.eye(3 + half, dtype=torch.float64)).tolist()
    later = dist.new_group(list(range(4)))  # all ranks still count their groups alike
    dist.barrier(later)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("both", [True, False])
def test_parts_of_a_job_make_a_basis_each(both: bool) -> None:
    found = run_ranks(_in_halves, 4, both)
    for rank, one in enumerate(found):
        blocks = blocks_within(LAYOUT.length, 3 + rank // 2)
        alone = shared_basis(lambda blocks=blocks: PrincipalComponents(snapshots(6), blocks), blocks)
        if both or rank // 2:
            wanted = alone.lift(torch.eye(alone.components, dtype=torch.float64))
            torch.testing.assert_close(torch.tensor(one), wanted)


class CountedStore:
    """A store that notes how often it was asked."""

    def __init__(self, store: dist.HashStore) -> None:
        self.store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("failing", [[], [0], [9], [15, 4]])
def test_a_failure_reaches_all_ranks_with_few_requests_of_each(failing: list[int]):
    store, ranks = dist.HashStore(), 16

    def meet(rank: int) -> tuple[str, int]:
        meeting = object.__new__(_Meeting)
        meeting.rank, meeting.ranks, meeting._timeout, meeting._store = rank, ranks, 20.0, CountedStore(store)
        try:
            meeting.raise_first("made", ValueError(str(rank)) if rank in failing else None)
        except ValueError as error:
            return str(error), meeting._store.asked
        return "", meeting._store.asked

    with ThreadPoolExecutor(ranks) as pool:
        said, asked = zip(*pool.map(meet, range(ranks)), strict=True)
    assert max(asked) <= 7
    assert all((word in map(str, failing)) if failing else not word for word in said)
    assert all(said[rank] == str(rank) for rank in failing)
