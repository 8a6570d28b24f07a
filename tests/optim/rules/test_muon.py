"""Muon equals torch's and a plain form in float64; filters, stacks, shards, checkpoints, errors."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.optimizers import give_grads, parameters, same, train
from tests.support.ranks import run_ranks
from tests.support.traffic import bytes_sent
from torchboost.errors import IncompatibleError
from torchboost.optim import MixedOptimizer, Muon, muon_groups
from torchboost.optim.rules import muon
from torchboost.optim.rules.muon import QUINTIC, faster_dtype, orthogonalized

OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-4, 0.3),
        "weight_decay": st.sampled_from([0.0, 0.01, 0.5]),
        "momentum": st.sampled_from([0.0, 0.5, 0.95]),
        "nesterov": st.booleans(),
        "ns_steps": st.sampled_from([1, 3, 5, 7]),
        "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
    }
)
SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5)


def plainly(matrix: Tensor, steps: int = 5) -> Tensor:
    """The published algorithm, one matrix at a time, in float64."""
    a, b, c = QUINTIC
    x = matrix.double()
    if x.shape[0] > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def by_hand(weights: list[Tensor], steps: int, options: dict[str, Any]) -> list[Tensor]:
    """Muon in float64, written from its definition."""
    weights = [weight.detach().double().clone() for weight in weights]
    averages = [torch.zeros_like(weight) for weight in weights]
    lr, beta = options["lr"], options["momentum"]
    for step in range(steps):
        grads = [nn.Parameter(torch.zeros(weight.shape)) for weight in weights]
        give_grads(grads, step)
        for weight, average, holder in zip(weights, averages, grads, strict=True):
            grad = holder.grad.double()
            average.mul_(beta).add_(grad, alpha=1 - beta)
            direction = (1 - beta) * grad + beta * average if options["nesterov"] else average
            rows, columns = weight.shape
            scale = math.sqrt(max(1, rows / columns))
            if options["adjust_lr_fn"] == "match_rms_adamw":
                scale = 0.2 * math.sqrt(max(rows, columns))
            weight.mul_(1 - lr * options["weight_decay"])
            weight.sub_(lr * scale * plainly(direction, options["ns_steps"]))
    return weights


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=SHAPES, options=OPTIONS)
def test_equals_its_definition_in_float64(shapes, options):
    params = parameters(shapes)
    wanted = by_hand(params, 3, options)
    train(Muon(params, ns_dtype=torch.float32, **options), params, range(3))
    for ours, theirs in zip(params, wanted, strict=True):
        assert float((ours.detach().double() - theirs).norm()) < 1e-5 * (3 + float(theirs.norm()))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=SHAPES, options=OPTIONS)
def test_equals_torchs_muon_up_to_the_rounding_of_bfloat16(shapes, options):
    """Each step of torch's form is off by up to a few percent, and of small singular values by more."""
    ours, theirs = parameters(shapes), parameters(shapes)
    start = [param.detach().clone() for param in ours]
    train(Muon(ours, ns_dtype=torch.bfloat16, **options), ours, range(2))
    train(torch.optim.Muon(theirs, **options), theirs, range(2))
    for mine, other, before in zip(ours, theirs, start, strict=True):
        moved = float((other - before).detach().norm())
        assert float((mine - other).detach().norm()) < 0.15 * moved + 1e-5


def test_checkpoints_load_both_ways():
    for back in (False, True):
        ours, theirs = parameters([(6, 4), (4, 9)]), parameters([(6, 4), (4, 9)])
        pair: list[torch.optim.Optimizer] = [torch.optim.Muon(theirs), Muon(ours, ns_dtype=torch.bfloat16)]
        params = [theirs, ours]
        if back:
            pair, params = pair[::-1], params[::-1]
        pair[0].param_groups[0]["lr"], pair[1].param_groups[0]["lr"] = 0.02, 0.5
        train(pair[0], params[0], range(3))
        with torch.no_grad():
            for target, source in zip(params[1], params[0], strict=True):
                target.copy_(source)
        pair[1].load_state_dict(copy.deepcopy(pair[0].state_dict()))
        assert pair[1].param_groups[0]["lr"] == 0.02
        for first, second in zip(pair[0].state.values(), pair[1].state.values(), strict=True):
            assert torch.equal(first["momentum_buffer"], second["momentum_buffer"])
        for optimizer, weights in zip(pair, params, strict=True):
            train(optimizer, weights, [3])
        for one, other in zip(*params, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0.02 * 0.1)


