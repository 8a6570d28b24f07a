"""A training from a user's file: ``make(seed) -> (model, optimizer, loss, batches)``."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import itertools
import math
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from typing_extensions import Self

from torchboost.bench.workloads.data import Data
from torchboost.bench.workloads.jobs import Job
from torchboost.errors import FactoryError, IncompatibleError, NoEffectWarning
from torchboost.optim.rebuild import described_groups, rebuilt

__all__ = [
    "Parts",
    "check_fresh",
    "factory_of",
    "function_at",
    "ignored_seed",
    "job_from",
    "loss_of",
    "made_by",
    "metric_of",
    "nothing_in",
    "on_device",
    "pair_of",
    "parts_from",
    "scheduled",
    "source_of",
]

SECONDS_OF_AN_EPOCH = 60.0
"""Time in which the batches of an epoch must be read, if they have no length: they may be endless."""
MOST_KEPT = 100_000
"""Batches of a generator that are kept for further epochs."""

RETURNS = "(model, optimizer, loss, batches), and after them, if you like, evaluate and schedule"

Batch = tuple[Tensor, Tensor]


class Parts(NamedTuple):
    """The parts that a factory returns.

    Args:
        model: The model to train. Its output is passed to ``loss``.
        optimizer: Optimizer of its parameters.
        loss: ``(outputs, targets) -> scalar``.
        batches: ``(inputs, targets)`` pairs of one epoch. Iterated again for every epoch.
        evaluate: ``model -> metric``, higher is better. Without it only step times are measured.
        schedule: ``(optimizer, steps) -> torch scheduler`` for a run of so many steps; stepped after every update.
            Without it the learning rate stays as it is.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Any, Any], Tensor]
    batches: Iterable[Batch]
    evaluate: Callable[[Callable[..., Any]], float] | None = None
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None


@dataclass(frozen=True, eq=False)
class _Factory:
    """Calls the user's function and checks its result. Keeps the last result."""

    make: Callable[[int], object]
    last: dict[str, Parts] = field(default_factory=dict)
    epochs: dict[int, Iterable[Batch]] = field(default_factory=dict)

    def build(self, seed: int) -> Parts:
        parts = made_by(self.make, seed)
        check_fresh(parts, *self.last.values())
        self.last["parts"] = parts
        # A generator can be read only once, but an epoch is needed many times.
        spent = iter(parts.batches) is parts.batches
        self.epochs[seed] = list(_ending(parts.batches, MOST_KEPT)) if spent else parts.batches
        return parts

    def batches(self, seed: int) -> Iterable[Batch]:
        if seed not in self.epochs:
            self.build(seed)
        return self.epochs[seed]


def _ending(batches: Iterable[Batch], most: float = math.inf) -> Iterator[Batch]:
    """Yield the batches of an epoch. Without a length they must end in time, and after ``most``.

    Raises:
        FactoryError: They do not end.
    """
    known, began = _has_length(batches), time.monotonic()
    for number, batch in enumerate(batches, start=1):
        spent = time.monotonic() - began
        if not known and (spent > SECONDS_OF_AN_EPOCH or number > most):
            raise FactoryError(
                f"the factory's batches did not end ({number:,} were read in {spent:.0f} s); give those of one epoch, "
                "as a list or a loader that ends, such as list(itertools.islice(batches, 1000)). If an epoch takes "
                f"longer than {SECONDS_OF_AN_EPOCH:g} s to read, give batches with a length."
            )
        yield batch


def _has_length(batches: Iterable[Batch]) -> bool:
    try:
        return len(batches) >= 0  # pyright: ignore[reportArgumentType]
    except TypeError:
        return False


