"""Accumulation: any ragged split gives the gradient of the full batch, on one rank and on two."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import batch_for, mlp
from tests.support.ranks import run_ranks
from tests.support.trajectories import snapshot
from tests.support.wrapped import Kind, all_weights, wrap
from torchboost.algorithms.accumulation import Accumulation, Accumulator
from torchboost.core.algorithm import Target, attach_all
from torchboost.core.step import TrainStep
from torchboost.errors import IncompatibleError


def data(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return batch_for(mlp(), torch.Generator().manual_seed(seed), samples)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def double(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return mlp().double()


def full_batch(inputs: Tensor, labels: Tensor, model: nn.Module) -> Tensor:
    twin = copy.deepcopy(model)
    F.cross_entropy(twin(inputs), labels).backward()
    return gradients(twin)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=6), spare=st.integers(0, 2), summed=st.booleans())
def test_any_ragged_split_has_the_gradient_of_the_full_batch(counts: list[int], spare: int, summed: bool) -> None:
    model = double()
    inputs, labels = data(sum(counts))
    inputs = inputs.double()
    accumulator = Accumulator(len(counts) + spare, model)
    for x, y in zip(inputs.split(counts), labels.split(counts), strict=True):
        with accumulator.micro_step():
            loss = F.cross_entropy(model(x), y, reduction="sum" if summed else "mean")
            accumulator.share(loss, len(y), reduction="sum" if summed else "mean").backward()
    assert accumulator.ready == (spare == 0)
    assert accumulator.flush() == (spare > 0)
    assert distance(gradients(model), full_batch(inputs, labels, model)) < 1e-12


def test_what_equal_weights_get_wrong() -> None:
    model = double()
    inputs, labels = data(12)
    inputs = inputs.double()
    naive = Accumulator(2, model)
    for part in (slice(0, 10), slice(10, 12)):
        with naive.micro_step():
            naive.share(F.cross_entropy(model(inputs[part]), labels[part])).backward()
    assert distance(gradients(model), full_batch(inputs, labels, model)) > 0.1


def test_micro_batches_without_a_sample_count_nothing() -> None:
    model = double()
    inputs, labels = data(6)
    inputs = inputs.double()
    accumulator = Accumulator(2, model)
    for x, y in ((inputs, labels), (inputs[:0], labels[:0])):
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(x), y, reduction="sum"), len(y), reduction="sum").backward()
    assert distance(gradients(model), full_batch(inputs, labels, model)) < 1e-12


def test_equal_batches_give_the_bits_of_a_loop_by_hand() -> None:
    torch.manual_seed(0)
    ours = mlp()
    raw = copy.deepcopy(ours)
    target = Target(ours, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9))
    attached = attach_all(target, [Accumulation(steps=3)])
    step = TrainStep(target, lambda x, y: (F.cross_entropy(ours(x), y), len(y)), attached=attached)
    plain = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9)
    for i in range(9):
        x, y = data(4, seed=i)
        (F.cross_entropy(raw(x), y) / 3).backward()
        if i % 3 == 2:
            plain.step()
            plain.zero_grad()
        step(x, y)
        assert step.updated == (i % 3 == 2)
        assert snapshot(ours) == snapshot(raw)


def test_flush_averages_over_what_the_window_holds() -> None:
    torch.manual_seed(0)
    ours = mlp()
    raw = copy.deepcopy(ours)
    target = Target(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    attach_all(target, [Accumulation(steps=4)])
    step = TrainStep(target, lambda x, y: F.cross_entropy(ours(x), y))
    assert step.flush() is None
    for i in range(2):
        step(*data(4, seed=i))
    out = step.flush()
    assert out is not None
    assert step.updated
    assert step.flush() is None
    plain = torch.optim.SGD(raw.parameters(), lr=0.1)
    (sum(F.cross_entropy(raw(x), y) for x, y in (data(4, seed=i) for i in range(2))) / 2).backward()
    plain.step()
    for p, q in zip(ours.parameters(), raw.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stop", range(1, 12))
def test_resume_at_every_step_is_bit_identical(stop: int) -> None:
    def start(seed: int) -> tuple[nn.Module, TrainStep]:
        torch.manual_seed(seed)
        model = mlp()
        target = Target(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        attached = attach_all(target, [Accumulation(steps=3)])
        return model, TrainStep(target, lambda x, y: (F.cross_entropy(model(x), y), len(y)), attached=attached)

    batches = [data(3 + i % 3, seed=i) for i in range(12)]
    model, step = start(0)
    for batch in batches[:stop]:
        step(*batch)
    saved = copy.deepcopy((model.state_dict(), step.target.optimizer.state_dict(), step.state_dict()))
    again, resumed = start(1)
    again.load_state_dict(saved[0])
    resumed.target.optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    for batch in batches[stop:]:
        step(*batch)
        resumed(*batch)
    assert snapshot(model) == snapshot(again)


def test_a_scaler_advances_once_per_update() -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler)
    attach_all(target, [Accumulation(steps=3)])
    step = TrainStep(target, lambda x, y: F.cross_entropy(model(x), y))
    scales = [float(step(*data(4, seed=i)).loss_scale) for i in range(12)]
    assert scales == [16.0] * 5 + [32.0] * 6 + [64.0]


def test_an_exception_does_not_count() -> None:
    model = double()
    inputs, labels = data(6)
    inputs = inputs.double()
    accumulator = Accumulator(2, model)

    def fail() -> None:
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(inputs[:2]), labels[:2]), 2)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    for part in (slice(0, 2), slice(2, 6)):
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(inputs[part]), labels[part]), len(labels[part])).backward()
    assert accumulator.ready
    assert distance(gradients(model), full_batch(inputs, labels, model)) < 1e-12


def test_bad_input_is_refused() -> None:
    for steps in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match=f"steps: found {steps!r}"):
            Accumulator(steps, mlp())  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=f"steps: found {steps!r}"):
            Accumulation(steps=steps)  # pyright: ignore[reportArgumentType]
    accumulator, loss = Accumulator(3, mlp()), torch.ones(())
    for count in (-1, 0, float("nan")):
        with pytest.raises(ValueError, match=f"found {count}"):
            accumulator.share(loss, count)
    with pytest.raises(ValueError, match="'max'"):
        accumulator.share(loss, 1, reduction="max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="average a sum"):
        accumulator.share(loss, reduction="sum")
    with accumulator.micro_step():
        accumulator.share(loss, 4)
    with pytest.raises(ValueError, match="found none, but the window began with counts"):
        accumulator.share(loss)
    plain = Accumulator(3, mlp())
    with plain.micro_step():
        plain.share(loss)
    with pytest.raises(ValueError, match="found one, but the window began without"):
        plain.share(loss, 4)


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    model = mlp()
    accumulator = Accumulator(3, model)
    for seed in range(2):
        x, y = data(4, seed=seed)
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(x), y)).backward()
    state = accumulator.state_dict()
    with pytest.raises(ValueError, match="holds 2 micro-steps; a window of 2"):
        Accumulator(2, model).load_state_dict(state)
    with pytest.raises(ValueError, match="do not fit the parameters"):
        Accumulator(3, nn.Linear(2, 2)).load_state_dict(state)


def test_the_target_has_one_accumulator_and_gives_it_back() -> None:
    model = mlp()
    target = Target(model, torch.optim.SGD(model.parameters(), lr=0.1))
    attached = attach_all(target, [Accumulation(steps=2)])
    with pytest.raises(IncompatibleError, match="already"):
        attach_all(target, [Accumulation(steps=2)])
    attached.remove()
    assert target.accumulator is None


def _parts(rank: int, ragged: bool) -> list[int]:
    return ([3, 1], [2, 6])[rank] if ragged else [3, 3]


def _train(kind: Kind, how: str) -> list[float]:
    torch.manual_seed(0)
    model = mlp()
    wrapped = wrap(model, kind)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    accumulator = Accumulator(2 if how != "flush" else 3, wrapped)
    parts = [_parts(rank, how != "equal") for rank in range(2)]
    mine = parts[dist.get_rank()] if kind != "single" else parts[0] + parts[1]
    for update in range(2):
        inputs, labels = batch_for(model, torch.Generator().manual_seed(update), sum(parts[0] + parts[1]))
        if kind == "single":
            F.cross_entropy(model(inputs), labels).backward()
        else:
            offset = sum(parts[0]) * dist.get_rank()
            for count in mine:
                with accumulator.micro_step():
                    x, y = inputs[offset : offset + count], labels[offset : offset + count]
                    accumulator.share(F.cross_entropy(wrapped(x), y), None if how == "equal" else count).backward()
                offset += count
            assert accumulator.flush() == (how == "flush")
        optimizer.step()
        optimizer.zero_grad()
    return all_weights(wrapped)


def _train_all_on_ranks() -> dict[str, list[float]]:
    done = {f"{kind} {how}": _train(kind, how) for kind in ("ddp", "fsdp") for how in ("equal", "ragged")}
    done["ddp flush"] = _train("ddp", "flush")
    with pytest.raises(IncompatibleError, match=r"micro_step\(last=True\)"):
        _train("fsdp", "flush")
    return done


@pytest.mark.dist
def test_ranks_under_ddp_and_fsdp_train_like_one_full_batch() -> None:
    a, b = run_ranks(_train_all_on_ranks, 2)
    assert a == b
    for what, weights in a.items():
        torch.testing.assert_close(weights, _train("single", what.split()[1]), rtol=0, atol=1e-6)


def _count_reductions() -> list[int]:
    model = DistributedDataParallel(mlp())
    calls = []

    def counted(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, counted)
    accumulator = Accumulator(3, model)
    seen = []
    for seed in range(6):
        x, y = data(4, seed=seed)
        with accumulator.micro_step():
            accumulator.share(F.cross_entropy(model(x), y)).backward()
        seen.append(len(calls))
    with pytest.raises(IncompatibleError, match="static_graph"):
        Accumulator(2, DistributedDataParallel(mlp(), static_graph=True))
    return seen


@pytest.mark.dist
def test_nothing_is_reduced_inside_the_window() -> None:
    for seen in run_ranks(_count_reductions, 2):
        assert seen[:3] == [0, 0, 1]
        assert seen[3:] == [1, 1, 2]
