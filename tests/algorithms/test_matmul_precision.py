"""The precision of float32 products is set, forward and backward, and is gone with the attachment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchboost
from torchboost.algorithms import MatmulPrecision, lower_matmul_precision
from torchboost.core.hardware import matmul_backends
from torchboost.core.torch_private import cpu_capabilities
from torchboost.errors import NoEffectWarning

AMX = cpu_capabilities().get("amx_bf16", False)


def state() -> list[Any]:
    return [torch.get_float32_matmul_precision(), *by_backend()]


def by_backend() -> list[str]:
    return [backend.fp32_precision for backend in matmul_backends().values()]


@pytest.fixture
def untouched() -> Iterator[Callable[[], None]]:
    """Undo what a program sets, and do so at the end."""

    def undo() -> None:
        torch.backends.fp32_precision = "none"  # pyright: ignore[reportAttributeAccessIssue]
        torch.set_float32_matmul_precision("highest")
        for backend in matmul_backends().values():
            backend.fp32_precision = "none"

    yield undo
    undo()


def pair() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_it_is_set_and_restored():
    for precision in ["high", "medium"]:
        before = state()
        effect = lower_matmul_precision(precision)
        assert torch.get_float32_matmul_precision() == precision
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        effect.remove()
        assert state() == before == ["highest", "none", "none"]


@pytest.mark.parametrize(
    "choose",
    [
        lambda: torch.set_float32_matmul_precision("highest"),
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False),
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ],
)
def test_what_the_program_has_set_stays_and_is_said(choose):
    choose()
    before = by_backend()
    said = MatmulPrecision(precision="medium").idle(*pair())
    assert said is not None
    assert "the program has set the precision of float32 products (torch.backends." in said
    with pytest.warns(NoEffectWarning, match="it stays"):
        lower_matmul_precision("high").remove()
    assert by_backend() == before


def test_what_the_program_sets_meanwhile_stays():
    effect = lower_matmul_precision("high")
    torch.set_float32_matmul_precision("medium")
    effect.remove()
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize(
    "choose",
    [
        lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "ieee"),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", False),
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        lambda: setattr(torch.backends, "fp32_precision", "ieee"),
    ],
)
def test_what_the_program_sets_for_single_backends_meanwhile_stays_and_nothing_else(choose, untouched):
    choose()
    expected = by_backend()
    untouched()
    effects = lower_matmul_precision("high"), lower_matmul_precision("high")
    choose()
    for effect in effects:
        effect.remove()
    assert by_backend() == expected


def test_two_models_and_the_last_one_restores():
    for order in [(0, 1), (1, 0)]:
        effects = lower_matmul_precision("high"), lower_matmul_precision("high")
        effects[order[0]].remove()
        assert torch.get_float32_matmul_precision() == "high"
        effects[order[1]].remove()
        assert state() == ["highest", "none", "none"]


def test_a_precision_that_the_program_has_taken_back_holds_no_other(untouched):
    first = lower_matmul_precision("high")
    untouched()
    lower_matmul_precision("high").remove()
    assert state() == ["highest", "none", "none"]
    first.remove()
    assert state() == ["highest", "none", "none"]


def test_a_second_model_is_told_what_the_first_has_set():
    model, optimizer = pair()
    with lower_matmul_precision("high"):
        assert "another model has set precision='high'" in (
            MatmulPrecision(precision="medium").idle(model, optimizer) or ""
        )
        with pytest.warns(NoEffectWarning, match="another model has set precision='high'; it stays"):
            lower_matmul_precision("medium").remove()
        assert torch.get_float32_matmul_precision() == "high"
    assert state() == ["highest", "none", "none"]


def test_two_boosts_both_have_it_until_both_are_gone():
    config = {"extra": {"matmul_precision": {"precision": "medium"}}}
    first, second = (torchboost.boost(*pair(), level="O0", config=config) for _ in range(2))
    assert list(second.attached) == ["matmul_precision"], second.explain()
    first.remove()
    assert torch.get_float32_matmul_precision() == "medium"
    second.remove()
    assert state() == ["highest", "none", "none"]


def test_an_unknown_precision_is_refused():
    for made in (lower_matmul_precision, lambda precision: MatmulPrecision(precision=precision)):
        with pytest.raises(ValueError, match="precision='tf32': allowed are 'high' and 'medium'"):
            made("tf32")


def test_it_is_idle_without_anything_to_lower():
    model, optimizer = pair()
    assert "TF32 is a precision of CUDA devices" in (MatmulPrecision().idle(model, optimizer) or "")
    assert MatmulPrecision(precision="medium").idle(model, optimizer) is None
    assert "no parameter is in float32" in (MatmulPrecision().idle(model.double(), optimizer) or "")


@pytest.mark.skipif(not AMX, reason="without AMX, oneDNN computes float32 products in float32")
def test_products_on_the_cpu_round_forward_and_backward_and_are_checked():
    model, optimizer = pair()
    config = {"extra": {"matmul_precision": {"precision": "medium"}}}
    boosted = torchboost.boost(model, optimizer, level="O0", config=config)
    x, plain = torch.randn(64, 64), pair()[0]
    found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    boosted.remove()
    wanted = torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))
    assert state() == ["highest", "none", "none"]
    said = boosted.checks["matmul_precision"]
    assert "checked: the gradient differs by" in said
    off = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    assert 1e-5 < max(off) < 2**-5


def test_a_level_on_the_cpu_leaves_it_out_and_says_why():
    model, optimizer = pair()
    boosted = torchboost.boost(model, optimizer, level="O1", total_steps=10_000)
    assert "matmul_precision" not in {lever.name for lever in boosted.plan.levers}
    assert "TF32 is a precision of CUDA devices" in boosted.explain()


def test_a_second_boost_of_the_model_has_it_too():
    model, optimizer = pair()
    config = {"extra": {"matmul_precision": {"precision": "medium"}}}
    for _ in range(2):
        boosted = torchboost.boost(model, optimizer, level="O0", config=config)
        assert list(boosted.attached) == ["matmul_precision"], boosted.explain()
        assert torch.get_float32_matmul_precision() == "medium"
    boosted.remove()
    assert state() == ["highest", "none", "none"]