def made_by(make: Callable[[int], object], seed: int) -> Parts:
    """Call a factory with torch's generator seeded, and check what it returns.

    Raises:
        FactoryError: The result is not what a factory returns.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _checked(make(seed))


def _checked(found: object) -> Parts:
    if not isinstance(found, tuple) or len(found) not in (4, 5, 6):
        what = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
        raise FactoryError(f"the factory returned {what}; needed: {RETURNS}.")
    parts = Parts(*found)
    fitting = {
        "model": isinstance(parts.model, nn.Module),
        "optimizer": isinstance(parts.optimizer, Optimizer),
        "loss": callable(parts.loss),
        "batches": isinstance(parts.batches, Iterable),
        "evaluate": parts.evaluate is None or callable(parts.evaluate),
        "schedule": parts.schedule is None or callable(parts.schedule),
    }
    for name, fits in fitting.items():
        if not fits:
            raise FactoryError(f"the factory's {name} is a {type(getattr(parts, name)).__name__}; needed: {RETURNS}.")
    if _needed(parts.optimizer.step):
        raise FactoryError(
            f"the factory's optimizer is a {type(parts.optimizer).__name__}, whose step needs a closure; needed: one "
            "that steps once per backward pass."
        )
    own = {id(param) for param in parts.model.parameters()}
    if not any(id(param) in own for group in parts.optimizer.param_groups for param in group["params"]):
        raise FactoryError(
            "the factory's optimizer has no parameter of its model; build it from the parameters of the model that is "
            "returned."
        )
    return parts


def check_fresh(parts: Parts, *others: Parts) -> None:
    """Check that the model is not that of another call, so that no run continues the training of another.

    Raises:
        FactoryError: A parameter or buffer is one of the others'.
    """
    known = {id(state) for other in others for state in (*other.model.parameters(), *other.model.buffers())}
    found = {"parameter": parts.model.named_parameters(), "buffer": parts.model.named_buffers()}
    shared = [(kind, name) for kind, states in found.items() for name, state in states if id(state) in known]
    for kind, name in shared[:1]:
        raise FactoryError(
            f"the factory returned the same {kind} twice ({name}); build the whole model inside it, or copy it "
            "there with copy.deepcopy, so that each run has its own."
        )


def ignored_seed(first: int, second: int) -> FactoryError:
    """Return the error for two trainings of stock that were the same."""
    return FactoryError(
        f"the stock loop had the same losses and metric for the seeds {first} and {second}, so the factory ignores its "
        "seed. Let make(seed) draw weights or data from torch's generator, which is seeded before each call, or from "
        "the seed."
    )


def nothing_in(number: int) -> FactoryError:
    """Return the error for a pass over the batches, counted from 1, that gave none."""
    return FactoryError(
        f"the factory's batches gave nothing in pass {number}; give an iterable that starts again in every pass, such "
        "as a list or a DataLoader."
    )


def loss_of(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Tensor:
    """Compute a loss.

    Raises:
        FactoryError: It is not a tensor.
    """
    found = loss(outputs, targets)
    if not isinstance(found, Tensor):
        raise FactoryError(f"the factory's loss returned a {type(found).__name__}; needed: a tensor of one number.")
    return found


def metric_of(parts: Parts, model: Callable[..., Any]) -> float:
    """Compute the metric of a model, which is in evaluation mode.

    Raises:
        FactoryError: It is not a number.
    """
    assert parts.evaluate is not None
    with torch.no_grad():
        found = parts.evaluate(model)
    try:
        return float(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FactoryError(f"the factory's evaluate returned a {type(found).__name__}; needed: a number.") from error


def source_of(make: Callable[..., Any]) -> str:
    """Return a text that tells factories apart; empty if no file defines the function.

    It depends on the content of the file, on the name of the function, and on the arguments of a ``functools.partial``
    as they are printed, without addresses in memory.
    """
    given: list[str] = []
    while isinstance(make, functools.partial) or hasattr(make, "__wrapped__"):
        if isinstance(make, functools.partial):
            given += map(_printed, [*make.args, *sorted(make.keywords.items())])
        make = make.func if isinstance(make, functools.partial) else inspect.unwrap(make, stop=_is_partial)
    try:
        file = inspect.getsourcefile(make)
        content = b"" if file is None else Path(file).read_bytes()
    except (TypeError, OSError):
        return ""
    named = "\n".join([getattr(make, "__qualname__", ""), *given]).encode("utf-8", "backslashreplace")
    return hashlib.sha256(named + b"\n" + content).hexdigest()[:16] if content else ""


def _is_partial(make: Callable[..., Any]) -> bool:
    return isinstance(make, functools.partial)


def _printed(value: object) -> str:
    return re.sub(r"0x[0-9a-fA-F]+", "", repr(value))


def scheduled(parts: Parts, optimizer: Optimizer, steps: int) -> LRScheduler | None:
    """Return the schedule of a run, or None if the factory has none.

    Args:
        parts: The factory's result.
        optimizer: The one that is stepped, which may be a boosted one.
        steps: Updates of the run.

    Raises:
        FactoryError: The scheduler cannot be stepped after every update.
    """
    if parts.schedule is None:
        return None
    made = parts.schedule(optimizer, steps)
    step = getattr(made, "step", None)
    if step is None or _needed(step):
        why = "whose step needs " + ", ".join(_needed(step)) if step is not None else "which has no step"
        raise FactoryError(
            f"the factory's schedule returned a {type(made).__name__}, {why}; needed: a scheduler of torch that is "
            "stepped after every update."
        )
    return made


def _needed(step: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without which a function cannot be called."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(step).parameters.values()
    return [one.name for one in found if one.kind in kinds and one.default is inspect.Parameter.empty]


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch.

    Raises:
        FactoryError: It is not a pair.
    """
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    what = f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise FactoryError(
        f"the factory's batches: found {what}; needed: pairs (inputs, targets). The model is called with the inputs, "
        "as one argument, and loss with its output and the targets."
    )


