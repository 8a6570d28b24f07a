"""How a forward pass uses each parameter: as the matrix of a product, in the input, hidden or output layer, or not."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchboost.core.forward import tensors_in
from torchboost.core.hardware import device_of
from torchboost.core.torch_private import DispatchMode
from torchboost.core.wrapping import unwrap, wrapper_of
from torchboost.graph.copies import full_precision, memory, undisturbed
from torchboost.graph.fused_matrices import Marks, OutputTrail, Parts
from torchboost.graph.trace import Arguments, call, first_run

Place = Literal["input", "hidden", "output", "lookup", "other", "not reached"]
"""A matrix multiplied with the model's input, with activations, or for the output. A table of rows. Anything else. A
parameter that the pass did not use."""


class Use(NamedTuple):
    """The use of a parameter in one forward pass.

    Args:
        place: See :data:`Place`.
        filter: Whether it holds the filters of a convolution.
        reshaped: Whether it has more than two axes and is multiplied as a matrix of other axes than the last two.
        parts: The matrices that it consists of, if they are several, such as the gates of a recurrent layer.
    """

    place: Place
    filter: bool = False
    reshaped: bool = False
    parts: Parts | None = None

    def sides(self, parameter: Tensor) -> list[tuple[int, int]]:
        """Return the shape of each matrix in the parameter, or of the matrices of each in a stack."""
        rows, columns = parameter.shape[-2:]
        if self.filter:
            rows, columns = parameter.shape[0], parameter.numel() // max(1, parameter.shape[0])
        if self.parts is None:
            return [(rows, columns)]
        return [(rows, length) if self.parts.axis else (length, columns) for length in self.parts.lengths]

    def described(self, parameter: Tensor) -> str:
        """Say which matrices these are."""
        sides = self.sides(parameter)
        shapes = [f"{rows} x {columns}" for rows, columns in sides]
        kind = "filter" if self.filter else "matrix" if parameter.ndim == 2 else "stack"
        if self.parts is None:
            return {"filter": f"filter, {shapes[0]}", "matrix": "hidden matrix", "stack": f"stack of {shapes[0]}"}[kind]
        several = {"filter": "filters", "matrix": "matrices", "stack": "stacks"}[kind]
        equal = len(set(shapes)) == 1
        return f"{len(shapes)} {several} of {shapes[0] if equal else ', '.join(shapes)}"


_PRODUCTS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "bilinear", "matmul", "einsum", "_scaled_mm"),
        *("mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "_native_multi_head_attention"),
        *("_transformer_encoder_layer_fwd", "_grouped_mm", "addbmm", "_cudnn_rnn", "miopen_rnn"),
    }
)
_FILTERING = frozenset({"convolution", "convolution_overrideable", "mkldnn_convolution"})
_TOKENS = (2, 4)
_DECIDING: tuple[Place, ...] = ("lookup", "output", "input", "hidden")
_LOOKUPS = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only", "index_select", "index", "gather"})


def matrix_uses(
    model: nn.Module, sample: Any = None, *, failures: list[Exception] | None = None
) -> dict[nn.Parameter, Use] | None:
    """Return the use of every parameter in one forward pass, or None if the model cannot be run here.

    The uses are facts of this pass: neither names nor types of modules are asked.

    Views, casts and copies of a parameter count as the parameter. A product is in the input layer if its other operand
    depends on no parameter, and in the output layer if it is the only one that an output depends on directly, that is,
    without another product between.

    Args:
        model: Wrapped or not. It is not changed. Sharded models cannot be run.
        sample: An input. None guesses one: noise for the first layer, or the numbers of a few tokens, once for each
            argument that a call must have.
        failures: Gets the errors on guessed inputs, the last one on tokens.

    Raises:
        ValueError: ``sample`` was given and the model does not run on it.

    Cost: a forward pass of a copy in eval mode, on two samples if the input is guessed.
    """
    bare = unwrap(model)
    if wrapper_of(model) == "fully_shard" or any(parameter.is_meta for parameter in bare.parameters()):
        return None
    matrices = {parameter for parameter in bare.parameters() if parameter.ndim > 1}
    uses = first_run(bare, sample, _uses, failures=failures)
    if sample is None and (uses is None or not matrices.issubset(uses)):
        uses = None  # at most a part of the model was run, such as the head alone
        with suppress(ValueError):
            uses = first_run(bare, _tokens(bare), _uses, failures=failures)
    return None if uses is None else dict.fromkeys(bare.parameters(), Use("not reached")) | uses


def _uses(network: nn.Module, sample: Any) -> dict[nn.Parameter, Use]:
    with undisturbed(network) as copied, full_precision(network), _Recorder(copied) as recorder:
        recorder.begin(sample)
        with torch.enable_grad():  # without gradients torch runs attention in one operation
            outputs = tensors_in(call(copied, sample))
        recorder.finish(outputs)
    by_name = dict(copied.named_parameters(remove_duplicate=False))
    named = network.named_parameters(remove_duplicate=False)
    return {parameter: recorder.use_of(by_name[name]) for name, parameter in named}


def _tokens(model: nn.Module) -> tuple[Tensor, ...]:
    """Return a few numbers of tokens for each argument that a call must have: also targets, if it returns its loss."""
    rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    tokens = torch.arange(_TOKENS[0] * _TOKENS[1], device=device_of(model)).view(_TOKENS) % min(rows, default=1)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(model.forward).parameters.values()
    needed = sum(one.kind in kinds and one.default is inspect.Parameter.empty for one in arguments)
    return (tokens,) * max(1, needed)


class _Recorder(DispatchMode):
    """Follow parameters, and the products they take part in, through the operations of one pass.

    Marks belong to memory, so a view has the marks of its tensor, and a write into a view reaches the tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._kept: list[Tensor] = list(model.parameters())  # so that no memory is used twice
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._kept)}
        self._marks = {memory(parameter): Marks(same=frozenset({n})) for n, parameter in enumerate(self._kept)}
        self._uses: dict[int, set[Place]] = {}
        self._filters: set[int] = set()
        self._reshaped: set[int] = set()
        self._reached: set[int] = set()
        self._trail = OutputTrail(self._kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = tensors_in((args, kwargs or {}))
        marks = [self._marks.get(memory(one), Marks()) for one in operands]
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        held = _union(of.same for of in marks)
        self._reached |= held
        matrices = _union(of.same for one, of in zip(operands, marks, strict=True) if one.ndim > 1)
        same = held if len(operands) == 1 else frozenset[int]()
        last = _union(of.last for of in marks)
        if matrices and (name in _PRODUCTS or name in _FILTERING):
            others = [of for of in marks if not of.same]
            first = any(of.given for of in others) and not any(of.depends for of in others)
            self._note(matrices, "input" if first else "hidden")
            same, last = frozenset(), matrices
            if name in _FILTERING:
                self._filters |= matrices
            for one, of in zip(operands, marks, strict=True) if name in _PRODUCTS else ():
                stacks = {number for number in of.same if self._kept[number].ndim > 2}
                axes = sorted(one.shape[-2:])
                self._reshaped |= {number for number in stacks if sorted(self._kept[number].shape[-2:]) != axes}
        elif name in _LOOKUPS and marks and marks[0].same:
            stacks = frozenset(number for number in marks[0].same if self._kept[number].ndim > 2)
            self._note(marks[0].same - stacks, "lookup")
            same = stacks  # whole matrices were chosen, such as the experts of a token
        depends = any(of.depends or of.same for of in marks)
        after = Marks(same, last, depends, any(of.given for of in marks))
        holders = {memory(one) for one, of in zip(operands, marks, strict=True) if of.same}
        for one in tensors_in(result):
            if memory(one) not in holders:  # otherwise a view of a parameter
                self._kept.append(one)
                self._marks[memory(one)] = after
        read = list(zip(operands, marks, strict=True))
        self._trail.follow(func, args, kwargs or {}, read, tensors_in(result))
        return result

    def begin(self, sample: Any) -> None:
        """Note the input."""
        for one in tensors_in(Arguments.of(sample)):
            self._kept.append(one)
            self._marks[memory(one)] = Marks(given=True)

    def finish(self, outputs: Iterable[Tensor]) -> None:
        """Note the products of the output layer."""
        outputs = list(outputs)
        self._trail.finish(outputs)
        for output in outputs:
            last = self._marks.get(memory(output), Marks()).last
            if len(last) == 1:
                self._note(last, "output")

    def use_of(self, parameter: nn.Parameter) -> Use:
        """Return the use that decides: a table or an output matrix is one wherever else it is used."""
        number = self._numbers[id(parameter)]
        places = self._uses.get(number, set())
        otherwise: Place = "other" if number in self._reached else "not reached"
        deciding: list[Place] = [place for place in _DECIDING if place in places]
        place = deciding[0] if deciding else otherwise
        filters, reshaped = number in self._filters, number in self._reshaped
        parts = None if reshaped else self._trail.parts_of(number, filters=filters)
        return Use(place, filters, reshaped, parts)

    def _note(self, numbers: Iterable[int], place: Place) -> None:
        for number in numbers:
            self._uses.setdefault(number, set()).add(place)


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset[int]().union(*sets)
