"""Sequences of about the same length are computed together, and all at once where a kernel takes packed rows."""

import importlib.util
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.tokens.test_scores import rows_of
from torchboost.core.torch_private import Packed, attention_of_packed_rows
from torchboost.tokens.layout import Layout
from torchboost.tokens.operations import PaddedRows
from torchboost.tokens.rows import BATCH, TOKEN

varlen: Any = None
if importlib.util.find_spec("torch.nn.attention.varlen"):
    from torch.nn.attention import varlen
LENGTHS, KEYS = [40, 38, 9, 1, 33, 31, 30, 7, 7], [12, 3, 12, 11, 2, 3, 12, 9, 10]


class Calls(TorchFunctionMode):
    """Counts calls of ``scaled_dot_product_attention``."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def layout_of(lengths: list[int], side: str = "right") -> Layout:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Layout(mask.flip(1) if side == "left" else mask)


def gradients(query: Tensor, key: Tensor, value: Tensor, layout: Layout, keys: Layout, **options: Any) -> Any:
    """Return the output at the positions of a layout, and the gradients of a loss that reads these alone."""
    parts = [one.clone().requires_grad_() for one in (query, key, value)]
    rows = [rows_of(one, of) for one, of in zip(parts, (layout, keys, keys), strict=True)]
    ways: list[Any] = []
    inputs: Any
    for inputs in (parts, rows):
        output: Any = F.scaled_dot_product_attention(*inputs, **options)
        found = output.rows if inputs is rows else output.transpose(1, 2).flatten(0, 1)[layout.index]
        weights = torch.arange(found.numel(), dtype=found.dtype).view_as(found).sin()
        ways.append([found, *torch.autograd.grad((found * weights).sum(), parts)])
    return ways


def attend(parts: list[Tensor], layout: Layout, keys: Layout, **options: Any) -> Tensor:
    rows: Any = (rows_of(one, of) for one, of in zip(parts, (layout, keys, keys), strict=True))
    found: Any = F.scaled_dot_product_attention(*rows, **options)
    return found.rows


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["all", "causal", "across", "grouped heads"])
def test_outputs_and_gradients_are_those_of_the_padded_batch_in_fewer_calls(kind: str, side: str):
    layout = layout_of(LENGTHS, side)
    keys = layout_of(KEYS, side) if kind == "across" else layout
    torch.manual_seed(0)
    heads = 2 if kind == "grouped heads" else 4
    shapes = [(4, layout), (heads, keys), (heads, keys)]
    parts = [torch.randn(len(LENGTHS), count, of.length, 8, dtype=torch.float64) for count, of in shapes]
    mask = keys.mask[:, None, None]
    if kind == "causal":
        mask = (
            mask & torch.ones(layout.length, layout.length, dtype=torch.bool).tril() | torch.eye(layout.length).bool()
        )
    options: dict[str, Any] = {"attn_mask": mask, "enable_gqa": kind == "grouped heads"}
    query, key, value = parts
    whole, rows = gradients(query, key, value, layout, keys, **options)
    torch.testing.assert_close(rows, whole)
    with Calls() as calls:
        attend(parts, layout, keys, **options)
    assert calls.count - 1 < len(LENGTHS)


@pytest.mark.parametrize("features", [(), (2, 5)])
def test_queries_of_any_dimensions_see_the_keys_of_their_own_sequence_alone(features: tuple[int, ...]):
    layout = layout_of([3, 4, 5, 5, 4])  # as many as the second feature has entries
    torch.manual_seed(0)
    whole = torch.randn(5, *features, 5, 4, dtype=torch.float64)
    rows = PaddedRows(
        whole.movedim(-2, 1).flatten(0, 1)[layout.index],
        layout,
        (BATCH, *range(len(features)), TOKEN, len(features)),
    )
    mask = layout.mask.view(5, *[1] * len(features), 1, 5)
    found: Any = F.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask)
    expected = F.scaled_dot_product_attention(whole, whole, whole, attn_mask=mask)
    torch.testing.assert_close(found.rows, expected.movedim(-2, 1).flatten(0, 1)[layout.index])


def test_a_sequence_without_tokens_changes_nothing():
    layout, fewer = layout_of([3, 0, 5]), layout_of([3, 5])
    torch.manual_seed(0)
    whole = torch.randn(3, 2, 5, 4)
    found = attend([whole] * 3, layout, layout, attn_mask=layout.mask[:, None, None])
    others = attend([whole[[0, 2]]] * 3, fewer, fewer, attn_mask=fewer.mask[:, None, None])
    assert torch.equal(found, others)
    nothing = layout_of([0, 0, 2])
    nothing = Layout(nothing.mask[:2])
    assert attend([whole[:2, :, :2]] * 3, nothing, nothing, attn_mask=nothing.mask[:, None, None]).shape == (0, 2, 4)


def test_dropout_draws_for_each_weight():
    layout = layout_of(LENGTHS)
    torch.manual_seed(0)
    ones = torch.ones(len(LENGTHS), 4, layout.length, 8)
    kept = attend([ones] * 3, layout, layout, attn_mask=layout.mask[:, None, None], dropout_p=0.25)
    assert abs(kept.mean() - 1) < 0.05
    assert kept[..., 0].unique().numel() > 20


class OnCuda(Tensor):
    """Says that it is on a CUDA device."""

    is_cuda = True


@pytest.mark.skipif(varlen is None, reason="torch 2.9 has no kernel for packed rows")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_kernel_for_packed_rows_gets_what_it_takes(causal: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch):
    """No CUDA device is needed: a function with the arguments of the kernel computes sequence by sequence."""
    signature, seen = inspect.signature(varlen.varlen_attn), []

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments
        seen.append(given)
        own, others = (given[f"cu_seq_{side}"].diff().tolist() for side in "qk")
        parts = [given[name].transpose(0, 1) for name in ("query", "key", "value")]
        split: list[Any] = [part.split(lengths, 1) for part, lengths in zip(parts, (own, others, others), strict=True)]
        options: dict[str, Any] = {"is_causal": given.get("is_causal", given.get("window_size") == (-1, 0))}
        outputs = [F.scaled_dot_product_attention(*one, **options) for one in zip(*split, strict=True)]
        return torch.cat(outputs, 1).transpose(0, 1)

    kernel.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float64)
    keys = [3, 8, 1] if not causal else [5, 4, 7]
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(one), 2, 8).as_subclass(OnCuda) for one in ([5, 4, 7], keys, keys))
    options: dict[str, Any] = {"dropout_p": 0.0, "scale": None, "enable_gqa": False, "causal": causal}
    packed = [
        Packed(torch.tensor([0, *itertools.accumulate(one)], dtype=torch.int32), max(one)) for one in ([5, 4, 7], keys)
    ]
    found: Any = attention_of_packed_rows(query, key, value, *packed, **options)
    assert found.dtype is (torch.float64 if autocast else torch.float32)
    for place, one in enumerate(found.split([5, 4, 7])):
        parts = [query.split([5, 4, 7])[place], key.split(keys)[place], value.split(keys)[place]]
        query_part, key_part, value_part = (part.transpose(0, 1) for part in parts)
        plain = F.scaled_dot_product_attention(query_part, key_part, value_part, is_causal=causal)
        torch.testing.assert_close(one, plain.transpose(0, 1), check_dtype=False)
    (given,) = seen
    assert (given["max_q"], given["max_k"]) == (7, max(keys))
    assert given["cu_seq_q"].dtype is given["cu_seq_k"].dtype is torch.int32
    options["dropout_p"] = 0.1  # which the kernel lacks
    assert attention_of_packed_rows(query, key, value, *packed, **options) is None
