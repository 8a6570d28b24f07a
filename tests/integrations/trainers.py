"""The three trainers behind one signature: a short run, saved in the middle and at the end, or resumed from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from tests.support.trainer_models import KINDS, Kind
from torchboost import Boosted
from torchboost.integrations.accelerate import prepare
from torchboost.integrations.lightning import Boost
from torchboost.integrations.transformers import BoostTrainer

EPOCH, STEPS, HALF = 4, 8, 4
"""Batches of an epoch, updates of a run, and those before the first checkpoint."""


class Trained(NamedTuple):
    """What a run left.

    Attributes:
        net: The network, not wrapped.
        boosted: None if the trainer trained alone.
        fused: Whether the optimizer was fused while it trained.
    """

    net: nn.Module
    boosted: Boosted | None
    fused: bool


class Way(NamedTuple):
    """How one trainer trains, and what it writes.

    Attributes:
        train: Trains for eight updates and returns what is left. Without ``boosting`` the trainer is alone.
        half: Path of the checkpoint after four updates in the folder of a run.
        optimizer: Returns the last state of the optimizer in a folder.
        weights: Loads the last weights in a folder into a network of the original class.
    """

    train: Callable[..., Trained]
    half: str
    optimizer: Callable[[Path], dict[str, Any]]
    weights: Callable[[Path, Kind], nn.Module]


class Planted(RuntimeError):
    """An error in the middle of a run."""


def loader(kind: Kind) -> DataLoader:
    return DataLoader(Subset(kind.data(), range(4 * EPOCH)), 4)


def ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def is_fused(optimizer: Any) -> bool:
    return bool(optimizer.param_groups[0].get("fused"))


# Accelerate


def forget_accelerator() -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


ACCELERATOR: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": "bf16"},
    "accumulated": {"gradient_accumulation_steps": 2},
    "both": {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
}


def train_in_accelerate(
    kind: Kind, folder: Path, *, resume: str = "", setting: str = "plain", boosting: bool = True, **options: Any
) -> Trained:
    """With clipping and a schedule."""
    forget_accelerator()
    accelerator = Accelerator(cpu=True, **ACCELERATOR[setting])
    assert accelerator.num_processes == ranks()
    model = kind.seeded()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    parts: Any = (model, optimizer, DataLoader(kind.data(), 4), schedule)
    boosted = None
    if boosting:
        *parts, boosted = prepare(accelerator, *parts, total_steps=STEPS, config=kind.config, **options)
    else:
        parts = accelerator.prepare(*parts)
    model, optimizer, batches, schedule = parts
    if resume:
        accelerator.load_state(resume)
    every = accelerator.gradient_accumulation_steps
    for done, batch in enumerate([batch for _ in range(2) for batch in batches][: STEPS * every], start=1):
        if resume and done <= HALF * every:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if done in (HALF * every, STEPS * every):
            accelerator.save_state(str(folder / ("half" if done == HALF * every else "last")))
    net = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    net.save_pretrained(folder / "final")
    fused = is_fused(optimizer)
    if boosted is not None:
        boosted.remove()
    return Trained(net, boosted, fused)


# Lightning


class TwoRanks(LightningEnvironment):
    """The process group that exists already."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return torch.distributed.get_world_size()

    def global_rank(self) -> int:
        return torch.distributed.get_rank()

    def local_rank(self) -> int:
        return torch.distributed.get_rank()

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


LIGHTNING: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16-mixed"},
    "accumulated": {"accumulate_grad_batches": 2},
    "both": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
    "two ranks": {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False},
}


class Lit(pl.LightningModule):
    """A network whose ``training_step`` calls ``self.net``."""

    def __init__(self, net: nn.Module, *, momentum: float = 0.9) -> None:
        super().__init__()
        self.net, self.momentum = net, momentum

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=self.momentum)


