"""Train with Lightning's ``Trainer`` at a level; one callback is added. Needs the extra ``lightning``."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchboost.integrations.lightning import Boost
from torchboost.workloads.data import digits
from torchboost.workloads.models import Bottleneck, ResNet


class Classifier(pl.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.net, self.steps = ResNet(Bottleneck, [2, 2, 2], width=16, classes=10, in_channels=1), steps

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(epochs: int = 3) -> float:
    pl.seed_everything(0, verbose=False)
    data = digits(16)
    loader = DataLoader(TensorDataset(*data.picked(torch.arange(data.samples))), 32, shuffle=True, drop_last=True)
    module, boost = Classifier(epochs * len(loader)), Boost("O1", module="net")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[boost], default_root_dir=tempfile.mkdtemp(), **quiet
    )
    trainer.fit(module, loader)
    print(boost.boosted.explain())

    module.eval()
    with torch.no_grad():
        right = sum(int((module.net(x).argmax(1) == y).sum()) for x, y in data.test(100)) / len(data.test_labels)
    print(f"{right:.1%} of the test images right")
    return right


if __name__ == "__main__":
    main()
