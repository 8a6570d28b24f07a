"""Inside of the mode nothing is dropped, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.calibration.without_dropout import WithoutDropout


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, None, 0.5) + F.scaled_dot_product_attention(
            x, x, x, dropout_p=0.5
        )


MODELS = {
    "module": (nn.Dropout(0.5), (4, 8)),
    "in place": (nn.Dropout(0.5, inplace=True), (4, 8)),
    "channels": (nn.Dropout2d(0.5), (4, 8, 2, 2)),
    "alpha": (nn.AlphaDropout(0.5), (4, 8)),
    "attention": (Attention(), (2, 4, 8)),
    "layer": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True), (2, 4, 8)),
    "recurrent": (nn.LSTM(8, 8, 2, dropout=0.5), (4, 2, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_dropped_and_nothing_drawn(name):
    model, shape = MODELS[name]
    x = torch.randn(shape)
    state = torch.get_rng_state()
    with WithoutDropout():
        first, second = model(x.clone()), model(x.clone())
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (found[0] if isinstance(found, tuple) else found for found in (first, second))
    assert torch.equal(first, second)
    model(x.clone())
    assert not torch.equal(torch.get_rng_state(), state)


def test_noise_does_not_depend_on_the_memory_format():
    x = torch.randn(2, 3, 4, 4)
    found = []
    for each in (x, x.contiguous(memory_format=torch.channels_last)):
        torch.manual_seed(0)
        with WithoutDropout():
            found.append(torch.randn_like(each))
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_the_compiler_traces_through_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(3, 4)
    with WithoutDropout():
        assert torch.equal(compiled(x), model(x))
    assert (compiled(x) == 0).any()
