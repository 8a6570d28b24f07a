"""A user's training as ``make(seed) -> (model, optimizer, loss, batches)``, checked where it is called."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import math
import pickle
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchboost.core.forward import with_tensors
from torchboost.core.hardware import streams_kept
from torchboost.core.step import ClosureOptimizer, Replay, needs_closure
from torchboost.core.wrapping import parameters_of
from torchboost.errors import FactoryError

SECONDS_OF_AN_EPOCH = 60.0
"""Time in which the batches of an epoch must be read, if they have no length: they may be endless."""
LOADED = "torchboost_factory_"
"""Begins the names of modules that :func:`function_at` has loaded."""

MOST_KEPT = 100_000
"""Batches of a generator that are kept for further epochs."""

IMPORTABLE = (
    "a process of its own cannot load the factory: {}. Define it at the top level of a file, such as train.py:make, or "
    "leave processes out."
)

OPTIONAL = ("evaluate", "schedule", "validate", "before_step")
RETURNS = "(model, optimizer, loss, batches), and after them, if you like, evaluate, schedule, validate and before_step"

Metric = Literal["accuracy", "bits per character", "metric"]
"""``"metric"`` is a user's, in units of its own."""

ACCURACY_DROPS = (0.005, 0.03)
"""The drop of an accuracy that counts as unchanged, and the drop that level O2 may cost."""


