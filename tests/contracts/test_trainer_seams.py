"""The places of the trainers into which the adapters hook: names, and the order in which they are called.

If a new version of a trainer moves one, the failing line says which. Also: every front door passes on ``verify``.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import torchboost
from tests.integrations.trainers import WAYS, arguments, run
from tests.support.trainer_models import KINDS
from torchboost.integrations import transformers as hugging_face

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec.*", "ignore::FutureWarning")


class Order:
    """Notes the first call of each name."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, name: str) -> None:
        if name not in self.seen:
            self.seen.append(name)

    def must_be(self, expected: list[str], *, version: str) -> None:
        missing = [name for name in expected if name not in self.seen]
        assert not missing, f"{version} no longer calls {', '.join(missing)}"
        found, wanted = " -> ".join(self.seen), " -> ".join(expected)
        assert found == wanted, f"{version} calls {found}; the adapter expects {wanted}"


HF_SEAMS = (
    "train",
    "_load_from_checkpoint",
    "create_optimizer",
    "_load_optimizer_and_scheduler",
    "training_step",
    "_save",
    "_save_optimizer_and_scheduler",
)


def test_transformers_calls_the_seams_in_order(tmp_path: Path):
    order, version = Order(), f"transformers {transformers.__version__}"
    absent = [name for name in HF_SEAMS if not callable(getattr(transformers.Trainer, name, None))]
    assert not absent, f"{version} has no Trainer.{', Trainer.'.join(absent)}"

    def noting(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.noting:
                order.note(name)
            return getattr(super(noted, self), name)(*args, **kwargs)

        return method

    noted = type("Noted", (transformers.Trainer,), {name: noting(name) for name in HF_SEAMS} | {"noting": True})

    class Prepared(noted):
        def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
            prepare = self.accelerator.prepare

            def noted_prepare(*given: Any, **named: Any) -> Any:
                order.note("accelerator.prepare")
                return prepare(*given, **named)

            self.accelerator.prepare = noted_prepare
            assert self.state.max_steps == 4, f"{version}: state.max_steps is not known before the optimizer is made"
            return super()._prepare_for_training(*args, **kwargs)

    kind = KINDS["bert"]
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "max_steps": 4, "save_steps": 2}
    args = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=4, **quiet)
    transformers.Trainer(kind.seeded(), args, train_dataset=kind.data()).train()
    resumed = Prepared(kind.seeded(), args, train_dataset=kind.data())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    order.must_be([*HF_SEAMS[:3], "accelerator.prepare", *HF_SEAMS[3:]], version=version)


class Noting(pl.Callback):
    """Notes its calls, and what is restored when, in a resumed run."""

    def __init__(self, order: Order | None) -> None:
        self.order = order

    def _note(self, name: str, *, holds: bool = True, otherwise: str = "") -> None:
        if self.order is not None:
            assert holds, f"lightning {pl.__version__} {otherwise}"
            self.order.note(name)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._note("setup", holds=not trainer.optimizers, otherwise="makes the optimizers before setup")

    def state_dict(self) -> dict[str, Any]:
        return {"kept": True}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._note("load_state_dict")

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        state = trainer.optimizers[0].state
        self._note("on_fit_start", holds=not state, otherwise="restores the optimizer before on_fit_start")
        assert trainer.estimated_stepping_batches == 4

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        state = trainer.optimizers[0].state
        self._note("on_train_start", holds=bool(state), otherwise="restores the optimizer after on_train_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self._note("on_train_batch_end")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        found = "state_dict" in checkpoint
        self._note("on_save_checkpoint", holds=found, otherwise="calls on_save_checkpoint before it has the weights")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._note("teardown")


class Lit(pl.LightningModule):
    """A network in a module, which notes when its weights are restored."""

    def __init__(self, order: Order | None) -> None:
        super().__init__()
        self.net, self.order = KINDS["bert"].seeded(), order

    def training_step(self, batch: Any, _: int) -> Any:
        return self.net(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        if self.order is not None:
            self.order.note("weights")


def test_lightning_calls_the_seams_in_order(tmp_path: Path):
    def fit(order: Order | None, resume: str | None) -> None:
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = pl.Trainer(max_steps=4, callbacks=[Noting(order), saving], **quiet)
        trainer.fit(Lit(order), DataLoader(KINDS["bert"].data(), 4), ckpt_path=resume)

    order = Order()
    fit(None, None)
    fit(order, str(tmp_path / "step=2.ckpt"))
    before = ["setup", "weights", "load_state_dict", "on_fit_start", "on_train_start"]
    order.must_be(
        [*before, "on_train_batch_end", "on_save_checkpoint", "teardown"], version=f"lightning {pl.__version__}"
    )


def test_accelerate_has_the_seams(one_accelerator: None):
    given = inspect.signature(Accelerator.prepare).parameters
    assert any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in given.values()), (
        "Accelerator.prepare(*args) has changed"
    )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    names = "register_for_checkpointing autocast mixed_precision distributed_type device_placement scaler"
    for name in names.split():
        assert hasattr(accelerator, name), f"Accelerator has no {name}"
    prepared = accelerator.prepare(torch.nn.Linear(2, 2))
    assert "_original_forward" in vars(prepared), "Accelerate no longer keeps _original_forward on a prepared model"


def pair() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = KINDS["bert"].seeded()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(**KINDS["bert"].data().batch(4)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("one_accelerator")
@pytest.mark.parametrize("verify", [False, True])
def test_every_front_door_can_switch_the_check_off(verify: bool, tmp_path: Path):
    boosted = torchboost.boost(*pair(), total_steps=2, verify=verify)
    two_steps(*boosted)
    booster = torchboost.AutoBoost("O1", total_steps=2, verify=verify)
    two_steps(*booster.network_auto_process_train(*pair()))
    plain = transformers.Trainer(KINDS["bert"].seeded(), arguments(tmp_path), train_dataset=KINDS["bert"].data())
    trainer: Any = hugging_face.boost(plain, verify=verify)
    trainer.train()
    said = [boosted.explain(), booster.explain(), trainer.boosted.explain()]
    said += [run(name, "bert", tmp_path / name, verify=verify).boosted.explain() for name in WAYS]
    expected = "fused_optimizer  exact here" if verify else "fused_optimizer  not checked: verify=False"
    assert all(expected in text for text in said)
