"""The iteration equals a plain one in float64, in both of its forms, and finds orthogonal matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchboost.optim.rules import muon as newton_schulz
from torchboost.optim.rules.muon import QUINTIC, faster_dtype, orthogonalized

SHAPES = [(7, 7), (64, 64), (64, 100), (100, 64), (16, 144), (300, 20), (1, 5), (5, 1), (3, 8, 24), (2, 2, 24, 8)]


def plainly(matrix: Tensor, steps: int = 5) -> Tensor:
    """The published algorithm, one matrix at a time, in float64."""
    a, b, c = QUINTIC
    x = matrix.double()
    if x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def random(shape: tuple[int, ...], spectrum: str = "flat") -> Tensor:
    """Gaussian matrices, or ones whose singular values fall by a factor of 10,000."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if spectrum == "steep":
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        x = u * torch.logspace(0, -4, s.shape[-1], dtype=torch.float64) @ v
    return x


@pytest.mark.parametrize("spectrum", ["flat", "steep"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_equals_float64_to_1e_5(shape, spectrum):
    matrices = random(shape, spectrum).float()
    found = orthogonalized(matrices, [QUINTIC] * 5)
    assert found.shape == matrices.shape
    assert found.dtype == torch.float32
    flat = matrices.reshape(-1, *shape[-2:])
    wanted = torch.stack([plainly(one) for one in flat]).reshape(shape)
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8])
def test_both_forms_are_one_polynomial(steps, monkeypatch):
    matrix = random((20, 60)).float()
    by_gram = orthogonalized(matrix, [QUINTIC] * steps)
    monkeypatch.setattr(newton_schulz, "ELONGATED", 100)
    plain = orthogonalized(matrix, [QUINTIC] * steps)
    torch.testing.assert_close(by_gram, plain, rtol=1e-4, atol=1e-5)


def test_the_singular_values_become_about_1_and_the_directions_stay():
    matrix = random((40, 90)).float()
    found = orthogonalized(matrix, [QUINTIC] * 5)
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert float((found * (u @ v)).sum() / 40) > 0.8


def test_other_coefficients_for_each_iteration():
    """The cubic Newton-Schulz polynomial converges to the orthogonal matrix itself."""
    matrix = random((12, 30)).float()
    found = orthogonalized(matrix, [(1.5, -0.5, 0.0)] * 30)
    torch.testing.assert_close(found @ found.T, torch.eye(12), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(64, 64), (16, 144)])
def test_bfloat16_is_near_and_finite_for_steep_spectra(shape):
    for spectrum, most in (("flat", 0.05), ("steep", 0.3)):
        matrix = random(shape, spectrum).float()
        found = orthogonalized(matrix.bfloat16(), [QUINTIC] * 5)
        assert found.dtype == torch.bfloat16
        wanted = plainly(matrix)
        assert float((found.double() - wanted).norm() / wanted.norm()) < most


def test_zeros_stay_zeros_and_scales_do_not_matter():
    assert not orthogonalized(torch.zeros(3, 4), [QUINTIC] * 5).any()
    matrix = random((9, 11)).float()
    for scale in (1e-4, 1e15):
        torch.testing.assert_close(
            orthogonalized(scale * matrix, [QUINTIC] * 5), orthogonalized(matrix, [QUINTIC] * 5), rtol=1e-3, atol=1e-4
        )
    assert orthogonalized(torch.full((3, 4), float("nan")), [QUINTIC]).isnan().all()


def test_a_matrix_does_not_depend_on_those_of_its_batch():
    stack = random((6, 10, 25)).float()
    together = orthogonalized(stack, [QUINTIC] * 5)
    for one, found in zip(stack, together, strict=True):
        torch.testing.assert_close(orthogonalized(one, [QUINTIC] * 5), found, rtol=1e-5, atol=1e-6)


def test_the_input_is_not_changed():
    matrix = random((4, 6)).float()
    before = matrix.clone()
    orthogonalized(matrix, [QUINTIC] * 5).mul_(2)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize(("ratio", "wanted"), [(2.0, torch.bfloat16), (1.0, torch.float32), (0.2, torch.float32)])
def test_the_precision_is_measured_on_a_cpu_and_bfloat16_elsewhere(ratio, wanted, monkeypatch, bfloat16):
    bfloat16(ratio, None)
    assert faster_dtype(torch.device("cuda")) is torch.bfloat16
    assert faster_dtype(torch.device("cpu")) is wanted
    monkeypatch.setattr(newton_schulz.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(newton_schulz.dist, "get_world_size", lambda: 2)
    assert faster_dtype(torch.device("cpu")) is torch.float32
