from __future__ import annotations

import itertools
import math
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchboost.bench.workloads.data import Data, Images, Text, synthetic_images, text
from torchboost.bench.workloads.jobs import JOBS, Job, accuracy, bits_per_character, find_job, one_cycle


def data_for(job: Job) -> Data:
    return text(context=128).limited(64) if job.name.startswith("text") else synthetic_images(64, size=32, classes=10)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_job_trains_and_is_decided_by_its_seed(job: Job) -> None:
    data = data_for(job)

    def first_losses(seed: int) -> list[float]:
        model = job.model(data, seed)
        optimizer = job.optimizer(model.parameters())
        schedule = job.schedule(optimizer, 10)
        losses = []
        for inputs, targets in list(data.train(8, seed=seed, epoch=0))[:2]:
            loss = job.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    before = torch.random.get_rng_state()
    assert first_losses(0) == first_losses(0)
    assert first_losses(0) != first_losses(1)
    assert torch.equal(before, torch.random.get_rng_state())


def test_names_are_unique_and_found_by_their_start() -> None:
    names = [job.name for job in JOBS]
    assert len(set(names)) == len(names)
    assert find_job("digits").name == "digits-resnet"
    assert find_job("cifar10").name == "cifar10-resnet-bottleneck"
    assert find_job("cifar10-resnet-bottleneck-small").name == "cifar10-resnet-bottleneck-small"
    with pytest.raises(ValueError, match=r"no job 'digitz'.*Did you mean 'digits-resnet'"):
        find_job("digitz")
    with pytest.raises(ValueError, match="no job ''"):
        find_job("")


def test_jobs_are_frozen() -> None:
    job: Any = JOBS[0]
    with pytest.raises(FrozenInstanceError):
        job.batch = 1


def test_digits_job_needs_no_path(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    job = find_job("digits-resnet")
    assert job.load(None, 100).samples == 100
    with pytest.raises(ValueError, match="leave it out"):
        job.load(tmp_path, None)


def test_text_job_loads_the_default_text() -> None:
    data = find_job("text-gpt").load(None, 20)
    assert isinstance(data, Text)
    assert data.samples == 20


def test_schedule_rises_to_one_and_falls_to_zero() -> None:
    factors = [one_cycle(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.05)
    assert max(factors) == factors[19] == factors[20] == 1.0
    assert factors[60] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)
    assert all(a > b for a, b in itertools.pairwise(factors[20:]))
    assert one_cycle(500, 100) == pytest.approx(0.0)
    assert one_cycle(0, 1) == 1.0


def test_accuracy_by_hand() -> None:
    images = torch.zeros(5, 1, 2, 2, dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 0, 1])
    data = Images(
        train_images=images,
        train_labels=labels,
        test_images=images,
        test_labels=labels,
        classes=3,
        mean=(0.0,),
        std=(1.0,),
    )

    def always_zero(inputs: Tensor) -> Tensor:
        return torch.tensor([1.0, 0.0, 0.0]).expand(len(inputs), 3)

    assert accuracy(always_zero, data, batch=2) == pytest.approx(0.4)


def test_bits_of_a_uniform_guess_are_the_logarithm_of_the_alphabet() -> None:
    data = text(context=16)

    def uniform(inputs: Tensor) -> Tensor:
        return torch.zeros(*inputs.shape, len(data.characters))

    assert bits_per_character(uniform, data, batch=1000) == pytest.approx(math.log2(len(data.characters)))
    assert not find_job("text-gpt").higher_is_better
    assert find_job("digits").higher_is_better
