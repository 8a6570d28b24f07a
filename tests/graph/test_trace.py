"""The data flow of a forward pass, found with stand-ins or in a run."""

from __future__ import annotations

import collections.abc
import copy
import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import torchboost.graph.copies
from tests.support.conv_nets import Basic, ForeignNames, RefusesTracing, vgg
from torchboost.core.containers import tensors_in
from torchboost.graph.copies import ReachesOriginal, twin, undisturbed
from torchboost.graph.flow import Dataflow, FlowBuilder
from torchboost.graph.ranks import rank_of
from torchboost.graph.trace import (
    evaluate,
    record_run,
    record_symbols,
    runnable,
    shared_traces,
    trace,
    trace_symbolically,
)


class Branching(ForeignNames):
    """Data-dependent Python: a symbolic trace fails, a run does not."""

    def forward(self, x):
        return super().forward(x) if x.abs().sum() > 0 else super().forward(-x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.a(x)
        y.relu_()
        y += self.b(x)
        return y.mul_(2)


def traced_run(model: nn.Module, sample: object) -> Dataflow:
    with undisturbed(model) as copied:
        return record_run(copied, model, sample)


def edges(flow):
    """Which module reaches which, by way of anything that is no module."""
    found = set()
    for node in flow.nodes:
        if node.module is not None:
            waiting = list(node.inputs)
            while waiting:
                source = flow.nodes[waiting.pop()]
                if source.module is not None:
                    found.add((source.label, node.label))
                else:
                    waiting += source.inputs
    return found


def test_symbolic_trace_and_run_find_the_same():
    for model in (ForeignNames(), vgg(), Basic(3, 4, 2), InPlace()):
        symbolic, run = trace_symbolically(model), traced_run(model, torch.randn(2, 3, 16, 16))
        assert edges(symbolic) == edges(run)
        assert [n.kind for n in symbolic.nodes].count("add") == [n.kind for n in run.nodes].count("add")
        assert [n.label for n in symbolic.nodes if n.module] == [n.label for n in run.nodes if n.module]


def test_a_run_sees_assignment_into_a_tensor():
    class Assigns(InPlace):
        def forward(self, x):
            y = self.a(x)
            y[:, :1] = self.b(x)[:, :1]
            return y

    flow = trace(Assigns())
    assert flow.traced == "run"
    last = flow.nodes[flow.nodes[-1].inputs[0]]
    assert (last.label, len(last.inputs)) == ("__setitem__", 2)


def test_says_how_it_was_found():
    for model, traced in [(ForeignNames, "fx"), (Branching, "run"), (RefusesTracing, "structure")]:
        assert trace(model()).traced == traced


def test_a_sample_opens_what_a_guess_does_not():
    flow = trace(RefusesTracing(), sample=(torch.randn(2, 3, 8, 8), torch.tensor(1.0)))
    assert flow.traced == "run"
    assert sum(node.kind == "add" for node in flow.nodes) == 3
    sample = {"images": torch.randn(2, 3, 8, 8), "scale": torch.tensor(1.0)}
    assert trace(RefusesTracing(), sample=sample).traced == "run"


def test_a_sample_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not run on the sample"):
        trace(Branching(), sample=torch.randn(2, 5, 8, 8))
    with pytest.raises(ValueError, match="does not run on the sample"):
        runnable(ForeignNames(), torch.randn(2, 5, 8, 8))


def test_a_lazy_module_must_have_run():
    model = nn.Sequential(nn.LazyConv2d(3, 1), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match=r"'0\.weight'.*run the model on one batch"):
        trace(model)
    model(torch.randn(2, 3, 4, 4))
    assert trace(model).traced == "fx"


def test_looks_into_a_network_that_returns_its_loss():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.loss = Branching(), nn.CrossEntropyLoss()

        def forward(self, *inputs):
            return self.loss(self.inner(*inputs[:-1]), inputs[-1])

    assert trace(WithLoss()).traced == "run"
    assert runnable(WithLoss()) is not None


def test_an_optional_argument_counts_as_left_out():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x, extra=None):
            return self.a(x) if extra is None else self.b(self.a(x) + extra)

    flow = trace(Optional())
    assert flow.traced == "fx"
    assert [n.label for n in flow.nodes if n.module] == ["a"]


