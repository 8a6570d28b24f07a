"""Weights and moments in low precision: a float32 copy ("master"), stochastic rounding, moments in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.core.torch_private import foreach, memory_stamp
from torchboost.errors import IncompatibleError
from torchboost.optim.tensors import Batch

__all__ = [
    "IN_CACHE",
    "LOW_PRECISION",
    "SCALE",
    "Stamps",
    "check_narrow",
    "check_packable",
    "full_pieces",
    "has_master",
    "is_packed",
    "is_rounded",
    "local",
    "packed_state",
    "packs",
    "pieces",
    "rounds_at_random",
    "stochastic",
    "widened",
    "with_full_moments",
]

_DTYPE = attrgetter("dtype")

LOW_PRECISION = (torch.float16, torch.bfloat16)

IN_CACHE = 2**17
"""Entries that are updated together on the CPU: half a megabyte per tensor of the update, which fits into the cache."""

PIECE = 2**22
"""Entries whose gradients are widened together: 16 MiB, unless one tensor is larger."""

BLOCK = 256
"""Entries that share a scale."""

LEAST = 4096
"""Tensors with fewer entries stay in float32: biases and norms, which take little memory."""

SCALE = "_scale"
"""What follows the name of a moment in the name of its scales."""

SIGNED = ("exp_avg",)
"""Moments that may be negative."""

PER_DOUBLING = 6
"""Shares per factor of two: each is 12.2 percent larger than the one below."""

SIGNED_LEVELS, LEVELS = 127, 254
"""Shares above zero. The smallest are ``2**-21`` of a first moment and ``2**-42.2`` of a second one, its square."""

NAN, ZERO, SIGNED_ZERO = 0, 1, 128
"""Codes of nan, and of zero without and with a sign."""

MARGIN = 1e-4
"""Distance, in shares, within which a value is its share; larger than the errors of float32."""


def has_master(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the update works on a float32 master of the parameter."""
    return bool(group.get("master_weights")) and not stochastic(group) and param.dtype in LOW_PRECISION


def stochastic(group: Mapping[str, Any]) -> bool:
    """Whether the group has ``master_weights="stochastic"``."""
    return group.get("master_weights") == "stochastic"


