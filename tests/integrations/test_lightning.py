"""Boost inside Lightning's ``Trainer``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset

import torchboost.registry
from tests.support.ranks import run_ranks
from tests.support.trainer_models import FORMS, KINDS, SPEED, Kind, differences, has_plain_layout, trained_alike
from tests.support.wrapped import all_weights
from torchboost.core.hardware import HalfPrecision
from torchboost.core.torch_private import module_hooks
from torchboost.errors import ConfigError, IncompatibleError, NoEffectWarning
from torchboost.graph.removed_norm import RemovedNorm
from torchboost.integrations.lightning import Boost

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec.*")  # what Lightning recommends

EPOCH, STEPS = 4, 8
"""Batches of an epoch, and updates of a run."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": "bf16-mixed"},
    "accumulated": {"accumulate_grad_batches": 2},
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


def trainer_of(folder: Path, *callbacks: Callback, **settings: Any) -> pl.Trainer:
    saving = ModelCheckpoint(folder, every_n_train_steps=STEPS // 2, save_top_k=-1, filename="{step}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    usual = {"max_steps": STEPS, "precision": "32-true"}
    return pl.Trainer(callbacks=[*callbacks, saving], **{**quiet, **usual, **settings})


def loader(kind: Kind) -> DataLoader:
    return DataLoader(Subset(kind.data(), range(4 * EPOCH)), 4)


def fit(name: str, folder: Path, *others: Callback, resume: str | None = None, **settings: Any) -> tuple[Lit, Boost]:
    kind = KINDS[name]
    boost, module = Boost("O1", module="net", config=kind.config), Lit(kind.seeded())
    trainer_of(folder, boost, *others, **settings).fit(module, loader(kind), ckpt_path=resume)
    return module, boost


@pytest.mark.parametrize(("name", "setting"), FORMS)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, setting: str, tmp_path: Path):
    whole, _ = fit(name, tmp_path / "whole", **SETTINGS[setting])
    checkpoint = str(tmp_path / "whole" / f"step={STEPS // 2}.ckpt")
    resumed, boost = fit(name, tmp_path / "resumed", resume=checkpoint, **SETTINGS[setting])
    assert trained_alike(whole, resumed)
    assert boost.plan.total_steps == STEPS


def test_level_o0_trains_as_lightning_alone(tmp_path: Path):
    kind, settings = KINDS["resnet"], {**SETTINGS["bf16"], **SETTINGS["accumulated"]}
    found = []
    for callbacks in ([Boost("O0")], []):
        module = Lit(kind.seeded())
        trainer_of(tmp_path / str(len(callbacks)), *callbacks, **settings).fit(module, loader(kind))
        found.append(module)
    assert trained_alike(*found)


