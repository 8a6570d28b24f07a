"""Parameters that hold several matrices, such as gates: found by the uses of the outputs of their products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchboost.graph.copies import memory

Spot = tuple[int, int]
"""The number of a parameter, and one of its axes."""
Rows = Mapping[Spot, Tensor]
"""For each entry of a tensor its place along an axis of a parameter, or -1, in the shape of the tensor."""

_MOVES = frozenset(
    {
        *("view", "_unsafe_view", "_reshape_alias", "reshape", "transpose", "t", "permute", "squeeze", "unsqueeze"),
        *("expand", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk", "unsafe_chunk"),
        *("unbind", "select", "slice", "narrow", "diagonal", "unfold", "flip", "roll", "repeat"),
        *("index", "index_select"),
    }
)
"""Operations whose results consist of entries of the first operand."""
_COPIES = frozenset({"clone", "contiguous", "_to_copy", "detach", "alias", "lift_fresh"})
_JOINS = frozenset({"cat", "stack"})
_SUMS = frozenset({"add", "sub", "rsub", "where", "copy", "masked_fill"})
"""Operations by which two activations become one quantity."""
_SIDES: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    **dict.fromkeys(("mm", "bmm", "matmul"), ((0, -2, -2), (1, -1, -1))),
    **dict.fromkeys(("addmm", "baddbmm"), ((1, -2, -2), (2, -1, -1))),
    **{"mv": ((0, -2, -1),), "addmv": ((1, -2, -1),), "linear": ((1, -2, -1),)},
    **dict.fromkeys(("convolution", "convolution_overrideable", "mkldnn_convolution"), ((1, 0, 1),)),
}
"""By product: the argument that may be a parameter, its axis of outputs, and that axis in the result."""
_TRANSPOSED = 6
"""The argument of a convolution that says whether it is transposed."""
_HIDDEN = {"mkldnn_rnn_layer": 10, "_cudnn_rnn": 7, "miopen_rnn": 6}
"""By operation of a whole recurrent layer: the argument with the hidden size, the number of rows of each gate."""
_CUT = {"_thnn_fused_lstm_cell": 4, "_thnn_fused_gru_cell": 3, "glu": 2}
"""By operation: the number of parts that it reads apart, along the axis in its second argument, or the last one."""


class Parts(NamedTuple):
    """The matrices in one parameter.

    Args:
        axis: Of the matrix: 0 if its rows are the outputs of the product, 1 if its columns are.
        split: The number of equal parts of that axis. Or sizes, which are repeated until the axis ends: then the pieces
            of one place in the pattern are one matrix.
        lengths: The length of each matrix along that axis.
    """

    axis: int
    split: int | tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, axis: int, sizes: Sequence[int], repeats: int = 1) -> Parts:
        """Return parts of these sizes, each of which comes several times."""
        equal = repeats == 1 and len(set(sizes)) == 1
        return cls(axis, len(sizes) if equal else tuple(sizes), tuple(size * repeats for size in sizes))

    def options(self) -> dict[str, Any]:
        """Return the options of a param group for Muon."""
        return {"split": self.split, **({"split_axis": self.axis} if self.axis else {})}


def parts_of_gates(module: nn.Module, parameter: nn.Parameter) -> Parts | None:
    """Return the matrices in a parameter of torch's recurrent layers and attention, by their definition."""
    size = {nn.RNNBase: "hidden_size", nn.MultiheadAttention: "embed_dim"}
    rows = next((int(getattr(module, name)) for kind, name in size.items() if isinstance(module, kind)), 0)
    if not rows or parameter.ndim != 2 or parameter.shape[0] <= rows or parameter.shape[0] % rows:
        return None
    return Parts.of(0, [rows] * (parameter.shape[0] // rows))


def agreed_parts(parts: Mapping[nn.Parameter, Parts | None]) -> dict[torch.Size, Parts | None]:
    """Return the matrices in parameters of a shape, if all of that shape consist of the same ones.

    An expert that was not chosen then follows the others.
    """
    by_shape: dict[torch.Size, set[Parts | None]] = {}
    for parameter, own in parts.items():
        by_shape.setdefault(parameter.shape, set()).add(own)
    return {shape: several.pop() for shape, several in by_shape.items() if len(several) == 1}


class Marks(NamedTuple):
    """The known facts about a piece of memory.

    Args:
        same: Numbers of the parameters that it holds or copies.
        last: Parameters whose product it depends on with no other product between.
        depends: Whether it depends on any parameter.
        given: Whether it depends on the model's input.
    """

    same: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    depends: bool = False
    given: bool = False


Operand = tuple[Tensor, Marks]
"""A tensor that an operation reads, and the known facts about it."""


class OutputTrail:
    """Follow the outputs of each matrix to the operations that use them.

    Outputs that an operation reads in one operand belong to one matrix, and so do outputs that are added. Outputs that
    are only multiplied with each other, entry by entry, or read by different operations, belong to several matrices:
    the network computes the same with a layer for each. Views, casts and functions of single entries are followed. An
    operation that is not known reads all of its operand. Parameters are named by their number.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._shapes = [parameter.shape for parameter in parameters]
        self._rows: dict[Any, Rows] = {}
        self._known: dict[int, list[Any]] = {}
        self._first: dict[Spot, Tensor] = {}  # for each place the first one of its matrix, or -1 before its first use
        self._whole: set[int] = set()
        for number, parameter in enumerate(parameters):
            axes = {0, parameter.ndim - 2, parameter.ndim - 1} if parameter.ndim > 1 else ()
            self._note(parameter, {(number, axis): _counted(parameter, axis) for axis in axes})

    def follow(self, func: Any, args: Any, kwargs: Any, operands: Sequence[Operand], results: Sequence[Tensor]) -> None:
        """Note one operation: the function, its arguments, the tensors among them, and those that it returned."""
        if not any(memory(tensor) in self._known for tensor, _ in operands):
            return
        rows = [self._rows_of(tensor) for tensor, _ in operands]
        name = func.overloadpacket.__name__
        name = name if name.endswith("__") else name.rstrip("_")
        after: Sequence[Rows] = [{} for _ in results]
        if name in _MOVES and not any(rows[1:]):
            after = self._moved(func, args, kwargs, rows[0], results)
        elif name in _JOINS:
            after = [_joined(func, args, kwargs, rows)]
        elif name in _COPIES and len(rows) == 1:
            after = [rows[0]]
        elif len(results) == 1 and (name in _SUMS or torch.Tag.pointwise in func.tags):
            after = [self._combined(name, operands, rows, results[0])]
        elif name in _SIDES and not (name.startswith("convolution") and args[_TRANSPOSED]):
            after = [self._product(name, args, operands, rows, results[0])]
        else:
            for operand, one in zip(operands, rows, strict=True):
                self._read(name, args, operand, one)
        for result, entries in zip(results, after, strict=True):
            self._note(result, entries)

    def finish(self, outputs: Iterable[Tensor]) -> None:
        """Note the outputs of the model."""
        for output in outputs:
            self._unite([self._rows_of(output)])

    def parts_of(self, number: int, *, filters: bool) -> Parts | None:
        """Return the matrices in a parameter, which may hold filters. None if it is one, or if that cannot be told."""
        axes = [axis for at, axis in self._first if at == number]
        stacked = 0 if filters else len(self._shapes[number]) - 2
        if number in self._whole or len(axes) != 1 or axes[0] < stacked or (filters and axes[0]):
            return None
        labels, counts = self._first[number, axes[0]].unique_consecutive(return_counts=True)
        firsts, sizes = labels.tolist(), counts.tolist()
        kinds = len(set(firsts))
        repeats = len(firsts) // kinds
        regular = firsts == firsts[:kinds] * repeats and sizes == sizes[:kinds] * repeats
        if not regular or kinds < 2 or min(firsts) < 0 or min(sizes) * repeats < 2:
            return None
        return Parts.of(axes[0] - stacked, sizes[:kinds], repeats)

    def _rows_of(self, tensor: Tensor) -> Rows:
        """Return the rows in a tensor, except rows of parameters that are known to be one matrix."""
        address = memory(tensor)
        if address not in self._known:
            return {}
        rows = self._rows.get(_geometry(tensor))
        if rows is None:  # written in pieces, or a view by an operation that is not known
            self._unite([self._rows[key] for key in self._known[address]], joint=True)
            return {}
        return {spot: entries for spot, entries in rows.items() if spot[0] not in self._whole}

    def _note(self, tensor: Tensor, rows: Rows) -> None:
        key = _geometry(tensor)
        if key is None:
            self._unite([rows])
        elif rows or memory(tensor) in self._known:
            self._rows[key] = rows
            self._known.setdefault(memory(tensor), []).append(key)

    def _moved(self, func: Any, args: Any, kwargs: Any, rows: Rows, results: Sequence[Tensor]) -> Sequence[Rows]:
        after: list[dict[Spot, Tensor]] = [{} for _ in results]
        for spot, entries in rows.items():
            listed: list[Tensor] = []
            for packed in (False, True):  # a view may need the second
                with suppress(RuntimeError):
                    moved = func(entries.contiguous() if packed else entries, *args[1:], **kwargs)
                    listed = [moved] if isinstance(moved, Tensor) else list(moved)
                    break
            if [one.shape for one in listed] != [result.shape for result in results]:
                self._unite([{spot: entries}])
                continue
            for one, place in zip(listed, after, strict=True):
                place[spot] = one
        return after

    def _combined(self, name: str, operands: Sequence[Operand], rows: Sequence[Rows], result: Tensor) -> Rows:
        """Return the rows after an operation on single entries. The rows of the factors of a product end here."""
        if name not in _SUMS and sum(of.depends for _, of in operands) > 1:
            for one in rows:
                self._unite([one])
            return {}
        after: dict[Spot, Tensor] = {}
        for (_, of), one in zip(operands, rows, strict=True):
            for spot, entries in one.items() if len(rows) == 1 or not of.same else ():
                wide, before = entries.expand(result.shape), after.get(spot)
                if before is not None and not torch.equal(before, wide):
                    self._unite([{spot: before}, {spot: wide}], joint=True)
                    wide = torch.where(before < 0, wide, before)
                after[spot] = wide
        return after

    def _product(self, name: str, args: Any, operands: Sequence[Operand], rows: Sequence[Rows], result: Tensor) -> Rows:
        """Return the rows of a product: for each parameter the axis that runs along the outputs."""
        after: dict[Spot, Tensor] = {}
        for (tensor, of), one in zip(operands, rows, strict=True):
            places = [(axis, along) for at, axis, along in _SIDES[name] if args[at] is tensor]
            for number in of.same if places else ():
                axis, along = places[0]
                lines = {spot: _line(entries, axis) for spot, entries in one.items() if spot[0] == number}
                spots = [spot for spot, line in lines.items() if line is not None]
                line = lines[spots[0]] if len(spots) == 1 else None
                if line is None or result.shape[along] != len(line):
                    self._whole.add(number)
                    continue
                shape = [1] * result.ndim
                shape[along] = len(line)
                after[spots[0]] = line.reshape(shape).expand(result.shape)
            if not of.same:
                self._unite([one])
        return after

    def _read(self, name: str, args: Any, operand: Operand, rows: Rows) -> None:
        """Note an operation that reads its operand as a whole, or in the parts that its definition names."""
        tensor, same = operand[0], operand[1].same
        if name in _CUT:
            axis = args[1] if name == "glu" and len(args) > 1 else -1
            for one in _cut(rows, axis, _CUT[name]):
                self._unite([one])
        elif name in _HIDDEN and same:
            gates = max(1, tensor.shape[0] // args[_HIDDEN[name]])
            for one in _cut({spot: entries for spot, entries in rows.items() if not spot[1]}, 0, gates):
                self._unite([one])
        elif same:
            self._whole |= same
        else:
            self._unite([rows])

    def _unite(self, several: Sequence[Rows], *, joint: bool = False) -> None:
        """Note that the rows in a tensor belong to one matrix, with ``joint`` the rows in several tensors together."""
        for spot in {spot for rows in several for spot in rows}:
            listed = [rows[spot] for rows in several if spot in rows]
            for some in [listed] if joint else [[entries] for entries in listed]:
                self._use(spot, some)

    def _use(self, spot: Spot, several: Sequence[Tensor]) -> None:
        number, axis = spot
        length = self._shapes[number][axis]
        used = torch.zeros(length + 1, dtype=torch.bool)  # the last one is for -1
        for entries in several:
            used[_short(entries).flatten().long().cpu()] = True
        used = used[:length]
        if number in self._whole or not used.any():
            return
        firsts = self._first.setdefault(spot, torch.full((length,), -1))
        joined = used | torch.isin(firsts, firsts[used & (firsts >= 0)])
        firsts[joined] = int(joined.nonzero()[0])
        if not firsts.any():
            self._whole.add(number)


def _joined(func: Any, args: Any, kwargs: Any, rows: Sequence[Rows]) -> Rows:
    after: dict[Spot, Tensor] = {}
    for spot, like in {spot: entries for one in rows for spot, entries in one.items()}.items():
        pairs = zip(args[0], rows, strict=True)
        filled = [one[spot] if spot in one else like.new_full(tensor.shape, -1) for tensor, one in pairs]
        after[spot] = func(filled, *args[1:], **kwargs)
    return after


def _counted(parameter: Tensor, axis: int) -> Tensor:
    shape = [1] * parameter.ndim
    shape[axis] = parameter.shape[axis]
    numbers = torch.arange(parameter.shape[axis], device=parameter.device, dtype=torch.int32)
    return numbers.view(shape).expand(parameter.shape)


def _cut(rows: Rows, axis: int, count: int) -> list[Rows]:
    return [{spot: part} for spot, entries in rows.items() for part in entries.chunk(count, axis)]


def _line(entries: Tensor, axis: int) -> Tensor | None:
    """Return the numbers along an axis, or None if they do not differ along it, or differ along another."""
    if entries.ndim < -axis or not entries.numel():
        return None
    short = _short(entries)
    line = short[tuple(slice(None) if at == axis % entries.ndim else 0 for at in range(entries.ndim))]
    if len(line) < 2 or line[0] == line[-1]:
        return None
    shape = [1] * entries.ndim
    shape[axis] = len(line)
    return line if torch.equal(line.reshape(shape).expand(short.shape), short) else None


def _short(entries: Tensor) -> Tensor:
    """Return the entries once along axes in which they repeat themselves by their strides."""
    for axis, stride in enumerate(entries.stride()):
        if stride == 0 and entries.shape[axis] > 1:
            entries = entries.narrow(axis, 0, 1)
    return entries


def _geometry(tensor: Tensor) -> Any:
    """Return a key that tells the entries of a tensor from other entries, or None if it has no memory of its own."""
    if tensor.layout is not torch.strided or not memory(tensor):
        return None
    return memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
