"""Sequences of about the same length are computed together, and all at once where a kernel takes packed rows."""

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


def test_kernels_for_packed_rows_get_no_empty_sequences(monkeypatch: pytest.MonkeyPatch):
    """Kernels do not say what gradient keys without a query get, and nested tensors refuse such sequences."""
    sizes: list[int] = []

    def kernel(query: Tensor, *_: Any, **__: Any) -> Tensor:
        sizes.append(len(query))
        return query

    monkeypatch.setattr("torchboost.tokens.attention.attention_of_packed_rows", kernel)
    keys = layout_of([3, 2, 5])
    for lengths in ([3, 2, 5], [3, 0, 5]):
        attend([torch.randn(3, 2, 5, 4)] * 3, layout_of(lengths), keys, attn_mask=keys.mask[:, None, None])
    assert sizes == [10]


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


def per_sequence(query: Tensor, key: Tensor, value: Tensor, lengths: Any, causal: bool) -> Tensor:
    """Return the attention of each sequence of packed rows by itself."""
    parts = [part.transpose(0, 1) for part in (query, key, value)]
    split: list[Any] = [
        part.split(own, 1) for part, own in zip(parts, (lengths[0], lengths[1], lengths[1]), strict=True)
    ]
    outputs = [F.scaled_dot_product_attention(*one, is_causal=causal) for one in zip(*split, strict=True)]
    return torch.cat(outputs, 1).transpose(0, 1)


def packed_of(lengths: list[int], device: str = "cpu") -> Packed:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return Packed(starts, max(lengths))


@pytest.mark.parametrize("name", ["flash", "efficient"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_kernel_for_packed_rows_gets_what_it_takes(
    causal: bool, autocast: bool, name: str, monkeypatch: pytest.MonkeyPatch
):
    """No CUDA device is needed: a function with the arguments of the operator computes sequence by sequence."""
    operator = f"_{name}_attention_forward"
    schema = getattr(torch.ops.aten, operator).default._schema
    names, seen = [argument.name for argument in schema.arguments], []

    def kernel(*args: Any, **kwargs: Any) -> tuple[Tensor]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        assert given.keys() <= set(names)
        seen.append(given)
        own, others = (
            next(given[one] for one in (f"cum_seq_{side}", f"cu_seqlens_{side}") if one in given).diff().tolist()
            for side in "qk"
        )
        parts = [given[one].reshape(-1, *given[one].shape[-2:]) for one in ("query", "key", "value")]
        is_causal = bool(given.get("is_causal", given.get("custom_mask_type")))
        found = per_sequence(*parts, (own, others), is_causal)
        return (found[None] if name == "efficient" else found,)

    monkeypatch.setattr(torch.ops.aten, operator, kernel)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda params: name == "flash")
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", lambda params: name == "efficient")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: autocast)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float64)
    own, keys = [5, 4, 7], [3, 8, 1] if not causal else [5, 4, 7]
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(one), 2, 8).as_subclass(OnCuda) for one in (own, keys, keys))
    options: dict[str, Any] = {"dropout_p": 0.1, "scale": None, "enable_gqa": False, "causal": causal}
    found: Any = attention_of_packed_rows(query, key, value, packed_of(own), packed_of(keys), **options)
    assert found.dtype is (torch.float64 if autocast else torch.float32)
    plain = per_sequence(query, key, value, (own, keys), causal)
    torch.testing.assert_close(found, plain, check_dtype=False)
    (given,) = seen
    assert given["dropout_p"] == 0.1
    assert [given[one] for one in names if one.startswith("max_")] == [7, max(keys)]
    monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", lambda params: False)
    assert attention_of_packed_rows(query, key, value, packed_of(own), packed_of(keys), **options) is None


def test_autocast_leaves_float64_to_other_kernels(monkeypatch: pytest.MonkeyPatch):
    asked: list[torch.dtype] = []

    def refuse(params: Any) -> bool:
        asked.append(params.query.dtype)
        return False

    for name in ("flash", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", refuse)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
    rows, places = torch.randn(5, 2, 8, dtype=torch.float64).as_subclass(OnCuda), packed_of([2, 3])
    attention_of_packed_rows(rows, rows, rows, places, places, causal=False, dropout_p=0.0)
    assert asked == [torch.float64] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_for_packed_rows_compute_each_sequence(causal: bool, dtype: torch.dtype, tolerance: float):
    torch.manual_seed(0)
    lengths = [40, 38, 9, 1, 130]
    shape, places = (sum(lengths), 4, 64), packed_of(lengths, "cuda")
    parts = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    options: dict[str, Any] = {"scale": None, "enable_gqa": False, "causal": causal}
    found = attention_of_packed_rows(*parts, places, places, dropout_p=0.0, **options)
    assert found is not None
    exact: Any = [part.detach().double().requires_grad_() for part in parts]
    plain = per_sequence(*exact, (lengths, lengths), causal)
    weights = torch.randn_like(plain)
    own = torch.autograd.grad((found.double() * weights).sum(), parts)
    others = torch.autograd.grad((plain * weights).sum(), exact)
    for one, other in zip((found, *own), (plain, *others), strict=True):
        assert (one.double() - other).norm() < tolerance * other.norm()
    ones = [torch.ones_like(part) for part in parts]
    dropped = attention_of_packed_rows(*ones, places, places, dropout_p=0.25, **options)
    assert dropped is not None
    assert abs(float(dropped.float()[:, :, 0].mean()) - 1) < 0.05
    assert dropped.unique().numel() > 20
