"""Check on the user's own batch that levers change nothing but the speed, before they are kept.

A pass with the levers is compared with the plain one: all outputs that the loop can see, and every gradient. The effect
of rounding alone is measured, too: in one more plain pass, weights and inputs are changed by about as much as numbers
of their precision are rounded. Levers that are exact up to rounding may differ by a multiple of its effect. Lower
precision may do what a change of that size does to this network. Memory that was freed is filled with large numbers
before each pass, so that kernels that read memory without writing it first show themselves.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchboost.calibration.passes import Change, Pass, Passes, distance, noise
from torchboost.calibration.trial import Contestant
from torchboost.core.algorithm import Algorithm, Target, attach_all
from torchboost.errors import in_a_line
from torchboost.registry import REGISTRY

_TIMES_OF_ROUNDING = 64.0
"""The multiple of what rounding alone does to a tensor that a lever may do."""
_STEPS_OF_ROUNDING = 64
_ATTEMPTS = 2
"""A rounding that moves a ReLU or a maximum to its other side changes gradients by more than its size. If a comparison
fails, this number of plain passes, with changes of this number of roundings, shows how much."""
_LARGE = 1e-3
"""If rounding changes that much, relative to an output or the gradient, one more pass shows whether passes repeat."""
_WIDE_SHARE = 3 / _STEPS_OF_ROUNDING
_MOST = 3.0
"""Relative to the norm of a tensor, the most that rounding may explain. Unrelated gradients of one size differ by 1.4
times their norm."""
_HOPELESS = 0.1
"""For exact levers, a difference of outputs or of the whole gradient for which no second attempt is made."""
_GARBAGE = 1e30
_LARGEST_BLOCK = 2**22
"""Entries of the largest block that is filled. The system hands out larger ones as zeros."""
_SMALL, _SMALL_BLOCKS, _LARGE_BLOCKS = 4096, 16, 4
"""Entries of a small block, and how many blocks of each size are filled. A pass allocates many small ones."""
_PERTURB, _BYTE = -6, 0x8E
"""``M_PERTURB`` of glibc, and a byte whose complement, four times, is 1.2e30 as float32 and as bfloat16."""


def allowed(response: float, norm: float, whole: float | None, *, rounding: float = 0.0) -> float:
    """Return how far a tensor may be from the same tensor of the plain pass.

    The largest of three counts: a multiple of the effect of rounding, but no more than ``_MOST``, a share of its norm,
    and for a gradient a share of the whole one.

    Args:
        response: How far rounding alone moves it: rounding by ``rounding``, or as in the plain pass for 0.
        norm: Of the tensor.
        whole: Norm of the whole gradient. None for an output.
        rounding: Of a lower precision, relative to a number: 1/256 for bfloat16, 1/2048 for TF32. 0 for levers that
            change the order of additions, and nothing else.
    """
    exact = (_TIMES_OF_ROUNDING, 3e-4, 1e-5, 2e-5)
    times, own, rest, output = (8.0, 153.6 * rounding, 2 * rounding, 8 * rounding) if rounding else exact
    if whole is None:
        own, rest = output, 0.0
    else:
        rest *= whole
    if not rounding and 5 * times * response < norm:  # rounding changes a bias before BatchNorm by more than a fifth
        rest = min(rest, 0.01 * norm)
    return max(min(times * response, _MOST * norm), own * norm, rest)


class Finding(NamedTuple):
    """The result of one comparison.

    Attributes:
        reason: Why the levers must not be kept, with the number. Empty if they may.
        gradient: Difference of the whole gradient, relative to its norm.
        outputs: The largest relative difference of an output.
    """

    reason: str
    gradient: float = math.inf
    outputs: float = math.inf


@dataclass(slots=True, eq=False)
class _Distances:
    """How far a pass is from the plain one: one entry for each output and each gradient."""

    outputs: list[float]
    gradients: list[float]
    strange: str = ""


class Certificate:
    """Compares passes with levers with the plain pass on one call.

    Attributes:
        is_random: Whether the pass draws random numbers even without dropout. Compiled code then draws others.

    Raises:
        IncompatibleError: Equal passes differ.

    Cost: two passes at the beginning, three if it is the first of them that shows dropout, one for each check, and up
    to two more if one fails narrowly.
    Memory for two gradients.
    """

    def __init__(self, passes: Passes, *, scaler: Any = None) -> None:
        self._passes, self._scaler = passes, scaler
        self._names = {id(p): name for name, p in passes.model.named_parameters()}
        self._sized: list[Tensor] = list(passes.parameters)
        self._size, self.is_random = 0.0, False
        passes.without_dropout = passes.draws
        self._plain: Pass = self._first()
        if self.is_random and not passes.without_dropout:
            passes.without_dropout = True
            self._plain = self._first()
        self._sized += self._plain.outputs
        self._norms = _distances(self._plain, None)
        self._whole = math.hypot(*self._norms.gradients)
        response = _distances(self._plain, self._changed(noise(self._size, 0)))
        self._responses = [(1.0, response)]
        if max(self._relative(response), self._of_outputs(response)) > _LARGE:
            passes.compare(self._plain.outputs, self._run().outputs)

    def check(self, levers: Sequence[Algorithm], *, rounding: float = 0.0) -> Finding:
        """Run a pass with levers and compare it. ``rounding`` is that of a precision below the plain pass's, or 0.

        Raises:
            Exception: Whatever the levers or the model raise with them.
        """
        with _on_the_model(self._passes, levers, self._scaler):
            distances = _distances(self._plain, self._run())
        if distances.strange:
            return Finding(distances.strange)
        worst, hopeless = self._excess(distances, rounding), 0.0 if rounding else _HOPELESS
        gradient, outputs = self._relative(distances), self._of_outputs(distances)
        while worst and max(gradient, outputs) <= hopeless and len(self._responses) <= _ATTEMPTS:
            change = noise(_STEPS_OF_ROUNDING * self._size, len(self._responses))
            self._responses.append((_WIDE_SHARE, _distances(self._plain, self._changed(change))))
            worst = self._excess(distances, rounding)
        return Finding(worst, gradient, outputs)

    def _first(self) -> Pass:
        """Run the plain pass and see in which precision it computes."""
        lowest = [torch.float64]

        def see(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > torch.finfo(lowest[0]).eps:
                lowest[0] = tensor.dtype
            return tensor

        with self._passes.prepared():
            with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
                first = self._passes.run()
            self.is_random = self._passes.is_random
        self._size = max(torch.finfo(lowest[0]).eps, _rounding_of_products(self._passes.device))
        return first

    def _changed(self, change: Change) -> Pass:
        """Run a plain pass with weights and inputs that are a little different."""
        with self._passes.snapshot.changed(change):
            return self._run(change)

    def _run(self, change: Change | None = None) -> Pass:
        device = self._passes.device
        with self._passes.prepared(change):
            if device.type == "cpu":
                with _dirty_memory():
                    return self._passes.run()
            fill = functools.partial(_fill_freed_memory, {tensor.numel() for tensor in self._sized}, device)
            fill()
            return self._passes.run(fill)

    def _excess(self, distances: _Distances, rounding: float) -> str:
        """Return which tensor is too far away, in words. Empty if none is."""
        # The larger bound counts: convolutions on a GPU compute in TF32 in the plain pass already.
        scales = {0.0: 1.0} | ({rounding: rounding / self._size} if rounding else {})
        for kind, whole in (("outputs", None), ("gradients", self._whole)):
            norms: list[float] = getattr(self._norms, kind)
            for index, (apart, norm) in enumerate(zip(getattr(distances, kind), norms, strict=True)):
                response = max(share * getattr(moved, kind)[index] for share, moved in self._responses)
                if apart > max(allowed(by * response, norm, whole, rounding=size) for size, by in scales.items()):
                    name = "an output" if whole is None else f"the gradient of {self._name(index)}"
                    return f"{name} differs by {apart / norm if norm else math.inf:.1e} of its size"
        return ""

    def _relative(self, distances: _Distances) -> float:
        return math.hypot(*distances.gradients) / self._whole if self._whole else 0.0

    def _of_outputs(self, distances: _Distances) -> float:
        pairs = zip(distances.outputs, self._norms.outputs, strict=True)
        return max((distance / norm for distance, norm in pairs if norm), default=0.0)

    def _name(self, index: int) -> str:
        if index >= len(self._passes.parameters):
            return "an input"
        return self._names.get(id(self._passes.parameters[index]), "a parameter from outside the model")


@contextmanager
def _on_the_model(passes: Passes, levers: Iterable[Algorithm], scaler: Any) -> Iterator[None]:
    """Attach levers to the model alone: an optimizer that is never stepped stands in for the loop's."""
    stand_in = torch.optim.SGD(passes.parameters, lr=0.0)
    try:
        with attach_all(Target(passes.model, stand_in, scaler), levers):
            yield
    finally:
        passes.snapshot.restore()  # also the memory in which kernels were


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
        [distance(a, b) for a, b in zip(plain.outputs, outputs, strict=True)],
        [0.0 if a is None else distance(a, b) for a, b in zip(plain.gradients, gradients, strict=True)],
    )


