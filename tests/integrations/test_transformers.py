"""Boost inside ``transformers.Trainer``: its other features, and trainers of other classes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import nn

from tests.integrations.trainers import HALF, STEPS, arguments, trainer_of
from tests.support.trainer_models import KINDS, Rows, trained_alike
from torchboost import ConfigError, IncompatibleError
from torchboost.calibration.passes import Passes
from torchboost.core.torch_private import module_hooks
from torchboost.graph.removed_norm import RemovedNorm
from torchboost.integrations.transformers import SIDE_FILE, BoostTrainer, boost

pytestmark = [
    pytest.mark.usefixtures("one_accelerator"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]


def test_freezing_continues_where_it_was(tmp_path: Path):
    kind = KINDS["resnet"]
    whole = trainer_of(kind, tmp_path / "whole")
    whole.train()
    state = torch.load(tmp_path / "whole" / f"checkpoint-{HALF}" / SIDE_FILE, weights_only=True)
    assert state["attached"]["grad_freeze"]
    (tmp_path / "whole" / f"checkpoint-{HALF}" / SIDE_FILE).unlink()
    restarted = trainer_of(kind, tmp_path / "restarted")
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("transformers.torchboost").addHandler(handler)
    try:
        restarted.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{HALF}"))
    finally:
        logging.getLogger("transformers.torchboost").removeHandler(handler)
    assert any("without torchboost" in text and "grad_freeze" in text for text in records)


def test_training_twice_continues_with_the_same_model(tmp_path: Path):
    trainer = trainer_of(KINDS["resnet"], tmp_path)
    trainer.train()
    norms = sum(isinstance(module, RemovedNorm) for module in trainer.model.modules())
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    assert sum(isinstance(module, RemovedNorm) for module in trainer.model.modules()) == norms > 0
    assert any(not torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    assert not any(any(module_hooks(module)) for module in trainer.model.modules())


def test_model_init_gives_a_new_boosted_model_each_time(tmp_path: Path):
    kind = KINDS["resnet"]
    trainer = trainer_of(kind, tmp_path, model_init=kind.build)
    trainer.train()
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert trained_alike(trainer.model, first)
    assert any(isinstance(module, RemovedNorm) for module in trainer.model.modules())


def test_an_optimizer_of_the_user_is_boosted(tmp_path: Path):
    kind = KINDS["resnet"]
    model = kind.seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    trainer = trainer_of(kind, tmp_path, model=model, optimizers=(optimizer, schedule))
    trainer.train()
    own = {id(p) for p in model.parameters()}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == own
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * (1 - STEPS / 10))


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path):
    kind = KINDS["resnet"]
    settings = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "learning_rate": 0.3,
    }
    trainer = trainer_of(kind, tmp_path, settings=settings, eval_dataset=kind.data())
    trainer.train()
    best = type(trainer.model).from_pretrained(trainer.state.best_model_checkpoint)
    batch = kind.data().batch(6)
    with torch.no_grad():
        assert torch.equal(best.eval()(**batch).logits, trainer.model.eval()(**batch).logits)


@pytest.mark.parametrize(("level", "reentrant"), [("O0", False), ("O1", False), ("O1", True)])
def test_gradient_checkpointing(level: str, reentrant: bool, tmp_path: Path):
    kind, checkpointed = (
        KINDS["gpt"],
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}},
    )
    with_it = trainer_of(kind, tmp_path / "with", level=level, settings=checkpointed)
    with_it.train()
    without = trainer_of(kind, tmp_path / "without", level=level)
    without.train()
    assert trained_alike(with_it.model, without.model)


def test_settings_of_the_trainer_are_named_in_the_plan(tmp_path: Path):
    config = {"extra": {"grad_accumulation": {}, "loss_scale_group": {}, "autocast": {}}}
    trainer = BoostTrainer(
        KINDS["bert"].seeded(),
        arguments(tmp_path, bf16=True),
        train_dataset=KINDS["bert"].data(),
        boost="O2",
        boost_config=config,
    )
    trainer.train()
    reasons = {dropped.name: dropped.reason for dropped in trainer.plan.dropped}
    assert "TrainingArguments(gradient_accumulation_steps=...)" in reasons["grad_accumulation"]
    assert "TrainingArguments(fp16=True)" in reasons["loss_scale_group"]
    assert "computes in bf16 itself" in reasons["autocast"]


def test_a_trainer_of_another_class_is_boosted_and_left_as_it_is(tmp_path: Path):
    class Own(transformers.Trainer):
        seen = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            return super().compute_loss(*args, **kwargs)

    given = Own(KINDS["bert"].seeded(), arguments(tmp_path), train_dataset=KINDS["bert"].data())
    boosted = boost(given, "O1")
    assert isinstance(boosted, Own)
    assert type(given) is Own
    boosted.train()
    assert boosted.seen == STEPS
    assert given.seen == 0
    assert given.optimizer is None
    assert boosted.boosted.plan.level == "O1"
    assert type(boost(boosted, "O0")) is type(boosted)


def test_bad_arguments_and_sharding_trainers_are_refused_at_once(tmp_path: Path):
    model, data = KINDS["bert"].seeded(), KINDS["bert"].data()
    with pytest.raises(ConfigError, match="O1"):
        BoostTrainer(model, arguments(tmp_path), train_dataset=data, boost="O9")
    with pytest.raises(ValueError, match="calibrate"):
        BoostTrainer(model, arguments(tmp_path), train_dataset=data, calibrate="often")
    with pytest.raises(TypeError, match="found BertForSequenceClassification"):
        boost(model, "O1")
    for flag, name in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        trainer = trainer_of(KINDS["resnet"], tmp_path)
        setattr(trainer, flag, True)
        with pytest.raises(IncompatibleError, match=name):
            trainer.train()
        assert trainer.optimizer is None
        assert not any(isinstance(module, RemovedNorm) for module in trainer.model.modules())


class Recording(nn.Module):
    """A linear model that notes in which precision each forward pass computes.

    What the class holds is not restored after a pass of the trial.
    """

    seen: ClassVar[list[torch.dtype]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        self.seen.append(out.dtype)
        return {"loss": out.float().square().mean()}


def test_the_trial_computes_in_the_precision_of_the_trainer(tmp_path: Path):
    rows = Rows({"x": torch.randn(48, 4), "labels": torch.zeros(48, dtype=torch.long)})
    model = Recording()
    trainer = BoostTrainer(model, arguments(tmp_path, bf16=True), train_dataset=rows, calibrate=0.5)
    run, passes = Passes.run, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Passes, "run", lambda self, *rest: passes.append(self) or run(self, *rest))
        trainer.train()
    assert trainer.boosted.choice.source == "trial"
    assert passes
    assert set(model.seen) == {torch.bfloat16}
    logged = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    assert logged["boost/trial_seconds"] > 0
    assert "boost/fused_optimizer" in logged


class Averaging(transformers.Trainer):
    """Averages a figure of its own between two entries of the log, as the trainers of trl do."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        vars(self).setdefault("losses", []).append(float(loss))
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs | {"steps_averaged": len(self.losses)}, *args, **kwargs)
        self.losses.clear()


