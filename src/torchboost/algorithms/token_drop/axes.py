"""The axes of a block's arguments that hold its tokens, found out on a call by running a copy of the block."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.core.forward import with_tensors
from torchboost.core.torch_private import module_hooks
from torchboost.graph.copies import full_precision, undisturbed

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a block."""
TokenAxes = tuple[tuple[int, ...], ...]
"""The axes of tokens of each tensor among them, in the order of ``with_tensors``, the hidden states first."""

LEAST_LENGTH = 8
"""Sequences with fewer tokens are always computed whole: too few to tell a causal block from another one."""

_TOLERANCE = 1e-4
"""Of the largest output. With random weights a token in the wrong place changes outputs by about a tenth."""
_MOST_CHOICES = 200
_HIDDEN_BY_A_MASK = -1e4
"""Entries of an additive mask below it hide a key. Biases of positions are smaller."""
_WINDOW_ROWS, _WINDOW_MASKS = 64, 4
_WHOLE = (bool, int, float, complex, str, types.NoneType, torch.dtype, torch.device)
"""Types of arguments that do not hold tokens."""


class Unclear(Exception):
    """Why the tokens of a call cannot be dropped."""


def pick(call: Call, axes: TokenAxes, index: Tensor) -> Call:
    """Return the arguments of the tokens of ``index``, in its order."""
    places = iter(axes)

    def picked(tensor: Tensor) -> Tensor:
        for axis in next(places):
            tensor = tensor.index_select(axis, index.to(tensor.device))
        return tensor

    return with_tensors(call, picked)


def hidden_states(call: Call) -> Tensor:
    """Return the first argument of a block, or raise :class:`Unclear` unless it is floating and has three axes."""
    args, kwargs = call
    given = args[0] if args else next(iter(kwargs.values()), None)
    if not (isinstance(given, Tensor) and given.ndim == 3 and given.is_floating_point()):
        found = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise Unclear(f"the first argument of its blocks is {found}, not hidden states of shape (batch, length, width)")
    return given


def only_tensor(output: Any) -> Tensor:
    """Return the hidden states that a block returns, alone or in a tuple, or raise :class:`Unclear`."""
    entries: list[Any] = list(output) if isinstance(output, tuple) else [output]
    given = entries[0] if entries and all(entry is None for entry in entries[1:]) else output
    if not isinstance(given, Tensor):
        raise Unclear(f"its blocks return {type(given).__name__}, not hidden states alone")
    return given


def kind_of(call: Call, hidden: Tensor) -> tuple[Any, ...]:
    """Return the properties that calls share if their tokens are on the same axes."""
    first, second = hidden.shape[:2]
    seen: list[Any] = [*call[1]]

    def note(tensor: Tensor) -> Tensor:
        seen.append((tensor.dtype, *((size == first) + 2 * (size == second) for size in tensor.shape)))
        return tensor

    with_tensors(call, note, lambda value: seen.append(value if isinstance(value, (bool, str)) else type(value)))
    return tuple(seen)


def token_axes(block: nn.Module, call: Call, guess: TokenAxes | None = None) -> TokenAxes | None:
    """Find out which axes of the arguments of a block hold tokens, and that the block can compute a part of them.

    A copy of the block with random weights, in eval mode, is given random hidden states and the other arguments of the
    call. The tokens are on the axis over which outputs depend on other inputs. The axes of the same length of the
    other arguments are right if one of the following is shown:

    - If tokens and arguments are permuted, so are the outputs.
    - The outputs of the first tokens equal the outputs of a call with these tokens alone, and the output of the last
      one does not depend on the order of the tokens before it. So attention is causal, by the order of the tokens
      alone.

    A block that knows positions by other means than its arguments shows neither, for example one with rotary angles
    of its own, convolutions over tokens, a recurrence, or attention in windows.

    ``guess``, axes that were right for an equal block, is tried first. Return None if the sequences are shorter than
    :data:`LEAST_LENGTH`. Raise :class:`Unclear` if no choice of axes is right, or attention is in windows.

    Cost: 6 to 20 passes of the block in float32.
    """
    _check_others(call, hidden_states(call))
    try:
        # The hooks of a checkpoint around the block would count tensors that are saved here.
        apart = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        with undisturbed(block) as copied, full_precision(block), torch.enable_grad(), apart:
            return _Probe(copied, call).find(guess)
    except Unclear:
        raise
    except Exception as error:  # code of the user, in another precision
        reason = (str(error).splitlines() or [""])[0]
        raise Unclear(f"a copy of a block cannot be run ({type(error).__name__}: {reason})") from error


