"""Training steps on copies of a model and its optimizer, timed in pairs. The originals are never run or changed."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchboost.calibration.time_limit import TimeUp, time_limit
from torchboost.core.algorithm import Algorithm, Target, attach_all
from torchboost.core.torch_private import module_hooks
from torchboost.core.wrapping import hookable
from torchboost.errors import IncompatibleError
from torchboost.graph.recording import tensors_in
from torchboost.graph.twin import parameter_bytes, twin
from torchboost.measure.stopwatch import Clock, collector_off

__all__ = ["Pair", "Trial", "copied", "free_bytes", "needed_bytes", "streams_kept"]

Call = tuple[tuple[Any, ...], dict[str, Any]]
Pair = tuple[nn.Module, Optimizer]
Reduce = Callable[[list[float]], list[float]]
"""Return for each number the largest one of all ranks. Infinity stands for a step that failed."""

_WARM_STEPS = 2
_COPIES = 2


class Trial:
    """The bench of a search: an incumbent and a challenger, each a copy of the pair with some levers attached.

    A step is forward, backward and update on the inputs of one real call. The loss of the loop is not known here. If
    the model returns a loss, it is used; otherwise a fixed random gradient enters at the outputs. The learning rate of
    the copies is 0, so that their weights stay in range. Hooks of the user are not copied.

    Args:
        model: The plain model, as the loop calls it.
        optimizer: Its optimizer, which calls hooks.
        call: Positional and named arguments of one training call.
        levers: Name -> algorithm.
        scaler: Scaler of the loop, for levers that need one.
        base: Algorithms that every contestant has.
        reduce: Combines numbers over the ranks; None for one rank.
        before: Model and optimizer as they were before boost, if the level has changed the model.
        forward: Makes the context of each forward pass, such as the mixed precision of a trainer.

    Raises:
        TypeError: The model or the optimizer cannot be copied.
        IncompatibleError: No output of the model depends on its parameters.

    Cost: memory for two copies of parameters, gradients and optimizer state, and for the activations of one step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        call: Call,
        levers: Mapping[str, Algorithm],
        *,
        scaler: Any = None,
        base: Sequence[Algorithm] = (),
        reduce: Reduce | None = None,
        before: Pair | None = None,
        forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._clock = Clock.of(device)
        self._began = self._clock()
        self._pair, self._call = (model, optimizer), call
        self._before, self._forward = before, forward
        self._levers, self._scaler, self._base = levers, scaler, base
        self._reduce = reduce if reduce is not None else list
        self._turn = 0
        self._incumbent, _, self.step_seconds = self._warmed((), math.inf)
        self._challenger = self._incumbent

    def build(self, levers: Sequence[str], *, within: float) -> float:
        """Copy the pair, attach levers and run the first steps; return the seconds above those of later steps."""
        self._free_challenger()
        self._challenger, spent, steady = self._warmed(levers, within)
        return max(0.0, spent - _WARM_STEPS * steady)

    def build_plain(self, *, within: float) -> None:
        """Copy the pair from before boost and run the first steps."""
        self._free_challenger()
        self._challenger, _, _ = self._warmed((), within, before=True)

    def sample(self, *, within: float) -> tuple[float, float]:
        """Time one step of each, in an order that changes from pair to pair. A step without an end takes infinitely."""
        self._turn += 1
        pair = [self._incumbent, self._challenger]
        if self._turn % 2:
            pair.reverse()
        times = [math.inf, math.inf]
        with collector_off(), suppress(TimeUp), time_limit(within):
            for place, each in enumerate(pair):
                times[place] = self._safe_seconds(each)
        if self._turn % 2:
            times.reverse()
        base, own = self._reduce(times)
        return base, own

    def promote(self) -> None:
        """Make the challenger the incumbent; the old incumbent is freed."""
        self._incumbent, self._challenger = self._challenger, self._incumbent
        self._free_challenger()

    def close(self) -> None:
        """Free both contestants. The trial cannot be used after this."""
        self._free_challenger()
        self._incumbent.free()

    def _free_challenger(self) -> None:
        if self._challenger is not self._incumbent:
            self._challenger.free()
            self._challenger = self._incumbent

    def elapsed(self) -> float:
        """Return the seconds since the trial began, on the slowest rank."""
        return self._reduce([self._clock() - self._began])[0]

    def _warmed(
        self, levers: Sequence[str], within: float, *, before: bool = False
    ) -> tuple[_Contestant, float, float]:
        """Return a contestant after its first steps, the seconds that this took, and those of the last step."""
        failure: Exception | None = None
        made, steady, started = None, math.inf, self._clock()
        try:
            algorithms = [*self._base, *(self._levers[name] for name in levers)]
            for algorithm in algorithms:
                algorithm.load()
            left = within - (self._clock() - started)
            # The collector takes a seventh of a compilation.
            with collector_off(), time_limit(left) if within < math.inf else nullcontext():
                made, steady = self._first_steps(algorithms, before=before)
        except TimeUp:
            failure = TimeoutError(f"its first steps take longer than the {within:.1f} s that the trial had left")
        except Exception as error:  # levers may raise anything; the other ranks are told before it is raised here
            failure = error
        spent, steady = self._reduce([self._clock() - started, steady])
        if failure is not None:
            raise failure
        if made is None or steady == math.inf:
            raise IncompatibleError("another rank could not run it; see the log of that rank.")
        return made, spent, steady

    def _first_steps(self, algorithms: Sequence[Algorithm], *, before: bool) -> tuple[_Contestant, float]:
        pair = self._before if before and self._before is not None else self._pair
        made = _Contestant(pair, self._call, algorithms, self._scaler, self._forward)
        try:
            return made, [self._step_seconds(made) for _ in range(_WARM_STEPS)][-1]
        except BaseException:
            made.free()
            raise

    def _safe_seconds(self, contestant: _Contestant) -> float:
        try:
            return self._step_seconds(contestant)
        except Exception:  # a step that fails late counts as infinitely slow, so that the lever is dropped
            return math.inf

    def _step_seconds(self, contestant: _Contestant) -> float:
        contestant.prepare()
        started = self._clock()
        contestant.step()
        return self._clock() - started