@contextmanager
def _dirty_memory() -> Iterator[None]:
    """Run the block with an allocator that fills all memory that it hands out with large numbers.

    This is ``mallopt(M_PERTURB)`` of glibc, which holds for all threads of the process. Programs that read only memory
    that they have written do not see it. Elsewhere, and for other allocators, nothing happens.
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
    """Fill blocks of these numbers of float32, and of powers of two, with large numbers that next allocations find."""
    filled = [size for size in sizes if 0 < size <= _LARGEST_BLOCK] + [2**power for power in range(4, 21)]
    counted = [(size, _SMALL_BLOCKS if size <= _SMALL else _LARGE_BLOCKS) for size in filled]
    blocks = [torch.full((size,), _GARBAGE, device=device) for size, count in counted for _ in range(count)]
    blocks.clear()


def _mallopt() -> Any:
    """Return the function of glibc that sets options of its allocator. None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library.mallopt if hasattr(library, "gnu_get_libc_version") else None


_PART = 2**20
"""Entries of parameters on which the update is compared."""
_STEPS = 2
"""The first update of an optimizer often makes its state only."""
_UPDATE = 1e-4
"""Tolerance of an update relative to its norm, in addition to the rounding of the parameters."""
_MAGNIFIED = 1e-3
_RATE = 1e-3
"""Learning rate of the comparison if the loop's is still 0."""


