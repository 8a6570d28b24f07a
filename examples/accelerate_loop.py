"""Train in a loop with Accelerate at a level; one line differs. Needs the extra ``accelerate``."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from torchboost.integrations.accelerate import prepare
from torchboost.workloads.data import digits
from torchboost.workloads.models import Bottleneck, ResNet


def main(epochs: int = 3) -> float:
    torch.manual_seed(0)
    data, accelerator = digits(16), Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(*data.picked(torch.arange(data.samples))), 32, shuffle=True, drop_last=True)
    model = ResNet(Bottleneck, [2, 2, 2], width=16, classes=10, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))

    model, optimizer, loader, scheduler, boosted = prepare(
        accelerator, model, optimizer, loader, scheduler, level="O1", total_steps=epochs * len(loader)
    )
    for epoch in range(epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        print(f"epoch {epoch + 1} of {epochs}: loss of the last batch {loss.item():.3f}")
    print(boosted.explain())
    boosted.remove()

    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in data.test(100)) / len(data.test_labels)
    print(f"{right:.1%} of the test images right")
    return right


if __name__ == "__main__":
    main()
