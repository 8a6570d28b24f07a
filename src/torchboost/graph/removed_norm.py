"""The module in place of a removed BatchNorm. It returns its input, and writes the entries of the BatchNorm."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from torchboost.core.torch_private import (
    AnyConv,
    AnyTransposedConv,
    buffer_slots,
    child_slots,
    parameter_slots,
    state_dict_hooks,
)
from torchboost.graph.norms import NORM_TENSORS, norm_tail
from torchboost.graph.surgery import replace_module

_COPYING = 4
"""The protocol of ``copy``, and the lowest one of ``pickle`` itself. ``torch.save`` takes 2."""


class RemovedNorm(nn.Module):
    """The identity in place of a BatchNorm. Its type marks the removal, also in a wrapped or sharded model.

    It has the settings of the BatchNorm (``num_features``, ``eps``, ``momentum``, ``affine``,
    ``track_running_stats`` and any other attribute that was set). If a subclass of BatchNorm runs modules after the
    normalisation, such as an activation, it runs them too, under the same names. It works with TorchScript, tracing and
    ``torch.export``.

    State dicts have the entries of the original architecture, so a checkpoint loads in a model of the original class,
    which computes the same in eval mode: mean 0, variance 1, a weight of ``sqrt(1 + eps)``, which scales by one, and
    as bias the one that folding gave to the layer before. Entries of a trained BatchNorm are folded into that layer
    when they are loaded. The entries are no parameters or buffers: they are made when a state dict is, or when an
    attribute such as ``weight`` is read, which cannot be written to.

    Args:
        norm: The BatchNorm. See :func:`~torchboost.graph.norms.norm_tail` for the kinds that can be removed.
        copies: Return a copy of the input. Needed if the input is used elsewhere and something may write to the output
            in place.
        layer: The layer before it, if this BatchNorm is its only consumer. The BatchNorm can then be folded into it.
        near: A module whose device and precision the entries have, if there is no ``layer``.

    Attributes:
        copies: As given.
        tail: Names of the modules that the input passes through. They are the first children, in this order.
        adds_bias: Whether ``layer`` had no bias. If it has one now, that bias holds the shift of the BatchNorm.
        batches: Number of batches that the BatchNorm had counted, or None if it had no counter.
        loads_first: Whether it is registered before ``layer``, so that ``load_state_dict`` comes to it first.

    Raises:
        ValueError: The computation of the BatchNorm is not known.
    """

    __jit_unused_properties__ = ("layer",)

    def __init__(
        self, norm: nn.Module, *, copies: bool = True, layer: nn.Module | None = None, near: nn.Module | None = None
    ) -> None:
        super().__init__()
        tail = norm_tail(norm)
        if tail is None:
            raise ValueError(f"this {type(norm).__name__} computes more than a BatchNorm, so it cannot be removed.")
        own = vars(self).keys()
        vars(self).update({name: value for name, value in vars(norm).items() if name not in own})
        for name in dict.fromkeys((*tail, *child_slots(norm))):
            self.add_module(name, child_slots(norm)[name])
        count = buffer_slots(norm)["num_batches_tracked"]
        self.batches = None if count is None else 0 if count.is_meta else int(count)
        self.copies = copies
        self.tail = tail
        self.adds_bias = layer is not None and parameter_slots(layer).get("bias") is None
        self._layer = () if layer is None else (layer,)  # in a tuple it is not registered as a submodule
        self._near = () if near is None else (near,)
        self.loads_first = False
        self.training = norm.training

    @property
    def layer(self) -> nn.Module | None:
        """The layer before, as given."""
        if vars(self).get("behind"):  # a whole model of the version before, which folded into layers after, too
            return None
        return self._layer[0] if self._layer else None

    def forward(self, input: Tensor) -> Tensor:
        """Return the input or a copy of it, passed through the tail."""
        output = input.clone() if self.copies else input
        for at, child in enumerate(self.children()):  # the only form of indexing modules that TorchScript accepts
            if at < len(self.tail):
                output = child(output)
        return output

    def entries(self) -> dict[str, Tensor]:
        """Return the tensors of a BatchNorm that does the same as this module. The bias is the layer's own tensor."""
        near = next((module for module in (*self._layer, *vars(self).get("_near", ()))), None)
        like = None if near is None else next((p for p in near.parameters() if p.is_floating_point()), None)
        dtype, device = (torch.get_default_dtype(), "cpu") if like is None else (like.dtype, like.device)
        width, shift = self.num_features, self._shift()
        mean, variance = (torch.full((width,), float(one), dtype=dtype, device=device) for one in (0, 1))
        entries: dict[str, Tensor] = {}
        if self.affine:
            entries["weight"] = torch.full_like(mean, _neutral(self.eps, dtype, weight=True))
            entries["bias"] = torch.zeros_like(mean) if shift is None else shift
        else:
            variance.fill_(_neutral(self.eps, dtype, weight=False))
            mean = mean if shift is None else -shift
        entries |= {"running_mean": mean, "running_var": variance}
        if self.batches is not None:
            entries["num_batches_tracked"] = torch.tensor(self.batches, device=device)
        return entries

    def _shift(self) -> Tensor | None:
        """Return the bias that folding gave to the layer before, which had none."""
        layer = self.layer
        bias = None if layer is None or not self.adds_bias else parameter_slots(layer).get("bias")
        return None if bias is None else bias.detach()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the entries too, of which ``torch.distributed.checkpoint`` asks each module for the names.

        A module around this one does not call this, so DDP, for example, broadcasts no entries.
        """
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            yield from self.entries().items()

    def __getattr__(self, name: str) -> Any:
        if name in NORM_TENSORS:
            entry, shift = self.entries().get(name), self._shift()
            if entry is None or _is_sharded(entry) or (name == "bias" and shift is not None):
                return entry
            with torch.inference_mode():
                return entry.clone()  # to write to such a tensor is an error
        return super().__getattr__(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.hide_bias()  # the version before did not

    def hide_bias(self) -> None:
        """Keep the bias that folding gave to the layer out of state dicts, in which the BatchNorm has it."""
        layer = self.layer
        if layer is None or self._shift() is None or _leave_out in state_dict_hooks(layer)[0].values():
            return
        layer.register_state_dict_post_hook(_leave_out)
        layer.register_load_state_dict_pre_hook(_keep)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Warn if the model is written by ``torch.save``: a removed norm is a class of this package."""
        if protocol < _COPYING:
            warnings.warn(
                "the whole model is saved, and less_bn removed BatchNorms from it. The file loads only if torchboost "
                "is installed, with torch.load(file, weights_only=False). For a file that loads anywhere, save "
                "model.state_dict(), which fits the original architecture.",
                UserWarning,
                stacklevel=2,
            )
        return super().__reduce_ex__(protocol)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, value in self.entries().items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        entries = {name: state_dict[prefix + name] for name in NORM_TENSORS if prefix + name in state_dict}
        others = {name: value for name, value in state_dict.items() if name.removeprefix(prefix) not in entries}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not entries:  # the version before wrote none
            return
        expected = {"running_mean", "running_var", *(("weight", "bias") if self.affine else ())}
        if missing := [prefix + name for name in NORM_TENSORS if name in expected - entries.keys()]:
            missing_keys += missing
        elif entries["running_mean"].shape != (self.num_features,):
            shape = tuple(entries["running_mean"].shape)
            error_msgs.append(
                f"'{prefix[:-1]}' has statistics of shape {shape}, the model has {self.num_features} channels."
            )
        elif (error := self._take(entries, assign=bool(local_metadata.get("assign_to_params_buffers")))) is not None:
            error_msgs.append(f"'{prefix[:-1]}' {error}")

    def extra_repr(self) -> str:
        """Return the width and the path of the input, for ``repr``."""
        return f"{self.num_features}{', copies' * self.copies}"

    @torch.no_grad()
    def _take(self, entries: Mapping[str, Tensor], *, assign: bool) -> str | None:
        """Give scale and shift of loaded entries to the layer before. Return why this is impossible, if it is."""
        mean, variance = _whole(entries["running_mean"]), _whole(entries["running_var"])
        if mean.is_meta:
            return None
        weight, bias = (_whole(entries[name]) if self.affine else None for name in ("weight", "bias"))
        scale = (variance.double() + self.eps).rsqrt() * (1.0 if weight is None else weight.double())
        shift = -mean.double() * scale + (0.0 if bias is None else bias.double())
        layer = self.layer
        slots = {} if layer is None else parameter_slots(layer)
        adds, before = self.adds_bias, slots.get("bias")
        if bool(((scale - 1).abs() <= 8 * torch.finfo(mean.dtype).eps).all()):
            if adds and before is not None:
                _write(slots, "bias", shift, assign)
                return None
            if not shift.any():
                return None
        original = (
            "load the state into the original architecture and call less_bn on it, which keeps or folds "
            "such a BatchNorm."
        )
        if layer is None or (before is None and bool(shift.any())):
            lacks = "no layer before it" if layer is None else "the layer before it has no bias to"
            return f"scales or shifts its values, and {lacks} can do that instead; {original}"
        if self.loads_first or _is_sharded(slots["weight"]):
            reason = "is sharded" if _is_sharded(slots["weight"]) else "is registered after it"
            return f"scales its values, and the layer to fold that into {reason}; {original}"
        folded = fused_weights(layer, None if adds else before, mean, variance, self.eps, weight, bias)
        for name, value in zip(("weight", "bias"), folded, strict=True):
            if slots.get(name) is not None:
                _write(slots, name, value, assign=False)
        return None


