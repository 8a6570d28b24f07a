"""AutoBoost: the pair in a loop of the user's own, independence, eval, bad input."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.boosted import in_one_line
from torchboost import (
    AutoBoost,
    BoostTrainOneStepCell,
    BoostTrainOneStepWithLossScaleCell,
    ConfigError,
    IncompatibleError,
    WithLoss,
    shutdown,
)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, o in ((3, 8), (8, 8), (8, 8)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def batches(n: int):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in range(n)
    ]


def test_boosting_a_network_again_takes_the_first_away():
    network = net()
    optimizer = sgd(network)
    booster = AutoBoost("O1")
    booster.network_auto_process_train(network, optimizer)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    first = booster.attached
    booster.network_auto_process_train(network, optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    assert len(first) == 0
    other, second = net(), booster.attached
    booster.network_auto_process_train(other, sgd(other))
    twin = copy.deepcopy(network)  # is not boosted
    AutoBoost("O1").network_auto_process_train(twin, sgd(twin))
    assert len(second) > 0
    outer = WithLoss(network, F.cross_entropy)  # the part is taken over by the whole
    AutoBoost("O1").network_auto_process_train(outer, sgd(outer))
    assert len(second) == 0
    booster.attached.remove()
    assert not [*optimizer._optimizer_step_pre_hooks, *other._forward_pre_hooks, *other._forward_hooks]


ACCUMULATING = {
    "boost": {"mode": "manual", "grad_accumulation": True},
    "grad_accumulation": {"grad_accumulation_step": 2},
}


class Wrapping(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by class only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


def test_a_refused_pair_is_left_as_it_was():
    network = net()
    before = norms(network), list(network.state_dict())
    wrapped = Wrapping(sgd(network))
    del wrapped.optimizer
    for level in ("O0", "O1", "O2"):
        booster = AutoBoost(level)
        plan = booster.plan
        with pytest.raises(IncompatibleError, match="Wrapping does not call the hooks"):
            booster.network_auto_process_train(network, wrapped)
        with pytest.raises(TypeError, match="scaler must be"):
            booster.network_auto_process_train(network, sgd(network), scaler=3)  # pyright: ignore[reportArgumentType]
        assert booster.plan is plan
    assert (norms(network), list(network.state_dict())) == before


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapping])
def test_the_optimizer_that_was_given_does_not_pass_by_the_accumulation(wrap):
    """As the documented example writes it: the pair that is returned is thrown away."""
    network = nn.Linear(4, 2)
    optimizer = wrap(torch.optim.SGD(network.parameters(), lr=0.1))
    booster = AutoBoost("O0", ACCUMULATING)
    booster.network_auto_process_train(network, optimizer)
    before = network.weight.detach().clone()
    network(torch.randn(3, 4)).sum().backward()
    with pytest.raises(IncompatibleError, match=r"network, optimizer = booster\.network_auto"):
        optimizer.step()
    assert torch.equal(network.weight, before)
    booster.attached.remove()
    optimizer.step()
    assert not torch.equal(network.weight, before)


def test_the_cell_accumulates_with_either_optimizer():
    for given in [True, False]:
        torch.manual_seed(0)
        network = WithLoss(nn.Linear(4, 2), F.cross_entropy)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        _, returned = AutoBoost("O0", ACCUMULATING).network_auto_process_train(network, optimizer)
        updates: list[int] = []
        optimizer.register_step_post_hook(lambda *_, updates=updates: updates.append(len(updates)))
        chosen = optimizer if given else returned
        del returned
        gc.collect()
        cell = BoostTrainOneStepCell(network, chosen)
        for _ in range(5):
            cell(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))
        assert len(updates) == 2
        assert cell.flush()
        loss = network(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))
        for _ in range(2):
            grads = torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)
            cell.gradient_accumulation_process(loss, grads, 1.0)
        assert len(updates) == 4
        scaled = BoostTrainOneStepWithLossScaleCell(network, chosen, torch.tensor(8.0))
        for _ in range(2):
            scaled(torch.randn(3, 4), torch.zeros(3, dtype=torch.long))
        assert len(updates) == 5


def trained_steps(network, optimizer, n: int):
    for x, y in batches(n):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()


def norms(network: nn.Module) -> int:
    return sum(isinstance(m, nn.BatchNorm2d) for m in network.modules())


def test_what_is_refused():
    for level, config, match in (
        ("O9", "", r"level: found 'O9'.*O0, O1, O2"),
        ("O1", {"less_bn": {"fn_flg": True}}, r"less_bn\.fn_flg.*fn_flag"),
        ("O1", "no/such/file.json", r"no/such/file\.json"),
    ):
        with pytest.raises(ConfigError, match=match):
            AutoBoost(level, config)
    with pytest.raises(ValueError, match="loop: found 'hf'"):
        AutoBoost("O0", loop="hf")  # pyright: ignore[reportArgumentType]
    assert AutoBoost("O0", ACCUMULATING, loop="lightning").plan.algorithms == ()  # the trainer's
    wrong: Any = "net"
    model = net()
    with pytest.raises(TypeError, match="network must be"):
        AutoBoost("O1").network_auto_process_train(wrong, sgd(model))
    with pytest.raises(TypeError, match="optimizer must be"):
        AutoBoost("O1").network_auto_process_train(model, wrong)
    with pytest.raises(TypeError, match="network must be"):
        AutoBoost("O1").network_auto_process_eval(wrong)
    compiled: Any = torch.compile(model, backend="eager")
    with pytest.raises(IncompatibleError, match=r"torch\.compile.*bare network"):
        AutoBoost("O1").network_auto_process_train(compiled, sgd(model))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        with pytest.raises(IncompatibleError, match="DistributedDataParallel"):
            AutoBoost("O1").network_auto_process_train(wrapped, sgd(model))
    finally:
        shutdown()


def test_without_algorithms_the_copy_is_a_view_in_eval_mode():
    for booster in [AutoBoost("O0"), AutoBoost("O2", {"boost": {"mode": "disable_all"}})]:
        model = net()
        view = booster.network_auto_process_eval(model)
        assert model.training
        assert not any(module.training for module in view.modules())
        trained_steps(model, sgd(model), 2)
        x = batches(1)[0][0]
        assert torch.equal(view(x), model.eval()(x)), "it follows the training"
        assert [p.data_ptr() for p in view.parameters()] == [p.data_ptr() for p in model.parameters()]
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
        model[0].offset = torch.ones(3, requires_grad=True) * 2  # no leaf, which cannot be copied
        view = booster.network_auto_process_eval(model)
        assert view[0].offset is model[0].offset
        assert torch.equal(view(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_a_boosted_network_and_its_inference_copy_can_be_saved_whole():
    for level in ["O1", "O2"]:
        model = net()
        booster = AutoBoost(level)
        model, optimizer = booster.network_auto_process_train(model, sgd(model))
        assert f"level {level}" in (text := in_one_line(booster.explain()))
        assert all(algorithm.name in text for algorithm in booster.plan.algorithms)
        assert all(dropped.reason in text for dropped in booster.plan.dropped)
        trained_steps(model, optimizer, 1)
        x = batches(1)[0][0]
        torch.save(model, file := io.BytesIO())
        with torch.serialization.safe_globals(list({type(module) for module in model.modules()})):
            again = torch.load(io.BytesIO(file.getvalue()))
        fast = booster.network_auto_process_eval(model, sample=x)
        fast_again = pickle.loads(pickle.dumps(fast))
        booster.attached.remove()
        with torch.no_grad():
            torch.testing.assert_close(again.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
            assert torch.equal(fast_again(x), fast(x))
