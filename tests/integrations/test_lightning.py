"""Boost inside Lightning's ``Trainer``: closures, other callbacks, loggers and FSDP2. See also ``test_contract``."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn

import torchboost
from tests.integrations.trainers import EPOCH, HALF, STEPS, Lit, lightning_of, loader, run
from tests.support.trainer_models import KINDS, Kind, trained_alike
from torchboost import ConfigError, IncompatibleError, NoEffectWarning
from torchboost.graph.removed_norm import RemovedNorm
from torchboost.integrations.lightning import Boost

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec.*")  # what Lightning recommends


def by_hand(kind: Kind, steps: int, every: int, clip: float) -> nn.Module:
    """Train as Lightning does, in a loop of one's own, with the same level attached by ``torchboost.boost``."""
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
    kind, boosts, nets = KINDS[name], [], []
    for precision in ("32-true", "bf16-mixed"):
        module, boost = Lit(kind.seeded()), Boost("O1", module="net", config=kind.config)
        settings = {"accumulate_grad_batches": every, "gradient_clip_val": 0.5, "precision": precision}
        lightning_of(tmp_path, boost, **settings).fit(module, loader(kind))
        boosts.append(boost)
        nets.append(module.net)
    expected = by_hand(kind, STEPS, every, 0.5)
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), expected.parameters(), strict=True))
    assert "fused_optimizer" in {algorithm.name for algorithm in boosts[1].plan.algorithms}
    assert all(torch.isfinite(p).all() for p in nets[1].parameters())


def test_a_network_that_training_step_does_not_call_warns(tmp_path: Path):
    class Inner(Lit):
        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            images = self.net.resnet(batch["pixel_values"]).pooler_output
            return nn.functional.cross_entropy(self.net.classifier(images), batch["labels"])

    kind = KINDS["resnet"]
    boost = Boost("O1", module="net", config={"extra": {"autocast": {}, "channels_last": {}}})
    with pytest.warns(NoEffectWarning, match="itself was not called"):
        lightning_of(tmp_path, boost).fit(Inner(kind.seeded()), loader(kind))


def test_validation_loads_a_checkpoint_into_the_boosted_network(tmp_path: Path):
    class Validated(Lit):
        def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
            self.log("loss", self.net(**batch).loss)

    kind = KINDS["resnet"]
    module, boost = Validated(kind.seeded()), Boost("O1", config=kind.config)
    trainer = lightning_of(tmp_path, boost)
    trainer.fit(module, loader(kind))
    (now,) = trainer.validate(module, loader(kind), verbose=False)
    last = str(tmp_path / f"step={STEPS}.ckpt")
    (loaded,) = trainer.validate(module, loader(kind), ckpt_path=last, verbose=False)
    fresh = Validated(kind.build())
    (plain,) = lightning_of(tmp_path / "fresh").validate(fresh, loader(kind), ckpt_path=last, verbose=False)
    assert now == loaded == plain


def test_checkpoints_after_the_training_and_of_an_error_hold_the_state(tmp_path: Path):
    class Failing(Lit):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == HALF:
                raise KeyError("as planned")

    kind = KINDS["resnet"]
    saved = []
    for number, (lit, error) in enumerate(((Lit, None), (Failing, KeyError))):
        boost, folder = Boost("O1", config=kind.config), tmp_path / str(number)
        trainer = lightning_of(folder, boost, OnExceptionCheckpoint(str(folder)))
        with nullcontext() if error is None else pytest.raises(error, match="as planned"):
            trainer.fit(lit(kind.seeded()), loader(kind))
        later = folder / "on_exception.ckpt"
        if error is None:
            trainer.save_checkpoint(later)
        during = folder / f"step={STEPS if error is None else HALF}.ckpt"
        states = [torch.load(path, weights_only=False)["callbacks"][boost.state_key] for path in (during, later)]
        assert states[0] == states[1]
        saved.append(states[1]["attached"]["grad_freeze"]["step"])
    assert saved == [STEPS, HALF]


@pytest.mark.parametrize("boost_first", [False, True])
def test_averages_of_the_weights_in_either_order(boost_first: bool, tmp_path: Path):
    kind, nets = KINDS["resnet"], []
    for number, resume in enumerate((None, tmp_path / "0" / f"step={HALF}.ckpt", None)):
        module, boost = Lit(kind.seeded()), Boost("O1", config=kind.config)
        other, settings = EMAWeightAveraging(decay=0.5), {}
        if number == 2:
            other = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
            settings = {"max_steps": -1, "max_epochs": 3}
        callbacks = [boost, other] if boost_first else [other, boost]
        trainer = lightning_of(tmp_path / str(number), *callbacks, **settings)
        trainer.fit(module, loader(kind), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / "later.ckpt")
        for path in (tmp_path / str(number) / f"step={STEPS}.ckpt", tmp_path / "later.ckpt"):
            Lit(kind.build()).load_state_dict(torch.load(path, weights_only=False)["state_dict"])
        assert any(isinstance(m, RemovedNorm) for m in module.modules())
        assert all(torch.isfinite(p).all() for p in module.parameters())
        nets.append(module)
    assert trained_alike(nets[0], nets[1])


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
    boost = Boost("O1")
    lightning_of(tmp_path, boost, tuning, max_steps=-1, max_epochs=3).fit(module, loader(kind))
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
        lightning_of(tmp_path, Boost("O1")).fit(Two(kind.seeded()), loader(kind))
    with pytest.raises(IncompatibleError, match="found 'nett'; Two has net, other"):
        lightning_of(tmp_path, Boost("O1", module="nett")).fit(Two(kind.seeded()), loader(kind))
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


def test_the_choice_of_the_trial_is_logged(tmp_path: Path):
    for setting in ("plain", "bf16"):
        logger = Logged()
        run("lightning", "bert", tmp_path, setting=setting, logger=logger, calibrate=1.5)
        assert logger.figures["boost/trial_seconds"] > 0
        assert ("boost/autocast" in logger.figures) == (setting == "plain")


class Scheduled(Lit):
    """Notes its rates; may return a schedule."""

    def __init__(self, net: nn.Module, *, scheduled: bool) -> None:
        super().__init__(net)
        self.scheduled, self.rates = scheduled, set[float]()

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.rates.add(optimizer.param_groups[0]["lr"])
        return super().training_step(batch, _)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]) if self.scheduled else optimizer


def test_of_a_recipe_only_the_rate_is_applied(tmp_path: Path):
    for section, message in (
        ({"optimizer": "muon"}, r"recipe.optimizer='muon'.*configure_optimizers.*muon_from"),
        ({"length": 0.5}, r"recipe.length=0.5.*Trainer\(max_steps=...\)"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            Boost("O0", config={"recipe": section})
    kind = KINDS["bert"]
    for scheduled in (False, True):
        boost = Boost("O0", module="net", config={"recipe": {"rate": 0.5}})
        module = Scheduled(kind.seeded(), scheduled=scheduled)
        trainer = lightning_of(tmp_path, boost)
        if scheduled:
            with pytest.raises(IncompatibleError, match=r"recipe.rate=0.5 and a schedule.*in configure_optimizers"):
                trainer.fit(module, loader(kind))
        else:
            trainer.fit(module, loader(kind))
            assert module.rates == {0.025}
