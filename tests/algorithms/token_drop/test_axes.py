"""Which axes of a block's arguments hold tokens, and which blocks are refused because it cannot be shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms.token_drop.axes import Unclear, pick, token_axes

BATCH, LENGTH, WIDTH, HEADS = 3, 12, 16, 2


class Block(nn.Module):
    """Attention and a perceptron. What is special about a case is in :meth:`scores` and :meth:`attend`."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor, mask: Tensor | None = None, rotate: Any = None) -> Tensor:
        shape = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if rotate is not None:
            query, key = rotate(query), rotate(key)
        causal = self.causal and mask is None
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.mlp(x).relu()


class Bidirectional(Block):
    causal = False


class WithMask(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attend(x, mask)
        return x + self.mlp(x).relu()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def angles(length: int, width: int = WIDTH // HEADS) -> tuple[Tensor, Tensor]:
    places = torch.arange(length)[None, :, None] * 0.7 ** torch.arange(width // 2)
    places = torch.cat([places, places], -1)
    return places.cos(), places.sin()


class WithAngles(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, angles: tuple[Tensor, Tensor], places: Any = None):
        x = x + self.attend(x, mask, lambda part: rotated(part, *angles))
        return x + self.mlp(x).relu()


class WithMemory(Block):
    """A decoder: it also attends to the states of an encoder, under a mask of them."""

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        x = x + self.attend(x)
        mixed = F.scaled_dot_product_attention(self.proj(x), memory, memory, attn_mask=memory_mask)
        return x + self.mlp(mixed)


def hidden(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(3))


def axes_of(block: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[int, ...], ...]:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    weights = [p.clone() for p in block.parameters()]
    found = token_axes(block, (args, kwargs))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, w) for p, w in zip(block.parameters(), weights, strict=True))
    assert all(p.grad is None for p in block.parameters())
    assert found is not None
    return found


def padding(batch: int = BATCH, length: int = LENGTH, left: bool = False) -> Tensor:
    """Return a mask of booleans, True at tokens."""
    lengths = torch.linspace(length // 2, length, batch).long()
    mask = torch.arange(length) < lengths[:, None]
    return mask.flip(1) if left else mask


def causal(length: int = LENGTH) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("kind", [Block, Bidirectional])
def test_hidden_states_alone(kind: type[Block]):
    assert axes_of(kind(), hidden()) == ((1,),)
    assert axes_of(kind(), x=hidden()) == ((1,),)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batch", [1, BATCH, LENGTH])
def test_the_encoder_layer_of_torch(batch: int, batch_first: bool):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=batch_first).train()
    x, axis = (hidden(batch), 1) if batch_first else (hidden(batch).transpose(0, 1), 0)
    additive = torch.zeros(LENGTH, LENGTH).masked_fill(~causal(), -torch.inf)
    assert axes_of(layer, x) == ((axis,),)
    assert axes_of(layer, x, src_mask=additive) == ((axis,), (0, 1))
    assert axes_of(layer, x, src_mask=~causal()) == ((axis,), (0, 1))
    for mask in (additive, ~causal()):  # torch does not read it
        assert axes_of(layer, x, src_mask=mask, is_causal=True) == ((axis,), ())
    for left in (False, True):
        padded = ~padding(batch, left=left)
        assert axes_of(layer, x, src_key_padding_mask=padded) == ((axis,), (1,))
    assert axes_of(layer, x, src_key_padding_mask=torch.zeros(batch, LENGTH, dtype=torch.bool)) == ((axis,), (1,))
    assert layer.training


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("left", [True, False])
def test_masks_of_four_axes(form: str, left: bool):
    keys = padding(left=left)[:, None, None]
    both = keys & causal()
    for mask in (keys, both, keys.expand(-1, HEADS, LENGTH, -1)):
        if form == "float":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        wanted = (2, 3) if mask.shape[2] == LENGTH else (3,)
        assert axes_of(WithMask(), hidden(), mask) == ((1,), wanted)


def test_rotary_angles_and_positions():
    cos_sin = angles(LENGTH)
    assert axes_of(WithAngles(), hidden(), angles=cos_sin) == ((1,), (1,), (1,))
    mask = padding()[:, None, None] & causal()
    places = torch.arange(LENGTH)[None]
    assert axes_of(WithAngles(), hidden(), mask, angles=cos_sin, places=places) == ((1,), (2, 3), (1,), (1,), ())


@pytest.mark.parametrize("batch", [1, 8])
def test_a_length_equal_to_the_batch_and_to_the_width_of_a_head(batch: int):
    """Then sizes alone do not tell which axis has the tokens."""
    length = WIDTH // HEADS
    cos_sin = tuple(part.expand(batch, -1, -1) for part in angles(length))
    x, mask = hidden(batch, length), (padding(batch, length)[:, None, None] & causal(length))
    assert axes_of(WithAngles(), x, mask, angles=cos_sin) == ((1,), (2, 3), (1,), (1,))
    assert axes_of(WithAngles(), x, angles=cos_sin) == ((1,), (1,), (1,))
    assert axes_of(WithMask(), x, padding(batch, length)[:, None, None]) == ((1,), (3,))


def test_states_of_an_encoder_of_the_same_length_stay_whole():
    memory = torch.randn(BATCH, LENGTH, WIDTH)
    assert axes_of(WithMemory(), hidden(), memory) == ((1,), ())
    assert axes_of(WithMemory(), hidden(), memory, padding()[:, None]) == ((1,), (), ())
    no_padding = torch.ones(BATCH, 1, LENGTH, dtype=torch.bool)
    assert axes_of(WithMemory(), hidden(), memory, no_padding) == ((1,), (), ())


def test_new_networks_that_begin_as_the_identity():
    block = WithAngles()
    nn.init.zeros_(block.proj.weight)
    nn.init.zeros_(block.mlp.weight)
    assert axes_of(block, hidden(), angles=angles(LENGTH)) == ((1,), (1,), (1,))


class Positions(Block):
    """Positions inside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places[: x.shape[1]])


class OwnAngles(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, rotate=lambda part: rotated(part, *(each.to(x) for each in angles(x.shape[1]))))


class Sliced(Block):
    """Angles for longer sequences are cut to the length inside of the block."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x + self.attend(x, rotate=lambda part: rotated(part, cos[:, : x.shape[1]], sin[:, : x.shape[1]]))


class Slopes(Block):
    """ALiBi."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = (places[None] - places[:, None]).to(x.dtype) * 0.1
        return x + self.attend(x, bias.masked_fill(~causal(x.shape[1]), -torch.inf))


class Windows(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, causal(x.shape[1]).triu(-4))


class Convolution(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


class Decay(Block):
    def forward(self, x: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = 0.9 * state + token
            outputs.append(state)
        return self.mlp(torch.stack(outputs, 1))


class Partial(Block):
    """Attention in groups of four neighbours, as in images."""

    causal = False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x.reshape(-1, 4, WIDTH)).view_as(x)


class Alone(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class AcrossTheBatch(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.mlp(x.mean((0, 1), keepdim=True))


class Two(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        return super().forward(x), x.mean()


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        *(
            (kind, "order of its tokens")
            for kind in (Positions, OwnAngles, Slopes, Windows, Convolution, Decay, Partial)
        ),
        (Alone, "each token by itself"),
        (AcrossTheBatch, "different sequences"),
        (Two, "return tuple"),
    ],
)
def test_what_is_refused(kind: type[Block], match: str):
    with pytest.raises(Unclear, match=match):
        token_axes(kind(), ((hidden(),), {}))


def test_arguments_that_are_refused():
    with pytest.raises(Unclear, match="order of its tokens"):
        token_axes(Sliced(), ((hidden(), *angles(2 * LENGTH)), {}))
    with pytest.raises(Unclear, match="use_cache=False"):
        token_axes(WithMask(), ((hidden(), object()), {}))
    with pytest.raises(Unclear, match="number of tokens"):
        token_axes(WithMask(), ((hidden(), LENGTH), {}))
    for strange in (torch.randn(3, 4), torch.ones(3, 4, 5).long(), None):
        with pytest.raises(Unclear, match="first argument"):
            token_axes(Block(), ((strange,), {}))


def test_a_mask_of_windows_is_refused_and_packed_sequences_are_not():
    window = causal().triu(-3)
    packed = causal() & (torch.arange(LENGTH)[:, None] // 4 == torch.arange(LENGTH) // 4)
    both_ways = window | window.T
    for mask in (window, both_ways, padding()[:, None, None] & window):
        with pytest.raises(Unclear, match="in windows"):
            token_axes(WithMask(), ((hidden(), mask), {}))
    assert axes_of(WithMask(), hidden(), packed) == ((1,), (0, 1))


def test_short_sequences_are_not_judged():
    assert token_axes(Block(), ((hidden(9, 5),), {})) is None


def test_a_guess_is_used_if_it_is_right_only():
    call = ((hidden(),), {"mask": padding()[:, None, None] & causal()})
    right, wrong = ((1,), (2, 3)), ((1,), (3,))
    for guess in (right, wrong, ((1,),)):
        assert token_axes(WithMask(), call, guess) == right


def test_hooks_of_the_user_do_not_see_the_copy():
    block, seen = Block(), []
    block.proj.register_forward_hook(lambda *call: seen.append(call))
    token_axes(block, ((hidden(),), {}))
    assert seen == []


def test_picking_all_tokens_gives_the_arguments():
    call = ((hidden(),), {"mask": padding()[:, None, None] & causal(), "flag": True})
    (x,), kwargs = pick(call, ((1,), (2, 3)), torch.arange(LENGTH))
    assert torch.equal(x, call[0][0])
    assert torch.equal(kwargs["mask"], call[1]["mask"])
    assert kwargs["flag"] is True
