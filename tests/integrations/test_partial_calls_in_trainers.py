"""Trainers over calls that leave positions out: what they train and log is what they do over the padded batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tests.algorithms.test_partial_calls import batch, decoder, encoder, gradients
from tests.integrations.trainers import forget_accelerator
from torchboost.algorithms import sparse_head_forward, unpad_forward
from torchboost.integrations.transformers import BoostMixin

ASKED = {"extra": {"unpad": True, "sparse_head": True, "compile": False, "autocast": False, "fused_optimizer": False}}


class Padded(Dataset):
    """Sequences that are padded already, with a column that the model does not know."""

    def __init__(self) -> None:
        batches = [batch(seed=seed) for seed in range(6)]
        self.rows = [{name: column[row] for name, column in one.items()} for one in batches for row in range(4)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**self.rows[index], "unknown": torch.ones(1)}


class WithAccuracy(transformers.Trainer):
    """Reads the logits in each step, as trl's SFTTrainer does."""

    seen: list[float]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        result: Any = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss, outputs = result
        with torch.no_grad():
            logits, labels = outputs.logits[..., :-1, :].contiguous(), inputs["labels"][..., 1:].contiguous()
            hits = (logits.argmax(-1) == labels) & (labels != -100)
            logs = F.log_softmax(outputs.logits, -1)
            entropy = -((logs.exp() * logs).sum(-1) * inputs["attention_mask"]).sum()
            self.seen = [
                *getattr(self, "seen", []),
                float(self.accelerator.gather_for_metrics(hits.sum())),
                float(entropy),
            ]
        return (loss, outputs) if return_outputs else loss


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


def metrics(predicted: Any) -> dict[str, float]:
    return {"sum": float(predicted.predictions.sum())}


STAYS, LEAVES = "", "outputs are read"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    "labels": ({}, {}, (STAYS, STAYS)),
    "smoothing": ({"label_smoothing_factor": 0.1}, {}, (LEAVES, LEAVES)),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}, (STAYS, STAYS)),
    "own loss": ({}, {"compute_loss_func": summed}, (STAYS, STAYS)),
    "metrics": ({"eval_strategy": "steps", "eval_steps": 2}, {"compute_metrics": metrics}, (STAYS, STAYS)),
    "accuracy": ({}, {"base": WithAccuracy}, (STAYS, LEAVES)),
    "checkpointing": (
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {},
        (STAYS, STAYS),
    ),
    "bf16": ({"bf16": True}, {}, (STAYS, STAYS)),
    "bf16 and smoothing": ({"bf16": True, "label_smoothing_factor": 0.1}, {}, (LEAVES, LEAVES)),
}


def trained(make: Any, folder: Path, case: str, *, boosting: bool) -> tuple[Tensor, list[Any], list[str]]:
    settings, given, _ = CASES[case]
    given = dict(given)
    base = given.pop("base", transformers.Trainer)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
        optim="sgd",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **settings,
    )
    torch.manual_seed(0)
    parts = {"model": make(), "args": arguments, "train_dataset": Padded(), "eval_dataset": Padded()}
    remarks: list[str] = []
    if boosting:
        kind: Any = type("Boosting", (BoostMixin, base), {})
        trainer = kind(**parts, **given, boost_config=ASKED, calibrate=False)

        class Look(transformers.TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                remarks[:] = [trainer.boosted.attached[name].remark for name in ("unpad", "sparse_head")]

        trainer.add_callback(Look())
    else:
        trainer = base(**parts, **given)
    trainer.train()
    logs = [
        entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss", "eval_sum") if key in entry
    ]
    weights = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    return weights, logs + getattr(trainer, "seen", []), remarks


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [decoder, encoder])
@pytest.mark.parametrize("case", list(CASES))
def test_a_trainer_of_transformers_trains_and_logs_the_same(case: str, make: Any, tmp_path: Path):
    forget_accelerator()
    weights, logs, _ = trained(make, tmp_path, case, boosting=False)
    found, figures, remarks = trained(make, tmp_path, case, boosting=True)
    tolerance = 1e-4 if "bf16" in case else 1e-6
    assert float((found - weights).norm() / weights.norm()) < tolerance
    assert figures == pytest.approx(logs, rel=1e-3, abs=1e-4)
    for remark, told in zip(remarks, CASES[case][2], strict=True):
        assert remark.startswith(told)
        assert bool(remark) is bool(told)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("inside", [True, False])
def test_accelerate_converts_outputs_that_stay_partial(precision: str, inside: bool):
    found = []
    for boosting in (False, True):
        forget_accelerator()
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        torch.manual_seed(0)
        model = decoder()
        live: list[Any] = [unpad_forward(model), sparse_head_forward(model)] if boosting else []
        prepared, inputs = accelerator.prepare(model), batch()
        labels = inputs["labels"] if inside else inputs.pop("labels")
        for _ in range(2):
            outputs = prepared(**inputs)
            assert outputs.logits.dtype is torch.float32
            loss = outputs.loss if inside else F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
            found.append(gradients(prepared, loss))
        assert all(one.calls == 1 and not one.remark for one in live)
        forget_accelerator()
    for plain, other in zip(found[:2], found[2:], strict=True):
        assert float((other - plain).norm() / plain.norm()) < (1e-5 if precision == "no" else 2e-2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [decoder, encoder])
@pytest.mark.parametrize("where", ["attention", "head", "saved"])
def test_adapters_of_peft(make: Any, where: str):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = make()
    names = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    attention = sorted(names & {"q_proj", "v_proj", "query", "value"})
    head = "lm_head" if "lm_head" in names else "decoder"
    targets = [*attention, head] if where == "head" else attention
    saved = [head] if where == "saved" else None
    adapted: Any = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=targets, modules_to_save=saved, init_lora_weights=False)
    ).train()
    inputs = batch()
    plain = adapted(**inputs).loss
    expected = gradients(adapted, plain)
    live: list[Any] = [unpad_forward(adapted), sparse_head_forward(adapted)]
    for _ in range(2):
        loss = adapted(**inputs).loss
        torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)
        found = gradients(adapted, loss)
        assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert live[0].calls == 1
    for one in live:
        one.remove()
