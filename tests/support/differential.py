"""A network of the zoo boosted through every front, trained, and trained by hand with the same effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import torchboost
from tests.support import naive
from tests.support.zoo import ZOO, Batch, Network
from torchboost import REGISTRY, AutoBoost, Facts, NoEffectWarning, Plan, Target, TrainStep
from torchboost.algorithms.grad_freeze.freezer import Freezing
from torchboost.core import AttachedAlgorithms, attach_all
from torchboost.graph.norms import NormalizedLinear

__all__ = [
    "FRONTS",
    "STEPS",
    "Boosted",
    "Choice",
    "alone",
    "assert_same",
    "boosted",
    "by_hand",
    "level",
    "no_effect_is_fine",
    "some_then_slow",
    "train",
]

no_effect_is_fine = pytest.mark.filterwarnings(f"ignore::{NoEffectWarning.__module__}.{NoEffectWarning.__name__}")
"""Some networks give an algorithm nothing to do, of which it warns."""

STEPS = 6
"""Updates of a run, and what freezing is told; enough to reach the last group."""


class Choice(NamedTuple):
    """What a user asks for."""

    name: str
    level: str
    config: dict[str, Any]


def some_then_slow(some: Sequence[str], names: Iterable[str] = ZOO) -> list[Any]:
    """Return the names as parameters of a test, those outside ``some`` marked slow."""
    return [pytest.param(name, marks=[] if name in some else [pytest.mark.slow]) for name in names]


def alone(name: str, **settings: Any) -> Choice:
    """Ask for one algorithm with these settings, which its title lists."""
    title = "-".join([name, *(str(v) if isinstance(v, str) else f"{k}={v}" for k, v in settings.items())])
    if name == "grad_freeze":
        settings = {"groups": 4, "total_steps": STEPS, **settings}
    return Choice(title, "O0", {"boost": {"mode": "manual"}, "extra": {name: settings or True}})


def level(name: str, **extra: Any) -> Choice:
    """Ask for a level, and say how long the run is; nothing is compiled."""
    # O2 leaves these out of runs as short as these, and less_bn out of plain stacks.
    costly = {"less_bn": {"keep_every": 2}, "gradient_centralization": True, "grad_freeze": {"groups": 4}}
    settings = {"autocast": False, "compile": False, **(costly if name == "O2" else {}), **extra}
    return Choice(name, name, {"grad_freeze": {"total_steps": STEPS}, "extra": settings if name != "O0" else {}})


@dataclass
class Boosted:
    """A pair that a front has boosted, and what was seen while it trained.

    Args:
        model: As the front returned it.
        optimizer: Likewise.
        attached: What runs.
        call: Trains a batch and returns its loss; None where the user's own loop does.
        start: Weights right after the front.
        frozen: For each batch the names of the parameters that freezing held.
        resting: For each batch the names of the BatchNorms in eval mode.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    attached: AttachedAlgorithms
    call: Callable[[Batch], float] | None = None
    start: dict[str, Tensor] = field(init=False)
    frozen: list[set[str]] = field(default_factory=list)
    resting: list[set[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = naive.state_of(self.model)

    @property
    def on(self) -> set[str]:
        """Names of the algorithms that run."""
        return set(self.attached)

    @property
    def freezing(self) -> Freezing | None:
        """What freezing attached."""
        found = self.attached["grad_freeze"] if "grad_freeze" in self.attached else None  # noqa: SIM401
        return found if isinstance(found, Freezing) else None

    def naming(self, data: list[Batch], batch: Batch) -> AbstractContextManager[Any]:
        """Return the context that names the samples of a batch by where it first stands in the data."""
        if self.freezing is None or self.freezing.fast is None:
            return nullcontext()
        first = next(index for index, other in enumerate(data) if other is batch)
        count = len(batch.target)
        return self.freezing.fast.samples(range(first * count, (first + 1) * count))

    def watch(self) -> None:
        """Note what freezing holds for the batch that comes."""
        held = {id(parameter) for parameter in self.freezing.frozen} if self.freezing is not None else set()
        names = self.model.named_parameters(remove_duplicate=False)
        self.frozen.append({name for name, parameter in names if id(parameter) in held})
        norms = ((n, m) for n, m in self.model.named_modules() if isinstance(m, _BatchNorm))
        self.resting.append({name for name, norm in norms if not norm.training})


def _by_auto_boost(network: Network, choice: Choice, model: nn.Module, optimizer: torch.optim.Optimizer) -> Boosted:
    """The pair of ``AutoBoost``, in the user's own loop."""
    booster = AutoBoost(choice.level, choice.config)
    model, optimizer = booster.network_auto_process_train(model, optimizer)
    return Boosted(model, optimizer, booster.attached)


def _by_plan(network: Network, choice: Choice, model: nn.Module, optimizer: torch.optim.Optimizer) -> Boosted:
    """A plan attached to a target, which a :class:`TrainStep` trains."""
    plan = Plan.of(choice.level, choice.config, Facts.measure(model)).fit(model, optimizer)
    target = Target(model, optimizer)
    attached = plan.attach(target)
    step = TrainStep(target, lambda batch: naive.loss_of(network, target.model, batch), attached=attached)
    return Boosted(model, target.optimizer, attached, lambda batch: step(batch).loss.item())


def _by_boost(network: Network, choice: Choice, model: nn.Module, optimizer: torch.optim.Optimizer) -> Boosted:
    """``torchboost.boost``, whose step calls the model with positional inputs."""
    step = torchboost.boost(model, optimizer, level=choice.level, config=choice.config).step(network.loss)
    return Boosted(
        model, step.target.optimizer, step.attached, lambda batch: step(*batch.args, batch.target).loss.item()
    )


def _by_attaching(network: Network, choice: Choice, model: nn.Module, optimizer: torch.optim.Optimizer) -> Boosted:
    """The one algorithm of :func:`alone` attached by itself, whatever a plan thinks of it."""
    ((name, settings),) = choice.config["extra"].items()
    algorithm = REGISTRY[name].algorithm(**(settings if isinstance(settings, dict) else {}))
    target = Target(model, optimizer)
    return Boosted(model, target.optimizer, attach_all(target, [algorithm]))


FRONTS = {"auto": _by_auto_boost, "plan": _by_plan, "boost": _by_boost, "attach": _by_attaching}


def boosted(
    network: Network,
    choice: Choice,
    front: str = "auto",
    *,
    model: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    rule: naive.Rule = naive.sgd,
) -> Boosted:
    """Boost a network of the zoo through one of :data:`FRONTS`."""
    model = network.model(dtype) if model is None else model
    return FRONTS[front](network, choice, model, rule(network, model))


def train(network: Network, pair: Boosted, data: list[Batch]) -> naive.Course:
    """Train a boosted pair in the loop of its front; a batch that comes again is named to the cache of freezing."""
    if pair.call is None:
        named = iter([pair.naming(data, batch) for batch in data])
        return naive.train(
            network,
            pair.model,
            pair.optimizer,
            data,
            before=lambda *_: pair.watch(),
            around=lambda: next(named),
        )
    losses = []
    for batch in data:
        pair.watch()
        with pair.naming(data, batch):
            losses.append(pair.call(batch))
    return naive.Course(naive.state_of(pair.model), losses)


def by_hand(
    network: Network, pair: Boosted, data: list[Batch], dtype: torch.dtype, rule: naive.Rule = naive.sgd
) -> naive.Course:
    """Train the network by hand with the effects of what runs in ``pair``, which was trained on the same data."""
    model = network.model(dtype)
    if "less_bn" in pair.on:
        norms, heads = _names(model, _BatchNorm), _names(pair.model, NormalizedLinear)
        naive.without_norms(model, norms - _names(pair.model, _BatchNorm))
        naive.normalise_heads(model, heads)
        model.load_state_dict(pair.start)
    optimizer = rule(network, model)
    if "grad_accumulation" in pair.on:
        return naive.accumulated(network, model, optimizer, data, window=2)
    if network.masks and "channels_last" in pair.on:
        data = naive.channels_last(model, data)
    usual = naive.resting(model)
    switches = [(naive.detached(model, module), held) for module, held in network.ties]

    def before(model: nn.Module, step: int) -> None:
        naive.rest_norms(model, pair.resting[step] | usual)
        for switch, held in switches:
            switch[0] = held in pair.frozen[step]

    def edit(model: nn.Module, step: int) -> None:
        if "gradient_centralization" in pair.on:
            naive.centralise(model)
        naive.drop_gradients(model, pair.frozen[step])

    around = naive.half_precision if "autocast" in pair.on else naive.no_context
    return naive.train(network, model, optimizer, data, before=before, edit=edit, around=around)


def assert_same(found: naive.Course, wanted: naive.Course, *, tolerance: float, leave: set[str] | None = None) -> None:
    """Compare losses and weights, but for those named in ``leave``; says by how much and where they differ most."""
    assert found.state.keys() == wanted.state.keys()
    worst = (_difference(torch.tensor(found.losses), torch.tensor(wanted.losses)), "the loss")
    for name in wanted.state.keys() - (leave or set()):
        worst = max(worst, (_difference(found.state[name], wanted.state[name]), name))
    assert worst[0] <= tolerance, f"{worst[1]} is off by {worst[0]:.1e}"


def _names(model: nn.Module, kind: type[nn.Module]) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, kind)}


def _difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert bool(torch.isfinite(a).all()), "not finite"
    return float((a - b).abs().max() / (1.0 + b.abs().max())) if a.numel() else 0.0
