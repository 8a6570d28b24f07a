"""Training loops that do what a library should not count on. Each returns the numbers that it saw."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.support.odd.networks import CLASSES, Holder

STEPS = 8
Loop = Callable[[nn.Module, Optimizer], list[float]]
Batches = list[tuple[Any, Tensor]]


def draw(*shape: int, count: int = STEPS, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def batches(*shape: int, count: int = STEPS) -> Batches:
    """Return the same batches each time: images of four samples if no shape is given."""
    shape, generator = shape or (4, 3, 12, 12), torch.Generator().manual_seed(4)
    labels = [torch.randint(0, CLASSES, (shape[0],), generator=generator) for _ in range(count)]
    return list(zip(draw(*shape, count=count), labels, strict=True))


def labelled(inputs: list[Any]) -> Batches:
    """Return inputs of different sizes with labels."""
    generator = torch.Generator().manual_seed(7)
    return [(x, torch.randint(0, CLASSES, (len(x),), generator=generator)) for x in inputs]


def update(loss: Tensor, optimizer: Optimizer) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def over(data: Batches) -> Loop:
    """Return the plain loop over these batches."""
    return lambda model, optimizer: [update(F.cross_entropy(model(x), y), optimizer) for x, y in data]


def plain(model: nn.Module, optimizer: Optimizer) -> list[float]:
    return over(batches())(model, optimizer)


def by_step(before: Callable[[nn.Module, Optimizer, int], object]) -> Loop:
    """Return the plain loop with something done before each step, told the number of the step."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        losses = []
        for at, (x, y) in enumerate(batches()):
            before(model, optimizer, at)
            losses.append(update(F.cross_entropy(model(x), y), optimizer))
        return losses

    return loop


def by_loss(loss_of: Callable[[nn.Module, Any, Tensor], Tensor], *shape: int) -> Loop:
    """Return the plain loop with a loss of its own."""

    def loop(model: nn.Module, optimizer: Optimizer) -> list[float]:
        return [update(loss_of(model, x, y), optimizer) for x, y in batches(*shape)]

    return loop


# Losses


def of_generator(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(found, y) for found in model(x)]).sum()


def penalised_inputs(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + 10 * slope.pow(2).sum()


# What is done before a step


def freeze_for_a_while(model: Any, optimizer: Optimizer, at: int) -> None:
    if at in (3, 6):
        model[0].requires_grad_(at == 6)


def insert_a_layer(model: Any, optimizer: Optimizer, at: int) -> None:
    if at == 3:
        torch.manual_seed(1)
        layer = nn.Conv2d(3, 3, 3, padding=1)
        model.insert(0, layer)
        optimizer.add_param_group({"params": layer.parameters(), "lr": 0.01})


def replace_the_head(model: Any, optimizer: Optimizer, at: int) -> None:
    if at == 3:
        torch.manual_seed(1)
        model[-1] = nn.Linear(16, CLASSES)
        optimizer.param_groups[0]["params"] = list(model.parameters())


def replace_the_data_of_a_weight(model: Any, optimizer: Optimizer, at: int) -> None:
    if at == 3:
        values = torch.ones_like(model[3].weight).contiguous() * 0.05
        model[3].weight.data = values + torch.arange(9).reshape(3, 3) * 0.01


def fail_on_a_batch(model: nn.Module, optimizer: Optimizer, at: int) -> None:
    if at in (0, 2, 5):
        try:
            model(torch.zeros(2, 5, 3, 3))
        except RuntimeError:
            return
        raise AssertionError("five channels were accepted")


def schedule_by_hand(model: nn.Module, optimizer: Optimizer, at: int) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.05 * (1 - at / 10), 0.01 * at
    if at == 4:
        optimizer.param_groups[0]["momentum"] = 0.5


def rewrite_the_moments(model: nn.Module, optimizer: Optimizer, at: int) -> None:
    if at == 4:
        optimizer.state.clear()
    if at == 6:
        for state in optimizer.state.values():
            state["momentum_buffer"] = torch.as_tensor(state["momentum_buffer"].contiguous().numpy().copy())


# Loops that change more than the loss or what comes before a step


def counted(model: Any, optimizer: Optimizer) -> list[float]:
    return [*plain(model, optimizer), model.calls, len(model.history)]


def with_the_flat_tensor(model: Any, optimizer: Optimizer) -> list[float]:
    return [*plain(model, optimizer), model.flat[0].sum().item()]


def gradients_per_sample(model: nn.Module, optimizer: Optimizer) -> list[float]:
    def loss_of(values: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (x[None],)), y[None])

    losses = []
    for x, y in batches():
        slopes = vmap(grad(loss_of), (None, 0, 0))({n: p.detach() for n, p in model.named_parameters()}, x, y)
        losses.append(F.cross_entropy(model(x), y).item())
        for name, p in model.named_parameters():
            p.grad = slopes[name].mean(0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def gradients_assigned(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        for p, slope in zip(model.parameters(), slopes, strict=True):
            p.grad = torch.as_tensor(slope.contiguous().numpy().copy())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients_read(model: nn.Module, optimizer: Optimizer) -> list[float]:
    def norm() -> float:
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()]).norm().item()

    seen = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        seen.append(norm())
        optimizer.step()
        seen += [norm(), loss.item()]
        optimizer.zero_grad()
    return seen