def test_a_filter_is_the_matrix_of_its_joined_axes():
    filters, matrices = parameters([(6, 3, 2, 2), (4, 6, 3)]), parameters([(6, 12), (4, 18)])
    with torch.no_grad():
        for matrix, one in zip(matrices, filters, strict=True):
            matrix.copy_(one.flatten(1))
    first, second = Muon(filters, lr=0.1), Muon(matrices, lr=0.1)
    for step in range(3):
        give_grads(filters, step)
        for matrix, one in zip(matrices, filters, strict=True):
            matrix.grad = one.grad.flatten(1).clone()
        first.step()
        second.step()
    assert same([one.flatten(1) for one in filters], matrices)


def test_channels_last_filters_move_as_contiguous_ones():
    plain, last = parameters([(8, 4, 3, 3)]), parameters([(8, 4, 3, 3)])
    last[0].data = last[0].data.to(memory_format=torch.channels_last)
    train(Muon(plain, lr=0.1, ns_dtype=torch.float32), plain, range(3))
    optimizer = Muon(last, lr=0.1, ns_dtype=torch.float32)
    for step in range(3):
        give_grads(last, step)
        last[0].grad = last[0].grad.to(memory_format=torch.channels_last)
        optimizer.step()
    assert last[0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(plain[0], last[0])


def test_a_stack_is_its_matrices():
    stack = parameters([(5, 6, 4)])
    apart = [nn.Parameter(one.detach().clone()) for one in stack[0]]
    first = Muon(stack, lr=0.1, stacked=True, ns_dtype=torch.float32)
    second = Muon(apart, lr=0.1, ns_dtype=torch.float32)
    for step in range(3):
        give_grads(stack, step)
        for one, grad in zip(apart, stack[0].grad, strict=True):
            one.grad = grad.clone()
        first.step()
        second.step()
    torch.testing.assert_close(stack[0], torch.stack(apart), rtol=1e-6, atol=1e-6)


def pieces(value: Tensor, lengths: list[int], axis: int) -> list[Tensor]:
    """The matrices of a split, cut by hand: the places of each in the repeated pattern."""
    pattern = [number for number, length in enumerate(lengths) for _ in range(length)]
    owner = torch.tensor(pattern * (value.shape[axis] // len(pattern)))
    return [value.index_select(axis, (owner == number).nonzero()[:, 0]) for number in range(len(lengths))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, "match_rms_adamw"])
@pytest.mark.parametrize(
    ("shape", "split", "axis", "lengths"),
    [
        ((12, 5), 3, 0, [4, 4, 4]),
        ((5, 12), 3, 1, [4, 4, 4]),
        ((16, 6), [4, 2, 2], 0, [4, 2, 2]),
        ((6, 16), [4, 4], 1, [4, 4]),
        ((24, 6), (4, 2, 2), 0, [4, 2, 2]),
        ((8, 3, 2, 2), 2, 0, [4, 4]),
        ((3, 6, 8), 2, 1, [4, 4]),
        ((3, 8, 6), 4, 0, [2, 2, 2, 2]),
    ],
)
def test_a_split_equals_parameters_of_their_own_bit_for_bit(shape, split, axis, lengths, scale, dtype):
    stacked = len(shape) == 3
    along = axis - 2 if stacked or len(shape) == 2 else 0
    along %= len(shape)
    options: dict[str, Any] = {"lr": 0.1, "adjust_lr_fn": scale, "ns_dtype": dtype, "stacked": stacked}
    whole = parameters([shape])
    apart = [nn.Parameter(part) for part in pieces(whole[0].detach(), lengths, along)]
    by_length: dict[int, list[nn.Parameter]] = {}
    for length, one in zip(lengths, apart, strict=True):
        by_length.setdefault(length, []).append(one)
    first = Muon(whole, split=split, split_axis=axis, **options)
    second = Muon([{"params": members} for members in by_length.values()], **options)
    for step in range(3):
        give_grads(whole, step)
        for one, grad in zip(apart, pieces(whole[0].grad, lengths, along), strict=True):
            one.grad = grad
        first.step()
        second.step()
    assert same(pieces(whole[0].detach(), lengths, along), apart)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_of_a_split_equals_the_plain_one():
    torch._dynamo.reset()
    options: dict[str, Any] = {"lr": 0.1, "split": (3, 2), "ns_dtype": torch.float32}
    params, plain = parameters([(10, 6), (20, 6)]), parameters([(10, 6), (20, 6)])
    optimizer, other = Muon(params, **options), Muon(plain, **options)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(3):
        give_grads(params, number)
        step()
        train(other, plain, [number])
    torch.testing.assert_close(params, plain, rtol=1e-5, atol=1e-6)  # before torch 2.13 it rounds a step otherwise


def test_a_split_leaves_the_state_as_it_is_and_checkpoints_without_one_continue_without():
    params, others = parameters([(12, 5)]), parameters([(12, 5)])
    optimizer = Muon([{"params": params, "split": 3}])
    train(optimizer, params, [0])
    assert {key: value.shape for key, value in optimizer.state[params[0]].items()} == {"momentum_buffer": (12, 5)}
    train(plain := Muon(others), others, [0])
    saved = plain.state_dict()
    for key in ("split", "split_axis"):
        del saved["param_groups"][0][key]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["split"] == 1
    with torch.no_grad():
        params[0].copy_(others[0])
    train(optimizer, params, [1])
    train(plain, others, [1])
    assert same(params, others)


def test_matrices_of_one_shape_are_computed_together(monkeypatch):
    batches: list[tuple[int, ...]] = []
    orthogonalized = muon.orthogonalized

    def noted(matrices: Tensor, *args: Any, **options: Any) -> Tensor:
        batches.append(tuple(matrices.shape))
        return orthogonalized(matrices, *args, **options)

    monkeypatch.setattr(muon, "orthogonalized", noted)
    params = parameters([(4, 6), (6, 4), (4, 6), (4, 6), (2, 2, 3)])
    train(Muon(params), params, [0])
    assert sorted(batches) == [(1, 2, 6), (1, 6, 4), (3, 4, 6)]
    batches.clear()
    monkeypatch.setattr(muon, "PIECE", 50)
    train(Muon(params), params, [0])
    assert sorted(batches) == [(1, 2, 6), (1, 4, 6), (1, 6, 4), (2, 4, 6)]


def test_the_choice_of_precision_is_saved_with_the_state():
    params = parameters([(4, 6)])
    optimizer = Muon(params)
    assert optimizer.param_groups[0]["ns_dtype"] is None
    train(optimizer, params, [0])
    chosen = optimizer.param_groups[0]["ns_dtype"]
    assert chosen is muon.faster_dtype(torch.device("cpu"))
    other = Muon(parameters([(4, 6)]))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["ns_dtype"] is chosen


def test_options_and_parameters_that_are_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"ns_steps": 0}, "from 1 to 99"),
        ({"ns_steps": 2.0}, "whole number"),
        ({"ns_coefficients": (1.0, 2.0)}, "three finite numbers"),
        ({"ns_coefficients": [(1.0, 2.0, 3.0), (1.0, math.nan, 0.0)]}, "three finite numbers"),
        ({"ns_coefficients": "quintic"}, "three numbers"),
        ({"momentum": 1.0}, "below 1"),
        ({"adjust_lr_fn": "rms"}, "'match_rms_adamw'"),
        ({"ns_dtype": torch.float16}, "torch.bfloat16"),
        ({"stacked": 1}, "stacked"),
        ({"split": 0}, "number of equal parts"),
        ({"split": True}, "number of equal parts"),
        ({"split": []}, "list of their sizes"),
        ({"split": [2, 0]}, "list of their sizes"),
        ({"split": 2}, r"3 x 2, whose axis 0 does not consist.*sum divides 3"),
        ({"split": [1, 2], "split_axis": 1}, r"3 x 2, whose axis 1 does not consist.*sum divides 2"),
        ({"split_axis": 2}, "0 for the rows"),
        ({"params": nn.Linear(3, 4).parameters()}, r"shape \(4,\).*muon_groups\(model\)"),
        ({"params": [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]}, "real matrices"),
    ]
    for options, text in cases:
        with pytest.raises((TypeError, ValueError), match=text):
            Muon(**{"params": parameters([(3, 2)]), **options})


