"""Every algorithm and level against a plain loop with its effect written by hand, over the networks of the zoo."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.support import naive
from tests.support.differential import (
    FRONTS,
    STEPS,
    Choice,
    alone,
    assert_same,
    boosted,
    by_hand,
    level,
    no_effect_is_fine,
    some_then_slow,
    train,
)
from tests.support.zoo import ZOO, Network
from torchboost import IncompatibleError

pytestmark = no_effect_is_fine

HALF = STEPS // 2
O1, O2 = level("O1"), level("O2")
AUTOCAST = alone("autocast", float32=[])._replace(name="autocast")  # by hand, the heads are in bfloat16, too
CENTRALISED = alone("gradient_centralization")
FUSED = alone("fused_optimizer")
SCALED = alone("loss_scale_group")
CACHED = alone("grad_freeze", pattern="fixed", frozen=2, norms="eval", cache_mebibytes=1)
NEUTRAL = [
    alone("grad_accumulation", steps=1),
    alone("grad_freeze", pattern="fixed", frozen=0),
    SCALED,  # the loop does not scale
]
ACTIVE = [
    AUTOCAST,
    alone("channels_last"),
    FUSED,
    alone("grad_accumulation", steps=2),
    *(alone("grad_freeze", pattern=pattern, full_share=0.3) for pattern in ("continuous", "interval", "progressive")),
    alone("grad_freeze", pattern="fixed", frozen=2),
    alone("grad_freeze", pattern="fixed", frozen=2, norms="eval"),
    CACHED,
    CENTRALISED,
    alone("less_bn"),
    alone("less_bn", normalize_head=False, keep="narrowest", blocks_per_norm=2),
    SCALED,
]
FEW = [
    "convnext",
    "gpt_tied",
    "frozen_tail",
    "dropout",
    "scales_of_every_shape",
    "complex_parameters",
]
"""What every algorithm alone meets in the default run; O2, which holds most of them, meets all."""


class Limit(NamedTuple):
    """What is documented not to work, and how it says so.

    Args:
        error: Raised.
        match: In its message.
        within: While training, after at most so many steps.
    """

    error: type[Exception]
    match: str
    within: int = STEPS


IN_PLACE = Limit(RuntimeError, "modified inplace")  # docs/algorithms/loss_scale_group.md, "Works with"
REENTRANT = Limit(IncompatibleError, "use_reentrant=False", within=1)  # docs/algorithms/grad_freeze.md, "Works with"
VIEW = Limit(RuntimeError, "view size is not compatible", within=1)  # docs/algorithms/channels_last.md, "When not"
NO_SPLIT = Limit(IncompatibleError, "cannot be split into a frozen and a trained part", within=1)
LIMITS: dict[tuple[str, ...], Limit] = {
    **{(choice.name, "lenet", "plan"): VIEW for choice in (O1, O2)},
    **dict.fromkeys([(CACHED.name, n) for n in ("vit", "mixture_of_experts", "control_flow_by_shape")], NO_SPLIT),
    **dict.fromkeys([(CACHED.name, n) for n in ("stochastic_depth", "state_of_its_own")], NO_SPLIT),
    **{
        (choice.name, "checkpointed_reentrant"): REENTRANT
        for choice in (O2, *ACTIVE)
        if "grad_freeze" in choice.config["extra"] and choice is not CACHED
    },
    (CACHED.name, "checkpointed_reentrant"): NO_SPLIT,
    **{
        ("loss_scale_group", name): IN_PLACE
        for name in (
            "resnet_basic_inplace",
            "resnet_preact_inplace",
            "densenet",
            "skip_over_inplace",
            "two_networks",
        )
    },
}


def fronts_of(network: Network) -> list[str]:
    """``boost`` calls the model with positional inputs; to ``attach`` one algorithm is no front for levels."""
    named = naive.batches(network, 1)[0].kwargs
    return [front for front in FRONTS if front != "attach" and not (front == "boost" and named)]


def front_for(choice: Choice) -> str:
    """The front of the default run.

    A plan leaves autocast out where the machine gains nothing by it; a loss is scaled by a loop that knows of it.
    """
    return {AUTOCAST.name: "attach", SCALED.name: "plan"}.get(choice.name, "auto")


def check(name: str, choice: Choice, front: str = "auto", rule: naive.Rule = naive.sgd) -> None:
    """Compare a boosted run with one by hand, or the refusal with what is documented."""
    network, limit = ZOO[name], LIMITS.get((choice.name, name)) or LIMITS.get((choice.name, name, front))
    if limit is None:
        _check_course(network, choice, front, rule)
        return
    data = naive.batches(network, STEPS, torch.float64)
    pair = boosted(network, choice, front, model=network.model(torch.float64), rule=rule)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad", UserWarning)  # of torch, beforehand
        with pytest.raises(limit.error, match=limit.match):
            train(network, pair, data[: limit.within])


def _check_course(network: Network, choice: Choice, front: str, rule: naive.Rule) -> None:
    dtype = torch.float32 if choice.name == "autocast" else torch.float64
    data = naive.batches(network, HALF, dtype) * 2 if choice is CACHED else naive.batches(network, STEPS, dtype)
    pair = boosted(network, choice, front, dtype=dtype, rule=rule)
    try:
        found = train(network, pair, data)
    except RuntimeError as error:
        if choice is not AUTOCAST:
            raise
        with pytest.raises(RuntimeError, match=re.escape(str(error)[:40])):  # torch's own autocast fails likewise
            by_hand(network, pair, data, dtype, rule)
        return
    wanted = by_hand(network, pair, data, dtype, rule)
    # What is recomputed in the backward pass counts twice in the statistics of its norms, unless it is frozen.
    leave = {n for n, _ in pair.model.named_buffers()} if network.recomputes else set()
    assert_same(found, wanted, tolerance=1e-4 if network.only32 or dtype is torch.float32 else 1e-8, leave=leave)
    if rule is naive.sgd_of_some:
        return
    present = {n for n, _ in pair.model.named_parameters()}
    still = {n for n in naive.moving(network, STEPS, dtype) & present if torch.equal(found.state[n], pair.start[n])}
    assert still <= set.intersection(*pair.frozen)
    assert all(any(p.requires_grad for n, p in pair.model.named_parameters() if n not in held) for held in pair.frozen)


def test_the_hand_written_side_has_no_code_of_ours():
    folder = Path(naive.__file__).parent
    for file in (folder / "naive.py", folder / "portraits.py", *(folder / "zoo").glob("*.py")):
        assert "torchboost" not in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("choice", [O1, O2, *ACTIVE], ids=lambda choice: choice.name)
def test_every_choice_acts(choice):
    network = ZOO["conv_batch_norm"]
    pair = boosted(network, choice, front_for(choice))
    levers = {"channels_last", "fused_optimizer"}
    asked = {"O0": set(choice.config["extra"]), "O1": levers, "O2": {"less_bn", "grad_freeze", *levers}}[choice.level]
    assert asked <= pair.on
    assert choice.level != "O1" or pair.on == levers
    data = naive.batches(network, HALF) * 2
    model = network.model()
    plain = naive.train(network, model, naive.sgd(network, model), data)
    changed = naive.bits(train(network, pair, data)) != naive.bits(plain)
    assert pair.freezing is None or any(pair.frozen)
    assert choice is not CACHED or pair.freezing.fast.report().hit_rate > 0
    assert changed or choice.name in {"loss_scale_group", "fused_optimizer"}


@pytest.mark.parametrize("name", ZOO)
def test_level_zero_is_the_plain_loop(name):
    network = ZOO[name]
    data, wanted = naive.batches(network, 2), naive.bits(naive.plain(network, 2))
    for front in fronts_of(network):
        assert naive.bits(train(network, boosted(network, level("O0"), front), data)) == wanted, front


@pytest.mark.parametrize("name", some_then_slow(FEW))
def test_neutral_settings_are_the_plain_loop(name):
    network = ZOO[name]
    data, wanted = naive.batches(network, 2), naive.bits(naive.plain(network, 2))
    for choice in NEUTRAL:
        if (choice.name, name) not in LIMITS:
            assert naive.bits(train(network, boosted(network, choice), data)) == wanted, choice.name


@pytest.mark.parametrize("name", ZOO)
def test_level_two(name):
    check(name, O2)


@pytest.mark.parametrize("name", FEW)
def test_level_one_through_the_other_fronts(name):
    for front in fronts_of(ZOO[name]):
        if front != "auto":
            check(name, O1, front)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("choice", ACTIVE, ids=lambda choice: choice.name)
def test_algorithms(name, choice):
    check(name, choice, front_for(choice))


def _rest() -> Iterator[tuple[str, Choice, str, naive.Rule]]:
    """What the default run leaves out: O1 and the other fronts, every algorithm everywhere, another optimizer."""
    for name, network in ZOO.items():
        fronts = fronts_of(network)
        yield from ((name, O1, front, naive.sgd) for front in fronts)
        yield from ((name, O2, front, naive.sgd) for front in fronts if front != "auto")
        if name not in FEW:
            yield from ((name, choice, front_for(choice), naive.sgd) for choice in ACTIVE)
        if (O2.name, name) not in LIMITS:
            yield name, O2, "auto", naive.sgd_of_some
        if not network.sparse:
            yield from ((name, choice, "auto", naive.adamw) for choice in (O1, O2, FUSED, CENTRALISED))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", list(_rest()), ids=lambda case: f"{case[1].name}-{case[0]}-{case[2]}-{case[3].__name__}"
)
def test_all_pairs(case):
    check(*case)
