from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ranks import run_ranks
from torchboost.algorithms.dim_reduce.basis import Block, SubspaceBasis, blocks_within, rows_of


def orthonormal(k: int, n: int, seed: int = 0) -> torch.Tensor:
    a = torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(a)[0].T.float().contiguous()


def test_projects_and_lifts_as_the_matrix_does() -> None:
    matrix, v = orthonormal(5, 200_000), torch.randn(200_000)
    basis = SubspaceBasis.of(matrix).to(matrix.device, matrix.dtype)
    assert (basis.components, basis.length) == (5, 200_000)
    torch.testing.assert_close(basis.project(v), matrix.double() @ v.double(), rtol=0, atol=3e-5)
    coordinates = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(basis.lift(coordinates), coordinates.float() @ matrix)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 9))
def test_every_row_has_one_owner_and_all_own_alike(components: list[int], ranks: int) -> None:
    blocks = [Block(100 * i, 100 * i + 100, k) for i, k in enumerate(components)]
    shares = [rows_of(blocks, rank, ranks) for rank in range(ranks)]
    for i, block in enumerate(blocks):
        assert [row for share in shares for row in share[i]] == list(range(block.components))
    sizes = [sum(map(len, share)) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(40, 500), st.integers(1, 32), st.integers(1, 4), st.integers(1, 40))
def test_blocks_cover_the_weights_and_keep_the_budget(length: int, components: int, ranks: int, tenth: int) -> None:
    smallest = 4 * (length + components) * -(-components // ranks) // components + 4 * ranks
    budget = max(smallest, 4 * components * length * tenth // 10 // ranks)
    blocks = blocks_within(length, components, budget=budget, ranks=ranks)
    assert [b.start for b in blocks] == [0, *(b.stop for b in blocks[:-1])]
    assert blocks[-1].stop == length
    assert sum(b.components for b in blocks) == components
    for rank in range(ranks):
        rows = rows_of(blocks, rank, ranks)
        assert sum(4 * len(mine) * (b.stop - b.start) for b, mine in zip(blocks, rows, strict=True)) <= budget


def test_a_budget_without_room_for_one_direction_per_block() -> None:
    with pytest.raises(ValueError, match=r"need 4000 bytes over 2 ranks.*the budget is 1000 bytes"):
        blocks_within(1000, 4, budget=1000, ranks=2)


def test_without_a_budget_there_is_one_block() -> None:
    assert blocks_within(100, 8) == (Block(0, 100, 8),)


@pytest.mark.parametrize("components", [0, 11])
def test_as_many_directions_as_weights_at_most(components: int) -> None:
    with pytest.raises(ValueError, match="at least 1 and at most 10"):
        blocks_within(10, components)


def test_blocks_project_their_own_weights_only() -> None:
    blocks = (Block(0, 6, 2), Block(6, 10, 1))
    rows = [orthonormal(2, 6), orthonormal(1, 4)]
    basis = SubspaceBasis(blocks, rows)
    dense = torch.block_diag(*rows)
    v, c = torch.randn(10), torch.randn(1, 3, dtype=torch.float64)
    torch.testing.assert_close(basis.project(v), (dense @ v).double())
    torch.testing.assert_close(basis.lift(c), c.float() @ dense)


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        (torch.ones(2, 4), "not orthonormal: a product of two is off by 4"),
        (torch.tensor([[1.0, float("nan")]]), "NaN or infinities"),
        (torch.eye(3)[:, :2], r"shape \(3, 2\)"),
        (torch.ones(4), r"shape \(4,\)"),
    ],
)
def test_what_is_no_basis_is_refused(matrix: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SubspaceBasis.of(matrix)


def test_the_references_rows_need_not_be_orthonormal() -> None:
    assert SubspaceBasis.of(3 * torch.ones(1, 4), orthonormal=False).components == 1


def test_rows_must_be_those_of_the_blocks() -> None:
    with pytest.raises(ValueError, match=r"found shape \(1, 4\).*this rank holds \(2, 4\)"):
        SubspaceBasis((Block(0, 4, 2),), [torch.eye(1, 4)])


def _on_ranks(k: int) -> tuple[list[float], list[float], int]:
    matrix = orthonormal(k, 300)
    block = Block(0, 300, k)
    (mine,) = rows_of((block,), dist.get_rank(), dist.get_world_size())
    basis = SubspaceBasis((block,), [matrix[mine.start : mine.stop]], dist.group.WORLD)
    v = torch.arange(300.0) / 300
    return basis.project(v).tolist(), basis.lift(torch.ones(1, k, dtype=torch.float64))[0].tolist(), len(mine)


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "k"), [(2, 32), (4, 30), (3, 2)])
def test_ranks_that_share_the_rows_project_alike(ranks: int, k: int) -> None:
    found = run_ranks(_on_ranks, ranks, k)
    assert all(one[:2] == found[0][:2] for one in found)
    assert sum(rows for _, _, rows in found) == k
    matrix, v = orthonormal(k, 300), torch.arange(300.0) / 300
    torch.testing.assert_close(torch.tensor(found[0][0]), matrix @ v, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(found[0][1]), matrix.sum(0), rtol=1e-5, atol=1e-6)