def test_sizes_are_no_data():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y).view(y.size(0), y.shape[1], -1)

    model = Flat()
    flow = trace(model)
    (conv,), (norm,) = flow.calls(model.conv), flow.calls(model.norm)
    assert flow.consumers[conv] == (norm,)


def test_outputs_count_as_use():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return {"features": y, "out": [self.norm(y)]}

    for flow in (trace_symbolically(Both()), traced_run(Both(), torch.randn(2, 3, 4, 4))):
        conv = next(n.index for n in flow.nodes if n.label == "conv")
        assert sorted(flow.nodes[i].kind for i in flow.consumers[conv]) == ["module", "output"]


def test_a_run_disturbs_nothing():
    class Touchy(Branching):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            self.calls += 1
            self.relu.running_mean = self.relu.running_mean + 1
            return super().forward(self.drop(x) + torch.rand(()))

    model = Touchy()
    model.conv1.eval()
    before, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    random, buffer = torch.get_rng_state(), model.relu.running_mean
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert trace(model).traced == "run"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert model.relu.running_mean is buffer
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0


def test_a_failing_run_is_cleaned_up_too():
    model = RefusesTracing().train()
    with pytest.raises(TypeError), undisturbed(model) as copied:
        copied(torch.randn(2, 3, 8, 8))
    assert all(m.training for m in model.modules())
    trace(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_evaluate_returns_every_tensor():
    class Many(nn.Module):
        def forward(self, x):
            return {"a": x, "b": (x + 1, [x + 2, None])}

    assert [float(t) for t in evaluate(Many(), torch.zeros(1))] == [0, 1, 2]


def test_evaluate_computes_in_full_precision_and_leaves_the_switches():
    model, x = nn.Linear(64, 64), torch.randn(64, 64)
    expected = model.double()(x.double())
    before = (torch.backends.cudnn.conv.fp32_precision, torch.get_float32_matmul_precision())
    with torch.autocast("cpu", torch.bfloat16):
        (got,) = evaluate(model.float(), x)
        assert torch.is_autocast_enabled("cpu")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert (torch.backends.cudnn.conv.fp32_precision, torch.get_float32_matmul_precision()) == before


def test_guesses_an_input_from_the_first_layer():
    for layer, shape in [
        (nn.Conv1d(5, 4, 3), 3),
        (nn.Conv2d(5, 4, 3), 4),
        (nn.Conv3d(5, 4, 3), 5),
        (nn.Linear(5, 4), 2),
    ]:
        found = runnable(nn.Sequential(layer))
        assert found is not None
        assert found[1].ndim == shape
        assert found[1].shape[1] == 5


def test_guesses_several_sizes():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 28 * 28, 3))
    found = runnable(model)
    assert found is not None
    assert found[1].shape == (2, 1, 28, 28)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
def test_compiled_parts_are_run_eagerly():
    model = Branching()
    model.main.compile(backend="eager")
    with torch.no_grad():
        assert trace(model).traced == "run"
    assert F.relu(model(torch.randn(2, 3, 8, 8))).shape == (2, 4)


class Told(nn.Sequential):
    """Notes every pass, those of copies too."""

    passes: ClassVar[list[str]] = []

    def forward(self, x):
        self.passes.append("pass")
        return super().forward(x)


