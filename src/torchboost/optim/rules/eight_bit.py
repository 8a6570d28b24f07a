"""Moments in 8 bits: a code per entry, and a float32 scale per block of entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.errors import IncompatibleError
from torchboost.optim.rules.batch import Batch
from torchboost.optim.rules.masters import IN_CACHE, PIECE, parts

__all__ = [
    "BLOCK",
    "LEAST",
    "SCALE",
    "check_packable",
    "is_packed",
    "pack",
    "packed_state",
    "packs",
    "unpack",
    "unpacked_pieces",
]

BLOCK = 256
"""Entries that share a scale."""

LEAST = 4096
"""Tensors with fewer entries stay in float32: biases and norms, which take little memory."""

SCALE = "_scale"
"""What follows the name of a moment in the name of its scales."""

SIGNED = ("exp_avg",)
"""Moments that may be negative."""


def packs(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the moments of a parameter are kept in 8 bits."""
    return bool(group.get("moments_8bit")) and param.numel() >= LEAST


def is_packed(state: Mapping[str, Any]) -> bool:
    """Whether a state holds moments in 8 bits."""
    return "exp_avg" + SCALE in state


def check_packable(param: Tensor, group: Mapping[str, Any]) -> None:
    """Refuse parameters whose moments cannot be kept in 8 bits.

    Raises:
        IncompatibleError: A complex or a sharded tensor.
    """
    if packs(param, group) and (param.is_complex() or hasattr(param, "to_local")):
        raise IncompatibleError(
            f"moments_8bit=True is for real tensors that are not sharded, found a {type(param).__name__} of "
            f"{param.dtype}, shape {tuple(param.shape)}. Leave moments_8bit out of its group."
        )


def pack(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes of the shape of ``values`` in uint8, and the entry of largest magnitude of each block in float32.

    A block is ``BLOCK`` entries in the order of ``flatten()``. Each code stands for a share of the largest entry; the
    shares are denser near zero, see :func:`unpack`. A block with an entry that is not finite becomes nan. Packing what
    was unpacked changes nothing.
    Cost: six temporary tensors of the size of ``values`` at most.

    Source: T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.

    Args:
        values: Any shape, float32.
        signed: Whether entries may be negative; if not, they get twice as many codes.
    """
    blocks = _blocks(values)
    scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    shares = blocks / torch.where(scales == 0, 1.0, scales)
    # The first 16 bits of a float32 choose the code: rounding to them changes a share by at most 0.4 percent.
    index = shares.bfloat16().view(torch.int16).int().bitwise_and_(0xFFFF).flatten()
    codes = _codes(signed, values.device).index_select(0, index)[: values.numel()]
    packed = torch.empty_like(values, dtype=torch.uint8, memory_format=torch.preserve_format)
    return packed.copy_(codes.view(values.shape)), scales.flatten()


def unpack(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the float32 values of :func:`pack`.

    A value differs from the packed one by at most 1 percent of the largest magnitude of its block (0.6 percent if
    unsigned), and by at most 7 percent of itself if it is at least a tenth of that magnitude (4 percent if unsigned).
    """
    shares = _shares(signed, codes.device).index_select(0, codes.flatten().int())
    values = (_blocks(shares) * scales[:, None]).flatten()[: codes.numel()]
    found = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    return found.copy_(values.view(codes.shape))


def unpacked_pieces(batch: Batch, group: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Batch]:
    """Yield a batch in parts with moments in float32, and pack them again when the next part is requested.

    Args:
        batch: The tensors to update.
        group: The param group.
        keys: The moments.
    """
    for part in parts(batch, IN_CACHE if batch.params[0].device.type == "cpu" else PIECE):
        states = [_unpacked(state, keys) if is_packed(state) else state for state in part.states]
        yield Batch(part.params, part.grads, states)
        for kept, state, param in zip(part.states, states, part.params, strict=True):
            if not packs(param, group):
                kept.update(state)
                for key in keys:
                    kept.pop(key + SCALE, None)
                continue
            kept.update(packed_state(state, keys))


def packed_state(state: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return a state with its moments in 8 bits."""
    packed = dict(state)
    for key in keys:
        packed[key], packed[key + SCALE] = pack(state[key].float(), signed=key in SIGNED)
    return packed


def _unpacked(state: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    moments = {key: unpack(state[key], state[key + SCALE], signed=key in SIGNED) for key in keys}
    scales = {key + SCALE for key in keys}
    return {**{key: value for key, value in state.items() if key not in scales}, **moments}


def _blocks(values: Tensor) -> Tensor:
    flat = values.flatten()
    return F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _map(signed: bool) -> Tensor:
    """Return the 256 shares in order: seven decades, each with twice the levels of the one below, and 0 and 1."""
    shares = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        shares += [middles, -middles] if signed else [middles]
    return torch.cat(shares).sort().values


@cache
def _shares(signed: bool, device: torch.device) -> Tensor:
    return _map(signed).float().to(device)


@cache
def _codes(signed: bool, device: torch.device) -> Tensor:
    """Return the code of the nearest share for the first 16 bits of every float32."""
    shares = _map(signed)
    values = (torch.arange(2**16, dtype=torch.int64) << 16).to(torch.int32).view(torch.float32).double()
    middles = (shares[:-1] + shares[1:]) / 2
    return torch.bucketize(values.nan_to_num(0.0, 1.0, -1.0), middles).to(torch.uint8).to(device)
