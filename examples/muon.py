"""Muon for the hidden matrices and AdamW for the rest, in one optimizer: which parameter goes where, what it brings."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.optim import muon_from, muon_groups

CONTEXT, WIDTH = 64, 64


class NextCharacter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.characters(tokens) + self.places.weight
        return self.head(self.layers(x, mask=self.mask))


def train(muon: bool, steps: int) -> float:
    """Return the mean loss of the last tenth of the steps, in nats per character."""
    text = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")  # English
    rows = torch.frombuffer(bytearray(text[:400_000]), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, CONTEXT)
    torch.manual_seed(0)
    model = NextCharacter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = muon_from(optimizer, model, lr=0.02, sample=rows[:1, :-1]) if muon else optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(10 * (n + 1), steps - n) / steps)
    losses = []
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (16,))]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return round(sum(last := losses[-max(1, steps // 10) :]) / len(last), 3)


def main(steps: int = 300) -> dict[str, float]:
    print(muon_groups(NextCharacter(), sample=torch.zeros(1, CONTEXT, dtype=torch.long)))
    losses = {"AdamW": train(False, steps), "Muon and AdamW": train(True, steps)}
    print(f"loss after {steps} steps: {losses}")
    return losses


if __name__ == "__main__":
    main()


# It prints, on one busy core of a CPU:
#
#     parameter                                  shape     rule   why
#     characters.weight                          128 x 64  adamw  table of rows
#     places.weight                              64 x 64   adamw  not multiplied as a matrix
#     layers.layers.0.self_attn.in_proj_weight   192 x 64  muon   3 matrices of 64 x 64
#     layers.layers.0.self_attn.in_proj_bias     192       adamw  vector
#     layers.layers.0.self_attn.out_proj.weight  64 x 64   muon   hidden matrix
#     layers.layers.0.self_attn.out_proj.bias    64        adamw  vector
#     layers.layers.0.linear1.weight             256 x 64  muon   hidden matrix
#     layers.layers.0.linear1.bias               256       adamw  vector
#     layers.layers.0.linear2.weight             64 x 256  muon   hidden matrix
#     layers.layers.0.linear2.bias               64        adamw  vector
#     layers.layers.0.norm1.weight               64        adamw  vector
#     layers.layers.0.norm1.bias                 64        adamw  vector
#     layers.layers.0.norm2.weight               64        adamw  vector
#     layers.layers.0.norm2.bias                 64        adamw  vector
#     layers.layers.1.self_attn.in_proj_weight   192 x 64  muon   3 matrices of 64 x 64
#     layers.layers.1.self_attn.in_proj_bias     192       adamw  vector
#     layers.layers.1.self_attn.out_proj.weight  64 x 64   muon   hidden matrix
#     layers.layers.1.self_attn.out_proj.bias    64        adamw  vector
#     layers.layers.1.linear1.weight             256 x 64  muon   hidden matrix
#     layers.layers.1.linear1.bias               256       adamw  vector
#     layers.layers.1.linear2.weight             64 x 256  muon   hidden matrix
#     layers.layers.1.linear2.bias               64        adamw  vector
#     layers.layers.1.norm1.weight               64        adamw  vector
#     layers.layers.1.norm1.bias                 64        adamw  vector
#     layers.layers.1.norm2.weight               64        adamw  vector
#     layers.layers.1.norm2.bias                 64        adamw  vector
#     head.weight                                128 x 64  adamw  head
#     head.bias                                  128       adamw  vector
#     muon: 98,304 weights, adamw: 22,272 weights
#     loss after 300 steps: {'AdamW': 2.361, 'Muon and AdamW': 2.118}