def put_removed_norm(model: nn.Module, norm: nn.Module, *, copies: bool, layer: nn.Module | None) -> RemovedNorm:
    """Replace a BatchNorm by a :class:`RemovedNorm`, and return the new module. Arguments as there."""
    order = list(model.modules())
    near = next((module for module in order if isinstance(module, (AnyConv, nn.Linear))), None)
    stand_in = RemovedNorm(norm, copies=copies, layer=layer, near=near)
    stand_in.loads_first = layer is not None and order.index(norm) < order.index(layer)
    replace_module(model, norm, stand_in)
    return stand_in


def show_bias(layer: nn.Module) -> None:
    """Undo the effect of :meth:`RemovedNorm.hide_bias` on a layer."""
    for hooks in state_dict_hooks(layer):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in (_leave_out, _keep)]:
            del hooks[key]


def _leave_out(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict.pop(f"{prefix}bias", None)


def _keep(layer: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict.setdefault(f"{prefix}bias", layer.bias)


def fused_weights(
    layer: nn.Module,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    scale: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return weight and bias, in float64, of a layer that does the same as a layer and the BatchNorm after it.

    ``bias`` is that of the layer. All after it is of the BatchNorm, in eval mode.
    """
    weight = parameter_slots(layer)["weight"]
    assert weight is not None
    kernel, bias = weight.detach().double(), None if bias is None else bias.detach().double()
    scale = torch.ones_like(mean) if scale is None else scale
    shift = torch.zeros_like(mean) if shift is None else shift
    norm = (bias, mean.double(), variance.double(), eps, scale.double(), shift.double())
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_weights(kernel, *norm)
    transposed = isinstance(layer, AnyTransposedConv)
    groups = layer.groups if transposed else 1
    if groups > 1:  # (in, out / groups, ...) with the channels of a group next to each other
        kernel = kernel.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)
    fused, moved = fuse_conv_bn_weights(kernel, *norm, transpose=transposed)
    return (fused.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1) if groups > 1 else fused), moved


def _write(slots: dict[str, Any], name: str, value: Tensor, assign: bool) -> None:
    before = slots[name]
    value = value.to(before.dtype)
    if hasattr(before, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(before.device), before.device_mesh, before.placements, src_data_rank=None)
    if assign and not _is_sharded(before):
        slots[name] = nn.Parameter(value, requires_grad=before.requires_grad)
    else:
        before.copy_(value)


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def _neutral(eps: float, dtype: torch.dtype, *, weight: bool) -> float:
    """Return the weight (or, without one, the variance) with which ``batch_norm`` scales by one, including rounding."""
    ideal = torch.tensor([(1 + eps) ** 0.5 if weight else 1 - eps], dtype=dtype, device="cpu")
    one, zero = torch.ones_like(ideal), torch.zeros_like(ideal)
    candidates = [ideal]
    if dtype in (torch.float32, torch.float64):
        candidates += [torch.nextafter(ideal, zero), torch.nextafter(ideal, one + 1)]

    def error(value: Tensor) -> float:
        scale, variance = (value, one) if weight else (one, value)
        return abs(float(F.batch_norm(one[None], zero, variance, scale, zero, eps=eps)) - 1)

    return float(min(candidates, key=error))