def accumulated(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for at, (x, y) in enumerate(batches(count=12)):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        losses.append(loss.item())
        if at % 3 == 2:
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return losses


def two_backward_passes(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for x, y in batches():
        found = model(x)
        loss = F.cross_entropy(found, y)
        loss.backward(retain_graph=True)
        found.pow(2).mean().backward()
        clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def second_optimizer(model: Any, optimizer: Optimizer) -> list[float]:
    other, losses = SGD(model[-1].parameters(), lr=0.1), []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        losses.append(loss.item())
    return losses


def averaged(model: nn.Module, optimizer: Optimizer) -> list[float]:
    mean, losses = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), []
    for x, y in batches():
        losses.append(update(F.cross_entropy(model(x), y), optimizer))
        mean.update_parameters(model)
    update_bn(draw(4, 3, 12, 12, count=3), mean)
    mean.eval()
    return [*losses, mean(batches()[0][0]).sum().item(), *(p.sum().item() for p in mean.parameters())]


def evaluated_in_between(model: nn.Module, optimizer: Optimizer) -> list[float]:
    with torch.no_grad():
        seen = [model.eval()(batches()[0][0]).sum().item()]
    for x, y in batches():
        seen.append(update(F.cross_entropy(model.train()(x), y), optimizer))
        with torch.inference_mode():
            seen.append(model.eval()(x).sum().item())
    return seen


def without_bad_batches(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for at, (x, y) in enumerate(batches()):
        loss = F.cross_entropy(model(x * float("nan") if at in (0, 4) else x), y)
        optimizer.zero_grad()
        losses.append(update(loss, optimizer) if bool(torch.isfinite(loss)) else -1.0)
    return losses


def closures(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses = []
    for x, y in batches(count=4):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def scheduled_before(model: Any, optimizer: Optimizer) -> list[float]:
    seen = []
    for x, y in batches():
        seen.append(update(F.cross_entropy(model(x), y), optimizer))
        model.held[0].step()
        seen += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
    return seen


def states_loaded(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses: list[float] = []
    kept: tuple[Any, Any] = ({}, {})
    for at, (x, y) in enumerate(batches()):
        if at == 3:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if at == 6:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        losses.append(update(F.cross_entropy(model(x), y), optimizer))
    return losses


def scaled(model: nn.Module, optimizer: Optimizer) -> list[float]:
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=2.0**8), []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharpness_aware(model: nn.Module, optimizer: Optimizer) -> list[float]:
    seen = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            moves = [p.grad * 0.05 / (p.grad.norm() + 1e-6) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        second = F.cross_entropy(model(x), y)
        second.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), second.item()]
    return seen


def carried(model: nn.Module, optimizer: Optimizer) -> list[float]:
    losses, state = [], None
    for x, y in batches(4, 7, 6):
        found, state = model(x, state)
        state = state.detach()
        losses.append(update(F.cross_entropy(found, y), optimizer))
    return losses


def from_lists(model: nn.Module, optimizer: Optimizer) -> list[float]:
    seen = []
    for x, y in batches():
        batch = [x]
        seen += [update(F.cross_entropy(model(batch), y), optimizer), x.sum().item(), len(batch)]
    return seen


def from_objects(model: nn.Module, optimizer: Optimizer) -> list[float]:
    seen = []
    for x, y in batches():
        holder = Holder(x.clone())
        seen += [update(F.cross_entropy(model(holder), y), optimizer), holder.calls, holder.x.sum().item()]
    return seen