def is_rounded(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the update works in float32 without a master, and rounds the new weights stochastically.

    Raises:
        IncompatibleError: The group asks for it, and the parameter is in float16.
    """
    if not stochastic(group) or param.dtype not in LOW_PRECISION:
        return False
    if param.dtype is not torch.bfloat16:
        raise IncompatibleError(
            f"master_weights='stochastic' is for bfloat16, found a parameter in {param.dtype} of shape "
            f"{tuple(param.shape)}. Use master_weights=True for it."
        )
    return True


def check_narrow(param: Tensor, state: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Check that entries of the state can update a parameter of low precision as it is.

    Raises:
        IncompatibleError: One of its shape is in float32.
    """
    entries = {key: state.get(key) for key in keys if key != "step"}  # a count, always in float32
    tensors = {key: value for key, value in entries.items() if isinstance(value, Tensor)}
    wide = [key for key, value in tensors.items() if value.dtype is torch.float32 and value.shape == param.shape]
    if wide:
        raise IncompatibleError(
            f"found {', '.join(wide)} in float32 for a parameter in {param.dtype} that would now be updated as it is; "
            "keep 'master_weights' and the precision of the model as they were."
        )


def widened(value: Any) -> Any:
    """Return a low-precision tensor in float32, and any other value unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW_PRECISION else value


class Stamps:
    """Write masters into their parameters, and detect writes to a parameter since then.

    Such writes come from ``load_state_dict``, from a broadcast or by hand.

    torch counts the writes to a tensor, but not those through ``param.data``. These are not detected until the state is
    next loaded or copied.
    """

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[int, int]] = {}

    def note(self, param: Tensor) -> None:
        """Record that parameter and master now hold the same values."""
        if not torch.compiler.is_compiling():
            self._seen[param] = memory_stamp(param)

    def current(self, param: Tensor, master: Tensor) -> Tensor:
        """Return the master, with entries taken from the parameter if they are no longer the rounded master.

        Entries that were not written keep the precision of the master. Cost: nothing if nothing was written, otherwise
        a new master.
        """
        if torch.compiler.is_compiling() or self._seen.get(param) == memory_stamp(param):
            return master
        near = param.detach().to(master.device)
        return torch.where(master.to(near.dtype) == near, master.float(), near.float())

    def write_back(self, group: Mapping[str, Any], batch: Batch) -> None:
        """Round the masters of a batch into their parameters, except rows, which the rule writes itself."""
        params = [param for param in group["params"] if param.grad is not None]
        worked = zip(params, batch.params, batch.grads, strict=True)
        pairs = [(param, master) for param, master, grad in worked if master is not param and not grad.is_sparse]
        if pairs:
            foreach.copy_([local(param) for param, _ in pairs], [local(master) for _, master in pairs])
        for param in params:
            if has_master(param, group):
                self.note(param)


def pieces(batch: Batch, limit: int | None = None, *, seed: int | None = None) -> Iterator[Batch]:
    """Yield a batch in parts in the precision of the update; each is valid until the next one is requested.

    Args:
        batch: The tensors to update.
        limit: Entries per part on the CPU; a part may exceed it by one tensor. None makes parts only to cast tensors.
        seed: Update in float32, and round the new weights at random with this seed, at least 0, when the next part is
            requested.
    """
    devices = {param.device for param in batch.params}
    near = limit is not None and _on_cpu(devices)
    low = not set(LOW_PRECISION).isdisjoint(map(_DTYPE, batch.grads))
    if seed is None and not near and not (low and any("master" in state for state in batch.states)):
        yield batch
        return
    generators = {} if seed is None else {device: torch.Generator(device).manual_seed(seed) for device in devices}
    for part in _split(batch, limit if near and limit is not None else PIECE):
        pairs = zip(part.grads, part.states, strict=True)
        grads = [widened(grad) if seed is not None or "master" in state else grad for grad, state in pairs]
        wide = part.params if seed is None else list(map(widened, part.params))
        yield Batch(wide[:], grads, part.states)
        grads.clear()  # before the next part is made
        for param, new in zip(part.params, wide, strict=True):
            if new is not param:
                local(param).copy_(stochastically_rounded(local(new), generators[param.device]))


def full_pieces(batch: Batch, group: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Batch]:
    """Yield a batch in parts with moments in full; each is packed again when the next one is requested.

    The noise is the same for the same number of updates: all ranks get the same values, and a resumed run those of one
    that was not interrupted.

    Args:
        batch: The tensors to update.
        group: Its options; ``"updates"`` counts the updates.
        keys: The moments.
    """
    devices = {param.device for param in batch.params}
    noises = {device: noise(group.get("updates", 0), device) for device in devices}
    for part in _split(batch, IN_CACHE if _on_cpu(devices) else PIECE):
        full = list(map(unpacked_state, part.states, map(_DTYPE, part.params)))
        yield Batch(part.params, part.grads, full[:])
        for param, state, new in zip(part.params, part.states, full, strict=True):
            for key in keys:
                state.pop(key + SCALE, None)
            state.update(packed_state(new, keys, noises[param.device]) if packs(param, group) else new)


def _split(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield parts of at least ``size`` entries, as few tensors as possible."""
    start = entries = 0
    for stop, param in enumerate(batch.params, 1):
        entries += param.numel()
        if entries >= size or stop == len(batch.params):
            yield batch.select(range(start, stop))
            start, entries = stop, 0


def _on_cpu(devices: Iterable[torch.device]) -> bool:
    return all(device.type == "cpu" for device in devices)


def stochastically_rounded(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return float32 values in bfloat16, each rounded to one of its two neighbours, the nearer one more often.

    The mean over many roundings is the value. Infinities and nan stay as they are.
    Cost: one random number per value, and three temporary tensors of the size of ``values``.

    Args:
        values: Float32.
        generator: On the device of the values; None for torch's own.
    """
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = values.contiguous().view(torch.int32)
    near = noise.add_(bits).bitwise_and_(-(2**16)).view(torch.float32)
    return torch.where(values.isfinite(), near, values).to(torch.bfloat16)


def local(tensor: Tensor) -> Tensor:
    """Return the shard of a sharded tensor that this rank holds, and any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def packs(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the moments of a parameter are kept in 8 bits."""
    return bool(group.get("moments_8bit")) and param.numel() >= LEAST


def rounds_at_random(group: Mapping[str, Any]) -> bool:
    """Whether a group rounds weights or moments at random; the noise depends on the number of its updates."""
    return stochastic(group) or bool(group.get("moments_8bit"))


def is_packed(state: Mapping[str, Any]) -> bool:
    """Whether a state holds moments in 8 bits."""
    return "exp_avg" + SCALE in state


def check_packable(param: Tensor, group: Mapping[str, Any]) -> None:
    """Refuse parameters whose moments cannot be kept in 8 bits; ``param`` is in the precision of the update.

    Raises:
        IncompatibleError: A sharded tensor, or one that is not in float32.
    """
    if packs(param, group) and (param.dtype is not torch.float32 or hasattr(param, "to_local")):
        raise IncompatibleError(
            f"moments_8bit=True is for tensors that are not sharded and are updated in float32, found a "
            f"{type(param).__name__} of {param.dtype}, shape {tuple(param.shape)}. Leave moments_8bit out of its "
            "group, or set master_weights if it is in bfloat16 or float16."
        )


def noise(seed: int, device: torch.device) -> Tensor:
    """Return what :func:`pack` adds before it rounds down, per entry of a block, so that the mean is the value."""
    drawn = torch.rand(BLOCK, device=device, generator=torch.Generator(device).manual_seed(seed))
    places = drawn.mul_(1 - 2 * MARGIN).add_(MARGIN)
    return 1 - places.mul_(2 ** (1 / PER_DOUBLING) - 1).add_(1).log2_().mul_(PER_DOUBLING)


def pack(values: Tensor, *, signed: bool, noise: Tensor | float = 0.5) -> tuple[Tensor, Tensor]:
    """Return codes of the shape of ``values`` in uint8, and the largest finite magnitude of each block in float32.

    A block is ``BLOCK`` entries in the order of ``flatten()``. Each code stands for a share of the largest magnitude.
    The shares are powers of two to a sixth, so that small entries keep the relative precision of large ones. Below the
    smallest share, entries with a sign become 0. Those without, which divide, become the smallest share unless they are
    0. An entry that is not finite becomes nan, or inf if there are no signs. The others of its block are not affected.
    Packing what was unpacked changes nothing.
    Cost: six temporary tensors of the size of ``values`` at most.

    Source: after T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861. Their shares are
    coarser near zero and are rounded to the nearest one. A moment that changes slowly would then stay where it is.

    Args:
        values: Any shape, float32.
        signed: Whether entries may be negative; if not, they get twice as many codes.
        noise: Of :func:`noise`, to round to one of the two neighbours at random; 0.5 for the nearest.
    """
    blocks = _blocks(values)
    sizes = blocks.abs()
    scales = sizes.nan_to_num(0.0, 0.0).amax(1, keepdim=True)
    scales.masked_fill_(scales == 0, 1.0)
    levels = SIGNED_LEVELS if signed else LEVELS
    places = (sizes / scales).log2_().mul_(PER_DOUBLING).add_(levels).add_(noise)
    places.floor_().clamp_(0 if signed else 1, levels)
    wrong = ~(sizes < torch.inf)
    if signed:
        places.copysign_(blocks).add_(SIGNED_ZERO)
    else:
        places.mul_(sizes.sign_()).add_(ZERO)
    places.masked_fill_(wrong, NAN)
    packed = torch.empty_like(values, dtype=torch.uint8, memory_format=torch.preserve_format)
    return packed.copy_(places.flatten()[: values.numel()].view(values.shape)), scales.flatten()


def unpack(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the float32 values of :func:`pack`.

    A value differs from the packed one by at most 12.3 percent of itself, unless that is below the smallest share.
    """
    shares = _shares(signed, codes.device).index_select(0, codes.flatten().int())
    values = (_blocks(shares) * scales[:, None]).flatten()[: codes.numel()]
    unpacked = torch.empty_like(codes, dtype=torch.float32, memory_format=torch.preserve_format)
    return unpacked.copy_(values.view(codes.shape))


def packed_state(state: Mapping[str, Any], keys: Sequence[str], noise: Tensor | float = 0.5) -> dict[str, Any]:
    """Return a state with its moments in 8 bits."""
    packed = dict(state)
    for key in keys:
        packed[key], packed[key + SCALE] = pack(state[key].float(), signed=key in SIGNED, noise=noise)
    return packed


def unpacked_state(state: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return a state with its moments in full."""
    packed = [key for key in state if key + SCALE in state]
    scales = {key + SCALE for key in packed}
    full = {key: value for key, value in state.items() if key not in scales}
    return full | {key: unpack(state[key], state[key + SCALE], signed=key in SIGNED).to(dtype) for key in packed}


def with_full_moments(state_dict: dict[str, Any], packing: Sequence[bool]) -> dict[str, Any]:
    """Return the state dict with moments in full in the groups whose rule does not keep them in 8 bits.

    Args:
        state_dict: Of an optimizer; not changed.
        packing: Whether the rule of a group keeps moments in 8 bits, per group.
    """
    groups, states = list(state_dict["param_groups"]), dict(state_dict["state"])
    for number, (group, packs_moments) in enumerate(zip(groups, packing, strict=False)):
        if packs_moments:
            continue
        if "moments_8bit" in group:
            groups[number] = {**group, "moments_8bit": False}
        for index in group["params"]:
            if is_packed(states.get(index, {})):
                states[index] = unpacked_state(states[index])
    return {**state_dict, "param_groups": groups, "state": states}


def _blocks(values: Tensor) -> Tensor:
    flat = values.flatten()
    return F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


@cache
def _shares(signed: bool, device: torch.device) -> Tensor:
    """Return the share of each code."""
    levels, zero = (SIGNED_LEVELS, SIGNED_ZERO) if signed else (LEVELS, ZERO)
    above = torch.exp2((torch.arange(levels, dtype=torch.float64, device="cpu") + 1 - levels) / PER_DOUBLING)
    shares = torch.zeros(2**8, dtype=torch.float64, device="cpu")
    shares[NAN] = torch.nan if signed else torch.inf
    shares[zero + 1 : zero + 1 + levels] = above
    if signed:
        shares[zero - levels : zero] = -above.flip(0)
    return shares.float().to(device)
