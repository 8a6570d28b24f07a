"""Attention by hand and by ``scaled_dot_product_attention``: right for every query, or it asks for the padding."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.tokens.test_operations import agree
from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.rows import BATCH, TOKEN, MissingRows, Rows
from torchboost.tokens.scores import Scores

HEADS, WIDTH = 2, 4


class Case:
    """Queries, keys and values of padded sequences, whole and as rows."""

    def __init__(self, rng: random.Random, dtype: torch.dtype = torch.float64) -> None:
        self.rng = rng
        torch.manual_seed(rng.randrange(1 << 30))
        self.batch, self.length = rng.choice((1, 2, 3)), rng.choice((1, 2, 4, 6))
        self.layout = self.drawn_layout(self.length)
        self.keys = self.layout if rng.random() < 0.7 else self.drawn_layout(rng.choice((self.length, 3)))
        kinds = rng.choice(("rows", "rows", "rows", "rows", "queries", "keys"))
        whole = [torch.randn(self.batch, HEADS, n, WIDTH, dtype=dtype) for n in self.lengths]
        self.whole, self.rows = whole, [*whole]
        for place, layout in enumerate((self.layout, self.keys, self.keys)):
            if kinds == "rows" or (kinds == "queries") is (place == 0):
                self.rows[place] = rows_of(whole[place], layout)

    @property
    def lengths(self) -> tuple[int, int, int]:
        return self.layout.length, self.keys.length, self.keys.length

    def drawn_layout(self, length: int) -> Layout:
        counts = torch.tensor([self.rng.randrange(1, length + 1) for _ in range(self.batch)])
        mask = torch.arange(length) < counts[:, None]
        kind = self.rng.choice(("right", "left", "any"))
        if kind == "any":
            mask = (torch.rand(self.batch, length) < 0.6).index_fill(1, torch.tensor([0]), True)
        return Layout(mask.flip(1) if kind == "left" else mask)

    def mask(self) -> Tensor:
        """Return a mask of booleans, True at keys that are seen. It may be any that a model could have."""
        rng, queries, keys = self.rng, *self.lengths[:2]
        padding = self.keys.mask[:, None, None]
        causal = torch.ones(queries, keys, dtype=torch.bool).tril()
        kind = rng.choice(("padding", "padding", "causal", "both", "both", "window", "few", "any", "heads", "first"))
        near = (torch.arange(queries)[:, None] - torch.arange(keys)).abs() < 2
        return {
            "padding": padding,
            "causal": causal,
            "both": padding & causal,
            "window": padding & causal & near,
            "few": padding & (torch.rand(self.batch, 1, queries, keys) < 0.8),
            "any": torch.rand(rng.choice((1, self.batch)), 1, rng.choice((1, queries)), keys) < 0.8,
            "heads": padding & (torch.rand(self.batch, HEADS, queries, keys) < 0.9),
            "first": padding & (torch.arange(keys) < 1),
        }[kind]


def rows_of(whole: Tensor, layout: Layout) -> Tensor:
    rows = whole.transpose(1, 2).flatten(0, 1)[layout.index]
    return PaddedRows(rows, layout, (BATCH, 0, TOKEN, 1))


def excluded(scores: Any, mask: Tensor, how: str, value: float) -> Any:
    if how == "add":
        return scores + torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, value)
    if how == "fill":
        return scores.masked_fill(~mask, value)
    if how == "where":
        return torch.where(mask, scores, value)
    if how == "other where":
        return torch.where(~mask, torch.tensor(value, dtype=scores.dtype), scores)
    if how == "in place":
        scores += torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, value)
        return scores
    scores.masked_fill_(~mask, value)
    return scores


def compare_by_hand(rng: random.Random) -> bool:
    case, steps = Case(rng), []
    for _ in range(rng.choice((1, 2, 3, 4))):
        kind = rng.choice(("mask", "mask", "mask", "scale", "tanh", "bias", "half", "shift"))
        how = rng.choice(("add", "fill", "where", "other where", "in place", "fill in place"))
        value = rng.choice((-math.inf, -1e30, -1e9, -1e4, -5.0, 0.0))
        bias = torch.randn(1, HEADS, *case.lengths[:2], dtype=torch.float64)
        steps.append((kind, how, value, case.mask(), rng.choice((0.125, 3, -1.0)), bias))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        scores: Any = query @ key.transpose(-1, -2)
        for kind, how, least, mask, factor, bias in steps:
            if kind == "mask":
                scores = excluded(scores, mask, how, least)
            elif kind == "scale":
                scores = scores * factor if how == "add" else scores / factor
            elif kind == "tanh":
                scores = torch.tanh(scores / 2) * 2
            elif kind == "bias":
                scores = bias + scores
            elif kind == "half":
                scores = scores.to(torch.float64)
            else:
                scores = scores - 1
        return torch.matmul(torch.dropout(scores.softmax(-1), 0.0, True), value)

    try:
        found = attend(*case.rows)
    except MissingRows:
        return False
    agree(attend(*case.whole), found)
    return True


def test_attention_by_hand_of_which_much_is_answered():
    assert sum(compare_by_hand(random.Random(seed)) for seed in range(400)) > 80


def compare_fused(rng: random.Random) -> bool:
    case = Case(rng)
    mask: Any = case.mask() if rng.random() < 0.9 else None
    causal = mask is None and rng.random() < 0.7
    if mask is not None and rng.random() < 0.5:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, rng.choice((-math.inf, -1e30, -1e9, -3)))
        mask = mask + torch.randn(mask.shape, dtype=torch.float64) if rng.random() < 0.3 else mask
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "scale": rng.choice((None, 0.3))}
    try:
        query, key, value = case.rows
        found = F.scaled_dot_product_attention(query, key, value, **options)
    except MissingRows:
        return False
    query, key, value = case.whole
    agree(F.scaled_dot_product_attention(query, key, value, **options), found)
    return True


def test_fused_attention_of_which_much_is_answered():
    assert sum(compare_fused(random.Random(seed)) for seed in range(400)) > 80


@pytest.mark.parametrize(
    ("queries", "keys", "scores"),
    [("bhid", "bhjd", "bhij"), ("bihd", "bjhd", "bhij"), ("bihd", "bhjd", "bhij"), ("bhid", "bhdj", "bhij")],
)
def test_einsum(queries: str, keys: str, scores: str):
    case = Case(random.Random(1))
    case.keys = case.layout
    whole = torch.randn(3, case.batch, HEADS, case.length, WIDTH, dtype=torch.float64)
    padding = case.layout.mask[:, None, None]

    def attend(query: Any, key: Any, value: Any) -> Any:
        query, key = (
            one.permute(["bhtd".index("t" if name in "ij" else name) for name in order])
            for one, order in ((query, queries), (key, keys))
        )
        weights = torch.einsum(f"{queries}, {keys} -> {scores}", query, key).masked_fill(~padding, -1e9).softmax(-1)
        return torch.einsum(f"{scores},bhjd->bihd", weights, value)

    found = attend(*(rows_of(one, case.layout) for one in whole))
    assert isinstance(found, Rows)
    agree(attend(*whole), found)


@pytest.mark.parametrize("equation", ["btd,dk->btk", "dk,btd->bkt", "btd,dhk->bhtk", "btd,d->bt"])
def test_einsum_with_weights(equation: str):
    layout = Layout(torch.tensor([[True, True, False], [True, False, False]]))
    whole = torch.randn(2, 3, 4, dtype=torch.float64)
    rows = PaddedRows(whole.flatten(0, 1)[layout.index], layout, (BATCH, TOKEN, 0))
    names = equation.split("->")[0].split(",")
    weight = torch.randn([4, 5, 6][: len(next(one for one in names if "b" not in one))], dtype=torch.float64)
    one, two = ([weight, rows], [weight, whole]) if "b" in names[1] else ([rows, weight], [whole, weight])
    found = torch.einsum(equation, *one)
    assert isinstance(found, Rows)
    agree(torch.einsum(equation, two), found)
    assert isinstance(torch.einsum(equation, one), Rows)


@pytest.mark.parametrize("equation", ["btd,btd->bd", "btd,btd->btd", "btd,bsd->ts", "btd,bsd->bst", "...d,dk->...k"])
def test_other_equations_ask_for_the_padding(equation: str):
    layout = Layout(torch.tensor([[True, True, False], [True, False, False]]))
    rows = PaddedRows(torch.randn(3, 4), layout, (BATCH, TOKEN, 0))
    other = torch.randn(4, 4) if "..." in equation else rows
    try:
        found = torch.einsum(equation, rows, other)
    except MissingRows:
        return
    assert equation == "btd,bsd->bst"  # the scores with names exchanged
    assert isinstance(found, Scores)


def test_a_query_that_sees_nothing_asks_for_the_padding():
    layout = Layout(torch.tensor([[True, True, False, False]]))
    rows = rows_of(torch.randn(1, HEADS, 4, WIDTH), layout)
    scores: Any = rows @ rows.mT
    none = scores.masked_fill(~layout.mask, -1e9) + torch.zeros(4).index_fill(0, torch.tensor([0, 1]), -1e9)
    with pytest.raises(MissingRows, match="a query sees nothing"):
        none.softmax(-1) @ rows
    with pytest.raises(MissingRows, match="attention sees the padding"):
        scores.softmax(-1) @ rows


def left_padded() -> tuple[Tensor, Any, Tensor]:
    """Return a batch whole and as rows, and a causal mask, which leaves nothing to the padding at the left."""
    layout = Layout(torch.tensor([[False, False, True, True], [True, True, True, True]]))
    whole = torch.randn(2, HEADS, 4, WIDTH, dtype=torch.float64)
    return whole, rows_of(whole, layout), layout.mask[:, None, None] & torch.ones(4, 4, dtype=torch.bool).tril()


@pytest.mark.parametrize("how", ["add", "fill", "where", "in place"])
@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float64).min, -1e9, -1e4])
def test_padding_that_gets_nan_by_hand_is_computed(how: str, value: float):
    whole, rows, seen = left_padded()

    def attend(x: Any) -> Any:
        return excluded(x @ x.mT, seen, how, value).softmax(-1) @ x

    plain = attend(whole)
    assert bool(plain.isnan().any()) == (value == -math.inf)
    if value == -math.inf:
        with pytest.raises(MissingRows, match="NaN"):
            attend(rows)
    else:
        agree(plain, attend(rows))


@pytest.mark.parametrize("how", ["softmax", "to"])
@pytest.mark.parametrize("kind", ["add", "fill"])
def test_padding_that_gets_nan_in_a_smaller_range_is_computed(how: str, kind: str):
    whole, rows, seen = left_padded()
    least = torch.finfo(torch.float64).min

    def attend(x: Any, value: float) -> Any:
        scores = excluded(x @ x.mT, seen, kind, value)
        weights = scores.softmax(-1, dtype=torch.float32) if how == "softmax" else scores.float().softmax(-1)
        return weights.double() @ x

    assert attend(whole, least).isnan().any()
    with pytest.raises(MissingRows, match="smaller range"):
        attend(rows, least)
    if kind == "fill":
        assert isinstance(attend(rows, -1e9), Rows)


@pytest.mark.parametrize("needs", [True, False])
def test_padding_that_gets_nan_from_a_layer_of_torch_is_computed(needs: bool):
    layer = torch.nn.MultiheadAttention(HEADS * WIDTH, HEADS, dtype=torch.float64)
    layout = Layout(torch.tensor([[False, False, True, True], [True, True, True, True]]))
    whole = torch.randn(4, 2, HEADS * WIDTH, dtype=torch.float64)
    rows = PaddedRows(whole.transpose(0, 1).flatten(0, 1)[layout.index], layout, (TOKEN, BATCH, 0))
    later = torch.ones(4, 4, dtype=torch.bool).triu(1)

    def attend(x: Any) -> Any:
        return layer(x, x, x, key_padding_mask=~layout.mask, attn_mask=later, need_weights=needs)[0]

    plain = attend(whole)
    assert bool(plain.isnan().any()) == needs
    if needs:
        with pytest.raises(MissingRows, match="NaN"):
            attend(rows)
    else:
        agree(plain, attend(rows))


def test_padding_that_sees_nothing_is_left_out_if_a_finite_score_remains():
    whole, rows, seen = left_padded()
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    least = torch.finfo(torch.float64).min

    def raised(x: Any) -> Any:
        return (x @ x.mT).masked_fill(~seen, -math.inf).maximum(torch.tensor(least, dtype=x.dtype)).softmax(-1) @ x

    def twice(x: Any) -> Any:
        scores: Any = torch.where(causal, x @ x.mT, least)
        return (scores + torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)).softmax(-1) @ x

    def fused(x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=seen)

    for attend in (raised, twice, fused):
        agree(attend(whole), attend(rows))


@pytest.mark.parametrize("how", ["add", "fill", "fused"])
@pytest.mark.parametrize(
    ("value", "size", "is_answered"),
    [
        (-1e4, 1, True),
        (-1e4, 50, False),
        (-65504, 50, False),
        (-1e9, 50, True),
        (-math.inf, 50, True),
        (torch.finfo(torch.float32).min, 50, True),
    ],
)
def test_a_mask_counts_as_excluding_next_to_scores_that_are_small_next_to_it(
    how: str, value: float, size: float, is_answered: bool
):
    layout, whole, _ = padded()
    whole = whole * size  # 50: products of about 1e4
    hidden = ~layout.mask[:, None, None]

    def attend(x: Any) -> Any:
        mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, value)
        if how == "fused":
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=1.0)
        scores = (x @ x.mT) * 1.0
        return (scores + mask if how == "add" else scores.masked_fill(hidden, value)).softmax(-1) @ x

    rows = rows_of(whole, layout)
    if is_answered:
        agree(attend(whole), attend(rows))
    else:
        with pytest.raises(MissingRows, match="as large as"):
            attend(rows)


def test_a_mask_of_lower_precision_counts_like_other_masks_of_its_size():
    layout, whole, _ = padded()
    mask = torch.zeros(2, 1, 1, 4, dtype=torch.float16).masked_fill(~layout.mask[:, None, None], -65504)
    agree((whole @ whole.mT + mask).softmax(-1) @ whole, attended_with(mask, rows_of(whole, layout)))
    with pytest.raises(MissingRows, match="as large as"):
        attended_with(mask, rows_of(whole * 200, layout))
    assert isinstance(attended_with(mask, rows_of(whole.half(), layout)), Rows)


def attended_with(mask: Tensor, x: Any) -> Any:
    return (x @ x.mT + mask).softmax(-1) @ x


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_for_which_a_kernel_for_causal_attention_fails(scale: float):
    layout, whole, rows = padded()
    seen = layout.mask[:, None, None] & torch.ones(4, 4, dtype=torch.bool).tril()
    assert F.scaled_dot_product_attention(whole, whole, whole, attn_mask=seen, scale=scale).isfinite().all()
    with pytest.raises(MissingRows, match="scale"):
        F.scaled_dot_product_attention(rows, rows, rows, attn_mask=seen, scale=scale)


@pytest.mark.parametrize("raised", [torch.max, torch.maximum])
def test_scores_are_raised_before_a_mask_as_after_it(raised: Any):
    layout, whole, _ = padded()
    hidden, least = ~layout.mask[:, None, None], torch.tensor(-1e4, dtype=torch.float64)

    def attend(x: Any) -> Any:
        return raised((x @ x.mT) - 1e5, least).masked_fill(hidden, -1e9).softmax(-1) @ x

    found = attend(rows_of(whole, layout))
    assert isinstance(found, Rows)
    agree(attend(whole), found)


@pytest.mark.parametrize("bias", [-8e3, 8e3])
def test_a_bias_counts_like_scores_next_to_a_mask(bias: float):
    layout, _, rows = padded()
    hidden = ~layout.mask[:, None, None]
    for attend in (
        lambda x: (x @ x.mT).masked_fill(hidden, -1e4) + torch.full((4,), bias),
        lambda x: x @ x.mT + torch.zeros(hidden.shape).masked_fill(hidden, -1e4) + torch.full((4,), bias),
    ):
        with pytest.raises(MissingRows):
            attend(rows).softmax(-1) @ rows


@pytest.mark.parametrize("raised", [torch.max, torch.maximum])
def test_a_bias_that_nears_what_scores_are_raised_to_is_computed(raised: Any):
    layout, _, rows = padded()
    hidden, least = ~layout.mask[:, None, None], torch.tensor(-1e4, dtype=torch.float64)
    for bias, is_answered in ((-8e3, False), (-1e2, True)):
        mask = torch.full(hidden.shape, bias, dtype=torch.float64).masked_fill(hidden, -1e9)
        try:
            found = raised(rows @ rows.mT + mask, least).softmax(-1) @ rows
        except MissingRows:
            found = None
        assert isinstance(found, Rows) is is_answered


def test_masks_are_read_once():
    layout = Layout(torch.tensor([[True, True, False, False]]))
    rows = rows_of(torch.randn(1, HEADS, 4, WIDTH), layout)
    mask = torch.zeros(1, 1, 1, 4).masked_fill(~layout.mask, -1e9)
    for _ in range(2):
        ((rows @ rows.mT) + mask).softmax(-1) @ rows
    count = len(layout._results)
    ((rows @ rows.mT) + mask).softmax(-1) @ rows
    assert len(layout._results) == count
    mask.zero_()
    with pytest.raises(MissingRows):
        ((rows @ rows.mT) + mask).softmax(-1) @ rows


def padded() -> tuple[Layout, Tensor, Any]:
    layout = Layout(torch.tensor([[True, True, False, False], [True, True, True, False]]))
    whole = torch.randn(2, HEADS, 4, WIDTH, dtype=torch.float64)
    return layout, whole, rows_of(whole, layout)


@pytest.mark.parametrize("how", ["by hand", "fused"])
def test_a_bias_that_begins_with_zeros_has_a_gradient(how: str):
    layout, whole, rows = padded()
    bias = torch.zeros(1, HEADS, 4, 4, dtype=torch.float64, requires_grad=True)

    def attend(x: Any) -> Tensor:
        mask: Any = bias + torch.zeros(2, 1, 1, 4, dtype=torch.float64).masked_fill(~layout.mask[:, None, None], -1e9)
        if how == "fused":
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return (x @ x.mT + mask).softmax(-1) @ x

    seen = layout.mask[:, None, :, None]
    expected, found = (torch.autograd.grad((attend(x) * seen).square().sum(), bias) for x in (whole, rows))
    torch.testing.assert_close(found, expected)


def test_what_is_written_to_between_scores_and_values_does_not_count():
    layout, whole, rows = padded()
    mask = torch.zeros(2, 1, 1, 4, dtype=torch.float64).masked_fill(~layout.mask[:, None, None], -1e9)

    def attend(x: Any, query: Any) -> Tensor:
        scores = query @ x.mT + mask
        query.mul_(3)
        return scores.softmax(-1) @ x

    agree(attend(whole, whole * 2), attend(rows, rows * 2))
    scores = rows @ rows.mT + mask
    mask.zero_()
    with pytest.raises(MissingRows, match="was written to"):
        scores.softmax(-1) @ rows


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor(2.0, requires_grad=True)])
def test_scores_are_scaled_and_weights_dropped_once(factor: Any):
    layout, whole, rows = padded()
    hidden = ~layout.mask[:, None, None]

    def attend(x: Any) -> Any:
        return (x @ x.mT / factor).masked_fill(hidden, torch.finfo(torch.float64).min).softmax(-1)

    agree(attend(whole) @ whole, attend(rows) @ rows)
    with pytest.raises(MissingRows, match="changes masked scores"):
        attend(rows).square() @ rows
    with pytest.raises(MissingRows, match="drops weights twice"):
        torch.dropout(torch.dropout(attend(rows), 0.5, True), 0.5, True)


@pytest.mark.parametrize("scaled", [torch.mul, torch.div, lambda x, n: n * x, lambda x, n: x / n, Tensor.mul_])
@pytest.mark.parametrize("factor", [0.5, torch.tensor(3.0, dtype=torch.float64, requires_grad=True)])
def test_weights_are_scaled_after_the_softmax(scaled: Any, factor: Any):
    layout, whole, rows = padded()
    factors = [factor] if isinstance(factor, Tensor) else []

    def attend(x: Any) -> Any:
        weights = (x @ x.mT).masked_fill(~layout.mask[:, None, None], -math.inf).softmax(-1)
        return torch.dropout(scaled(weights, factor), 0.0, True) @ x

    found = attend(rows)
    assert isinstance(found, Rows)
    agree(attend(whole), found)
    seen = layout.mask[:, None, :, None]
    for one in factors:
        gradients = [torch.autograd.grad((attend(x) * seen).square().sum(), one) for x in (whole, rows)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.div(torch.tensor(1.0), x),
        lambda x: torch.div(x, 2, rounding_mode="floor"),
        lambda x: x * torch.ones(4),
        lambda x: x - 0.5,
        lambda x: torch.dropout(x * x, 0.5, True),
        lambda x: x.div(x),
    ],
)
def test_other_changes_of_weights_ask_for_the_padding(change: Any):
    layout, _, rows = padded()
    weights = (rows @ rows.mT).masked_fill(~layout.mask[:, None, None], -math.inf).softmax(-1)
    with pytest.raises(MissingRows):
        change(weights) @ rows


def test_gradients_of_attention_by_hand():
    case = Case(random.Random(3))
    case.keys = case.layout
    padding = ~case.layout.mask[:, None, None]
    whole = torch.randn(case.batch, HEADS, case.length, WIDTH, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, HEADS, case.length, case.length, dtype=torch.float64, requires_grad=True)
    seen = case.layout.mask[:, None, :, None]

    def loss(x: Any) -> Tensor:
        weights = (x @ x.transpose(-1, -2) + bias).masked_fill(padding, -math.inf).softmax(-1)
        return ((weights @ x) * seen).square().sum()

    expected = torch.autograd.grad(loss(whole), (whole, bias))
    found = torch.autograd.grad(loss(rows_of(whole, case.layout)), (whole, bias))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("func", [torch.tanh, lambda input: torch.mul(input=input, other=0.5)])
def test_scores_by_name_ask_for_the_padding(func: Any) -> None:
    layout = Layout(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    queries, keys = (rows_of(torch.randn(2, HEADS, 3, WIDTH), layout) for _ in range(2))
    with pytest.raises(MissingRows, match="by name"):
        func(input=queries @ keys.transpose(2, 3))