def test_a_block_traces_a_model_once_and_again_when_a_module_is_another(monkeypatch):
    monkeypatch.setattr(Told, "passes", [])
    model = Told(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    with shared_traces():
        first = trace(model)
        with shared_traces():
            assert trace(model) is first
        assert trace(model) is first
        assert len(Told.passes) == 1
        model[1] = nn.Identity()
        second = trace(model)
        assert [type(node.module) for node in second.nodes] == [type(None), nn.Conv2d, nn.Identity, type(None)]
        assert trace(model, sample=torch.ones(1, 3, 8, 8)) is not second
        assert trace(copy.deepcopy(model)) is not second
    assert trace(model) is not second


def test_a_block_keeps_no_error_and_nothing_after_an_error():
    model = nn.Sequential(nn.LazyLinear(2))
    with shared_traces():
        with pytest.raises(ValueError, match="on one batch"):
            trace(model)
        model(torch.ones(1, 3))
        first = trace(model)
    with pytest.raises(KeyError), shared_traces():
        raise KeyError
    assert trace(model) is not first


def both(model: nn.Module, x: torch.Tensor) -> tuple[Dataflow, Dataflow]:
    return record_symbols(twin(model), model), record_run(twin(model), model, x)


def test_nodes_say_what_was_running():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1)), nn.ReLU())
    for flow in both(model, torch.randn(2, 3, 4, 4)):
        assert [node.running for node in flow.nodes if node.module is not None] == [(model, model[0]), (model,)]


def test_hooks_become_operations_and_do_not_run():
    model, seen = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    model[1].register_forward_pre_hook(lambda *_: seen.append(1))
    for flow in both(model, torch.randn(2, 3, 4, 4)):
        assert [node.label for node in flow.nodes][1:-1] == ["0", "clone", "clone", "1"]
    assert seen == []
    assert len(model[0]._forward_hooks) == 1


def test_a_forward_on_an_instance_is_not_looked_into():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1)), nn.ReLU())
    held = model[1][0]
    model[1].forward = lambda x: held(x)
    for flow in both(model, torch.randn(2, 3, 4, 4)):
        assert [node.kind for node in flow.nodes][1:-1] == ["module", "other", "module"]
    model.forward = lambda x: held(x)
    with pytest.raises(ReachesOriginal, match="may call anything"):
        record_symbols(twin(model), model)


def test_decisions_are_given_from_outside():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.a(x) if x.sum() > 0 else self.b(x)

    model = Decides()
    for answer, label in ((True, "a"), (False, "b")):
        flow = record_symbols(twin(model), model, decide=lambda answer=answer: answer)
        assert [node.label for node in flow.nodes if node.module is not None] == [label]
    with pytest.raises(torch.fx.proxy.TraceError):
        record_symbols(twin(model), model)


def test_other_threads_run_their_models_meanwhile():
    inside, done, found = threading.Event(), threading.Event(), []

    class Waits(ForeignNames):
        def forward(self, x):
            inside.set()
            done.wait(30)
            return super().forward(x)

    def other() -> None:
        inside.wait(30)
        try:
            found.append(ForeignNames()(torch.randn(2, 3, 8, 8)).shape)
        finally:
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    model = Waits()
    record_symbols(twin(model), model)
    thread.join()
    assert found == [(2, 4)]


def test_tensors_come_in_order_and_a_container_inside_itself_counts_once():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    ring: list[object] = [b]
    ring.append(ring)
    deep: list[object] = [c]
    for _ in range(5000):
        deep = [deep]
    found = tensors_in({"x": a, "y": (ring, [a, [b]]), "z": deep})
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in (a, b, a, b, c)]


class Lazy(collections.abc.Mapping):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("not loaded")

    def __iter__(self) -> Any:
        return iter("a")

    def __len__(self) -> int:
        return 1


class Unbound:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")


def test_containers_and_proxies_that_raise_hold_no_tensors():
    kept = torch.ones(1)
    assert tensors_in([Lazy(), Unbound(), kept]) == [kept]


