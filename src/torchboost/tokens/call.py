"""One call of a model that computes some positions only, and the way back to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.graph.copies import accelerators, generator_states, set_generator_states
from torchboost.tokens.rows import MissingRows, Rows

__all__ = ["PartialCall"]

Note = Callable[[str], None]
_DEEPEST = 6


class PartialCall:
    """A call of a model that may leave positions out.

    If a function needs positions that were left out, the call is made again, with all positions and from the same
    state of the random generators. If the loop reads such positions in the outputs, this happens then.

    Args:
        model: The model.
        forward: Called with the arguments.
        args: Positional arguments.
        kwargs: Named arguments.
        note: Called with the reason if the call is made again.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], note: Note
    ) -> None:
        self._model, self._forward, self._args, self._kwargs, self._note = model, forward, args, kwargs, note
        self._devices = accelerators(model.parameters())
        self._generators = generator_states(self._devices)
        self._weights: list[tuple[Tensor, int]] = [(p, p._version) for p in model.parameters()]
        self._outputs: Any = None

    def run(self, mode: AbstractContextManager[Any]) -> Any:
        """Call the model inside a mode that leaves positions out."""
        try:
            with mode:
                outputs = self._forward(*self._args, **self._kwargs)
        except MissingRows as reason:
            set_generator_states(self._generators, self._devices)
            self._note(str(reason))
            return self._forward(*self._args, **self._kwargs)
        for path, rows in _rows_in(outputs, (), set()):
            rows.source = lambda path=path: self._plain(path)
        return outputs

    def _plain(self, path: tuple[Any, ...]) -> Tensor:
        """Return an output of the same call with all positions."""
        if self._outputs is None:
            self._outputs = self._again()
        value = self._outputs
        for step in path:
            value = getattr(value, step[1:]) if isinstance(step, str) and step.startswith(".") else value[step]
        return value

    def _again(self) -> Any:
        if any(weight._version != version for weight, version in self._weights):
            raise RuntimeError("late")
        self._note("the loop reads padded positions of an output")
        now = generator_states(self._devices)
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        set_generator_states(self._generators, self._devices)
        try:
            return self._forward(*self._args, **self._kwargs)
        finally:
            set_generator_states(now, self._devices)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _rows_in(value: Any, path: tuple[Any, ...], seen: set[int]) -> Iterator[tuple[tuple[Any, ...], Rows]]:
    """Yield the rows in outputs and in the objects among them, with the way to each."""
    if isinstance(value, Rows):
        yield path, value
        return
    if isinstance(value, (Tensor, str, bytes, int, float, type(None), nn.Module)) or id(value) in seen:
        return
    if len(path) > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        entries: Any = value.items()
    elif isinstance(value, (tuple, list)):
        entries = enumerate(value)
    else:
        entries = ((f".{name}", entry) for name, entry in getattr(value, "__dict__", {}).items())
    for step, entry in list(entries):
        yield from _rows_in(entry, (*path, step), seen)
