"""Train with Lightning's ``Trainer`` at a level; one callback is added. Needs the extra ``lightning``."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchboost.integrations.lightning import Boost


class Classifier(pl.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        first, second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        layers = (first, nn.BatchNorm2d(32), nn.ReLU(), second, nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten())
        self.net, self.steps = nn.Sequential(*layers, nn.Linear(64 * 16, 10)), steps

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(epochs: int = 10) -> float:
    pl.seed_everything(0, verbose=False)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), 32, shuffle=True, drop_last=True)
    module, boost = Classifier(epochs * len(loader)), Boost("O1", module="net")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    folder = tempfile.mkdtemp()
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[boost], default_root_dir=folder, **quiet)
    trainer.fit(module, loader)
    print(boost.boosted.explain())

    module.eval()
    with torch.no_grad():
        right = (module.net(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"{right:.1%} of the test images right")
    return right


if __name__ == "__main__":
    main()


# It prints, on one busy core of a CPU:
#
#     training has ended and the hooks are off; it ran with:
#     level O1 for SGD, 460 steps
#     measured at the first training call in 0.1 s
#
#     switch            state  what it did
#         how exact
#     channels_last     on     2 pairs did not decide; kept as usual; give it more with boost(..., calibrate=seconds)
#         exact here: gradient within 9e-04
#     fused_optimizer   on     updates all parameters in one kernel; not measured: the time for the trial was used up;
#                              on as usual; steps became faster, so the share of the run that a trial may take is now
#                              0.0 s; boost(..., calibrate=1) measures longer
#         exact here
#     threads           off    it is tried only if torch does not use all cores and the program has set no number; ask
#                              with extra.threads
#     matmul_precision  off    TF32 is a precision of CUDA devices
#     unpad             off    no argument of its forward masks padding
#     sparse_head       off    the model has no output head that a loss could read in part
#     autocast          off    the time for the trial was used up; steps became faster, so the share of the run that a
#                              trial may take is now 0.0 s; boost(..., calibrate=1) measures longer
#     compile           off    460 steps do not repay it: at best it saves 0 s, and it costs about 9 s
#     94.3% of the test images right
