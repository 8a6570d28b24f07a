"""Train in a loop with Accelerate at a level; one line differs. Needs the extra ``accelerate``."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchboost.integrations.accelerate import prepare


def main(epochs: int = 10) -> float:
    torch.manual_seed(0)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 16
    loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), 32, shuffle=True, drop_last=True)
    first, second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
    layers = (first, nn.BatchNorm2d(32), nn.ReLU(), second, nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(64 * 16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps := epochs * len(loader))

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler, boosted = prepare(
        accelerator, model, optimizer, loader, scheduler, level="O1", total_steps=steps
    )
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    print(boosted.explain())
    boosted.remove()

    model.eval()
    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"{right:.1%} of the test images right")
    return right


if __name__ == "__main__":
    main()


# It prints, on one busy core of a CPU:
#
#     level O1 for SGD, 460 steps
#     measured at the first training call in 0.4 s; the gain of all together was not measured, since no time was left
#
#     switch            state  what it did                            how exact
#     channels_last     on     3 pairs did not decide; kept as usual  exact here: gradient within 9e-04
#     threads           off    the program has chosen OMP_NUM_THREADS=1
#     unpad             off    no argument of its forward masks padding
#     sparse_head       off    the model has no output head that a loss could read in part
#     matmul_precision  off    TF32 is a precision of CUDA devices, and the model is on cpu
#     autocast          off    the time for the trial was used up
#     fused_optimizer   off    a step is clearly slower in the only pair
#     compile           off    460 steps do not repay it: at best it saves 0.5 s, and it costs about 9.2 s
#
#     too little time for channels_last, autocast: boost(..., calibrate=1) measures for up to 1 s
#     next: boosted.plan.save("boost.json"); boost(..., config="boost.json") then repeats this without measuring
#     94.3% of the test images right
