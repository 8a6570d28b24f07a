"""A network that lost BatchNorm layers leaves the library, and comes back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.support.conv_nets import outputs, resnet, train_a_little, vgg
from tests.support.ranks import run_ranks
from tests.support.removal_nets import NormAct, preact_net
from tests.support.versions import SYNC_NORM_NEEDS_A_GPU
from torchboost.algorithms.less_bn import remove_batch_norms
from torchboost.errors import IncompatibleError
from torchboost.graph.folding import fold_batch_norms
from torchboost.graph.plain_state import load_plain_state_dict, plain_state_dict

SIZE = (4, 3, 16, 16)


def boosted(build, *, folded: bool = False, **settings) -> nn.Module:
    """A network in the middle of training; ``folded`` if its BatchNorms went after some of it, not before."""
    torch.manual_seed(0)
    model = build()
    kind = next(model.parameters()).dtype
    if folded:
        train_a_little(model.float())
    assert remove_batch_norms(model.to(kind), **settings).removed
    train_a_little(model.float())
    return model.to(kind)


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def acting() -> nn.Module:
    layers = [m for wide in (3, 4, 4, 4) for m in (nn.Conv2d(wide, 4, 3), NormAct(4, nn.PReLU()))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


def variants() -> nn.Module:
    """Every setting that a BatchNorm has."""
    across = nn.BatchNorm2d(4) if SYNC_NORM_NEEDS_A_GPU else nn.SyncBatchNorm(4)
    norms = [nn.BatchNorm2d(4, eps=1e-2, momentum=None), nn.BatchNorm2d(4, affine=False, eps=1e-3), across]
    norms = [nn.BatchNorm2d(4), *[norms[at % 3] if at < 3 else nn.BatchNorm2d(4) for at in range(5)]]
    wide = [3, *[4] * 5]
    layers = [m for n, w in zip(norms, wide, strict=True) for m in (nn.Conv2d(w, 4, 3, bias=w < 4), n, nn.ReLU())]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


NETWORKS = {
    "residual": lambda: resnet(2, 2),
    "plain": vgg,
    "pre-activation": lambda: preact_net("module"),
    "activations inside": acting,
    "settings": variants,
    "double": lambda: resnet(1, 1).double(),
}
ROUTES = [(name, folded) for name in NETWORKS for folded in (False, True) if (name, folded) != ("pre-activation", True)]


@pytest.mark.parametrize(("name", "folded"), ROUTES)
def test_the_original_architecture_computes_the_same(name, folded):
    build = NETWORKS[name]
    model = boosted(build, folded=folded)
    state, plain = plain_state_dict(model), build()
    assert list(state) == list(plain.state_dict())
    assert all(state[n].dtype == value.dtype for n, value in plain.state_dict().items())
    plain.load_state_dict(state)
    x = torch.randn(SIZE, dtype=next(model.parameters()).dtype)
    expected = outputs(model, x)
    assert (outputs(plain, x) - expected).abs().max() <= 1e-6 * expected.abs().max()
    again = copy.deepcopy(model)
    for parameter in again.parameters():
        nn.init.ones_(parameter)
    load_plain_state_dict(again, state)
    assert same(again, model)


def test_without_rounding_from_scratch():
    model = boosted(lambda: resnet(2, 2))
    plain = resnet(2, 2)
    plain.load_state_dict(plain_state_dict(model))
    x = torch.randn(SIZE)
    assert torch.equal(outputs(plain, x), outputs(model, x))


def test_an_unchanged_model_gives_its_own_state():
    model = vgg()
    assert same(model, copy.deepcopy(model))
    state = plain_state_dict(model)
    assert list(state) == list(model.state_dict())
    load_plain_state_dict(model, state)


def test_weights_trained_elsewhere_are_folded():
    torch.manual_seed(0)
    plain = vgg()
    train_a_little(plain)
    model = boosted(vgg, folded=True)
    load_plain_state_dict(model, plain.state_dict())
    x = torch.randn(SIZE)
    expected = outputs(plain, x)
    assert (outputs(model, x) - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("build", [vgg, lambda: preact_net("plain")], ids=["no bias", "no layer in front"])
def test_weights_that_it_cannot_express_are_refused(build):
    plain, model = build(), build()
    train_a_little(plain)
    remove_batch_norms(model)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"call remove_batch_norms on it"):
        load_plain_state_dict(model, plain.state_dict())
    assert same(model, before)


def test_wrong_states_are_refused_before_anything_is_loaded():
    model, other = boosted(vgg), resnet(1)
    before, state = copy.deepcopy(model), plain_state_dict(model)
    with pytest.raises(ValueError, match=r"not a state dict of the original architecture.*model.load_state_dict"):
        load_plain_state_dict(model, model.state_dict())
    with pytest.raises(ValueError, match="state"):
        load_plain_state_dict(model, other.state_dict())
    with pytest.raises(ValueError, match=r"2 names are missing \(0.weight, 0.bias\)|1 names are missing \(0.weight\)"):
        load_plain_state_dict(model, {n: v for n, v in state.items() if not n.startswith("0.")})
    with pytest.raises(ValueError, match="shape"):
        load_plain_state_dict(model, state | {"0.weight": torch.zeros(9, 3, 3, 3)})
    with pytest.raises(ValueError, match=r"'4' has statistics of shape \(9,\)"):
        load_plain_state_dict(model, state | {"4.running_mean": torch.zeros(9)})
    assert same(model, before)
    load_plain_state_dict(model, {n: v for n, v in state.items() if not n.startswith("0.")}, strict=False)


def test_a_state_dict_of_the_other_kind_says_what_to_do():
    model = boosted(vgg)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"torchboost.load_plain_state_dict\(model, state\)"):
            model.load_state_dict(vgg().state_dict(), strict=strict)
    model.load_state_dict(model.state_dict())


def test_a_normalised_head_cannot_be_written_as_a_linear_layer():
    model = boosted(vgg, normalize_head=True)
    with pytest.raises(IncompatibleError, match=r"'\d+' is a normalised head.*keep_head=True"):
        plain_state_dict(model)
    state = plain_state_dict(model, keep_head=True)
    assert sum(name.endswith(".multiplier") for name in state) == 1
    again = copy.deepcopy(model)
    load_plain_state_dict(again, state)
    assert same(again, model)
    with pytest.raises(ValueError, match="cannot hold a normalised head"):
        load_plain_state_dict(model, vgg().state_dict() | plain_state_dict(boosted(vgg)))


def test_what_was_folded_into_the_layer_behind_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    nn.init.ones_(model[1].running_mean)
    assert fold_batch_norms(model.eval(), sample=torch.randn(2, 4)).folded == ("1",)
    with pytest.raises(IncompatibleError, match=r"'1' was folded into the layer after"):
        plain_state_dict(model)


def test_wrapped_models():
    model = boosted(vgg, folded=True)
    expected = plain_state_dict(model)
    compiled = torch.compile(model, backend="eager")
    inside = nn.Sequential(checkpoint_wrapper(model))
    for wrapped, prefix in ((compiled, ""), (nn.DataParallel(model), ""), (inside, "0.")):
        found = plain_state_dict(wrapped)
        assert list(found) == [prefix + name for name in expected]
        assert all(torch.equal(found[prefix + name], value) for name, value in expected.items())
        load_plain_state_dict(wrapped, found)
    gathered = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    assert list(plain_state_dict(compiled, state=gathered)) == list(expected)
    assert plain_state_dict(compiled, state={}) == {}


def test_a_name_that_looks_like_a_wrapper_is_a_name():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = vgg()

        def forward(self, x):
            return self.module(x)

    model = boosted(Holder)
    for wrapped in (model, nn.DataParallel(model)):
        state = plain_state_dict(wrapped, state=wrapped.state_dict())
        assert list(state) == list(Holder().state_dict())
        load_plain_state_dict(wrapped, state)


def _on_ranks(kind: str) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    model = boosted(vgg, folded=True)
    expected = {name: value.clone() for name, value in plain_state_dict(model).items()}
    wrapped = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
    found = plain_state_dict(wrapped)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    if kind == "fsdp":
        with pytest.raises(IncompatibleError, match="before it is sharded"):
            load_plain_state_dict(wrapped, found)
    return {"6.weight": found["4.bias"]}


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_on_two_ranks(kind):
    first, second = run_ranks(_on_ranks, 2, kind)
    assert torch.equal(first["6.weight"], second["6.weight"])


@pytest.mark.parametrize("folded", [False, True], ids=["scratch", "folded"])
def test_a_published_network_leaves_and_is_loaded_by_its_own_library(folded, tmp_path):
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    settings = {"layer_type": "basic", "depths": [1, 2], "embedding_size": 8, "hidden_sizes": [8, 16], "num_labels": 4}
    model = ResNetForImageClassification(ResNetConfig(**settings))
    if folded:
        train_a_little(model, size=32)
    remove_batch_norms(model)
    train_a_little(model, size=32)
    model.save_pretrained(tmp_path, state_dict=plain_state_dict(model))
    loaded = ResNetForImageClassification.from_pretrained(tmp_path)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected, found = model.eval()(x).logits, loaded.eval()(x).logits
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