def test_coefficients_per_iteration_decide_the_number_of_iterations():
    one, other = parameters([(4, 6)]), parameters([(4, 6)])
    train(Muon(one, ns_coefficients=[muon.QUINTIC] * 3, ns_dtype=torch.float32), one, range(2))
    train(Muon(other, ns_steps=3, ns_dtype=torch.float32), other, range(2))
    assert same(one, other)


# The iteration

MATRICES = [(7, 7), (64, 64), (64, 100), (100, 64), (16, 144), (300, 20), (1, 5), (5, 1), (3, 8, 24), (2, 2, 24, 8)]


def random(shape: tuple[int, ...], spectrum: str = "flat") -> Tensor:
    """Gaussian matrices, or ones whose singular values fall by a factor of 10,000."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if spectrum == "steep":
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        x = u * torch.logspace(0, -4, s.shape[-1], dtype=torch.float64) @ v
    return x


def test_float32_equals_float64_to_1e_5():
    for shape in MATRICES:
        for spectrum in ("flat", "steep"):
            matrices = random(shape, spectrum).float()
            before = matrices.clone()
            found = orthogonalized(matrices, [QUINTIC] * 5)
            assert found.shape == matrices.shape
            assert found.dtype == torch.float32
            assert torch.equal(matrices, before)
            wanted = torch.stack([plainly(one) for one in matrices.reshape(-1, *shape[-2:])]).reshape(shape)
            assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-5, (shape, spectrum)


def test_other_coefficients_for_each_iteration():
    """The cubic Newton-Schulz polynomial converges to the orthogonal matrix itself."""
    matrix = random((12, 30)).float()
    found = orthogonalized(matrix, [(1.5, -0.5, 0.0)] * 30)
    torch.testing.assert_close(found @ found.T, torch.eye(12), atol=1e-4, rtol=0)


def test_bfloat16_is_near_and_finite_for_steep_spectra():
    for shape in ((64, 64), (16, 144)):
        for spectrum, most in (("flat", 0.05), ("steep", 0.3)):
            matrix = random(shape, spectrum).float()
            found = orthogonalized(matrix.bfloat16(), [QUINTIC] * 5)
            assert found.dtype == torch.bfloat16
            wanted = plainly(matrix)
            assert float((found.double() - wanted).norm() / wanted.norm()) < most


def test_zeros_stay_zeros_and_scales_do_not_matter():
    assert not orthogonalized(torch.zeros(3, 4), [QUINTIC] * 5).any()
    matrix = random((9, 11)).float()
    for scale in (1e-4, 1e15):
        torch.testing.assert_close(
            orthogonalized(scale * matrix, [QUINTIC] * 5), orthogonalized(matrix, [QUINTIC] * 5), rtol=1e-3, atol=1e-4
        )
    assert orthogonalized(torch.full((3, 4), float("nan")), [QUINTIC]).isnan().all()


@pytest.mark.parametrize(("ratio", "wanted"), [(2.0, torch.bfloat16), (1.0, torch.float32), (0.2, torch.float32)])
def test_the_precision_is_measured_on_a_cpu_and_bfloat16_elsewhere(ratio, wanted, monkeypatch, bfloat16):
    bfloat16(ratio, None)
    assert faster_dtype(torch.device("cuda")) is torch.bfloat16
    assert faster_dtype(torch.device("cpu")) is wanted
    monkeypatch.setattr(muon.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(muon.dist, "get_world_size", lambda: 2)
    assert faster_dtype(torch.device("cpu")) is torch.float32


# Shards: ranks find the weights of one process

STEPS = 4
RATES: dict[str, Any] = {"lr": 0.05, "ns_dtype": torch.float32}


class Net(nn.Module):
    """Filters, uneven matrices, a stack of experts, fused projections, tables and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 5, 3, padding=1)
        self.filters = nn.Conv2d(5, 7, 3, padding=1)
        self.wide, self.tall = nn.Linear(7, 33), nn.Linear(33, 6)
        self.experts = nn.Parameter(0.3 * torch.randn(3, 6, 6))
        self.same = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gated, self.uneven = nn.Linear(6, 12), nn.Linear(6, 15)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.filters(self.enter(x).relu()).relu().mean((2, 3))
        x = self.tall(self.wide(x).relu())
        x = torch.stack([x @ expert for expert in self.experts]).mean(0)
        for layer in self.same:
            x = x + layer(x).relu()
        x = x + nn.functional.glu(self.gated(x))
        few, many = self.uneven(x).split([6, 9], -1)
        return self.head(x + few * many.square().mean(-1, keepdim=True))


