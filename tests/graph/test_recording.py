"""Both recorders see what runs inside what, and touch neither the model nor torch."""

from __future__ import annotations

import collections.abc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.conv_nets import ForeignNames
from torchboost.graph.flow import Dataflow
from torchboost.graph.recording import record_run, record_symbols, tensors_in
from torchboost.graph.twin import twin
from torchboost.graph.untouched import ReachesOriginal


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
