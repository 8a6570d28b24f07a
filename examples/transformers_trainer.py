"""Train with ``transformers.Trainer`` at a level; one line differs. Needs the extra ``transformers``."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import ResNetConfig, ResNetForImageClassification, TrainingArguments, set_seed

from torchboost.integrations.transformers import BoostTrainer
from torchboost.workloads.data import digits


class Images(Dataset):
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[row], "labels": self.labels[row]}


def accuracy(evaluated: Any) -> dict[str, float]:
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def main(epochs: int = 3) -> float:
    set_seed(0)
    data, folder = digits(16), tempfile.mkdtemp()
    train, test = (Images(*data.picked(torch.arange(data.samples))), Images(*next(data.test(len(data.test_labels)))))
    shape = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_channels=1, num_labels=10, **shape))
    run = {"num_train_epochs": epochs, "per_device_train_batch_size": 32, "learning_rate": 3e-3}
    args = TrainingArguments(folder, **run, report_to=[], disable_tqdm=True, use_cpu=True)

    trainer = BoostTrainer(model, args, train_dataset=train, eval_dataset=test, compute_metrics=accuracy, boost="O1")
    trainer.train()
    print(trainer.boosted.explain())
    right = trainer.evaluate()["eval_accuracy"]

    trainer.save_model(folder)
    plain = ResNetForImageClassification.from_pretrained(folder).eval()  # needs no torchboost
    with torch.no_grad():
        again = (plain(test.images).logits.argmax(-1) == test.labels).float().mean().item()
    print(f"{right:.1%} of the test images right, {again:.1%} after from_pretrained")
    return right


if __name__ == "__main__":
    main()
