"""Calls that leave positions out compute what plain calls do, whatever the model writes to and keeps."""

from __future__ import annotations

import contextlib
import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization

from torchboost.algorithms import sparse_head_forward, unpad_forward
from torchboost.optim import LazyAdam

BATCH, LENGTH, WIDTH, WORDS = 3, 8, 8, 20
MASK = (torch.arange(LENGTH) < torch.tensor([3, 5, 8])[:, None]).long()
IDS = torch.randint(1, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)) * MASK
LABELS = IDS.masked_fill(MASK == 0, -100)
LABELS[:, 1::2] = -100
BOTH = unpad_forward, sparse_head_forward


class Network(nn.Module):
    """Has a part ``own`` that each network uses in its own way."""

    own: Any

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.mix(self.words(ids)).tanh()

    def pooled(self, hidden: Tensor) -> Tensor:
        return self.head(hidden.square().mean(1)).square().sum()

    def state(self) -> list[float]:
        return []

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ScalarAfterMask(Network):
    """Padding has the value of a trained number."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.tensor(0.3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.pooled(self.hidden(input_ids) * attention_mask[..., None] + self.own)


class GateOfZeros(Network):
    """A trained factor that is zero at the padding, as everywhere. The batch has one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1, LENGTH, 1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.pooled(self.hidden(input_ids) * self.own + 1)


class NumberWrittenLater(Network):
    """Padding has the value of a buffer that changes before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.tensor(1.0))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.hidden(input_ids) * attention_mask[..., None] + self.own
        self.own += 1
        return self.pooled(hidden)


class PriorWrittenLater(Network):
    """Logits have a summand that changes before they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.zeros(WORDS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(input_ids)) + self.own
        self.own += torch.bincount(labels[labels >= 0], minlength=WORDS)
        return self.loss(logits, labels)


class HiddenWrittenLater(Network):
    """A frozen head keeps no hidden states for its gradient, so they may be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(input_ids) * 1.0
        logits = self.head(hidden)
        hidden.mul_(3).add_(1)
        return self.loss(logits, labels) + hidden.square().mean()


class LogitsOfHiddenWrittenLater(HiddenWrittenLater):
    """The same, with the loss outside."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.hidden(input_ids) * 1.0
        logits = self.head(hidden)
        hidden.mul_(3)
        return logits


class MixesPositions(Network):
    """The widest layer is as wide as sequences are long, and is applied to positions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)
        self.own = nn.Linear(LENGTH, LENGTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mixed = self.own(self.hidden(input_ids).transpose(1, 2)).transpose(1, 2)
        return self.pooled(mixed * attention_mask[..., None])


class GradientInside(Network):
    """Asks for a gradient at hidden states whose padding is zero."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.hidden(input_ids) * attention_mask[..., None]
        loss = self.pooled(hidden)
        (slope,) = torch.autograd.grad(loss, [hidden], create_graph=True, allow_unused=True)
        return loss if slope is None else loss + slope.square().sum()


class Repeated(Network):
    """Needs the padding, after it has written to buffers, attributes and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("written", torch.zeros(()))
        self.calls = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        input_ids.add_(1).remainder_(WORDS)
        hidden = self.hidden(input_ids)
        self.replaced = 0.9 * self.replaced + 1
        self.written += 1
        self.calls += 1
        self.latest = float(self.replaced)
        return self.pooled(hidden.cumsum(1)) * self.replaced * self.calls + self.written

    def state(self) -> list[float]:
        return [float(self.replaced), float(self.written), self.calls, self.latest]


class Scale(torch.autograd.Function):
    """Scales features, and is told nothing of padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, (grads[0] * ctx.saved_tensors[0]).sum((0, 1))


class TrainsBehindFrozenWords(Network):
    """A function of autograd gets hidden states without a gradient, and a weight with one."""

    def __init__(self) -> None:
        super().__init__()
        self.words.requires_grad_(False)
        self.own = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scaled = Scale.apply(self.words(input_ids), self.own)
        return self.pooled(self.mix(scaled) * attention_mask[..., None])


class CatchesAll(Network):
    """Goes on without what fails, whatever it is."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.hidden(input_ids)
        with contextlib.suppress(BaseException):
            hidden = hidden + hidden.cumsum(1)
        return self.pooled(hidden * attention_mask[..., None])


class FailsOtherwise(Network):
    """Turns each exception into another one, as TorchScript does."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        try:
            hidden = self.hidden(input_ids).cumsum(1)
        except BaseException:
            raise RuntimeError("The following operation failed") from None
        return self.pooled(hidden)


