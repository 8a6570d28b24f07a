"""Several matrices in one parameter are told apart by what happens to the outputs of their products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.graph.matrix_uses import matrix_uses
from torchboost.workloads.models import GPT


def splits(model: nn.Module, sample: Any = None) -> dict[str, Any]:
    """The split of every parameter that consists of several matrices; with the axis if it is not the first."""
    uses = matrix_uses(model, sample)
    assert uses is not None
    parts = {name: uses[parameter].parts for name, parameter in model.named_parameters()}
    return {name: (own.split, own.axis) if own.axis else own.split for name, own in parts.items() if own is not None}


class Layer(nn.Module):
    """A linear layer of 8 inputs and 12 outputs with other layers around it, and a function of its outputs."""

    def __init__(self, use: Callable[..., Tensor], width: int = 12, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.use, self.enter, self.inner = use, nn.Linear(3, 8), inner or nn.Linear(8, width)
        with torch.no_grad():
            after = use(self.inner(self.enter(torch.ones(2, 5, 3))))
        self.down, self.head = nn.Linear(after.shape[-1], 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.use(self.inner(self.enter(x)))).relu())


def split_of(use: Callable[..., Tensor], width: int = 12) -> Any:
    torch.manual_seed(0)
    return splits(Layer(use, width), torch.randn(2, 5, 3)).get("inner.weight")


def rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v).flatten(-2) if q.ndim == 4 else torch.bmm(torch.bmm(q, k.mT), v)


SEPARATE: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "gated": (lambda y: y.chunk(2, -1)[0].sigmoid() * y.chunk(2, -1)[1], 2),
    "gated by the operation": (lambda y: F.glu(y, -1), 2),
    "gated, activation by hand": (lambda y: (g := y[..., :6]) * g.sigmoid() * y[..., 6:], 2),
    "gated, interleaved": (lambda y: y[..., ::2].relu() * y[..., 1::2], (1, 1)),
    "activated before the chunk": (lambda y: (z := y.tanh().to(torch.float64).float().chunk(2, -1))[0] * z[1], 2),
    "a permutation before the chunk": (lambda y: (z := y.permute(2, 0, 1).chunk(2))[0].mul(z[1]).permute(1, 2, 0), 2),
    "an axis for the parts": (lambda y: attention(*y.view(2, 5, 3, 4).unbind(2)), 3),
    "the axis for the parts is moved": (lambda y: attention(*y.unflatten(-1, (3, 4)).movedim(2, 0).contiguous()), 3),
    "interleaved by heads": (
        lambda y: attention(*y.view(2, 5, 2, 6).transpose(1, 2).chunk(3, -1)).view(2, 5, 4),
        (2, 2, 2),
    ),
    "of other sizes": (
        lambda y: attention(y[..., :6], *(part.repeat(1, 1, 2) for part in y[..., 6:].split(3, -1))),
        (6, 3, 3),
    ),
    "rotated": (
        lambda y: attention((q := y[..., :4]) * 2 + rotated(q) * 3, (k := y[..., 4:8]) - rotated(k), y[..., 8:]),
        3,
    ),
    "rotated in part": (
        lambda y: attention(torch.cat((y[..., :2] + rotated(y[..., :2]), y[..., 2:4]), -1), y[..., 4:8], y[..., 8:]),
        3,
    ),
    "scale and shift of a norm": (lambda y: F.layer_norm(y[..., :4], (4,)) * (1 + y[..., 4:8]) + y[..., 8:], 3),
    "in place": (lambda y: (z := y.clone())[..., :6].sigmoid_().mul_(z[..., 6:]), 2),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_outputs_that_are_used_apart_are_those_of_several_matrices(name):
    use, wanted = SEPARATE[name]
    assert split_of(use) == wanted


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, y: Tensor) -> Tensor:
        first, second = self.norm(y.mT).mT.chunk(2, -1)
        return first * second


def written(y: Tensor) -> Tensor:
    whole = torch.zeros(2, 5, 12)
    whole[..., :6], whole[..., 6:] = y[..., 6:], y[..., :6].relu()
    return whole


TOGETHER: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": torch.relu,
    "chunks of the batch": lambda y: y[:1] * y[1:],
    "chunks of the sequence": lambda y: y[:, :2].sigmoid() * y[:, 2:4],
    "chunked, and joined for the next layer": lambda y: torch.cat([y[..., :6].relu(), y[..., 6:].tanh()], -1),
    "chunked, and written into one tensor": written,
    "used whole, too": lambda y: y[..., :6] * y[..., 6:] + y.mean(-1, keepdim=True),
    "the parts are added": lambda y: y[..., :6].relu() + y[..., 6:],
    "a part is not used": lambda y: y[..., :4] * y[..., 4:8],
    "a part of one row": lambda y: y[..., :1].sigmoid() * y[..., 1:],
    "parts that overlap": lambda y: y[..., :7] * y[..., 5:],
    "parts without a pattern": lambda y: y[..., [0, 2, 3, 7, 8, 11]] * y[..., [1, 4, 5, 6, 9, 10]],
    "heads": lambda y: attention(*3 * [y.view(2, 5, 3, 4).transpose(1, 2)]).view(2, 15, 4),
    "a function that is not known": lambda y: (z := torch.cumsum(y, 0))[..., :6] * z[..., 6:],
    "a view that is not known": lambda y: y.as_strided((2, 5, 6), (60, 12, 1)) * y[..., 6:],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_what_cannot_be_told_stays_one_matrix(name):
    assert split_of(TOGETHER[name]) is None


def test_a_norm_between_reads_all_outputs():
    assert "inner.weight" not in splits(Layer(Normed().eval()), torch.randn(2, 5, 3))


class Sequences(nn.Module):
    def __init__(self, layers: nn.Module, outputs: int) -> None:
        super().__init__()
        self.table, self.layers, self.head = nn.Embedding(9, 4), layers, nn.Linear(outputs, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.table(tokens))[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_gates_of_recurrent_layers():
    tokens = torch.randint(0, 9, (2, 5))
    for kind, gates in [(nn.LSTM, 4), (nn.GRU, 3)]:
        for options in ({}, {"bias": False}, {"bidirectional": True}, {"batch_first": True, "num_layers": 3}):
            layers = kind(4, 6, **{"num_layers": 2, **options})
            outputs = 12 if "bidirectional" in options else 6
            wanted = {f"layers.{name}" for name, own in layers.named_parameters() if own.ndim == 2}
            assert splits(Sequences(layers, outputs), tokens) == dict.fromkeys(wanted, gates), (kind, options)
    assert splits(Sequences(nn.RNN(4, 6, 2), 6), tokens) == {}
    projected = splits(Sequences(nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True), 6), tokens)
    assert set(projected.values()) == {4}
    assert len(projected) == 8
    assert not any("weight_hr" in name for name in projected)


def test_gates_of_recurrent_cells_in_a_loop_over_packed_and_plain_sequences():
    class Cells(nn.Module):
        def __init__(self, kind: type[nn.RNNCellBase]) -> None:
            super().__init__()
            self.cell: Any = kind(4, 6)

        def forward(self, x: Tensor) -> list[Tensor]:
            state = None
            for entry in x.unbind(1):
                state = self.cell(entry, state)
            return [state[0] if isinstance(state, tuple) else state]  # pyright: ignore

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(4, 6, batch_first=True)

        def forward(self, x: Tensor) -> list[Tensor]:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
            return [nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]]

    tokens = torch.randint(0, 9, (2, 5))
    for layers, gates in [(Cells(nn.LSTMCell), 4), (Cells(nn.GRUCell), 3), (Packed(), 3)]:
        assert list(splits(Sequences(layers, 6), tokens).values()) == [gates, gates]


class Attention(nn.Module):
    def __init__(self, *, other: int | None = None, cross: bool = False) -> None:
        super().__init__()
        self.cross, self.enter = cross, nn.Linear(3, 8)
        self.layer = nn.MultiheadAttention(8, 2, kdim=other, vdim=other, batch_first=True)
        self.other, self.head = nn.Linear(3, other or 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.enter(x)
        others = self.other(x) if self.cross else queries
        return self.head(self.layer(queries, others, others)[0])


def test_attention_of_torch():
    x = torch.randn(2, 5, 3)
    assert splits(Attention(), x) == {"layer.in_proj_weight": 3}
    assert splits(Attention(cross=True), x) == {"layer.in_proj_weight": 3}
    assert splits(Attention(other=6, cross=True), x) == {}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    model = nn.Sequential(nn.Linear(3, 8), encoder, nn.Linear(8, 2))
    assert splits(model, x) == {f"1.layers.{n}.self_attn.in_proj_weight": 3 for n in (0, 1)}


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    tokens = {"input_ids": torch.randint(0, 40, (2, 6))}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4))
    assert splits(gpt2, tokens) == {f"transformer.h.{n}.attn.c_attn.weight": (3, 1) for n in (0, 1)}
    neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, intermediate_size=64))
    name = "gpt_neox.layers.{}.attention.query_key_value.weight"
    assert splits(neox, tokens) == {name.format(n): (8, 8, 8) for n in (0, 1)}
    config = transformers.Phi3Config(**sizes, num_key_value_heads=2, intermediate_size=48, pad_token_id=0)
    found = splits(transformers.Phi3ForCausalLM(config), tokens)
    assert found == {
        f"model.layers.{n}.{part}": split
        for n in (0, 1)
        for part, split in (("self_attn.qkv_proj.weight", (32, 16, 16)), ("mlp.gate_up_proj.weight", 2))
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_gpt_wrapped_or_compiled():
    model = GPT(20, context=8, layers=2, heads=2, width=8)
    wanted = {f"blocks.{n}.qkv.weight": 3 for n in (0, 1)}
    tokens = torch.randint(0, 20, (2, 8))
    assert splits(model) == splits(model, tokens) == wanted
    compiled: Any = torch.compile(model)
    uses = matrix_uses(compiled, tokens)
    assert uses is not None
    assert sum(use.parts is not None for use in uses.values()) == 2


class Filters(nn.Module):
    def __init__(self, *, axis: int = 1, groups: int = 1, transposed: bool = False) -> None:
        super().__init__()
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        self.axis, self.enter = axis, nn.Conv2d(3, 8, 3, padding=1)
        self.inner = kind(8, 8, 3, padding=1, groups=groups)
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.inner(self.enter(x)).chunk(2, self.axis)
        return self.head((gate.sigmoid() * value).mean((2, 3)))


def test_channels_of_filters():
    x = torch.randn(2, 3, 6, 6)

    def found(*, layout: torch.memory_format = torch.contiguous_format, **options: Any) -> dict[str, Any]:
        model = Filters(**options)
        model(x)
        return splits(model.to(memory_format=layout), x.to(memory_format=layout))

    for layout in (torch.contiguous_format, torch.channels_last):
        assert found(layout=layout) == found(layout=layout, groups=2) == {"inner.weight": 2}
        assert found(layout=layout, axis=2) == found(layout=layout, transposed=True) == {}


class Experts(nn.Module):
    """Gate and value of every expert in one stack, as bare parameters, with the experts of a token chosen by index."""

    def __init__(self, *, each: bool) -> None:
        super().__init__()
        self.each, self.enter, self.head = each, nn.Linear(3, 4), nn.Linear(4, 2)
        self.up, self.down = nn.Parameter(torch.randn(3, 4, 10)), nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.each:
            gate, value = torch.bmm(x[:, None], self.up[torch.arange(len(x)) % 3]).chunk(2, -1)
            return self.head((gate.relu() * value) @ self.down[0].T)
        both = [(x @ self.up[n]).chunk(2, -1) for n in range(3)]
        return self.head(sum(F.linear(gate.relu() * value, self.down[n]) for n, (gate, value) in enumerate(both)))


def test_stacks_of_experts():
    for each in (True, False):
        assert splits(Experts(each=each), torch.randn(6, 3)) == {"up": (2, 1)}


class Bare(nn.Module):
    """A parameter whose rows are multiplied apart, one that is multiplied from the left, and one from both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(3, 4), nn.Linear(3, 2)
        self.apart, self.left = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(6, 4))
        self.tied = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        first, second = self.apart.split([4, 4])
        x = F.linear(x, first).relu() * torch.einsum("nk,ok->no", x, second)
        for matrix in (self.tied, self.tied.T):
            left, right = (x @ matrix).chunk(2, -1)
            x = torch.cat([left * right, right.relu() * 2], -1)
        gate, value = (self.left @ x.T).chunk(2)
        return self.head((gate * value).T)


def test_parameters_that_are_multiplied_in_pieces_from_the_left_or_from_both_sides():
    assert splits(Bare(), torch.randn(6, 3)) == {"apart": 2, "left": 2}
