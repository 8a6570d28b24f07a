"""The heads of a model are found in one pass, whatever computes them, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.models import BottleneckNet, TinyGPT, batch_for, cnn, mlp
from torchboost.algorithms.autocast import Heads, find_heads, guessed_heads
from torchboost.core.torch_private import module_hooks


class Net(nn.Module):
    """A body of 64 features; ``forward`` is given."""

    def __init__(self, forward: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
        for name, part in parts.items():
            self.add_module(name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, self.body(x))


def found(model: nn.Module, x: Tensor | None = None) -> Heads | None:
    heads = find_heads(model, (torch.randn(6, 8) if x is None else x,), {})
    assert not any(hooks for module in model.modules() for hooks in module_hooks(module))
    return heads


def test_a_model_with_one_layer_at_the_end() -> None:
    for make in [cnn, BottleneckNet, TinyGPT, mlp]:
        model = make()
        inputs, _ = batch_for(model, torch.Generator().manual_seed(0))
        heads = found(model, inputs)
        assert heads is not None
        (name,) = (*heads.computed, *heads.cast)
        assert guessed_heads(model) in (Heads((name,)), Heads(cast=(name,)))


def test_several_heads_and_one_behind_another_product() -> None:
    def forward(self: Any, h: Tensor) -> Any:
        return {"value": self.value(h), "rest": [self.second(self.first(h)).softmax(-1)]}

    model = Net(forward, first=nn.Linear(64, 64), second=nn.Linear(64, 64), value=nn.Linear(64, 1))
    assert found(model) == Heads(("second", "value"))


def test_what_is_computed_behind_a_large_head_decides() -> None:
    large = {"head": nn.Linear(64, 256)}
    assert found(Net(lambda self, h: self.head(h), **large)) == Heads(cast=("head",))
    assert found(Net(lambda self, h: self.head(h).unflatten(1, (4, 64)).mT[:, 1:], **large)) == Heads(cast=("head",))
    assert found(Net(lambda self, h: self.head(h).sigmoid(), **large)) == Heads(("head",))
    assert found(Net(lambda self, h: self.head(h) * 30, **large)) == Heads(("head",))
    assert found(Net(lambda self, h: F.relu(self.head(h), inplace=True), **large)) == Heads(("head",))
    # A loss inside the model needs the results in float32, and no more.
    assert found(Net(lambda self, h: self.head(h).logsumexp(1).mean(), **large)) == Heads(cast=("head",))


def test_a_head_with_few_or_large_outputs_computes_in_float32() -> None:
    regression = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))  # a ninth of the multiplications
    assert found(regression) == guessed_heads(regression) == Heads(("2",))
    pixels = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 2, 3))
    assert found(pixels, torch.randn(2, 3, 6, 6)) == guessed_heads(pixels) == Heads(("2",))
    upwards = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.ConvTranspose2d(16, 2, 3))
    assert found(upwards, torch.randn(2, 3, 6, 6)) == guessed_heads(upwards) == Heads(("2",))
    wide = nn.Linear(64, 256)
    model = Net(lambda self, h: self.head(h), head=wide)
    assert found(model) == Heads(cast=("head",))
    nn.init.constant_(wide.bias, 300.0)
    assert found(model) == Heads(("head",))


def test_a_product_outside_of_a_layer_belongs_to_the_module_that_computes_it() -> None:
    class Cosine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 64))

        def forward(self, h: Tensor) -> Tensor:
            return 20 * F.normalize(h) @ F.normalize(self.weight).T

    assert found(Net(lambda self, h: self.head(h), head=Cosine())) == Heads(("head",))
    assert found(Net(lambda self, h: (h @ h.T).softmax(-1))) == Heads(("",))
    assert found(Net(lambda self, h: h @ h.T)) == Heads()


def test_a_product_in_a_module_with_other_layers_counts_as_that_of_the_whole() -> None:
    outer = Net(lambda self, h: h, inner=nn.Identity())
    outer.inner = Net(lambda self, h: F.linear(h, self.body[2].weight).softmax(-1))
    outer.forward = lambda x: outer.inner(x)  # pyright: ignore[reportAttributeAccessIssue]
    assert found(outer) == Heads(("inner",))


def test_a_tied_head_is_found() -> None:
    table = nn.Embedding(9, 16)
    head = nn.Linear(16, 9, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), head)
    assert found(model, torch.arange(6)) == Heads(("4",))


def test_recurrent_layers_and_attention() -> None:
    for layer in [nn.LSTM(64, 4), nn.GRU(64, 4), nn.MultiheadAttention(64, 2)]:

        def forward(self: Any, h: Tensor, layer: nn.Module = layer) -> Tensor:
            return self.head(*([h] * (3 if isinstance(layer, nn.MultiheadAttention) else 1)))[0]

        heads = found(Net(forward, head=layer))
        assert heads in (Heads(("head",)), Heads(cast=("head",)))


def test_inside_a_checkpoint() -> None:
    def forward(reentrant: bool) -> Any:
        return lambda self, h: checkpoint(self.head, h, use_reentrant=reentrant)

    head = nn.Sequential(nn.Linear(64, 2), nn.Sigmoid())
    assert found(Net(forward(False), head=head)) == Heads(("head.0",))
    assert found(Net(forward(True), head=head)) is None


def test_no_gradient_no_heads() -> None:
    assert found(mlp().requires_grad_(False)) is None
    assert guessed_heads(nn.Sequential(nn.ReLU())) == Heads()
    assert guessed_heads(nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2))) in (Heads(("1",)), Heads(cast=("1",)))


def test_an_exception_leaves_no_hook() -> None:
    model = mlp()
    with pytest.raises(RuntimeError):
        find_heads(model, (torch.randn(3, 5),), {})
    assert not any(hooks for module in model.modules() for hooks in module_hooks(module))


def test_an_exception_in_a_hook_of_the_user_is_the_one_that_is_raised() -> None:
    def raises(module: nn.Module, args: Any) -> None:
        raise LookupError("mine")

    model = mlp()
    model[0].register_forward_pre_hook(raises)
    with pytest.raises(LookupError, match="mine"):
        find_heads(model, (torch.randn(3, 8),), {})


@pytest.mark.parametrize("part", [False, True])
def test_names_are_those_of_the_bare_model_also_if_it_is_compiled(part: bool) -> None:
    torch.compiler.reset()
    model = Net(lambda self, h: self.head(h).sigmoid(), head=nn.Linear(64, 2))
    wrapper = model if part else torch.compile(model, backend="eager", fullgraph=True)
    if part:
        model.body.compile(backend="eager")
    assert found(wrapper) == Heads(("head",))
    wrapper(torch.randn(6, 8))
