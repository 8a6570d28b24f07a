"""The functions of torch on the rows of a padded tensor."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.torch_private import versions
from torchboost.tokens.answers import Answer, PaddedRows, functions, getter, of_arguments, rows_in, table
from torchboost.tokens.attention import attention
from torchboost.tokens.einsum import einsum_of_rows
from torchboost.tokens.joined import joined
from torchboost.tokens.multihead import multi_head_attention_forward
from torchboost.tokens.rows import BATCH, FLAT, TOKEN, Fill, MissingRows, Rows, known, numbered
from torchboost.tokens.scores import Scores, product
from torchboost.tokens.shapes import completed, expand, indexed, permute, reshape, selected, sliced, squeeze, unsqueeze


def _alone(func: Any, x: Rows, *rest: Any, **kwargs: Any) -> Rows:
    """Each entry by itself."""
    if any(isinstance(arg, Tensor) and arg.ndim for arg in (*rest, *kwargs.values())):
        raise MissingRows("it combines tensors")
    others, named = [_kept(x, arg) for arg in rest], {name: _kept(x, value) for name, value in kwargs.items()}
    result = x.then(lambda rows: func(rows, *others, **named))
    result.fill = _fill_of_entries(func, x, (x, *rest), kwargs)
    return result.sharing(x) if func in _DETACHING else result


def _drawn(func: Any, x: Rows, *rest: Any, **kwargs: Any) -> Rows:
    """Each entry by itself, with random numbers: drawn once, so not later."""
    fill = x.fill
    zero = None if fill is None else (lambda: 0 if known(fill) == 0 else None)
    return x.of(func(x.rows, *rest, **kwargs), fill=zero)


def _broadcast(func: Any, *args: Any, **kwargs: Any) -> Rows:
    """Several tensors that broadcast, entry by entry."""
    x = max(rows_in((*args, *kwargs.values())), key=lambda rows: rows.ndim)

    def meeting(value: Any) -> Any:
        return x.operand(value) if isinstance(value, Tensor) and value.ndim and value is not x else value

    if x.later and all(arg is x or _is_the_same_everywhere(x, arg) for arg in (*args, *kwargs.values())):
        others = [None if arg is x else _kept(x, meeting(arg)) for arg in args]
        named = {name: _kept(x, meeting(value)) for name, value in kwargs.items()}
        return x.then(lambda rows: func(*(rows if other is None else other for other in others), **named))
    values = [x.rows if arg is x else meeting(arg) for arg in args]
    result = func(*values, **{name: x.rows if value is x else meeting(value) for name, value in kwargs.items()})
    if result.ndim != x.rows.ndim:
        raise MissingRows("it adds dimensions")
    return x.of(result, fill=_fill_of_product(func, x, args) or _fill_of_entries(func, x, args, kwargs))


def _kept(x: Rows, value: Any) -> Any:
    """Return an argument of a function as it is now, also if rows wait for the function and it is written to."""
    if not x.later or not isinstance(value, Tensor) or isinstance(value, nn.Parameter):  # a call watches those
        return value
    return value.clone()


def _loss_of_entries(func: Any, one: Any, two: Any, **kwargs: Any) -> Rows:
    """A loss that is not reduced."""
    named = {name: value for name, value in kwargs.items() if value is not None}
    if named.get("reduction") != "none" or "reduce" in named or "size_average" in named:
        raise MissingRows("it combines all entries")
    return _broadcast(func, one, two, **named)


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
    """Return the result of the function for the fill of the missing positions, if it reads nothing else."""
    fill, dtype = x.fill, x.dtype
    numbers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor) and arg is not x]
    if fill is None or any(number.ndim or number.requires_grad for number in numbers):
        return None
    then, others = versions(numbers), [None if arg is x else (arg,) for arg in args]  # rows do not hold earlier rows

    def computed() -> float | bool | None:
        value = known(fill)
        if value is None or versions(numbers) != then:
            return None
        entry = torch.tensor(value, dtype=dtype)
        return func(*(entry if other is None else other[0] for other in others), **kwargs).item()

    return computed


def _masked_fill(func: Any, x: Rows, mask: Tensor, value: Any) -> Rows:
    fill = x.if_absent(mask, True, value) if isinstance(value, (bool, int, float)) else None
    return x.of(x.rows.masked_fill(x.operand(mask), value), fill=fill)


def _setitem(func: Any, x: Rows, mask: Any, value: Any) -> None:
    """``x[mask] = number``, with a mask of the first dimensions."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.shape != x.shape[: mask.ndim]:
        raise MissingRows("it writes to some positions")
    if not isinstance(value, (bool, int, float)):
        raise MissingRows("it writes a tensor")
    if isinstance(mask, Rows) and mask.ndim != x.ndim:
        raise MissingRows("it writes to some positions")
    mask = mask if isinstance(mask, Rows) else mask[(..., *(None,) * (x.ndim - mask.ndim))]
    x.replace(_masked_fill(func, x, mask, value))


