"""Parts of a data set of images, and its epochs one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from torchboost.workloads.data import Images


def endless(data: Images, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count():
        yield from data.train(batch, seed=seed, epoch=epoch)


def of_classes(data: Images, first: int, count: int) -> Images:
    """Return only the samples of the labels from ``first`` on, renumbered from 0."""

    def part(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        inside = (labels >= first) & (labels < first + count)
        return images[inside], labels[inside] - first

    train, test = part(data.train_inputs, data.train_labels), part(data.test_inputs, data.test_labels)
    return replace(
        data,
        train_inputs=train[0],
        train_labels=train[1],
        test_inputs=test[0],
        test_labels=test[1],
        classes=count,
        validation=None if data.validation is None else of_classes(data.validation, first, count),
    )