def _check_others(call: Call, hidden: Tensor) -> None:
    strange: list[Any] = []
    with_tensors(call, lambda tensor: tensor, strange.append)
    unknown = next((value for value in strange if not isinstance(value, _WHOLE)), None)
    if unknown is not None:
        raise Unclear(
            f"its blocks get a {type(unknown).__name__}, of which it is not known what it holds of each token; if it "
            "is a cache of keys and values, call the model with use_cache=False"
        )
    numbers = [value for value in strange if isinstance(value, int) and not isinstance(value, bool)]
    if any(number in hidden.shape[:2] and number > 1 for number in numbers):
        raise Unclear("its blocks get the number of tokens as an argument")


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Probe:
    """A copy of a block, and a call of it with random hidden states."""

    def __init__(self, block: nn.Module, call: Call) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._tensors: list[Tensor] = []
        hidden = hidden_states(call)
        self._device = hidden.device
        self._block = self._prepared(block)
        self._call = with_tensors(call, self._replaced)
        self._output = self._run(self._call)
        if self._output.shape != hidden.shape:
            raise Unclear(f"its blocks return shape {tuple(self._output.shape)} for {tuple(hidden.shape)}")
        self._close = _TOLERANCE * float(self._output.abs().max())

    def _prepared(self, block: nn.Module) -> nn.Module:
        """Large weights make attention sharp: many networks begin with blocks that hardly change their inputs."""
        for module in block.modules():
            for hooks in module_hooks(module):
                hooks.clear()
        block.to(torch.float32)
        with torch.no_grad():
            for parameter in block.parameters():
                if parameter.ndim > 1:
                    spread = 1.5 / (parameter.shape[-1] * parameter.shape[-2]) ** 0.25
                    parameter.copy_(self._noise(parameter.shape) * spread)
                else:
                    parameter.copy_(torch.rand(parameter.shape, generator=self._random, device="cpu") + 0.5)
        return block

    def _noise(self, shape: Sequence[int]) -> Tensor:
        noise = torch.randn(tuple(shape), generator=self._random, device="cpu")
        return noise.to(self._device, torch.float32)

    def _replaced(self, tensor: Tensor) -> Tensor:
        if not self._tensors:
            # With a gradient, so that the encoder layer of torch takes no shortcut of inference.
            new = self._noise(tensor.shape).requires_grad_()
        else:
            new = tensor.detach().to(torch.float32) if tensor.is_floating_point() else tensor.detach()
        self._tensors.append(new)
        return new

    def _run(self, call: Call) -> Tensor:
        args, kwargs = call
        return torch.nan_to_num(only_tensor(self._block.forward(*args, **kwargs)).detach())

    def _with_hidden(self, hidden: Tensor) -> Tensor:
        places = iter([hidden, *self._tensors[1:]])
        return self._run(with_tensors(self._call, lambda _: next(places)))

    def find(self, guess: TokenAxes | None) -> TokenAxes | None:
        """Return the axes of tokens."""
        axis = self._axis_of_tokens()
        self._length = self._output.shape[axis]
        if self._length < LEAST_LENGTH:
            return None
        sizes = [tuple(i for i, size in enumerate(t.shape) if size == self._length) for t in self._tensors[1:]]
        everything = ((axis,), *sizes)
        if guess is None or not self._is_right(guess):
            guess = self._chosen(everything)
        for tensor, axes in zip(self._tensors, guess, strict=True):
            if len(axes) == 2 and axes == (tensor.ndim - 2, tensor.ndim - 1) and _has_windows(tensor):
                raise Unclear("its attention is in windows, in which few tokens would be left")
        return guess

    def _axis_of_tokens(self) -> int:
        mixing = [axis for axis in (0, 1) if self._mixes(axis)]
        if not mixing:
            raise Unclear("its blocks compute each token by itself")
        if len(mixing) > 1:
            raise Unclear("its blocks mix the tokens of different sequences")
        return mixing[0]

    def _mixes(self, axis: int) -> bool:
        """Whether outputs depend on inputs at other places of an axis."""
        hidden = self._tensors[0].detach()
        size = hidden.shape[axis]
        changed, looked_at = (torch.arange(start, size, 2, device=self._device) for start in (0, 1))
        noise = self._noise(hidden.index_select(axis, changed).shape)
        outputs = self._with_hidden(hidden.index_copy(axis, changed, noise).requires_grad_())
        return not self._same(outputs.index_select(axis, looked_at), self._output.index_select(axis, looked_at))

    def _same(self, one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape and (one.numel() == 0 or float((one - other).abs().max()) <= self._close)

    def _is_right(self, axes: TokenAxes) -> bool:
        if len(axes) != len(self._tensors):
            return False
        kept = torch.arange(0, self._length, 2, device=self._device)
        shape = list(self._output.shape)
        shape[axes[0][0]] = len(kept)
        try:
            return self._follows_order(axes) and list(self._run(pick(self._call, axes, kept)).shape) == shape
        except Exception:  # arguments of which too little or too much was taken may raise anything
            return False

    def _follows_order(self, axes: TokenAxes) -> bool:
        axis, length = axes[0][0], self._length

        def outputs_of(index: Tensor) -> tuple[Tensor, Tensor]:
            index = index.to(self._device)
            return self._run(pick(self._call, axes, index)), self._output.index_select(axis, index)

        if self._same(*outputs_of(self._shuffled(length))):
            return True
        if not self._same(*outputs_of(torch.arange(length // 2 + 1))):
            return False
        end = torch.arange(length - 1, length, device="cpu")
        last = [outputs.select(axis, -1) for outputs in outputs_of(torch.cat([self._shuffled(length - 1), end]))]
        return self._same(*last)

    def _shuffled(self, length: int) -> Tensor:
        return torch.randperm(length, generator=self._random, device="cpu")

    def _chosen(self, everything: TokenAxes) -> TokenAxes:
        choices = itertools.islice(self._choices(everything), _MOST_CHOICES)
        found = next(filter(self._is_right, choices), None)
        if found is None:
            raise Unclear(
                "what a block computes depends on the order of its tokens, as with positions or windows inside of it, "
                "or on an argument of which it is not clear what belongs to a token"
            )
        return found

    def _choices(self, everything: TokenAxes) -> Iterator[TokenAxes]:
        """Yield choices of axes, the best first.

        A tensor that varies along an axis and may be kept whole has other tokens, such as an encoder's. One that does
        not vary, such as a mask of a batch without padding, does not tell, and belongs to the tokens if it can.
        """
        groups = self._groups(everything)
        varying = [group for group in groups if self._varies(group[0], everything[group[0]])]
        for count in range(len(varying) + 1):
            for some in itertools.combinations(varying, count):
                options = []
                for group in groups:
                    axes = everything[group[0]]
                    parts = [part for size in range(len(axes), 0, -1) for part in itertools.combinations(axes, size)]
                    whole: list[tuple[int, ...]] = [()]
                    options.append(parts if group in some else whole if group in varying else [*parts, ()])
                for choice in itertools.product(*options):
                    axes = everything
                    for group, chosen in zip(groups, choice, strict=True):
                        axes = _replaced(axes, group, chosen)
                    yield axes

    def _groups(self, everything: TokenAxes) -> list[list[int]]:
        """Return the places of tensors, without the hidden states. Tensors of one shape and precision go together."""
        groups: dict[Any, list[int]] = {}
        for place, (tensor, axes) in enumerate(zip(self._tensors, everything, strict=True)):
            if place and axes:
                groups.setdefault((tensor.shape, tensor.dtype), []).append(place)
        return list(groups.values())

    def _varies(self, place: int, axes: tuple[int, ...]) -> bool:
        tensor = self._tensors[place]
        return any(not torch.equal(tensor, tensor.roll(1, axis)) for axis in axes)


def _replaced(axes: TokenAxes, places: Sequence[int], new: tuple[int, ...]) -> TokenAxes:
    return tuple(new if place in places else old for place, old in enumerate(axes))


def _has_windows(mask: Tensor) -> bool:
    """Whether a query does not see a token that is seen by a key it sees. In causal and in padded attention it does."""
    if mask.is_floating_point():
        seen = mask > _HIDDEN_BY_A_MASK
    else:
        own = mask.bool().diagonal(dim1=-2, dim2=-1).double().mean() > 0.5  # a token sees itself
        seen = mask.bool() == own
    seen = seen.flatten(0, -3)[:_WINDOW_MASKS].float() if mask.ndim > 2 else seen[None].float()
    rows = torch.linspace(0, mask.shape[-1] - 1, _WINDOW_ROWS).long().unique().to(mask.device)
    queries = seen.index_select(1, rows)
    return bool(((queries @ seen > 0) & (queries == 0)).any())
