"""The fast path of the frozen prefix: the same training, from rows that were kept."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.conftest import ROOT
from tests.support.frozen_nets import (
    MAKERS,
    as_plain,
    freeze,
    frozen_cnn,
    frozen_mlp,
    gpt,
    inputs_for,
    prefix_runs,
    step,
)
from tests.support.models import mlp
from torchboost.algorithms.autocast import autocast_forward
from torchboost.algorithms.grad_freeze.prefix.activation_cache import ActivationCache
from torchboost.algorithms.grad_freeze.prefix.frozen_prefix import FastPrefix, fast_prefix
from torchboost.errors import IncompatibleError


@pytest.mark.parametrize("name", MAKERS)
def test_loss_and_gradients_are_those_of_the_plain_forward(name: str) -> None:
    make, _ = MAKERS[name]
    for dtype in (torch.float64, torch.float32):
        model = make().to(dtype)
        plain = copy.deepcopy(model)
        with fast_prefix(model) as fast:
            for seed in range(2):
                x, y = inputs_for(model, seed)
                x = x.to(dtype) if x.is_floating_point() else x
                (loss, gradients), (expected, wanted) = step(model, x, y), step(plain, x, y)
                assert torch.equal(loss, expected)
                for gradient, want in zip(gradients, wanted, strict=True):
                    assert gradient is want or torch.equal(gradient, want)
            assert fast.report().parameters > 0
            assert fast.report().note == ""
        for (key, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(value, other), key


def test_weights_tied_to_the_trained_head_leave_nothing_at_the_front() -> None:
    model = gpt(True)
    x, y = inputs_for(model)
    expected = step(copy.deepcopy(model), x, y)
    fast = fast_prefix(model)
    loss, gradients = step(model, x, y)
    assert torch.equal(loss, expected[0])
    assert all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(gradients, expected[1], strict=True)
    )
    assert fast.report().parameters == 0
    assert "no frozen part comes first" in str(fast)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("place", ["memory", "file"])
def test_cached_steps_are_bit_for_bit_those_without_the_cache(
    name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MAKERS[name][0]()
    plain = copy.deepcopy(model)
    cache = ActivationCache(2**22, path=tmp_path if place == "file" else None)
    x, y = inputs_for(model)
    ids = torch.randperm(10**6)[: len(x)]
    with fast_prefix(model, cache=cache) as fast, fast_prefix(plain):
        runs = prefix_runs(fast, monkeypatch)
        for _ in range(3):
            with fast.samples(ids):
                loss, gradients = step(model, x, y)
            expected, wanted = step(plain, x, y)
            assert torch.equal(loss, expected)
            for a, b in zip(gradients, wanted, strict=True):
                assert a is b or (a is not None and b is not None and torch.equal(a, b))
        count = len(x)
        assert runs == [count, (count + 1) // 2, *[count] * 3]  # ours once, checked on half; then only the plain one
        report = fast.report()
        assert (report.rows, report.bytes) == (count, cache.bytes)
        assert report.hit_rate == pytest.approx(2 / 3)
        assert f"{count:,} samples held" in str(fast)
    assert cache.rows == 0
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_partial_hits_run_the_missing_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen_mlp()
    x, _ = inputs_for(model)
    fast = fast_prefix(model, cache=ActivationCache(2**20))
    runs = prefix_runs(fast, monkeypatch)
    with fast.samples([5, 1, 9]):
        model(x[:3])
    with fast.samples([1, 7, 5, 8]):
        outputs = model(x[[1, 3, 0, 4]])
    torch.testing.assert_close(outputs, copy.deepcopy(model).eval()(x[[1, 3, 0, 4]]))
    with fast.samples([8, 7]):
        model(x[[4, 3]])
    assert runs == [3, 2, 2]
    model(x)
    assert runs[-1] == len(x)
    assert fast.report().rows == 5


def test_a_budget_smaller_than_the_data_keeps_what_fits() -> None:
    model = frozen_mlp()
    x, _ = inputs_for(model)
    cache = ActivationCache(3 * 64)
    fast = fast_prefix(model, cache=cache)
    for _ in range(2):
        for start in (0, 2, 4):
            with fast.samples(range(start, start + 2)):
                outputs = model(x[start : start + 2])
            torch.testing.assert_close(outputs, copy.deepcopy(model).eval()(x[start : start + 2]))
    assert (cache.rows, cache.full, cache.bytes) == (3, True, 192)
    assert fast.report().hit_rate == 0.25


def test_a_full_disk_in_mid_run_leaves_training_on(tmp_path: Path) -> None:
    code = f"""
