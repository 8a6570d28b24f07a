"""Training steps of the user's own model, with levers attached in turns and timed in pairs. It does not change."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.calibration.passes import Passes
from torchboost.calibration.snapshot import belongs_to_torch
from torchboost.calibration.time_limit import TimeUp, time_limit
from torchboost.core.algorithm import Algorithm, AttachedAlgorithms, Target, attach_all
from torchboost.core.torch_private import hooks_of_optimizer, local_shard, module_hooks, parameter_slots
from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError
from torchboost.graph.copies import twin
from torchboost.measure.stopwatch import Clock, collector_off

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Pair",
    "Reduce",
    "Trial",
    "free_bytes",
    "needed_bytes",
    "optimizer_over",
    "outline",
    "restride",
    "with_memory",
]

Pair: TypeAlias = "tuple[nn.Module, Unpack[tuple[Optimizer, ...]]]"
"""A model and its optimizers."""
Reduce = Callable[[list[float]], list[float]]
"""Return for each number the largest one of all ranks. Infinity stands for a step that failed."""

_ELSEWHERE = "another rank could not run it; see the log of that rank."
_WARM_STEPS = 2
_PART = 2**22
"""A contestant steps a copy of the whole optimizer up to this number of entries, and above it about as many."""


class Trial:
    """The bench of a search: an incumbent and a challenger, which are sets of levers.

    A step is forward and backward of the model itself, in turns with and without the levers, and an update by a copy
    of the optimizer over copies of parameters. The learning rate of the copy is 0.

    Args:
        passes: Passes of the plain model, under a snapshot.
        optimizer: The optimizer of the loop.
        levers: Name -> algorithm.
        scaler: Scaler of the loop, for levers that need one.
        base: Algorithms that every contestant has.
        reduce: Combines numbers over the ranks; None for one rank.
        before: Passes and optimizers of a copy from before boost, if the level has changed the model.
        others: More optimizers of the loop, whose copies are stepped after the first copy.
        interrupt: Whether a step that takes longer than it may is interrupted. Ranks that exchange something in a step
            would wait for the one that is.

    Attributes:
        step_seconds: Time of a plain step.
        built: The levers that were tried.

    Raises:
        TypeError: The optimizer cannot be copied.
        IncompatibleError: No output of the model depends on its parameters.

    Cost: memory for copies of a part of the parameters and their state, twice while a lever is tried.
    """

    def __init__(
        self,
        passes: Passes,
        optimizer: Optimizer,
        levers: Mapping[str, Algorithm],
        *,
        scaler: Any = None,
        base: Sequence[Algorithm] = (),
        reduce: Reduce | None = None,
        before: tuple[Passes, Unpack[tuple[Optimizer, ...]]] | None = None,
        others: Sequence[Optimizer] = (),
        interrupt: bool = True,
    ) -> None:
        device = next((p.device for p in passes.parameters), torch.device("cpu"))
        self._clock = Clock.of(device)
        self._began = self._clock()
        self._now: tuple[Passes, Sequence[Optimizer]] = passes, (optimizer, *others)
        self._before = None if before is None else (before[0], before[1:])
        self._levers, self._scaler, self._base = levers, scaler, base
        self._reduce = reduce if reduce is not None else list
        self._interrupt = interrupt
        self._turn = 0
        self.built: set[str] = set()
        self._active: _Contestant | None = None
        self._incumbent, _, self.step_seconds = self._warmed((), math.inf)
        self._challenger = self._incumbent

    def build(self, levers: Sequence[str], *, within: float) -> float:
        """Attach levers and run the first steps; return the seconds above what later steps take."""
        self.built |= {*levers}
        self._challenger = self._incumbent
        self._challenger, spent, steady = self._warmed(levers, within)
        return max(0.0, spent - _WARM_STEPS * steady)

    def build_plain(self, *, within: float) -> None:
        """Make the challenger the pair from before boost and run the first steps."""
        self._challenger = self._incumbent
        self._challenger, _, _ = self._warmed((), within, before=True)

    def sample(self, *, within: float) -> tuple[float, float]:
        """Time one step of each, in an order that changes from pair to pair. A step without an end takes infinitely."""
        self._turn += 1
        pair = [self._incumbent, self._challenger]
        if self._turn % 2:
            pair.reverse()
        times = [math.inf, math.inf]
        until = self._clock() + within
        with collector_off(), suppress(TimeUp):
            for place, each in enumerate(pair):
                times[place] = self._safe_seconds(each, until - self._clock())
        if self._turn % 2:
            times.reverse()
        base, challenger = self._reduce(times)
        return base, challenger

    def promote(self) -> None:
        """Make the challenger the incumbent."""
        self._incumbent = self._challenger

    def close(self) -> None:
        """Remove all levers. The trial cannot be used after this."""
        self._activate(None)

    def elapsed(self) -> float:
        """Return the seconds since the trial began, on the slowest rank."""
        return self._reduce([self._clock() - self._began])[0]

    def _activate(self, contestant: _Contestant | None) -> None:
        if self._active is contestant:
            return
        active, self._active = self._active, None
        if active is not None:
            active.detach()
        if contestant is not None:
            contestant.attach()
            self._active = contestant

    def _warmed(
        self, levers: Sequence[str], within: float, *, before: bool = False
    ) -> tuple[_Contestant, float, float]:
        """Return a contestant after its first steps, the seconds that this took, and the seconds of the last step."""
        failure: Exception | None = None
        warm, steady, started = None, math.inf, self._clock()
        try:
            until = started + within
            contestant = self._contestant(levers, before)
            with collector_off():  # the collector takes a seventh of a compilation
                seconds = [self._step_seconds(contestant, until - self._clock()) for _ in range(_WARM_STEPS - 1)]
                first = contestant.outputs
                seconds.append(self._step_seconds(contestant, until - self._clock()))
            if not levers:
                contestant.passes.compare(first, contestant.outputs)
            warm, steady = contestant, seconds[-1]
        except TimeUp:
            failure = TimeoutError(f"its first steps take longer than the {within:.1f} s that the trial had left")
        except Exception as error:  # levers may raise anything; the other ranks are told before it is raised here
            failure = error
        if failure is not None:
            self._activate(None)
        spent, steady = self._reduce([self._clock() - started, steady])
        if failure is not None:
            raise failure
        if warm is None or steady == math.inf:
            raise IncompatibleError(_ELSEWHERE)
        return warm, spent, steady

    def _contestant(self, levers: Sequence[str], before: bool) -> _Contestant:
        """Make a contestant and attach its levers, on all ranks before one of them begins a pass."""
        contestant, failure = None, None
        try:
            algorithms = [*self._base, *(self._levers[name] for name in levers)]
            for algorithm in algorithms:
                algorithm.load()
            candidate = _Contestant(*(self._before if before and self._before else self._now), algorithms, self._scaler)
            self._activate(candidate)
            contestant = candidate
        except Exception as error:  # levers may raise anything; the other ranks are told before it is raised here
            failure = error
        if self._reduce([float(contestant is None)])[0] or contestant is None:
            raise failure or IncompatibleError(_ELSEWHERE)
        return contestant

    def _safe_seconds(self, contestant: _Contestant, within: float) -> float:
        try:
            return self._step_seconds(contestant, within)
        except Exception:  # a step that fails late counts as infinitely slow, so that the lever is dropped
            return math.inf

    def _step_seconds(self, contestant: _Contestant, within: float) -> float:
        """Time one step. Only the step is interrupted, never the change of levers before it."""
        self._activate(contestant)
        contestant.passes.prepare()
        try:
            with time_limit(within) if self._interrupt and within < math.inf else nullcontext():
                return contestant.step(self._clock)
        finally:
            contestant.passes.finish()


class _Contestant:
    """A set of levers for the model, and copies of the optimizers with them."""

    def __init__(
        self, passes: Passes, optimizers: Sequence[Optimizer], levers: Sequence[Algorithm], scaler: Any
    ) -> None:
        self.passes, self._levers, self._scaler = passes, levers, scaler
        self._copies = [optimizer_over(optimizer, passes.parameters) for optimizer in optimizers]
        self._attached: AttachedAlgorithms | None = None
        self.outputs: list[Tensor] = []
        for duplicate, _, _ in self._copies:
            _stop_learning(duplicate)

    def attach(self) -> None:
        """Attach the levers, and give the copies of parameters the strides that the parameters then have."""
        first, *others = (duplicate for duplicate, _, _ in self._copies)
        target = Target(self.passes.model, first, self._scaler, others=tuple(others))
        self._attached = attach_all(target, self._levers)
        for duplicate, pairs, _ in self._copies:
            for parameter, copied in pairs:
                if parameter.stride() != copied.stride():
                    restride(copied, duplicate.state.get(copied, {}), parameter)

    def detach(self) -> None:
        """Remove the levers."""
        if self._attached is not None:
            self._attached.remove()
            self._attached = None

    def step(self, clock: Clock) -> float:
        """Forward, backward, update. Return the seconds."""
        seconds, last = 0.0, clock()
        result = self.passes.run()
        by_parameter = {id(p): g for p, g in zip(self.passes.parameters, result.gradients, strict=False)}
        for optimizer, pairs, share in self._copies:
            if share < 1:
                before, last = last, clock()
                seconds += last - before
            for parameter, copied in pairs:
                copied.grad = by_parameter[id(parameter)]
            type(optimizer).step(optimizer)  # a scheduler binds the step of the instance to the original
            for _, copied in pairs:
                copied.grad = None
            if share < 1:
                before, last = last, clock()
                seconds += (last - before) / share
        seconds += clock() - last
        self.outputs = result.outputs
        return seconds


def optimizer_over(
    optimizer: Optimizer, parameters: Sequence[Tensor], part: int = _PART
) -> tuple[Optimizer, list[tuple[Tensor, Tensor]], float]:
    """Copy an optimizer over copies of the parameters, or of a part of them.

    Args:
        optimizer: Of the loop. Its hooks are not copied; modules that it refers to are shared.
        parameters: Those that get a gradient.
        part: About as many entries as are copied.

    Returns:
        The copy, each parameter with its copy, and the copied share of the entries.

    Raises:
        TypeError: It cannot be copied.
    """
    inner = hookable(optimizer)
    all_parameters = [p for group in inner.param_groups for p in group["params"]]
    trained = {id(p) for p in parameters}
    chosen = _part([p for p in all_parameters if id(p) in trained], part)
    copies = {id(p): _copied(p) for p in chosen}
    absent = nn.Parameter(torch.empty(0, device="cpu"))
    memo: dict[int, Any] = {id(p): copies.get(id(p), absent) for p in all_parameters}
    absent_state = [value for p in all_parameters if id(p) not in copies for value in inner.state.get(p, {}).values()]
    memo |= {id(value): None for value in absent_state if isinstance(value, Tensor)}
    duplicate = _deepcopy(inner, memo)
    for group in duplicate.param_groups:
        group["params"] = [p for p in group["params"] if p is not absent]
    duplicate.state.pop(absent, None)
    entries = sum(p.numel() for p in all_parameters if id(p) in trained)
    share = sum(p.numel() for p in chosen) / entries if entries else 1.0
    return duplicate, [(p, copies[id(p)]) for p in chosen], share


def _deepcopy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer without its hooks. Modules that it refers to are shared."""
    memo |= {id(hook): hook for hooks in hooks_of_optimizer(optimizer) for hook in hooks.values()}
    memo |= {id(value): value for value in vars(optimizer).values() if isinstance(value, nn.Module)}
    try:
        duplicate = copy.deepcopy(optimizer, memo)
        if duplicate is optimizer:
            raise ValueError("its copy is the optimizer itself")
    except Exception as error:  # attributes of the user's optimizer may raise anything
        raise TypeError(
            f"this {type(optimizer).__name__} cannot be copied ({type(error).__name__}: {error})"
        ) from error
    for hooks in hooks_of_optimizer(duplicate):
        hooks.clear()
    return duplicate


