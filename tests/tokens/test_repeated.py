"""What hooks and checkpoints inside of a model see of a call that leaves positions out and is repeated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from torchboost.algorithms import sparse_head_forward, unpad_forward

BATCH, LENGTH, WIDTH, WORDS = 3, 8, 8, 20
MASK = (torch.arange(LENGTH) < torch.tensor([3, 5, 8])[:, None]).long()
IDS = torch.randint(1, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)) * MASK
LABELS = IDS.masked_fill(MASK == 0, -100)
LABELS[:, 1::2] = -100
NOTED: list[Any] = []
HANDLES: list[Any] = []
TOTAL = torch.zeros(())
Noted = list[Any]


class Network(nn.Module):
    """Has a checkpoint around its embeddings or its head, if asked."""

    def __init__(self, checkpointed: str = "") -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.checkpointed = nn.Linear(WIDTH, WORDS), checkpointed

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        hidden = self._run("words", lambda ids: self.words(ids).tanh(), input_ids)
        return self._run("head", lambda hidden: self.loss(self.head(hidden), labels), self.mix(hidden).tanh())

    def _run(self, part: str, compute: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        return checkpoint(compute, given, use_reentrant=False) if part == self.checkpointed else compute(given)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def in_a_closure(layer: nn.Module) -> Callable[[], Noted]:
    noted: Noted = []
    layer.register_forward_hook(lambda module, args, output: noted.append(output))
    return lambda: noted


def in_a_global(layer: nn.Module) -> Callable[[], Noted]:
    layer.register_forward_hook(lambda module, args, output: NOTED.append(output))
    return lambda: NOTED


class Recorder:
    """Keeps what layers return by their names, and how many that were."""

    def __init__(self) -> None:
        self.by_name: dict[str, Noted] = defaultdict(list)
        self.count = 0

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.by_name["mix"].append(output)
        self.count += 1

    def noted(self) -> Noted:
        assert self.count == len(self.by_name["mix"])
        return self.by_name["mix"]


def in_an_object(layer: nn.Module) -> Callable[[], Noted]:
    recorder = Recorder()
    layer.register_forward_hook(recorder.note)
    return recorder.noted


def by_an_object(layer: nn.Module) -> Callable[[], Noted]:
    recorder = Recorder()
    layer.register_forward_hook(lambda *args: recorder.note(*args))
    return recorder.noted


def in_a_count(layer: nn.Module) -> Callable[[], Noted]:
    noted: tuple[Tensor, ...] = ()

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal noted
        noted = (*noted, output)

    layer.register_forward_hook(note)
    return lambda: list(noted)


def of_all_modules(layer: nn.Module) -> Callable[[], Noted]:
    noted: Noted = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        if module is layer:
            noted.append(output)

    HANDLES.append(register_module_forward_hook(note))
    return lambda: noted


@pytest.mark.parametrize(
    "register", [of_all_modules, in_a_closure, in_a_global, in_an_object, by_an_object, in_a_count]
)
def test_hooks_note_each_call_once(register: Callable[[nn.Module], Callable[[], Noted]]):
    torch.manual_seed(0)
    NOTED.clear()
    model = Network().train()
    noted = register(model.mix)

    def gradient() -> Tensor:
        before = len(noted())
        loss = model(IDS, MASK, LABELS)
        assert len(noted()) == before + 1
        model.zero_grad()
        (loss + sum((one * MASK[..., None]).square().sum() for one in noted()[before:])).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = gradient()
    with unpad_forward(model):
        for _ in range(3):
            torch.testing.assert_close(gradient(), expected)
    while HANDLES:
        HANDLES.pop().remove()


@pytest.mark.parametrize("attach", [unpad_forward, sparse_head_forward])
@pytest.mark.parametrize("part", ["words", "head"])
def test_checkpoints_compute_a_part_twice_in_the_same_way(part: str, attach: Callable[[nn.Module], Any]):
    torch.manual_seed(0)
    model = Network(part).train()

    def gradient() -> Tensor:
        model.zero_grad()
        model(IDS, MASK, LABELS).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = gradient()
    with attach(model):
        for _ in range(3):
            torch.testing.assert_close(gradient(), expected)


def note_globally(tensor: Tensor) -> None:
    NOTED.append(tensor)
    TOTAL.add_(1)


class Counts(nn.Module):
    """Counts its calls, each in another place, and needs the padding after that."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.register_buffer("buffer", torch.zeros(()))
        self.parameter = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.recorder, self.nested = Recorder(), {"calls": defaultdict(int)}

    of_class: ClassVar[Noted] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, given: Recorder) -> Tensor:
        hidden = self.words(input_ids)
        self.buffer.data.add_(1)  # of which torch counts no version
        self.parameter = nn.Parameter(self.parameter + 1, requires_grad=False)
        self.nested["calls"]["all"] += 1
        self.of_class.append(attention_mask)
        note_globally(attention_mask)
        for recorder in (self.recorder, given):
            recorder.note(self, None, attention_mask)
        return self.mix(hidden.transpose(1, 2)).square().mean()