import resource, warnings, torch
from torch import nn
from torchboost.algorithms.grad_freeze.prefix.activation_cache import ActivationCache
from torchboost.algorithms.grad_freeze.prefix.frozen_prefix import fast_prefix
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
model = nn.Sequential(nn.Linear(4, 2**13), nn.ReLU(), nn.Linear(2**13, 2))
model[0].requires_grad_(False)
fast = fast_prefix(model, cache=ActivationCache(2**24, path={str(tmp_path)!r}))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for epoch in range(2):
        with fast.samples(range(64)):
            model(torch.randn(64, 4)).sum().backward()
assert [w.category.__name__ for w in caught] == ["CacheSpaceWarning"], caught
assert fast.report().rows == 0 and fast.report().hit_rate == 0, fast
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def with_cache(model: nn.Module, ids: Any = range(8)) -> tuple[FastPrefix, Callable[[], Tensor]]:
    fast = fast_prefix(model, cache=ActivationCache(2**22))
    x, _ = inputs_for(model)

    def run() -> Tensor:
        with fast.samples(ids):
            return model(x.to(next(model.parameters()).dtype))

    run()
    assert fast.report().rows == len(x)
    return fast, run


def load(model: nn.Sequential) -> None:
    model.load_state_dict({name: value.clone() * 1.5 for name, value in model.state_dict().items()})


def assign(model: nn.Sequential) -> None:
    state = {name: value.clone() * 1.5 for name, value in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    model.load_state_dict(state, assign=True)
    for p, flag in zip(model.parameters(), flags, strict=True):
        p.requires_grad_(flag)


def thaw(model: nn.Sequential) -> None:
    model[4].requires_grad_()


def thaw_norm(model: nn.Sequential) -> None:
    model[5].train()


def move_statistics(model: nn.Sequential) -> None:
    model[1].running_mean.add_(1)


def double(model: nn.Sequential) -> None:
    model.double()


@pytest.mark.parametrize("change", [load, assign, thaw, thaw_norm, move_statistics, double])
def test_a_change_of_the_prefix_is_noticed_without_being_told(change: Any) -> None:
    model = frozen_cnn()
    _, run = with_cache(model)
    change(model)
    expected = as_plain(model)
    for _ in range(2):
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-5)


class Surgical(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", torch.zeros(1, 3, 1, 1))
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).requires_grad_(False)
        self.body, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.stem(x - self.mean))).mean((2, 3)))


def new_stem(model: Any) -> None:
    model.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).requires_grad_(False)


def assign_state(model: Any) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    model.stem.requires_grad_(False)


def new_weight(model: Any) -> None:
    model.stem[0].weight.data = model.stem[0].weight.data + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "head", nn.Linear(8, 4)),
        lambda model: model.stem.__setitem__(1, nn.GELU()),
        new_stem,
        lambda model: setattr(model, "mean", torch.ones(1, 3, 1, 1)),
        lambda model: model.mean.fill_(1.0),
        assign_state,
        new_weight,
        lambda model: model.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        lambda model: model.stem.register_forward_hook(lambda module, args, output: output * 2),
        lambda model: setattr(model.body, "forward", lambda y: F.conv2d(y, model.body.weight) * 3),
        lambda model: setattr(model.stem[0], "stride", (2, 2)),
        lambda model: model.stem.append(nn.Tanh()),
    ],
)
@pytest.mark.parametrize("cached", [True, False])
def test_surgery_in_mid_run_is_noticed(change: Any, cached: bool) -> None:
    model, x = Surgical(), torch.randn(8, 3, 12, 12)
    fast = fast_prefix(model, cache=ActivationCache(2**22) if cached else None)

    def run() -> Tensor:
        with fast.samples(range(8)):
            return model(x)

    run(), run()
    change(model)
    outputs = [run(), run()]
    outputs[-1].sum().backward()
    reached = [p.grad is not None for p in model.parameters()]
    model.zero_grad()
    fast.remove()
    expected = model(x)
    expected.sum().backward()
    for output in outputs:
        torch.testing.assert_close(output, expected)
    assert reached == [p.grad is not None for p in model.parameters()]


