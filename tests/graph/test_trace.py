"""The data flow of a forward pass, found with stand-ins or in a run."""

from __future__ import annotations

import collections.abc
import copy
import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.conv_nets import Basic, ForeignNames, RefusesTracing, vgg
from torchboost.core.forward import tensors_in
from torchboost.graph.copies import ReachesOriginal, undisturbed
from torchboost.graph.flow import Dataflow
from torchboost.graph.trace import evaluate, first_run, record_run, shared_traces, trace, trace_paths


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


def both(model: nn.Module, x: torch.Tensor) -> tuple[Dataflow, Dataflow]:
    (symbolic,) = trace_paths(model, most=1) or ()
    return symbolic, record_run(model, x)


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
        symbolic, run = both(model, torch.randn(2, 3, 16, 16))
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


def ran(model: nn.Module, sample: Any = None) -> Any:
    """What was run, on which input, and what it returned."""
    return first_run(model, sample, lambda network, given: (network, given, evaluate(network, given)))


def test_a_sample_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not run on the sample"):
        trace(Branching(), sample=torch.randn(2, 5, 8, 8))
    with pytest.raises(ValueError, match="does not run on the sample"):
        ran(ForeignNames(), torch.randn(2, 5, 8, 8))


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
    assert ran(WithLoss()) is not None


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

    for flow in both(Both(), torch.randn(2, 3, 4, 4)):
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
        found = ran(nn.Sequential(layer))
        assert found is not None
        assert found[1].ndim == shape
        assert found[1].shape[1] == 5


def test_guesses_several_sizes():
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 28 * 28, 3))
    found = ran(model)
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
    model[1].forward = lambda x: x * 2
    for flow in both(model, torch.randn(2, 3, 4, 4)):
        assert [node.kind for node in flow.nodes][1:-1] == ["module", "other", "module"]
    model.forward = lambda x: x
    assert trace_paths(model) is None
    with pytest.raises(ReachesOriginal, match="may call anything"):
        record_run(model, torch.randn(2, 3, 4, 4))


def test_every_decision_is_followed_both_ways():
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            if x.ndim != 2:
                raise ValueError("not rows")
            return self.a(x) if x.sum() > 0 else self.b(x)

    flows = trace_paths(Decides())
    assert sorted(node.label for flow in flows for node in flow.nodes if node.module is not None) == ["a", "b"]
    for most in (1, 2):  # the second path ends in the error, and one is not followed
        assert trace_paths(Decides(), most=most) is None
    assert len(trace_paths(Decides(), most=3)) == 2


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
    assert trace_paths(model) is not None
    thread.join()
    assert found == [(2, 4)]


def test_branches_part_at_the_last_common_node():
    flow = Dataflow("fx")
    x = flow.add("input", "x")
    stem = flow.add("other", "stem", [x])
    left, right = flow.add("other", "left", [stem]), flow.add("other", "right", [stem])
    end = flow.add("other", "end", [right])
    join = flow.add("other", "add", [left, end])
    skip = flow.add("other", "add", [x, join])
    leak = flow.add("add", "add", [left, flow.add("other", "leak", [left, x])])
    two_inputs = flow.add("add", "add", [flow.add("input", "y"), left])
    assert flow.nodes[join].kind == "add"
    assert flow.nodes[flow.add("other", "add", [join])].kind == "other"
    assert flow.branches(join) == (stem, (frozenset({left}), frozenset({right, end})))
    assert flow.branches(skip) == (x, (frozenset(), frozenset({stem, left, right, end, join})))
    assert flow.branches(left) is flow.branches(leak) is flow.branches(two_inputs) is None
    assert flow.consumers[stem] == (left, right)


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


def test_tensors_come_in_order_and_containers_that_raise_or_hold_themselves_do_no_harm():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    ring: list[object] = [b]
    ring.append(ring)
    deep: list[object] = [c]
    for _ in range(5000):
        deep = [deep]
    tensors = tensors_in({"x": a, "y": (ring, [a, [b]]), "z": [deep, Lazy(), Unbound()]})
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in (a, b, a, b, c)]


def test_a_trace_copies_no_values_of_parameters_and_if_they_decide_a_run_tells():
    class Decides(nn.Module):
        kinds: ClassVar[list[str]] = []

        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x):
            self.kinds.append(self.scale.device.type)
            return self.head(self.layer(x) if self.scale > 0 else x)

    assert trace(Decides()).traced == "run"
    assert Decides.kinds == ["meta", "cpu"]
