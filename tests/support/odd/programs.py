"""The table of odd programs: a network with its optimizer, and the loop that trains it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import weight_norm
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from tests.support.odd import loops, networks
from tests.support.odd.loops import Loop, batches, by_loss, by_step, draw, labelled, over
from tests.support.odd.networks import cnn, normalised

__all__ = ["PROGRAMS", "Program"]

Pair = tuple[nn.Module, Optimizer]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A training that a user could have written.

    Args:
        build: Returns the model and the optimizer; the caller seeds.
        loop: Trains them, and returns the numbers that it saw.
        tolerance: How far these may be off, relatively, if the levers compute in another order; the weights may be off
            by five times as much.
    """

    build: Callable[[], Pair]
    loop: Loop = loops.plain
    tolerance: float = 2e-3


def sgd(build: Callable[[], nn.Module] = cnn, loop: Loop = loops.plain, **settings: Any) -> Program:
    """Return a program with SGD."""
    rates = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, **settings}
    return _with(SGD, build, loop, **rates)


def adamw(build: Callable[[], nn.Module] = cnn, loop: Loop = loops.plain, **settings: Any) -> Program:
    """Return a program with AdamW."""
    return _with(AdamW, build, loop, **{"lr": 2e-3, **settings})


def _with(rule: Callable[..., Optimizer], build: Callable[[], nn.Module], loop: Loop, **settings: Any) -> Program:
    def made() -> Pair:
        model = build()
        return model, rule([p for p in model.parameters() if p.requires_grad], **settings)

    return Program(build=made, loop=loop)


def bare() -> nn.Sequential:
    return cnn(norm=False)


def dropping() -> nn.Sequential:
    return cnn(dropout=0.2)


def hooked() -> nn.Sequential:
    """A network with a hook of every kind."""
    model = cnn()

    def clamp(p: torch.Tensor) -> None:
        p.grad.clamp_(-0.02, 0.02)

    for p in model.parameters():
        p.register_hook(lambda slope: slope * 2 - 0.01)
        p.register_post_accumulate_grad_hook(clamp)
    model[0].register_forward_hook(lambda module, args, output: output * 1.5)
    model[3].register_full_backward_hook(lambda module, slopes, _: tuple(s if s is None else s * 0.5 for s in slopes))
    model.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    return model


def stepped_in_the_backward_pass() -> Pair:
    """Each parameter has an optimizer of its own, which steps in a hook; the loop's has no effect."""
    model = cnn()
    own = {p: SGD([p], lr=0.05) for p in model.parameters()}

    def step(p: torch.Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return model, SGD(model.parameters(), lr=0.0)


def without_the_head() -> Pair:
    model = cnn()
    return model, AdamW(model[:-1].parameters(), lr=2e-3)


def one_cycle() -> Pair:
    """A schedule that was made before the boost and is held by the model."""
    model = cnn()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.held = [OneCycleLR(optimizer, 0.1, total_steps=20)]
    return model, optimizer


def warm() -> Pair:
    """A pair that has been trained before."""
    model = cnn()
    optimizer = AdamW(model.parameters(), lr=2e-3)
    over(batches(count=3))(model, optimizer)
    return model, optimizer


def rounded(program: Program) -> Program:
    """Return a program whose results are rounded to bfloat16, with three digits."""
    return Program(build=program.build, loop=program.loop, tolerance=2e-2)


def cast(dtype: torch.dtype) -> loops.Loop:
    return over([(x.to(dtype), y) for x, y in batches()])


SIDES = (4, 12, 7, 14, 5, 9, 11, 6)
COUNTS = (4, 1, 7, 4, 2, 9, 1, 3)
SIZES = labelled([draw(n, 3, side, side + 1, seed=side, count=1)[0] for n, side in zip(COUNTS, SIDES, strict=True)])

PROGRAMS: dict[str, Program] = {
    # Shapes and layouts
    "plain": sgd(),
    "sizes": adamw(loop=over(SIZES)),
    "reads_contiguity": adamw(networks.ReadsContiguity),
    "strided_weight": sgd(networks.StridedWeight),
    "bfloat16": rounded(adamw(lambda: cnn().bfloat16(), cast(torch.bfloat16))),
    # Weights
    "weight_norm_of_old": adamw(lambda: normalised(weight_norm)),
    "odd_parameters": adamw(networks.OddParameters),
    "views_of_one": sgd(networks.ViewsOfOne, loops.with_the_flat_tensor),
    # Inputs and outputs
    "returns_generator": adamw(networks.ReturnsGenerator, by_loss(loops.of_generator)),
    "empties_its_list": adamw(networks.EmptiesItsList, loops.from_lists),
    "writes_into_its_input": adamw(networks.WritesIntoItsInput, loops.from_objects),
    # State outside of parameters
    "counts": adamw(networks.Counting, loops.counted),
    "grows_in_forward": sgd(networks.GrowsInForward),
    # Control flow
    "switches_mode": sgd(lambda: networks.SwitchesMode(dropout=0.3)),
    "carried_state": adamw(networks.Gated, loops.carried),
    # Gradients
    "penalised_inputs": adamw(bare, by_loss(loops.penalised_inputs)),
    "gradients_per_sample": sgd(bare, loops.gradients_per_sample),
    "gradients_assigned": adamw(loop=loops.gradients_assigned),
    "gradients_read": sgd(loop=loops.gradients_read),
    "hooks_before": sgd(hooked),
    "steps_in_backward": Program(build=stepped_in_the_backward_pass),
    "accumulated": sgd(loop=loops.accumulated),
    "two_backward_passes": adamw(loop=loops.two_backward_passes),
    "sharpness_aware": sgd(loop=loops.sharpness_aware),
    "scaled": adamw(loop=loops.scaled),
    # Loops
    "averaged": sgd(loop=loops.averaged),
    "frozen_for_a_while": sgd(loop=by_step(loops.freeze_for_a_while)),
    "layer_inserted": sgd(loop=by_step(loops.insert_a_layer)),
    "head_replaced": adamw(loop=by_step(loops.replace_the_head)),
    "data_replaced": adamw(loop=by_step(loops.replace_the_data_of_a_weight)),
    "evaluated_in_between": sgd(dropping, loops.evaluated_in_between),
    "failing_batches": sgd(dropping, by_step(loops.fail_on_a_batch)),
    "bad_batches": sgd(bare, loops.without_bad_batches),
    "states_loaded": sgd(loop=loops.states_loaded),
    # Optimizers
    "closures_lbfgs": _with(LBFGS, bare, loops.closures, lr=0.1, max_iter=4),
    "closures": _with(Adam, bare, loops.closures, lr=2e-3),
    "two_optimizers": Program(build=without_the_head, loop=loops.second_optimizer),
    "warm": Program(build=warm),
    "scheduled_before": Program(build=one_cycle, loop=loops.scheduled_before),
    "scheduled_by_hand": sgd(loop=by_step(loops.schedule_by_hand)),
    "moments_rewritten": sgd(loop=by_step(loops.rewrite_the_moments)),
    "amsgrad_maximised": adamw(amsgrad=True, maximize=True),
    "adagrad": _with(Adagrad, cnn, loops.plain, lr=0.02, initial_accumulator_value=0.1),
}
