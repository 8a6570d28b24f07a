"""Token dropping: compute random tokens in the middle blocks of a transformer, fewer at the begin of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import Optimizer

from torchboost.algorithms.token_drop.dropping import TokenDropping
from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.core.arguments import check_module, check_optimizer
from torchboost.core.torch_private import AnyBatchNorm, AnyConv
from torchboost.core.wrapping import hookable, unwrap, wrapper_of
from torchboost.errors import IncompatibleError, warn_no_effect

_LEAST_BLOCKS = 3
_LEAST_MATRICES = 2
"""A block of a transformer has attention and a perceptron."""
_MIXING = (AnyConv, AnyBatchNorm, nn.RNNBase)
"""Layers that compute tokens from their neighbours or from the whole batch."""
_SHARDED = ("fully_shard", "FullyShardedDataParallel")


@dataclass(frozen=True, kw_only=True)
class TokenDrop(Algorithm):
    """Compute a random part of the tokens in all blocks but the first and the last one.

    Each of these blocks draws its own tokens at each update. The other tokens skip the block and keep their values. The
    share of computed tokens grows from ``keep`` in ``stages`` equal steps, and is 1 from the share ``until`` of the run
    on. Then the model runs its plain code. Evaluation is not changed.

    Args:
        keep: Share of the tokens in the first stage, above 0 and below 1.
        until: Share of the run after which all tokens are computed, above 0 and at most 1.
        stages: Number of different shares below 1. A compiled model needs a graph for each.
        total_steps: Number of updates of the whole run.
    """

    name: ClassVar[str] = "token_drop"
    traits: ClassVar[Traits] = Traits(order=14, withdrawn=1)

    keep: float = 0.5
    until: float = 0.7
    stages: int = 4
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.keep < 1:
            raise ValueError(f"keep={self.keep}: pass a share of the tokens above 0 and below 1.")
        if not 0 < self.until <= 1:
            raise ValueError(f"until={self.until}: pass a share of the run above 0 and at most 1.")
        for name in ("stages", "total_steps"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"{name}={count}: pass an integer of 1 or more.")
        if self.total_steps is not None and self.total_steps > 2**53:
            raise ValueError("total_steps: found more than 2**53; pass the number of updates of the run.")

    def share(self, step: int) -> float:
        """Return the share of tokens that the middle blocks compute at an update, counted from 0.

        Example:
            >>> settings = TokenDrop(total_steps=100, stages=2)
            >>> [settings.share(step) for step in (0, 34, 35, 69, 70)]
            [0.5, 0.5, 0.75, 0.75, 1.0]
        """
        if self.total_steps is None:
            return 1.0
        end = round(self.until * self.total_steps)
        if step >= end:
            return 1.0
        return self.keep + (1 - self.keep) * (step * self.stages // end) / self.stages

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Explain that the length of the run is not known, or that the model has no list of equal blocks."""
        if self.total_steps is None:
            return "it must know the length of the run: pass total_steps, the number of updates"
        return _objection(model) or _middle_of(model)[1]

    def graphs(self) -> int:
        """Return the number of different shares, 1 included."""
        return self.stages + 1

    def check(self, target: Target) -> None:
        """Refuse a sharded model, ``DataParallel``, and a run of unknown length."""
        _check(self, target.model)

    def attach(self, target: Target) -> Attachment:
        """Drop tokens in the blocks, as the first update needs it, and follow the schedule from then on."""
        return drop_tokens(target.model, target.optimizer, self, seed=target.seed, rank=target.topology.rank)


def drop_tokens(
    model: nn.Module, optimizer: Optimizer, settings: TokenDrop, *, seed: int = 0, rank: int = 0
) -> TokenDropping:
    """Drop random tokens in the middle blocks of a model in your own loop, which does not change.

    The blocks are the children of the one ``nn.ModuleList`` or ``nn.Sequential`` of three or more equal blocks. Their
    first argument must be hidden states of shape (batch, length, width) or (length, batch, width), and they must return
    such states alone. Masks, positions and rotary angles among the other arguments are reduced to the same tokens.

    Whether this is right for a block is found out at its first call, on a copy with random weights, before any token is
    dropped. If a block knows positions by itself, or attends in windows, this call raises.

    Args:
        model: The model as the loop calls it, wrapped in DDP or compiled before or after this.
        optimizer: The optimizer of the model, whose updates are counted.
        settings: See :class:`TokenDrop`.
        seed: Of the random tokens.
        rank: Of this process. Ranks draw other tokens.

    Returns:
        The live effect: ``step``, ``share``. Save ``state_dict()`` in the checkpoint. ``remove()`` computes all tokens.

    Raises:
        IncompatibleError: The model is sharded, or wrapped by ``DataParallel``. The first training call raises it if it
            is not shown that its tokens can be dropped.
        TypeError: Not a module, or not an optimizer.
        ValueError: ``total_steps`` is missing.

    Source: Z. Yao et al., Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale
    Transformers, arXiv:2211.11586.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> dropping = drop_tokens(model, optimizer, TokenDrop(total_steps=100))
        >>> model(torch.randn(2, 32, 16)).shape, dropping.share, dropping.calls
        (torch.Size([2, 32, 16]), 0.5, 2)
    """
    check_module(model)
    check_optimizer(optimizer)
    _check(settings, model)
    blocks, reason = _middle_of(model)
    if reason is not None:
        warn_no_effect(f"token_drop: {reason}, so no token is left out.")
    return TokenDropping(hookable(optimizer), blocks, settings.share, seed=seed, rank=rank)


def _check(settings: TokenDrop, model: nn.Module) -> None:
    if settings.total_steps is None:
        raise ValueError(
            "total_steps: found none, and the share of tokens depends on the length of the run; pass the number of "
            "updates of the whole run."
        )
    reason = _objection(model)
    if reason is not None:
        raise IncompatibleError(f"token_drop: {reason}; leave token_drop out, or use DistributedDataParallel.")


def _objection(model: nn.Module) -> str | None:
    wrapper = "DataParallel" if isinstance(model, DataParallel) else wrapper_of(unwrap(model))
    if wrapper == "DataParallel" or wrapper in _SHARDED:
        return f"the model is wrapped by {wrapper}, under which a block cannot be looked at by itself"
    return None


def _middle_of(model: nn.Module) -> tuple[list[nn.Module], str | None]:
    """Return the blocks that may drop tokens, or none, and the reason, if it is not clear which they are."""
    stacks = list(_stacks(unwrap(model)))
    if not stacks:
        return [], f"the model has no list of {_LEAST_BLOCKS} or more equal blocks"
    if len(stacks) > 1:
        return [], f"the model has {len(stacks)} lists of equal blocks, and it is made for one"
    return stacks[0][1:-1], None


def _stacks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the outermost lists of equal blocks."""
    children = list(module.children())
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) == len(children) and _are_equal(children):
        yield children
        return
    for child in children:
        yield from _stacks(child)


def _are_equal(blocks: list[nn.Module]) -> bool:
    if len(blocks) < _LEAST_BLOCKS or len(set(map(type, blocks))) > 1:
        return False
    shapes = [[(name, parameter.shape) for name, parameter in block.named_parameters()] for block in blocks]
    matrices = sum(len(shape) > 1 for _, shape in shapes[0])
    mixes = any(isinstance(part, _MIXING) for part in blocks[0].modules())
    return matrices >= _LEAST_MATRICES and not mixes and all(one == shapes[0] for one in shapes)