class NotesAndDraws(Network):
    """Needs the padding, after it has written to containers and drawn from Python, NumPy and its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.seen, self.generator = [0.0], {}, torch.Generator().manual_seed(0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.hidden(input_ids)
        noise = torch.rand(hidden.shape, generator=self.generator) + random.random() + np.random.rand()
        self.found.append(float(noise.mean()))
        self.seen["calls"] = self.seen.get("calls", 0) + 1
        return self.pooled((hidden * noise).cumsum(1)) * len(self.found) * self.seen["calls"]

    def state(self) -> list[float]:
        return [*self.found, self.seen["calls"]]


class ComputedHead(Network):
    """The weight of the head is computed whenever it is read, with random numbers."""

    def __init__(self) -> None:
        super().__init__()
        register_parametrization(self.head, "weight", nn.Dropout(0.3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.hidden(input_ids))

    def state(self) -> list[float]:
        return [float(torch.rand(()))]


def batch_of(kind: type[Network]) -> tuple[Tensor, Tensor]:
    count = 1 if kind is GateOfZeros else BATCH
    return IDS[:count].clone(), (LABELS if "labels" in kind.forward.__annotations__ else MASK)[:count].clone()


def run(kind: type[Network], attach: Any, calls: int = 3) -> list[Any]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    model: Any = kind().train()
    for one in attach:
        one(model)
    found = []
    for _ in range(calls):
        inputs = batch_of(kind)
        loss = model(*inputs)
        loss = model.loss(loss, inputs[1]) if loss.ndim else loss
        trained = [p for p in model.parameters() if p.requires_grad]
        found += [loss.detach(), *torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)]
        found += model.state()
    return found


@pytest.mark.parametrize("attach", [(unpad_forward,), (sparse_head_forward,), BOTH], ids=["unpad", "head", "both"])
@pytest.mark.parametrize(
    "kind",
    [
        ScalarAfterMask,
        GateOfZeros,
        NumberWrittenLater,
        PriorWrittenLater,
        HiddenWrittenLater,
        LogitsOfHiddenWrittenLater,
        MixesPositions,
        GradientInside,
        Repeated,
        TrainsBehindFrozenWords,
        CatchesAll,
        FailsOtherwise,
        NotesAndDraws,
        ComputedHead,
    ],
)
def test_losses_gradients_and_state_are_those_of_plain_calls(kind: type[Network], attach: tuple[Callable[..., Any]]):
    torch.testing.assert_close(run(kind, attach), run(kind, ()), rtol=1e-4, atol=1e-5)


class Kept(Network):
    """Keeps hidden states, which the loop reads."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        self.latest = self.hidden(input_ids)
        return self.head(self.latest) * attention_mask[..., None]


class Slots:
    __slots__ = ("logits",)


class InSlots(Network):
    """Returns an object that cannot be searched."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        outputs = Slots()
        outputs.logits = self.head(self.hidden(input_ids))
        return outputs


class Momentum(Network):
    """Moves weights on in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.head(self.hidden(input_ids))
        with torch.no_grad():
            self.own.weight.mul_(0.9).add_(self.mix.weight)
        return logits * self.own.weight.sum()


def with_an_attribute(model: Any, inputs: Any) -> Tensor:
    return model(*inputs).square().mean() + model.latest.square().mean()


def with_a_hook(model: Any, inputs: Any) -> Tensor:
    seen: dict[str, Tensor] = {}
    with_hook = model.mix.register_forward_hook(lambda module, args, output: seen.update(output=output))
    outputs = model(*inputs)
    with_hook.remove()
    return outputs.square().mean() + seen["output"].square().mean()


def of_slots(model: Any, inputs: Any) -> Tensor:
    return model(*inputs).logits.square().mean()


def of_labels(model: Any, inputs: Any) -> Tensor:
    return model.loss(model(*inputs), LABELS)


@pytest.mark.parametrize(
    ("kind", "loss_of"), [(Kept, with_an_attribute), (Kept, with_a_hook), (InSlots, of_slots), (Momentum, of_labels)]
)
def test_what_leaves_the_model_by_other_ways_is_plain(kind: type[Network], loss_of: Callable[..., Tensor]):
    results = []
    for attach in ((), BOTH):
        torch.manual_seed(0)
        model: Any = kind().train()
        for one in attach:
            one(model)
        for _ in range(3):
            loss = loss_of(model, (IDS, MASK))
            trained = [p for p in model.parameters() if p.requires_grad]
            results.append([loss.detach(), *torch.autograd.grad(loss, trained)])
    torch.testing.assert_close(results[3:], results[:3], rtol=1e-4, atol=1e-5)


class Plain(Network):
    """Does nothing odd."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.hidden(input_ids))


class Lazy(Network):
    """Its optimizer catches rows of the table up in each call, and remembers which."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)


class LazyPooled(Lazy):
    """Needs all positions."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.pooled(self.hidden(input_ids))


class LazyLogits(Lazy):
    """The loop needs all positions."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.hidden(input_ids))