def by_hand(kind: Kind, steps: int, every: int, clip: float) -> nn.Module:
    """Train as Lightning does, in a loop of one's own, with the same level attached by ``torchboost.boost``."""
    import torchboost

    net = kind.seeded()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    torchboost.boost(net, optimizer, level="O1", total_steps=steps, config=kind.config, loop="lightning")
    batches = [batch for _ in range(every * steps // EPOCH) for batch in loader(kind)]
    net.train()
    for done, batch in enumerate(batches, start=1):
        (net(**batch).loss / every).backward()
        if done % every == 0:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return net


@pytest.mark.parametrize(("name", "every"), [("bert", 1), ("resnet", 2)])
def test_closures_with_accumulation_and_clipping_equal_the_plain_loop(name: str, every: int, tmp_path: Path):
    kind = KINDS[name]
    module, _ = fit(name, tmp_path, accumulate_grad_batches=every, gradient_clip_val=0.5)
    expected = by_hand(kind, STEPS, every, 0.5)
    assert all(torch.equal(p, q) for p, q in zip(module.net.parameters(), expected.parameters(), strict=True))


def test_clipping_in_mixed_precision(tmp_path: Path):
    module, boost = fit("bert", tmp_path, precision="bf16-mixed", gradient_clip_val=0.5)
    assert "fused_optimizer" in {algorithm.name for algorithm in boost.plan.algorithms}
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_a_network_that_training_step_does_not_call_warns(tmp_path: Path):
    class Inner(Lit):
        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            images = self.net.resnet(batch["pixel_values"]).pooler_output
            return nn.functional.cross_entropy(self.net.classifier(images), batch["labels"])

    kind = KINDS["resnet"]
    boost = Boost("O1", module="net", config={"extra": {"autocast": {}, "channels_last": {}}})
    with pytest.warns(NoEffectWarning, match="itself was not called"):
        trainer_of(tmp_path, boost).fit(Inner(kind.seeded()), loader(kind))


def test_checkpoints_need_no_torchboost(tmp_path: Path):
    kind = KINDS["resnet"]
    module, boost = Lit(kind.seeded()), Boost("O1", config=kind.config)
    trainer = trainer_of(tmp_path, boost)
    trainer.fit(module, loader(kind))
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert any(isinstance(m, RemovedNorm) for m in module.modules())
    batch = kind.data().batch(6)
    for name in (f"step={STEPS}.ckpt", "later.ckpt"):
        loaded = Lit.load_from_checkpoint(tmp_path / name, net=kind.build(), weights_only=False)
        with torch.no_grad():
            assert torch.equal(loaded.net.eval()(**batch).logits, module.net.eval()(**batch).logits)


def test_validation_loads_a_checkpoint_into_the_boosted_network(tmp_path: Path):
    class Validated(Lit):
        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            self.log("loss", self.net(**batch).loss)

    kind = KINDS["resnet"]
    module, boost = Validated(kind.seeded()), Boost("O1", config=kind.config)
    trainer = trainer_of(tmp_path, boost)
    trainer.fit(module, loader(kind))
    (now,) = trainer.validate(module, loader(kind), verbose=False)
    last = str(tmp_path / f"step={STEPS}.ckpt")
    (loaded,) = trainer.validate(module, loader(kind), ckpt_path=last, verbose=False)
    fresh = Validated(kind.build())
    (plain,) = trainer_of(tmp_path / "fresh").validate(fresh, loader(kind), ckpt_path=last, verbose=False)
    assert now == loaded == plain


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_after_fit(fails: bool, tmp_path: Path):
    class Failing(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if fails and trainer.global_step == 5:
                raise RuntimeError("planted")

    kind = KINDS["resnet"]
    module, boost = Lit(kind.seeded()), Boost("O1", config=kind.config)
    trainer = trainer_of(tmp_path, boost, Failing())
    if fails:
        with pytest.raises(RuntimeError, match="planted"):
            trainer.fit(module, loader(kind))
    else:
        trainer.fit(module, loader(kind))
    assert sum(len(found) for m in module.modules() for found in module_hooks(m)) == 0
    assert all(p.requires_grad for p in module.parameters())
    assert "forward" not in vars(module.net)


@pytest.mark.parametrize(("average", "boost_first"), [("swa", False), ("swa", True), ("ema", False)])
def test_averages_of_the_weights_in_either_order(average: str, boost_first: bool, tmp_path: Path):
    kind = KINDS["resnet"]
    module, boost = Lit(kind.seeded()), Boost("O1", config=kind.config)
    other = (
        StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
        if average == "swa"
        else EMAWeightAveraging(decay=0.5)
    )
    callbacks = [boost, other] if boost_first else [other, boost]
    trainer = trainer_of(tmp_path, *callbacks, max_steps=-1, max_epochs=3)
    trainer.fit(module, loader(kind))
    assert any(isinstance(m, RemovedNorm) for m in module.modules())
    assert all(torch.isfinite(p).all() for p in module.parameters())
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    for path in (tmp_path / f"step={2 * EPOCH}.ckpt", tmp_path / "later.ckpt"):
        state = torch.load(path, weights_only=False)["state_dict"]
        Lit(kind.build()).load_state_dict(state)


@pytest.mark.parametrize("boost_first", [False, True])
def test_a_resumed_average_equals_the_uninterrupted_one(boost_first: bool, tmp_path: Path):
    kind, found = KINDS["resnet"], []
    for resume in (None, str(tmp_path / f"step={STEPS // 2}.ckpt")):
        module, boost, average = Lit(kind.seeded()), Boost("O1", config=kind.config), EMAWeightAveraging(decay=0.5)
        callbacks = [boost, average] if boost_first else [average, boost]
        folder = tmp_path if resume is None else tmp_path / "resumed"
        trainer_of(folder, *callbacks).fit(module, loader(kind), ckpt_path=resume)
        found.append(module)
    assert trained_alike(*found)


def test_a_backbone_that_is_unfrozen_later(tmp_path: Path):
    class Backbone(Lit):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.momentum = 0.0

        @property
        def backbone(self) -> nn.Module:
            return self.net.resnet

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.classifier.parameters(), lr=0.05)

    kind = KINDS["resnet"]
    module = Backbone(kind.seeded())
    before = copy.deepcopy(module.net.resnet.state_dict())
    tuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, verbose=False)
    boost = Boost("O1", config={"extra": {"less_bn": False, "grad_freeze": False}})
    trainer_of(tmp_path, boost, tuning, max_steps=-1, max_epochs=3).fit(module, loader(kind))
    after = module.net.resnet.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in after.items() if name.endswith("weight"))
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_the_network_is_found_or_asked_for(tmp_path: Path):
    kind = KINDS["bert"]

    class Two(Lit):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.other = nn.Linear(2, 2)

    with pytest.raises(IncompatibleError, match=r"found 2 networks in Two: net, other.*Boost\(module=...\)"):
        trainer_of(tmp_path, Boost("O1")).fit(Two(kind.seeded()), loader(kind))
    with pytest.raises(IncompatibleError, match="found 'nett'; Two has net, other"):
        trainer_of(tmp_path, Boost("O1", module="nett")).fit(Two(kind.seeded()), loader(kind))
    with pytest.raises(ConfigError, match="O1"):
        Boost("O7")