def test_what_the_trial_chose_leaves_the_averages_of_a_trainer_alone(tmp_path: Path):
    rows = Rows({"x": torch.randn(48, 4), "labels": torch.zeros(48, dtype=torch.long)})
    trainer = boost(Averaging(Recording(), arguments(tmp_path), train_dataset=rows), calibrate=0.5)
    trainer.train()
    logged = trainer.state.log_history
    assert [entry["steps_averaged"] for entry in logged if "loss" in entry] == [HALF, HALF]
    assert [entry["step"] for entry in logged if "boost/trial_seconds" in entry] == [0]


RECIPE: dict[str, Any] = {"recipe": {"optimizer": "muon", "lr": 0.02, "rate": 0.5, "length": 0.75}}


def with_recipe(folder: Path, config: dict[str, Any], **options: Any) -> BoostTrainer:
    settings = {"learning_rate": 0.01, "lr_scheduler_type": "linear", "save_steps": 3, "logging_steps": 1}
    model = options.pop("model", None) or KINDS["bert"].seeded()
    data = KINDS["bert"].data()
    args = arguments(folder, **settings)
    return BoostTrainer(model, args, train_dataset=data, boost="O0", boost_config=config, **options)


def test_a_recipe_shortens_the_run_and_builds_the_optimizer(tmp_path: Path):
    trainer = with_recipe(tmp_path / "whole", RECIPE)
    trainer.train()
    left = round(0.75 * STEPS)
    assert (trainer.state.max_steps, trainer.state.global_step, trainer.boosted.steps) == (left, left, left)
    line = trainer.boosted.explain().splitlines()[2]
    assert line.startswith(
        f"recipe: 0.75 of the steps ({left} of {STEPS}), learning rates times 0.5, Muon at 0.02 for "
    )
    assert line.endswith(" matrices, AdamW for the rest")
    groups = trainer.boosted.optimizer.param_groups
    assert {group["initial_lr"] for group in groups} == {0.005, 0.02}
    assert {group["lr"] for group in groups} == {0.0}  # the schedule of the trainer has ended
    resumed = with_recipe(tmp_path / "resumed", RECIPE)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    pairs = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    with pytest.raises(IncompatibleError):
        trainer.train()


def test_a_neutral_recipe_trains_as_without(tmp_path: Path):
    trainers = [with_recipe(tmp_path / str(n), config) for n, config in enumerate(({}, {"recipe": {"rate": 1.0}}))]
    for trainer in trainers:
        trainer.train()
        assert trainer.state.global_step == STEPS
    pairs = zip(trainers[0].model.parameters(), trainers[1].model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_recipe_refuses_a_schedule_that_was_made_before(tmp_path: Path):
    model = KINDS["bert"].seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    with pytest.raises(IncompatibleError, match="found a schedule on the SGD"):
        with_recipe(tmp_path, RECIPE, model=model, optimizers=(optimizer, schedule)).train()
