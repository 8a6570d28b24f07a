"""Autocast: half precision inside, float32 outside, in every kind of wrapped and compiled model, and no trace left."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.models import BottleneckNet, TinyGPT, batch_for, cnn, mlp
from tests.support.trajectories import identical, train
from torchboost import Target
from torchboost.algorithms import Autocast, autocast_forward
from torchboost.core import attach_all
from torchboost.core.torch_private import casts_keep_gradients
from torchboost.errors import IncompatibleError, NoEffectWarning
from torchboost.plan import Plan


class Net(nn.Module):
    """A root whose forward is the user's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if x.shape[1] != 8:
            raise LookupError("eight features")
        return self.body(x) * scale


def under_autocast(model: nn.Module, *inputs: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(*inputs).float()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def test_the_forward_is_that_of_an_autocast_block_with_float32_outputs() -> None:
    for make in [Net, cnn, BottleneckNet, TinyGPT]:
        model = make()
        inputs, _ = batch_for(model, torch.Generator().manual_seed(0))
        model.eval()
        plain, expected = model(inputs), under_autocast(model, inputs)
        with autocast_forward(model, float32=()):
            outputs = model(inputs)
            assert not torch.is_autocast_enabled("cpu")
        assert outputs.dtype is torch.float32
        assert torch.equal(outputs, expected)
        assert not torch.equal(outputs, plain)
        assert torch.equal(model(inputs), plain)


def test_training_equals_a_loop_with_an_autocast_block() -> None:
    model = cnn()
    plain = copy.deepcopy(model)
    optimizer = sgd(plain)

    def by_hand(inputs: Tensor, labels: Tensor) -> None:
        F.cross_entropy(under_autocast(plain, inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    expected = train(by_hand, 5, 3, model=plain)
    target = Target(model, sgd(model))
    with attach_all(target, [Autocast(float32=())]):
        assert identical(train(target, 5, 3), expected)


def test_each_weight_is_cast_once_per_forward() -> None:
    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cast = func is torch.ops.aten._to_copy.default and tuple(args[0].shape) == (8, 8)
            self.count += cast and kwargs.get("dtype") is torch.bfloat16
            return func(*args, **(kwargs or {}))

    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared)
    with autocast_forward(model, float32=()), Casts() as casts:
        model(torch.randn(3, 8))
        assert casts.count == (1 if casts_keep_gradients() else 3)
        before = casts.count
        model(torch.randn(3, 8))
        assert casts.count == 2 * before


class ConditionsItself(nn.Module):
    """Sees its own estimate, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            estimate = self.body(x).tanh()
        return self.body(x + estimate).tanh()


@pytest.mark.parametrize("kept", [True, False])
def test_a_part_that_ran_without_gradients_before_is_trained(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr("torchboost.algorithms.autocast.casts_keep_gradients", lambda: False)
    torch.manual_seed(0)
    model, x = ConditionsItself(), torch.randn(4, 8)
    plain = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    seen: list[bool] = []
    model.body.register_forward_hook(lambda *_: seen.append(torch.is_autocast_cache_enabled()))
    with autocast_forward(model, float32=()):
        found = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.05)
    assert kept or not any(seen)


def test_other_outputs_and_containers_stay() -> None:
    """``tests/algorithms/loss_scale_group/test_borders.py`` has containers of every kind, by the same function."""

    class Many(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            y = super().forward(input)
            assert y.dtype is torch.bfloat16
            return {"y": (y, [y.argmax(1)]), "word": "w", "none": None}

    model = Many(4, 4)
    with autocast_forward(model, float32=()):
        out = model(torch.randn(2, 4))
    assert (out["y"][0].dtype, out["y"][1][0].dtype) == (torch.float32, torch.int64)
    assert (out["word"], out["none"]) == ("w", None)


def test_an_exception_leaves_autocast_off_and_the_model_usable() -> None:
    model = Net()
    with autocast_forward(model):
        with pytest.raises(LookupError):
            model(torch.randn(3, 5))
        assert not torch.is_autocast_enabled("cpu")
        assert model(torch.randn(3, 8)).dtype is torch.float32


def test_nested_in_the_users_own_autocast_block() -> None:
    model, x = Net(), torch.randn(3, 8)
    expected = under_autocast(model, x)
    with autocast_forward(model, float32=()), torch.autocast("cpu", torch.float16):
        assert torch.equal(model(x), expected)
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_removal_leaves_no_trace() -> None:
    model = Net()
    before = dict(vars(model))
    effect = autocast_forward(model)
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    assert list(model.state_dict()) == list(Net().state_dict())
    effect.remove()
    effect.remove()
    assert vars(model) == before
    assert "forward" not in vars(model)


@pytest.mark.filterwarnings("ignore:torch.compile with fullgraph=True found no compiled frames")  # torch 2.12
def test_compiled_models_need_no_graph_break() -> None:
    # The first pass with gradients looks for the heads under a dispatch mode, in which torch compiles nothing.
    for order, how in itertools.product(
        ["attach, compile", "compile, attach", "compile, run, attach"],
        ["in place", "wrapped", "wrapped, inner attached"],
    ):
        deep = [(BottleneckNet, "eager")] if order == "attach, compile" else []
        for make, backend in [(Net, "aot_eager"), *deep]:
            torch.compiler.reset()
            model = make().eval()
            x, _ = batch_for(model, torch.Generator().manual_seed(0))
            plain, expected = model(x), under_autocast(model, x)
            if how == "wrapped, inner attached" or (how == "wrapped" and order == "attach, compile"):
                call = torch.compile(model, backend=backend, fullgraph=True)
                attach_to = model
            else:
                call = attach_to = torch.compile(model, backend=backend, fullgraph=True) if how == "wrapped" else model
            if how == "in place" and order != "attach, compile":
                model.compile(backend=backend, fullgraph=True)
            if order == "compile, run, attach":
                call(x)
            effect = autocast_forward(attach_to)
            if how == "in place" and order == "attach, compile":
                model.compile(backend=backend, fullgraph=True)
            outputs = call(x)
            assert outputs.dtype is torch.float32
            torch.testing.assert_close(outputs, expected, rtol=1e-2, atol=1e-2)
            assert not torch.equal(outputs, plain)
            assert not torch.is_autocast_enabled("cpu")
            effect.remove()
            torch.testing.assert_close(call(x), plain, rtol=1e-6, atol=1e-6)


class Mixes(nn.Module):
    """A forward that autocast itself cannot run: a float32 average takes the values of a product."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 5:
            raise IncompatibleError("five rows")
        y = self.linear(x)
        self.average.lerp_(y.detach().mean(0), 0.1)
        return self.head(y - self.average)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
def test_a_forward_that_fails_in_half_precision_says_what_runs_it_so() -> None:
    model = Mixes()
    attached = attach_all(Target(model, sgd(model)), [Autocast()])
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(torch.randn(3, 8))
    (note,) = caught.value.__notes__
    assert "under torch.autocast to torch.bfloat16" in note
    assert "extra.autocast = false" in note
    assert not torch.is_autocast_enabled("cpu")
    attached.remove()
    model(torch.randn(3, 8))


def test_errors_that_are_not_about_precision_stay_as_they_are() -> None:
    for model, x, kind in (
        (Mixes(), torch.randn(5, 8), IncompatibleError),
        (Net(), torch.randn(3, 7), LookupError),
        (mlp(), torch.randn(3, 7), RuntimeError),
        (mlp(), torch.randn(3, 8).tolist(), TypeError),
    ):
        with autocast_forward(model), pytest.raises(kind) as caught:
            model(x)
        assert not hasattr(caught.value, "__notes__")


def test_float16_without_a_scaler_is_refused_before_anything_changes() -> None:
    model = mlp()
    with pytest.raises(IncompatibleError, match=r"without a scaler.*GradScaler"):
        attach_all(Target(model, sgd(model)), [Autocast(dtype="float16")])
    assert "forward" not in vars(model)


def test_wrong_precisions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float64: allowed are torch\.bfloat16"):
        autocast_forward(mlp(), torch.float64)
    with pytest.raises(ValueError, match="'int8': allowed are 'bfloat16'"):
        Autocast(dtype="int8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"float32='head': allowed is a tuple"):
        Autocast(float32="head")  # pyright: ignore[reportArgumentType]


def test_a_model_in_half_precision_has_nothing_to_gain() -> None:
    model = mlp()
    assert Autocast().idle(model, sgd(model)) is None
    assert "float32" in (Autocast().idle(model.bfloat16(), sgd(model)) or "")


def test_fsdp2_that_casts_the_parameters_leaves_nothing_to_lower(one_rank: None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential(fully_shard(nn.Linear(2, 2), mp_policy=policy), nn.Linear(2, 1))
    assert Autocast().idle(model, sgd(model)) == "FSDP2 computes in bfloat16 itself, by its MixedPrecisionPolicy"
    with pytest.warns(NoEffectWarning, match="FSDP2 computes in bfloat16"):
        attach_all(Target(model, sgd(model)), [Autocast()])
    assert "forward" not in vars(model)
    whole = fully_shard(mlp())
    assert Autocast().idle(whole, sgd(whole)) is None


@pytest.mark.filterwarnings("ignore")
def test_the_output_record_of_transformers_survives_also_compiled() -> None:
    transformers = pytest.importorskip("transformers")
    torch.compiler.reset()
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.arange(8).reshape(1, 8)
    kind = type(model(tokens, labels=tokens))
    with autocast_forward(model):
        eager = model(tokens, labels=tokens)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens)
    for outputs in (eager, compiled):
        assert type(outputs) is kind
        assert outputs.logits.dtype is torch.float32
    assert eager.loss.dtype is torch.float32
    torch.testing.assert_close(compiled.logits, eager.logits, rtol=1e-2, atol=1e-2)


class Outputs(nn.Module):
    """A body of 16 features, on which heads compute."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 16))
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        found = {name: part(y) for name, part in self.named_children() if name != "body"}
        return found or y


def exact(model: nn.Module, x: Tensor) -> Any:
    """What the heads return in float32 on the features of the body in bfloat16."""
    y = under_autocast(model.body, x)  # pyright: ignore[reportArgumentType]
    return {name: part(y) for name, part in model.named_children() if name != "body"}


def with_large_logits() -> nn.Linear:
    head = nn.Linear(16, 3)
    nn.init.constant_(head.bias, 7.03)
    return head


def test_a_head_and_what_follows_it_compute_in_float32() -> None:
    for tail, compiled in itertools.product([nn.Sigmoid(), nn.Softmax(-1), nn.Identity()], [False, True]):
        torch.compiler.reset()
        model, x = (
            Outputs(policy=nn.Sequential(with_large_logits(), tail), value=nn.Linear(16, 1)),
            torch.randn(5, 8),
        )
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        known = Autocast().fitted(model, (x,), {})
        assert known == Autocast(float32=("policy.0", "value"))
        assert known.fitted(model, (x,), {}) is known
        with torch.no_grad():
            expected = exact(model, x)
            for found in (known, Autocast()):
                with attach_all(Target(model, sgd(model)), [found] if not compiled or found is known else [known]):
                    with torch.enable_grad():
                        call(x)
                    outputs = call(x)
                for name in expected:
                    torch.testing.assert_close(outputs[name], expected[name], rtol=1e-6, atol=1e-6)
        assert vars(model.policy[0]).keys() == vars(nn.Linear(1, 1)).keys()


def test_under_a_compiler_that_has_seen_no_pass_the_last_layer_counts_as_the_head() -> None:
    torch.compiler.reset()
    model, x = Outputs(policy=nn.Sequential(with_large_logits(), nn.Sigmoid())), torch.randn(5, 8)
    with torch.no_grad(), autocast_forward(model):
        outputs = torch.compile(model, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(outputs["policy"], exact(model, x)["policy"], rtol=1e-6, atol=1e-6)


def test_a_large_head_whose_results_are_returned_stays_in_half_precision() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 64)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(self.body(x))
            return F.cross_entropy(logits, y), logits

    model, x, y = Language(), torch.randn(5, 8), torch.arange(5)
    known = Autocast().fitted(model, (x,), {"y": y})
    assert known == Autocast(float32=(), float32_outputs=("head",))
    with attach_all(Target(model, sgd(model)), [known]):
        loss, logits = model(x, y)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.head(model.body(x)).float()
    assert torch.equal(logits, expected)
    assert torch.equal(loss, F.cross_entropy(expected, y))


def test_names_are_those_of_the_bare_model_and_must_exist() -> None:
    model = Outputs(policy=nn.Linear(16, 3))
    with pytest.raises(IncompatibleError, match=r"no module 'polici'.*Did you mean 'policy'"):
        attach_all(Target(model, sgd(model)), [Autocast(float32=("polici",))])
    with pytest.raises(ValueError, match="no module 'value'"):
        autocast_forward(model, float32=["value"])
    x = torch.randn(2, 8)
    with autocast_forward(torch.nn.DataParallel(model), float32=["body"]):
        assert torch.equal(model.body(x), copy.deepcopy(model).body(x))


def test_heads_that_a_copy_shows_are_used_from_the_first_pass_on() -> None:
    class Checkpointed(Outputs):
        def forward(self, x: Tensor) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return {"policy": checkpoint(self.policy, self.body(x), use_reentrant=False)}

    model = Checkpointed(policy=nn.Linear(16, 3), unused=nn.Linear(16, 3))  # the guess is wrong
    x, state = torch.randn(5, 8), torch.get_rng_state()
    near = exact(model, x)["policy"]
    with autocast_forward(model):
        for output in (model(x)["policy"], model(x)["policy"]):
            torch.testing.assert_close(output, near, rtol=1e-6, atol=1e-6)
            output.sum().backward()
    assert model.calls == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_the_pass_of_a_copy_does_not_change_the_inputs() -> None:
    class Notes(Outputs):
        def forward(self, x: Tensor, notes: list[str]) -> Any:
            notes.append("called")
            return super().forward(x)

    model, notes = Notes(policy=nn.Linear(16, 3)), list[str]()
    with autocast_forward(model):
        model(torch.randn(5, 8), notes)
    assert notes == ["called"]


NOTED = list[str]()


def test_the_pass_of_a_copy_notes_nothing_outside_of_the_model() -> None:
    class Notes(Outputs):
        def forward(self, x: Tensor) -> Any:
            NOTED.append("called")
            return super().forward(x)

    with autocast_forward(model := Notes(policy=nn.Linear(16, 3))):
        model(torch.randn(5, 8))
    assert NOTED == ["called"]


def test_the_last_layer_counts_as_the_head_of_what_cannot_be_copied_and_inside_a_checkpoint() -> None:
    model, x = Outputs(policy=nn.Linear(16, 3)), torch.randn(5, 8)
    model.never_called = nn.Linear(2, 2)  # the guess
    model.forward = types.MethodType(lambda self, x: {"policy": self.policy(self.body(x))}, model)
    with autocast_forward(model):
        expected = model.policy(under_autocast(model.body, x))  # pyright: ignore[reportArgumentType, reportCallIssue]
        torch.testing.assert_close(model(x)["policy"], expected, rtol=1e-6, atol=1e-6)
    with autocast_forward(model):
        output = checkpoint(model, x, use_reentrant=False)["policy"]  # pyright: ignore[reportOptionalSubscript]
        assert not torch.equal(output, expected)
        output.sum().backward()
        assert torch.equal(model(x)["policy"], output)
    model.stream = (number for number in range(3))
    with autocast_forward(model):
        assert torch.equal(model(x)["policy"], output)


def test_a_configuration_names_them() -> None:
    plan = Plan.of("O1", {"extra": {"autocast": {"float32": ["policy"]}}})
    assert Autocast(float32=("policy",)) in plan.algorithms


def test_a_head_that_the_user_put_into_half_precision_stays_there() -> None:
    model = Outputs(policy=nn.Linear(16, 3).bfloat16())
    with autocast_forward(model):
        assert model(torch.randn(2, 8))["policy"].dtype is torch.float32
