"""One executor for both ways in: the transforms run in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchboost.optim.executor import Chain

from torchboost.optim.pipeline import Gradients
from torchboost.optim.transforms import Centralize, ClipNorm, ClipValue, Decay, Unscale


def given(dtype: torch.dtype = torch.float32) -> Gradients:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((6, 5), (5,), (4, 3, 2, 2))]
    return Gradients(list(params), [3 * torch.randn_like(p).detach() for p in params], [{}] * 3, [])


def recall(name: str, params: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{} for _ in params]


def one_by_one(chain: Sequence[Any]) -> list[Tensor]:
    """In float64."""
    gradients = given()
    gradients.params = [param.detach().double() for param in gradients.params]
    gradients.grads = [grad.double() for grad in gradients.grads]
    for transform in chain:
        transform(gradients)
    return gradients.grads


CHAINS = [
    (ClipNorm(1.0),),
    (Centralize(), ClipNorm(1.0)),
    (Unscale(8.0), Decay(0.1), Centralize(), ClipNorm(0.5)),
    (Unscale(8.0), ClipNorm(0.5)),
    (Unscale(8.0), Centralize()),
    (Decay(0.3),),
    (Centralize(), ClipNorm(1.0), ClipValue(0.1)),
    (ClipValue(0.5), Centralize(), ClipNorm(1.0)),
    (ClipNorm(1.0), Centralize()),
    (ClipNorm(0.5, norm_type=1.0), Unscale(2.0)),
    (ClipNorm(1e6),),
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_equals_the_transforms_one_by_one(chain):
    gradients = given()
    with torch.no_grad():
        Chain(chain).run(gradients, recall)
    for found, wanted in zip(gradients.grads, one_by_one(chain), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)


def test_an_empty_chain_and_no_gradients():
    gradients = given()
    before = [grad.clone() for grad in gradients.grads]
    Chain(()).run(gradients, recall)
    assert all(map(torch.equal, gradients.grads, before))
    Chain((Centralize(), ClipNorm(1.0))).run(Gradients([], [], [], []), recall)


def test_a_tensor_that_is_the_gradient_of_two_parameters_is_changed_once_for_each():
    gradients = given(torch.float64)
    both = gradients.grads[0]
    other = nn.Parameter(torch.zeros_like(both))
    gradients = Gradients([gradients.params[0], other], [both, both], [{}] * 2, [])
    wanted = both / 8
    with torch.no_grad():
        Chain((Unscale(8.0),)).run(gradients, recall)
    assert torch.equal(gradients.grads[0], wanted)
    assert torch.equal(gradients.grads[1], wanted)