def _part(parameters: list[Tensor], most: int) -> list[Tensor]:
    """Return parameters of every size with about this number of entries in all, or all parameters."""
    entries = sum(p.numel() for p in parameters)
    if entries <= most:
        return parameters
    every = -(-entries // most)
    return sorted(parameters, key=Tensor.numel)[::every]


def _copied(parameter: Tensor) -> nn.Parameter:
    copied = parameter.detach().clone(memory_format=torch.preserve_format)
    return nn.Parameter(copied, requires_grad=parameter.requires_grad)


def restride(copied: Tensor, state: dict[Any, Any], like: Tensor) -> None:
    """Give a copy of a parameter, and what of its state has its shape, the strides of ``like``."""
    followers = [v for v in state.values() if isinstance(v, Tensor) and v.shape == copied.shape]
    for tensor in (copied, *followers):
        tensor.data = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )


def outline(model: nn.Module, *optimizers: Optimizer) -> Pair:
    """Return copies of a model and its optimizers without memory, without state, and without the hooks of the user.

    Raises:
        TypeError: One of them cannot be copied.
    """
    duplicate = twin(model, numbers=False)
    for before, after in zip(model.modules(), duplicate.modules(), strict=True):
        after.training = before.training
        for registered in module_hooks(after):
            for key in [key for key, hook in registered.items() if not belongs_to_torch(hook)]:
                del registered[key]
    memo: dict[int, Any] = {id(p): q for p, q in zip(model.parameters(), duplicate.parameters(), strict=True)}
    memo |= {id(inner.state): defaultdict(dict) for inner in map(hookable, optimizers)}
    return duplicate, *(_deepcopy(hookable(optimizer), memo) for optimizer in optimizers)