def on_device(value: Any, device: torch.device | str) -> Any:
    """Return a tensor on a device, also within lists, tuples and dicts, and any other value unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: on_device(one, device) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_device(one, device) for one in value)
    return value


def _size(inputs: Any) -> int:
    """Return the number of samples: that of the first tensor."""
    while isinstance(inputs, (Mapping, list, tuple)) and inputs:
        inputs = next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs))
    return len(inputs)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Batches:
    """The factory's batches as a data set."""

    factory: _Factory
    count: int
    samples: int
    device: torch.device | str = "cpu"

    def steps(self, batch: int) -> int:
        return self.count

    def train(self, batch: int, *, seed: int, epoch: int) -> Iterator[Batch]:
        # A shuffling loader draws its order from the global generator, which must be the same for every contestant.
        torch.manual_seed(1_000_003 * seed + epoch)
        empty = True
        for inputs, targets in map(pair_of, itertools.islice(self.factory.batches(seed), self.count)):
            empty = False
            yield on_device(inputs, self.device), on_device(targets, self.device)
        if empty:
            raise nothing_in(epoch + 1)

    def test(self, batch: int) -> Iterator[Batch]:
        raise NotImplementedError("a factory has its own evaluate()")

    def limited(self, count: int | None) -> Self:
        if count is None or count >= self.samples:
            return self
        kept = max(1, self.count * count // self.samples)
        return replace(self, count=kept, samples=self.samples * kept // self.count)

    def to(self, device: torch.device | str) -> Self:
        return replace(self, device=device)


@dataclass(frozen=True, kw_only=True)
class _FactoryJob(Job):
    factory: _Factory

    def model(self, data: Data, seed: int) -> nn.Module:
        return self.factory.build(seed).model

    def loss_of_run(self) -> Callable[[Tensor, Tensor], Tensor]:
        return functools.partial(loss_of, self.factory.last["parts"].loss)

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        given = scheduled(self.factory.last["parts"], optimizer, steps)
        return LambdaLR(optimizer, lambda step: 1.0) if given is None else given

    def evaluate(self, predict: Callable[[Tensor], Tensor], data: Data) -> float:
        found = metric_of(self.factory.last["parts"], predict)
        if self.metric == "accuracy" and not (math.isnan(found) or 0 <= found <= 1):
            raise FactoryError(
                f"the factory's evaluate returned {found:g}; needed with --accuracy: a share between 0 and 1. Leave "
                "the option out for another metric."
            )
        return found


def parts_from(source: str, seed: int = 0) -> Parts:
    """Load a factory and return the parts that it makes, as they are. No batch is read.

    Args:
        source: ``path/to/train.py:make``.
        seed: Passed to the factory, which runs with torch's generator seeded by it.

    Raises:
        ValueError: The file or the function does not exist, the file raises an error, or the factory's result is
            invalid.
    """
    return made_by(function_at(source), seed)


def job_from(source: str, *, epochs: int | None = None, accuracy: bool = False) -> Job:
    """Load a factory and describe it as a job; without the factory's ``schedule`` the learning rate is constant.

    Args:
        source: ``path/to/train.py:make``.
        epochs: The requested number of epochs. Without the factory's ``evaluate`` only 0 (step times only) is allowed.
        accuracy: Whether ``evaluate`` returns an accuracy. Otherwise its units are not known, and no drop is allowed
            or refused.

    Raises:
        ValueError: The file or the function does not exist, the file raises an error, or the factory's result is
            invalid.
    """
    factory = _Factory(function_at(source))
    parts = factory.build(0)
    sizes = [_size(inputs) for inputs, _ in map(pair_of, _ending(factory.batches(0)))]
    if not sizes:
        raise FactoryError("the factory's batches are empty; at least one batch is needed.")
    if epochs and parts.evaluate is None:
        raise ValueError(f"--epochs: found {epochs}, but the factory has no evaluate; needed: {RETURNS}.")
    data = _Batches(factory=factory, count=len(sizes), samples=sum(sizes))

    def load(path: object, limit: int | None) -> Data:
        return data.limited(limit)

    def optimizer(parameters: Iterable[nn.Parameter], **flags: Any) -> Optimizer:
        return _with_flags(factory.last["parts"].optimizer, flags)

    # A path may hold bytes that are not valid text, which a report cannot store.
    name = source.encode("utf-8", "backslashreplace").decode("utf-8")
    return _FactoryJob(
        name=name,
        title=Path(name.rpartition(":")[0]).name,
        model_name=type(parts.model).__name__,
        load=load,
        build=lambda data: factory.build(0).model,
        optimizer=optimizer,
        loss=lambda outputs, targets: loss_of(factory.last["parts"].loss, outputs, targets),
        source=source_of(factory.make),
        batch=sizes[0],
        epochs=0 if parts.evaluate is None else 1,
        metric="accuracy" if accuracy else "metric",
        margin=Job.margin if accuracy else None,
        loose_margin=Job.loose_margin if accuracy else None,
        factory=factory,
    )


@dataclass(eq=False, kw_only=True)
class _Epochs:
    """The batches of a job with a seed; each iteration is the next epoch."""

    data: Data
    batch: int
    seed: int
    epoch: int = 0

    def __len__(self) -> int:
        return self.data.steps(self.batch)

    def __iter__(self) -> Iterator[Batch]:
        self.epoch += 1
        return iter(self.data.train(self.batch, seed=self.seed, epoch=self.epoch - 1))


def factory_of(job: Job, data: Data, device: torch.device | str = "cpu") -> Callable[[int], Parts]:
    """Return a job as a factory. A metric that is better if lower gets a minus sign.

    Args:
        job: The job.
        data: Its data, on ``device``.
        device: Device of the model.
    """
    sign = 1.0 if job.higher_is_better else -1.0

    def make(seed: int) -> Parts:
        model = job.model(data, seed).to(device)
        return Parts(
            model=model,
            optimizer=job.optimizer(model.parameters()),
            loss=job.loss_of_run(),
            batches=_Epochs(data=data, batch=job.batch, seed=seed),
            evaluate=lambda predict: sign * job.evaluate(predict, data),
            schedule=job.schedule,
        )

    return make


def _with_flags(optimizer: Optimizer, flags: dict[str, Any]) -> Optimizer:
    if not flags:
        return optimizer
    changes = {"foreach": None, **flags} if "foreach" in optimizer.defaults else flags
    groups = [{k: v for k, v in group.items() if k not in changes} for group in described_groups(optimizer)]
    try:
        return rebuilt(optimizer, groups, **changes)
    except IncompatibleError:
        names = ", ".join(flags)
        warnings.warn(
            f"{type(optimizer).__name__} does not have the setting {names}; it is used unchanged.",
            NoEffectWarning,
            stacklevel=2,
        )
        return optimizer


def function_at(source: str) -> Callable[[int], object]:
    """Return the function that ``path/to/train.py:make`` names.

    Raises:
        ValueError: The file or the function does not exist, or the file raises an error.
    """
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"found no file at {file!r}; needed: a workload's name, or path/to/train.py:make.")
    spec = importlib.util.spec_from_file_location(f"torchboost_factory_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file!r} is not a Python file; needed: path/to/train.py:make.")
    module = importlib.util.module_from_spec(spec)
    # As if the file were run: it can import from its folder, also later inside the function, and dataclasses find it.
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        where = f"{file}, line {lines[-1]}" if lines else file
        sys.path.remove(folder)
        del sys.modules[spec.name]
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")) or "none"
        raise ValueError(f"{file} does not define a function {name!r}; it defines: {names}.")
    return function