class Parts(NamedTuple):
    """The parts that a factory returns.

    Args:
        model: The model to train. Its output is passed to ``loss``.
        optimizer: Optimizer of its parameters.
        loss: ``(outputs, targets) -> scalar``.
        batches: ``(inputs, targets)`` pairs of one epoch, or dicts, which are inputs and targets at once. Iterated
            again for every epoch. If inputs are a dict, the model gets its entries by name, if it takes these names.
            Each is the batch of one update.
        evaluate: ``model -> metric``, higher is better. Without it only step times are measured.
        schedule: ``(optimizer, steps) -> torch scheduler`` for a run of ``steps`` steps, stepped after every update.
            Without it the learning rate is constant.
        validate: Like ``evaluate``, on data that neither it nor the training uses. Choices, such as the learning rate,
            are made by it. Without it they are made by ``evaluate``.
        before_step: ``model -> None``, called after the backward pass and before the update, to clip gradients. Trials
            of switches and the waste meter, which train nothing, time steps without it.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[Any, Any], Tensor]
    batches: Iterable[Any]
    evaluate: Callable[[Callable[..., Any]], float] | None = None
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    validate: Callable[[Callable[..., Any]], float] | None = None
    before_step: Callable[[Any], object] | None = None


class Epoch(NamedTuple):
    """The size of an epoch: its steps, the samples of its first batch, and all its samples."""

    steps: int
    batch: int
    samples: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Factory:
    """A training that is built from a seed, and the facts about it that a report states.

    Args:
        make: Returns :class:`Parts` for a seed, as a tuple.
        name: Name on the command line.
        title: In reports.
        model_name: In reports. Empty for the name of its class.
        epochs: Passes over the batches in a run. A factory without ``evaluate`` has none.
        metric: The metric on the test set.
        higher_is_better: Whether reports state what ``evaluate`` returns, or its negative.
        drops: Drop of the metric that counts as unchanged, and drop that level O2 may cost, in units of the metric.
            None if unknown.
        train_limit: Use only the first batches, with about this number of samples.
        source: Tells apart the versions of the user's file.
        shorten: Cuts the inputs of a batch to its longest sequence, which a loop by hand does. None if nothing is cut.
    """

    make: Callable[[int], object]
    name: str
    title: str
    model_name: str = ""
    epochs: int = 1
    metric: Metric = "metric"
    higher_is_better: bool = True
    drops: tuple[float, float] | None = None
    train_limit: int | None = None
    source: str = ""
    shorten: Callable[[Any], Any] | None = None
    _last: list[Parts] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def at(cls, source: str, *, accuracy: bool = False) -> Factory:
        """Load the factory that ``path/to/train.py:make`` names, see :func:`function_at`.

        Unless ``evaluate`` returns an ``accuracy``, its units are not known, and no drop is allowed or refused.
        """
        make = function_at(source)
        # A path may hold bytes that are not valid text, which a report cannot store.
        name = source.encode("utf-8", "backslashreplace").decode("utf-8")
        return cls(
            make=make,
            name=name,
            title=Path(name.rpartition(":")[0]).name,
            metric="accuracy" if accuracy else "metric",
            drops=ACCURACY_DROPS if accuracy else None,
            source=source_of(make),
        )

    def build(self, seed: int) -> Parts:
        """Return the parts for a seed. Their batches can be read again, which a generator cannot.

        Raises:
            FactoryError: The result is not what a factory returns, or shares a parameter with the last one.
        """
        parts = made_by(self.make, seed)
        check_fresh(parts, *self._last)
        self._last[:] = [parts]
        if isinstance(parts.batches, Iterator):
            parts = parts._replace(batches=kept(_ending(parts.batches, MOST_KEPT), seed))
        return parts

    def measured(self, parts: Parts) -> Epoch:
        """Read an epoch, which must end, and return its size within ``train_limit``."""
        sizes = [_size(inputs) for inputs, _ in map(_pair, _ending(parts.batches))]
        steps, samples = _not_empty(len(sizes)), sum(sizes)
        if self.train_limit is not None and self.train_limit < samples:
            steps = max(1, steps * self.train_limit // samples)
            samples = samples * steps // len(sizes)
        return Epoch(steps, sizes[0], samples)

    def evaluate(self, parts: Parts, model: Callable[..., Any], seed: int = 0) -> float:
        """Return the metric of a model in evaluation mode, as a report states it. See :func:`metric_of`.

        Raises:
            FactoryError: It is not a number, or an accuracy that is not between 0 and 1.
        """
        value = metric_of(parts, model, seed=seed)
        if self.metric == "accuracy" and not (math.isnan(value) or 0 <= value <= 1):
            raise FactoryError(
                f"the factory's evaluate returned {value:g}; needed with --accuracy: a share between 0 and 1. Leave "
                "the option out for another metric."
            )
        return value if self.higher_is_better else -value


def made_by(make: Callable[[int], object], seed: int) -> Parts:
    """Call a factory with the generators of torch, NumPy and Python seeded, and check its result."""
    with streams_restored():
        _seed(seed)
        result = make(seed)
    if not isinstance(result, tuple) or not 4 <= len(result) <= 4 + len(OPTIONAL):
        what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise FactoryError(f"the factory returned {what}; needed: {RETURNS}.")
    parts = Parts(*result)
    fitting = {
        "model": isinstance(parts.model, nn.Module),
        "optimizer": isinstance(parts.optimizer, Optimizer),
        "loss": callable(parts.loss),
        "batches": isinstance(parts.batches, Iterable),
    }
    fitting |= {name: part is None or callable(part) for name, part in zip(OPTIONAL, parts[4:], strict=True)}
    for name, fits in fitting.items():
        if not fits:
            raise FactoryError(f"the factory's {name} is a {type(getattr(parts, name)).__name__}; needed: {RETURNS}.")
    parameters = set(map(id, parts.model.parameters()))
    if not any(id(param) in parameters for group in parts.optimizer.param_groups for param in group["params"]):
        raise FactoryError(
            "the factory's optimizer has no parameter of its model; build it from the parameters of the model that is "
            "returned."
        )
    return parts


def check_step(optimizer: Optimizer) -> None:
    """Raise ``FactoryError`` if the step of an optimizer needs a closure, as LBFGS's does."""
    if needs_closure(optimizer) and not isinstance(optimizer, ClosureOptimizer):
        raise FactoryError(
            f"the factory's optimizer is {type(optimizer).__name__}, whose step needs a closure, which the loops here "
            "do not pass; give one whose step can be called without."
        )


def check_fresh(parts: Parts, *others: Parts) -> None:
    """Raise ``FactoryError`` if a run would continue the training of another call: they share a parameter or buffer."""
    known = {id(state) for other in others for state in (*other.model.parameters(), *other.model.buffers())}
    for kind, states in ("parameter", parts.model.named_parameters()), ("buffer", parts.model.named_buffers()):
        for name, state in states:
            if id(state) in known:
                raise FactoryError(
                    f"the factory returned the same {kind} twice ({name}); build the whole model inside it, or copy "
                    "it there with copy.deepcopy, so that each run has its own."
                )


