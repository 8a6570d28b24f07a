"""Attention with heads that are joined with the batch."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tokens.test_operations import agree
from tests.tokens.test_scores import HEADS, WIDTH, Case, rows_of
from torchboost.tokens.joined import Joined
from torchboost.tokens.layout import Layout
from torchboost.tokens.rows import MissingRows, Rows


def attend(case: Case, tensors: Any, how: str, padding: Tensor) -> Any:
    queries, keys, _ = case.lengths
    query, key, value = (one.reshape(case.batch * HEADS, -1, WIDTH) for one in tensors)
    four, flat = (case.batch, HEADS, queries, keys), padding.expand(-1, HEADS, 1, keys).reshape(-1, 1, keys)
    hidden = torch.zeros(flat.shape, dtype=torch.float64).masked_fill(~flat, -1e30)
    if how == "baddbmm":
        scores = torch.baddbmm(hidden, query, key.transpose(1, 2), beta=1.0, alpha=0.5)
    elif how == "of the mask":
        scores = hidden.baddbmm(batch1=query, batch2=key.transpose(-1, -2), beta=1.0, alpha=0.5)
    else:
        scores = torch.bmm(query, key.transpose(1, 2)) * 0.5
    if how == "filled":
        scores = scores.masked_fill(~flat, -1e9)
    elif how == "added":
        scores = scores + hidden
    elif how == "apart":
        scores = scores.view(four) + torch.zeros(padding.shape, dtype=torch.float64).masked_fill(~padding, -1e30)
        scores = torch.max(scores, torch.tensor(-1e30)).view(case.batch * HEADS, queries, keys)
    weights = torch.dropout(scores.softmax(-1).to(torch.float64), 0.0, True)
    mixed = torch.bmm(weights, value)
    return mixed.view(case.batch, HEADS, queries, WIDTH).transpose(1, 2).reshape(case.batch, queries, HEADS * WIDTH)


@pytest.mark.parametrize("how", ["baddbmm", "of the mask", "filled", "added", "apart"])
@pytest.mark.parametrize("seed", range(12))
def test_attention_by_bmm(how: str, seed: int):
    case = Case(random.Random(seed))
    if not all(isinstance(one, Rows) for one in case.rows):
        return
    padding = case.keys.mask[:, None, None]
    found = attend(case, case.rows, how, padding)
    assert isinstance(found, Rows)
    agree(attend(case, case.whole, how, padding), found)


@pytest.mark.parametrize("seed", range(12))
def test_without_a_mask_it_asks_for_the_padding(seed: int):
    case = Case(random.Random(seed))
    if all(isinstance(one, Rows) for one in case.rows) and not case.keys.complete:
        with pytest.raises(MissingRows):
            attend(case, case.rows, "no mask", case.keys.mask[:, None, None])


OTHERS: dict[str, Any] = {
    "sum": lambda x: x.sum(0),
    "index": lambda x: x[0],
    "transpose": lambda x: x.transpose(0, 1),
    "other sizes": lambda x: x + torch.ones(3, 1, 1),
    "other shape": lambda x: x.view(HEADS, -1),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_functions_ask_for_the_padding(other: str):
    rows = rows_of(torch.randn(2, HEADS, 3, WIDTH), Layout(torch.tensor([[True, True, False], [True, False, False]])))
    joined = rows.reshape(-1, 3, WIDTH)
    assert isinstance(joined, Joined)
    with pytest.raises(MissingRows):
        OTHERS[other](joined)
