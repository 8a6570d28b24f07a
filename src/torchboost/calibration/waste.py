"""The waste meter: work of a training step that cannot change the result, in seconds and as a share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from torchboost.algorithms.sparse_head import SparseHead, sparse_head_forward
from torchboost.algorithms.unpad import Unpad, masks_among, unpad_forward
from torchboost.calibration.passes import Passes, on_real_inputs
from torchboost.calibration.removals import (
    HostWaits,
    Kept,
    Seen,
    UselessMask,
    each_end,
    same,
    seen_in,
    without_argument,
)
from torchboost.calibration.trial import Contestant, free_bytes, obstacle_to_updates
from torchboost.calibration.watch import Call
from torchboost.core.algorithm import Target
from torchboost.core.forward import tensors_in
from torchboost.core.wrapping import is_compiled, sharded_units
from torchboost.errors import IncompatibleError, in_a_line
from torchboost.measure.statistics import paired_ratio
from torchboost.measure.stopwatch import Clock, collector_off, pair_of
from torchboost.sheet import Sheet, percent

NOTABLE = 0.1
"""Share of a step from which on waste is worth a line."""
_ROUNDS = (5, 5, 10, 20, 40, 80)
"""Pairs of steps in each round. Another round follows if the shares of a kind are further apart than they may be."""
_CLOSE = 0.1
_SECONDS = 2.0
"""No round begins after this time."""
_LOOKS = 5
_MOST_TRIES = 6
_MOST_OF_FREE = 0.5
_OF_TOKENS = (nn.Embedding, nn.MultiheadAttention)
"""Modules of models whose positions may be padding."""

Change = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Waste:
    """One kind of work that cannot change the result.

    Args:
        kind: Its name.
        seconds: Of a step. 0 if there is none, None if it is not known.
        share: Of a step. None if it is not known.
        found: How it was found, or why there is none.
        remedy: What to do against it. Empty if there is nothing.
    """

    kind: str
    seconds: float | None = None
    share: float | None = None
    found: str
    remedy: str = ""

    @property
    def figure(self) -> str:
        """The seconds and the share, in words."""
        if self.seconds is None or self.share is None:
            return "unknown"
        return f"{1e3 * self.seconds:.1f} ms, {percent(self.share)}" if self.share else "none"

    def __str__(self) -> str:
        """Say it in a line."""
        return f"{self.kind}: {self.figure}; {self.found}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True, kw_only=True)
class WasteReport:
    """The waste of a training step. Kinds may overlap, so their shares do not add up.

    Args:
        step_seconds: Of the plain step: forward, backward and update, and the wait for its data if that was measured.
        kinds: All that was looked for.
    """

    step_seconds: float
    kinds: tuple[Waste, ...]

    @property
    def notable(self) -> tuple[Waste, ...]:
        """The kinds above 10 % of a step that have a remedy, the largest first."""
        large = [waste for waste in self.kinds if waste.remedy and (waste.share or 0.0) > NOTABLE]
        return tuple(sorted(large, key=lambda waste: -(waste.share or 0.0)))

    def without(self, left_out: Sequence[str]) -> WasteReport:
        """Return the same without the remedies of kinds that an algorithm already removes."""
        lever = {"padding": Unpad.name, "unlabelled head": SparseHead.name}
        kinds = [
            replace(waste, found=f"{waste.found}; left out by {lever[waste.kind]}, which is on", remedy="")
            if waste.share and lever.get(waste.kind) in left_out
            else waste
            for waste in self.kinds
        ]
        return replace(self, kinds=tuple(kinds))

    def with_waiting(self, seconds: float, found: str, remedy: str) -> WasteReport:
        """Return the same with the time that the loop waits for its data, which is then a part of the step."""
        whole = self.step_seconds + seconds
        factor = self.step_seconds / whole if whole else 1.0
        kinds = [w if w.share is None else replace(w, share=w.share * factor) for w in self.kinds]
        share = seconds / whole if whole else 0.0
        remedy = remedy if share > 0.01 else ""
        waiting = Waste(kind="waiting for data", seconds=seconds, share=share, found=found, remedy=remedy)
        return WasteReport(step_seconds=whole, kinds=(waiting, *kinds))

    @property
    def sheet(self) -> Sheet:
        """A row for each kind."""
        return Sheet(
            before=(f"a plain step takes {1e3 * self.step_seconds:.1f} ms",),
            headings=("work without effect", "of a step", "how it was found", "what leaves it out"),
            rows=tuple((waste.kind, waste.figure, waste.found, waste.remedy) for waste in self.kinds),
        )

    def __str__(self) -> str:
        """Say everything, a line for each kind."""
        return str(self.sheet)

    def _repr_html_(self) -> str:
        return self.sheet._repr_html_()


def waste_of(
    target: Target,
    call: Call,
    *,
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    clock: Clock | None = None,
    root: str = "model",
) -> WasteReport:
    """Measure the waste of a step of a pair on one training call. At the end everything is restored.

    A kind that can be skipped is timed in pairs of steps, with it and without it. The order in a pair alternates.

    ``forward`` makes the context of each forward pass, such as the mixed precision of a trainer. ``root`` is the user's
    name for the model of the pair, or empty if its parts have the user's names.

    Raises:
        IncompatibleError: A part of the model is compiled or sharded, it or its inputs hold an iterator, no output
            depends on its parameters, two equal passes differ, or a step of an optimizer needs a closure.
        Exception: Any error of the model.

    Cost: at least 20 steps, and up to some seconds for each kind that is there.
    """
    if is_compiled(target.model):
        raise IncompatibleError("a part of the model is compiled; measure the waste before torch.compile")
    if sharded_units(target.model):
        raise IncompatibleError("FSDP2 shards the model; measure the waste of the bare model on one process")
    if (obstacle := obstacle_to_updates(target.optimizers)) is not None:
        raise IncompatibleError(
            f"the waste is not measured: {obstacle}. To measure that of one pass, boost a copy of the model with an "
            "optimizer that needs none, such as copied = copy.deepcopy(model) and torch.optim.SGD(copied.parameters(), "
            "lr=0.1), and call its waste(...)."
        )
    with on_real_inputs(target, call, forward) as passes:
        if passes.snapshot.has_iterator:
            raise IncompatibleError("the model or its inputs hold an iterator, which can be read only once")
        bench = _Bench(passes, target.optimizers, clock)
        seen = seen_in(passes, root)
        measures: dict[str, Callable[[], _Result]] = {
            "padding": lambda: _padding(bench, seen),
            "unlabelled head": lambda: _head(bench, target.optimizer),
            "masks that mask nothing": lambda: _masks(bench, seen.useless),
            "activation checkpointing": lambda: _checkpoints(bench),
            "forward pass of frozen layers": lambda: _frozen(bench),
            "host synchronisations": lambda: _waits(bench),
        }
        results = {kind: _guarded(measure) for kind, measure in measures.items()}
        plain = bench.plain
        kinds = [
            Waste(kind=kind, seconds=None if one.share is None else one.share * plain, **one._asdict())
            for kind, one in results.items()
        ]
        return WasteReport(step_seconds=plain, kinds=tuple(kinds))


def padded_share(target: Target, call: Call) -> float:
    """Return the share of padded positions in a call of the model itself, without a pass."""
    args, kwargs = call
    try:
        masks = masks_among(target.model, args, kwargs)
    except (TypeError, ValueError):  # its forward has no signature
        return 0.0
    return 1 - float(masks[0].float().mean()) if masks else 0.0


class _Result(NamedTuple):
    """What was found about one kind. Fields as in :class:`Waste`."""

    found: str
    share: float | None = 0.0
    remedy: str = ""


class _Bench:
    """Steps of the plain pair, timed in pairs with steps that skip some work."""

    def __init__(self, passes: Passes, optimizers: Sequence[Optimizer], clock: Clock | None) -> None:
        self.passes, self.clock = passes, Clock.of(passes.device) if clock is None else clock
        self._contestant = Contestant(passes, optimizers, (), None)
        self._contestant.stop_learning()
        self._plain: list[float] = []
        self.step()
        first = self._contestant.outputs
        self.step()
        passes.compare(first, self._contestant.outputs)
        with collector_off():
            self._plain += [self.step() for _ in range(_ROUNDS[0])]

    @property
    def plain(self) -> float:
        """Seconds of a plain step: the median of all that were timed."""
        return median(self._plain)

    def step(self, change: Change = nullcontext) -> float:
        """Return the seconds of a step in a context."""
        with self.passes.prepared(), change():
            return self._contestant.step(self.clock)

    def waste(self, change: Change, remedy: str, detail: str = "") -> _Result:
        """Time steps with and without the work that a change skips."""
        self.step(change)
        without = partial(self.step, change)
        times: list[tuple[float, float]] = []
        began, low, share, high = self.clock(), 0.0, 0.0, 1.0
        for pairs in _ROUNDS:
            if times and (high - low < _CLOSE or self.clock() - began > _SECONDS):
                break
            with collector_off():
                times += [pair_of(self.step, without, turned=number % 2 == 1) for number in range(pairs)]
            ratio = paired_ratio(*zip(*times, strict=True))
            low, share, high = (1 - 1 / each for each in (ratio.low, ratio.mid, ratio.high))
        self._plain += [plain for plain, _ in times]
        detail = f"{detail}, " if detail else ""
        if low <= 0 and high > NOTABLE:
            most = f"{detail}up to {percent(high)} of the computation"
            return _Result(f"{most}, not decided in {len(times)} pairs of steps", None)
        if low <= 0:
            return _Result(f"{detail}no measurable time in {len(times)} pairs of steps")
        between = f"{detail}{percent(low)} to {percent(high)} of the computation"
        return _Result(f"{between}, in {len(times)} pairs of steps with and without it", share, remedy)


def _guarded(measure: Callable[[], _Result]) -> _Result:
    try:
        return measure()
    except Exception as error:  # one kind must not hide the others
        return _Result(f"not measured: {in_a_line(error)}", None)


def _padding(bench: _Bench, seen: Seen) -> _Result:
    first = seen.padded
    if first is None and seen.masked:
        return _Result("no mask in the arguments of the model or of its parts shows padding")
    if first is None and not any(isinstance(one, _OF_TOKENS) for one in bench.passes.model.modules()):
        return _Result("the model has no embedding and no attention of torch")
    if first is None:
        where = "among the arguments of the model or of its parts"
        return _Result(f"no mask seen {where}; whether forward makes one is not known", None)
    detail = f"{percent(1 - float(first.mask.float().mean()))} of the positions are padding"
    columns = 1 - float(first.mask.any(0).float().mean())
    live: Any = unpad_forward(first.module)
    with bench.passes.prepared(), live:
        bench.passes.run()
    if live.calls and not live.remark:
        tries = "boost tries the switch unpad; " if first.name == "model" else ""
        remedy = f"{tries}by hand: torchboost.algorithms.unpad_forward({first.name})"
        return bench.waste(lambda: unpad_forward(first.module), remedy, detail)
    detail = f"{detail}; it cannot be left out: {live.remark or 'an unknown reason'}"
    if not columns:
        return _Result(f"{detail}; and no column holds padding alone")
    text = f"{detail}; estimated from the {percent(columns)} of the columns that hold padding alone"
    return _Result(text, columns, "pad to the longest sequence of each batch")


def _head(bench: _Bench, optimizer: Optimizer) -> _Result:
    lever, model = SparseHead(), bench.passes.model
    reason = lever.idle(model, optimizer) or bench.passes.shown_to(lever.fitted).without_effect
    if reason:
        return _Result(reason)
    remedy = "boost tries the switch sparse_head if the model computes its loss; by hand: sparse_head_forward(model)"
    return bench.waste(lambda: sparse_head_forward(model), remedy)


def _masks(bench: _Bench, candidates: Sequence[UselessMask]) -> _Result:
    passes = bench.passes
    if not candidates:
        return _Result("no argument that may be left out is a tensor of ones or of zeros alone")
    useless, tries = dict[tuple[int, Any], UselessMask](), 0
    passes.without_dropout = True
    try:
        with passes.prepared():
            expected = passes.run()
        for mask in candidates:
            memory = mask.tensor.data_ptr(), mask.tensor.shape
            if memory in useless or tries == _MOST_TRIES:
                continue
            tries += 1
            with suppress(Exception), passes.prepared(), without_argument(mask):  # a module that needs it raises
                if same(expected, passes.run()):
                    useless[memory] = mask
    finally:
        passes.without_dropout = False
    if not useless:
        return _Result("without the constant arguments of the model or its parts it computes something else")
    measured = [
        bench.waste(
            lambda mask=mask: without_argument(mask),
            f"call {mask.name} without {mask.argument} if it excludes nothing, as in this call",
            f"{mask.argument} of {mask.name}",
        )
        for mask in useless.values()
    ]
    return max(measured, key=lambda waste: waste.share or 0.0)


def _checkpoints(bench: _Bench) -> _Result:
    with bench.passes.prepared(), Kept(count=True) as mode:
        bench.passes.run()
    if not mode.bytes:
        return _Result("no checkpoint was met")
    free = free_bytes(bench.passes.device)
    need = f"about {mode.bytes / 2**20:,.0f} MiB"
    if free is None or mode.bytes > _MOST_OF_FREE * free:
        has = "is not known" if free is None else f"is {free / 2**20:,.0f} MiB"
        return _Result(f"without it {need} more would be kept, and the free memory {has}: it is needed")
    detail = f"without it {need} more are kept, and {free / 2**20:,.0f} MiB are free"
    return bench.waste(Kept, "turn it off, as with model.gradient_checkpointing_disable()", detail)


def _frozen(bench: _Bench) -> _Result:
    model = bench.passes.model
    if all(parameter.requires_grad for parameter in model.parameters()):
        return _Result("all parameters are trained")
    frozen, trained = list[nn.Module](), list[nn.Module]()  # modules in the order in which their calls end

    def sort(module: nn.Module, output: Any) -> None:
        (trained if trained or any(t.requires_grad for t in tensors_in(output)) else frozen).append(module)

    with bench.passes.prepared(), each_end(model, sort):
        bench.passes.run()
    used = {p: p.numel() for m in frozen for p in m.parameters(recurse=False) if not p.requires_grad}
    if not used:
        return _Result("no frozen layer comes before all trained ones")
    seconds, shares = list[float](), list[float]()

    @contextmanager
    def timed() -> Iterator[None]:
        ends, began = itertools.count(1), bench.clock()
        with each_end(model, lambda *_: next(ends) == len(frozen) and seconds.append(bench.clock() - began)):
            yield

    for _ in range(_LOOKS):
        seconds.clear()
        whole = bench.step(timed)
        shares.append(seconds[0] / whole)
    return _Result(
        f"timed up to the first trained parameter; {sum(used.values()):,} frozen ones come before it",
        median(shares),
        "if a sample is the same in every epoch, keep the outputs of this part: cache_mebibytes of grad_freeze",
    )


def _waits(bench: _Bench) -> _Result:
    device = bench.passes.device.type
    if device == "cpu":
        return _Result("not counted on the CPU, where .item() waits for nothing")
    with bench.passes.prepared(), HostWaits(device) as mode:
        bench.passes.run()
    if not mode.places:
        return _Result("no operator of the model waits for the device")
    where = ", ".join(f"{place} ({count})" for place, count in mode.places.most_common(3))
    return _Result(
        f"operators for which the host waits: {mode.places.total()} in a step, most often at {where}; their time is "
        "not known, since a step needs the numbers",
        None,
        "compute with tensors instead of .item(), and with torch.where instead of an index of booleans",
    )
