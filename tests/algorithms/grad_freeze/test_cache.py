"""The cache of the frozen part: the same training bit for bit, from rows that were kept, or the forward as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.frozen_nets import (
    MAKERS,
    Net,
    as_plain,
    freeze,
    frozen_cnn,
    frozen_mlp,
    gpt,
    inputs_for,
    named,
    step,
    with_rows,
)
from tests.support.models import mlp
from torchboost import IncompatibleError, NoEffectWarning
from torchboost.algorithms.autocast import autocast_forward
from torchboost.algorithms.grad_freeze.cache import FastPrefix


def test_wrapped_compiled_and_patched_models_are_refused() -> None:
    compiled = mlp()
    compiled.compile(backend="eager")
    for model in (compiled, nn.DataParallel(mlp())):
        with pytest.raises(IncompatibleError, match="bare, uncompiled model"):
            with_rows(model)
    patched = mlp()
    patched.forward = lambda x: x
    with pytest.raises(IncompatibleError, match="replaced on the instance"):
        with_rows(patched)
    assert "forward" not in vars(compiled)


@pytest.mark.parametrize("name", MAKERS)
def test_loss_and_gradients_are_those_of_the_plain_forward(name: str) -> None:
    for dtype in (torch.float64, torch.float32):
        model = MAKERS[name]().to(dtype)
        plain = copy.deepcopy(model)
        x, y = inputs_for(model)
        x = x.to(dtype) if x.is_floating_point() else x
        ids = torch.randperm(10**6)[: len(x)]
        with FastPrefix(model, 2**22) as fast:
            for _ in range(3):
                with fast.samples(ids):
                    loss, gradients = step(model, x, y)
                expected, others = step(plain, x, y)
                assert torch.equal(loss, expected)
                for ours, theirs in zip(gradients, others, strict=True):
                    assert ours is theirs or (ours is not None and theirs is not None and torch.equal(ours, theirs))
            report = fast.report()
            assert (report.rows, report.note) == (len(x), "")
            assert min(report.parameters, report.bytes) > 0
            assert report.hit_rate == pytest.approx(2 / 3)
            assert f"{len(x):,} samples held" in str(fast.report())
        for (key, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(value, other), key
        assert fast.report().rows == 0


def test_weights_tied_to_the_trained_head_leave_nothing_at_the_front() -> None:
    model = gpt(True)
    x, y = inputs_for(model)
    expected = step(copy.deepcopy(model), x, y)
    fast = with_rows(model)
    with fast.samples(range(len(x))):
        loss, gradients = step(model, x, y)
    assert torch.equal(loss, expected[0])
    for ours, theirs in zip(gradients, expected[1], strict=True):
        assert ours is theirs or (ours is not None and theirs is not None and torch.equal(ours, theirs))
    assert fast.report().parameters == 0
    assert "no frozen part comes first" in str(fast.report())


def runs_of(module: nn.Module) -> list[int]:
    """The numbers of samples for which a module of the prefix runs from now on."""
    runs: list[int] = []
    forward = type(module).forward

    class Counted(type(module)):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(len(x))
            return forward(self, x)

    module.__class__ = Counted
    return runs


def test_partial_hits_run_the_missing_rows_only() -> None:
    model = frozen_mlp()
    runs, (x, _) = runs_of(model[0]), inputs_for(model)
    fast = with_rows(model, 2**20)
    with fast.samples([5, 1, 9]):
        model(x[:3])
    runs.clear()
    with fast.samples([1, 7, 5, 8]):
        outputs = model(x[[1, 3, 0, 4]])
    with fast.samples([8, 7]):
        model(x[[4, 3]])
    assert runs == [2]
    torch.testing.assert_close(outputs, copy.deepcopy(model).eval()(x[[1, 3, 0, 4]]))
    assert fast.report().rows == 5
    model(x)  # without names, the forward as it is
    assert runs[-1] == len(x)
    assert fast.report().rows == 5


def test_a_budget_smaller_than_the_data_keeps_what_fits() -> None:
    model = frozen_mlp()
    x, _ = inputs_for(model)
    fast = with_rows(model, 3 * 64)
    for _ in range(2):
        for start in (0, 2, 4):
            with fast.samples(range(start, start + 2)):
                outputs = model(x[start : start + 2])
            torch.testing.assert_close(outputs, copy.deepcopy(model).eval()(x[start : start + 2]))
    assert (fast.report().rows, fast.report().bytes, fast.report().hit_rate) == (3, 192, 0.25)


def kept(model: nn.Module) -> tuple[FastPrefix, Callable[[], Tensor]]:
    fast = with_rows(model)
    x, _ = inputs_for(model)

    def run() -> Tensor:
        return named(fast, x.to(next(model.parameters()).dtype))

    run()
    assert fast.report().rows == len(x)
    return fast, run


def load(model: Any) -> None:
    model.load_state_dict({name: value.clone() * 1.5 for name, value in model.state_dict().items()})


def assign(model: Any) -> None:
    flags = [p.requires_grad for p in model.parameters()]
    model.load_state_dict({name: value.clone() * 1.5 for name, value in model.state_dict().items()}, assign=True)
    for p, flag in zip(model.parameters(), flags, strict=True):
        p.requires_grad_(flag)


def test_a_change_of_the_prefix_is_noticed_without_being_told() -> None:
    for change in (
        load,
        assign,
        lambda model: model[4].requires_grad_(),
        lambda model: model[5].train(),
        lambda model: model[1].running_mean.add_(1),
        lambda model: model.double(),
    ):
        model = frozen_cnn()
        _, run = kept(model)
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


def new_weight(model: Any) -> None:
    model.stem[0].weight.data = model.stem[0].weight.data + 1


SURGERY: list[Callable[[Any], Any]] = [
    lambda model: setattr(model, "head", nn.Linear(8, 4)),
    lambda model: model.stem.__setitem__(1, nn.GELU()),
    new_stem,
    lambda model: setattr(model, "mean", torch.ones(1, 3, 1, 1)),
    lambda model: model.mean.fill_(1.0),
    new_weight,
    lambda model: model.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    lambda model: model.stem.register_forward_hook(lambda module, args, output: output * 2),
    lambda model: setattr(model.body, "forward", lambda y: F.conv2d(y, model.body.weight) * 3),
    lambda model: setattr(model.stem[0], "stride", (2, 2)),
    lambda model: model.stem.append(nn.Tanh()),
]


def test_surgery_in_mid_run_is_noticed() -> None:
    for number, change in enumerate(SURGERY):
        model, x = Surgical(), torch.randn(8, 3, 12, 12)
        fast = with_rows(model)
        named(fast, x), named(fast, x)
        change(model)
        outputs = [named(fast, x), named(fast, x)]
        outputs[-1].sum().backward()
        reached = [p.grad is not None for p in model.parameters()]
        model.zero_grad()
        fast.remove()
        expected = model(x)
        expected.sum().backward()
        for output in outputs:
            torch.testing.assert_close(output, expected, msg=str(number))
        assert reached == [p.grad is not None for p in model.parameters()], number
    model, x = Surgical(), torch.randn(8, 3, 12, 12)
    fast = with_rows(model)
    named(fast, x), named(fast, x)
    model.stem[0].weight.data.add_(1)
    fast.update()  # a write through data counts from then on
    outputs = named(fast, x)
    fast.remove()
    torch.testing.assert_close(outputs, model(x))


def test_rows_stay_while_only_trained_weights_change() -> None:
    model = frozen_cnn()
    fast, run = kept(model)
    with torch.no_grad():
        model[9].weight.mul_(2)
    torch.testing.assert_close(run(), as_plain(model), rtol=1e-4, atol=1e-5)
    assert fast.report().hit_rate == 0.5


def test_eval_mode_and_inputs_with_gradients_run_the_plain_forward() -> None:
    model = frozen_cnn()
    twin = copy.deepcopy(model)
    fast = with_rows(model)
    x, _ = inputs_for(model)
    model.eval()
    assert torch.equal(named(fast, x), twin.eval()(x))
    model.train()
    freeze(model[:7])
    x.requires_grad_()
    named(fast, x).sum().backward()
    assert x.grad is not None
    assert "an input requires gradients" in str(fast.report())


def test_autocast_around_beneath_and_above() -> None:
    model = frozen_cnn()
    with torch.autocast("cpu", torch.bfloat16):
        expected = as_plain(model)
    for first in (True, False):
        effect = autocast_forward(model) if first else None
        fast, run = kept(model)
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


def test_a_deep_copy_and_a_compiled_model_run_as_they_are() -> None:
    model = frozen_cnn()
    fast, run = kept(model)
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
    torch.compiler.reset()
    other = frozen_mlp()
    x, _ = inputs_for(other)
    expected = other(x)
    fast = with_rows(other)
    named(fast, x)
    with fast.samples(range(len(x))):
        assert torch.equal(torch.compile(other, backend="eager")(x), expected)


def test_by_content_a_compiled_function_has_the_whole_model_in_one_graph() -> None:
    torch.compiler.reset()
    model = frozen_mlp()
    x, _ = inputs_for(model)
    expected = model(x)
    with FastPrefix(model, 2**20, by_content=True):
        for mode in (model.train, model.eval):
            mode()
            assert torch.equal(torch.compile(lambda x: model(x), backend="eager", fullgraph=True)(x), expected)


def test_removal_leaves_no_trace() -> None:
    model = frozen_cnn()
    before, modules = dict(vars(model)), list(model.modules())
    state = copy.deepcopy(model.state_dict())
    fast, _ = kept(model)
    fast.remove()
    fast.remove()
    assert vars(model) == before
    assert list(model.modules()) == modules
    assert all(torch.equal(value, state[name]) for name, value in model[:7].state_dict().items())
    assert fast.report().rows == 0
    assert "removed" in str(fast.report())


def test_other_lengths_and_precisions_are_not_mixed_with_the_rows() -> None:
    model, x = Net(lambda n, x: n.b(n.a(x))), torch.randn(3, 4)
    longer = torch.randn(3, 2, 4)
    expected = model(x), model(longer)
    fast = with_rows(model)
    for _ in range(2):
        assert torch.equal(named(fast, x), expected[0])
        assert torch.equal(named(fast, longer), expected[1])
    assert (fast.report().rows, fast.report().hit_rate) == (3, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert torch.equal(named(fast, x), model(x))
    assert (fast.report().rows, fast.report().hit_rate) == (3, 0.5)
    assert torch.equal(named(fast, x), expected[0])


def test_indices_may_be_the_border() -> None:
    model, x = Net(lambda n, x: n.places(n.a(x).argmax(1))), torch.randn(3, 4)
    model.places = nn.Embedding(4, 2)
    expected = model(x)
    fast = with_rows(model)
    for _ in range(2):
        assert torch.equal(named(fast, x), expected)
    assert fast.report().rows == 3


def test_arguments_that_are_no_positional_tensors_run_the_plain_forward() -> None:
    model, x = Net(lambda n, x, scale=1.0: n.b(n.a(x)) * scale), torch.randn(4, 4)
    fast = with_rows(model)
    expected = model(x)
    for args, kwargs in (((x, 2.0), {}), ((x,), {"scale": 2.0})):
        assert torch.equal(named(fast, *args, **kwargs), 2 * expected)
        assert "not a positional tensor" in fast.report().note
    for _ in range(2):
        assert torch.equal(named(fast, x), expected)
    assert (fast.report().note, fast.report().rows, fast.report().hit_rate) == ("", 4, 0.5)


def test_calls_with_more_or_fewer_tensors_run_the_plain_forward() -> None:
    def run(n: Net, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return n.b(n.a(x) if scale is None else n.a(x) * scale)

    x, scales = torch.randn(4, 4), torch.rand(4, 1)
    for first, second in (((x,), (x, scales)), ((x, scales), (x,)), ((x, scales), (x, torch.tensor(2.0)))):
        model = Net(run)
        expected = model(*first), model(*second)
        fast = with_rows(model)
        for _ in range(2):
            assert torch.equal(named(fast, *first), expected[0])
            assert torch.equal(named(fast, *second), expected[1])


def test_rows_come_back_as_copies_in_their_types_and_layout() -> None:
    def run(n: Net, x: Tensor) -> Tensor:
        image = (n.a(x)[:, :, None, None] + torch.ones(1, 4, 3, 3)).contiguous(memory_format=torch.channels_last)
        half, signs = n.a2(x).bfloat16(), n.a2(x) > 0
        return n.b(x) + image.relu_().mean((2, 3)) * signs + half.mul_(2)

    model, x = Net(run), torch.randn(5, 4)
    expected = model(x)
    fast = with_rows(model)
    for _ in range(3):
        assert torch.equal(named(fast, x), expected)
    assert fast.report().rows == 5
    layouts = [fast._halves.orders[at] for at, name in enumerate(fast._halves.names) if name == "contiguous"]
    assert layouts == [[0, 2, 3, 1]]


def test_ids_are_integers_that_match_the_batch_and_name_one_forward() -> None:
    model = frozen_mlp()
    fast = with_rows(model)
    x, _ = inputs_for(model)
    with pytest.raises(ValueError, match="found 3 ids"), fast.samples(range(3)):
        model(x)
    with fast.samples(range(len(x))):
        model(x)
        model(x + 1)
    with fast.samples([]):
        pass
    model(x)
    assert (fast.report().hit_rate, fast.report().rows) == (0.0, len(x))


def test_by_content_each_sample_gets_its_own_rows_in_any_order_and_batch() -> None:
    model = frozen_cnn()
    plain = copy.deepcopy(model)
    x, y = torch.randn(24, *inputs_for(model)[0].shape[1:]), torch.randint(0, 2, (24,))
    with FastPrefix(model, 2**24, by_content=True) as fast:
        for _ in range(3):
            for ids in torch.randperm(24).split(8):
                (loss, gradients), (expected, others) = step(model, x[ids], y[ids]), step(plain, x[ids], y[ids])
                assert torch.equal(loss, expected)
                assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True) if a is not None)
        assert (fast.report().rows, fast.report().note) == (24, "")
        assert fast.report().hit_rate == pytest.approx(2 / 3)
        with torch.no_grad():
            torch.testing.assert_close(model(x[[3, 3, 0]]), plain(x[[3, 3, 0]]))


def test_by_content_random_augmentation_is_computed_and_ends_the_cache_in_words() -> None:
    model = frozen_cnn()
    plain = copy.deepcopy(model)
    x, y = inputs_for(model)
    fast = FastPrefix(model, 2**13, by_content=True)

    def augmented() -> None:
        for _ in range(40):
            changed = x + torch.randn_like(x)
            assert torch.equal(step(model, changed, y)[0], step(plain, changed, y)[0])

    with pytest.warns(NoEffectWarning, match="hardly one came again. Leave random augmentation out"):
        augmented()
    assert fast.report().rows == 0
    assert "off" in str(fast.report())


def test_by_content_dropout_in_the_frozen_part_is_named_and_drawn_as_without_the_cache() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    freeze(model[0], model[2])
    plain, x, y = copy.deepcopy(model), torch.randn(6, 4), torch.randint(0, 2, (6,))
    with FastPrefix(model, 2**20, by_content=True) as fast:
        for seed in range(3):
            torch.manual_seed(seed)
            if seed == 0:
                with pytest.warns(NoEffectWarning, match="'1' draws random numbers.*72 frozen weights behind it"):
                    loss, _ = step(model, x, y)
            else:
                loss, _ = step(model, x, y)
            torch.manual_seed(seed)
            assert torch.equal(loss, step(plain, x, y)[0])
        assert fast.report().parameters == 40


def test_by_content_a_forward_that_cannot_be_cut_trains_on_with_a_sentence() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.front(x) if x.sum() > 0 else x)

    model, x = Branching(), torch.ones(2, 4)
    with FastPrefix(model, 2**20, by_content=True) as fast:
        with pytest.warns(NoEffectWarning, match="torch.fx cannot trace it"):
            model(x)
        assert torch.equal(model(x), copy.deepcopy(model)(x))
        assert "cannot be split" in fast.report().note


def test_bfloat16_rows_take_half_the_memory_and_round_alike_whether_cached_or_not() -> None:
    model, exact = frozen_cnn(), 0
    x, y = inputs_for(model)
    expected, _ = step(copy.deepcopy(model), x, y)
    for dtype in (None, torch.bfloat16):
        with FastPrefix(model, 2**24, by_content=True, dtype=dtype) as fast:
            first, again = step(model, x, y)[0], step(model, x, y)[0]
            assert torch.equal(first, again)
            assert first.dtype is torch.float32
            torch.testing.assert_close(first, expected, rtol=2e-2 if dtype else 0, atol=0)
            exact = exact or 2 * fast.report().bytes
            assert fast.report().bytes == (exact // 4 if dtype else exact // 2)
