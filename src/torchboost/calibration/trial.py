"""Training steps of the user's own model, with levers attached in turns and timed in pairs. It does not change."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.calibration.passes import Passes
from torchboost.calibration.watch import TimeUp, time_limit
from torchboost.core.algorithm import Algorithm, AttachedAlgorithms, Target, attach_all
from torchboost.core.step import ClosureOptimizer, needs_closure
from torchboost.core.torch_private import hooks_of_optimizer, local_shard
from torchboost.core.wrapping import hookable, parameters_of
from torchboost.errors import IncompatibleError
from torchboost.measure.stopwatch import Clock, collector_off

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
        base: Algorithms that every contestant has.
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
        optimizers: Sequence[Optimizer],
        levers: Mapping[str, Algorithm],
        *,
        scaler: Any = None,
        base: Sequence[Algorithm] = (),
        reduce: Reduce = list,
        interrupt: bool = True,
    ) -> None:
        self._clock = Clock.of(passes.device)
        self._began = self._clock()
        self._passes, self._optimizers, self._scaler = passes, optimizers, scaler
        self._levers, self._base, self._reduce, self._interrupt = levers, base, reduce, interrupt
        self._turn = 0
        self.built: set[str] = set()
        self._active: Contestant | None = None
        self._incumbent, _, self.step_seconds = self._warmed((), math.inf)
        self._challenger = self._incumbent

    def build(self, levers: Sequence[str], *, within: float) -> float:
        """Make a challenger with levers and run its first steps. Return the seconds in excess of later steps.

        Raises:
            TimeoutError: It takes longer than ``within`` seconds. The incumbent is unchanged.
            Exception: Whatever the levers raise.
        """
        self.built |= {*levers}
        self._challenger = self._incumbent
        self._challenger, spent, steady = self._warmed(levers, within)
        return max(0.0, spent - _WARM_STEPS * steady)

    def sample(self, *, within: float) -> tuple[float, float]:
        """Time one step of each, in an order that changes from pair to pair. A step without an end takes infinitely."""
        self._turn += 1
        order = -1 if self._turn % 2 else 1
        times = [math.inf, math.inf]
        until = self._clock() + within
        with collector_off(), suppress(TimeUp):
            for place, each in enumerate([self._incumbent, self._challenger][::order]):
                with suppress(Exception):  # a step that fails late stays infinitely slow, so that the lever is dropped
                    times[place] = self._step_seconds(each, until - self._clock())
        if math.inf in times:
            self._activate(None)
        base, challenger = self._reduce(times[::order])
        return base, challenger

    def promote(self) -> None:
        """Make the challenger the incumbent."""
        self._incumbent = self._challenger

    def host_share(self) -> float:
        """Return the share of a step of the incumbent for which the host is busy, on the slowest rank."""
        return self._reduce([self._incumbent.host_share])[0]

    def close(self) -> None:
        """Remove all levers. The trial cannot be used after this."""
        self._activate(None)

    def elapsed(self) -> float:
        """Return the seconds since the trial began, on the slowest rank."""
        return self._reduce([self._clock() - self._began])[0]

    def _activate(self, contestant: Contestant | None) -> None:
        """Change the levers. With None, the changes of an unfinished pass are undone."""
        if self._active is contestant:
            return
        active, self._active = self._active, None
        if active is not None:
            active.detach()
        if contestant is not None:
            contestant.attach()
            self._active = contestant
        else:
            self._passes.snapshot.restore()

    def _warmed(self, levers: Sequence[str], within: float) -> tuple[Contestant, float, float]:
        """Return a contestant after its first steps, the seconds that this took, and the seconds of the last step."""
        failure: Exception | None = None
        warm, late, steady, started = None, False, 0.0, self._clock()
        try:
            until = started + within
            contestant = self._contestant(levers)
            with collector_off():  # the collector takes a seventh of a compilation
                for _ in range(_WARM_STEPS - 1):
                    self._step_seconds(contestant, until - self._clock())
                first = contestant.outputs
                steady = self._step_seconds(contestant, until - self._clock())
            if not levers:
                self._passes.compare(first, contestant.outputs)
            warm = contestant
        except TimeUp:
            late = True
        except Exception as error:  # levers may raise anything. The other ranks are told before it is raised here
            failure = error
        if warm is None:
            self._activate(None)
        flags = [float(failure is not None), float(late)]
        spent, steady, failed, late = self._reduce([self._clock() - started, steady, *flags])
        if failure is not None:
            raise failure
        if failed:
            raise IncompatibleError(_ELSEWHERE)
        if late or warm is None:  # on all ranks, so that they continue with the same
            raise TimeoutError(f"its first steps take longer than the {within:.1f} s that the trial had left")
        return warm, spent, steady

    def _contestant(self, levers: Sequence[str]) -> Contestant:
        """Make a contestant and attach its levers, on all ranks before one of them begins a pass."""
        contestant, failure = None, None
        try:
            algorithms = [*self._base, *(self._levers[name] for name in levers)]
            for algorithm in algorithms:
                algorithm.load()
            candidate = Contestant(self._passes, self._optimizers, algorithms, self._scaler)
            candidate.stop_learning()
            self._activate(candidate)
            contestant = candidate
        except Exception as error:  # levers may raise anything. The other ranks are told before it is raised here
            failure = error
        if self._reduce([float(contestant is None)])[0] or contestant is None:
            raise failure or IncompatibleError(_ELSEWHERE)
        return contestant

    def _step_seconds(self, contestant: Contestant, within: float) -> float:
        """Time one step. Only the step is interrupted, never the change of levers before it."""
        self._activate(contestant)
        with self._passes.prepared(), time_limit(within) if self._interrupt and within < math.inf else nullcontext():
            return contestant.step(self._clock)


class Contestant:
    """A set of levers for the model, and copies of the optimizers with them.

    Attributes:
        copies: For each optimizer the result of :func:`optimizer_over`.
        outputs: Of the last step.
        host_share: Share of the last step for which the host was busy, or waited.
    """

    def __init__(
        self,
        passes: Passes,
        optimizers: Sequence[Optimizer],
        levers: Sequence[Algorithm],
        scaler: Any,
        part: int = _PART,
    ) -> None:
        self._passes, self._levers, self._scaler = passes, levers, scaler
        self.copies = [optimizer_over(optimizer, passes.parameters, part) for optimizer in optimizers]
        self._attached: AttachedAlgorithms | None = None
        self.outputs: list[Tensor] = []
        self.host_share = 1.0

    def stop_learning(self) -> None:
        """Set the learning rates of the copies to 0."""
        for group in (group for optimizer, _, _ in self.copies for group in optimizer.param_groups):
            rate = group.get("lr")
            if isinstance(rate, Tensor):
                group["lr"] = torch.zeros_like(rate)
            elif isinstance(rate, (int, float)):
                group["lr"] = 0.0

    def attach(self) -> None:
        """Attach the levers, and give the copies of parameters the strides that the parameters then have."""
        first, *others = (optimizer for optimizer, _, _ in self.copies)
        target = Target(self._passes.model, first, self._scaler, others=tuple(others))
        self._attached = attach_all(target, self._levers)
        for optimizer, pairs, _ in self.copies:
            for parameter, copied in pairs:
                if parameter.stride() != copied.stride():
                    _restride(copied, optimizer.state.get(copied, {}), parameter)

    def detach(self) -> None:
        """Remove the levers."""
        if self._attached is not None:
            self._attached.remove()
            self._attached = None

    def step(self, clock: Clock) -> float:
        """Forward, backward, update. Return the seconds."""
        laps: list[tuple[float, float]] = []
        last = clock()

        def lap(share: float = 1.0) -> None:
            nonlocal last
            queued, before, last = clock.read(), last, clock()
            laps.append(((queued - before) / share, (last - before) / share))

        result = self._passes.run()
        by_parameter = {id(p): g for p, g in zip(self._passes.parameters, result.gradients, strict=False)}
        for optimizer, pairs, share in self.copies:
            if share < 1:
                lap()
            for parameter, copied in pairs:
                copied.grad = by_parameter[id(parameter)]
            type(optimizer).step(optimizer)  # a scheduler binds the step of the instance to the original
            for _, copied in pairs:
                copied.grad = None
            if share < 1:
                lap(share)
        lap()
        queued, seconds = map(sum, zip(*laps, strict=True))
        self.outputs, self.host_share = result.outputs, queued / seconds if seconds else 1.0
        return seconds


def obstacle_to_updates(optimizers: Sequence[Optimizer]) -> str | None:
    """Return why a trial cannot step one of the optimizers. None if it can step all."""
    found = next((o for o in optimizers if isinstance(o, ClosureOptimizer) or needs_closure(hookable(o))), None)
    if found is None:
        return None
    return f"{type(found).__name__}.step needs a closure, with which it computes several passes"


def optimizer_over(
    optimizer: Optimizer, parameters: Sequence[Tensor], part: int = _PART
) -> tuple[Optimizer, list[tuple[Tensor, Tensor]], float]:
    """Copy an optimizer over copies of the trained parameters, or of about ``part`` of their entries.

    Its hooks are not copied, and modules that it refers to are shared.

    Returns:
        The copy, each parameter with its copy, and the copied share of the entries.

    Raises:
        TypeError: It cannot be copied.
    """
    inner = hookable(optimizer)
    all_parameters = parameters_of(inner)
    trained = {id(p) for p in parameters}
    chosen = [p for p in all_parameters if id(p) in trained]
    entries = sum(p.numel() for p in chosen)
    if entries > part:  # parameters of every size
        chosen = sorted(chosen, key=Tensor.numel)[:: -(-entries // part)]
    copied = [p.detach().clone(memory_format=torch.preserve_format) for p in chosen]
    copies = {id(p): nn.Parameter(c, requires_grad=p.requires_grad) for p, c in zip(chosen, copied, strict=True)}
    absent = nn.Parameter(torch.empty(0, device="cpu"))
    memo: dict[int, Any] = {id(p): copies.get(id(p), absent) for p in all_parameters}
    absent_state = [value for p in all_parameters if id(p) not in copies for value in inner.state.get(p, {}).values()]
    memo |= {id(value): absent for value in absent_state if isinstance(value, Tensor)}  # Adam asks whether it is one
    memo |= {id(hook): hook for hooks in hooks_of_optimizer(inner) for hook in hooks.values()}
    memo |= {id(value): value for value in vars(inner).values() if isinstance(value, nn.Module)}
    try:
        duplicate = copy.deepcopy(inner, memo)
        if duplicate is inner:
            raise ValueError("its copy is the optimizer itself")
    except Exception as error:  # attributes of the user's optimizer may raise anything
        raise TypeError(f"this {type(inner).__name__} cannot be copied ({type(error).__name__}: {error})") from error
    for hooks in hooks_of_optimizer(duplicate):
        hooks.clear()
    for group in duplicate.param_groups:
        group["params"] = [p for p in group["params"] if p is not absent]
    duplicate.state.pop(absent, None)
    share = sum(p.numel() for p in chosen) / entries if entries else 1.0
    return duplicate, [(p, copies[id(p)]) for p in chosen], share


def _restride(copied: Tensor, state: dict[Any, Any], like: Tensor) -> None:
    """Give a copy of a parameter, and the tensors of its shape in its state, the strides of ``like``."""
    followers = [v for v in state.values() if isinstance(v, Tensor) and v.shape == copied.shape]
    for tensor in (copied, *followers):
        strided = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor.data = strided.copy_(tensor)


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
    """Return the free memory of a device, with the unused memory of torch's allocator. None if it is unknown."""
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