def test_weights_written_through_data_count_after_update() -> None:
    model, x = Surgical(), torch.randn(8, 3, 12, 12)
    fast = fast_prefix(model, cache=ActivationCache(2**22))
    for _ in range(2):
        with fast.samples(range(8)):
            model(x)
    model.stem[0].weight.data.add_(1)
    fast.update()
    with fast.samples(range(8)):
        outputs = model(x)
    fast.remove()
    torch.testing.assert_close(outputs, model(x))


def test_rows_stay_where_only_the_trained_part_changes() -> None:
    model = frozen_cnn()
    fast, run = with_cache(model)
    with torch.no_grad():
        model[9].weight.mul_(2)
    model[9].bias.requires_grad_(False)
    torch.testing.assert_close(run(), as_plain(model), rtol=1e-4, atol=1e-5)
    assert fast.report().hit_rate == 0.5
    freeze(model[9])
    run()
    assert fast.report().rows == 8


def test_hooks_put_on_later_fire() -> None:
    model = frozen_mlp()
    _, run = with_cache(model)
    seen: list[int] = []
    with model[0].register_forward_hook(lambda *_: seen.append(1)):
        run()
        run()
    assert seen == [1, 1]


def test_eval_mode_and_inputs_with_gradients_run_the_plain_forward() -> None:
    model = frozen_cnn()
    plain = copy.deepcopy(model)
    fast = fast_prefix(model)
    x, _ = inputs_for(model)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    model.train()
    freeze(model[:7])
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert "an input requires gradients" in str(fast)


def test_autocast_around_beneath_and_above() -> None:
    model = frozen_cnn()
    with torch.autocast("cpu", torch.bfloat16):
        expected = as_plain(model)
    for first in (True, False):
        effect = autocast_forward(model) if first else None
        fast, run = with_cache(model)
        effect = effect or autocast_forward(model)
        for _ in range(2):
            outputs = run()
            assert outputs.dtype is torch.float32
            torch.testing.assert_close(outputs, expected.float(), rtol=0.05, atol=0.05)
        rows = fast.report().rows
        effect.remove()
        run()
        assert (rows, fast.report().rows, fast.report().hit_rate) == (8, 8, 0.0)  # float32 again: rows were cleared
        fast.remove()
        assert "forward" not in vars(model)


