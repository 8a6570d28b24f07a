"""Convert weights between a network with BatchNorm layers removed and its original architecture."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.core.algorithm import Attachment
from torchboost.core.arguments import check_module
from torchboost.core.torch_private import COMPILED_PREFIX, TRANSPARENT_WRAPPERS, parameter_slots
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.errors import IncompatibleError
from torchboost.graph.folding import fold_into_layer
from torchboost.graph.normalized_linear import NormalizedLinear
from torchboost.graph.removed_norm import NORM_TENSORS, RemovedNorm

__all__ = ["load_plain_state_dict", "plain_state_dict", "plain_states", "to_plain_"]

_WRAPPER_PREFIXES = ("module.", COMPILED_PREFIX)


def plain_state_dict(
    model: nn.Module, *, state: Mapping[str, Any] | None = None, keep_head: bool = False
) -> dict[str, Any]:
    """Return the weights for the architecture before ``LessBN`` removed BatchNorm layers.

    The dict fits a model of the original class that torchboost never changed. In eval mode that model computes the
    same. Every removed layer becomes a BatchNorm with mean 0, variance 1 and a weight of ``sqrt(1 + eps)``, so its
    scale is one; if folding gave the layer before it a bias, this becomes the bias of the BatchNorm. The outputs are
    equal up to the rounding of one multiplication and addition per such layer (on CPU mostly bit for bit, 1e-6
    relative in float32). Limit: further training of that model differs, because its BatchNorms use batch statistics
    again.

    Names are those of the model inside DDP, ``DataParallel`` and ``torch.compile``. With FSDP2 the shards are gathered:
    all ranks must call this, and each gets the full dict. To use less memory, gather the state dict yourself and pass
    it as ``state``.

    Args:
        model: Any module; if no layers were removed, the result is its own state dict.
        state: A state dict of ``model`` to use instead of its own; an empty one gives an empty dict, as on ranks that
            gather nothing.
        keep_head: Keep the entries of a normalised head (``normalize_head``, ``fn_flag``), for an architecture in
            which that layer is a ``NormalizedLinear``.

    Returns:
        The tensors of the model themselves, as from ``state_dict()``, and new ones for the removed layers.

    Raises:
        TypeError: Not a module.
        IncompatibleError: The head is normalised, which a linear layer cannot express; a layer was folded into the one
            after it; or the model is inside FSDP1.

    Example:
        >>> import torch, torchboost
        >>> def build():
        ...     conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        ...     return torch.nn.Sequential(*[m for _ in range(4) for m in (conv(3, 3, 3), norm(3), torch.nn.ReLU())])
        >>> model = build()
        >>> torchboost.remove_batch_norms(model).removed
        ('7',)
        >>> plain = build()
        >>> plain.load_state_dict(torchboost.plain_state_dict(model))
        <All keys matched successfully>
    """
    check_module(model)
    inner = unwrap(model)
    _check_exportable(inner, keep_head)
    own = inner.state_dict()
    given = own if state is None else _without_wrappers(state, own)
    if not given:
        return {}
    return _exported(inner, given)


def load_plain_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load weights of the original architecture into a model whose BatchNorm layers ``LessBN`` removed.

    The result of :func:`plain_state_dict` is restored exactly. Other weights, such as pretrained ones, are folded:
    scale and shift of a removed layer go into the layer before it, which gives the same outputs in eval mode. If that
    layer has no bias for the shift, or there is none, a ``ValueError`` is raised.

    Args:
        model: With or without removed layers, bare, or inside DDP, ``DataParallel`` or ``torch.compile``.
        state: A state dict of the original architecture.
        strict: Whether all names must match, as in ``Module.load_state_dict``.

    Returns:
        The result of ``load_state_dict`` of the model.

    Raises:
        TypeError: Not a module.
        ValueError: ``state`` is not one of the original architecture, or this model cannot express it; nothing was
            loaded.
        IncompatibleError: The model is sharded.
    """
    check_module(model)
    inner = unwrap(model)
    _check_unsharded(inner)
    own = inner.state_dict()
    values = _without_wrappers(state, own)
    for place in _removed_places(inner):
        _absorb(place, values, own)
    _check_fit(own, values, strict)
    return inner.load_state_dict(values, strict=strict)