def with_memory(pair: Pair, model: nn.Module) -> Pair:
    """Give an :func:`outline` memory. Parameters of the same name and shape in ``model`` lend their numbers."""
    outlined, *optimizers = pair
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    numbers = {name: parameter.detach() for name, parameter in model.named_parameters()}
    filled: dict[int, nn.Parameter] = {}
    for name, parameter in outlined.named_parameters():
        if parameter.is_meta:
            data = torch.ones_like(parameter, device=device, requires_grad=False)
            if name in numbers and numbers[name].shape == data.shape:
                data.copy_(numbers[name])
            filled[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
    for module in outlined.modules():
        slots = parameter_slots(module)
        slots.update({name: filled.get(id(parameter), parameter) for name, parameter in slots.items()})
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["params"] = [filled.get(id(parameter), parameter) for parameter in group["params"]]
    return outlined, *optimizers


def needed_bytes(model: nn.Module) -> int:
    """Estimate the memory that a trial needs in addition to training.

    It is a copy of parameters and buffers, two gradients, and for two contestants a part of the parameters with two
    moments each. Activations do not count.

    Cost: no tensor is read or copied.
    """
    shards = [local_shard(p) if hasattr(p, "device_mesh") else p for p in model.parameters()]
    tensors = [*shards, *shards, *shards, *model.buffers()]
    entries = sum(p.numel() for p in shards)
    return sum(t.numel() * t.element_size() for t in tensors) + 2 * 3 * 4 * min(entries, _PART)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, with what torch's allocator holds unused; None if it is unknown."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if module is not None and hasattr(module, "mem_get_info"):
        unused = module.memory_reserved(device) - module.memory_allocated(device)
        return module.mem_get_info(device)[0] + unused
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    return int(sizes[0]) * 1024 if sizes else None


def _stop_learning(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            group["lr"] = torch.zeros_like(rate)
        elif isinstance(rate, (int, float)):
            group["lr"] = 0.0
