"""Networks over tokens and sequences. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.zoo.network import (
    CLASSES,
    VOCABULARY,
    Network,
    images,
    labelled_tokens,
    next_token,
    sequences,
    tokens,
)

__all__ = ["SEQUENCES"]

WIDTH = 8
CONTEXT = 16


class Attention(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, length, WIDTH))


class Layer(nn.Module):
    """A transformer layer with the norm in front."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(causal=causal)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(0.02 * torch.randn(1, 5, WIDTH))
        self.layers = nn.Sequential(*(Layer(causal=False) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layers(x))[:, 0])


class gpt_tied(nn.Module):
    """The embedding is the weight of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer(causal=True) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            y = layer(y)
        return self.head(self.norm(y))


class bert(nn.Module):
    """torch's own encoder, with a row of the embedding that never trains and a pooled head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.pool, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(self.norm(self.words(x)))
        return self.head(torch.tanh(self.pool(y[:, 0])))


class lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(5, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class embedding_sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU())
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.words(x).mean(1)))


class mixture_of_experts(nn.Module):
    """Two layers of three experts, of which each token sees one; an expert may see none."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)) for _ in range(3))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for router, experts in zip(self.routers, self.experts, strict=True):
            chances = router(y).softmax(-1)
            best, chosen = chances.max(-1)
            mixed = torch.zeros_like(y)
            for index, expert in enumerate(experts):
                if (chosen == index).any():
                    mixed[chosen == index] = expert(y[chosen == index])
            y = y + best.unsqueeze(-1) * mixed
        return self.head(y.mean(1))


SEQUENCES = (
    Network(build=vit, draw=images),
    Network(build=gpt_tied, draw=tokens, loss=next_token, grows=3, ties=(("words", "places.weight"),)),
    Network(build=lstm, draw=sequences, grows=2),
    Network(build=embedding_sparse, draw=labelled_tokens, grows=3, sparse=True),
    *(Network(build=build, draw=labelled_tokens, grows=3) for build in (bert, mixture_of_experts)),
)
