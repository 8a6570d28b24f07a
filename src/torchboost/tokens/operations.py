"""What functions of torch do with the rows of a padded tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.core.forward import with_tensors
from torchboost.core.torch_private import functions_of_subclasses_off
from torchboost.tokens.attention import scaled_dot_product_attention
from torchboost.tokens.losses import cross_entropy
from torchboost.tokens.rows import FLAT, MissingRows, Rows, in_this_precision, numbered
from torchboost.tokens.shapes import expand, indexed, permute, reshape, selected, sliced, squeeze, unsqueeze

__all__ = ["PaddedRows"]

Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes the function of torch and its arguments."""


class PaddedRows(Rows):
    """Rows of a padded tensor that functions of torch accept in place of it.

    Functions that treat every position by itself compute on the rows. So do attention whose mask excludes the padding,
    and a loss that ignores it. Other functions get the whole tensor: from ``fill``, or from ``source``. If there is
    neither, they raise :class:`MissingRows`.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch."""
        kwargs = kwargs or {}
        with functions_of_subclasses_off():
            if func in _METADATA:
                return func(*args, **kwargs)
            rows = [*_rows_in((*args, *kwargs.values()))]
            sources = [one.source for one in rows]
            try:
                if None in sources and not torch.is_grad_enabled() and any(one.needs_grad for one in rows):
                    raise MissingRows("it computes without gradients")
                result = _answer(func, args, kwargs)
            except MissingRows as reason:
                if None in sources:
                    owners = [one.positions.owner for one in rows if one.source is None]
                    raise MissingRows(f"{_name(func)}: {reason}", owners) from None
                return func(*_from_sources(args), **_from_sources(kwargs))
            if None not in sources:
                for one in _rows_in(result if isinstance(result, (tuple, list)) else (result,)):
                    if one.source is None:
                        one.source = lambda: func(*_from_sources(args), **_from_sources(kwargs))
            return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is called below the functions of torch, such as by a function of autograd or a collective."""
        owners = [one.positions.owner for one in _rows_in((*args, *(kwargs or {}).values())) if one.source is None]
        if owners:
            raise MissingRows(f"{func} is called below the functions of torch", owners)
        return func(*_from_sources(args), **_from_sources(kwargs or {}))


def _rows_in(values: Any) -> Iterator[Rows]:
    for value in values:
        if isinstance(value, Rows):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _rows_in(value)


def _from_sources(values: Any) -> Any:
    return with_tensors(values, _from_source)


def _from_source(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Rows):
        return tensor
    if tensor.source is None:
        raise MissingRows("it needs the padding")
    return tensor.source()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, Rows) else tensor


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    answer = _ANSWERS.get(func)
    if answer is not None:
        try:
            return answer(func, args, kwargs)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            # Unusual arguments. If they are wrong, the call with whole tensors says so.
            raise MissingRows(f"it raised {type(error).__name__}") from error
        except MissingRows:
            if all(one.fill is None and not one.positions.complete for one in _rows_in((*args, *kwargs.values()))):
                raise
    return func(*with_tensors(args, _whole), **with_tensors(kwargs, _whole))


def _first(args: tuple[Any, ...]) -> Rows:
    if not args or not isinstance(args[0], Rows):
        raise MissingRows("its first argument is another tensor")
    return args[0]


def _alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each entry by itself."""
    x, rest = _first(args), args[1:]
    if any(isinstance(arg, Tensor) and arg.ndim for arg in (*rest, *kwargs.values())):
        raise MissingRows("it combines tensors")
    return x.then(lambda rows: func(rows, *rest, **kwargs))


def _alone_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = _first(args)
    func(x.rows, *args[1:], **kwargs)
    x.fill = None
    return x


