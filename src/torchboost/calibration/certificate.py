"""Check on the user's own batch that levers change nothing but the speed, before they may stay.

A pass with the levers is compared with the plain one: all outputs that the loop can see, and every gradient. What
rounding alone may do is measured, too: in one more plain pass, weights and inputs are changed by about as much as
numbers of their precision are rounded. Levers that are exact up to rounding may differ by a multiple of its effect.
Lower precision may do what a change of that size does to this network. Memory that was freed is filled with large
numbers before each pass, so that kernels that read what they have not written show themselves.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.calibration.passes import Noise, Pass, Passes, numbers_of
from torchboost.calibration.snapshot import Snapshot
from torchboost.core.algorithm import Algorithm, Target, attach_all

__all__ = ["Bound", "Certificate", "Finding"]

_STEPS_OF_ROUNDING = 64
_ATTEMPTS = 2
"""A rounding that moves a ReLU or a maximum to its other side changes gradients by more than its size. If a comparison
fails, this number of plain passes, with changes of this number of roundings, shows how much."""
_LARGE = 1e-3
"""If rounding changes that much, relative to an output or the gradient, one more pass shows whether passes repeat."""
_WIDE_SHARE = 3 / _STEPS_OF_ROUNDING
_GARBAGE = 1e30
_LARGEST_BLOCK = 2**22
"""Entries of the largest block that is filled; what is larger, the system hands out as zeros."""
_SMALL, _SMALL_BLOCKS, _LARGE_BLOCKS = 4096, 16, 4
"""Entries of a small block, and how many blocks of each size are filled. A pass allocates many small ones."""
_PERTURB, _BYTE = -6, 0x8E
"""``M_PERTURB`` of glibc, and a byte whose complement, four times, is 1.2e30 as float32 and as bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """How far a tensor may be from the same tensor of the plain pass. The largest of the three counts.

    Args:
        rounding: Times the difference that rounding alone makes in this tensor.
        own: Relative to the norm of this tensor.
        whole: Relative to the norm of the whole gradient.
        small: Relative to the norm of a gradient, the most that ``whole`` may explain, unless rounding changes it by a
            fifth of its norm, as for a bias before BatchNorm.
        outputs: Like ``own``, for outputs.
        most: Relative to the norm of the tensor, the most that rounding may explain. Unrelated gradients of one size
            differ by 1.4 times their norm.
        hopeless: A relative difference of outputs or of the whole gradient for which no second attempt is made.
    """

    rounding: float
    own: float
    whole: float
    small: float
    outputs: float
    most: float
    hopeless: float

    def of(self, response: float, norm: float, whole: float | None) -> float:
        """Return the allowed difference of one tensor."""
        rounding = self.rounding * response
        own, rest = (self.outputs, 0.0) if whole is None else (self.own, self.whole * whole)
        if 5 * rounding < norm:
            rest = min(rest, self.small * norm)
        return max(min(rounding, self.most * norm), own * norm, rest)


EXACT = Bound(rounding=64.0, own=3e-4, whole=1e-5, small=0.01, outputs=2e-5, most=3.0, hopeless=0.1)
"""For levers that change the order of additions, and nothing else."""


