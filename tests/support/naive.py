"""What the algorithms do, by hand in the plainest form: no code of the package, so that it cannot share a fault.

A loop is what a user writes. ``Course`` is where it led; every effect is a function that a loop calls between the
backward pass and the step, or a change of the model before the loop.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from tests.support.zoo import Batch, Network

__all__ = [
    "Course",
    "Edit",
    "NormalisedHead",
    "Rule",
    "Untouched",
    "accumulated",
    "adamw",
    "batches",
    "bits",
    "centralise",
    "channels_last",
    "detached",
    "drop_gradients",
    "half_precision",
    "loss_of",
    "moving",
    "no_context",
    "normalise_heads",
    "plain",
    "rest_norms",
    "resting",
    "sgd",
    "sgd_of_some",
    "state_of",
    "train",
    "without_norms",
]

WITH_ROWS = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
)
Edit = Callable[[nn.Module, int], None]
"""Called with the model and the number of the update, when the gradients are there and before the step."""


def _nothing(model: nn.Module, step: int) -> None:
    pass


class Course(NamedTuple):
    """Where training led: all weights and buffers at the end, and the loss of every batch."""

    state: dict[str, Tensor]
    losses: list[float]


Rule = Callable[[Network, nn.Module], torch.optim.Optimizer]
"""Returns an optimizer over the parameters of a model."""


def sgd(network: Network, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and decay (torch decays no sparse gradients), in the form that goes tensor by tensor."""
    decay = 0.0 if network.sparse else 1e-3
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=decay, foreach=False)


def sgd_of_some(network: Network, model: nn.Module) -> torch.optim.Optimizer:
    """SGD over every parameter but the first, which nothing may move."""
    return torch.optim.SGD(list(model.parameters())[1:], lr=0.05, momentum=0.9, foreach=False)


