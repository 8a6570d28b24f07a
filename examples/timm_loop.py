"""Train a timm model at a level; two lines are added. Needs ``timm`` and torchvision."""

from __future__ import annotations

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch.nn import functional as F

import torchboost
from torchboost.workloads.data import digits


def main(epochs: int = 4) -> float:
    torch.manual_seed(0)
    data = digits(16)
    steps = epochs * data.steps(32)
    model = timm.create_model("resnet10t", in_chans=1, num_classes=10)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    boosted = torchboost.boost(model, optimizer, level="O1", total_steps=steps)
    model, optimizer = boosted
    average = ModelEmaV3(model, decay=0.9)  # after boost

    for epoch in range(epochs):
        for images, labels in data.train(32, seed=0, epoch=epoch):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update(model)
        print(f"epoch {epoch + 1} of {epochs}: loss of the last batch {loss.item():.3f}")
    print(boosted.explain())
    boosted.remove()

    plain = timm.create_model("resnet10t", in_chans=1, num_classes=10)
    plain.load_state_dict(average.module.state_dict())
    plain.eval()
    with torch.no_grad():
        right = sum(int((plain(x).argmax(1) == y).sum()) for x, y in data.test(100)) / len(data.test_labels)
    print(f"{right:.1%} of the test images right, by a model that torchboost never changed")
    return right


if __name__ == "__main__":
    main()
