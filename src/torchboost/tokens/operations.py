"""What functions of torch do with the rows of a padded tensor."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchboost.tokens.answers import Answer, Answering, first, functions, getter, rows_in
from torchboost.tokens.attention import scaled_dot_product_attention
from torchboost.tokens.einsum import einsum_of_rows
from torchboost.tokens.joined import joined
from torchboost.tokens.losses import labelled_loss
from torchboost.tokens.multihead import multi_head_attention_forward
from torchboost.tokens.rows import FLAT, Fill, MissingRows, Rows, in_this_precision, known, numbered
from torchboost.tokens.scores import product
from torchboost.tokens.shapes import expand, indexed, permute, reshape, selected, sliced, squeeze, unsqueeze

__all__ = ["PaddedRows"]


def _alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each entry by itself."""
    x, rest = first(args), args[1:]
    if any(isinstance(arg, Tensor) and arg.ndim for arg in (*rest, *kwargs.values())):
        raise MissingRows("it combines tensors")
    if kwargs.get("inplace"):
        return _alone_in_place(func, args, kwargs)
    result = x.then(lambda rows: func(rows, *rest, **kwargs))
    result.fill = _fill_of_entries(func, x, args, kwargs)
    return result.sharing(x) if func in _DETACHING else result


def _alone_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    if any(isinstance(arg, Tensor) and arg.ndim for arg in (*args[1:], *kwargs.values())):
        raise MissingRows("it combines tensors")
    rows = x.rows
    x.write()
    func(rows, *args[1:], **kwargs)
    return x


def _drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each entry by itself, with random numbers: drawn once, so not later."""
    x = first(args)
    if kwargs.get("inplace"):
        return _alone_in_place(func, args, kwargs)
    fill = x.fill
    zero = None if fill is None else (lambda: 0 if known(fill) == 0 else None)
    return x.of(func(x.rows, *args[1:], **kwargs), fill=zero)


def _broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Several tensors that broadcast, entry by entry."""
    x = max(rows_in((*args, *kwargs.values())), key=lambda rows: rows.ndim)

    def meeting(value: Any) -> Any:
        return x.operand(value) if isinstance(value, Tensor) and value.ndim and value is not x else value

    if x.later and all(arg is x or _is_the_same_everywhere(x, arg) for arg in (*args, *kwargs.values())):
        others = [None if arg is x else meeting(arg) for arg in args]
        named = {name: meeting(value) for name, value in kwargs.items()}
        return x.then(lambda rows: func(*(rows if other is None else other for other in others), **named))
    values = [x.rows if arg is x else meeting(arg) for arg in args]
    result = func(*values, **{name: x.rows if value is x else meeting(value) for name, value in kwargs.items()})
    if result.ndim != x.rows.ndim:
        raise MissingRows("it adds dimensions")
    return x.of(result, fill=_fill_of_product(func, x, args) or _fill_of_entries(func, x, args, kwargs))


def _broadcast_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    rows = x.rows
    others = [x.operand(arg) if isinstance(arg, Tensor) and arg.ndim else arg for arg in args[1:]]
    x.write()
    func(rows, *others, **kwargs)
    return x


