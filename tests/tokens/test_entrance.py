"""Plain models of torch whose padding is seen from a mask, from the ids, or from the mask of the attention."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchboost.algorithms import unpad_forward
from torchboost.tokens.call import NOTHING_READS, PartialForward
from torchboost.tokens.entrance import kept_positions, may_mask

WORDS, WIDTH, BATCH, LENGTH = 50, 16, 4, 12


@pytest.fixture(autouse=True)
def nothing_reads():
    token = NOTHING_READS.set(True)
    yield
    NOTHING_READS.reset(token)


class Encoder(nn.Module):
    """``nn.TransformerEncoder``, which gets a mask of padding or makes it."""

    def __init__(
        self,
        batch_first: bool = True,
        causal: bool = False,
        own_mask: bool = False,
        padding: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.batch_first, self.causal, self.own_mask = batch_first, causal, own_mask
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=padding)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=batch_first, **settings)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, src: Tensor, padding: Any = None) -> Tensor:
        padding = src == 0 if self.own_mask else padding
        places = torch.sin(torch.arange(src.shape[1])[:, None] * torch.arange(1, WIDTH + 1) * 0.1)
        x = self.words(src if self.batch_first else src.t()) + (places if self.batch_first else places[:, None])
        mask = nn.Transformer.generate_square_subsequent_mask(src.shape[1]).isinf() if self.causal else None
        out = self.head(self.layers(x, mask=mask, src_key_padding_mask=padding))
        return out if self.batch_first else out.transpose(0, 1)


class Lone(nn.Module):
    """``nn.MultiheadAttention`` in a block of the user's."""

    def __init__(self, need_weights: bool, **settings: Any) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **settings)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        for _ in range(2):
            y, _ = self.attention(x, x, x, key_padding_mask=mask, need_weights=self.need_weights)
            x = self.norm(x + y)
        return self.head(x)


class ByHand(nn.Module):
    """Attention as tutorials write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        batch, length = x.shape
        h = self.words(x)
        for _ in range(2):
            q, k, v = self.qkv(h).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
            scores = self.excluded(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(4), m)
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(batch, length, WIDTH)
            h = h + F.gelu(self.out(mixed))
        return self.head(h)

    def excluded(self, scores: Tensor, m: Tensor) -> Tensor:
        if self.how == "where":
            return torch.where(m[:, None, None].bool(), scores, -1e9)
        if self.how == "add":
            return scores + (1.0 - m[:, None, None].float()) * -1e9
        if self.how == "in place":
            return scores.masked_fill_(m[:, None, None] == 0, float("-inf"))
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~seen, -1e9).masked_fill(m[:, None, None] == 0, -1e9)


class Translator(nn.Module):
    """``nn.Transformer`` with padding on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(WORDS, WIDTH, padding_idx=0) for _ in range(2))
        self.layers = nn.Transformer(WIDTH, 4, 2, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        hidden = self.layers(
            self.source(ids),
            self.target(target),
            tgt_mask=self.layers.generate_square_subsequent_mask(LENGTH).isinf(),
            src_key_padding_mask=ids == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=ids == 0,
        )
        return self.head(hidden)


def batch(side: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(LENGTH) < torch.tensor([3, 6, 8, LENGTH])[:, None]
    mask = mask.flip(1) if side == "left" else mask
    return torch.randint(1, WORDS, (BATCH, LENGTH), generator=generator) * mask, mask


def compared(model: nn.Module, *args: Any, labels: Tensor) -> PartialForward:
    """Compare the loss and gradients with those of the padded batch."""

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(*args).flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    loss, expected = step()
    with unpad_forward(model) as live:
        found, gradient = step()
    torch.testing.assert_close(found, loss)
    assert float((gradient - expected).norm() / expected.norm()) < 2e-6
    assert isinstance(live, PartialForward)
    return live


CONVENTIONS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "true at padding": lambda ids, mask: (ids, ~mask),
    "true at tokens": lambda ids, mask: (ids, mask),
    "ones at tokens": lambda ids, mask: (ids, mask.long()),
    "ids alone": lambda ids, mask: (ids,),
    "both sides": lambda ids, mask: (ids.flip(0), ids),
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("make", "convention"),
    [
        (lambda: Encoder(), "true at padding"),
        (lambda: Encoder(norm_first=True), "true at padding"),
        (lambda: Encoder(batch_first=False), "true at padding"),
        (lambda: Encoder(batch_first=False, own_mask=True), "ids alone"),
        (lambda: Encoder(own_mask=True), "ids alone"),
        (lambda: Encoder(own_mask=True, padding=0), "ids alone"),
        (lambda: Encoder(causal=True, activation="gelu"), "true at padding"),
        (lambda: Lone(False), "true at padding"),
        (lambda: Lone(True), "true at padding"),
        (lambda: Lone(True, bias=False), "true at padding"),
        (lambda: ByHand("where"), "true at tokens"),
        (lambda: ByHand("add"), "ones at tokens"),
        (lambda: ByHand("in place"), "ones at tokens"),
        (lambda: ByHand("causal"), "ones at tokens"),
        (lambda: Translator(), "both sides"),
    ],
)
def test_padding_is_left_out(make: Any, convention: str, side: str):
    torch.manual_seed(0)
    ids, mask = batch(side)
    live = compared(make(), *CONVENTIONS[convention](ids, mask), labels=ids.masked_fill(~mask, -100))
    assert live.calls == 1
    assert not live.remark


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"add_zero_attn": True}, "it adds keys"),
        ({"add_bias_kv": True}, "it adds keys"),
        ({"kdim": 16, "vdim": 16}, ""),
    ],
)
def test_other_attention_of_torch(settings: dict[str, Any], reason: str):
    torch.manual_seed(0)
    ids, mask = batch("right")
    live = compared(Lone(False, **settings), ids, ~mask, labels=ids.masked_fill(~mask, -100))
    assert reason in live.remark
    assert bool(live.calls) is not bool(reason)


