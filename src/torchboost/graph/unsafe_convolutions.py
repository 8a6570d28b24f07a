"""Convolutions that oneDNN computes wrongly, or crashes on: in channels-last, and in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from torchboost.core.torch_private import AnyConv, conv_padding

__all__ = ["convolutions_unsafe_in_bfloat16", "is_unsafe_in_bfloat16", "unsafe_channels_last"]

_BLOCK = 16
"""Channels that one AVX-512 register holds. AVX2 kernels fail below 8."""


def unsafe_channels_last(model: nn.Module) -> str | None:
    """Return why training ``model`` channels-last on the CPU goes wrong; None if it does not.

    The gradient of a 1x1 kernel with a stride above 1 and fewer than 16 input channels in a group is written past its
    buffer. The process then crashes, hangs, or computes wrong gradients. Source:
    https://github.com/uxlfoundation/oneDNN/issues/6035, found in the oneDNN of torch 2.13.

    Two kinds go wrong on narrow images. A convolution of one channel with a stride above 1 in the last dimension alone
    computes wrong outputs if they are one entry wide. A kernel that is one entry wide, but has a dilation and a stride
    above 1 in that dimension, crashes the process if the inputs are one entry wide and padded.

    ``torch.compile`` makes the inputs of convolutions channels-last too.
    """
    for name, module in model.named_modules():
        if not isinstance(module, AnyConv) or not _is_on_cpu(module):
            continue
        # Not module.weight: a parametrised weight is computed when it is read, and spectral_norm changes its buffers.
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        channels = module.out_channels if module.transposed else module.in_channels
        narrowest = min(channels, module.in_channels) // module.groups
        layer = f"{name or 'the model'} is a convolution with a kernel of {kernel}, stride {stride}"
        if set(kernel) == {1} and max(stride) > 1 and narrowest < _BLOCK:
            return (
                f"{layer} and {narrowest} channels, whose gradient oneDNN computes wrongly in this format "
                "(oneDNN issue 6035)"
            )
        if kernel[-1] == 1:
            wrong = stride[-1] > 1 and dilation[-1] > 1
        else:
            wrong = channels == 1 and stride[-1] > 1 and stride[-2:-1] == (1,)
        if wrong:
            return f"{layer} and dilation {dilation}, which oneDNN computes wrongly in this format on narrow images"
    return None


def convolutions_unsafe_in_bfloat16(model: nn.Module) -> Iterator[AnyConv]:
    """Yield the convolutions on the CPU that oneDNN computes wrongly in bfloat16 for some inputs."""
    for module in model.modules():
        if not isinstance(module, AnyConv) or max(module.kernel_size) == 1 or not _is_on_cpu(module):
            continue
        if any(conv_padding(module)) or _has_stride(module):
            yield module


def is_unsafe_in_bfloat16(module: AnyConv, inputs: Tensor) -> bool:
    """Whether oneDNN computes a convolution of these inputs wrongly in bfloat16.

    It does in two situations; for a transposed convolution, read outputs for inputs, and the other way round:

    - In some dimension the kernel is wider than the inputs before padding, such as a kernel of 3 on a depth of 2.
    - The stride is above 1 and the last dimension of the outputs has one entry.

    The gradient of the kernel then reads memory that was never written, and so does the forward pass in three
    dimensions. The results are of any size, infinity included, and differ from run to run. Processors with AVX512-BF16
    or AMX have such kernels. Source: https://github.com/pytorch/pytorch/issues/169688; found in the oneDNN of torch
    2.13.
    """
    kernels, strides = module.kernel_size, module.stride
    reaches = [dilation * (kernel - 1) for dilation, kernel in zip(module.dilation, kernels, strict=True)]
    padding = [sum(conv_padding(module)[at : at + 2]) for at in range(2 * len(kernels) - 2, -1, -2)]
    given = list(inputs.shape[-len(kernels) :])
    if module.transposed:
        few, more = given[-1], module.output_padding
        sizes = zip(given, strides, padding, reaches, more, strict=True)
        given = [(size - 1) * stride - pad + reach + 1 + extra for size, stride, pad, reach, extra in sizes]
    else:
        few = (given[-1] + padding[-1] - reaches[-1] - 1) // strides[-1] + 1
    wider = any(reach >= size for reach, size in zip(reaches, given, strict=True))
    return wider or (_has_stride(module) and few == 1)


def _has_stride(module: AnyConv) -> bool:
    return module.stride[-1] > 1 and module.kernel_size[-1] > 1


def _is_on_cpu(module: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in module.parameters())
