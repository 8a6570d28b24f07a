"""Fused kernels that compute something else are found, and no optimizer is given to them."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW

from torchboost.optim.rules.options import miscomputes

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_of_full_precision_are_right(kind, dtype):
    assert not miscomputes(kind, dtype, CPU)


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, Adagrad])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_verdict_is_that_of_a_step_in_double_precision(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    weights, gradient = torch.randn(2, 200, generator=generator, dtype=torch.float64).to(dtype)
    low, high = weights.clone().requires_grad_(), weights.double().requires_grad_()
    for parameter, fused in ((low, True), (high, False)):
        optimizer = kind([parameter], lr=0.5, fused=fused)
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    far = (low.double() - high).abs().max() > 0.1
    assert miscomputes(kind, dtype, CPU) == far


def test_what_cannot_be_tried_is_left_to_torch():
    assert not miscomputes(SGD, torch.float8_e4m3fn, CPU)


def test_a_kernel_that_is_wrong_is_found():
    class Wrong(SGD):
        def step(self, closure=None):
            super().step(closure)
            if self.param_groups[0]["fused"]:
                self.param_groups[0]["params"][0].data[8:16] += 1

    assert miscomputes(Wrong, torch.float32, CPU)


def test_the_trial_works_in_inference_mode_and_draws_no_numbers():
    class Own(SGD):
        pass

    state = torch.get_rng_state()
    with torch.inference_mode():
        assert not miscomputes(Own, torch.float32, CPU)
    assert torch.equal(state, torch.get_rng_state())