def test_attention_without_a_mask_sees_the_padding():
    torch.manual_seed(0)
    ids, _ = batch("right")
    live = compared(Encoder(padding=0), ids, labels=ids.masked_fill(ids == 0, -100))
    assert not live.calls
    assert "attention sees the padding" in live.remark


class WithTarget(nn.Module):
    """Masked sequences, and others whose padding is read."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = ByHand("add"), nn.Embedding(WORDS, WORDS, padding_idx=0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, target: Tensor) -> Tensor:
        return self.source(input_ids, attention_mask) + self.target(target).mean(1, keepdim=True)


def test_a_guess_that_does_not_fit_is_taken_back_alone():
    torch.manual_seed(0)
    ids, mask = batch("right")
    live = compared(WithTarget(), ids, mask.long(), ids[:, :5] * mask[:, :5], labels=ids.masked_fill(~mask, -100))
    assert live.calls == 1
    assert not live.remark


def test_a_guess_does_not_end_calls_with_other_padding():
    torch.manual_seed(0)
    ids, mask = batch("right")
    model, everything = WithTarget(), torch.ones_like(ids)
    with unpad_forward(model) as live:
        assert isinstance(live, PartialForward)
        model(ids, everything, ids[:, :5])
        assert not live.calls
        model(ids, mask.long(), ids[:, :5])
        assert live.calls == 1


class WithOthers(nn.Module):
    """Is given a tensor that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(own_mask=True)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, other: Any = None) -> Tensor:
        return self.encoder(input_ids)


@pytest.mark.parametrize("name", ["attention_mask", "other"])
def test_a_mask_on_another_device_is_left_to_the_model(name: str):
    ids, mask = batch("right")
    model = WithOthers()
    with unpad_forward(model) as live:
        assert isinstance(live, PartialForward)
        model(ids, **{name: mask.long().to("meta")})
        assert live.calls == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool):
    torch.manual_seed(0)
    ids, mask = batch("right")
    model: Any = ByHand("causal")
    block, excluded = model.out.forward, model.excluded
    model.out.forward = lambda x: checkpoint(block, x, use_reentrant=reentrant)
    model.excluded = lambda scores, m: checkpoint(excluded, scores, m, use_reentrant=reentrant)
    live = compared(model, ids, mask.long(), labels=ids.masked_fill(~mask, -100))
    assert bool(live.calls) is not reentrant


def test_labels_in_the_padding_are_computed():
    torch.manual_seed(0)
    ids, mask = batch("right")
    model = Encoder(padding=0)
    with unpad_forward(model):
        loss = F.cross_entropy(model(ids, ~mask).flatten(0, 1), ids.flatten())
    torch.testing.assert_close(loss, F.cross_entropy(model(ids, ~mask).flatten(0, 1), ids.flatten()))


@pytest.mark.parametrize("settings", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embeddings_that_change_more_than_their_result_are_computed(settings: dict[str, Any]):
    torch.manual_seed(0)
    ids, mask = batch("right")
    model = Encoder(own_mask=True)
    model.words = nn.Embedding(WORDS, WIDTH, padding_idx=0, **settings)
    rows = []
    model.words.register_forward_hook(lambda *args: rows.append(type(args[2])))
    with unpad_forward(model):
        F.cross_entropy(model(ids).flatten(0, 1), ids.masked_fill(~mask, -100).flatten()).backward()
    assert rows == [Tensor]


def test_the_convention_of_a_mask_is_seen_from_the_ids():
    ids, mask = batch("right")
    for given in (mask, ~mask):
        found = kept_positions(ids, given)
        assert found is not None
        assert found.equal(mask)
    assert kept_positions(torch.randint(1, WORDS, ids.shape), mask) is None
    assert kept_positions(torch.zeros_like(ids), mask) is None


def test_which_models_tell_of_padding():
    assert may_mask(Encoder())
    assert may_mask(nn.Embedding(3, 2, padding_idx=0))
    assert not may_mask(nn.Embedding(3, 2))
