"""States of the random number generators of this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["generator_states", "set_generator_states"]


def generator_states(model: nn.Module) -> list[Tensor]:
    """Return the states of torch's generators: the CPU's, then those of the accelerators that hold the model."""
    states = [torch.get_rng_state()]
    for device in _accelerators(model):
        with torch.accelerator.device_index(device.index):
            states.append(torch.get_device_module(device).get_rng_state())
    return states


def set_generator_states(states: Sequence[Tensor], model: nn.Module) -> None:
    """Restore the states from :func:`generator_states`, for as many accelerators as this process has.

    A state of another kind of device, which has another size, is skipped.
    """
    torch.set_rng_state(states[0])
    for device, state in zip(_accelerators(model), states[1:], strict=False):
        with torch.accelerator.device_index(device.index):
            module = torch.get_device_module(device)
            if module.get_rng_state().shape == state.shape:
                module.set_rng_state(state)


def _accelerators(model: nn.Module) -> list[torch.device]:
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return []
    return sorted({param.device for param in model.parameters() if param.device.type == kind.type}, key=str)
