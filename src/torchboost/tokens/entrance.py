"""The places at which padded tensors of a model become rows: which argument masks another one, and where it is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.core.torch_private import has_saved_tensor_hooks
from torchboost.tokens.attention import EXCLUDED
from torchboost.tokens.call import Part
from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.rows import BATCH, TOKEN

Pair = tuple[str, str]
Key = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Memory, shape and strides of a tensor."""
Place = tuple[Layout, tuple[int, int]]
"""A layout, and the order of batch and length in the tensor."""

_LEAST = 0.05
"""Share of padding below which a call computes the padding: to skip it costs a few microseconds for each function."""
_MOST_ARGUMENTS = 16
_IDS = (torch.int64, torch.int32)
_ADJUSTING = ("max_norm", "scale_grad_by_freq", "sparse")
"""Options with which an embedding changes more than the rows that it returns."""
_MASKS = (torch.bool, *_IDS, torch.uint8, torch.float32)


def may_mask(model: nn.Module) -> bool:
    """Whether a model has parts that tell which of its positions are padding."""
    return any(
        isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention))
        or (isinstance(module, nn.Embedding) and module.padding_idx is not None)
        for module in model.modules()
    )


def layouts_of(owner: object, pairs: Sequence[Pair], arguments: Mapping[str, Any]) -> dict[Key, Place]:
    """Return the layout of each argument whose padding can be skipped.

    The pairs name a mask of tokens and its argument. If none is among the arguments, all pairs of a mask and token ids
    of its shape are tried. The ids then show whether the mask marks tokens or padding: all ids of padding are equal.
    """
    layouts: dict[Key, Place] = {}
    known: dict[Tensor, Layout | None] = {}
    for tokens, kept in _masked(pairs, arguments):
        if kept is None:
            continue
        if kept not in known:
            known[kept] = _layout(owner, kept)
        if (layout := known[kept]) is not None:
            layouts[_key(tokens)] = layout, (BATCH, TOKEN)
            if tokens.ndim == 2:
                layouts.setdefault(_key(tokens.t()), (layout, (TOKEN, BATCH)))
    return layouts


def has_mask(pairs: Sequence[Pair], arguments: Mapping[str, Any]) -> bool:
    """Whether an argument tells where another one has padding, be it much, little or none."""
    return any(kept is not None for _, kept in _masked(pairs, arguments))


