"""Checkpoints of a network that lost BatchNorms are those of its own class, in both directions."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.conftest import ROOT
from tests.support.conv_nets import outputs, resnet, train_a_little, vgg
from tests.support.ranks import run_ranks
from tests.support.removal_nets import NormAct, preact_net
from tests.support.versions import SYNC_NORM_NEEDS_A_GPU
from torchboost import AutoBoost, less_bn
from torchboost.distributed import checkpoint

SIZE = (4, 3, 16, 16)
FILES = ROOT / "tests" / "fixtures" / "less_bn"


def boosted(build, *, folded: bool = False, **settings) -> nn.Module:
    """A network in the middle of training; ``folded`` if its BatchNorms went after some of it, not before."""
    torch.manual_seed(0)
    model = build()
    kind = next(model.parameters()).dtype
    if folded:
        train_a_little(model.float())
    assert less_bn(model.to(kind), **settings).removed
    train_a_little(model.float())
    return model.to(kind)


def forgetful(model: nn.Module) -> nn.Module:
    """A copy with other values."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        nn.init.ones_(parameter)
    return copied


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def assert_computes(model: nn.Module, state: dict[str, torch.Tensor], build, size=SIZE, tolerance=1e-6) -> None:
    """The state loads in the original class, which computes the same."""
    plain = build()
    assert list(state) == list(plain.state_dict())
    assert all(state[name].dtype == value.dtype for name, value in plain.state_dict().items())
    plain.load_state_dict(state)
    x = torch.randn(size, dtype=next(plain.parameters()).dtype)
    expected = outputs(model, x)
    assert (outputs(plain, x) - expected).abs().max() <= tolerance * expected.abs().max()


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


