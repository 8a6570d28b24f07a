from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.ranks import run_ranks
from torchboost.tuning.report import Candidate
from torchboost.tuning.training import Training

STEPS = 12


class Loader:
    """Batches in an order that is drawn from the global generator, as by a shuffling loader."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(24, 3, 8, 8, generator=draw)
        self.targets = torch.randint(0, 4, (24,), generator=draw)
        self.orders: list[list[int]] = []

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        order = torch.randperm(24)
        self.orders.append(order.tolist())
        return iter([(self.inputs[part], self.targets[part]) for part in order.split(4)])


def make(seed: int) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = Loader()
    made.append((model, loader))

    def evaluate(model: Any) -> float:
        assert not model.training
        return float((model(loader.inputs).argmax(1) == loader.targets).float().mean())

    def schedule(optimizer: Any, steps: int) -> Any:
        lengths.append(steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    return model, optimizer, F.cross_entropy, loader, evaluate, schedule


made: list[Any] = []
lengths: list[int] = []


@pytest.fixture(autouse=True)
def nothing_made():
    made.clear()
    lengths.clear()


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def test_stock_is_the_plain_loop():
    run = Training(make=make, steps=STEPS, device=torch.device("cpu"))(Candidate(name="stock"), 3)
    model, _ = made[-1]
    torch.manual_seed(3)
    plain, optimizer, loss, loader, evaluate, schedule = make(3)
    scheduler, done = schedule(optimizer, STEPS), 0
    for epoch in range(2):
        torch.manual_seed(1_000_003 * 3 + epoch)
        for inputs, targets in loader:
            loss(plain(inputs), targets).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
    assert done == STEPS == run.steps
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(plain), strict=True))
    assert run.metric == evaluate(plain.eval())
    assert 0 < run.setup_seconds < run.wall_seconds
    assert 0 < run.seconds < run.wall_seconds


def test_a_candidate_gets_the_same_weights_and_batches_and_its_algorithms():
    training = Training(make=make, steps=STEPS, device=torch.device("cpu"))
    training(Candidate(name="stock"), 1)
    training(Candidate(name="memory", extra={"channels_last": True}, share=1.0), 1)
    (stock, first), (memory, second) = made
    assert first.orders == second.orders
    assert not stock[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert memory[0].weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(stock[0].weight, memory[0].weight, rtol=1e-3, atol=1e-4)


def test_fewer_steps_have_a_schedule_of_their_own():
    run = Training(make=make, steps=STEPS, device=torch.device("cpu"))(Candidate(name="stock, 50%", share=0.5), 0)
    assert run.steps == 6
    assert lengths == [6]


def test_the_random_generators_stay_where_they_were():
    torch.manual_seed(5)
    wanted = torch.get_rng_state()
    Training(make=make, steps=3, device=torch.device("cpu"))(Candidate(name="stock"), 0)
    assert torch.equal(torch.get_rng_state(), wanted)


def test_a_training_that_diverges_ends_early_with_nan():
    def wild(seed: int) -> Any:
        parts = make(seed)
        for group in parts[1].param_groups:
            group["lr"] = 1e30
        return parts[:5]

    steps: list[float] = []
    training = Training(
        make=wild, steps=500, device=torch.device("cpu"), told=lambda candidate, seed, share: steps.append(share)
    )
    run = training(Candidate(name="stock"), 0)
    assert math.isnan(run.metric)
    assert steps == [19 / 500]


def test_a_training_that_takes_too_long_is_stopped_after_the_step():
    run = Training(make=make, steps=500, device=torch.device("cpu"))(Candidate(name="stock"), 0, 0.0)
    assert run.too_slow
    assert math.isnan(run.metric)
    assert len(made[-1][1].orders) == 1
    assert not Training(make=make, steps=40, device=torch.device("cpu"))(Candidate(name="stock"), 0, 1e9).too_slow


def test_a_generator_of_batches_is_read_once_and_repeated():
    def generated(seed: int) -> Any:
        parts = make(seed)
        return (*parts[:3], (batch for batch in list(parts[3])), parts[4])

    run = Training(make=generated, steps=STEPS, device=torch.device("cpu"))(Candidate(name="stock"), 0)
    assert run.steps == STEPS
    assert math.isfinite(run.metric)


def _on_ranks() -> tuple[float, float, float]:
    import torch.distributed as dist

    def uneven(seed: int) -> Any:
        parts = make(seed)
        return (*parts[:4], lambda model: 0.25 + dist.get_rank())

    training = Training(make=uneven, steps=4, device=torch.device("cpu"))
    assert replace(training, steps=100)(Candidate(name="stock"), 0, 0.0 if dist.get_rank() else 1e-9).too_slow
    run = training(Candidate(name="stock"), 0)
    return run.metric, run.seconds, run.wall_seconds


@pytest.mark.dist
def test_ranks_agree_about_metric_and_times():
    first, second = run_ranks(_on_ranks, 2)
    assert first == second
    assert first[0] == 0.25


def test_an_error_of_a_candidate_is_part_of_its_run_and_that_of_stock_is_raised():
    def failing(seed: int) -> Any:
        parts = make(seed)

        def raises(*_: Any) -> None:
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("boom\nand more")

        parts[0][0].register_forward_pre_hook(raises)
        return parts

    training = Training(make=failing, steps=3, device=torch.device("cpu"))
    run = training(Candidate(name="bits", extra={"autocast": True}), 0)
    assert run.failure == "RuntimeError: boom"
    assert math.isnan(run.metric)
    assert training(Candidate(name="stock"), 0).failure == ""

    def broken(seed: int) -> Any:
        raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        Training(make=broken, steps=3, device=torch.device("cpu"))(Candidate(name="stock"), 0)


def test_a_batch_without_a_label_does_not_end_a_training():
    """Its loss is not a number and its gradient is 0, so plain torch trains through it."""

    def partly(seed: int) -> Any:
        parts = make(seed)
        parts[3].targets[:4] = -100
        batches = list(zip(parts[3].inputs.split(4), parts[3].targets.split(4), strict=True))
        return (*parts[:3], batches, lambda model: 0.5)

    run = Training(make=partly, steps=48, device=torch.device("cpu"))(Candidate(name="stock"), 0)
    assert run.metric == 0.5
    assert len(run.losses) == 2
    assert all(math.isfinite(loss) for loss in run.losses)


def two_shapes(seed: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    batches = [(torch.randn(rows, 4), torch.randint(0, 4, (rows,))) for rows in (8, 8, 8, 3)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, batches, lambda model: 0.5


def test_every_training_pays_for_its_compilation_and_no_step_does():
    """Else the first training pays for all, and a smaller last batch counts as slow steps."""
    compiled: list[Any] = []

    def slow(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        time.sleep(0.5)
        return graph.forward

    torch._dynamo.register_backend(slow, name="slow_for_a_test")  # pyright: ignore[reportArgumentType]
    training = Training(make=two_shapes, steps=40, device=torch.device("cpu"))
    candidate = Candidate(name="compile", extra={"compile": {"backend": "slow_for_a_test"}})
    runs = [training(candidate, seed, 0.45) for seed in range(2)]
    assert len(compiled) >= 4
    for run in runs:
        assert not run.too_slow
        assert run.setup_seconds > 1.0
        assert run.seconds < 0.45
