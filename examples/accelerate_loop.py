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
#     level O1, mode auto
#     on:
#       channels_last            stores images and kernels channels-last
#       autocast                 computes the forward and backward pass in bfloat16
#       fused_optimizer          updates all parameters in one kernel
#     left out:
#       threads                  it is tried only if torch does not use all cores and the program has set no number;
#           ask with extra.threads
#       matmul_precision         TF32 is a precision of CUDA devices
#       less_bn                  in runs of fewer than 1,000 steps it was not shown to keep the accuracy, and this one
#           has 460; ask for it with extra.less_bn
#       gradient_centralization  in runs of fewer than 1,000 steps it was not shown to keep the accuracy, and this one
#           has 460; ask for it with extra.gradient_centralization
#       unpad                    no argument of its forward masks padding
#       sparse_head              the model has no output head that a loss could read in part
#       compile                  460 steps do not repay it: at best it saves 0 s, and it costs about 9 s
#     measured times decide about speed levers; plan.save(path) keeps this plan for exact repetition
#     measured at the first training call, 0.1 s:
#       channels_last  on: not measured: the time for the trial was used up; on as usual
#       autocast  on: not measured: the time for the trial was used up; on as usual
#       fused_optimizer  on: not measured: the time for the trial was used up; on as usual
#       compile  off: 460 steps do not repay it: at best it saves 0 s, and it costs about 9 s
#       channels_last  exact here: gradient 9e-04
#       autocast  checked: the gradient differs by 0.025, outputs by 0.0051
#       fused_optimizer  exact here
#     94.3% of the test images right
