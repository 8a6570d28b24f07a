"""A plugin of pytest: every tensor that a test makes without a device lies on the GPU.

Numbers that are drawn with a generator of the CPU are drawn there and moved. ``.numpy()`` copies to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

DEVICE = "cuda"
DRAWS = ("randn", "rand", "randint", "randperm")


def _moved(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drawn(*args: Any, generator: Any = None, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
        if generator is None or device is not None:
            return draw(*args, generator=generator, device=device, requires_grad=requires_grad, **kwargs)
        made = draw(*args, generator=generator, device=generator.device, **kwargs)
        return made.to(torch.get_default_device()).requires_grad_(requires_grad)

    return drawn


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    numpy = torch.Tensor.numpy

    def copied(self: torch.Tensor, *, force: bool = False) -> Any:
        return numpy(self.cpu(), force=force)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", copied)
        for name in DRAWS:
            patch.setattr(torch, name, _moved(getattr(torch, name)))
        torch.set_default_device(DEVICE)
        yield
        torch.set_default_device(None)
