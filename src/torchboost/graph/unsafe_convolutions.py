"""Convolutions that oneDNN computes wrongly, or crashes on, if their input is channels-last."""

from __future__ import annotations

from torch import nn

from torchboost.core.torch_private import AnyConv

__all__ = ["unsafe_channels_last"]

_BLOCK = 16
"""Channels that one AVX-512 register holds. AVX2 kernels fail below 8."""


def unsafe_channels_last(model: nn.Module) -> str | None:
    """Return why training ``model`` channels-last on the CPU writes past a buffer; None if it does not.

    The gradient of a 1x1 kernel with a stride above 1 and fewer than 16 input channels in a group does. The process
    then crashes, hangs, or computes wrong gradients. ``torch.compile`` makes the inputs of convolutions channels-last
    too. Source: https://github.com/uxlfoundation/oneDNN/issues/6035, found in the oneDNN of torch 2.13.
    """
    for name, module in model.named_modules():
        if isinstance(module, AnyConv) and _writes_past_its_buffer(module):
            return (
                f"{name or 'the model'} is a 1x1 convolution of {_channels(module)} channels with stride "
                f"{module.stride}, whose gradient oneDNN computes wrongly in this format (oneDNN issue 6035)"
            )
    return None


def _writes_past_its_buffer(module: AnyConv) -> bool:
    # Not module.weight: a parametrised weight is computed when it is read, and spectral_norm changes its buffers then.
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    return on_cpu and set(module.kernel_size) == {1} and max(module.stride) > 1 and _channels(module) < _BLOCK


def _channels(module: AnyConv) -> int:
    channels = min(module.in_channels, module.out_channels) if module.transposed else module.in_channels
    return channels // module.groups
