"""The table of all algorithms, the levels, and how an algorithm is built from settings."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError
from torch import nn

from torchboost.algorithms.adaptive_sum import AdaptiveSum
from torchboost.algorithms.autocast import Autocast
from torchboost.algorithms.channels_last import ChannelsLast
from torchboost.algorithms.compile import Compile
from torchboost.algorithms.dim_reduce.algorithm import DimReduction
from torchboost.algorithms.fused_optimizer import FusedOptimizer
from torchboost.algorithms.grad_accumulation.algorithm import GradAccumulation
from torchboost.algorithms.grad_freeze.algorithm import GradFreeze, Pattern
from torchboost.algorithms.gradient_centralization import GradientCentralization
from torchboost.algorithms.less_bn import LessBn
from torchboost.algorithms.loss_scale_group.algorithm import LossScaleGroup
from torchboost.algorithms.matmul_precision import MatmulPrecision
from torchboost.algorithms.sparse_head import SparseHead
from torchboost.algorithms.threads import Threads
from torchboost.algorithms.token_drop.algorithm import TokenDrop
from torchboost.algorithms.unpad import Unpad
from torchboost.config import DimReduceSection
from torchboost.core.algorithm import Algorithm, AlreadyOn
from torchboost.core.arguments import check_count, check_module
from torchboost.core.hardware import half_precision
from torchboost.core.torch_private import AnyBatchNorm, AnyConv, default_device
from torchboost.distributed.agreement import from_first_rank
from torchboost.distributed.topology import Topology
from torchboost.errors import ConfigError, nearest, shown
from torchboost.graph.norms import was_trained
from torchboost.graph.removed_norm import RemovedNorm

Loop = Literal["own", "transformers", "lightning", "accelerate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the machine, the job and the model. Measured once and passed in. Algorithms never look them up.

    Args:
        world_size: Number of ranks.
        nodes: Number of nodes.
        devices_per_node: Ranks on one node.
        device: Type of the device that trains: ``"cpu"``, ``"cuda"``, ...
        half_precision: Whether the device computes faster in bfloat16 than in float32. None if the device is not here.
        half_precision_reason: One clause about the measurement. Empty without one.
        convolutions: Number of convolutions in the model. Without a model this and the next five are None.
        other_dimensions: Number of convolutions and BatchNorms that are not two-dimensional.
        grouped_convolutions: Number of convolutions in groups, depthwise ones for instance.
        batch_norms: Number of BatchNorms in the model, with those that ``less_bn`` removed.
        largest_matrix: Entries of the largest parameter of two dimensions that is not an embedding.
        trained: Whether the model was trained before, judged by its BatchNorm statistics. None without BatchNorms.
            False if ``less_bn`` removed some before, because that was decided then.
        total_steps: Number of planned training steps. None if not given.
        loop: The owner of the training loop: ``"own"`` (the user's lines), or the trainer's name.
        precision: The mixed precision in which the trainer computes, in its own words. Empty if it uses none.

    Raises:
        TypeError: ``total_steps`` is not an integer.
        ValueError: ``loop`` is unknown, or ``total_steps`` is below 1.
    """

    world_size: int = 1
    nodes: int = 1
    devices_per_node: int = 1
    device: str = "cpu"
    half_precision: bool | None = False
    half_precision_reason: str = ""
    convolutions: int | None = None
    other_dimensions: int | None = None
    grouped_convolutions: int | None = None
    batch_norms: int | None = None
    largest_matrix: int | None = None
    trained: bool | None = None
    total_steps: int | None = None
    loop: Loop = "own"
    precision: str = ""

    def __post_init__(self) -> None:
        if self.loop not in get_args(Loop):
            allowed, hint = ", ".join(map(repr, get_args(Loop))), nearest(str(self.loop), get_args(Loop))
            raise ValueError(f"loop: found {self.loop!r}; allowed are {allowed}. {hint}".rstrip())
        if self.total_steps is not None:
            check_count("total_steps", self.total_steps, of="updates of the whole run")

    @classmethod
    def measure(
        cls, model: nn.Module | None = None, *, total_steps: int | None = None, loop: Loop = "own", precision: str = ""
    ) -> Facts:
        """Look at the process group, the hardware and the model, or without one at torch's default device.

        The first call on a machine measures the speed of bfloat16 (:func:`~torchboost.core.hardware.half_precision`):
        at most 0.2 s on the CPU.
        """
        topology, device = Topology.current(), None
        counted: dict[str, Any] = {}
        if model is not None:
            check_module(model)
            device = next((p.device for p in model.parameters()), None)
            counted = _counted(model)
        device = device or default_device()
        half = half_precision(device, counted.get("convolutions"))
        return cls(
            world_size=topology.world_size,
            nodes=topology.nodes,
            devices_per_node=topology.devices_per_node,
            device=device.type,
            half_precision=half.fast,
            half_precision_reason=half.reason,
            total_steps=total_steps,
            loop=loop,
            precision=precision,
            **counted,
        )


