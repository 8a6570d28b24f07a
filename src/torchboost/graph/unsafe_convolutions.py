"""Convolutions that oneDNN computes wrongly, or crashes on: in channels-last, and in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from torchboost.core.torch_private import AnyConv, conv_padding

__all__ = ["convolutions_unsafe_in_bfloat16", "is_unsafe_in_bfloat16", "unsafe_channels_last"]

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


def convolutions_unsafe_in_bfloat16(model: nn.Module) -> Iterator[AnyConv]:
    """Yield the convolutions on the CPU that oneDNN computes wrongly in bfloat16 for some inputs."""
    for module in model.modules():
        if isinstance(module, AnyConv) and module.stride[-1] > 1 and module.kernel_size[-1] > 1 and _is_on_cpu(module):
            yield module


def is_unsafe_in_bfloat16(module: AnyConv, inputs: Tensor) -> bool:
    """Whether oneDNN computes a strided convolution of these inputs wrongly in bfloat16.

    It does if the last dimension of the outputs, or of the inputs of a transposed convolution, has one entry: the
    gradient of the kernel then reads memory that was never written, and so does the forward pass in three dimensions.
    The results are of any size, infinity included, and differ from run to run. Processors with AVX512-BF16 or AMX have
    such kernels. Source: https://github.com/pytorch/pytorch/issues/169688; found in the oneDNN of torch 2.13.
    """
    if module.transposed:
        return inputs.shape[-1] == 1
    padded = inputs.shape[-1] + sum(conv_padding(module)[:2])
    return (padded - module.dilation[-1] * (module.kernel_size[-1] - 1) - 1) // module.stride[-1] == 0


def _writes_past_its_buffer(module: AnyConv) -> bool:
    # Not module.weight: a parametrised weight is computed when it is read, and spectral_norm changes its buffers then.
    return (
        _is_on_cpu(module) and set(module.kernel_size) == {1} and max(module.stride) > 1 and _channels(module) < _BLOCK
    )


def _is_on_cpu(module: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def _channels(module: AnyConv) -> int:
    channels = min(module.in_channels, module.out_channels) if module.transposed else module.in_channels
    return channels // module.groups