def _by_last_feature(func: Any, x: Rows, *rest: Any, **kwargs: Any) -> Rows:
    """The last dimension of each position, with weights."""
    x.feature(-1)
    if any(isinstance(arg, Rows) for arg in (*rest, *kwargs.values())):
        raise MissingRows("its weight is a padded tensor")
    others, named = [_kept(x, arg) for arg in rest], {name: _kept(x, value) for name, value in kwargs.items()}
    return x.then(lambda rows: func(rows, *others, **named))


def _matmul(func: Any, x: Any, weight: Any) -> Tensor:
    if isinstance(weight, Rows) or weight.ndim != 2:
        return product(x, weight)
    return _by_last_feature(torch.matmul, x, weight)


def _addmm(func: Any, bias: Tensor, x: Rows, weight: Tensor) -> Rows:
    if x.dims != (FLAT, 0) or isinstance(weight, Rows) or isinstance(bias, Rows):
        raise MissingRows("it multiplies padded tensors")
    return x.of(torch.addmm(bias, x.rows, weight))


def _normalized(func: Any, x: Rows, normalized_shape: Sequence[int], *rest: Any, **kwargs: Any) -> Rows:
    for dim in range(-len(normalized_shape), 0):
        x.feature(dim)
    return x.of(func(x.rows, normalized_shape, *rest, **kwargs))


def _along(func: Any, x: Rows, dim: Any = None, *rest: Any, **kwargs: Any) -> Any:
    """Along features."""
    dims = [dim] if isinstance(dim, int) else dim
    if not isinstance(dims, (tuple, list)) or not dims or isinstance(dim, bool):
        raise MissingRows("it combines all entries")
    places = [x.feature(one) for one in dims]
    result = func(x.rows, places[0] if isinstance(dim, int) else places, *rest, **kwargs)
    removed = {one % x.ndim for one in dims}

    def after(rows: Tensor) -> Rows:
        if rows.ndim == x.rows.ndim:
            return x.of(rows)
        return x.of(rows, numbered([dim for place, dim in enumerate(x.dims) if place not in removed]))

    return type(result)([*map(after, result)]) if isinstance(result, tuple) else after(result)


def _reshape(func: Any, x: Rows, *sizes: Any, **kwargs: Any) -> Rows:
    given = completed(x, (*sizes, *kwargs.values()))
    if len(given) == 3 and x.ndim == 4:
        with contextlib.suppress(MissingRows, IndexError):
            return reshape(x, given)
        return joined(x, given)
    return reshape(x, given)


def _flatten(func: Any, x: Rows, start_dim: int = 0, end_dim: int = -1) -> Rows:
    start, end = start_dim % x.ndim, end_dim % x.ndim
    if start > end:
        raise MissingRows("its dimensions are in another order")
    return reshape(x, [*x.shape[:start], -1, *x.shape[end + 1 :]])


def _unflatten(func: Any, x: Rows, dim: int, sizes: Sequence[int]) -> Rows:
    place = dim % x.ndim
    return reshape(x, [*x.shape[:place], *sizes, *x.shape[place + 1 :]])


def _as_other(func: Any, x: Tensor, other: Tensor) -> Tensor:
    return reshape(x, other.shape) if isinstance(x, Rows) else x.reshape(other.shape)


def _expand_as(func: Any, x: Tensor, other: Tensor) -> Tensor:
    return expand(x, other.shape) if isinstance(x, Rows) else x.expand(other.shape)


def _permute(func: Any, x: Rows, *dims: Any, **kwargs: Any) -> Rows:
    return permute(x, _numbers(*dims, *kwargs.values()))


def _numbers(*given: Any) -> Sequence[int]:
    """Return numbers that are given as such or as one sequence."""
    return given[0] if len(given) == 1 and not isinstance(given[0], int) else given


def _transpose(func: Any, x: Rows, dim0: int = -2, dim1: int = -1) -> Rows:
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return permute(x, order)


def _expand(func: Any, x: Rows, *size: Any, **kwargs: Any) -> Rows:
    return expand(x, _numbers(*size, *kwargs.values()))


def _select(func: Any, x: Rows, dim: int, index: int) -> Tensor:
    return selected(x, dim % x.ndim, index)


def _narrow(func: Any, x: Rows, dim: int, start: int, length: int) -> Rows:
    start = range(x.shape[dim])[start] if length else 0
    if length < 0 or start + length > x.shape[dim]:
        raise MissingRows("it has another length")
    return sliced(x, dim % x.ndim, slice(start, start + length))


def _split(func: Any, x: Rows, size: Any, dim: int = 0) -> tuple[Rows, ...]:
    return tuple(x.of(part) for part in func(x.rows, size, dim=x.feature(dim)))