def test_branches_part_at_the_last_common_node():
    builder = FlowBuilder()
    x = builder.add("input", "x")
    stem = builder.add("other", "stem", [x])
    left = builder.add("other", "left", [stem])
    right = builder.add("other", "right", [stem])
    end = builder.add("other", "end", [right])
    join = builder.operation("add", [left, end], frozenset({"add"}))
    skip = builder.operation("add", [x, join], frozenset({"add"}))
    flow = builder.build("fx")
    assert flow.nodes[join].kind == "add"
    assert flow.branches(join) == (stem, (frozenset({left}), frozenset({right, end})))
    assert flow.branches(skip) == (x, (frozenset(), frozenset({stem, left, right, end, join})))
    assert flow.branches(left) is None
    assert flow.consumers[stem] == (left, right)


def test_no_branches_without_one_clean_fork():
    builder = FlowBuilder()
    a, b = builder.add("input", "a"), builder.add("input", "b")
    two_inputs = builder.add("add", "add", [a, b])
    left = builder.add("other", "left", [two_inputs])
    leak = builder.add("other", "leak", [left, a])
    late = builder.add("add", "add", [left, leak])
    shifted = builder.add("add", "add", [two_inputs, leak])
    flow = builder.build("fx")
    assert flow.branches(two_inputs) is None
    assert flow.branches(late) is None
    assert flow.branches(shifted) is None


def test_operations_with_one_activation_are_no_additions():
    builder = FlowBuilder()
    x = builder.add("input", "x")
    node = builder.operation("add", [x, x], frozenset({"add"}))
    only = builder.operation("add", [node], frozenset({"add"}))
    assert [n.kind for n in builder.build("fx").nodes][only] == "other"


def test_calls_and_instances():
    relu, builder = nn.ReLU(), FlowBuilder()
    x = builder.add("input", "x")
    first = builder.add("module", "relu", [x], relu)
    second = builder.add("module", "relu", [first], relu)
    flow = builder.build("run")
    assert flow.calls(relu) == [first, second]
    assert flow.calls(nn.ReLU()) == []
    assert [node.index for node in flow.instances(nn.ReLU)] == [first, second]


def ranks(model: nn.Module) -> list[int | None]:
    found: dict[fx.Node, int | None] = {}
    graph = fx.symbolic_trace(model).graph
    for node in graph.nodes:
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        found[node] = rank_of(node, module, found)
    return list(found.values())[1:-1]


class By(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.norm, self.function = nn.BatchNorm2d(3), function

    def forward(self, x):
        return self.function(self.norm(x))


def test_flattening_and_norms_of_images_settle_it():
    head = [nn.Flatten(), nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Dropout()]
    assert ranks(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), *head)) == [None, None, 2, 2, 2, 2, 2]
    assert ranks(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(0))) == [4, 4, 4, None]
    assert ranks(nn.Sequential(nn.BatchNorm3d(3), nn.Conv3d(3, 3, 1))) == [5, None]


def test_calls():
    for function, rank in [
        (lambda x: x.flatten(1), 2),
        (lambda x: torch.flatten(x, start_dim=1), 2),
        (lambda x: x.flatten(1, 2), None),
        (lambda x: x.flatten(), None),
        (lambda x: x.view(4, -1), 2),
        (lambda x: x.reshape((4, 2, -1)), 3),
        (lambda x: x.mean((2, 3)), 2),
        (lambda x: x.mean(dim=[2, 3], keepdim=True), 4),
        (lambda x: x.sum((2, 3), True), None),
        (lambda x: x.mean(), None),
        (lambda x: torch.relu(x) + 1, 4),
        (lambda x: x[0], None),
    ]:
        assert ranks(By(function))[-1] == rank


def test_a_trace_copies_no_parameters_unless_their_values_decide(monkeypatch):
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.layer(x) if self.scale > 0 else x

    seen = []
    original = torchboost.graph.copies.twin
    monkeypatch.setattr(
        torchboost.graph.copies, "twin", lambda model, **kw: seen.append(kw["numbers"]) or original(model, **kw)
    )
    assert trace(nn.Linear(2, 2)).traced == "fx"
    assert seen == [False]
    assert trace(Decides()).traced == "fx"
    assert seen == [False, False, True]
