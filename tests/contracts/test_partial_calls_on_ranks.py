"""Calls that leave positions out under DDP and FSDP2: each rank has its own lengths, and the run is the padded one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks

pytest.importorskip("transformers")

from tests.algorithms.test_partial_calls import batch, decoder, encoder
from torchboost import boost
from torchboost.algorithms import sparse_head_forward, unpad_forward

pytestmark = pytest.mark.long

ASKED = {"extra": {"unpad": True, "sparse_head": True, "compile": False, "autocast": False, "fused_optimizer": False}}
WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
}


def inputs_of(step: int, *, padded: bool = True) -> dict[str, Tensor]:
    inputs = batch(seed=10 * step + dist.get_rank())
    if not padded:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    return inputs


def weights_of(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained(
    make: Any, options: dict[str, Any], *, inside: bool, accumulate: bool = False, padded: bool = True, how: str
) -> tuple[Tensor, list[str]]:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    remarks: Any = list
    if how == "functions":
        live: list[Any] = [unpad_forward(model), sparse_head_forward(model)]
        remarks = lambda: [one.remark or ("used" if one.calls else "") for one in live]  # noqa: E731
    elif how != "padded":
        calibrate = 1.0 if how == "trial" else False
        asked = {"extra": {name: on for name, on in ASKED["extra"].items() if not on}} if how == "trial" else ASKED
        boost(model, optimizer, config=asked, calibrate=calibrate, total_steps=100_000)
    parallel = DistributedDataParallel(model, **options)
    for step in range(4):
        inputs = inputs_of(step, padded=padded)
        parallel.require_backward_grad_sync = not (accumulate and step % 2 == 0)  # as no_sync()
        if inside:
            loss = parallel(**inputs).loss
        else:
            labels = inputs.pop("labels")
            loss = F.cross_entropy(parallel(**inputs).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        if parallel.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model), remarks()


@cache
def plainly(make: Any, *settings: tuple[str, bool]) -> Tensor:
    return trained(make, {}, **dict(settings), how="padded")[0]  # pyright: ignore[reportArgumentType]


def under_ddp() -> dict[str, tuple[float, list[str]]]:
    found = {}
    first = dist.get_rank() == 0
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for name, options in WRAPPERS.items():
        for inside in (True, False):
            cases[f"{name} {'inside' if inside else 'outside'}"] = options, {"inside": inside, "how": "functions"}
    cases["accumulated"] = {}, {"inside": True, "accumulate": True, "how": "functions"}
    cases["one rank without padding"] = {}, {"inside": True, "padded": first, "how": "functions"}
    cases["boosted"] = WRAPPERS["unused"], {"inside": True, "padded": first, "how": "boost"}
    cases["trial"] = {}, {"inside": True, "padded": first, "how": "trial"}
    for name, (options, settings) in cases.items():
        for make in (decoder, encoder) if settings["how"] == "functions" else (decoder,):
            expected = plainly(make, *sorted((key, value) for key, value in settings.items() if key != "how"))
            weights, remarks = trained(make, options, **settings)
            found[f"{name} {make.__name__}"] = float((weights - expected).norm() / expected.norm()), remarks
    return found


def test_a_run_under_ddp_is_the_padded_one(on_ranks: list[Any]):
    for rank, (found, *_) in enumerate(on_ranks):
        for name, (difference, remarks) in found.items():
            assert difference < 1e-6, (rank, name)
            if name.startswith(("unused outside", "static outside")):  # DDP hands on all outputs of the loss
                assert all("outputs are read" in remark for remark in remarks), (rank, name)
            elif remarks and not (rank and name.startswith("one rank")):
                assert remarks == ["used", "used"], (rank, name)


def under_fsdp2(order: str) -> tuple[float, str]:
    weights, told = [], ""
    for how in ("padded", order):
        torch.manual_seed(0)
        model = decoder()

        def shard(model: Any = model) -> None:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)

        if how != "after":
            shard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        boosted = None if how == "padded" else boost(model, optimizer, config=ASKED, calibrate=False)
        if how == "after":
            shard()
            optimizer.param_groups[0]["params"] = list(model.parameters())
        for step in range(3):
            model(**inputs_of(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()]))
        told = told if boosted is None else boosted.explain()
    return float((weights[1] - weights[0]).norm()), told


def both_orders() -> list[tuple[float, str]]:
    return [under_fsdp2(order) for order in ("before", "after")]


def test_under_fsdp2_everything_is_computed_and_explain_says_so(on_ranks: list[Any]):
    for _, (before, after), _ in on_ranks:
        assert before[0] == after[0] == 0
        assert "FSDP2" in before[1]
        assert "not in effect: outputs are read" in after[1]


def gathered() -> list[float]:
    torch.manual_seed(0)
    model = decoder()
    inputs = inputs_of(0)
    expected = model(**inputs).logits.detach()
    parallel, differences = DistributedDataParallel(model), []
    with unpad_forward(model), sparse_head_forward(model):
        for _ in range(2):
            logits = parallel(**inputs).logits.detach()
            parts = [torch.empty_like(expected) for _ in range(2)]
            dist.all_gather(parts, logits.contiguous())
            objects: list[Any] = [None, None]
            dist.all_gather_object(objects, logits)
            assert [type(one) for one in objects] == [Tensor, Tensor]
            differences += [float((part - expected).abs().max()) for part in (parts[dist.get_rank()], logits)]
    return differences


def on_a_rank() -> tuple[Any, Any, Any]:
    return under_ddp(), both_orders(), gathered()


@pytest.fixture(scope="module")
def on_ranks() -> list[Any]:
    return run_ranks(on_a_rank, 2, timeout=240)


def test_outputs_can_be_gathered(on_ranks: list[Any]):
    for *_, differences in on_ranks:
        assert max(differences) < 1e-5