def built(model: nn.Module, groups: Any = None) -> MixedOptimizer:
    groups = muon_groups(model, muon=RATES, adamw={"lr": 0.01}) if groups is None else groups
    return MixedOptimizer(groups)


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = slice(8 // ranks * rank, 8 // ranks * (rank + 1))
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        inputs, labels = torch.randn(8, 3, 4, 4, generator=draw), torch.randint(0, 4, (8,), generator=draw)
        nn.functional.cross_entropy(model(inputs[share]), labels[share]).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, list[float]]:
    full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    return {name: value.detach().flatten().tolist() for name, value in full.items()}


def rules_by_name(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The options of every parameter, found before the model is sharded."""
    groups = muon_groups(model, muon=RATES, adamw={"lr": 0.01})
    keys = ("params", "param_names")
    return {n: {k: v for k, v in g.items() if k not in keys} for g in groups for n in g["param_names"]}


def by_name(model: nn.Module, options: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": [p], **options[name]} for name, p in model.named_parameters()]


def sharded() -> dict[str, list[float]]:
    model = fresh()
    options = rules_by_name(model)
    fully_shard(model)
    run(model, built(model, by_name(model, options)))
    return weights(model)


def replicated() -> dict[str, list[float]]:
    model = fresh()
    wrapped = DistributedDataParallel(model)
    run(wrapped, built(wrapped))
    return weights(model)


def zero() -> dict[str, list[float]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns about parts of itself

    model = fresh()
    groups = [dict(group) for group in muon_groups(model, muon=RATES, adamw={"lr": 0.01})]
    for group in groups:
        del group["param_names"]
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=MixedOptimizer)
    run(wrapped, optimizer)
    return weights(model)


def resumed() -> bool:
    model = fresh()
    options = rules_by_name(model)
    fully_shard(model)
    optimizer = built(model, by_name(model, options))
    run(model, optimizer, range(2))
    kept, state = [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict())
    run(model, optimizer, range(2, STEPS))
    wanted = [p.to_local().clone() for p in model.parameters()]  # pyright: ignore
    other = built(model, by_name(model, options))
    with torch.no_grad():
        for param, value in zip(model.parameters(), kept, strict=True):
            param.copy_(value)
    other.load_state_dict(state)
    run(model, other, range(2, STEPS))
    return same([p.to_local() for p in model.parameters()], wanted)  # pyright: ignore


def traffic(dtype: torch.dtype) -> int:
    """Bytes of one step over two matrices of 64 x 96; each rank works on one of them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [nn.Parameter(distribute_tensor(torch.ones(64, 96), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = Muon(params, ns_dtype=dtype)
    for param in params:
        param.grad = distribute_tensor(torch.randn(64, 96), mesh, [Shard(0)])
    optimizer.step()
    return bytes_sent(optimizer.step)


def on_each_rank() -> dict[str, Any]:
    ways = {way.__name__: way() for way in (sharded, replicated, zero)}
    return {"ways": ways, "resumed": resumed(), "traffic": traffic(torch.bfloat16)}


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_equal_one_process_resume_and_send_shards_of_the_others_matrices_once_each_way(ranks):
    model = fresh()
    run(model, built(model))
    alone = weights(model)
    split = {name: group.get("split") for group in built(model).param_groups for name in group["param_names"]}
    assert (split["gated.weight"], split["uneven.weight"]) == (2, (6, 9))
    found = run_ranks(on_each_rank, ranks)
    shard = 32 * 96 * 2
    for other in found:
        assert other["ways"] == found[0]["ways"]
        assert other["resumed"], "bit for bit"
        assert ranks > 2 or 2 * shard <= other["traffic"] < 2 * shard + 4096
    for way, values in found[0]["ways"].items():
        for name, wanted in alone.items():
            assert values[name] == pytest.approx(wanted, abs=1e-5), (way, name)


def layouts() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    matrix = torch.randn(6, 8)
    both = nn.Parameter(distribute_tensor(matrix.clone(), mesh, [Shard(0), Shard(1)]))
    optimizer = Muon([both])
    both.grad = both.detach().clone()
    before = both.full_tensor().clone()
    with pytest.raises(IncompatibleError, match="divided along one axis") as caught:
        optimizer.step()
    assert torch.equal(both.full_tensor(), before)
    moved = []
    for placements in ([Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()]):
        param = nn.Parameter(distribute_tensor(matrix.clone(), mesh, placements))
        param.grad = distribute_tensor(matrix.cos(), mesh, placements)
        Muon([param], ns_dtype=torch.float32).step()
        moved.append(param.full_tensor().detach())
    alone = nn.Parameter(matrix.clone())
    alone.grad = matrix.cos()
    Muon([alone], ns_dtype=torch.float32).step()
    for one in moved:
        torch.testing.assert_close(one, alone.detach(), rtol=1e-5, atol=1e-6)
    stack = nn.Parameter(distribute_tensor(torch.stack([matrix] * 4), mesh, [Replicate(), Shard(0)]))
    stack.grad = distribute_tensor(torch.stack([matrix.cos()] * 4), mesh, [Replicate(), Shard(0)])
    optimizer = Muon([stack], stacked=True, ns_dtype=torch.float32)
    assert bytes_sent(optimizer.step) < 1000  # each rank holds whole matrices
    torch.testing.assert_close(stack.full_tensor()[3], alone.detach(), rtol=1e-5, atol=1e-6)
    return [str(caught.value)]


@pytest.mark.dist
def test_layouts_of_two_dimensions():
    assert all("rule='adamw'" in text for (text,) in run_ranks(layouts, 4))