def _masked(pairs: Sequence[Pair], arguments: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the arguments that are masked, and where they have tokens, or None if the mask does not tell."""
    named: dict[Tensor, Tensor | None] = {}
    for mask_name, name in pairs:
        mask, tokens = arguments.get(mask_name), arguments.get(name)
        if type(mask) is not Tensor or type(tokens) is not Tensor or mask.ndim != 2:
            continue
        if tokens.shape[:2] != mask.shape or tokens.ndim > 3 or tokens.device != mask.device:
            continue
        if mask not in named:
            named[mask] = _kept(mask)
        yield tokens, named[mask]
    for mask, tokens in () if named else _guessed(arguments):
        kept = _kept(mask)
        yield tokens, None if kept is None else kept_positions(tokens, kept)


def _key(tensor: Tensor) -> Key:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _guessed(arguments: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of arguments of which one may mask the other, the second in the shape of the first."""
    tensors = [value for value in [*arguments.values()][:_MOST_ARGUMENTS] if type(value) is Tensor and value.ndim == 2]
    for tokens, mask in itertools.product(tensors, tensors):
        if mask is not tokens and tokens.device == mask.device and tokens.dtype in _IDS and mask.dtype in _MASKS:
            if mask.shape == tokens.shape:
                yield mask, tokens
            elif mask.shape == tokens.shape[::-1]:  # masks have the batch first, whatever ids have
                yield mask, tokens.t()


def _kept(mask: Tensor) -> Tensor | None:
    """Return the mask as booleans, if it holds only zeros and ones."""
    kept = mask.bool()
    return kept if mask.dtype is torch.bool or bool((kept == mask).all()) else None


def kept_positions(tokens: Tensor, mask: Tensor) -> Tensor | None:
    """Return which positions have tokens, or None if the mask does not tell, which is true at tokens or at padding.

    All of them have the shape (batch, length).
    """
    marked, others = _ends(tokens, mask), _ends(tokens, ~mask)
    same_marked, same_others = torch.stack([marked[0] == marked[1], others[0] == others[1]]).tolist()
    if same_marked is same_others:
        return None
    return mask if same_others else ~mask


def _ends(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest id at which a mask is true."""
    ends = torch.iinfo(tokens.dtype)
    return tokens.masked_fill(~mask, ends.max).amin(), tokens.masked_fill(~mask, ends.min).amax()


def _layout(owner: object, kept: Tensor) -> Layout | None:
    """Return the layout of positions, or None if it would skip next to nothing, or a whole sequence."""
    lengths = kept.sum(1)
    count, least = torch.stack([lengths.sum(), lengths.amin()]).tolist() if kept.numel() else (0, 0)
    return None if count > (1 - _LEAST) * kept.numel() or not least else Layout(kept, owner)


class Entrance(Part):
    """Inside of it, padded tensors become rows if their padding is known.

    These are embeddings of token ids whose layout is given, or, if ``by_ids``, that have a ``padding_idx``, and keys of
    ``nn.MultiheadAttention`` with a ``key_padding_mask``, with the queries if these are the same tensor. A layout that
    does not fit the rest of the model costs a call, but no result, because the model asks for the missing positions.

    Attributes:
        layouts: All layouts that were used.
    """

    def __init__(
        self, owner: object, layouts: Mapping[Key, Place], *, by_ids: bool = True, named: bool = False
    ) -> None:
        super().__init__()
        self._owner, self._given, self._by_ids, self._named = owner, dict(layouts), by_ids, named
        self._guessed = False
        self._seen: dict[Key | int, tuple[Tensor, Layout | None]] = {}
        self.layouts = list(dict.fromkeys(layout for layout, _ in layouts.values()))

    def used(self) -> bool:
        """Whether there is padding."""
        return bool(self.layouts)

    def layout(self, output: Tensor) -> Layout | None:
        """Return the layout of the shape of an output."""
        return next((layout for layout in self.layouts if layout.mask.shape == output.shape[:2]), None)

    def fewer(self) -> Entrance | None:
        """Return an entrance that takes no ids for padding, if that was a guess and something else tells."""
        if self._guessed and (self._named or len(self.layouts) > 1):
            return Entrance(self._owner, self._given, by_ids=False)
        return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a call of a function of torch. In a checkpoint it stays as it is: there it is called once more."""
        kwargs = kwargs or {}
        if func not in (F.embedding, F.multi_head_attention_forward) or has_saved_tensor_hooks():
            return func(*args, **kwargs)
        if func is F.embedding:
            if args and type(args[0]) is Tensor and not any(map(kwargs.get, _ADJUSTING)) and len(args) < 4:
                return self._embedding(*args, **kwargs)
        else:
            query, key, value, *others = args
            args = (*self._with_keys(query, key, value, kwargs.get("key_padding_mask")), *others)
        return func(*args, **kwargs)

    def _embedding(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layout, order = self._given.get(_key(ids), (None, (BATCH, TOKEN)))
        padding = args[1] if len(args) > 1 else kwargs.get("padding_idx")
        if layout is None and self._by_ids and padding is not None and ids.ndim == 2:
            layout = self._layout(_key(ids), ids, lambda: ids != padding)
            self._guessed |= layout is not None
        if layout is None:
            return F.embedding(ids, *args, **kwargs)
        ids = ids if order == (BATCH, TOKEN) else ids.t()
        rows = F.embedding(ids.flatten().index_select(0, layout.index), *args, **kwargs)
        return PaddedRows(rows, layout, (*order, 0))

    def _with_keys(self, query: Any, key: Any, value: Any, mask: Any) -> tuple[Any, Any, Any]:
        """Return queries, keys and values as rows, if the mask excludes others. Shape (length, batch, width)."""
        if type(mask) is not Tensor or mask.ndim != 2 or type(key) is not Tensor or key.ndim != 3:
            return query, key, value
        if type(value) is not Tensor or key.shape[:2] != mask.shape[::-1] or value.shape[:2] != key.shape[:2]:
            return query, key, value
        layout = self._layout(id(mask), mask, lambda: ~mask if mask.dtype is torch.bool else mask >= EXCLUDED)
        if layout is None:
            return query, key, value
        rows = self._rows(key, layout)
        return rows if query is key else query, rows, rows if value is key else self._rows(value, layout)

    def _rows(self, tensor: Tensor, layout: Layout) -> Tensor:
        rows = PaddedRows(layout.gathered(tensor, (1, 0)), layout, (TOKEN, BATCH, 0))
        rows.memory.copied(tensor)
        return rows

    def _layout(self, key: Key | int, tensor: Tensor, kept: Callable[[], Tensor]) -> Layout | None:
        """Return the layout of a mask that is found inside the model."""
        seen, layout = self._seen.get(key, (None, None))
        if seen is None:
            layout = _layout(self._owner, kept())
            if layout is not None:
                same = (one for one in self.layouts if torch.equal(one.mask, layout.mask))
                layout = next(same, layout)
                self.layouts += [] if layout in self.layouts else [layout]
            self._seen[key] = tensor, layout
        return layout