def lightning_of(folder: Path, *callbacks: Callback, **settings: Any) -> pl.Trainer:
    saving = ModelCheckpoint(folder, every_n_train_steps=HALF, save_top_k=-1, filename="{step}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    usual = {"max_steps": STEPS, "precision": "32-true"}
    return pl.Trainer(callbacks=[*callbacks, saving], **{**quiet, **usual, **settings})


class Live(Callback):
    """Looks at the optimizer, and may raise."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.fused = fails, False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.fused = is_fused(trainer.optimizers[0])
        if self.fails and trainer.global_step == 5:
            raise Planted


def train_in_lightning(
    kind: Kind,
    folder: Path,
    *,
    resume: str = "",
    setting: str = "plain",
    boosting: bool = True,
    fails: bool = False,
    logger: Any = False,
    **options: Any,
) -> Trained:
    module, live = Lit(kind.seeded()), Live(fails)
    boost = Boost(options.pop("level", "O1"), module="net", config=kind.config, **options)
    settings = LIGHTNING[setting] | ({"plugins": [TwoRanks()]} if setting == "two ranks" else {})
    trainer = lightning_of(folder, *([boost] if boosting else []), live, logger=logger, **settings)
    assert trainer.world_size == ranks()
    try:
        trainer.fit(module, loader(kind), ckpt_path=resume or None)
    except Planted:
        assert fails
    return Trained(module.net, boost.boosted, live.fused)


def weights_of_lightning(folder: Path, kind: Kind) -> nn.Module:
    return Lit.load_from_checkpoint(folder / f"step={STEPS}.ckpt", net=kind.build(), weights_only=False).net


# Transformers


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"bf16": True},
    "accumulated": {"gradient_accumulation_steps": 2},
    "both": {"bf16": True, "gradient_accumulation_steps": 2},
    "two ranks": {"ddp_backend": "gloo", "per_device_train_batch_size": 2},
}


def arguments(folder: Path, **settings: Any) -> transformers.TrainingArguments:
    usual = {"max_steps": STEPS, "per_device_train_batch_size": 4, "save_steps": HALF, "learning_rate": 1e-2}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": HALF, "save_total_limit": 4}
    plain = {"optim": "adamw_torch"}  # the default is fused already
    return transformers.TrainingArguments(str(folder), **{**usual, **quiet, **plain, **settings})


def trainer_of(kind: Kind, folder: Path, *, level: str = "O1", settings: Any = None, **others: Any) -> BoostTrainer:
    others = {"model": None if "model_init" in others else kind.seeded(), **others}
    args = arguments(folder, **(settings or {}))
    return BoostTrainer(args=args, train_dataset=kind.data(), boost=level, boost_config=kind.config, **others)


class Watch(transformers.TrainerCallback):
    """Looks at the optimizer, and may raise."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.fused = fails, False

    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any, **_: Any) -> None:
        self.fused = is_fused(optimizer)
        if self.fails and state.global_step == 5:
            raise Planted


def train_in_transformers(
    kind: Kind,
    folder: Path,
    *,
    resume: str = "",
    setting: str = "plain",
    boosting: bool = True,
    fails: bool = False,
    **options: Any,
) -> Trained:
    watch = Watch(fails)
    if boosting:
        trainer: Any = trainer_of(kind, folder, settings=TRANSFORMERS[setting], callbacks=[watch], **options)
    else:
        args = arguments(folder, **TRANSFORMERS[setting])
        trainer = transformers.Trainer(kind.seeded(), args, train_dataset=kind.data(), callbacks=[watch])
    assert trainer.args.world_size == ranks()
    try:
        trainer.train(resume_from_checkpoint=resume or None)
    except Planted:
        assert fails
    return Trained(trainer.model, trainer.boosted if boosting else None, watch.fused)


def pretrained(folder: Path, kind: Kind) -> nn.Module:
    model, report = type(kind.build()).from_pretrained(folder, output_loading_info=True)  # pyright: ignore
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


WAYS = {
    "accelerate": Way(
        train_in_accelerate,
        "half",
        lambda folder: read(folder / "last" / "optimizer.bin"),
        lambda folder, kind: pretrained(folder / "final", kind),
    ),
    "lightning": Way(
        train_in_lightning,
        f"step={HALF}.ckpt",
        lambda folder: read(folder / f"step={STEPS}.ckpt")["optimizer_states"][0],
        weights_of_lightning,
    ),
    "transformers": Way(
        train_in_transformers,
        f"checkpoint-{HALF}",
        lambda folder: read(folder / f"checkpoint-{STEPS}" / "optimizer.pt"),
        lambda folder, kind: pretrained(folder / f"checkpoint-{STEPS}", kind),
    ),
}


def run(name: str, kind: str, folder: Path, *, resumed: Path | None = None, **options: Any) -> Trained:
    """Train a kind of model in the named trainer; ``resumed`` is the folder of the run to continue."""
    resume = "" if resumed is None else str(resumed / WAYS[name].half)
    return WAYS[name].train(KINDS[kind], folder, resume=resume, **options)