def check_seeds(trainings: Iterable[tuple[int, tuple[float | None, ...]]]) -> None:
    """Raise ``FactoryError`` if trainings of stock with two seeds have the same losses and metric."""
    known: dict[tuple[float | None, ...], int] = {}
    for seed, numbers in trainings:
        first = known.setdefault(numbers, seed)
        if first != seed:
            raise FactoryError(
                f"the stock loop had the same losses and metric for the seeds {first} and {seed}, so the factory "
                "ignores its seed. Let make(seed) draw weights or data from torch's generator, which is seeded before "
                "each call, or from the seed."
            )


@contextlib.contextmanager
def streams_restored() -> Iterator[None]:
    """Restore the random generators of torch, NumPy and Python at the end of the block."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with streams_kept([torch.device("cuda", number) for number in range(count)]):
        yield


def _seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def kept(batches: Iterator[Any], seed: int) -> list[Any]:
    """Return the batches of a generator, which draws them from the seed when it is read."""
    with streams_restored():
        _seed(_apart_from(seed))
        return list(batches)


def _apart_from(number: int) -> int:
    """Return the seed of a stream of numbers other than that of ``number``, which weights or dropout are drawn from."""
    return -1 - number


def one_epoch(
    batches: Iterable[Any], *, seed: int, epoch: int, device: torch.device, copy: bool = True
) -> Iterator[tuple[Any, Any]]:
    """Yield copies of the pairs of an epoch on a device, which depend on seed and epoch alone.

    A loader draws its order, and its samples draw their augmentation, from the global generators of torch, NumPy and
    Python, or from a generator of the loader. All of them are therefore seeded. What a model draws from torch's
    generator between two batches does not change the next one, nor does what a loss takes out of a batch of a list or
    writes into it. Without ``copy``, tensors that are on the device already share their memory with the loader's.

    Raises:
        FactoryError: The loader yields no batch, or one is neither a pair nor a dict.
    """
    empty = True
    for inputs, targets in map(_pair, _drawn_apart(batches, 1_000_003 * seed + epoch)):
        empty = False
        yield copied((inputs, targets), device, copy=copy)
    if empty:
        raise FactoryError(
            f"the factory's batches gave nothing in pass {epoch + 1}; give an iterable that starts again in every "
            "pass, such as a list or a DataLoader."
        )


def _drawn_apart(batches: Iterable[Any], number: int) -> Iterator[Any]:
    _seed(number)
    for generator in _generators_of(batches):
        generator.manual_seed(number)
    iterator, own = iter(batches), torch.Generator().manual_seed(_apart_from(number)).get_state()
    yield from itertools.islice(iterator, 1)
    while True:
        meanwhile = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            batch = next(iterator)
        except StopIteration:
            return
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(meanwhile)
        yield batch


def _generators_of(batches: Any) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers hold. They continue from one run to the next."""
    groups = getattr(batches, "batch_sampler", None)
    holders = (batches, groups, getattr(batches, "sampler", None), getattr(groups, "sampler", None))
    held = [getattr(each, "generator", None) for each in holders]
    return [generator for generator in held if isinstance(generator, torch.Generator)]


def count_of(batches: Iterable[Any], seconds: float) -> int:
    """Return the number of batches of an epoch, at least one. Without a length they are read, within some seconds."""
    length = _length(batches)
    return _not_empty(sum(1 for _ in _ending(batches, seconds=seconds)) if length is None else length)


def _not_empty(count: int) -> int:
    if not count:
        raise FactoryError("the factory's batches are empty; at least one batch is needed.")
    return count


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def _ending(batches: Iterable[Any], most: float = math.inf, seconds: float | None = None) -> Iterator[Any]:
    """Yield the batches of an epoch. Without a length they must end in time, and after ``most``."""
    limit = SECONDS_OF_AN_EPOCH if seconds is None else seconds
    endless, start = _length(batches) is None, time.monotonic()
    for number, batch in enumerate(batches, start=1):
        spent = time.monotonic() - start
        if endless and (spent > limit or number > most):
            raise FactoryError(
                f"the factory's batches did not end ({number:,} were read in {spent:.0f} s); give those of one "
                "epoch, as a list or a loader that ends, such as list(itertools.islice(batches, 1000)). If an epoch "
                f"takes longer than {limit:g} s to read, give batches with a length."
            )
        yield batch