@pytest.mark.parametrize("kind", [LazyPooled, LazyLogits])
@pytest.mark.parametrize("attach", [(unpad_forward,), (sparse_head_forward,)], ids=["unpad", "head"])
def test_rows_that_an_optimizer_has_caught_up_are_not_lost(kind: type[Network], attach: tuple[Callable[..., Any]]):
    results = []
    for each in ((), attach):
        torch.manual_seed(0)
        model: Any = kind().train()
        optimizer = LazyAdam(model.parameters(), lr=0.05, eps=0.01, exact=True)
        optimizer.attach(model.words)
        for one in each:
            one(model)
        for at in range(6):
            ids, mask = IDS.roll(at, 0) % (4 + 3 * at), MASK.roll(at, 0)
            logits = model(ids, mask)
            read = at > 3 or logits.ndim == 0
            (logits.square().mean() if read else logits[mask.bool()].square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.catch_up()
        results.append(model.state_dict())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_what_is_kept_for_the_first_time_later_is_refused_rather_than_wrong():
    model = Plain().train()
    live: Any = unpad_forward(model)
    with live:
        for _ in range(2):
            model(IDS, MASK)
        assert live.calls == 1
        with pytest.raises(RuntimeError, match="from the first training call on"):
            with_a_hook(model, (IDS, MASK))


def test_inputs_that_are_overwritten_are_not_read_again():
    model, ids = Plain().train(), IDS.clone()
    with unpad_forward(model):
        model(ids, MASK)
        logits = model(ids, MASK)
        ids.copy_(IDS.flip(0))
        with pytest.raises(RuntimeError, match="the inputs had changed"):
            logits.mean()


class Pops(Network):
    """Takes an entry out of its options, notes its calls there, and may need the padding after that."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, options: dict[str, Any]) -> Tensor:
        hidden = self.hidden(input_ids) * options.pop("scale")
        options["calls"].append(len(options["calls"]))
        return hidden.cumsum(1) if options["mixes"] else hidden


@pytest.mark.parametrize("mixes", [True, False], ids=["a function needs the padding", "the loop reads the padding"])
def test_containers_among_the_inputs_change_once_if_a_call_is_repeated(mixes: bool):
    model = Pops().train()
    with unpad_forward(model):
        for _ in range(2):
            options = {"scale": 2.0, "calls": [], "mixes": mixes}
            hidden = model(IDS, MASK, options)
        assert hidden.sum().isfinite()  # reads the padding
    assert options == {"calls": [0], "mixes": mixes}


class KeepsWeights(Network):
    """Keeps weights of attention, as models do that show them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.hidden(input_ids)
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(attention_mask[:, None] == 0, -math.inf)
        self.weights = scores.softmax(-1)
        return self.head(self.weights @ hidden)


def test_weights_that_a_model_keeps_hold_no_earlier_calls():
    model = KeepsWeights().train()
    live: Any = unpad_forward(model)
    with live:
        of_labels(model, (IDS, MASK))
        of_labels(model, (IDS, MASK))
        first = weakref.ref(model.weights)
        for _ in range(2):
            of_labels(model, (IDS, MASK))
        assert live.calls == 3
        assert first() is None


class Labelled(Network):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.hidden(input_ids)), labels)


def test_padding_and_unlabelled_positions_are_left_out_together():
    model = Labelled().train()
    live: list[Any] = [one(model) for one in BOTH]
    for _ in range(3):
        model(IDS, MASK, LABELS)
    assert [(one.calls, one.remark) for one in live] == [(2, ""), (2, "")]


class Pooled(Network):
    """Returns as many features for each sequence as this has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, LENGTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.hidden(input_ids) * attention_mask[..., None]
        return self.head(hidden.sum(1) / attention_mask.sum(1, keepdim=True))


class Spans(Network):
    """Returns a number for each token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.hidden(input_ids))[..., 0]


def read_whole(model: Any) -> list[Tensor]:
    outputs = model(IDS, MASK)
    loss = F.cross_entropy(outputs @ torch.ones(LENGTH, 3).tril(), torch.arange(BATCH))
    return [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]


@pytest.mark.parametrize(("kind", "calls"), [(Pooled, 2), (Spans, 0)])
def test_what_is_not_made_of_tokens_may_be_read_whole(kind: type[Network], calls: int):
    torch.manual_seed(0)
    model: Any = kind().train()
    plain = read_whole(model)
    live: Any = unpad_forward(model)
    torch.testing.assert_close(read_whole(model), plain)
    state = live.state_dict()
    live.remove()
    live = unpad_forward(model)
    live.load_state_dict(state)
    for _ in range(2):
        torch.testing.assert_close(read_whole(model), plain)
    assert (live.calls, bool(live.remark)) == (calls, not calls)


class Labels(Network):
    """Returns logits of sequences, not of tokens, from a layer that counts as a head."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.hidden(input_ids).square().mean(1))


@pytest.mark.parametrize("count", [1, 2])
def test_logits_of_sequences_keep_their_shape(count: int):
    model = Labels().train()
    plain = model(IDS[:count], MASK[:count])
    with sparse_head_forward(model):
        for _ in range(2):
            logits = model(IDS[:count], MASK[:count])
            assert logits.shape == (count, WORDS)
            torch.testing.assert_close(logits.softmax(-1), plain.softmax(-1))