class Result(NamedTuple):
    """Whether a lever may be kept, and how far its step is from the plain one, or why it must go."""

    kept: bool
    text: str

    @classmethod
    def left_out(cls, reason: str) -> Result:
        """Return the result of a lever that must go."""
        return cls(False, f"left out: {reason}")


def verified(
    levers: Sequence[Algorithm], passes: Passes, optimizers: Sequence[Optimizer], *, scaler: Any = None
) -> dict[str, Result]:
    """Compare the plain step with a step of all levers. If they differ too much, find out which lever is the cause.

    Levers that are exact up to rounding are compared among themselves, then all together. A compiled model is compared
    in the form in which it runs, so lower precision under a compiler is held to the bound of lower precision.

    Cost: three passes. One or two more with lower precision or a compiler, and one for each lever if a comparison
    fails. With dropout, compiling once more, since it is compared at zero.
    """
    ordered = sorted(levers, key=lambda lever: (REGISTRY[lever.name].once, lever.rounding))
    results: dict[str, Result] = {}
    of_model = [lever for lever in ordered if not REGISTRY[lever.name].of_optimizer]
    if of_model:
        certificate = Certificate(passes, scaler=scaler)
        unchecked = [lever for lever in of_model if certificate.is_random and REGISTRY[lever.name].once]
        results = _of_model([lever for lever in of_model if lever not in unchecked], certificate)
        results |= {lever.name: Result(True, "not checked: it draws other random numbers") for lever in unchecked}
    kept = [lever for lever in ordered if lever.name not in results or results[lever.name].kept]
    of_optimizer = [lever for lever in kept if REGISTRY[lever.name].of_optimizer]
    if of_optimizer:
        try:
            worst = _difference_of_updates(kept, passes, optimizers, scaler)
            result = Result(True, "exact here")
            if worst > 1:
                result = Result.left_out(f"its update differs by {worst * _UPDATE:.1e} of its size")
        except Exception as error:  # an optimizer that cannot be copied, or asks for a closure
            result = Result(True, f"not checked: {in_a_line(error)}")
        results |= {lever.name: result for lever in of_optimizer}
    return results