def _unbind(func: Any, x: Rows, dim: int = 0) -> tuple[Tensor, ...]:
    x.feature(dim)
    return tuple(selected(x, dim % x.ndim, number) for number in range(x.shape[dim]))


def _joined(func: Any, tensors: Sequence[Any], dim: int = 0) -> Rows:
    x = next(part for part in tensors if isinstance(part, Rows))
    # A cache joins the first keys to an empty tensor, whose precision counts.
    parts = [part for part in tensors if isinstance(part, Rows) or part.numel()]
    dtype = functools.reduce(torch.promote_types, [part.dtype for part in tensors])
    if len(parts) == 1:
        return x.of(x.rows.clone() if dtype is x.dtype else x.rows.to(dtype), fill=x.fill)
    return x.of(func([x.operand(part) for part in parts], dim=x.feature(dim)).to(dtype))


def _stack(func: Any, tensors: Sequence[Any], dim: int = 0) -> Rows:
    place = dim % (tensors[0].ndim + 1)
    return _joined(torch.cat, [unsqueeze(part, place) for part in tensors], place)


def _type_as(func: Any, x: Tensor, other: Tensor) -> Tensor:
    return x.then(lambda rows: rows.to(other.dtype)) if isinstance(x, Rows) else x.to(other.device, other.dtype)


def _like(func: Any, x: Rows, *rest: Any, **kwargs: Any) -> Rows:
    fill = {torch.zeros_like: 0, torch.ones_like: 1}.get(func)
    return x.of(func(x.rows, *rest, **kwargs), fill=fill)


def _new(func: Any, x: Rows, *rest: Any, **kwargs: Any) -> Tensor:
    return func(torch.empty(0, dtype=x.dtype, device=x.device), *rest, **kwargs)


def _tracked(func: Any, x: Rows, requires_grad: bool = True) -> Rows:
    """``requires_grad_``, which changes nothing for the result of a function.

    A graph that begins at frozen embeddings, such as PEFT asks for, begins at their rows.
    """
    if x.needs_grad and not requires_grad:
        raise MissingRows("it ends a graph")
    if requires_grad and not x.needs_grad:
        x.base, x.needs_grad = x.rows.detach().requires_grad_(), True  # other tensors have the same rows
        func(x)
    return x


def _labelled_loss(
    func: Any,
    logits: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of labelled positions. Only their logits are computed."""
    strange = size_average is not None or reduce is not None or isinstance(target, Rows) or target.is_floating_point()
    if strange or logits.dims not in ((FLAT, 0), (BATCH, 0, TOKEN)):
        raise MissingRows("its arguments are of another kind")
    if target.shape != (logits.shape[:1] if logits.ndim == 2 else (logits.shape[0], logits.shape[2])):
        raise MissingRows("its arguments are of another kind")
    labels = target.reshape(-1)
    labelled = (labels != ignore_index).nonzero().squeeze(1)
    if not labelled.numel():
        raise MissingRows("no position has a label")
    rows = logits.positions.row_of.view(-1)[labelled]
    if bool((rows < 0).any()):
        raise MissingRows("padded positions have labels")
    picked = logits.picked(rows)
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    options |= {"label_smoothing": label_smoothing} if label_smoothing else {}
    losses = func(picked, labels[labelled], **options)
    if reduction != "none":
        return losses
    return losses.new_zeros(labels.shape).index_copy(0, labelled, losses).view(target.shape)


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
    _broadcast: (
        "add sub mul div true_divide pow maximum minimum where subtract multiply divide eq ne lt le gt ge logical_and "
        "logical_or bitwise_and bitwise_or addcmul lerp rsub floor_divide remainder fmod __and__ __or__ __rsub__ "
        "__add__ __radd__ __mul__ __rmul__ __sub__ __truediv__ __rtruediv__ __pow__ __rpow__ __eq__ __ne__ __lt__ "
        "__gt__ __le__ __ge__"
    ),
    _masked_fill: "masked_fill",
    _setitem: "__setitem__",
    _loss_of_entries: "mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits",
    _by_last_feature: "linear",
    _matmul: "matmul __matmul__ mm bmm",
    _addmm: "addmm",
    einsum_of_rows: "einsum",
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
    of_arguments(unsqueeze): "unsqueeze",
    of_arguments(squeeze): "squeeze",
    of_arguments(indexed): "__getitem__",
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
    attention: "scaled_dot_product_attention",
    multi_head_attention_forward: "multi_head_attention_forward",
    _labelled_loss: "cross_entropy nll_loss",
}


PaddedRows.answers = {getter("mT"): _transpose, **table(_NAMES)}
Scores.answers = {**Scores.answers, **table({_type_as: "type_as", _expand_as: "expand_as"})}