def adamw(network: Network, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in the form that goes tensor by tensor."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05, foreach=False)


def batches(network: Network, steps: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Draw the same batches every time."""
    generator = Generator().manual_seed(1)
    return [network.batch(generator, dtype) for _ in range(steps)]


def loss_of(network: Network, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of one batch."""
    return network.loss(model(*batch.args, **batch.kwargs), batch.target)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every weight and buffer, dense and contiguous, without entries that a state dict adds."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: value.detach().clone().contiguous() for name, value in named}


def train(
    network: Network,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Sequence[Batch],
    *,
    before: Edit = _nothing,
    edit: Edit = _nothing,
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Course:
    """Train on ``data`` as people do.

    Args:
        network: Knows its loss.
        model: Changed in place.
        optimizer: Over its parameters.
        data: One batch per update.
        before: Called with the model and the number of the batch before its forward pass.
        edit: See :data:`Edit`.
        around: The forward pass runs in this context.
    """
    losses = []
    for step, batch in enumerate(data):
        before(model, step)
        with around():
            outputs = model(*batch.args, **batch.kwargs)
        loss = network.loss(_full(outputs), batch.target)
        loss.backward()
        edit(model, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Course(state_of(model), losses)


@functools.cache
def plain(network: Network, steps: int, dtype: torch.dtype = torch.float32, rule: Rule = sgd) -> Course:
    """Train with nothing on."""
    model = network.model(dtype)
    return train(network, model, rule(network, model), batches(network, steps, dtype))


@functools.cache
def moving(network: Network, steps: int, dtype: torch.dtype = torch.float32) -> frozenset[str]:
    """Return the names of the parameters that training moves."""
    model = network.model(dtype)
    after = plain(network, steps, dtype).state
    return frozenset(n for n, p in model.named_parameters() if not torch.equal(p.detach(), after[n]))


def accumulated(
    network: Network, model: nn.Module, optimizer: torch.optim.Optimizer, data: Sequence[Batch], window: int
) -> Course:
    """Train with one update per ``window`` batches, along the mean of their gradients."""
    losses = []
    for index, batch in enumerate(data, start=1):
        loss = loss_of(network, model, batch)
        (loss / window).backward()
        losses.append(loss.item())
        if index % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return Course(state_of(model), losses)


def centralise(model: nn.Module, step: int = 0) -> None:
    """Subtract from every row of a weight's gradient its mean.

    Rows run along the first axis. Left alone: gradients of one axis, rows of one entry (whose mean is the entry),
    vectors such as ``(1, n, 1, 1)``, depthwise kernels, and what no convolution, linear layer, embedding, attention or
    recurrent layer of torch holds.
    """
    chosen: set[int] = set()
    for module in model.modules():
        depthwise = isinstance(module, nn.modules.conv._ConvNd) and 1 < module.groups == module.in_channels
        if isinstance(module, WITH_ROWS) and not depthwise and not isinstance(module, NormalisedHead):
            chosen.update(id(parameter) for parameter in module.parameters(recurse=False))
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None or id(parameter) not in chosen or parameter.ndim < 2 or parameter[0].numel() < 2:
            continue
        if parameter.ndim > 2 and max(parameter.shape) == parameter.numel():
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            values = gradient.values()
            values -= values.mean(dim=1, keepdim=True)
            parameter.grad = gradient
        else:
            parameter.grad = gradient - gradient.mean(dim=tuple(range(1, gradient.ndim)), keepdim=True)


def drop_gradients(model: nn.Module, names: Iterable[str]) -> None:
    """Take the gradients of the parameters ``names`` away, so that the step passes them over."""
    chosen = set(names)
    for name, parameter in model.named_parameters():
        if name in chosen:
            parameter.grad = None


def detached(model: nn.Module, name: str) -> list[bool]:
    """Let the module ``name`` hand on what it computes without its history while the entry of the list is true."""
    switch = [False]
    model.get_submodule(name).register_forward_hook(lambda _, args, output: output.detach() if switch[0] else output)
    return switch


def resting(model: nn.Module) -> set[str]:
    """Return the names of the BatchNorms that are in eval mode."""
    norms = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return {name for name, norm in norms if not norm.training}


def rest_norms(model: nn.Module, names: Iterable[str]) -> None:
    """Set the BatchNorms ``names`` to eval mode and all others to training."""
    chosen = set(names)
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = name not in chosen


def half_precision() -> AbstractContextManager[Any]:
    """Products and convolutions in bfloat16."""
    return torch.autocast("cpu", torch.bfloat16)


def no_context() -> AbstractContextManager[Any]:
    """Nothing."""
    return contextlib.nullcontext()


def channels_last(model: nn.Module, data: Sequence[Batch]) -> list[Batch]:
    """Store the kernels of a model channels-last, and return the batches so stored, images only."""
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def stored(value: Any) -> Any:
        images = isinstance(value, Tensor) and value.ndim == 4
        return value.contiguous(memory_format=torch.channels_last) if images else value

    return [Batch(tuple(map(stored, b.args)), {k: stored(v) for k, v in b.kwargs.items()}, b.target) for b in data]


class Untouched(nn.Module):
    """Stands where a norm was: a new tensor with the values that came in, and what callers ask a norm for."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.num_features = getattr(norm, "num_features", None)

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def without_norms(model: nn.Module, names: Iterable[str]) -> None:
    """Put :class:`Untouched` where the norms ``names`` stand, also in plain lists of the root."""
    for name in names:
        parent = model.get_submodule(name.rpartition(".")[0])
        norm = model.get_submodule(name)
        stand_in = Untouched(norm)
        setattr(parent, name.rpartition(".")[2], stand_in)
        for key, value in vars(model).items():
            if isinstance(value, list):
                setattr(model, key, [tuple(stand_in if part is norm else part for part in entry) for entry in value])


def normalise_heads(model: nn.Module, names: Iterable[str]) -> None:
    """Put a :class:`NormalisedHead` where the linear layers ``names`` stand."""
    for name in names:
        parent, linear = model.get_submodule(name.rpartition(".")[0]), model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        setattr(parent, name.rpartition(".")[2], NormalisedHead(linear))


class NormalisedHead(nn.Module):
    """A linear layer between rows of length one, times a factor."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.multiplier = nn.Parameter(torch.ones(1, dtype=linear.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = x / x.norm(dim=-1, keepdim=True).clamp_min(1e-2)
        weight = self.weight / self.weight.norm(dim=-1, keepdim=True).clamp_min(1e-2)
        return self.multiplier * F.linear(rows, weight, self.bias)


def bytes_of(value: Tensor) -> bytes:
    """Return the bytes of a tensor, in the order of its elements."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bits(course: Course) -> tuple[dict[str, bytes], list[float]]:
    """Return what two runs must share to be the same bit for bit."""
    return {name: bytes_of(value) for name, value in course.state.items()}, course.losses


def _full(outputs: Any) -> Any:
    """Outputs in half precision as float32, inside the containers that the zoo has."""
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype is torch.bfloat16 else outputs
    if isinstance(outputs, dict):
        return {key: _full(value) for key, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(map(_full, outputs))
    if hasattr(outputs, "__dataclass_fields__"):
        return type(outputs)(**{key: _full(value) for key, value in vars(outputs).items()})
    return outputs