class AddsInPlace(nn.Module):
    """A trained block adds to what the frozen layer gave, and a skip connection holds the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.body = nn.Linear(4, 4), nn.Linear(4, 4)
        self.stem.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        skip = h = self.stem(x)
        h += self.body(torch.tanh(h))
        return h + skip


@pytest.mark.parametrize("cached", [True, False])
def test_writing_to_what_the_prefix_gave_changes_no_row(cached: bool) -> None:
    model = AddsInPlace()
    x = torch.randn(6, 4)
    wanted = model(x).detach()
    with fast_prefix(model, cache=ActivationCache(2**20) if cached else None) as fast:
        for batch in ([0, 1, 2, 3], [0, 1, 2, 3], [2, 3, 4, 5], [5, 0]):
            with fast.samples(batch):
                torch.testing.assert_close(model(x[batch]), wanted[batch])
        assert fast.report().parameters > 0
        assert fast.report().rows == (6 if cached else 0)


def test_dropout_in_the_trained_part_draws_the_same_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
    freeze(model[0])
    plain = copy.deepcopy(model)
    x = torch.randn(6, 8)
    fast = fast_prefix(model, cache=ActivationCache(2**20))
    for _ in range(3):
        torch.manual_seed(3)
        with fast.samples(range(6)):
            outputs = model(x)
        torch.manual_seed(3)
        assert torch.equal(outputs, plain(x))


def test_a_deep_copy_is_an_ordinary_model() -> None:
    model = frozen_cnn()
    fast, run = with_cache(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    x, _ = inputs_for(model)
    outputs = twin(x)
    freeze(twin[:7])
    assert torch.equal(outputs, twin(x))
    assert outputs.abs().sum() > 0
    fast.remove()
    assert torch.equal(run(), torch.zeros(8, 4))


def test_removal_leaves_no_trace() -> None:
    model = frozen_cnn()
    before, modules = dict(vars(model)), list(model.modules())
    state = copy.deepcopy(model.state_dict())
    fast, _ = with_cache(model)
    fast.remove()
    fast.remove()
    assert vars(model) == before
    assert list(model.modules()) == modules
    assert all(torch.equal(value, state[name]) for name, value in model[:7].state_dict().items())
    assert fast.report().rows == 0
    assert "removed" in str(fast)


class Reads(nn.Module):
    """A frozen layer whose border is a sum over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0, more: Any = None) -> Tensor:
        h = self.a(x)
        return self.b(h - h.sum(0)) * scale


def test_a_border_that_mixes_samples_is_not_cached_and_says_so() -> None:
    model = Reads()
    fast = fast_prefix(model, cache=ActivationCache(2**20))
    x = torch.randn(4, 4)
    for _ in range(2):
        with fast.samples(range(4)):
            assert torch.equal(model(x), copy.deepcopy(model).eval()(x))
    assert fast.report().rows == 0
    assert "nothing is cached: 'sub' at its border depends on what else is in the batch" in str(fast)


def test_other_arguments_get_halves_of_their_own_and_odd_ones_the_plain_forward() -> None:
    model = Reads()
    fast = fast_prefix(model)
    x = torch.randn(4, 4)
    plain = copy.deepcopy(model).eval()
    for kwargs in ({}, {"scale": 2.0}, {}, {"scale": 3.0}):
        assert torch.equal(model(x, **kwargs), plain(x, **kwargs))
        assert fast.report().note == ""
    assert torch.equal(model(x, more=object()), plain(x))
    assert "neither a tensor nor a plain value" in str(fast)


def test_ids_must_match_the_batch_and_name_one_forward() -> None:
    model = frozen_mlp()
    fast = fast_prefix(model, cache=ActivationCache(2**20))
    x, _ = inputs_for(model)
    with pytest.raises(ValueError, match="found 3 ids"), fast.samples(range(3)):
        model(x)
    with pytest.raises(ValueError, match="sample ids: found -1"), fast.samples([-1]):
        model(x)
    with fast.samples(range(len(x))):
        model(x)
        model(x + 1)
    with fast.samples(range(len(x))):
        pass
    model(x)
    assert (fast.report().hit_rate, fast.report().rows) == (0.0, len(x))


def test_what_cannot_work_is_refused_before_anything_changed() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(IncompatibleError, match="freezing itself does not need it"):
        fast_prefix(Branches())
    compiled = mlp()
    compiled.compile(backend="eager")
    for model in (compiled, nn.DataParallel(mlp())):
        with pytest.raises(IncompatibleError, match="bare, uncompiled model"):
            fast_prefix(model)
    patched = mlp()
    patched.forward = lambda x: x
    with pytest.raises(IncompatibleError, match="replaced on the instance"):
        fast_prefix(patched)
    cache = ActivationCache(2**10)
    cache.store([1], (torch.ones(1, 2),))
    with pytest.raises(ValueError, match="found 1 rows already"):
        fast_prefix(mlp(), cache=cache)
    assert "forward" not in vars(compiled)


def test_a_model_compiled_later_runs_as_it_is() -> None:
    torch.compiler.reset()
    model = frozen_mlp()
    x, _ = inputs_for(model)
    expected = model(x)
    fast_prefix(model)
    model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