def _of_model(levers: Sequence[Algorithm], certificate: Certificate) -> dict[str, Result]:
    """Return for each lever the result of the comparison of passes."""
    results: dict[str, Result] = {}
    exact = [lever for lever in levers if not lever.rounding and not REGISTRY[lever.name].once]
    groups = [exact, levers] if exact and len(exact) < len(levers) else [levers]
    for group in groups if levers else []:
        result = _compared(group, certificate)
        if not result.kept:
            break
        results = dict.fromkeys([lever.name for lever in group], result) | results
    else:
        return results
    kept: list[Algorithm] = []
    for lever in levers:  # one after the other, without each one with which the comparison fails
        results[lever.name] = _compared([*kept, lever], certificate)
        kept += [lever] if results[lever.name].kept else []
    return results


def _compared(levers: Sequence[Algorithm], certificate: Certificate) -> Result:
    rounding = max(lever.rounding for lever in levers)
    try:
        finding = certificate.check(levers, rounding=rounding)
    except Exception as error:  # levers may raise anything. Training continues without them
        return Result.left_out(f"it raised {in_a_line(error)}")
    if finding.reason:
        return Result.left_out(finding.reason)
    if rounding:
        text = f"checked: the gradient differs by {finding.gradient:.2g}, outputs by {finding.outputs:.2g}"
        return Result(True, text)
    if finding.gradient >= _MAGNIFIED:  # no bound but the multiple of rounding allows as much
        times = f"within {_TIMES_OF_ROUNDING:g} times what rounding alone does"
        return Result(True, f"checked: the gradient differs by {finding.gradient:.0e}, {times}")
    return Result(True, f"exact here: gradient within {finding.gradient:.0e}")


def _difference_of_updates(
    levers: Sequence[Algorithm], passes: Passes, optimizers: Sequence[Optimizer], scaler: Any
) -> float:
    """Return by how much updates with and without the levers differ at most, as a multiple of what is allowed."""
    worst = 0.0
    of_model = [lever for lever in levers if not REGISTRY[lever.name].of_optimizer]
    others = [lever for lever in levers if lever not in of_model]
    plain, boosted = (Contestant(passes, optimizers, each, scaler, _PART) for each in ((), others))
    with _on_the_model(passes, of_model, scaler):
        boosted.attach()
        try:
            for contestant in (plain, boosted):
                for optimizer, pairs, _ in contestant.copies:
                    passes.streams.restore()
                    _move(optimizer, [copied for _, copied in pairs])
        finally:
            boosted.detach()
    for (_, before, _), (_, after, _) in zip(plain.copies, boosted.copies, strict=True):
        for (start, one), (_, two) in zip(before, after, strict=True):
            base, first, second = (tensor.detach() for tensor in (start, one, two))
            moved, rounding = distance(base, first), 4 * torch.finfo(start.dtype).eps * distance(base)
            if math.isfinite(moved):
                worst = max(worst, distance(first, second) / max(_UPDATE * moved + rounding, 1e-30))
    return worst


def _move(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    for group in optimizer.param_groups:
        rate = group.get("lr", _RATE)
        if not float(rate):
            group["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, Tensor) else _RATE
    generator = torch.Generator("cpu").manual_seed(0)
    with warnings.catch_warnings():  # the loop's own step warns, and not of rates that are set here
        warnings.simplefilter("ignore")
        for _ in range(_STEPS):
            for parameter in parameters:
                numbers = torch.randn(parameter.shape, generator=generator, device="cpu").mul_(1e-2)
                parameter.grad = torch.empty_like(parameter).copy_(numbers)
            type(optimizer).step(optimizer)