def lower(rounding: float) -> Bound:
    """Return the bound for levers that compute in a lower precision.

    Args:
        rounding: Of that precision, relative to a number: 1/256 for bfloat16, 1/2048 for TF32. ``Bound.rounding``
            counts from a change of this size.
    """
    return Bound(
        rounding=8.0,
        own=153.6 * rounding,
        whole=2 * rounding,
        small=math.inf,
        outputs=8 * rounding,
        most=3.0,
        hopeless=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one comparison.

    Attributes:
        reason: Why the levers must not stay, with the number; empty if they may.
        gradient: Difference of the whole gradient, relative to its norm.
        outputs: The largest relative difference of an output.
    """

    reason: str
    gradient: float
    outputs: float


@dataclass(slots=True, eq=False)
class _Distances:
    """How far a pass is from the plain one: one entry for each output and each gradient."""

    outputs: list[float]
    gradients: list[float]
    strange: str = ""


class Certificate:
    """Compares passes with levers with the plain pass on one call.

    Args:
        model: The model without levers. It is the same after each call of a method.
        passes: Runs them, from a snapshot that it shares.
        snapshot: Of the model and the call, from before any lever.
        scaler: Scaler of the loop, for levers that ask for one.

    Attributes:
        is_random: Whether the pass draws random numbers even without dropout. Compiled code then draws others.

    Raises:
        IncompatibleError: Equal passes differ.

    Cost: two passes at the beginning, three with dropout, one for each check, and up to two more if one fails narrowly.
    Memory for two gradients.
    """

    def __init__(self, model: nn.Module, passes: Passes, snapshot: Snapshot, *, scaler: Any = None) -> None:
        self._model, self._passes, self._snapshot, self._scaler = model, passes, snapshot, scaler
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._sized: list[Tensor] = list(passes.parameters)
        self._size, self.is_random = 0.0, False
        self._plain: Pass = self._first()
        if self.is_random:
            passes.without_dropout = True
            self._plain = self._first()
        self._sized += self._plain.outputs
        self._norms = _distances(self._plain, None)
        self._whole = _norm(self._norms.gradients)
        self._response = _distances(self._plain, self._changed(Noise(self._size, 0)))
        self._wide: list[_Distances] = []
        if max(self._relative(self._response), self._of_outputs(self._response)) > _LARGE:
            passes.compare(self._plain.outputs, self._run(None).outputs)

    def check(self, levers: Sequence[Algorithm], *, rounding: float = 0.0) -> Finding:
        """Run a pass with levers attached and compare it.

        Args:
            levers: They are attached for the pass and removed after it.
            rounding: Relative rounding of the lowest precision in which they compute; 0 if the plain pass has the same.

        Raises:
            Exception: Whatever the levers or the model raise with them.
        """
        bounds = [(EXACT, 1.0)]
        if rounding:  # the larger bound counts: convolutions on a GPU compute in TF32 in the plain pass already
            bounds.append((lower(rounding), rounding / self._size))
        distances = _distances(self._plain, self._with(levers))
        if distances.strange:
            return Finding(reason=distances.strange, gradient=math.inf, outputs=math.inf)
        worst = self._excess(distances, bounds)
        while worst and not self._is_hopeless(distances, bounds[-1][0]) and len(self._wide) < _ATTEMPTS:
            noise = Noise(_STEPS_OF_ROUNDING * self._size, 1 + len(self._wide))
            self._wide.append(_distances(self._plain, self._changed(noise)))
            worst = self._excess(distances, bounds)
        return Finding(reason=worst, gradient=self._relative(distances), outputs=self._of_outputs(distances))

    def _first(self) -> Pass:
        """Run the plain pass and see in which precision it computes."""
        lowest = [torch.float64]

        def see(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > torch.finfo(lowest[0]).eps:
                lowest[0] = tensor.dtype
            return tensor

        self._passes.prepare()
        try:
            with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
                first = self._passes.run()
            self.is_random = self._passes.is_random
        finally:
            self._passes.finish()
        device = next((p.device for p in self._passes.parameters), torch.device("cpu"))
        self._size = max(torch.finfo(lowest[0]).eps, _rounding_of_products(device))
        return first

    def _changed(self, noise: Noise) -> Pass:
        """Run a plain pass with weights and inputs that are a little different."""
        with self._snapshot.changed(noise.add_):
            return self._run(noise)

    def _with(self, levers: Sequence[Algorithm]) -> Pass:
        # The optimizer of the loop is not touched. Levers of the optimizer find nothing to do in this one.
        stand_in = torch.optim.SGD(self._passes.parameters, lr=0.0)
        attached = attach_all(Target(self._model, stand_in, self._scaler), levers)
        try:
            return self._run(None)
        finally:
            attached.remove()

    def _run(self, noise: Noise | None) -> Pass:
        device = next((p.device for p in self._passes.parameters), torch.device("cpu"))
        self._passes.prepare(noise)
        try:
            if device.type == "cpu":
                with _dirty_memory():
                    return self._passes.run()
            self._fill(device)
            return self._passes.run(lambda: self._fill(device))
        finally:
            self._passes.finish()

    def _fill(self, device: torch.device) -> None:
        _fill_freed_memory({tensor.numel() for tensor in self._sized}, device)

    def _excess(self, distances: _Distances, bounds: Sequence[tuple[Bound, float]]) -> str:
        """Return which tensor is too far away from all bounds, each with its scale, in words; empty if none is."""
        for index, (distance, norm) in enumerate(zip(distances.outputs, self._norms.outputs, strict=True)):
            response = max(self._responses(lambda d, i=index: d.outputs[i]))
            if distance > max(bound.of(scale * response, norm, None) for bound, scale in bounds):
                return f"an output differs by {distance / norm if norm else math.inf:.1e} of its size"
        for index, (distance, norm) in enumerate(zip(distances.gradients, self._norms.gradients, strict=True)):
            response = max(self._responses(lambda d, i=index: d.gradients[i]))
            if distance > max(bound.of(scale * response, norm, self._whole) for bound, scale in bounds):
                share = distance / norm if norm else math.inf
                return f"the gradient of {self._name(index)} differs by {share:.1e} of its size"
        return ""

    def _responses(self, read: Callable[[_Distances], float]) -> list[float]:
        return [read(self._response), *(_WIDE_SHARE * read(wide) for wide in self._wide)]

    def _is_hopeless(self, distances: _Distances, bound: Bound) -> bool:
        return max(self._relative(distances), self._of_outputs(distances)) > bound.hopeless

    def _relative(self, distances: _Distances) -> float:
        return _norm(distances.gradients) / self._whole if self._whole else 0.0

    def _of_outputs(self, distances: _Distances) -> float:
        pairs = zip(distances.outputs, self._norms.outputs, strict=True)
        return max((distance / norm for distance, norm in pairs if norm), default=0.0)

    def _name(self, index: int) -> str:
        if index >= len(self._passes.parameters):
            return "an input"
        return self._names.get(id(self._passes.parameters[index]), "a parameter from outside the model")


def _rounding_of_products(device: torch.device) -> float:
    """Return the relative rounding of float32 in matrix products and convolutions on a device."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    backends: list[Any] = [cuda.matmul, cudnn.conv] if device.type == "cuda" else [mkldnn.matmul, mkldnn.conv]
    return max({"tf32": 2.0**-10, "bf16": 2.0**-7}.get(backend.fp32_precision, 0.0) for backend in backends)


def _distances(plain: Pass, other: Pass | None) -> _Distances:
    """Return the norms of the differences, or of the plain pass itself for None."""
    if other is None:
        outputs, gradients = [None] * len(plain.outputs), [None] * len(plain.gradients)
    else:
        outputs, gradients = other.outputs, other.gradients
        if [o.shape for o in outputs] != [o.shape for o in plain.outputs]:
            return _Distances([], [], "the outputs have other shapes")
        if [g is None for g in gradients] != [g is None for g in plain.gradients]:
            return _Distances([], [], "other parameters have a gradient")
    return _Distances(
        [_distance(a, b) for a, b in zip(plain.outputs, outputs, strict=True)],
        [0.0 if a is None else _distance(a, b) for a, b in zip(plain.gradients, gradients, strict=True)],
    )


def _distance(plain: Tensor, other: Tensor | None) -> float:
    """Return the norm of a difference, in float64; infinity if only one of the two is finite."""
    base = numbers_of(plain)
    if other is None:
        norm = float(torch.linalg.vector_norm(base))
        return norm if math.isfinite(norm) else 0.0
    numbers = numbers_of(other)
    if not bool(torch.isfinite(base).all()):  # the plain loss is NaN already
        return 0.0 if torch.equal(torch.isfinite(base), torch.isfinite(numbers)) else math.inf
    norm = float(torch.linalg.vector_norm(numbers - base))
    return norm if math.isfinite(norm) else math.inf


def _norm(values: Sequence[float]) -> float:
    return (
        math.sqrt(math.fsum(value * value for value in values if math.isfinite(value)))
        if all(map(math.isfinite, values))
        else math.inf
    )


@contextmanager
def _dirty_memory() -> Iterator[None]:
    """Run the block with an allocator that fills all memory that it hands out with large numbers.

    This is ``mallopt(M_PERTURB)`` of glibc, which holds for all threads of the process. Programs that read only what
    they have written do not see it. Elsewhere, and for other allocators, nothing happens.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_PERTURB, _BYTE)
    try:
        yield
    finally:
        mallopt(_PERTURB, 0)


def _fill_freed_memory(sizes: Iterable[int], device: torch.device) -> None:
    """Fill blocks of memory with large numbers and free them, so that the next allocations find those.

    Args:
        sizes: Entries of float32 of tensors that the next pass allocates; powers of two are added.
        device: Where.
    """
    filled = [size for size in sizes if 0 < size <= _LARGEST_BLOCK] + [2**power for power in range(4, 21)]
    counted = [(size, _SMALL_BLOCKS if size <= _SMALL else _LARGE_BLOCKS) for size in filled]
    blocks = [torch.full((size,), _GARBAGE, device=device) for size, count in counted for _ in range(count)]
    blocks.clear()


def _mallopt() -> Any:
    """Return the function of glibc that sets options of its allocator; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library.mallopt if hasattr(library, "gnu_get_libc_version") else None