def score_of(parts: Parts, model: Callable[..., Any], *, seed: int = 0) -> float:
    """Compute the metric for choices: on the data for validation, or without them as :func:`metric_of`."""
    return metric_of(parts, model, "evaluate" if parts.validate is None else "validate", seed=seed)


def metric_of(parts: Parts, model: Callable[..., Any], name: str = "evaluate", *, seed: int = 0) -> float:
    """Compute a metric of the factory of a model in evaluation mode, without another compilation of it.

    What it draws from the generators of torch, NumPy and Python depends on the seed alone, not on the training.

    Raises:
        FactoryError: It is not a number.
    """
    parts.model.eval()
    try:
        with streams_restored(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            _seed(_apart_from(seed))
            value = getattr(parts, name)(model)
    finally:
        parts.model.train()
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FactoryError(f"the factory's {name} returned a {type(value).__name__}; needed: a number.") from error


def schedule_of(parts: Parts, optimizer: Optimizer, steps: int) -> LRScheduler | None:
    """Return the scheduler of a run, or None if there is none.

    Raises:
        FactoryError: It has no ``step``, or one that needs a metric.
    """
    schedule = None if parts.schedule is None else parts.schedule(optimizer, steps)
    if parts.schedule is not None and not hasattr(schedule, "step"):
        raise FactoryError(
            f"the factory's schedule returned a {type(schedule).__name__}, which has no step; needed: a scheduler of "
            "torch that is stepped after every update."
        )
    if isinstance(schedule, ReduceLROnPlateau):
        raise FactoryError(
            "the factory's schedule returned a ReduceLROnPlateau, which decides by a metric, and here a schedule is "
            "stepped after every update, without one; give one that follows the updates, such as CosineAnnealingLR."
        )
    return schedule


def loop_body(
    parts: Parts,
    model: Callable[..., Any],
    optimizer: Optimizer,
    steps: int,
    precision: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[[Any, Any], Tensor]:
    """Return the body of a training loop, ``(inputs, targets) -> loss``, from the forward pass to the schedule.

    Args:
        parts: The factory's result.
        model: It, or what boosting made of it.
        optimizer: The same.
        steps: Updates of the run, for the schedule.
        precision: The context of the forward pass, such as autocast.

    Raises:
        FactoryError: The optimizer needs a closure, the schedule has no ``step`` or needs a metric, or at a step the
            loss is not a tensor.
    """
    check_step(optimizer)
    schedule = schedule_of(parts, optimizer, steps)
    before_step = parts.before_step or (lambda _: None)

    def loss_of(inputs: Any, targets: Any) -> Tensor:
        with precision():
            loss: object = parts.loss(outputs_of(parts, model, inputs), targets)
        if not isinstance(loss, Tensor):
            raise FactoryError(f"the factory's loss returned a {type(loss).__name__}; needed: a tensor of one number.")
        return loss

    def step(inputs: Any, targets: Any) -> Tensor:
        if isinstance(optimizer, ClosureOptimizer):  # it evaluates the loss more than once
            weights = parameters_of(optimizer)
            again = Replay(lambda: loss_of(inputs, targets), weights[0].device)
            again.backward(weights)
            before_step(model)
            loss: Tensor = optimizer.step(again)
        else:
            loss = loss_of(inputs, targets)
            loss.backward()
            before_step(model)
            optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def has_diverged(model: nn.Module) -> bool:
    """Return whether a weight is not finite, or a buffer has NaN. A single loss that is not finite may be harmless.

    An infinite buffer may be meant, such as a mask of attention.
    """
    weights = (p.detach() for p in model.parameters() if p.is_floating_point() or p.is_complex())
    return any(not bool(p.isfinite().all()) for p in weights) or any(bool(b.isnan().any()) for b in model.buffers())


def outputs_of(parts: Parts, model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model with the inputs of a batch: the entries of a dict by name, if the factory's model takes them."""
    if isinstance(inputs, Mapping) and _takes(parts.model, inputs):
        return model(**inputs)
    return model(inputs)


def _takes(model: nn.Module, named: Mapping[Any, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(**named)
    except TypeError:
        return False
    return True


def copied(batch: tuple[Any, Any], device: torch.device, *, copy: bool = True) -> tuple[Any, Any]:
    """Return inputs and targets on a device, as :func:`one_epoch` yields them."""
    return with_tensors(batch, functools.partial(_copied, device=device, copy=copy))


def _copied(tensor: Tensor, device: torch.device, copy: bool) -> Tensor:
    """Return a copy. That of a leaf is one, so that a loss finds its gradient there."""
    if not tensor.is_leaf:
        return tensor.to(device, copy=copy)
    return tensor.detach().to(device, copy=copy).requires_grad_(tensor.requires_grad)


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch, or raise ``FactoryError`` unless it is a pair or a dict."""
    if isinstance(batch, Mapping):
        batch = batch, batch
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return _writable(batch[0]), _writable(batch[1])
    what = f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise FactoryError(
        f"the factory's batches: found {what}; needed: pairs (inputs, targets), or dicts. The model is called with the "
        "inputs as one argument, or with the entries of a dict by name, and loss with its output and the targets, or "
        "the dict."
    )


def _writable(part: Any) -> Any:
    """Return a mapping for reading as a dict, since others cannot be copied to a device."""
    return dict(part) if isinstance(part, Mapping) and not isinstance(part, MutableMapping) else part


def _size(inputs: Any) -> int:
    """Return the number of samples, which is the length of the first tensor."""
    while isinstance(inputs, (Mapping, list, tuple)) and inputs:
        inputs = next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs))
    return len(inputs)


def source_of(make: Callable[..., Any]) -> str:
    """Return a text that tells factories apart, or an empty one if no file defines the function.

    It depends on the content of the file, on the name of the function, and on the arguments of a ``functools.partial``
    as they are printed, without addresses in memory.
    """
    arguments: list[str] = []
    while isinstance(make, functools.partial) or hasattr(make, "__wrapped__"):
        if isinstance(make, functools.partial):
            values = [*make.args, *sorted(make.keywords.items())]
            arguments += [re.sub(r"0x[0-9a-fA-F]+", "", repr(value)) for value in values]
        make = make.func if isinstance(make, functools.partial) else inspect.unwrap(make)
    try:
        content = Path(inspect.getsourcefile(make) or "").read_bytes()
    except (TypeError, OSError):
        return ""
    named = "\n".join([getattr(make, "__qualname__", ""), *arguments]).encode("utf-8", "backslashreplace")
    return hashlib.sha256(named + b"\n" + content).hexdigest()[:16]


def function_at(source: str) -> Callable[[int], object]:
    """Return the function that ``path/to/train.py:make`` names.

    Raises:
        ValueError: The file or the function does not exist, or the file raises an error.
    """
    if source.endswith(".py"):
        raise ValueError(f"found {source!r} without a function; needed: {source}:make.")
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"found no file at {file or source!r}; needed: a workload's name, or path/to/train.py:make.")
    spec = importlib.util.spec_from_file_location(f"{LOADED}{path.stem}", path)
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


def packed(make: Callable[[int], object]) -> tuple[str, bytes]:
    """Return what another process needs to have a factory, which must be at the top level of a module."""
    function: Any = make
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or ""
    try:
        source = f"{sys.modules[module].__file__}:{function.__qualname__}" if module.startswith(LOADED) else ""
        return source, pickle.dumps(make)
    except (AttributeError, KeyError, TypeError, pickle.PicklingError) as error:
        raise FactoryError(IMPORTABLE.format(error)) from error


def unpacked(sent: tuple[str, bytes]) -> Callable[[int], object]:
    """Return the factory of :func:`packed`. If :func:`function_at` loaded its file, it is loaded again."""
    try:
        if sent[0]:
            function_at(sent[0])
        return pickle.loads(sent[1])
    except Exception as error:
        raise FactoryError(IMPORTABLE.format(f"{type(error).__name__}: {error}")) from error
