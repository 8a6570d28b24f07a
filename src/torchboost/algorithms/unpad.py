"""Skip the padding of a batch of sequences: no result depends on it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_module
from torchboost.core.wrapping import compiled_parts, sharded_units, unwrap
from torchboost.tokens.call import PartialCall, PartialForward
from torchboost.tokens.entrance import Entrance, Pair, has_mask, layouts_of, may_mask
from torchboost.tokens.rows import MissingRows

_PAIRS: tuple[Pair, ...] = (
    ("attention_mask", "input_ids"),
    ("attention_mask", "inputs_embeds"),
    ("decoder_attention_mask", "decoder_input_ids"),
    ("decoder_attention_mask", "decoder_inputs_embeds"),
)
"""Arguments of the models of transformers: a mask, and the argument that it masks."""


def unpad_forward(model: nn.Module, *, pairs: Sequence[Pair] = _PAIRS) -> Attachment:
    """Compute a padded batch of sequences without its padding, in training.

    The tokens of all sequences become rows of one tensor. Functions that treat each position by itself, such as linear
    layers, norms and activations, compute these rows. Attention is computed for sequences of about the same length
    together, if its mask excludes the padding. A loss computes the positions that it does not ignore. Every other
    function needs the whole tensor: the call is then repeated with the padding, and calls of this kind are no longer
    tried. So losses and gradients equal the padded batch's up to the order of additions, or the padding is computed,
    too.

    The padding is known from the masks among the arguments, from the ``padding_idx`` of embeddings and from the
    ``key_padding_mask`` of ``nn.MultiheadAttention``. It is a guess: if it is wrong, a function asks for the padding.

    Outputs keep their padded shape. If the loop reads padding in them, the call is repeated, and later calls compute
    it. The first call computes everything and sees which positions the loop reads. Dropout draws one number for each
    computed entry, so it draws others than with the padding. Evaluation is not changed.

    Args:
        model: The bare model, as the loop calls it.
        pairs: Names of two arguments of ``model.forward``: a mask of ones and zeros or of booleans, shape
            (batch, length), and the token ids or embeddings that it masks, shape (batch, length, ...). Without such
            arguments every mask of the shape of token ids is tried, whether it marks tokens or padding.

    Returns:
        Its ``remove()`` restores the forward of the model.

    Raises:
        TypeError: Not a module.

    Cost: about 20 microseconds for each function of torch in a forward pass, and one reading of the mask.

    Source: the idea comes from the unpadded BERT of MLPerf (Zeng et al., Boosting Distributed Training Performance of
    the Unpadded BERT Model, arXiv:2208.08124).

    Example:
        >>> import torch
        >>> class Bag(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.words, self.out = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 2)
        ...     def forward(self, input_ids, attention_mask):
        ...         rows = self.out(self.words(input_ids)) * attention_mask[..., None]
        ...         return rows.sum(1)
        >>> model, ids = Bag(), torch.tensor([[1, 2, 0], [3, 0, 0]])
        >>> with unpad_forward(model):
        ...     model(ids, (ids > 0).long()).shape
        torch.Size([2, 2])
    """
    check_module(model)
    return _attached(model, (), pairs)


@dataclass(frozen=True, kw_only=True)
class Unpad(Algorithm):
    """Settings of :func:`unpad_forward`.

    Args:
        pairs: Names of masks and of the arguments that they mask.
    """

    name: ClassVar[str] = "unpad"
    traits: ClassVar[Traits] = Traits(order=12, each_optimizer=True, eager=True)

    pairs: tuple[Pair, ...] = _PAIRS

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", tuple(tuple(pair) for pair in self.pairs))  # JSON has lists only

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that the model has no argument that masks another one, or that it is sharded or compiled in parts."""
        if compiled_parts(model):
            return "a part of the model is compiled, and compiled code takes whole tensors only"
        if sharded_units(model):
            return "FSDP2 passes hidden states through functions of autograd, which take whole tensors only"
        bare = unwrap(model)
        names = inspect.signature(bare.forward).parameters
        embeds = len(names) > 1 and any(isinstance(module, nn.Embedding) for module in bare.modules())
        if not (embeds or may_mask(bare) or any(mask in names for mask, _ in self.pairs) or "kwargs" in names):
            return "no argument of its forward masks padding"
        return None

    def fitted(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self:
        """See in one pass whether the padding of a call can be skipped."""
        with _attached(model, (), self.pairs) as live:
            model(*args, **kwargs)
        reason = live.remark or ("" if live.calls else "the first batch has next to no padding")
        return self.noting(reason)

    def positions(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tokens of padded sequences. Runs the model if a mask may be made inside of it."""
        entrance = _entrance(model, args, kwargs, self.pairs)
        if may_mask(unwrap(model)):
            with contextlib.suppress(MissingRows), entrance:
                model(*args, **kwargs)
        return [layout.mask for layout in entrance.layouts]

    def attach(self, target: Target) -> Attachment:
        """Cover the forward of the model."""
        return _attached(target.model, target.optimizers, self.pairs)


def _attached(model: nn.Module, optimizers: Sequence[Optimizer], pairs: Sequence[Pair]) -> PartialForward:
    signature, masks = inspect.signature(unwrap(model).forward), may_mask(unwrap(model))

    def part(call: PartialCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entrance | None:
        arguments = _arguments(signature, args, kwargs)
        layouts = layouts_of(call, pairs, arguments)
        named = any(arguments.get(mask) is not None for mask, _ in pairs)
        return Entrance(call, layouts, by_ids=not call.forward.fewer, named=named) if layouts or masks else None

    return PartialForward("unpad", model, optimizers, part)


def masks_among(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tokens of padded sequences as far as the arguments of a call tell. The model is not run."""
    return [layout.mask for layout in _entrance(model, args, kwargs, _PAIRS).layouts]


def marks_padding(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an argument of a call tells where another one has padding, also if there is none."""
    return has_mask(_PAIRS, _arguments(inspect.signature(unwrap(model).forward), args, dict(kwargs)))


def _entrance(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], pairs: Sequence[Pair]) -> Entrance:
    arguments = _arguments(inspect.signature(unwrap(model).forward), args, dict(kwargs))
    return Entrance(None, layouts_of(None, pairs, arguments))


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself says so
        return {}
    extra = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    return {**bound, **bound.get(extra, {})}
