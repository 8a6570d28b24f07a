"""Use a level in your own loop. The loop stays as it was, and the hooks can be removed."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import torchboost
from torchboost.workloads.data import digits
from torchboost.workloads.models import Bottleneck, ResNet


def main(epochs: int = 4) -> float:
    torch.manual_seed(0)
    data = digits(16)
    steps = epochs * data.steps(32)
    model = ResNet(Bottleneck, [2, 2, 2], width=16, classes=10, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    boosted = torchboost.boost(model, optimizer, level="O1", total_steps=steps)
    model, optimizer = boosted
    print(boosted.explain())

    for epoch in range(epochs):
        for images, labels in data.train(32, seed=0, epoch=epoch):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        print(f"epoch {epoch + 1} of {epochs}: loss of the last batch {loss.item():.3f}")

    fast = boosted.eval_model()
    with torch.no_grad():
        right = sum(int((fast(x).argmax(1) == y).sum()) for x, y in data.test(100))
    print(f"{right} of {len(data.test_labels)} test images right")
    boosted.remove()
    return right / len(data.test_labels)


if __name__ == "__main__":
    main()