@dataclass(frozen=True, kw_only=True)
class Host:
    """Who owns the training loop, its mixed precision (:class:`Facts`), and the context of each forward pass."""

    loop: Loop = "own"
    precision: str = ""
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def call(self) -> str:
        """What takes the arguments of :func:`torchboost.boost` there."""
        return {"transformers": "BoostTrainer", "lightning": "Boost", "accelerate": "prepare"}.get(self.loop, "boost")

    def facts(self, model: nn.Module) -> Facts:
        """Look at the machine and the model. In a trainer the first rank gives the speed of bfloat16."""
        facts = Facts.measure(model, loop=self.loop, precision=self.precision)
        if self.loop == "own":
            return facts
        fast, reason = from_first_rank((facts.half_precision, facts.half_precision_reason))
        return replace(facts, half_precision=fast, half_precision_reason=reason)


def _counted(model: nn.Module) -> dict[str, Any]:
    """Return the facts about a model."""
    modules = list(model.modules())
    layers = [m for m in modules if isinstance(m, AnyConv)]
    others = [m for m in layers if not isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    others += [m for m in modules if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm3d))]
    norms = sum(isinstance(m, (AnyBatchNorm, RemovedNorm)) for m in modules)
    computing = [m for m in modules if not isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    sizes = (p.numel() for m in computing for p in m.parameters(recurse=False) if p.ndim == 2)
    return {
        "convolutions": len(layers),
        "other_dimensions": len(others),
        "grouped_convolutions": sum(m.groups > 1 for m in layers),
        "batch_norms": norms,
        "largest_matrix": max(sizes, default=0),
        "trained": (not LessBn().applied(model) and was_trained(model)) if norms else None,
    }


def _removed_norms(model: nn.Module) -> str:
    removed = sum(isinstance(module, RemovedNorm) for module in model.modules())
    left = sum(isinstance(module, AnyBatchNorm) for module in model.modules())
    return f"{removed} of {removed + left} BatchNorms removed" if removed else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The properties of an algorithm that a plan needs in addition to its settings.

    Args:
        algorithm: The settings class. Its ``name`` is the JSON name.
        summary: One line for people.
        section: Section of MindSpore's JSON that holds its settings. Empty if MindSpore has none.
        words: Key of that section -> name of the setting.
        values: Key of that section -> names of its values here, if they differ.
        facts: Settings that are facts, which count if they are known and the setting is not written.
        brings: Key of that section -> algorithm that this key switches on and off together with this one.
        unusable: Why these facts rule the algorithm out, or None.
        unproven: Why a level skips it although it would work. A request by name overrides this, as does a trial.
        lever: Whether it only changes the speed of a step, so that a trial may switch it on and off.
        once: Whether it costs time once, such as compilation.
        of_optimizer: Whether it changes the update alone.
        removed: Setting of an earlier version -> its default. Plan files may still have it at that value.
        done: How much it has changed in a model, in words. Empty if there is nothing to count.
        advice: What the user should do if it has.
    """

    algorithm: type[Algorithm]
    summary: str
    section: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    facts: tuple[str, ...] = ()
    brings: Mapping[str, str] = field(default_factory=dict)
    unusable: Callable[[Facts], str | None] = lambda _: None
    unproven: Callable[[Facts], str | None] = lambda _: None
    lever: bool = False
    once: bool = False
    of_optimizer: bool = False
    removed: Mapping[str, Any] = field(default_factory=dict)
    done: Callable[[nn.Module], str] = lambda _: ""
    advice: str = ""

    @property
    def name(self) -> str:
        """The JSON name."""
        return self.algorithm.name


LARGE_MATRIX = 65_536
"""Entries from which on a matrix counts as large enough for bfloat16 if nothing is measured: 256 x 256."""


def _half_unproven(facts: Facts) -> str | None:
    small = facts.convolutions == 0 and facts.largest_matrix is not None and facts.largest_matrix < LARGE_MATRIX
    if facts.half_precision and small and facts.device == "cpu":
        return (
            f"the largest matrix has {facts.largest_matrix:,} entries; on CPU the casts of layers below "
            f"{LARGE_MATRIX:,} can take longer than bfloat16 saves; ask for it with extra.autocast"
        )
    if facts.half_precision:
        return None
    if facts.half_precision is None:
        return f"{facts.device} is not available here, so it is not known whether it computes faster in bfloat16"
    reason = facts.half_precision_reason or f"this {facts.device} does not compute faster in bfloat16"
    return f"{reason}; ask for it with extra.autocast"


def _partial_unproven(facts: Facts) -> str | None:
    if facts.device == "cpu":
        return None
    return f"its gain is not measured on {facts.device} yet; ask for it by its name in extra"


_ACCUMULATES = {
    "transformers": "TrainingArguments(gradient_accumulation_steps=...)",
    "lightning": "Trainer(accumulate_grad_batches=...)",
    "accelerate": "Accelerator(gradient_accumulation_steps=...)",
}
_SCALES = {
    "transformers": "TrainingArguments(fp16=True)",
    "lightning": 'Trainer(precision="16-mixed")',
    "accelerate": 'Accelerator(mixed_precision="fp16")',
}


def _left_to_trainers(does: str, settings: Mapping[str, str]) -> Callable[[Facts], str | None]:
    """Return the rule for work that the trainers that own the loop do themselves, each by its setting."""

    def rule(facts: Facts) -> str | None:
        return f"{facts.loop} owns the loop and {does}{settings[facts.loop]}" if facts.loop in settings else None

    return rule


def _cast_by_the_trainer(facts: Facts) -> str | None:
    if not facts.precision:
        return None
    return AlreadyOn(f"{facts.loop} owns the loop and computes in {facts.precision} itself")


SHORT_RUN = 1_000
"""Steps below which O2 uses levers alone: there, LessBN was not shown to keep the accuracy."""


def _too_short(facts: Facts, name: str) -> str | None:
    if facts.total_steps is None or facts.total_steps >= SHORT_RUN:
        return None
    return (
        f"in runs of fewer than {SHORT_RUN:,} steps it was not shown to keep the accuracy, and this one has "
        f"{facts.total_steps:,}; ask for it with extra.{name}"
    )


def _of_another_kind(facts: Facts, name: str) -> str | None:
    if facts.convolutions == 0 or facts.other_dimensions or facts.batch_norms == 0:
        return f"measured on networks of two-dimensional convolutions with BatchNorm only; ask for it with extra.{name}"
    return None


def _less_bn_unproven(facts: Facts) -> str | None:
    if facts.batch_norms == 0:
        return None  # the algorithm itself says that it has nothing to do
    if (other := _of_another_kind(facts, "less_bn")) is not None:
        return other
    if facts.grouped_convolutions:
        return (
            "it cost accuracy in a network of depthwise convolutions, and was measured on networks without grouped "
            "convolutions only; ask for it with extra.less_bn"
        )
    if not facts.trained:
        return _too_short(facts, "less_bn")
    return (
        "the BatchNorm statistics have moved, so the network is already trained, and this was measured from "
        "scratch only; ask for it with extra.less_bn"
    )


# On CPU compilation paid in deep networks only, after so many steps (docs/levels.md).
COMPILE_CONVOLUTIONS = 50
COMPILE_STEPS = 5_000


def _compile_unproven(facts: Facts) -> str | None:
    ask = "ask for it with extra.compile"
    if facts.device != "cpu":
        return f"its cost and gain are not measured on {facts.device} yet; {ask}"
    if facts.convolutions is not None and facts.convolutions < COMPILE_CONVOLUTIONS:
        return f"on CPU it paid only in networks of {COMPILE_CONVOLUTIONS} convolutions or more; {ask}"
    if facts.total_steps is None:
        return f"pays from about {COMPILE_STEPS:,} steps on; pass total_steps, the length of the run, or {ask}"
    if facts.total_steps < COMPILE_STEPS:
        return f"{facts.total_steps:,} steps do not repay compilation, about {COMPILE_STEPS:,} do; or {ask}"
    return None


def _freeze_unproven(facts: Facts) -> str | None:
    if (other := _of_another_kind(facts, "grad_freeze")) is not None:
        return other
    if facts.total_steps is None:
        return "it must know the length of the run: pass total_steps, the number of updates"
    return _too_short(facts, "grad_freeze")


def _needs_nodes(facts: Facts) -> str | None:
    ranks, per_node = facts.world_size, facts.devices_per_node
    if ranks == 1:
        return "there is one rank, and no other node to combine with"
    if facts.nodes == 1:
        return (
            f"one node of {ranks} ranks has no other node to combine with; if a node has fewer ranks, set "
            "common.device_number"
        )
    if ranks % per_node:
        return f"{ranks} ranks in nodes of {per_node} leave the last node incomplete; correct common.device_number"
    return None


_ENTRIES = (
    Entry(
        algorithm=LessBn,
        summary="removes the BatchNorm layers that are not needed",
        done=_removed_norms,
        advice="with fewer BatchNorms, tune the learning rate again",
        section="less_bn",
        words={"fn_flag": "normalize_head"},
        brings={"gc_flag": GradientCentralization.name},
        unproven=_less_bn_unproven,
    ),
    Entry(
        algorithm=GradientCentralization,
        summary="subtracts the mean from the gradient of each filter",
        unproven=lambda facts: (
            _of_another_kind(facts, GradientCentralization.name) or _too_short(facts, GradientCentralization.name)
        ),
    ),
    Entry(
        algorithm=ChannelsLast,
        summary="stores images and kernels channels-last",
        unusable=lambda facts: "the model has no convolution" if facts.convolutions == 0 else None,
        lever=True,
    ),
    Entry(
        algorithm=Autocast,
        summary="computes the forward and backward pass in bfloat16",
        unusable=_cast_by_the_trainer,
        unproven=_half_unproven,
        lever=True,
    ),
    Entry(
        algorithm=Threads,
        summary="computes with another number of CPU threads",
        unproven=lambda _: (
            "it is tried only if torch does not use all cores and the program has set no number; ask with extra.threads"
        ),
        lever=True,
    ),
    Entry(
        algorithm=Unpad,
        summary="computes padded sequences without their padding",
        unproven=_partial_unproven,
        lever=True,
    ),
    Entry(
        algorithm=SparseHead,
        summary="computes the logits of labelled positions only",
        unproven=_partial_unproven,
        lever=True,
    ),
    Entry(
        algorithm=MatmulPrecision,
        summary="computes float32 matrix products in TF32",
        unusable=_cast_by_the_trainer,
        unproven=lambda facts: (
            "its gain is not measured on cuda yet; ask for it with extra.matmul_precision"
            if facts.device == "cuda"
            else "TF32 is a precision of CUDA devices"
        ),
        lever=True,
    ),
    Entry(
        algorithm=GradFreeze,
        summary="stops training the first blocks in some of the updates",
        section="grad_freeze",
        words={
            "param_groups": "groups",
            "freeze_type": "pattern",
            "freeze_p": "full_share",
            "total_steps": "total_steps",
        },
        values={"freeze_type": dict(enumerate(get_args(Pattern)))},
        facts=("total_steps",),
        unproven=_freeze_unproven,
        removed={"costs": None, "step_seconds": 0, "recompile_seconds": 0, "cache_path": None},
    ),
    Entry(
        algorithm=TokenDrop,
        summary="computes random tokens in the middle blocks of a transformer, fewer at first",
        facts=("total_steps",),
    ),
    Entry(algorithm=FusedOptimizer, summary="updates all parameters in one kernel", lever=True, of_optimizer=True),
    Entry(
        algorithm=Compile,
        summary="compiles the model with torch.compile",
        unproven=_compile_unproven,
        lever=True,
        once=True,
    ),
    Entry(
        algorithm=GradAccumulation,
        summary="updates once after several batches",
        section="grad_accumulation",
        words={"grad_accumulation_step": "steps"},
        unusable=_left_to_trainers("accumulates gradients itself; use ", _ACCUMULATES),
    ),
    Entry(
        algorithm=AdaptiveSum,
        summary="averages gradients inside a node and combines the nodes by AdaSum",
        section="common",
        words={"gradient_split_groups": "split_groups"},
        facts=("devices_per_node",),
        unusable=_needs_nodes,
        removed={"on": "delta"},
    ),
    Entry(
        algorithm=LossScaleGroup,
        summary="scales the gradients of each group of modules separately, for float16",
        unusable=_left_to_trainers("scales the loss itself; use ", _SCALES),
        removed=MappingProxyType({"growth": 2.0 ** (1 / 1000), "shrink": 2.0**-0.5, "window": 1, "hysteresis": 1}),
    ),
    Entry(
        algorithm=DimReduction,
        summary="trains along the few directions that mattered in earlier training",
        section="dim_reduce",
        words={key: key for key in DimReduceSection.model_fields},
        unusable=_left_to_trainers(
            "calls step() without the loss, which a line search needs", dict.fromkeys(_SCALES, "")
        ),
        removed={"restart": False, "patience": 100, "tolerance": 0.01},
    ),
)

REGISTRY: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
"""Every algorithm by its JSON name."""

_ORDER = (Threads, Unpad, SparseHead, ChannelsLast, Autocast, MatmulPrecision, FusedOptimizer, Compile)
_SYSTEM: dict[str, Algorithm] = {lever.name: lever() for lever in _ORDER}
"""The levers of the levels, in the order of the trial, with their default settings. Plans share these values."""

LEVELS: Mapping[str, Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "O0": MappingProxyType({}),
        "O1": MappingProxyType({name: {} for name in _SYSTEM}),
        "O2": MappingProxyType(
            {
                **{name: {} for name in _SYSTEM},
                "less_bn": {"keep": "narrowest", "keep_every": 1, "blocks_per_norm": 8},
                "gradient_centralization": {},
                "grad_freeze": {},
            }
        ),
    }
)
"""Level -> algorithm -> settings that differ from its defaults. Chosen by measurement. See ``docs/levels.md``."""


def build(entry: Entry, settings: Mapping[str, Any], origins: Mapping[str, str]) -> Algorithm:
    """Build an algorithm from its settings, as JSON has them.

    The types of those that the user wrote are checked. ``origins`` has the JSON path of each.
    """
    if not settings and entry.name in _SYSTEM:
        return _SYSTEM[entry.name]
    hints = _hints(entry.algorithm)
    values = {k: _frozen(value) for k, value in settings.items() if (k, value) not in entry.removed.items()}
    for key, value in values.items():
        path = origins.get(key, f"extra.{entry.name}.{key}")
        if key not in hints:
            allowed, kind = ", ".join(hints) or "no settings", "a removed" if key in entry.removed else "an unknown"
            raise ConfigError(path, found=f"{kind} setting", allowed=allowed, hint=nearest(key, hints))
        if key not in origins:
            continue  # of the registry, or a fact
        try:
            TypeAdapter(hints[key]).validate_python(value, strict=True)
        except ValidationError:
            raise ConfigError(path, found=shown(settings[key]), allowed=_in_words(hints[key])) from None
    try:
        return entry.algorithm(**values)
    except (TypeError, ValueError, OverflowError) as error:
        # A message begins with the name of its setting.
        named = next((key for key in values if re.match(rf"{key}\b", str(error))), None)
        path = f"extra.{entry.name}" if named is None else origins.get(named, f"extra.{entry.name}.{named}")
        found = shown(dict(settings)) if named is None else shown(settings[named])
        raise ConfigError(path, found=found, allowed=str(error)) from None


@functools.cache
def _hints(kind: type[Algorithm]) -> dict[str, Any]:
    """Return the type of each setting of an algorithm."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}  # pyright: ignore[reportArgumentType]


def _frozen(value: Any) -> Any:
    """Return lists as tuples, which JSON does not have."""
    return tuple(_frozen(entry) for entry in value) if isinstance(value, (list, tuple)) else value


def _in_words(hint: Any) -> str:
    """Describe the values of a type in the terms of JSON."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(repr(choice) for choice in typing.get_args(hint))
    parts = [part for part in typing.get_args(hint) if part is not Ellipsis]
    if isinstance(typing.get_origin(hint), type) and issubclass(typing.get_origin(hint), Sequence):
        return f"a list, each entry {' or '.join(_in_words(part) for part in parts)}"
    if parts:
        # Lists come last, so that "or" does not seem to belong to their entries.
        return " or ".join(sorted(map(_in_words, parts), key=lambda words: words.startswith("a list")))
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}
    return words.get(hint, str(hint))


def place(algorithm: Algorithm) -> tuple[int, int]:
    """Return the place of an algorithm in the attach order. The registry decides between equal orders."""
    return algorithm.traits.order, list(REGISTRY).index(algorithm.name)
