"""Where padded tensors of a model become rows: which argument masks another one, and where it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.rows import BATCH, TOKEN

__all__ = ["Entrance", "Pair", "kept_positions", "layouts_of", "may_mask"]

Pair = tuple[str, str]
Key = tuple[int, tuple[int, ...], tuple[int, ...]]

_LEAST = 0.05
"""Share of padding below which a call computes it: leaving it out costs a few microseconds for each function."""
_MOST_ARGUMENTS = 16


def may_mask(model: nn.Module) -> bool:
    """Whether a model has parts that tell which of its positions are padding."""
    return any(
        isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention))
        or (isinstance(module, nn.Embedding) and module.padding_idx is not None)
        for module in model.modules()
    )


def layouts_of(owner: object, pairs: Sequence[Pair], arguments: Mapping[str, Any]) -> dict[Key, Layout]:
    """Return the layout of each argument whose padding can be left out, by its memory and shape.

    Args:
        owner: Of the layouts.
        pairs: Names of a mask of tokens and of what it masks. If none is among the arguments, all pairs are tried of a
            mask and token ids of its shape. There, whether the mask marks tokens or padding is seen from the ids: those
            of padding are all the same.
        arguments: Of a call.
    """
    layouts: dict[Key, Layout] = {}
    by_mask: dict[int, Layout | None] = {}
    for mask_name, name in pairs:
        mask, tokens = arguments.get(mask_name), arguments.get(name)
        if type(mask) is not Tensor or type(tokens) is not Tensor or mask.ndim != 2:
            continue
        if tokens.shape[:2] != mask.shape or tokens.ndim > 3:
            continue
        if id(mask) not in by_mask:
            by_mask[id(mask)] = _layout(owner, _kept(mask))
        _enter(layouts, tokens, by_mask[id(mask)])
    if by_mask:
        return layouts
    for mask, tokens in _guessed(arguments):
        kept = _kept(mask)
        marks = None if kept is None else kept_positions(tokens, kept)
        _enter(layouts, tokens, _layout(owner, marks))
    return layouts


def _enter(layouts: dict[Key, Layout], tokens: Tensor, layout: Layout | None) -> None:
    if layout is not None:
        layouts[_key(tokens)] = layout


def _key(tensor: Tensor) -> Key:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _guessed(arguments: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of arguments of which one may mask the other, the mask in the shape of the other."""
    tensors = [value for value in [*arguments.values()][:_MOST_ARGUMENTS] if type(value) is Tensor and value.ndim == 2]
    for tokens in tensors:
        if tokens.dtype in (torch.int64, torch.int32):
            for mask in tensors:
                if mask is not tokens and mask.dtype in (
                    torch.bool,
                    torch.int64,
                    torch.int32,
                    torch.uint8,
                    torch.float32,
                ):
                    if mask.shape == tokens.shape:
                        yield mask, tokens
                    elif mask.shape == tokens.shape[::-1]:
                        yield mask.t(), tokens


def _kept(mask: Tensor) -> Tensor | None:
    """Return the mask as booleans, if it has nothing but zeros and ones."""
    kept = mask.bool()
    return kept if mask.dtype is torch.bool or bool((kept == mask).all()) else None


def kept_positions(tokens: Tensor, mask: Tensor) -> Tensor | None:
    """Return which positions have tokens; None if the mask does not tell.

    Args:
        tokens: Ids. Shape (batch, length).
        mask: True at tokens or at padding. Shape (batch, length).
    """
    marked, others = _ends(tokens, mask), _ends(tokens, ~mask)
    same_marked, same_others = torch.stack([marked[0] == marked[1], others[0] == others[1]]).tolist()
    if same_marked is same_others:
        return None
    return mask if same_others else ~mask


def _ends(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest id where a mask is true."""
    ends = torch.iinfo(tokens.dtype)
    return tokens.masked_fill(~mask, ends.max).amin(), tokens.masked_fill(~mask, ends.min).amax()


def _layout(owner: object, kept: Tensor | None) -> Layout | None:
    """Return the layout of positions; None if it would leave out next to nothing, or a whole sequence."""
    if kept is None:
        return None
    lengths = kept.sum(1)
    count, least = torch.stack([lengths.sum(), lengths.amin()]).tolist() if kept.numel() else (0, 0)
    return None if count > (1 - _LEAST) * kept.numel() or not least else Layout(kept, owner)


class Entrance(TorchFunctionMode):
    """Inside of it, embeddings of padded token ids give the rows of their tokens.

    Args:
        owner: Of the layouts.
        layouts: Of arguments of the model, by memory and shape.
    """

    def __init__(self, owner: object, layouts: Mapping[Key, Layout]) -> None:
        super().__init__()
        self._owner = owner
        self._layouts: dict[Key, Layout | None] = dict(layouts)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch."""
        kwargs = kwargs or {}
        if func is F.embedding and args and type(args[0]) is Tensor:
            ids, *rest = args
            layout = self._layouts.get(_key(ids))
            if layout is not None:
                rows = func(ids.flatten().index_select(0, layout.index), *rest, **kwargs)
                return PaddedRows(rows, layout, (BATCH, TOKEN, 0))
        return func(*args, **kwargs)
