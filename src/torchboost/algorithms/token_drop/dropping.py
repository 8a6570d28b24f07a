"""Compute random tokens in some blocks of a model, in a running loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from torchboost.algorithms.token_drop.axes import (
    LEAST_LENGTH,
    Call,
    TokenAxes,
    Unclear,
    hidden_states,
    kind_of,
    only_tensor,
    pick,
    token_axes,
)
from torchboost.core.algorithm import Attachment
from torchboost.core.forward import Forward, cover_forward, is_our_hook, with_tensors
from torchboost.core.step import learns_nothing
from torchboost.core.torch_private import (
    inside_backward,
    inside_function_transform,
    inside_mode,
    is_tracing,
    module_hooks,
    not_traced,
)
from torchboost.errors import IncompatibleError, warn_no_effect
from torchboost.sheet import percent
from torchboost.tokens.rows import MissingRows, Rows

_REMEDY = "leave token_drop out of this model"


@dataclass(slots=True, eq=False)
class _Block:
    """A block of the middle."""

    place: int  # among them
    module: nn.Module
    # Kind of call -> the axes of its tokens, None if they are not dropped, and the most tokens of calls looked at.
    known: dict[Any, tuple[TokenAxes | None, int]] = field(default_factory=dict)
    called_at: int = -1  # the update in which a pass with gradients last began

    def check_hooks(self) -> None:
        """Raise :class:`Unclear` if a hook reads the inside of the block."""
        for part in self.module.modules():
            hooks = module_hooks(part)[1] if part is not self.module else {}
            if hooks and not all(map(is_our_hook, hooks.values())):
                raise Unclear(
                    f"a forward hook of a {type(part).__name__} reads what is inside of a block, and would see some "
                    "tokens alone; remove it, or ask the model for no outputs of attention or routers"
                )


class TokenDropping(Attachment):
    """Lets blocks compute random tokens of a training call. The others keep the values that they have.

    The tokens are a function of the seed, the rank, the number of updates, the block and the number of tokens. So a
    pass that is repeated, by gradient checkpointing for instance, computes the same tokens, and a checkpoint needs only
    the number of updates.

    ``share`` maps an update, counted from 0, to the share of tokens that is computed. From 1.0 on the forward of the
    blocks is their classes' own.

    Attributes:
        step: Number of updates so far.
        calls: How many calls of blocks have dropped tokens.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        blocks: Sequence[nn.Module],
        share: Callable[[int], float],
        *,
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        self.step, self.calls, self._reason = 0, 0, ""
        self._share, self._seed, self._rank = share, seed, rank
        self._blocks = [_Block(place, block) for place, block in enumerate(blocks)]
        self._covers: list[Attachment] = []
        self._guess: TokenAxes | None = None
        self._updated_here, self._waiting = False, 0
        super().__init__(optimizer.register_step_post_hook(not_traced(self._count)), undo=self._uncover)
        self._follow()

    @property
    def share(self) -> float:
        """The share of tokens that the blocks compute now."""
        return self._share(self.step)

    @property
    def remark(self) -> str:
        """Why some calls compute all tokens, empty if none was found."""
        return self._reason

    def figures(self) -> dict[str, float]:
        """Return the share of tokens that the blocks compute."""
        return {"tokens": self.share}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates, the seed, and, as a check, the share of tokens."""
        return {"step": self.step, "seed": self._seed, "share": self.share}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a checkpoint, with the tokens that the interrupted run would have had.

        ``ValueError``: these settings compute another share of tokens at that update. Nothing was changed.
        """
        step, seed, share = int(state["step"]), int(state["seed"]), float(state["share"])
        if share != self._share(step):
            raise ValueError(
                f"the checkpoint computed {percent(share)} of the tokens at update {step}, but these settings compute "
                f"{percent(self._share(step))}; attach with the settings that the checkpoint was saved with."
            )
        self.step, self._seed, self._waiting = step, seed, 0
        self._follow()

    def _follow(self) -> None:
        """Cover the blocks if they drop tokens, otherwise uncover them."""
        if self.share >= 1:
            self._uncover()
        elif not self._covers:
            self._covers = [cover_forward(block.module, self._cover_of(block)) for block in self._blocks]

    def _uncover(self) -> None:
        while self._covers:
            self._covers.pop().remove()

    def _cover_of(self, block: _Block) -> Any:
        """Return a function to call instead of a block's forward. The compiler does not trace it, but the block."""
        before, after = not_traced(self._before), not_traced(_put_back)

        def around(forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            ready = before(block, module, args, kwargs)
            if ready is None:
                return forward(module, *args, **kwargs)
            (some_args, some_kwargs), put = ready
            output = after(forward(module, *some_args, **some_kwargs), *put)
            return forward(module, *args, **kwargs) if output is None else output

        return not_traced(around, recursive=False)

    def _before(
        self, block: _Block, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, tuple[Tensor, int, Tensor, bool]] | None:
        """Return the arguments of some tokens, and their places, or None if all tokens are computed."""
        again = inside_backward()
        if self._waiting and not again:
            self._advance()
        call = (args, kwargs)
        if not (module.training and torch.is_grad_enabled()) or self.share >= 1 or _is_traced(call):
            return None
        if again and block.called_at != self.step:
            raise IncompatibleError(
                "token_drop: a backward pass computes a block of which there was no forward pass with gradients in "
                "this update, as under torch.utils.checkpoint with use_reentrant=True. Pass use_reentrant=False to the "
                "checkpointing, or leave token_drop out."
            )
        block.called_at = self.step
        try:
            axes = self._axes(block, call, again=again)
        except Unclear as error:
            self._leave_out(str(error))
            return None
        if axes is None:
            return None
        hidden = hidden_states(call)
        kept = self._kept(block.place, hidden.shape[axes[0][0]], hidden.device)
        if kept is None:
            return None
        self.calls += not again
        return pick(call, axes, kept), (hidden, axes[0][0], kept, any(axes[1:]))

    def _axes(self, block: _Block, call: Call, *, again: bool) -> TokenAxes | None:
        """Return the axes of tokens, or None if this call computes all of them.

        A kind of call is looked at when it comes first, and when its sequences are longer than any before. If its
        tokens cannot be dropped, :class:`Unclear` is raised once.
        """
        hidden = hidden_states(call)
        block.check_hooks()
        if isinstance(hidden, Rows):
            raise MissingRows("token_drop computes some tokens of a block alone", (hidden.positions.owner,))
        kind = kind_of(call, hidden)
        axes, longest = block.known.get(kind, (None, -1))
        if longest >= 0 and (axes is None or hidden.shape[axes[0][0]] <= longest):
            return axes
        if again or max(hidden.shape[:2]) < LEAST_LENGTH or inside_mode():
            return None
        block.known[kind] = None, 0
        axes = token_axes(block.module, call, self._guess)
        if axes is None:
            del block.known[kind]
            return None
        block.known[kind] = axes, hidden.shape[axes[0][0]]
        self._guess = axes
        return axes

    def _kept(self, place: int, length: int, device: torch.device) -> Tensor | None:
        """Return the tokens that a block computes in this update, in ascending order, or None if it computes all.

        The first and the last one are always among them, so that a sequence with padding on one side has a token.
        """
        count = round(self.share * length)
        if length < LEAST_LENGTH or count >= length:
            return None
        return _drawn(length, count, self._seed, self._rank, self.step, place).to(device)

    def _leave_out(self, reason: str) -> None:
        """Raise in the first update, in which nothing was trained with dropped tokens. Later warn once."""
        text = f"token_drop: {reason}"
        if not self._updated_here:
            raise IncompatibleError(f"{text}; {_REMEDY}.")
        if not self._reason:
            warn_no_effect(f"{text}. Such calls compute all tokens.")
        self._reason = reason

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        if learns_nothing(optimizer):
            return
        if not (self._updated_here or self.calls or self._reason or self.share >= 1):
            warn_no_effect(
                "token_drop had no effect: there was an update, but no block of the middle was called in training "
                f"mode, with {LEAST_LENGTH} tokens or more and outside of modes of torch, before it. "
                f"{_REMEDY.capitalize()}."
            )
        self._updated_here = True
        self._waiting += 1
        if not inside_backward():  # an update of a part of the parameters while others are still computed
            self._advance()

    def _advance(self) -> None:
        self.step, self._waiting = self.step + self._waiting, 0
        self._follow()


def _is_traced(call: Call) -> bool:
    args, kwargs = call
    symbolic = issubclass(type(args[0] if args else next(iter(kwargs.values()), None)), fx.Proxy)
    return symbolic or is_tracing() or inside_function_transform()


def _put_back(output: Any, hidden: Tensor, axis: int, kept: Tensor, masked: bool) -> Any:
    """Put the tokens that a block returns among those that it did not compute.

    Return None if a block with a mask returns NaN: a sequence with padding on both sides may have no token left.
    """
    computed = only_tensor(output)
    if masked and not bool(computed.isfinite().all()):
        return None
    whole = hidden.to(computed.dtype).index_copy(axis, kept, computed)
    return with_tensors(output, lambda _: whole)


def _drawn(length: int, count: int, *numbers: int) -> Tensor:
    digest = hashlib.blake2b(repr((length, *numbers)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    inner = torch.randperm(length - 2, generator=generator, device="cpu")[: max(0, count - 2)].sort().values + 1
    ends = torch.arange(0, length, length - 1, device="cpu")
    return torch.cat([ends[:1], inner, ends[1:]])
