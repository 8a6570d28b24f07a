"""Outputs with rows, after the call: what lacks rows is read from the whole output, also if it was written to."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.rows import BATCH, TOKEN, Rows

MASK = torch.tensor([[True, True, False], [True, False, False]])


def output() -> tuple[Tensor, Any, list[int]]:
    """Return a whole output, its rows, and how often they asked for it."""
    whole, asked = torch.randn(2, 3, 4), []
    rows = PaddedRows(whole.flatten(0, 1)[MASK.flatten()], Layout(MASK), (BATCH, TOKEN, 0))

    def source() -> Tensor:
        asked.append(1)
        return whole

    rows.source = source
    return whole, rows, asked


def test_rows_answer_and_the_rest_is_asked_for():
    whole, rows, asked = output()
    twice = rows * 2
    assert isinstance(twice, Rows)
    torch.testing.assert_close(twice[MASK], whole[MASK] * 2)
    assert not asked
    torch.testing.assert_close(twice.sum(), whole.sum() * 2)
    assert asked


def test_each_part_of_a_result_has_its_whole():
    whole, rows, _ = output()
    for found, expected in zip(rows.chunk(2, -1), whole.chunk(2, -1), strict=True):
        assert isinstance(found, Rows)
        torch.testing.assert_close(found.sum(), expected.sum())


def test_a_written_output_is_read_whole():
    whole, rows, _ = output()
    expected = whole / 2
    view = rows[:, :, :2]
    rows /= 2
    torch.testing.assert_close(rows.sum(), expected.sum())
    torch.testing.assert_close(rows[MASK], expected[MASK])
    torch.testing.assert_close(view + 0, expected[:, :, :2])


def test_writing_to_a_view_changes_the_output():
    whole, rows, _ = output()
    expected = whole.clone()
    expected[:, :2] *= 3
    view = rows[:, :2]
    view.mul_(3)
    torch.testing.assert_close(rows + 0, expected)
    torch.testing.assert_close(view + 0, expected[:, :2])


def test_what_was_read_before_a_write_keeps_its_value():
    whole, rows, _ = output()
    before = whole.clone()
    twice = rows * 2
    rows.add_(1)
    torch.testing.assert_close(twice[MASK], before[MASK] * 2)
    torch.testing.assert_close(twice.sum(), before.sum() * 2)


def test_writing_to_one_token_says_so():
    _, rows, _ = output()
    first = rows[:, 0]
    first += 1
    with pytest.raises(RuntimeError, match="written to in place"):
        rows.sum()
    _, rows, _ = output()
    first = rows[:, 0]
    with pytest.raises(RuntimeError, match="written to in place"):
        rows.add_(1)
    assert first.shape == (2, 4)


def test_assigning_to_entries_of_an_output():
    whole, rows, _ = output()
    expected = whole.clone()
    expected[0, 1] = 5
    rows[0, 1] = 5
    torch.testing.assert_close(rows + 0, expected)