class Logged(pl.loggers.Logger):
    """Keeps what is logged."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.figures |= metrics

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_trial_runs_and_is_logged_and_a_resumed_run_has_none(precision: str, tmp_path: Path):
    kind, logger = KINDS["bert"], Logged()
    boosts = []
    for resume in (None, str(tmp_path / f"step={STEPS // 2}.ckpt")):
        boost, module = Boost("O1", calibrate=3.0), Lit(kind.seeded())
        trainer_of(tmp_path, boost, logger=logger, precision=precision).fit(module, loader(kind), ckpt_path=resume)
        boosts.append((boost, module))
    (first, whole), (second, resumed) = boosts
    assert (first.boosted.choice.source, second.boosted.choice.source) == ("trial", "checkpoint")
    assert first.boosted.choice.kept == second.boosted.choice.kept
    assert trained_alike(whole, resumed)
    assert logger.figures["boost/trial_seconds"] == 0.0
    assert ("boost/autocast" in logger.figures) == (precision == "32-true")


def resumed_on_ranks(folder: str) -> list[Any]:
    """Train whole and resumed. The speed of bfloat16 is measured on each rank; here the ranks find different ones."""
    rank, results = torch.distributed.get_rank(), []
    measured = HalfPrecision(rank == 1, "found by this rank")
    settings = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "plugins": [TwoRanks()]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchboost.registry, "half_precision", lambda *_: measured)
        for name, calibrate in (("bert", "1"), ("resnet", "1"), ("resnet", "0")):
            patch.setenv("TORCHBOOST_CALIBRATE", calibrate)
            first = Path(folder) / f"{name}-{calibrate}"
            whole, _ = fit(name, first, **settings)
            torch.distributed.barrier()
            checkpoint = str(first / f"step={STEPS // 2}.ckpt")
            resumed, _ = fit(name, first / "resumed", resume=checkpoint, **settings)
            removed = any(isinstance(m, RemovedNorm) for m in whole.modules())
            results.append([rank, differences(whole, resumed), removed])
    return results


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


@pytest.mark.dist
def test_a_resumed_run_on_two_ranks_equals_the_uninterrupted_one(tmp_path: Path):
    expected = [[[rank, {}, removed] for removed in (False, True, True)] for rank in (0, 1)]
    assert run_ranks(resumed_on_ranks, 2, str(tmp_path), timeout=300.0) == expected


def test_the_saved_optimizer_is_that_of_a_plain_run(tmp_path: Path):
    class Live(Callback):
        fused: bool | None = None

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.fused = trainer.optimizers[0].param_groups[0]["fused"]

    live, boost = Live(), Boost("O1", module="net", config=SPEED)
    trainer_of(tmp_path, boost, live).fit(Lit(KINDS["resnet"].seeded()), loader(KINDS["resnet"]))
    assert live.fused
    saved = torch.load(tmp_path / f"step={STEPS}.ckpt", weights_only=True)
    assert has_plain_layout(saved["optimizer_states"][0])


class Sharded(Lit):
    """The same, sharded by FSDP2, with a rule that keeps moments."""

    def configure_model(self) -> None:
        for block in [module for module in self.net.modules() if type(module).__name__ == "BertLayer"]:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2) if self.momentum else super().configure_optimizers()


def fit_sharded(
    name: str, momentum: float, folder: Path, *, whole: bool, level: str = "O1", resume: str | None = None
) -> list[float]:
    config = {"extra": {"less_bn": {}, "grad_freeze": {"pattern": "progressive"}}} if level == "O1" else None
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=not whole)
    settings = {"strategy": strategy, "devices": 2, "plugins": [TwoRanks()], "use_distributed_sampler": False}
    boost, module = Boost(level or "O0", module="net", config=config), Sharded(KINDS[name].seeded(), momentum=momentum)
    trainer_of(folder, *([boost] if level else []), **settings).fit(module, loader(KINDS[name]), ckpt_path=resume)
    if level == "O1":
        assert "grad_freeze" in {algorithm.name for algorithm in boost.plan.algorithms}
        assert any(isinstance(m, RemovedNorm) for m in module.modules()) == (name == "resnet")
    return all_weights(module)


def sharded(folder: str) -> list[bool]:
    """Whole and resumed with moments, without and in one file; level O0 against Lightning alone."""
    results = []
    for number, (name, momentum, whole) in enumerate(
        (("bert", 0.9, False), ("bert", 0.0, False), ("bert", 0.9, True), ("resnet", 0.9, False))
    ):
        first = Path(folder) / str(number)
        uninterrupted = fit_sharded(name, momentum, first, whole=whole)
        torch.distributed.barrier()
        checkpoint = str(first / f"step={STEPS // 2}.ckpt")
        resumed = fit_sharded(name, momentum, first / "resumed", whole=whole, resume=checkpoint)
        results.append(uninterrupted == resumed)
    boosted, alone = (
        fit_sharded("bert", 0.9, Path(folder) / f"level{level}", whole=False, level=level) for level in ("O0", "")
    )
    settings = {"strategy": ModelParallelStrategy(1, 2), "devices": 2, "plugins": [TwoRanks()]}
    with pytest.raises(IncompatibleError, match="tensor parallelism"):
        trainer_of(Path(), Boost("O1"), **settings).fit(Sharded(KINDS["bert"].seeded()), loader(KINDS["bert"]))
    return [*results, boosted == alone]


@pytest.mark.dist
def test_a_resumed_run_under_fsdp2_equals_the_uninterrupted_one(tmp_path: Path):
    assert run_ranks(sharded, 2, str(tmp_path), timeout=300.0) == [[True] * 5] * 2