def plain_states(model: nn.Module) -> Attachment:
    """Let ``state_dict`` and ``load_state_dict`` of a model speak of its original architecture.

    Code that saves or loads the model meanwhile, such as ``save_pretrained`` or a trainer, does what
    :func:`plain_state_dict` and :func:`load_plain_state_dict` do. A state dict of the model as it is can still be
    loaded. The entries of a normalised head stay as they are.

    Args:
        model: The bare model. If no layers were removed, nothing is done.

    Returns:
        An attachment: ``remove()`` it, or use it as a context manager.

    Raises:
        TypeError: Not a module.
        IncompatibleError: A layer was folded into the one after it; see :func:`plain_state_dict`.

    Example:
        >>> import torch, torchboost
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
        >>> with torchboost.plain_states(model):
        ...     torch.save(model.state_dict(), "model.pt")  # doctest: +SKIP
    """
    check_module(model)
    if not any(isinstance(module, RemovedNorm) for module in model.modules()):
        return Attachment()
    _check_exportable(model, keep_head=True)
    return Attachment(model.register_state_dict_post_hook(to_plain_), model.register_load_state_dict_pre_hook(_import))


def to_plain_(model: nn.Module, state: dict[str, Any], prefix: str = "", *_: Any) -> None:
    """Convert the entries of a model in a state dict in place, unless they are those of the original architecture.

    Args:
        model: The bare model.
        state: A state dict of ``model`` or of a module around it.
        prefix: How the names of its entries begin.
    """
    if _is_plain(model, state, prefix):
        return
    values = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    state.update({prefix + name: value for name, value in _exported(model, values).items()})


