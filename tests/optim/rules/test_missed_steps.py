"""Rows that make up for the steps they missed, against dense Adam, which misses none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchboost.errors import IncompatibleError
from torchboost.optim import Adam, LazyAdam

ROWS, WIDTH = 7, 2
FORMS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"nesterov": True},
    {"nesterov": True, "weight_decay": 0.05, "maximize": True},
    {"amsgrad": True},
    {"amsgrad": True, "weight_decay": 0.05},
    {"bias_correction": False},
    {"eps_uncorrected": True, "eps": 1e-3},
    {"eps_uncorrected": True, "nesterov": True, "amsgrad": True, "weight_decay": 0.1, "decoupled_weight_decay": True},
    {"betas": (0.0, 0.9)},
    {"betas": (0.95, 0.5)},
]


class Pair:
    """The same table twice: rows under LazyAdam, whole under Adam."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.lazy = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
        self.dense = nn.Embedding(ROWS, WIDTH, dtype=dtype)
        with torch.no_grad():
            self.lazy.weight.copy_(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)))
        self.dense.load_state_dict(self.lazy.state_dict())
        self.optimizer = LazyAdam(self.lazy.parameters(), exact=True, **options)
        self.other = Adam(self.dense.parameters(), **options)
        self.attachment = self.optimizer.attach(self.lazy)

    def step(self, ids: list[int]) -> None:
        """Train both on the same ids; what is read must already be equal."""
        rows = torch.tensor(ids, dtype=torch.long)
        outputs = []
        for module, optimizer in ((self.lazy, self.optimizer), (self.dense, self.other)):
            optimizer.zero_grad()
            output = module(rows)
            (output.square() - output).sum().backward()
            optimizer.step()
            outputs.append(output.detach())
        self.near(*outputs)

    def set(self, **options: Any) -> None:
        for optimizer in (self.optimizer, self.other):
            optimizer.param_groups[0].update(options)

    def near(self, found: Tensor, wanted: Tensor) -> None:
        wide = found.dtype is torch.float64
        torch.testing.assert_close(found, wanted, rtol=1e-12 if wide else 2e-5, atol=1e-12 if wide else 2e-6)

    def finish(self) -> None:
        """Catch up; then values and state must be those of dense Adam, by content and by layout."""
        self.optimizer.catch_up()
        self.near(self.lazy.weight.detach(), self.dense.weight.detach())
        state, other = self.optimizer.state[self.lazy.weight], self.other.state[self.dense.weight]
        assert set(state) == set(other)
        for key, value in other.items():
            self.near(state[key], value)


touched = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=4), min_size=1, max_size=25)
rates = st.lists(st.sampled_from([0.1, 0.03, 0.01, 0.0]), min_size=1, max_size=6)


@settings(max_examples=80)
@given(touched, rates, st.sampled_from(FORMS))
def test_any_order_of_rows_and_rates_gives_dense_adam(ids, lr, options):
    pair = Pair(**options)
    for step, each in enumerate(ids):
        pair.set(lr=lr[step % len(lr)])
        pair.step(each)
    pair.finish()


def test_long_absence():
    for options in FORMS:
        wide = FORMS.index(options) % 2
        pair = Pair(torch.float64 if wide else torch.float32, **{"lr": 0.01} | options)
        for step in range(100):
            pair.set(lr=0.01 * (1 + step % 5))
            # Row 1 comes back after 1, 2, 4, 8, ... steps, row 2 after 80, rows 3 and 4 stay away, row 5 comes late.
            ids = [0, *([1] if step & (step - 1) == 0 else []), *([2] if step in (3, 83) else [])]
            pair.step([*ids, *([3, 4] if step < 4 else []), *([5] if step == 90 else [])])
        pair.finish()


def test_counts_of_steps_are_exact_if_the_default_precision_is_bfloat16():
    pair = Pair(weight_decay=0.1)  # so the missed steps are made one by one
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(300):
            pair.step([0])
        pair.finish()
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_is_torchs_own_adam_under_a_scheduler():
    for stock, decoupled in [(torch.optim.Adam, False), (torch.optim.AdamW, True)]:
        pair = Pair(lr=0.1, weight_decay=0.02, decoupled_weight_decay=decoupled)
        pair.other = stock(pair.dense.parameters(), lr=0.1, weight_decay=0.02)
        schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 40) for o in (pair.optimizer, pair.other)]
        generator = torch.Generator().manual_seed(0)
        for _ in range(60):
            pair.step((ROWS * torch.rand(2, generator=generator) ** 3).long().tolist())
            for scheduler in schedulers:
                scheduler.step()
        pair.finish()


def test_missed_steps_use_the_options_of_their_time():
    for change in [
        {"weight_decay": 0.3},
        {"betas": (0.5, 0.8)},
        {"eps": 0.1},
        {"nesterov": True},
        {"amsgrad": True},
        {"decoupled_weight_decay": True},
        {"eps_uncorrected": True},
    ]:
        pair = Pair(lr=0.1, weight_decay=0.1)
        for step in range(30):
            if step == 12:
                pair.set(**change)
            pair.step([step % 3, *([4] if step in (2, 11, 20) else [])])
        pair.finish()