def _broadcast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Several tensors that broadcast, entry by entry."""
    x = max(_rows_in((*args, *kwargs.values())), key=lambda rows: rows.ndim)

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
    return x.of(result, fill=_fill_of_product(func, x, args))


def _broadcast_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = _first(args)
    others = [x.operand(arg) if isinstance(arg, Tensor) and arg.ndim else arg for arg in args[1:]]
    func(x.rows, *others, **kwargs)
    x.fill = None
    return x


def _is_the_same_everywhere(x: Rows, value: Any) -> bool:
    """Whether an argument is the same for all positions."""
    if not isinstance(value, Tensor):
        return value is not None
    if isinstance(value, Rows) or value.ndim > x.ndim:
        return False
    places = [place - x.ndim for place in x.places]
    return all(-place > value.ndim or value.shape[place] == 1 for place in places)


def _fill_of_product(func: Any, x: Rows, args: tuple[Any, ...]) -> float | None:
    """Return 0 if a mask makes the missing positions zero."""
    if func not in _PRODUCTS or x.positions.complete:
        return None
    absent = [x.absent(arg) for arg in args]
    return 0 if any(mask is not None and not bool(mask.any()) for mask in absent) else None


def _masked_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, mask, value = _first(args), args[1], args[2]
    absent = x.absent(mask)
    filled = absent is not None and isinstance(value, (bool, int, float)) and bool(absent.all())
    return x.of(x.rows.masked_fill(x.operand(mask), value), fill=value if filled else None)


def _by_last_feature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The last dimension of each position, with weights."""
    x, rest = _first(args), args[1:]
    x.feature(-1)
    if any(isinstance(arg, Rows) for arg in (*rest, *kwargs.values())):
        raise MissingRows("its weight is a padded tensor")
    return x.then(in_this_precision(x.device.type, lambda rows: func(rows, *rest, **kwargs)))


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = args[1]
    if isinstance(weight, Rows) or weight.ndim != 2:
        raise MissingRows("it multiplies padded tensors")
    return _by_last_feature(torch.matmul, args, kwargs)


def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, x, weight = args
    if not isinstance(x, Rows) or x.dims != (FLAT, 0) or isinstance(weight, Rows) or isinstance(bias, Rows) or kwargs:
        raise MissingRows("it multiplies padded tensors")
    return x.of(torch.addmm(bias, x.rows, weight))


def _normalized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, shape = _first(args), args[1] if len(args) > 1 else kwargs["normalized_shape"]
    for dim in range(-len(shape), 0):
        x.feature(dim)
    return x.of(func(x.rows, *args[1:], **kwargs))


def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along features."""
    x, rest, named = _first(args), list(args[1:]), dict(kwargs)
    dim = rest.pop(0) if rest else named.pop("dim", None)
    dims = [dim] if isinstance(dim, int) else dim
    if not isinstance(dims, (tuple, list)) or not dims:
        raise MissingRows("it combines all entries")
    places = [x.feature(one) for one in dims]
    result = func(x.rows, places[0] if isinstance(dim, int) else places, *rest, **named)
    removed = {one % x.ndim for one in dims}

    def after(rows: Tensor) -> Rows:
        if rows.ndim == x.rows.ndim:
            return x.of(rows)
        return x.of(rows, numbered([dim for place, dim in enumerate(x.dims) if place not in removed]))

    return type(result)(map(after, result)) if isinstance(result, tuple) else after(result)


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    sizes = args[1:] or tuple(kwargs.values())
    if any(isinstance(size, torch.dtype) for size in sizes):
        raise MissingRows("it reads memory in another precision")
    return list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return reshape(_first(args), _sizes(args, kwargs))


def _flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = _first(args)
    given = {**dict(zip(("start_dim", "end_dim"), args[1:], strict=False)), **kwargs}
    start, end = given.get("start_dim", 0) % x.ndim, given.get("end_dim", -1) % x.ndim
    return reshape(x, [*x.shape[:start], -1, *x.shape[end + 1 :]])


def _unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, sizes = args
    place = dim % x.ndim
    return reshape(x, [*x.shape[:place], *sizes, *x.shape[place + 1 :]])


def _as_other(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return reshape(_first(args), list(args[1].shape))


def _permute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return permute(_first(args), _sizes(args, kwargs))


def _transpose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = _first(args)
    one, two = (*args[1:], *kwargs.values())
    order = list(range(x.ndim))
    order[one], order[two] = order[two], order[one]
    return permute(x, order)


def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return expand(_first(args), _sizes(args, kwargs))


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return unsqueeze(_first(args), args[1] if len(args) > 1 else kwargs["dim"])


def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = (*args[1:], *kwargs.values())
    if len(dim) != 1 or not isinstance(dim[0], int):
        raise MissingRows("it removes several dimensions")
    return squeeze(_first(args), dim[0])


def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return indexed(_first(args), args[1])


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, number = args
    return selected(x, dim % x.ndim, number)


def _narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, start, length = args
    return sliced(x, dim % x.ndim, slice(start, start + length))


def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, size = args[:2]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    return tuple(x.of(part) for part in func(x.rows, size, dim=x.feature(dim)))


def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = _first(args), args[1] if len(args) > 1 else kwargs.get("dim", 0)
    x.feature(dim)
    return tuple(selected(x, dim % x.ndim, number) for number in range(x.shape[dim]))


def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    parts = [part for part in tensors if isinstance(part, Rows) or part.numel()]
    x = next(part for part in parts if isinstance(part, Rows))
    if len(parts) == 1:  # a cache joins the first keys to an empty tensor
        return x
    return x.of(func([x.operand(part) for part in parts], dim=x.feature(dim)))


def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    place = dim % (tensors[0].ndim + 1)
    return _joined(torch.cat, ([unsqueeze(part, place) for part in map(_as_rows, tensors)], place), {})


def _as_rows(part: Tensor) -> Rows:
    return _first((part,))


def _type_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, other = args
    return x.then(lambda rows: rows.to(other.dtype)) if isinstance(x, Rows) else x.to(other.device, other.dtype)


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = _first(args)
    fill = {torch.zeros_like: 0, torch.ones_like: 1}.get(func)
    return x.of(func(x.rows, *args[1:], **kwargs), fill=fill)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(_first(args).base[:0], *args[1:], **kwargs)


def _needs_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _first(args).needs_grad


def _tracked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``requires_grad_``, which changes nothing for the result of a function."""
    x = _first(args)
    if x.needs_grad is not (args[1] if len(args) > 1 else kwargs.get("requires_grad", True)):
        raise MissingRows("it starts or ends a graph")
    return x


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return scaled_dot_product_attention(*args, **kwargs)