def test_a_call_that_is_repeated_counts_once():
    NOTED.clear()
    TOTAL.zero_()
    model: Any = Counts().train()
    given = Recorder()
    live: Any = unpad_forward(model)
    with live:
        for _ in range(3):
            model(IDS, MASK, given)
        assert "conv1d" in live.remark
    counts = [int(model.buffer), int(model.parameter), model.nested["calls"]["all"], int(TOTAL)]
    noted = model.recorder.noted(), given.noted(), NOTED, model.of_class
    assert counts + list(map(len, noted)) == [3] * 8


class Moves(nn.Module):
    """Moves a number that its results depend on, from its second call on."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.register_buffer("scale", torch.ones(()))
        self.moves = False

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = self.out(self.words(input_ids)) * self.scale
        if self.moves:
            self.scale.add_(1)
        return logits


def test_outputs_that_cannot_be_computed_again_are_refused():
    model = Moves().train()
    with unpad_forward(model):
        F.cross_entropy(model(IDS, MASK).flatten(0, 1), LABELS.flatten()).backward()
        model.moves = True
        logits = model(IDS, MASK)
        with pytest.raises(RuntimeError, match="cannot be undone"):
            logits.sum()
        with torch.no_grad():
            model.scale.fill_(1)
        torch.testing.assert_close(model(IDS, MASK).sum(), model.out(model.words(IDS)).sum())


class Descends(nn.Module):
    """Runs a backward pass of its own, and needs the padding after that."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, mixes: bool) -> Tensor:
        logits = self.out(self.words(input_ids))
        F.cross_entropy(logits.flatten(0, 1), LABELS.flatten()).backward()
        logits = self.out(self.words(input_ids))
        return logits.cumsum(1) if mixes else logits


@pytest.mark.parametrize("mixes", [True, False], ids=["a function needs the padding", "the loop reads the padding"])
def test_a_backward_pass_inside_of_a_call_that_is_repeated_counts_once(mixes: bool):
    torch.manual_seed(0)
    model = Descends().train()

    def gradient(read: Callable[[Tensor], Tensor]) -> Tensor:
        model.zero_grad()
        read(model(IDS, MASK, mixes)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected = gradient(Tensor.mean)
    with unpad_forward(model):
        gradient(Tensor.mean if mixes else lambda logits: logits[MASK.bool()].mean())
        torch.testing.assert_close(gradient(Tensor.mean), expected)
        torch.testing.assert_close(gradient(Tensor.mean), expected)


def test_a_backward_pass_that_adds_to_gradients_is_refused_if_it_would_count_twice():
    model = Descends().train()
    with unpad_forward(model):
        model(IDS, MASK, True)
        with pytest.raises(RuntimeError, match="cannot be undone"):
            model(IDS, MASK, True)
