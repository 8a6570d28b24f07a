"""Lazy Adam against the reference: rows, moments and training, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity.networks import assert_step, single
from torchboost.optim import Adam, Coalesce, LazyAdam

ROWS = ["lazyadam_sparse", "lazyadam_sparse_dup", "lazyadam_sparse_wd", "adam_use_lazy_sparse"]
EVERY_ROW = "adam_sparse"
TRAINED = "lazyadam_embedding_train"
UNMERGED = "lazyadam_sparse_nodedup_quirk"
DECAYED_TWICE = "lazyadam_sparse_wd_dup_quirk"


def options_of(hyper: dict[str, Any]) -> dict[str, Any]:
    """The reference adds epsilon before the second moment is corrected for its start at zero."""
    return {
        "lr": single(hyper["learning_rate"]),
        "betas": (single(hyper["beta1"]), single(hyper["beta2"])),
        "eps": single(hyper["eps"]),
        "weight_decay": single(hyper.get("weight_decay", 0.0)),
        "nesterov": hyper.get("use_nesterov", False),
        "eps_uncorrected": True,
    }


def tables_of(optimizer: Adam, arrays: dict[str, np.ndarray], param: nn.Parameter) -> dict[str, list[Tensor]]:
    """Feed the rows of a case; return the table and its moments after every step."""
    found: dict[str, list[Tensor]] = {"param": [], "m": [], "v": []}
    for indices, values in zip(arrays["indices"], arrays["values"], strict=True):
        ids = torch.from_numpy(indices).long()[None]
        param.grad = torch.sparse_coo_tensor(ids, torch.from_numpy(values), tuple(param.shape), check_invariants=True)
        optimizer.step()
        state = optimizer.state[param]
        for key, value in (("param", param), ("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
            found[key].append(value.detach().clone())
    return found


def close(found: dict[str, list[Tensor]], arrays: dict[str, np.ndarray], tolerance: dict[str, float]) -> bool:
    return all(
        torch.allclose(torch.stack(values), torch.from_numpy(arrays[key]), **tolerance) for key, values in found.items()
    )


def table(arrays: dict[str, np.ndarray]) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(arrays["init"].copy()))


def test_rows_and_moments_equal_the_oracle(oracle):
    for name in ROWS:
        meta, arrays = oracle[name]
        param = table(arrays)
        found = tables_of(LazyAdam([param], **options_of(meta["hyper"])), arrays, param)
        assert close(found, arrays, meta["tolerance"])


@pytest.mark.parametrize("exact", [False, True], ids=["coalesced", "exact"])
def test_moving_every_row_equals_the_oracle(oracle, exact):
    meta, arrays = oracle[EVERY_ROW]
    param = table(arrays)
    options = options_of(meta["hyper"])
    if not exact:
        found = tables_of(Adam([param], **options, transforms=(Coalesce(dense=True),)), arrays, param)
        assert close(found, arrays, meta["tolerance"])
        return
    optimizer = LazyAdam([param], **options, exact=True)
    optimizer.register_step_post_hook(lambda *_: optimizer.catch_up())
    assert close(tables_of(optimizer, arrays, param), arrays, meta["tolerance"])


def test_exact_mode_arrives_where_the_oracle_arrives_without_catching_up_between(oracle):
    meta, arrays = oracle[EVERY_ROW]
    param = table(arrays)
    optimizer = LazyAdam([param], **options_of(meta["hyper"]), exact=True)
    tables_of(optimizer, arrays, param)
    assert not torch.allclose(param.detach(), torch.from_numpy(arrays["param"][-1]), **meta["tolerance"])
    optimizer.catch_up()
    torch.testing.assert_close(param.detach(), torch.from_numpy(arrays["param"][-1]), **meta["tolerance"])


def test_a_net_with_an_embedding_trains_like_the_oracle(oracle):
    meta, arrays = oracle[TRAINED]
    sizes = meta["hyper"]["net"]
    embedding, dense = nn.Embedding(sizes["v"], sizes["d"], sparse=True), nn.Linear(sizes["d"], sizes["o"])
    named = {"emb.embedding_table": embedding.weight, "fc.weight": dense.weight, "fc.bias": dense.bias}
    for name, param in named.items():
        param.data.copy_(torch.from_numpy(arrays[f"init/{name}"]))
    optimizer = LazyAdam(named.values(), **options_of(meta["hyper"]))
    for step in range(meta["steps"]):
        x, y = torch.from_numpy(arrays["x"][step]).long(), torch.from_numpy(arrays["y"][step]).long()
        loss = F.cross_entropy(dense(embedding(x).mean(1)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert_step(oracle[TRAINED], step, loss, named)


def test_duplicates_are_merged_where_the_reference_forgets_to(oracle):
    for name in [UNMERGED, DECAYED_TWICE]:
        meta, arrays = oracle[name]
        param = table(arrays)
        options = options_of(meta["hyper"])
        found = tables_of(LazyAdam([param], **options), arrays, param)
        assert not close(found, arrays, meta["tolerance"])
        merged = table(arrays)
        size = tuple(merged.shape)
        rows = [
            torch.sparse_coo_tensor(torch.from_numpy(i).long()[None], torch.from_numpy(v), size, check_invariants=True)
            for i, v in zip(arrays["indices"], arrays["values"], strict=True)
        ]
        optimizer = LazyAdam([merged], **options)
        for grad in rows:
            merged.grad = grad.coalesce()
            optimizer.step()
        assert torch.equal(merged, param)