def test_the_original_architecture_computes_the_same():
    for name, folded in ROUTES:
        build = NETWORKS[name]
        model = boosted(build, folded=folded)
        state = model.state_dict()
        assert_computes(model, state, build, tolerance=1e-6 if folded else 0)
        for other in (forgetful(model), forgetful(pickle.loads(pickle.dumps(model)))):
            other.load_state_dict(state)
            assert same(other.state_dict(), state)
            assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def small(name: str) -> nn.Module:
    """The network of the files, of which the version before wrote checkpoints."""
    torch.manual_seed(0)
    widths = (3, 4, 4, 4)
    layers = [m for w in widths for m in (nn.Conv2d(w, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    if name.startswith("folded"):
        model(torch.randn(4, 3, 8, 8))
    less_bn(model, keep_every=4, normalize_head=name == "head")
    return model.eval()


def test_checkpoints_of_the_version_before_load():
    for name in ["scratch", "folded", "head"]:
        kept = torch.load(FILES / f"{name}.pt", weights_only=True)
        for form in ("model", "plain"):
            model = forgetful(small(name))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            model.load_state_dict(kept[form])
            optimizer.load_state_dict(kept["optimizer"])
            torch.testing.assert_close(model(kept["x"]), kept["y"])


def test_a_whole_model_and_a_sharded_checkpoint_of_the_version_before_load():
    kept = torch.load(FILES / "folded.pt", weights_only=True)
    whole = torch.load(FILES / "folded-whole.pt", weights_only=False)
    model = forgetful(small("folded"))
    checkpoint.load(FILES / "folded-sharded", model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for one in (whole.eval(), model):
        torch.testing.assert_close(one(kept["x"]), kept["y"])
        assert set(one.state_dict()) == set(kept["plain"])


def test_weights_trained_elsewhere_are_folded():
    torch.manual_seed(0)
    plain = vgg()
    train_a_little(plain)
    model = boosted(vgg, folded=True)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(SIZE)
    expected = outputs(plain, x)
    assert (outputs(model, x) - expected).abs().max() <= 1e-4 * expected.abs().max()


class NormFirst(nn.Module):
    """A BatchNorm that is registered before its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(wide, 4, 3) for wide in (3, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        return x.mean((2, 3))


def test_weights_that_it_cannot_express_are_refused():
    for build, reason in [
        (vgg, "the layer before it has no bias"),
        (lambda: preact_net("plain"), "no layer before it"),
        (NormFirst, "is registered after it"),
    ]:
        plain, model = build(), build()
        train_a_little(plain)
        assert less_bn(model).removed
        with pytest.raises(RuntimeError, match=rf"{reason}.*load the state into the original architecture and call"):
            model.load_state_dict(plain.state_dict())
        model.load_state_dict(model.state_dict())


def test_other_states_are_refused_as_by_torch():
    model = boosted(vgg)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*4.running_mean"):
        model.load_state_dict({name: value for name, value in state.items() if name != "4.running_mean"})
    with pytest.raises(RuntimeError, match=r"'4' has statistics of shape \(9,\), the model has 4 channels"):
        model.load_state_dict(state | {"4.running_mean": torch.zeros(9)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(state | {"4.other": torch.zeros(9)})


def test_entries_can_be_read_and_not_written():
    model = boosted(vgg, folded=True)
    norm, state = model[4], model.state_dict()
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(norm, name), state[f"4.{name}"])
    with pytest.raises(RuntimeError, match="inference tensor"):
        nn.init.zeros_(norm.running_mean)
    assert "4.bias" not in dict(model.named_parameters())
    assert "3.bias" in dict(model.named_parameters())
    assert not any(name.startswith("4.") for name, _ in model.named_buffers())
    assert nn.BatchNorm2d(3, affine=False).weight is None
    affine = boosted(variants)
    plain = [m for m in affine.modules() if getattr(m, "affine", True) is False]
    assert plain
    assert all(m.weight is None and m.bias is None for m in plain)


def test_a_normalised_head_has_an_entry_more():
    model = boosted(vgg, normalize_head=True)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*multiplier"):
        vgg().load_state_dict(model.state_dict())


def test_the_copy_for_inference_has_no_entries():
    x = torch.randn(SIZE)
    fast = AutoBoost("O1").network_auto_process_eval(boosted(vgg, folded=True).eval(), sample=x)
    again = forgetful(fast)
    again.load_state_dict(fast.state_dict())
    assert torch.equal(again(x), fast(x))
    assert "3.bias" in fast.state_dict()
    assert "4.weight" not in fast.state_dict()


def test_inside_wrappers():
    model = boosted(vgg, folded=True)
    expected = model.state_dict()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(model)
    wrappers = (
        (torch.compile(model, backend="eager"), "_orig_mod."),
        (nn.DataParallel(model), "module."),
        (nn.Sequential(checkpoint_wrapper(model)), "0."),
        (average, "module."),
    )
    for wrapped, prefix in wrappers:
        state = wrapped.state_dict()
        state.pop("n_averaged", None)
        assert same(state, {prefix + name: value for name, value in expected.items()})
        forgetful(wrapped).load_state_dict(wrapped.state_dict())
    assert_computes(average.module, average.module.state_dict(), vgg)


def test_assigned_and_on_meta():
    model = boosted(vgg, folded=True)
    empty = copy.deepcopy(model).to("meta")
    assert all(value.is_meta for value in empty.state_dict().values())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert same(empty.state_dict(), model.state_dict())


def _on_a_rank(kind: str, folded: bool, folder: str) -> None:
    from torch.distributed.checkpoint import load, save
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def wrap(bare: nn.Module) -> nn.Module:
        return DistributedDataParallel(bare) if kind == "ddp" else fully_shard(bare)

    torch.set_num_threads(1)
    model = boosted(vgg, folded=folded)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped, other = wrap(copy.deepcopy(model)), wrap(forgetful(model))
    whole = StateDictOptions(full_state_dict=True)
    assert same(get_model_state_dict(wrapped, options=whole), expected)
    save({"model": get_model_state_dict(wrapped)}, checkpoint_id=f"{folder}/plain")
    bare = other.module if kind == "ddp" else other
    content = {"model": get_model_state_dict(bare)}
    load(content, checkpoint_id=f"{folder}/plain")
    set_model_state_dict(bare, content["model"])
    assert same(get_model_state_dict(other, options=whole), expected)
    if kind == "fsdp":
        another = fully_shard(forgetful(model))
        set_model_state_dict(another, dict(expected), options=whole)
        assert same(get_model_state_dict(another, options=whole), expected)
    original = {"model": {name: torch.zeros_like(value) for name, value in vgg().state_dict().items()}}
    load(original, checkpoint_id=f"{folder}/plain")
    assert same(original["model"], expected)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    assert "state" in get_optimizer_state_dict(wrapped, optimizer)
    path = checkpoint.save(f"{folder}/ours", 1, wrapped, optimizer)
    other = wrap(forgetful(model))
    checkpoint.load(path, other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    assert same(get_model_state_dict(other, options=whole), expected)


def _all_on_a_rank(folder: str) -> None:
    for kind, folded in itertools.product(("ddp", "fsdp"), (False, True)):
        _on_a_rank(kind, folded, f"{folder}/{kind} {folded}")


@pytest.mark.dist
def test_on_two_ranks(tmp_path):
    run_ranks(_all_on_a_rank, 2, str(tmp_path))


def test_a_published_network_leaves_and_is_loaded_by_its_own_library(tmp_path: Path):
    for folded in [False, True]:
        from transformers import ResNetConfig, ResNetForImageClassification

        torch.manual_seed(0)
        settings = {
            "layer_type": "basic",
            "depths": [1, 2],
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "num_labels": 4,
        }
        model = ResNetForImageClassification(ResNetConfig(**settings))
        if folded:
            train_a_little(model, size=32)
        less_bn(model)
        train_a_little(model, size=32)
        model.save_pretrained(tmp_path)
        loaded = ResNetForImageClassification.from_pretrained(tmp_path)
        x = torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            expected, found = model.eval()(x).logits, loaded.eval()(x).logits
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