def _import(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if not _is_plain(model, state, prefix):
        return
    values = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    own = {_visible(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    for place in _removed_places(model):
        _absorb(place, values, own)
    state.update({prefix + name: value for name, value in values.items()})


def _is_plain(model: nn.Module, state: Mapping[str, Any], prefix: str) -> bool:
    places = list(_removed_places(model))
    return any(name.startswith(prefix + place.prefix) for place in places for name in state)


class _Place(NamedTuple):
    """One removed BatchNorm: the prefix of its names, and the prefixes of all names of the layer before it."""

    norm: RemovedNorm
    prefix: str
    layer: nn.Module | None
    layer_prefixes: tuple[str, ...]


def _exported(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of the bare model as one of its original architecture."""
    values = {name: _gathered(value) for name, value in state.items()}
    for place in _removed_places(model):
        values |= _entries(place, values)
    return _in_order(model, values)


def _removed_places(model: nn.Module) -> Iterator[_Place]:
    names = [(_visible(name), module) for name, module in model.named_modules(remove_duplicate=False)]
    for name, norm in names:
        if isinstance(norm, RemovedNorm):
            layer = norm.layer
            yield _Place(norm, f"{name}.", layer, tuple(f"{path}." for path, other in names if other is layer))


def _visible(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in TRANSPARENT_WRAPPERS)


def _without_wrappers(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict under the names of the bare model, given the bare model's state dict."""
    values = dict(state)
    for prefix in (*_WRAPPER_PREFIXES, *_WRAPPER_PREFIXES):
        if not values.keys() & own.keys() and all(name.startswith(prefix) for name in values):
            values = {name.removeprefix(prefix): value for name, value in values.items()}
    return values


def _gathered(value: Any) -> Any:
    """Return the full tensor of one that is sharded over ranks."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _check_exportable(model: nn.Module, keep_head: bool) -> None:
    if wrapper_of(model) == "FullyShardedDataParallel":
        raise IncompatibleError(
            "found a model inside FullyShardedDataParallel (FSDP1), whose parameters do not keep their shapes; use "
            "fully_shard, or load a gathered state dict into a bare model with the same BatchNorm layers removed."
        )
    heads = [_visible(name) for name, module in model.named_modules() if isinstance(module, NormalizedLinear)]
    if heads and not keep_head:
        raise IncompatibleError(
            f"'{heads[0]}' is a normalised head: it divides its inputs by their norm. A linear layer does not, so the "
            "original architecture cannot compute the same. Train with normalize_head=False (fn_flag=False), or "
            "put a NormalizedLinear into the original architecture and call plain_state_dict(model, keep_head=True)."
        )
    behind = [_visible(name) for name, module in model.named_modules() if _is_lost(module)]
    if behind:
        raise IncompatibleError(
            f"'{behind[0]}' was folded into the layer after it, which got a bias that the original architecture "
            "does not have; take the state of the model before fold_batch_norms."
        )


def _is_lost(module: nn.Module) -> bool:
    return isinstance(module, RemovedNorm) and module.behind and module.adds_bias


def _check_unsharded(model: nn.Module) -> None:
    wrapper = wrapper_of(model)
    if wrapper in ("fully_shard", "FullyShardedDataParallel"):
        raise IncompatibleError(
            f"found a model wrapped by {wrapper}; load the plain state dict into the bare model before it is sharded."
        )


def _entries(place: _Place, values: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of one BatchNorm of scale one; moves the bias of the layer before it out of ``values``."""
    norm, width = place.norm, place.norm.num_features
    shift: Tensor | None = None
    if norm.adds_bias:
        found = [values.pop(f"{prefix}bias", None) for prefix in place.layer_prefixes]
        shift = next((bias for bias in found if bias is not None), None)
    like = _reference(place, values)
    mean, variance = like.new_zeros(width), like.new_ones(width)
    entries: dict[str, Any] = {}
    if norm.affine:
        weight = like.new_full((width,), _neutral(norm.eps, like.dtype, weight=True))
        entries = {"weight": weight, "bias": like.new_zeros(width) if shift is None else shift}
    else:
        variance = like.new_full((width,), _neutral(norm.eps, like.dtype, weight=False))
        mean = mean if shift is None else -shift
    entries |= {"running_mean": mean, "running_var": variance}
    if norm.batches is not None:
        entries["num_batches_tracked"] = torch.tensor(norm.batches, device=like.device)
    return {place.prefix + name: value for name, value in entries.items()}


def _reference(place: _Place, values: Mapping[str, Any]) -> Tensor:
    """Return a tensor with the device and type of the BatchNorm's layer, or else of any other layer."""
    own = [values.get(f"{prefix}weight") for prefix in place.layer_prefixes]
    floating = (v for v in [*own, *values.values()] if isinstance(v, Tensor) and v.is_floating_point())
    return next(floating, torch.empty(0, device="cpu"))


def _neutral(eps: float, dtype: torch.dtype, *, weight: bool) -> float:
    """Return the weight (or, without one, the variance) with which ``batch_norm`` scales by one, including rounding."""
    ideal = torch.tensor((1 + eps) ** 0.5 if weight else 1 - eps, dtype=dtype, device="cpu")
    candidates = [ideal]
    if dtype in (torch.float32, torch.float64):
        candidates += [torch.nextafter(ideal, torch.tensor(end, dtype=dtype, device="cpu")) for end in (0.0, 2.0)]
    one, zero = (torch.full(size, n, dtype=dtype, device="cpu") for size, n in (((1, 1), 1), ((1,), 0)))

    def error(value: Tensor) -> float:
        scale, variance = (value, one[0]) if weight else (one[0], value)
        result = F.batch_norm(one, zero, variance.view(1), scale.view(1), zero, eps=eps)
        return abs(float(result) - 1)

    return float(min(candidates, key=error))


def _in_order(model: nn.Module, values: dict[str, Any]) -> dict[str, Any]:
    """Sort the values as ``state_dict()`` of the original architecture: by module, in order of registration."""
    places = {_visible(name): at for at, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}

    def place(name: str) -> int:
        while name and name not in places:
            name = name.rpartition(".")[0]
        return places.get(name, 0)

    return {name: values[name] for name in sorted(values, key=lambda name: place(name.rpartition(".")[0]))}


def _absorb(place: _Place, values: dict[str, Any], own: Container[str]) -> None:
    """Remove one BatchNorm from ``values`` and fold its scale and shift into the layer before it."""
    name, norm = place.prefix[:-1], place.norm
    tensors = {key: values.pop(place.prefix + key, None) for key in NORM_TENSORS}
    mean, variance = tensors["running_mean"], tensors["running_var"]
    if mean is None or variance is None:
        raise ValueError(
            f"state: found no statistics of '{name}', a BatchNorm that less_bn removed here, so this is not a state "
            "dict of the original architecture. For the state of a model with the same layers removed, use "
            "model.load_state_dict(state)."
        )
    if mean.shape != (norm.num_features,):
        raise ValueError(
            f"state: '{name}' has statistics of shape {tuple(mean.shape)}, the model has {norm.num_features} channels."
        )
    plain = nn.BatchNorm1d(norm.num_features, eps=norm.eps, device=mean.device, dtype=torch.float64)
    with torch.no_grad():
        plain.running_mean.copy_(mean)  # pyright: ignore[reportOptionalMemberAccess]
        plain.running_var.copy_(variance)  # pyright: ignore[reportOptionalMemberAccess]
        for key in ("weight", "bias"):
            if tensors[key] is not None:
                getattr(plain, key).copy_(tensors[key])
        scale = plain.weight * (variance.double() + norm.eps).rsqrt()
        shift = plain.bias - mean.double() * scale
    rounding = 8 * torch.finfo(mean.dtype).eps
    neutral = bool(((scale - 1).abs() <= rounding).all())
    adds = any(f"{prefix}bias" in own for prefix in place.layer_prefixes) and norm.adds_bias
    if neutral and (adds or not shift.any()):
        values |= {f"{prefix}bias": shift.to(mean.dtype) for prefix in place.layer_prefixes if adds}
        return
    _fold(place, plain, values, own)


def _fold(place: _Place, plain: nn.Module, values: dict[str, Any], own: Container[str]) -> None:
    name, prefixes = place.prefix[:-1], place.layer_prefixes
    weight = values.get(f"{prefixes[0]}weight") if prefixes else None
    if place.layer is None or place.norm.behind or weight is None:
        raise ValueError(
            f"state: '{name}' scales and shifts, and no layer before it can do that instead; load the state into the "
            "original architecture and call remove_batch_norms on it, which keeps such a BatchNorm."
        )
    layer = copy.deepcopy(place.layer)
    bias = values.get(f"{prefixes[0]}bias")
    parameter_slots(layer)["weight"] = nn.Parameter(weight.detach().clone(), requires_grad=False)
    parameter_slots(layer)["bias"] = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
    fold_into_layer(plain, layer)
    if f"{prefixes[0]}bias" not in own:
        raise ValueError(
            f"state: '{name}' shifts its values, and '{prefixes[0][:-1]}' before it has no bias to do that instead; "
            "load the state into the original architecture and call remove_batch_norms on it, which folds it."
        )
    for prefix in prefixes:
        values[f"{prefix}weight"] = parameter_slots(layer)["weight"]
        values[f"{prefix}bias"] = parameter_slots(layer)["bias"]


def _check_fit(own: Mapping[str, Any], values: Mapping[str, Any], strict: bool) -> None:
    missing, strange = [n for n in own if n not in values], [n for n in values if n not in own]
    if strict and (missing or strange):
        head = " It cannot hold a normalised head." if any(n.endswith(".multiplier") for n in missing) else ""
        raise ValueError(
            f"state: {len(missing)} names are missing ({', '.join(missing[:3]) or '-'}), {len(strange)} are not in the "
            f"model ({', '.join(strange[:3]) or '-'}); give the state dict of the original architecture.{head}"
        )
    for name in values:
        expected, found = own.get(name), values[name]
        if isinstance(expected, Tensor) and isinstance(found, Tensor) and expected.shape != found.shape:
            raise ValueError(f"state: '{name}' has shape {tuple(found.shape)}, the model {tuple(expected.shape)}.")
