"""Functions of torch on rows: what they return is what the whole tensor has at these positions, or nothing."""

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.rows import BATCH, TOKEN, MissingRows, Rows
from torchboost.tokens.scores import Scores

Pair = tuple[Tensor, Tensor]
"""A whole tensor, and its rows or a whole tensor as well."""


ALONE = (
    *("relu", "gelu", "tanh", "neg", "abs", "sin", "square", "clone", "detach", "contiguous", "sigmoid", "sign"),
    *("double", "dropout"),
)
ALONG = ("softmax", "log_softmax", "mean", "sum", "amax", "argmax", "max", "var", "logsumexp", "cumsum")


class Program:
    """Runs random functions on whole tensors, whose padding has random numbers, and on rows."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.batch, self.length = rng.choice((1, 1, 2, 3, 4)), rng.choice((1, 2, 3, 4, 5))
        self.sizes = [self.batch, self.length, 1, 2, 3, 4]
        torch.manual_seed(rng.randrange(1 << 30))
        mask = torch.rand(self.batch, self.length) < 0.6
        mask[:, rng.randrange(self.length)] = True
        self.layout = Layout(mask)
        self.pool: list[Pair] = [self.start() for _ in range(2)]
        self.answered = 0

    def start(self) -> Pair:
        features = [self.rng.choice((1, 2, 3, 4)) for _ in range(self.rng.choice((0, 1, 1, 2)))]
        whole = torch.randn(self.batch, self.length, *features, dtype=torch.float64)
        rows = PaddedRows(whole.flatten(0, 1)[self.layout.index], self.layout, (BATCH, TOKEN, *range(len(features))))
        return whole, rows

    def run(self, steps: int) -> None:
        for _ in range(steps):
            whole, rows = self.rng.choice([pair for pair in self.pool if isinstance(pair[1], Rows)])
            function, writes = self.function(whole)
            try:
                expected = function(whole, 0)
            except (RuntimeError, IndexError, ValueError, TypeError):
                if writes:
                    return
                continue
            try:
                found = function(rows, 1)
            except MissingRows:
                if writes:
                    return
                continue
            self.answered += 1
            pairs = zip(expected, found, strict=True) if isinstance(expected, (tuple, list)) else [(expected, found)]
            self.pool += [pair for pair in pairs if pair[0].numel()]
            self.check()
            self.pool = self.pool[:2] + self.pool[2:][-8:]

    def check(self) -> None:
        for pair in [*self.pool]:
            if isinstance(pair[1], Rows):
                try:
                    pair[1].check()
                except MissingRows:
                    self.pool = [one for one in self.pool if one is not pair]  # no function takes it any more
                    continue
            agree(*pair)
        while not any(isinstance(rows, Rows) for _, rows in self.pool):
            self.pool.append(self.start())

    # What functions are drawn.

    def function(self, x: Tensor) -> tuple[Callable[[Any, int], Any], bool]:
        kinds = [self.alone, self.broadcast, self.broadcast, self.along, self.shape, self.shape, self.index, self.parts]
        kinds += [self.linear, self.masked, self.masked, self.in_place, self.joined, self.product]
        return self.rng.choice(kinds)(x)

    def alone(self, x: Tensor) -> Any:
        name = self.rng.choice(ALONE)
        if name == "dropout":
            return (lambda t, _: F.dropout(t, 0.0)), False
        how = getattr(torch, name, None) or getattr(F, name, None) or getattr(Tensor, name)
        if self.rng.random() < 0.2:
            return (lambda t, _: t.clamp(-0.5, self.layout.length)), False
        return (lambda t, _: how(t)), False

    def broadcast(self, x: Tensor) -> Any:
        how = self.rng.choice((torch.add, torch.sub, torch.mul, torch.maximum, torch.lt, operator.add, operator.mul))
        other, mate = self.other(x)
        turned = self.rng.random() < 0.3
        return (lambda t, side: how((other, mate)[side], t) if turned else how(t, (other, mate)[side])), False

    def other(self, x: Tensor) -> Pair:
        mates = [pair for pair in self.pool if pair[0].ndim == x.ndim]
        if mates and self.rng.random() < 0.3:
            return self.rng.choice(mates)
        tensor = torch.randn(self.broadcasting(x.shape), dtype=torch.float64)
        return tensor, tensor

    def broadcasting(self, shape: Any) -> list[int]:
        sizes = [size if self.rng.random() < 0.6 else self.rng.choice((1, size, 1, 3)) for size in shape]
        return sizes[self.rng.choice((0, 0, 0, 1, 2)) :] if self.rng.random() < 0.9 else [2, *sizes]

    def along(self, x: Tensor) -> Any:
        dim: Any = self.dim(x)
        keep = self.rng.random() < 0.5
        kind = self.rng.choice(ALONG)
        if kind in ("softmax", "log_softmax", "cumsum"):
            return (lambda t, _: getattr(torch, kind)(t, dim)), False
        if kind in ("mean", "sum", "amax") and self.rng.random() < 0.4:
            dim = self.rng.choice(((dim,), (-1, -2), [dim, -1]))
        if self.rng.random() < 0.15:
            return (lambda t, _: t.var(False) if kind == "var" else t.sum()), False
        return (lambda t, _: getattr(t, kind)(dim, keepdim=keep)), False

    def dim(self, x: Tensor) -> int:
        return self.rng.randrange(-x.ndim, x.ndim) if x.ndim else 0

    def shape(self, x: Tensor) -> Any:
        kind = self.rng.randrange(9)
        if kind == 0:
            order = [*range(x.ndim)]
            self.rng.shuffle(order)
            return (lambda t, _: t.permute(order)), False
        if kind == 1:
            one, two = self.dim(x), self.dim(x)
            return (lambda t, _: t.transpose(one, two)), False
        if kind == 2:
            place = self.rng.randrange(-x.ndim - 1, x.ndim + 1)
            return (lambda t, _: t.unsqueeze(place)), False
        if kind == 3:
            place = self.dim(x)
            return (lambda t, _: t.squeeze(place)), False
        if kind == 4:
            sizes = [self.rng.choice((-1, size if size > 1 else 3, size)) for size in x.shape]
            return (lambda t, _: t.expand(sizes)), False
        if kind == 5:
            start, end = self.dim(x), self.dim(x)
            return (lambda t, _: t.flatten(start, end)), False
        if kind == 6:
            dim, size = self.dim(x), self.rng.choice((1, 2, 3))
            return (lambda t, _: t.unflatten(dim, (size, -1))), False
        sizes = self.regrouped([*x.shape])
        return (lambda t, _: t.reshape(sizes)), False

    def regrouped(self, sizes: list[int]) -> list[int]:
        for _ in range(self.rng.choice((1, 2, 3))):
            place = self.rng.randrange(len(sizes) + 1) if sizes else 0
            kind = self.rng.randrange(3)
            if kind == 0 and place + 1 < len(sizes):
                sizes[place : place + 2] = [sizes[place] * sizes[place + 1]]
            elif kind == 1 and place < len(sizes):
                part = self.rng.choice([self.batch, self.length, 2, 3])
                if sizes[place] % part == 0:
                    sizes[place : place + 1] = [part, sizes[place] // part]
            else:
                sizes.insert(place, 1)
        if sizes and self.rng.random() < 0.4:
            sizes[self.rng.randrange(len(sizes))] = -1
        return sizes

    def index(self, x: Tensor) -> Any:
        if self.rng.random() < 0.15:
            mask = torch.rand(self.batch, self.length) < 0.3
            mask = mask & self.layout.mask if self.rng.random() < 0.7 else mask
            return (lambda t, _: t[mask]), False
        if self.rng.random() < 0.15:
            pair = torch.randint(0, self.batch, (2,)), torch.randint(0, self.length, (2,))
            return (lambda t, _: t[pair]), False
        parts: list[Any] = []
        for size in x.shape[: self.rng.randrange(x.ndim + 1)]:
            start = self.rng.randrange(-size, size)
            slices = [slice(None), slice(None), slice(start, None), slice(None, start), slice(None, None, 2)]
            parts.append(self.rng.choice([*slices, start, None, [start], torch.tensor([start, 0]), ...]))
        if sum(part is ... for part in parts) > 1:
            parts = []
        return (lambda t, _: t[tuple(parts)]), False

    def parts(self, x: Tensor) -> Any:
        dim, kind = self.dim(x), self.rng.randrange(5)
        size = x.shape[dim] if x.ndim else 1
        start, count = self.rng.randrange(-size, size), self.rng.choice((1, 2))
        if kind == 0:
            return (lambda t, _: t.narrow(dim, start, count)), False
        if kind == 1:
            return (lambda t, _: t.select(dim, start)), False
        if kind == 2:
            return (lambda t, _: t.split(count, dim)), False
        if kind == 3:
            return (lambda t, _: t.chunk(2, dim=dim)), False
        return (lambda t, _: t.unbind(dim)), False

    def joined(self, x: Tensor) -> Any:
        dim = self.dim(x)
        other, mate = self.other(x)
        how = self.rng.choice((torch.cat, torch.stack))
        if self.rng.random() < 0.2:
            other = mate = torch.empty(0, dtype=torch.float64)
        return (lambda t, side: how([(other, mate)[side], t], dim=dim)), False

    def linear(self, x: Tensor) -> Any:
        width = x.shape[-1] if x.ndim else 1
        weight, bias = torch.randn(3, width, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
        if self.rng.random() < 0.4:
            return (lambda t, _: F.layer_norm(t, (width,))), False
        if self.rng.random() < 0.3:
            return (lambda t, _: t @ weight.t()), False
        return (lambda t, _: F.linear(t, weight, bias)), False

    def product(self, x: Tensor) -> Any:
        other, mate = self.other(x)
        return (lambda t, side: torch.matmul(t, (other, mate)[side].transpose(-1, -2))), False

    def masked(self, x: Tensor) -> Any:
        mask = self.layout.mask
        if self.rng.random() < 0.3:
            mask = torch.rand(mask.shape) < 0.5
        mask = mask.view(*mask.shape, *[1] * max(x.ndim - 2, 0))
        if x.ndim > 2 and x.shape[:2] == mask.shape[:2] and self.rng.random() < 0.4:
            mask = mask.expand(x.shape)
        kind = self.rng.randrange(5)
        if kind == 0:
            return (lambda t, _: t * mask), False
        if kind == 1:
            return (lambda t, _: t.masked_fill(~mask, 0.5)), False
        if kind == 2:
            return (lambda t, _: torch.where(mask, t, 2.0)), False
        if kind == 3:
            return (lambda t, _: (t * mask).sum(1)), False
        return (lambda t, _: (t.masked_fill(~mask, -1e9)).amax(1)), False

    def in_place(self, x: Tensor) -> Any:
        other, mate = self.other(x)
        mask = torch.rand(x.shape[:2]) < 0.5
        hidden = ~self.layout.mask

        def write(t: Any, _: int) -> Any:
            t[mask] = 0.25
            return t

        def hide(t: Any, _: int) -> Any:
            t[hidden] = 3.0
            return t

        def add(t: Any, side: int) -> Any:
            t += (other, mate)[side]
            return t

        writes = [write, hide, add, lambda t, _: t.mul_(2), lambda t, _: F.relu(t, inplace=True), lambda t, _: t.neg_()]
        writes += [lambda t, _: t.masked_fill_(mask, 1.5), lambda t, side: t.mul_((other, mate)[side])]
        return self.rng.choice(writes), True


def agree(whole: Tensor, found: Tensor) -> None:
    """Compare rows, or what a function made of them, with the whole tensor."""
    assert found.shape == whole.shape
    assert found.dtype == whole.dtype
    if not isinstance(found, Rows):
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9, equal_nan=True)
        return
    if isinstance(found, Scores):  # they are not computed before they meet values
        return
    places = found.places
    rows = whole.movedim(places, tuple(range(len(places)))).flatten(0, len(places) - 1)[found.positions.index]
    torch.testing.assert_close(found.rows, rows, rtol=1e-9, atol=1e-9, equal_nan=True)
    try:
        padded = found.whole()
    except MissingRows:
        return
    torch.testing.assert_close(padded, whole, rtol=1e-9, atol=1e-9, equal_nan=True)


pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")


def test_programs_of_random_functions_of_which_most_are_answered():
    answered = 0
    for seed in range(400):
        program = Program(random.Random(seed))
        program.run(12)
        answered += program.answered
    assert answered > 2000


def rows_of(whole: Tensor, mask: Tensor) -> Any:
    return PaddedRows(whole.flatten(0, 1)[mask.flatten()], Layout(mask), (BATCH, TOKEN, *range(whole.ndim - 2)))


MASK = torch.tensor([[True, True, False], [True, False, False]])


def test_a_flag_is_no_dimension():
    with pytest.raises(MissingRows):
        rows_of(torch.randn(2, 3, 4), MASK).permute(2, 0, 1).var(False)


def test_what_is_written_through_a_view_is_not_read_elsewhere():
    rows = rows_of(torch.randn(2, 3, 4), MASK)
    view = rows.view(6, 4)
    first = rows[:, 0]
    with pytest.raises(MissingRows, match="of which a part was taken"):
        view.add_(1)
    first += 1
    with pytest.raises(MissingRows, match="a view of its argument was written to"):
        rows.relu()


def test_a_larger_batch_is_not_read_in_part():
    rows = rows_of(torch.randn(1, 3, 4), MASK[:1])
    with pytest.raises(MissingRows, match="it repeats positions"):
        torch.add(rows, torch.randn(4, 3, 4))


def test_dropout_of_logits_is_drawn_once():
    rows = PaddedRows(torch.ones(3, 4), Layout(MASK), (BATCH, TOKEN, 0), (lambda rows: rows * 2,))
    dropped = F.dropout(rows, 0.5)
    assert isinstance(dropped, Rows)
    torch.testing.assert_close(dropped.picked(torch.tensor([0, 1, 2])), dropped.rows)


@pytest.mark.parametrize("pool", ["mean", "max", "count"])
def test_pooling_over_tokens(pool: str):
    def pooled(x: Any) -> Tensor:
        every = MASK.unsqueeze(-1).expand(x.size()).float()
        if pool == "mean":
            return torch.sum(x * every, 1) / torch.clamp(every.sum(1), min=1e-9)
        if pool == "count":
            return (((x * MASK[..., None]) * 2).square() + 1).sum(1)
        x[every == 0] = -1e9
        return torch.max(x, 1)[0]

    whole = torch.randn(2, 3, 4)
    torch.testing.assert_close(pooled(rows_of(whole, MASK)), pooled(whole))


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits])
def test_losses_of_entries_with_a_mask(loss: Any):
    whole, target = torch.randn(2, 3), torch.rand(2, 3)
    rows = rows_of(whole, MASK)
    expected = (loss(whole, target, reduction="none") * MASK).sum() / MASK.sum()
    torch.testing.assert_close((loss(rows, target, reduction="none") * MASK).sum() / MASK.sum(), expected)
    with pytest.raises(MissingRows):
        loss(rows, target)


def test_a_write_that_needs_the_padding_is_not_lost():
    rows = rows_of(torch.randn(2, 3, 4), MASK) * MASK[..., None]
    with pytest.raises(MissingRows, match="it writes to its argument"):
        rows.cumsum_(1)
    with pytest.raises(MissingRows):
        torch.add(rows, 1, out=torch.empty(2, 3, 4))


def test_a_mask_that_changes_later_fills_nothing():
    mask = MASK[..., None].float()
    rows = rows_of(torch.randn(2, 3, 4), MASK) * mask
    mask += 1
    with pytest.raises(MissingRows):
        rows.sum()


def test_what_is_written_to_a_detached_tensor_is_not_read_elsewhere():
    rows = rows_of(torch.randn(2, 3, 4), MASK) * MASK[..., None]
    rows.detach()[~MASK] = 3.0
    with pytest.raises(MissingRows, match="a view of its argument was written to"):
        rows.sum(1)
