"""What algorithms and levels leave behind: in the model, in the generators, in checkpoints, in copies for inference.

Over the networks of the zoo; where training itself leads is the subject of ``test_differential.py``.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import naive
from tests.support.differential import STEPS, Choice, alone, boosted, level, no_effect_is_fine, some_then_slow, train
from tests.support.portraits import changes, generators, portrait
from tests.support.zoo import ZOO, Network
from torchboost import AutoBoost

pytestmark = no_effect_is_fine

HALF = STEPS // 2
O1, O2 = level("O1"), level("O2")
FEW = [
    "mlp_batch_norm",
    "resnet_basic_inplace",
    "convnext",
    "gpt_tied",
    "lstm",
    "embedding_sparse",
    "frozen_tail",
    "dropout",
    "weight_norm",
    "checkpointed",
    "complex_parameters",
    "two_networks",
]
"""What a resumed run is tried on by default."""
NORMS = [
    "mlp_batch_norm",
    "resnet_preact_inplace",
    "densenet",
    "reused_layers",
    "plain_list",
]
"""What loses norms after training by default."""
REVERSIBLE = level("O2", less_bn=False)


def hooks(key: str) -> bool:
    """Whether an attribute of a module holds hooks or what belongs to them."""
    return "_hooks" in key


def strides_only(before: Any, after: Any) -> bool:
    """Whether of a dictionary of tensors nothing changed but the strides of images' kernels."""
    if not isinstance(before, tuple) or not isinstance(after, tuple):
        return False
    pairs = [(value, after[1].get(name)) for name, value in before[1].items()]
    return all(a == b or (a[:5] == b[:5] and a[6:] == b[6:] and len(a[4]) > 3) for a, b in pairs if a and b)


def explained(key: str, before: Any, after: Any, on: set[str]) -> bool:
    """Whether the documentation of what is on names a change of this attribute."""
    last = key.rpartition(".")[2]
    gate = ("__getstate__", "_compiled_call_impl", "_replicate_for_data_parallel")  # no copy has them
    if hooks(last) or last in gate:
        return True
    if last == "forward":
        return bool({"autocast", "unpad", "sparse_head"} & on)
    return last == "_parameters" and "channels_last" in on and strides_only(before, after)


@pytest.mark.parametrize("name", ZOO)
def test_attaching_and_removing_leave_no_trace(name):
    network = ZOO[name]
    model = network.model()
    optimizer = naive.sgd(network, model)
    random.seed(3)
    before, drawn = portrait(model), generators()
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    settings, own = copy.deepcopy(optimizer.defaults), dict(vars(optimizer))
    booster = AutoBoost(REVERSIBLE.level, REVERSIBLE.config)
    model, optimizer = booster.network_auto_process_train(model, optimizer)
    assert generators() == drawn
    on = set(booster.attached)
    unexplained = {k: v for k, v in changes(before, portrait(model)).items() if not explained(k, *v, on)}
    assert not unexplained
    booster.attached.remove()
    assert changes(before, portrait(model)) == {}
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert optimizer.defaults == settings
    assert vars(optimizer).keys() == own.keys()
    assert not any(value for key, value in vars(optimizer).items() if "_hooks" in key and not own[key])


def check_resuming(network: Network, choice: Choice) -> None:
    """Compare a run with one that ends half-way and continues from its checkpoint in new objects."""
    data = naive.batches(network, STEPS)
    whole = boosted(network, choice)
    first = train(network, whole, data[:HALF])
    saved = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict(), whole.attached.state_dict()))
    drawn = torch.get_rng_state()
    second = train(network, whole, data[HALF:])
    again = boosted(network, choice)
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    again.attached.load_state_dict(saved[2])
    torch.set_rng_state(drawn)
    assert naive.bits(train(network, again, data[HALF:])) == naive.bits(second)
    assert len(first.losses) == HALF


@pytest.mark.parametrize("name", FEW)
def test_a_run_resumes_bit_for_bit(name):
    check_resuming(ZOO[name], O2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, network in ZOO.items() if not network.stateful])
@pytest.mark.parametrize("choice", [O1, O2], ids=lambda choice: choice.name)
def test_every_run_resumes_bit_for_bit(name, choice):
    if name != "checkpointed_reentrant":  # refused, see test_differential.py
        check_resuming(ZOO[name], choice)


def outputs(network: Network, model: nn.Module, *, more: int, grow: int) -> list[Tensor]:
    """Return what a model computes in eval mode from a batch of another size."""
    batch = network.batch(torch.Generator().manual_seed(7), more=more, grow=grow)
    with torch.no_grad():
        return tensors(model(*batch.args, **batch.kwargs))


def check_copy(network: Network, model: nn.Module, fast: nn.Module) -> None:
    """Compare a copy for inference with the model in eval mode, on inputs of several sizes."""
    slow = copy.deepcopy(model).eval()
    for more, grow in sizes(network):
        wanted, found = (outputs(network, m, more=more, grow=grow) for m in (slow, fast))
        for a, b in zip(found, wanted, strict=True):
            assert (a - b).abs().max() <= 1e-4 * b.abs().max(), (more, grow)


def sizes(network: Network) -> list[tuple[int, int]]:
    """The usual inputs, a single sample, and more and larger ones."""
    return [(0, 0), (1 - network.samples, 0), (3, network.grows)]


def has_norms(name: str) -> bool:
    """Whether a network has a BatchNorm."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in ZOO[name].model().modules())


def tensors(value: Any) -> list[Tensor]:
    """Return all tensors in the containers that the zoo has."""
    if isinstance(value, Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value
    entries = vars(value).values() if hasattr(value, "__dataclass_fields__") else entries
    return [tensor for entry in entries for tensor in tensors(entry)]


@pytest.mark.parametrize("name", ZOO)
def test_the_copy_for_inference_computes_the_same(name):
    network = ZOO[name]
    pair = boosted(network, level("O0"))
    train(network, pair, naive.batches(network, HALF))
    before, drawn = portrait(pair.model), generators()
    fast = AutoBoost("O1").network_auto_process_eval(pair.model)
    assert generators() == drawn
    assert changes(before, portrait(pair.model)) == {}
    assert not any(module.training for module in fast.modules())
    check_copy(network, pair.model, fast)


@pytest.mark.parametrize("name", some_then_slow(NORMS, [name for name in ZOO if has_norms(name)]))
def test_fewer_norms_in_a_trained_network_compute_the_same(name):
    network = ZOO[name]
    pair = boosted(network, level("O0"))
    train(network, pair, naive.batches(network, HALF))
    model = pair.model.eval()
    wanted = [outputs(network, model, more=more, grow=grow) for more, grow in sizes(network)]
    fewer = boosted(network, alone("less_bn", normalize_head=False), model=model)
    assert not any(module.training for module in model.modules())
    for (more, grow), before in zip(sizes(network), wanted, strict=True):
        for a, b in zip(outputs(network, fewer.model, more=more, grow=grow), before, strict=True):
            assert (a - b).abs().max() <= 1e-4 * b.abs().max(), (more, grow)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_copy_for_inference_of_a_boosted_network(name):
    network = ZOO[name]
    booster = AutoBoost("O2", {"extra": {"autocast": False, "compile": False}})
    model = network.model()
    model, optimizer = booster.network_auto_process_train(model, naive.sgd(network, model))
    naive.train(network, model, optimizer, naive.batches(network, HALF))
    check_copy(network, model, booster.network_auto_process_eval(model))
