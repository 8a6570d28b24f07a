from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchboost.algorithms.dim_reduce import principal_components
from torchboost.algorithms.dim_reduce.basis import Block, blocks_within
from torchboost.algorithms.dim_reduce.principal_components import PrincipalComponents
from torchboost.algorithms.dim_reduce.snapshots import Layout, SnapshotBuffer


def buffer(*snapshots: list[torch.Tensor]) -> SnapshotBuffer:
    shapes = tuple(tuple(t.shape) for t in snapshots[0])
    kept = SnapshotBuffer(Layout(tuple(f"p{i}" for i in range(len(shapes))), shapes), torch.float64)
    for snapshot in snapshots:
        kept.add(snapshot)
    return kept


def random(count: int, seed: int = 0, *shapes: tuple[int, ...]) -> SnapshotBuffer:
    g = torch.Generator().manual_seed(seed)
    shapes = shapes or ((4, 3), (5,), ())
    return buffer(*[[torch.randn(s, dtype=torch.float64, generator=g) for s in shapes] for _ in range(count)])


def matrix(snapshots: SnapshotBuffer) -> torch.Tensor:
    whole = [
        torch.cat([snapshots.part(m, i, ()).reshape(-1) for i in range(len(snapshots.layout.names))])
        for m in range(len(snapshots))
    ]
    return torch.stack(whole)


@given(st.integers(3, 9), st.integers(1, 8), st.integers(0, 99))
def test_rows_are_the_right_singular_vectors(count: int, k: int, seed: int) -> None:
    k = min(k, count - 1)
    snapshots = random(count, seed)
    data = matrix(snapshots)
    found = PrincipalComponents(snapshots, blocks_within(18, k))
    rows = found.rows(0, range(k), torch.float64)
    _, values, wanted = torch.linalg.svd(data - data.mean(0), full_matrices=False)
    for row, own in zip(rows, wanted, strict=False):
        sign = own[own.abs().argmax()].sign()
        torch.testing.assert_close(row, own * sign, rtol=1e-6, atol=1e-7)
    squares = values.square()
    assert found.explained == pytest.approx(float(squares[:k].sum() / squares.sum()))


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = random(5, 1, (40, 3), (7,), (2, 2, 5))
    whole = PrincipalComponents(snapshots, blocks_within(147, 3)).rows(0, range(3))
    monkeypatch.setattr(principal_components, "_CHUNK", 8 * 5 * 10)
    parts = PrincipalComponents(snapshots, blocks_within(147, 3))
    torch.testing.assert_close(parts.rows(0, range(3)), whole)
    assert torch.equal(parts.rows(0, range(1, 3)), parts.rows(0, range(3))[1:])


def test_each_block_has_components_of_its_own() -> None:
    snapshots = random(6, 2)
    blocks = (Block(0, 7, 2), Block(7, 18, 1))
    found = PrincipalComponents(snapshots, blocks)
    data = matrix(snapshots)[:, 7:]
    own = torch.linalg.svd(data - data.mean(0), full_matrices=False)[2][0]
    row = found.rows(1, range(1), torch.float64)[0]
    torch.testing.assert_close(row.abs(), own.abs(), rtol=1e-6, atol=1e-7)
    assert found.rows(0, range(2)).shape == (2, 7)


def test_as_many_components_as_snapshots_end_with_the_mean() -> None:
    snapshots = random(4, 3)
    rows = PrincipalComponents(snapshots, blocks_within(18, 4)).rows(0, range(4), torch.float64)
    torch.testing.assert_close(rows @ rows.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-9)
    mean = matrix(snapshots).mean(0)
    torch.testing.assert_close(rows.T @ (rows @ mean), mean)


def test_small_components_beside_large_ones_are_orthonormal() -> None:
    g = torch.Generator().manual_seed(0)
    base = torch.linalg.qr(torch.randn(500, 5, dtype=torch.float64, generator=g))[0].T
    scales = torch.tensor([1.0, 1e-1, 1e-2, 1e-3, 1e-4], dtype=torch.float64)
    data = torch.randn(12, 5, dtype=torch.float64, generator=g) * scales @ base
    rows = PrincipalComponents(buffer(*[[row] for row in data]), blocks_within(500, 5)).rows(0, range(5))
    torch.testing.assert_close(rows @ rows.T, torch.eye(5), rtol=0, atol=1e-5)


def test_too_few_snapshots() -> None:
    with pytest.raises(ValueError, match=r"n_components: found 5 and 4 snapshots"):
        PrincipalComponents(random(4), blocks_within(18, 5))


def test_snapshots_that_do_not_differ() -> None:
    one = [torch.randn(6)]
    with pytest.raises(ValueError, match=r"4 snapshots span only 1 directions"):
        PrincipalComponents(buffer(one, one, one, one), blocks_within(6, 3))
    with pytest.raises(ValueError, match=r"span only 0 directions"):
        PrincipalComponents(buffer(*[[torch.zeros(6)]] * 4), blocks_within(6, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_spoiled_snapshot_is_named(value: float) -> None:
    good, bad = [torch.randn(3), torch.randn(2)], [torch.randn(3), torch.tensor([0.0, value])]
    with pytest.raises(ValueError, match="number 1 holds NaN or infinities in p1"):
        PrincipalComponents(buffer(good, bad, good), blocks_within(5, 2))


def test_blocks_of_another_model() -> None:
    with pytest.raises(ValueError, match="cover 17 weights of 18"):
        PrincipalComponents(random(4), blocks_within(17, 2))


def test_progress_reaches_its_end() -> None:
    told: list[tuple[str, int, int]] = []
    found = PrincipalComponents(random(4), blocks_within(18, 2), progress=lambda *said: told.append(said))
    assert told[-1] == ("comparing the snapshots, weights", 18, 18)
    found.rows(0, range(2))
    assert told[-1] == ("making directions 1 to 2, weights", 18, 18)
    blocks = blocks_within(18, 2, budget=80)
    PrincipalComponents(random(4), blocks, progress=lambda *said: told.append(said))
    assert told[-1] == ("comparing the snapshots in block 2 of 2, weights", 9, 9)


@pytest.mark.parametrize("shape", [(1, 1000), (200, 5), (2, 500), (2, 10, 50), (5, 5, 4, 10)])
def test_nothing_of_the_size_of_all_snapshots_is_held(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = random(4, 0, shape, (3,))
    whole = PrincipalComponents(snapshots, blocks_within(1003, 3)).rows(0, range(3))
    read, part = [], snapshots.part
    monkeypatch.setattr(snapshots, "part", lambda *where: read.append(found := part(*where)) or found)
    monkeypatch.setattr(principal_components, "_CHUNK", 8 * 5 * 100)
    torch.testing.assert_close(PrincipalComponents(snapshots, blocks_within(1003, 3)).rows(0, range(3)), whole)
    assert max(found.numel() for found in read) <= 100
    blocks = (Block(0, 333, 2), Block(333, 1003, 1))
    found = PrincipalComponents(snapshots, blocks)
    monkeypatch.setattr(principal_components, "_CHUNK", 1 << 20)
    torch.testing.assert_close(found.rows(1, range(1)), PrincipalComponents(snapshots, blocks).rows(1, range(1)))