def test_leaving_exact_mode_catches_up_first():
    pair = Pair(lr=0.1)
    for step in range(10):
        pair.step([step % 5])
    pair.optimizer.param_groups[0]["exact"] = False
    pair.lazy(torch.tensor([1])).sum().backward()
    assert set(pair.optimizer.state[pair.lazy.weight]) > {"past", "last_step"}
    pair.optimizer.zero_grad()
    pair.lazy.weight.grad = torch.sparse_coo_tensor([[1]], torch.zeros(1, WIDTH), (ROWS, WIDTH), check_invariants=True)
    pair.optimizer.step()
    others = [0, 2, 3, 4, 5, 6]
    pair.near(pair.lazy.weight.detach()[others], pair.dense.weight.detach()[others])
    assert not {"past", "last_step"} & set(pair.optimizer.state[pair.lazy.weight])


def test_a_dense_gradient_between_moves_every_row():
    pair = Pair(lr=0.1, weight_decay=0.1)
    for step in range(12):
        if step % 5 == 4:
            for module, optimizer in ((pair.lazy, pair.optimizer), (pair.dense, pair.other)):
                module.weight.grad = torch.ones(ROWS, WIDTH)
                optimizer.step()
        else:
            pair.step([step % 3])
    pair.finish()


def test_rows_become_nan_where_dense_adam_makes_them_nan():
    pair = Pair(lr=0.1, eps=0.0)
    pair.step([0])
    pair.step([0])
    pair.optimizer.catch_up()
    assert torch.equal(pair.lazy.weight.isnan(), pair.dense.weight.isnan())
    assert pair.lazy.weight[3].isnan().all()


def test_tables_of_other_shapes():
    generator = torch.Generator().manual_seed(0)
    for shape in ((6,), (6, 2, 3)):
        start = torch.randn(shape, generator=generator)
        rows, whole = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        lazy, dense = LazyAdam([rows], lr=0.1, exact=True), Adam([whole], lr=0.1)
        for step in range(8):
            values = torch.randn(2, *shape[1:], generator=generator)
            ids = torch.tensor([[step % 4, 0]])
            rows.grad = torch.sparse_coo_tensor(ids, values, shape, check_invariants=True)
            whole.grad = rows.grad.to_dense()
            lazy.step()
            dense.step()
        lazy.catch_up()
        torch.testing.assert_close(rows, whole)


# Reading


def test_the_hook_is_removable_and_leaves_an_up_to_date_table():
    pair = Pair(lr=0.1)
    for step in range(6):
        pair.step([step % 3])
    late = copy.deepcopy(pair.lazy)
    pair.attachment.remove()
    pair.attachment.remove()
    pair.near(pair.lazy.weight.detach(), pair.dense.weight.detach())
    assert not pair.lazy._forward_pre_hooks
    before = late.weight.detach().clone()
    late(torch.tensor([0, 1]))
    assert torch.equal(late.weight, before), "a copy is nobody's table"


def test_bags_of_embeddings_catch_up_too():
    pair = Pair(lr=0.1)
    for step in range(6):
        pair.step([step % 3])
    bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
    bag.weight = pair.lazy.weight
    ids, offsets = torch.tensor([0, 1, 1, 4]), torch.tensor([0, 3])
    with pair.optimizer.attach(bag):
        found = bag(input=ids.int(), offsets=offsets.int()).detach()
    rows = pair.dense(ids).detach()
    pair.near(found, torch.stack([rows[:3].sum(0), rows[3]]))


def test_bad_requests():
    pair = Pair()
    pair.step([1])
    with pytest.raises(TypeError, match="found Linear"):
        pair.optimizer.attach(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not hold the parameter"):
        pair.optimizer.attach(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(IncompatibleError, match="sparse=False"):
        pair.optimizer.attach(pair.dense)


# The record of options


def test_the_record_grows_with_changes_only_and_is_dropped_when_all_is_caught_up():
    pair = Pair(lr=0.1)
    for step in range(9):
        pair.set(lr=0.1 if step < 4 else 0.01 * step)
        pair.step([0])
    past = pair.optimizer.state[pair.lazy.weight]["past"]
    assert [entry[0] for entry in past["options"]] == [1, 5, 6, 7, 8, 9]
    pair.optimizer.catch_up()
    pair.step([0])
    assert [entry[0] for entry in pair.optimizer.state[pair.lazy.weight]["past"]["options"]] == [10]


def test_work_does_not_grow_once_a_row_rests(monkeypatch):
    made: list[int] = []
    reciprocal = Tensor.reciprocal_
    monkeypatch.setattr(Tensor, "reciprocal_", lambda terms: made.append(len(terms)) or reciprocal(terms))
    counts = []
    for steps in (300, 600):
        pair = Pair(lr=0.01, weight_decay=0.01, decoupled_weight_decay=True)
        pair.step([0, 1])
        for _ in range(steps):
            pair.optimizer.zero_grad()
            pair.lazy(torch.tensor([0])).sum().backward()
            pair.optimizer.step()
        made.clear()
        pair.optimizer.catch_up()
        counts.append(sum(made))
    assert 0 < counts[0] <= counts[1] <= counts[0] + 2 <= 320