class _Contestant:
    """A copy of model and optimizer with levers attached."""

    def __init__(
        self,
        pair: Pair,
        call: Call,
        levers: Sequence[Algorithm],
        scaler: Any,
        forward: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.model, self.optimizer = copied(*pair)
        self._originals = {id(tensor) for tensor in [*pair[0].parameters(), *pair[0].buffers()]}
        self._call, self._inputs, self._forward = call, call, forward
        self._gradients: list[Tensor] | None = None
        target = Target(self.model, self.optimizer, copy.deepcopy(scaler))
        self.attached = attach_all(target, levers)
        _stop_learning(self.optimizer)

    def prepare(self) -> None:
        """Copy the inputs, which a forward may change; outside the timed part of a step."""
        self._inputs = _copied_inputs(self._call)
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            torch.clear_autocast_cache()  # an autocast context of the loop would keep the casts of the last step

    def step(self) -> None:
        """Forward, backward, update."""
        args, kwargs = self._inputs
        with self._forward():
            outputs = _differentiable(self.model(*args, **kwargs))
        if not outputs:
            raise IncompatibleError("no output of the model depends on its parameters, so there is no backward pass")
        if self._gradients is None or [g.shape for g in self._gradients] != [o.shape for o in outputs]:
            self._gradients = [_gradient_for(output) for output in outputs]
        gradients = [g.to(o.dtype) for g, o in zip(self._gradients, outputs, strict=True)]
        torch.autograd.backward(outputs, gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def free(self) -> None:
        """Give the memory of the tensors back now. Levers refer to their target in cycles, which would keep it."""
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            if id(tensor) not in self._originals:  # a module may share tensors with its copies
                tensor.grad = None
                tensor.data = tensor.new_empty(0)
        self.optimizer.state.clear()
        self._inputs, self._gradients = ((), {}), None


def needed_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Estimate the peak memory of a trial beyond that of the pair.

    It is that of two copies of parameters, buffers and optimizer state, and of the gradients and the casts of autocast
    of one of them. An optimizer without state, such as one before its first step, counts as one with two moments.
    Activations, inputs and outputs do not count.

    Cost: no tensor is read or copied.
    """
    parameters, buffers = parameter_bytes(model), sum(b.numel() * b.element_size() for b in model.buffers())
    held = [v for entry in hookable(optimizer).state.values() for v in entry.values() if isinstance(v, Tensor)]
    state = sum(v.numel() * v.element_size() for v in held) if held else 2 * parameters
    return _COPIES * (parameters + buffers + state) + 2 * parameters


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device; None if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    return int(found[0]) * 1024 if found else None


@contextmanager
def streams_kept(model: nn.Module) -> Iterator[None]:
    """Restore the random generators of torch, Python and NumPy at the end. Other threads must not draw meanwhile."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python, numpy = random.getstate(), sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(state)


def copied(model: nn.Module, optimizer: Optimizer) -> Pair:
    """Return copies of a model and its optimizer, without the hooks of the user.

    Raises:
        TypeError: One of them cannot be copied.
    """
    made = twin(model)
    for before, after in zip(model.modules(), made.modules(), strict=True):
        after.training = before.training
        for registered in module_hooks(after):
            for key in [key for key, hook in registered.items() if not _belongs_to_torch(hook)]:
                del registered[key]
    memo: dict[int, Any] = {id(p): q for p, q in zip(model.parameters(), made.parameters(), strict=True)}
    try:
        return made, copy.deepcopy(hookable(optimizer), memo)
    except Exception as error:  # attributes of the user's optimizer may raise anything
        raise TypeError(
            f"this {type(optimizer).__name__} cannot be copied ({type(error).__name__}: {error})"
        ) from error


def _belongs_to_torch(hook: Any) -> bool:
    """Whether a hook computes a part of the model, as those of the old ``weight_norm`` do."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] == "torch"


def _stop_learning(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            group["lr"] = torch.zeros_like(rate)
        elif isinstance(rate, (int, float)):
            group["lr"] = 0.0


def _copied_inputs(value: Any, made: dict[int, Tensor] | None = None) -> Any:
    """Copy the tensors in containers. A tensor that occurs twice does so in the copy; compiled graphs depend on it."""
    made = {} if made is None else made
    if isinstance(value, Tensor):
        if id(value) not in made:
            copied = value.detach().clone(memory_format=torch.preserve_format)
            made[id(value)] = copied.requires_grad_(value.requires_grad)
        return made[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_copied_inputs(entry, made) for entry in value)
    if type(value) is dict:
        return {key: _copied_inputs(entry, made) for key, entry in value.items()}
    return value


def _differentiable(outputs: Any) -> list[Tensor]:
    """Return the loss if the model returns one, otherwise the outputs through which gradients flow back."""
    found = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    losses = [tensor for tensor in found if tensor.numel() == 1]
    return losses[:1] if losses else found


def _gradient_for(output: Tensor) -> Tensor:
    """Return a fixed gradient of norm 1 with the shape of ``output``. The default generators are not used."""
    if output.numel() == 1:
        return torch.ones_like(output, requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(output.shape, generator=generator) / max(1.0, output.numel() ** 0.5)
    return values.to(output.device, output.dtype)