def _loss_of_entries(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A loss that is not reduced."""
    named = {name: value for name, value in kwargs.items() if value is not None}
    if named.get("reduction") != "none" or "reduce" in named or "size_average" in named or len(args) != 2:
        raise MissingRows("it combines all entries")
    return _broadcast(func, args, named)


def _is_the_same_everywhere(x: Rows, value: Any) -> bool:
    """Whether an argument is the same for all positions."""
    if not isinstance(value, Tensor):
        return value is not None
    if isinstance(value, Rows) or value.ndim > x.ndim:
        return False
    places = [place - x.ndim for place in x.places]
    return all(-place > value.ndim or value.shape[place] == 1 for place in places)


def _fill_of_product(func: Any, x: Rows, args: tuple[Any, ...]) -> Fill:
    """Return 0 if a factor makes the missing positions zero, such as a mask."""
    if func not in _PRODUCTS or not all(isinstance(arg, Tensor) and arg.ndim for arg in args):
        return None
    fills = [arg.fill if isinstance(arg, Rows) else x.if_absent(arg, 0, 0) for arg in args]
    fills = [fill for fill in fills if fill is not None]
    return (lambda: 0 if any(known(fill) == 0 for fill in fills) else None) if fills else None


def _fill_of_entries(func: Any, x: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fill:
    """Return what the function makes of what fills the missing positions, if it reads nothing else."""
    fill, dtype = x.fill, x.dtype
    if fill is None or any(isinstance(arg, Tensor) and arg.ndim and arg is not x for arg in (*args, *kwargs.values())):
        return None

    def computed() -> float | bool | None:
        value = known(fill)
        if value is None:
            return None
        entry = torch.tensor(value, dtype=dtype)
        return func(*(entry if arg is x else arg for arg in args), **kwargs).item()

    return computed


def _masked_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    mask, value = (*args[1:], *kwargs.values())
    fill = x.if_absent(mask, True, value) if isinstance(value, (bool, int, float)) else None
    return x.of(x.rows.masked_fill(x.operand(mask), value), fill=fill)


def _masked_fill_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    mask, value = (*args[1:], *kwargs.values())
    fill = x.if_absent(mask, True, value) if isinstance(value, (bool, int, float)) else None
    rows, entries = x.rows, x.operand(mask)
    x.write()
    rows.masked_fill_(entries, value)
    x.fill = fill
    return x


def _setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = number``, with a mask of the first dimensions."""
    x, mask, value = first(args), args[1], args[2]
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape != x.shape[: mask.ndim]:
        raise MissingRows("it writes to some positions")
    if not isinstance(value, (bool, int, float)):
        raise MissingRows("it writes a tensor")
    if isinstance(mask, Rows):
        if mask.ndim != x.ndim:
            raise MissingRows("it writes to some positions")
    else:
        mask = mask[(..., *(None,) * (x.ndim - mask.ndim))]
    return _masked_fill_in_place(func, (x, mask, value), {})


def _by_last_feature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The last dimension of each position, with weights."""
    x, rest = first(args), args[1:]
    x.feature(-1)
    if any(isinstance(arg, Rows) for arg in (*rest, *kwargs.values())):
        raise MissingRows("its weight is a padded tensor")
    return x.then(in_this_precision(x.device.type, lambda rows: func(rows, *rest, **kwargs)))


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, weight = args
    if isinstance(weight, Rows) or weight.ndim != 2:
        return product(x, weight)
    return _by_last_feature(torch.matmul, args, kwargs)


def _bmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return product(*args, **kwargs)


def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return einsum_of_rows(product, *args, **kwargs)


def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, x, weight = args
    if not isinstance(x, Rows) or x.dims != (FLAT, 0) or isinstance(weight, Rows) or isinstance(bias, Rows) or kwargs:
        raise MissingRows("it multiplies padded tensors")
    return x.of(torch.addmm(bias, x.rows, weight))


def _normalized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, shape = first(args), args[1] if len(args) > 1 else kwargs["normalized_shape"]
    for dim in range(-len(shape), 0):
        x.feature(dim)
    return x.of(func(x.rows, *args[1:], **kwargs))


def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along features."""
    x, rest, named = first(args), list(args[1:]), dict(kwargs)
    dim = rest.pop(0) if rest else named.pop("dim", None)
    dims = [dim] if isinstance(dim, int) else dim
    if not isinstance(dims, (tuple, list)) or not dims or isinstance(dim, bool):
        raise MissingRows("it combines all entries")
    places = [x.feature(one) for one in dims]
    result = func(x.rows, places[0] if isinstance(dim, int) else places, *rest, **named)
    removed = {one % x.ndim for one in dims}

    def after(rows: Tensor) -> Rows:
        if rows.ndim == x.rows.ndim:
            return x.of(rows)
        return x.of(rows, numbered([dim for place, dim in enumerate(x.dims) if place not in removed]))

    return type(result)([*map(after, result)]) if isinstance(result, tuple) else after(result)


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    sizes = args[1:] or tuple(kwargs.values())
    if any(isinstance(size, torch.dtype) for size in sizes):
        raise MissingRows("it reads memory in another precision")
    return list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, sizes = first(args), _sizes(args, kwargs)
    if len(sizes) == 3 and x.ndim == 4:
        with contextlib.suppress(MissingRows, IndexError):
            return reshape(x, sizes)
        return joined(x, sizes)
    return reshape(x, sizes)


def _flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    given = {**dict(zip(("start_dim", "end_dim"), args[1:], strict=False)), **kwargs}
    start, end = given.get("start_dim", 0) % x.ndim, given.get("end_dim", -1) % x.ndim
    if start > end:
        raise MissingRows("its dimensions are in another order")
    return reshape(x, [*x.shape[:start], -1, *x.shape[end + 1 :]])


def _unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, sizes = args
    place = dim % x.ndim
    return reshape(x, [*x.shape[:place], *sizes, *x.shape[place + 1 :]])


def _as_other(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, other = args
    return reshape(x, list(other.shape)) if isinstance(x, Rows) else x.reshape(other.shape)


def _expand_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, other = args
    return expand(x, other.shape) if isinstance(x, Rows) else x.expand(other.shape)


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return permute(first(args), _sizes(args, kwargs))


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    one, two = (*args[1:], *kwargs.values())
    order = list(range(x.ndim))
    order[one], order[two] = order[two], order[one]
    return permute(x, order)


def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return expand(first(args), _sizes(args, kwargs))


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return unsqueeze(first(args), args[1] if len(args) > 1 else kwargs["dim"])


def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = (*args[1:], *kwargs.values())
    if len(dim) != 1 or not isinstance(dim[0], int):
        raise MissingRows("it removes several dimensions")
    return squeeze(first(args), dim[0])


def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return indexed(first(args), args[1])


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, number = args
    return selected(x, dim % x.ndim, number)


def _narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, start, length = args
    start = range(x.shape[dim])[start] if length else 0
    if length < 0 or start + length > x.shape[dim]:
        raise MissingRows("it has another length")
    return sliced(x, dim % x.ndim, slice(start, start + length))


def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, size = args[:2]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return tuple(x.of(part) for part in func(x.rows, size, dim=x.feature(dim)))


def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = first(args), args[1] if len(args) > 1 else kwargs.get("dim", 0)
    x.feature(dim)
    return tuple(selected(x, dim % x.ndim, number) for number in range(x.shape[dim]))


def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    x = next(part for part in tensors if isinstance(part, Rows))
    # A cache joins the first keys to an empty tensor, whose precision counts.
    parts = [part for part in tensors if isinstance(part, Rows) or part.numel()]
    dtype = functools.reduce(torch.promote_types, [part.dtype for part in tensors])
    if len(parts) == 1:
        return x.of(x.rows.clone() if dtype is x.dtype else x.rows.to(dtype), fill=x.fill)
    return x.of(func([x.operand(part) for part in parts], dim=x.feature(dim)).to(dtype))


def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    place = dim % (tensors[0].ndim + 1)
    return _joined(torch.cat, ([unsqueeze(part, place) for part in map(_as_rows, tensors)], place), {})


def _as_rows(part: Tensor) -> Rows:
    return first((part,))


def _type_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, other = args
    return x.then(lambda rows: rows.to(other.dtype)) if isinstance(x, Rows) else x.to(other.device, other.dtype)


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    fill = {torch.zeros_like: 0, torch.ones_like: 1}.get(func)
    return x.of(func(x.rows, *args[1:], **kwargs), fill=fill)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    return func(torch.empty(0, dtype=x.dtype, device=x.device), *args[1:], **kwargs)


def _last_two(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    return permute(x, [*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


def _needs_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return first(args).needs_grad


def _tracked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``requires_grad_``, which changes nothing for the result of a function."""
    x = first(args)
    if x.needs_grad is not (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
        raise MissingRows("it starts or ends a graph")
    return x


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return scaled_dot_product_attention(*args, **kwargs)


def _multihead(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return multi_head_attention_forward(*args, **kwargs)


def _labelled_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return labelled_loss(func, *args, **kwargs)


_DETACHING = frozenset(functions("detach"))
"""Its result has the same memory, and torch does not count it as a view."""
_PRODUCTS = frozenset(functions("mul", "multiply", "logical_and", "bitwise_and", "__and__", "__mul__", "__rmul__"))
_NAMES: Mapping[Answer, str] = {
    _alone: (
        "relu gelu silu tanh sigmoid exp rsqrt sqrt neg abs log erf float half bfloat16 double to type clone detach "
        "contiguous clamp clip softplus leaky_relu elu mish hardtanh hardswish square logsigmoid relu6 sin cos "
        "reciprocal int long bool nan_to_num sign logical_not bitwise_not isnan isinf isfinite positive __neg__ "
        "__invert__"
    ),
    _drawn: "dropout",
    _alone_in_place: "relu_ clamp_ dropout_ exp_ tanh_ sigmoid_ neg_",
    _broadcast: (
        "add sub mul div true_divide pow maximum minimum where subtract multiply divide eq ne lt le gt ge logical_and "
        "logical_or bitwise_and bitwise_or addcmul lerp rsub floor_divide remainder fmod __and__ __or__ __rsub__ "
        "__add__ __radd__ __mul__ __rmul__ __sub__ __truediv__ __rtruediv__ __pow__ __rpow__ __eq__ __ne__ __lt__ "
        "__gt__ __le__ __ge__"
    ),
    _broadcast_in_place: "add_ sub_ mul_ div_ __iadd__ __imul__ __isub__ __itruediv__",
    _masked_fill: "masked_fill",
    _masked_fill_in_place: "masked_fill_",
    _setitem: "__setitem__",
    _loss_of_entries: "mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits",
    _by_last_feature: "linear",
    _matmul: "matmul __matmul__ mm",
    _bmm: "bmm",
    _addmm: "addmm",
    _einsum: "einsum",
    _normalized: "layer_norm rms_norm",
    _along: "softmax log_softmax mean sum var std amax amin argmax argmin logsumexp max min var_mean",
    _reshape: "view reshape",
    _flatten: "flatten",
    _unflatten: "unflatten",
    _as_other: "view_as reshape_as",
    _permute: "permute",
    _transpose: "transpose swapaxes swapdims",
    _expand: "expand broadcast_to",
    _expand_as: "expand_as",
    _unsqueeze: "unsqueeze",
    _squeeze: "squeeze",
    _getitem: "__getitem__",
    _select: "select",
    _narrow: "narrow",
    _split: "split chunk",
    _unbind: "unbind",
    _joined: "cat concat",
    _stack: "stack",
    _type_as: "type_as",
    _like: "zeros_like ones_like empty_like full_like rand_like randn_like",
    _new: "new_zeros new_ones new_full new_empty",
    _tracked: "requires_grad_",
    _attention: "scaled_dot_product_attention",
    _multihead: "multi_head_attention_forward",
    _labelled_loss: "cross_entropy nll_loss",
}


class PaddedRows(Answering):
    """Rows of a padded tensor that functions of torch accept in place of it.

    Functions that treat every position by itself compute on the rows. So do attention whose mask excludes the padding,
    and a loss that ignores it.
    """

    answers: ClassVar[Mapping[Any, Answer]] = {
        getter("requires_grad"): _needs_grad,
        getter("mT"): _last_two,
        **{function: answer for answer, names in _NAMES.items() for function in functions(*names.split())},
    }