def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cross_entropy(*args, **kwargs)


def _functions(*names: str) -> list[Any]:
    """Return what has one of these names: functions of torch, of ``torch.nn.functional``, and methods of tensors."""
    return [getattr(home, name) for name in names for home in (torch, F, Tensor) if hasattr(home, name)]


def _getter(name: str) -> Any:
    """Return what is called if an attribute of a tensor is read."""
    return getattr(Tensor, name).__get__


_GETTERS = "shape dtype device ndim layout is_cpu is_cuda is_nested is_sparse is_meta is_quantized is_leaf is_xpu"
_METADATA = frozenset(
    [_getter(name) for name in _GETTERS.split()]
    + _functions("size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "get_device", "nelement")
    + [Tensor.__len__, Tensor.__hash__]
)
_PRODUCTS = frozenset(_functions("mul", "multiply", "logical_and", "bitwise_and", "__and__", "__mul__", "__rmul__"))
_NAMES: Mapping[Answer, str] = {
    _alone: (
        "relu gelu silu tanh sigmoid exp rsqrt sqrt neg abs log erf float half bfloat16 double to type clone detach "
        "contiguous dropout clamp clip softplus leaky_relu elu mish hardtanh hardswish square logsigmoid relu6 sin cos "
        "reciprocal int long bool nan_to_num sign logical_not bitwise_not isnan isinf isfinite positive __neg__ "
        "__invert__"
    ),
    _alone_in_place: "relu_ clamp_ dropout_ exp_ tanh_ sigmoid_ neg_",
    _broadcast: (
        "add sub mul div true_divide pow maximum minimum where subtract multiply divide eq ne lt le gt ge logical_and "
        "logical_or bitwise_and bitwise_or addcmul lerp rsub floor_divide remainder fmod __and__ __or__ __rsub__ "
        "__add__ __radd__ __mul__ __rmul__ __sub__ __truediv__ __rtruediv__ __pow__ __rpow__ __eq__ __ne__ __lt__ "
        "__gt__ __le__ __ge__"
    ),
    _broadcast_in_place: "add_ sub_ mul_ div_ __iadd__ __imul__ __isub__ __itruediv__",
    _masked_fill: "masked_fill",
    _by_last_feature: "linear",
    _matmul: "matmul __matmul__ mm",
    _addmm: "addmm",
    _normalized: "layer_norm rms_norm",
    _along: "softmax log_softmax mean sum var std amax amin argmax argmin logsumexp max min var_mean",
    _reshape: "view reshape",
    _flatten: "flatten",
    _unflatten: "unflatten",
    _as_other: "view_as reshape_as",
    _permute: "permute",
    _transpose: "transpose swapaxes swapdims",
    _expand: "expand",
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
    _cross_entropy: "cross_entropy",
}
_ANSWERS: Mapping[Any, Answer] = {
    _getter("requires_grad"): _needs_grad,
    **{function: answer for answer, names in _NAMES.items() for function in _functions(*names.split())},
}
"""Function of torch -> what it does with rows."""
