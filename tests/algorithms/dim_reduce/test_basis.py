"""Directions: their products, the principal components of snapshots, and the files they come from."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from tests.support.ranks import run_ranks
from torchboost.algorithms.dim_reduce import basis as module
from torchboost.algorithms.dim_reduce.basis import (
    DimReduceBasis,
    principal_components,
    read_checkpoints,
    read_matrix,
    rows_of,
    shapes_of,
    write_matrix,
)

LAYOUT = {"a": (4, 3), "b": (5,)}
SHAPES = ((4, 3), (5,), ())


def orthonormal(k: int, n: int, seed: int = 0) -> torch.Tensor:
    a = torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(a)[0].T.float().contiguous()


def random(count: int, seed: int = 0, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[list[torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, dtype=torch.float64, generator=g) for s in shapes] for _ in range(count)]


def matrix_of(snapshots: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([t.reshape(-1) for t in snapshot]) for snapshot in snapshots])


def test_projects_and_lifts_as_the_matrix_does() -> None:
    matrix, v = orthonormal(5, 200_000), torch.randn(200_000)
    basis = DimReduceBasis(matrix)
    assert (basis.components, basis.length) == (5, 200_000)
    torch.testing.assert_close(basis.project(v), matrix.double() @ v.double(), rtol=0, atol=3e-5)
    coordinates = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(basis.lift(coordinates), coordinates.float() @ matrix)


@given(st.integers(1, 99), st.integers(1, 9))
def test_every_row_has_one_rank_and_all_ranks_have_alike(components: int, ranks: int) -> None:
    shares = [rows_of(components, rank, ranks) for rank in range(ranks)]
    assert [row for share in shares for row in share] == list(range(components))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_what_is_no_basis_is_refused() -> None:
    for matrix, message in (
        (torch.ones(2, 4), "not orthonormal: a product is off by"),
        (torch.tensor([[1.0, float("nan")]]), "NaN or infinities"),
        (torch.eye(3)[:, :2], "found 3; a subspace of 2 weights has at least 1 and at most 2"),
        (torch.ones(0, 2), "found 0; a subspace"),
        (torch.ones(4), r"shape \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            DimReduceBasis(matrix).check_orthonormal()
    with pytest.raises(ValueError, match="has 1 rows; rank 0 of 1 holds rows 0 to 2 of 2"):
        DimReduceBasis(torch.eye(1, 4), None, 2)


def _on_ranks() -> tuple[list[tuple[list[float], list[float], int]], str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    products = []
    for k in (32, 2):
        mine = rows_of(k, rank, ranks)
        basis = DimReduceBasis(orthonormal(k, 300)[mine.start : mine.stop], dist.group.WORLD, k)
        v, ones = torch.arange(300.0) / 300, torch.ones(1, k, dtype=torch.float64)
        products.append((basis.project(v).tolist(), basis.lift(ones)[0].tolist(), len(mine)))
    spoiled = orthonormal(4, 300)
    spoiled[-1] = spoiled[0]  # two rows that no rank holds together
    mine = rows_of(4, rank, ranks)
    with pytest.raises(ValueError, match="not orthonormal") as caught:
        DimReduceBasis(spoiled[mine.start : mine.stop], dist.group.WORLD, 4).check_orthonormal()
    return products, str(caught.value)


@pytest.mark.dist
def test_ranks_that_share_the_rows_project_and_refuse_alike() -> None:
    answers = run_ranks(_on_ranks, 3)
    assert len({error for _, error in answers}) == 1
    for place, k in enumerate((32, 2)):
        shared = [products[place] for products, _ in answers]
        assert all(one[:2] == shared[0][:2] for one in shared)
        assert sum(rows for _, _, rows in shared) == k
        matrix, v = orthonormal(k, 300), torch.arange(300.0) / 300
        torch.testing.assert_close(torch.tensor(shared[0][0]), matrix @ v, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(shared[0][1]), matrix.sum(0), rtol=1e-5, atol=1e-6)


@given(st.integers(3, 9), st.integers(1, 8), st.integers(0, 99))
def test_components_are_the_right_singular_vectors(count: int, k: int, seed: int) -> None:
    k = min(k, count - 1)
    snapshots = random(count, seed)
    data = matrix_of(snapshots)
    rows = principal_components(snapshots, k)
    _, _, vectors = torch.linalg.svd(data - data.mean(0), full_matrices=False)
    for row, vector in zip(rows, vectors, strict=False):
        sign = vector[vector.abs().argmax()].sign()
        torch.testing.assert_close(row, vector * sign, rtol=1e-6, atol=1e-7)


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = random(5, 1, ((40, 3), (7,), (0,), (2, 2, 5)))
    whole = principal_components(snapshots, 3)
    monkeypatch.setattr(module, "_PIECE", 8 * 6 * 10)
    assert len(list(module._pieces(snapshots))) > 14
    parts = principal_components(snapshots, 3)
    torch.testing.assert_close(parts, whole)
    assert torch.equal(principal_components(snapshots, 3, range(1, 3)), parts[1:])


def test_as_many_components_as_snapshots_end_with_the_mean() -> None:
    snapshots = random(4, 3)
    rows = principal_components(snapshots, 4)
    torch.testing.assert_close(rows @ rows.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-9)
    mean = matrix_of(snapshots).mean(0)
    torch.testing.assert_close(rows.T @ (rows @ mean), mean)


def test_small_components_beside_large_ones_are_orthonormal() -> None:
    scales = torch.tensor([1.0, 1e-1, 1e-2, 1e-3, 1e-4], dtype=torch.float64)
    data = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * scales
    rows = principal_components([[row] for row in data @ orthonormal(5, 500).double()], 5)
    torch.testing.assert_close(rows @ rows.T, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-6)


def test_snapshots_that_do_not_serve() -> None:
    same, zeros = [torch.randn(6)], [torch.zeros(6)]
    spoiled = [torch.tensor([float("nan")] * 6)]
    for snapshots, k, message in (
        ([same] * 4, 5, "found 5 and 4 snapshots"),
        ([same] * 4, 3, "4 snapshots span only 1 directions"),
        ([zeros] * 4, 2, "span only 0 directions"),
        ([same, spoiled, same], 2, "number 1 holds NaN or infinities in parameter 0"),
        ([[torch.full((6,), 1e200, dtype=torch.float64)], [torch.zeros(6)]], 1, "their products overflow"),
    ):
        with pytest.raises(ValueError, match=message):
            principal_components(snapshots, k)


def test_components_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "basis.npy"
    snapshots = random(5, shapes=tuple(LAYOUT.values()))
    rows = principal_components(snapshots, 3)
    assert rows.dtype is torch.float64
    write_matrix(path, rows, LAYOUT)
    rows = rows.float()
    assert np.array_equal(np.load(path), rows.numpy())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["basis.json", "basis.npy"]
    assert torch.equal(read_matrix(path, 3, LAYOUT, range(1, 3)), rows[1:])
    for other in ({"b": (5,), "a": (4, 3)}, {"module.a": (4, 3), "module.b": (5,)}):
        with pytest.raises(
            ValueError, match=r"the columns of basis\.npy belong to other parameters, or are in another"
        ):
            read_matrix(path, 3, other, range(3))
    for text in ('{"answer": 42}', "no json", "[]"):
        path.with_suffix(".json").write_text(text)
        with pytest.raises(ValueError, match=r"basis\.json: the columns"):
            read_matrix(path, 3, LAYOUT, range(3))
    path.with_suffix(".json").unlink()
    assert torch.equal(read_matrix(path, 3, LAYOUT, range(3)), rows)


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))


def save(path: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = {name: value.clone() for name, value in model().state_dict().items()}
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)
    return state


def test_checkpoints_are_the_parameters(tmp_path: Path) -> None:
    for suffix in [".safetensors", ".pt", ".pth"]:
        folder = tmp_path / suffix
        folder.mkdir()
        states = [save(folder / f"step-{i}{suffix}", seed=i) for i in range(3)]
        snapshots = read_checkpoints(folder, shapes_of(model()))
        for snapshot, state in zip(snapshots, states, strict=True):
            for tensor, name in zip(snapshot, shapes_of(model()), strict=True):
                assert torch.equal(tensor, state[name])


def test_a_state_dict_may_lie_under_a_key_and_have_the_prefix_of_ddp(tmp_path: Path) -> None:
    state, plain = model().state_dict(), shapes_of(model())
    for prefix in ("", "module."):
        torch.save({"epoch": 3, "model": {f"{prefix}{n}": value for n, value in state.items()}}, tmp_path / "a.pt")
        (snapshot,) = read_checkpoints(tmp_path, plain)
        assert all(torch.equal(t, state[name]) for t, name in zip(snapshot, plain, strict=True))
    with pytest.raises(ValueError, match=r"missing backbone\.0\.weight"):
        read_checkpoints(tmp_path, {f"backbone.{name}": shape for name, shape in plain.items()})


def test_a_shared_parameter_counts_once_and_a_frozen_one_not_at_all() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net[1].bias.requires_grad_(False)
    assert shapes_of(net) == {"0.weight": (3, 3), "0.bias": (3,)}


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_bomb_is_refused_and_does_not_go_off(tmp_path: Path) -> None:
    crater = tmp_path / "crater"
    for name in ("zip", "plain"):
        (tmp_path / name).mkdir()
    torch.save({"weight": Bomb(crater)}, tmp_path / "zip" / "a.pt")
    plain = tmp_path / "plain" / "a.pt"
    plain.write_bytes(pickle.dumps({"weight": Bomb(crater)}))
    np.save(tmp_path / "basis.npy", np.array([Bomb(crater)], dtype=object), allow_pickle=True)
    for name in ("zip", "plain"):
        with pytest.raises(ValueError, match="refused: it is not a file of tensors only"):
            read_checkpoints(tmp_path / name, shapes_of(model()))
    with pytest.raises(ValueError, match=r"basis\.npy: refused: it is not an \.npy file of numbers"):
        read_matrix(tmp_path / "basis.npy", 1, LAYOUT, range(1))
    assert not crater.exists()
    pickle.loads(plain.read_bytes())
    assert crater.exists(), "the bomb is a real one"


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for name, content, error, message in (
        ("a.pt", b"", ValueError, "not a file of tensors only"),
        ("a.pt", b"not a checkpoint", ValueError, "not a file of tensors only"),
        ("a.safetensors", b"\x00" * 4, ValueError, "not a safetensors file"),
        ("a.bin", b"x", ValueError, "found no checkpoints; save some whose names end in .safetensors, .pt, .pth"),
        ("tensor.pt", torch.ones(3), ValueError, "found a Tensor; a checkpoint is a state dict"),
        ("nested.pt", {"net": {"a": torch.ones(2)}}, ValueError, "another model: missing .* it holds no weights"),
    ):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(error, match=message):
            read_checkpoints(tmp_path, shapes_of(model()))
        path.unlink()
    save(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=re.escape("missing 9.bias; of another shape 1.weight (3,) (needed (2, 3))")):
        read_checkpoints(tmp_path, {"1.weight": (2, 3), "9.bias": (7,)})
