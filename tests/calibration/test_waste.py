"""The waste meter finds planted waste, with the share that was planted, and changes nothing.

The clock of these tests is the work of matrix products, so a share is exact on any machine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchboost
from torchboost.algorithms import unpad_forward
from torchboost.calibration import calibration, removals, waste
from torchboost.calibration.waste import Waste, WasteReport, waste_of
from torchboost.core.algorithm import Target
from torchboost.errors import IncompatibleError
from torchboost.measure.evidence import Interval
from torchboost.measure.stopwatch import Clock

BATCH, LENGTH, WIDTH, WORDS = 4, 16, 32, 64
KINDS = [
    "padding",
    "unlabelled head",
    "masks that mask nothing",
    "activation checkpointing",
    "forward pass of frozen layers",
    "host synchronisations",
]


class Work(TorchDispatchMode):
    """Counts multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            first, second = args[-2:]
            self.done += first.numel() * second.shape[-1]
        return func(*args, **(kwargs or {}))


@contextmanager
def working() -> Iterator[Clock]:
    with Work() as work:
        yield Clock(read=lambda: work.done)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def measured(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Waste]:
    with working() as clock:
        report = waste_of(Target(model.train(), sgd(model)), (args, kwargs), clock=clock)
    assert [one.kind for one in report.kinds] == KINDS
    return {one.kind: one for one in report.kinds}


def assert_only(found: dict[str, Waste], kind: str, share: float) -> None:
    """Only this kind has a share, and it is the planted one."""
    assert found[kind].share == pytest.approx(share, rel=0.1), str(found[kind])
    assert found[kind].remedy
    assert {name for name, one in found.items() if one.share} == {kind}, "\n".join(map(str, found.values()))


class Words(nn.Module):
    """A network that computes each position by itself, and a loss."""

    def __init__(self, outputs: int = 64) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        logits = self.out(self.hidden(self.words(input_ids)).relu())
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def padded(real: int = LENGTH // 4) -> dict[str, Tensor]:
    """Sequences of one length, with padding to the right."""
    mask = (torch.arange(LENGTH) < real).long().expand(BATCH, -1).contiguous()
    ids = torch.randint(1, WORDS, (BATCH, LENGTH)) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": (ids % 8).masked_fill(mask == 0, -100)}


def test_padding():
    inputs = padded()
    model = Words()
    found = measured(model, **inputs)
    # The head of 64 outputs has two thirds of the work of a position. Without labels at padding it is found in both.
    assert found["padding"].share == pytest.approx(0.75, rel=0.1)
    assert found["unlabelled head"].share == pytest.approx(0.75 * 64 / 96, rel=0.1)
    assert "75 % of the positions are padding" in found["padding"].found
    assert found["padding"].remedy.endswith("unpad_forward(model)")


def test_padding_is_none_only_if_a_mask_says_so_or_nothing_can_be_padded():
    class Inside(nn.Module):
        """Its mask is made of the ids."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head((self.words(ids) * (ids > 0)[..., None]).sum(1))

    inputs = padded()
    found = measured(Inside(), inputs["input_ids"])["padding"]
    assert (found.seconds, found.share, found.figure, found.remedy) == (None, None, "unknown", "")
    assert found.found.startswith("no mask seen")
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    found = measured(Words(), **inputs)["padding"]
    assert (found.figure, found.found.endswith("shows padding")) == ("none", True)
    assert measured(nn.Linear(2, 2), torch.ones(1, 2))["padding"].figure == "none"


def test_padding_inside_of_a_wrapper_is_left_out_there():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Words()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(**batch).sum(-1)

    inputs = padded()
    del inputs["labels"]
    found = measured(Wrapper(), inputs)
    assert found["padding"].share == pytest.approx(0.75, rel=0.1), str(found["padding"])
    assert found["padding"].remedy == "by hand: torchboost.algorithms.unpad_forward(model.inner)"


def test_padding_that_cannot_be_left_out_is_estimated_from_columns():
    class Mixed(Words):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            mixed = self.mix(self.words(input_ids).transpose(1, 2)).transpose(1, 2)
            return self.out(mixed) * attention_mask[..., None]

    inputs = padded(LENGTH // 2)
    inputs["attention_mask"][0, :] = (torch.arange(LENGTH) < LENGTH // 4).long()
    del inputs["labels"]
    found = measured(Mixed(), **inputs)["padding"]
    assert found.share == pytest.approx(0.5)
    assert "estimated from the 50 % of the columns" in found.found
    assert "longest sequence" in found.remedy
    inputs["attention_mask"][1, :] = 1
    found = measured(Mixed(), **inputs)["padding"]
    assert (found.share, found.remedy) == (0.0, "")
    assert "no column holds padding alone" in found.found


def test_unlabelled_head():
    inputs = padded(LENGTH)
    labels = torch.full((BATCH, LENGTH), -100)
    labels[:, :4] = 1
    found = measured(Words(outputs=96), inputs["input_ids"], labels=labels)
    assert_only(found, "unlabelled head", 0.75 * 96 / (32 + 96))


class Masked(nn.Module):
    """A network that pays for a mask, also if this masks nothing."""

    def __init__(self, *, required: bool = False) -> None:
        super().__init__()
        self.layer, self.required = nn.Linear(WIDTH, WIDTH), required

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and self.required:
            raise ValueError("a mask is needed")
        x = self.layer(x)
        if mask is not None:
            outer = mask.float().flatten()[:, None] @ mask.float().flatten()[None]  # rows x rows
            x = x + torch.where(outer[0].view(*mask.shape, 1) > 0, 0.0, -1e9)
        return x


def test_masks_that_mask_nothing():
    rows = BATCH * LENGTH
    inputs, ones = torch.randn(BATCH, LENGTH, WIDTH), torch.ones(BATCH, LENGTH)
    extra, plain = rows * rows, 2 * rows * WIDTH * WIDTH  # the inputs need no gradient
    for mask in (ones, ones.bool(), ones.long()):
        found = measured(Masked(), inputs, mask)
        assert_only(found, "masks that mask nothing", extra / (extra + plain))
        assert found["masks that mask nothing"].found.startswith("mask of model, ")
    ones[1, -3:] = 0
    assert not measured(Masked(), inputs, ones)["masks that mask nothing"].share


def test_masks_that_a_model_needs_are_none():
    inputs, ones = torch.randn(BATCH, LENGTH, WIDTH), torch.ones(BATCH, LENGTH)
    for model in (Masked(required=True),):
        assert not measured(model, inputs, ones)["masks that mask nothing"].share

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.layer(x)
            return x.sum(1) if mask is None else (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    found = measured(Pooled(), inputs, ones)["masks that mask nothing"]
    assert not found.share
    assert "computes something else" in found.found


def test_what_costs_nothing_is_none():
    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.layer(x)

    found = measured(Free(), torch.randn(BATCH, WIDTH), torch.ones(2, 2))["masks that mask nothing"]
    assert (found.share, found.remedy) == (0.0, "")
    assert "no measurable time in 5 pairs of steps" in found.found


def test_what_the_pairs_do_not_decide_is_not_called_none(monkeypatch):
    for high, share, said in (
        (2.0, None, "75 % of the positions are padding, up to 50 % of the computation, not decided in 5 pairs"),
        (1.05, 0.0, "75 % of the positions are padding, no measurable time in 5 pairs"),
    ):
        found = Interval(low=0.6, mid=1.0, high=high)
        monkeypatch.setattr(waste, "paired_ratio", lambda *times, found=found: found)
        padding = measured(Words(), **padded())["padding"]
        assert (padding.share, padding.seconds, padding.remedy) == (share, share, "")
        assert padding.found.startswith(said)


class Checkpointed(nn.Module):
    """Half of its layers are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(checkpoint(lambda x: self.second(x).sigmoid().sigmoid(), x, use_reentrant=False))


def test_checkpointing_that_memory_does_not_need(monkeypatch):
    inputs = torch.randn(BATCH, WIDTH)
    # A layer has one product in the forward pass, and two or, as the first one, one in the backward pass.
    found = measured(Checkpointed(), inputs)
    assert_only(found, "activation checkpointing", 1 / (3 + 5 + 1))
    for free, said in ((BATCH * WIDTH, "the free memory is 0 MiB: it is needed"), (None, "is not known")):
        monkeypatch.setattr(waste, "free_bytes", lambda device, free=free: free)
        found = measured(Checkpointed(), inputs)["activation checkpointing"]
        assert (found.share, found.remedy) == (0.0, "")
        assert said in found.found


def test_without_checkpoints_gradients_are_the_same():
    model, x = Checkpointed(), torch.randn(BATCH, WIDTH)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with Work() as work, removals.Kept():
        model(x).square().sum().backward()
    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))
    assert work.done == 8 * BATCH * WIDTH * WIDTH


def test_frozen_layers():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
    model[:3].requires_grad_(False)
    inputs = torch.randn(BATCH, WIDTH)
    found = measured(model, inputs)
    frozen, trained = 2 * WIDTH, 2 * 4
    assert_only(found, "forward pass of frozen layers", frozen / (frozen + trained))
    assert f"{2 * (WIDTH * WIDTH + WIDTH):,} frozen ones" in found["forward pass of frozen layers"].found
    model[0].requires_grad_(True)  # a frozen layer after a trained one must be passed
    found = measured(model, inputs)["forward pass of frozen layers"]
    assert (found.share, found.remedy) == (0.0, "")


def test_reading_attributes_of_parameters_is_not_using_them():
    class Reading(nn.Module):
        def __init__(self, *order: str) -> None:
            super().__init__()
            self.frozen, self.trained, self.order = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), order
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in (getattr(self, name) for name in self.order):
                x = layer(x.to(self.trained.weight.dtype).to(self.frozen.weight.dtype))
            return x

    inputs = torch.randn(BATCH, WIDTH)
    assert_only(measured(Reading("frozen", "trained"), inputs), "forward pass of frozen layers", 1 / 3)
    assert not measured(Reading("trained", "frozen"), inputs)["forward pass of frozen layers"].remedy


def test_waiting_for_data_is_a_part_of_the_step():
    report = WasteReport(step_seconds=3.0, kinds=(Waste(kind="padding", seconds=1.5, share=0.5, found="", remedy="x"),))
    found = report.with_waiting(1.0, "timed", "workers")
    assert found.step_seconds == 4.0
    assert [(one.kind, one.share) for one in found.kinds] == [("waiting for data", 0.25), ("padding", 0.375)]
    assert [one.kind for one in found.notable] == ["padding", "waiting for data"]
    assert report.with_waiting(0.0, "timed", "workers").kinds[0].remedy == ""


def test_a_waste_reads_as_a_line():
    report = WasteReport(
        step_seconds=0.5,
        kinds=(
            Waste(kind="padding", seconds=0.25, share=0.5, found="measured", remedy="unpad"),
            Waste(kind="unlabelled head", seconds=0.0, share=0.0, found="no head"),
            Waste(kind="host synchronisations", seconds=None, share=None, found="3 times", remedy="x"),
        ),
    )
    assert str(report).splitlines() == [
        "a plain step takes 500.0 ms",
        "",
        "work without effect    of a step       how it was found  what leaves it out",
        "padding                250.0 ms, 50 %  measured          unpad",
        "unlabelled head        none            no head",
        "host synchronisations  unknown         3 times           x",
    ]
    left_out = report.without(["unpad"])
    assert not left_out.notable
    assert "left out by unpad" in str(left_out)
    assert report.without(["sparse_head"]) == report


class Everything(Words):
    """A model with all that a pass may change: dropout, BatchNorm, a counter, checkpoints and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.calls = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        self.calls += 1
        hidden = self.drop(self.hidden(self.words(input_ids)))
        hidden = checkpoint(lambda x: self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]), hidden, use_reentrant=False)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten())


def test_nothing_of_the_run_changes():
    model = Everything()
    model.words.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    boosted = torchboost.boost(model, optimizer, level="O1", total_steps=2000, calibrate=False, verify=False)
    inputs = padded()
    for _ in range(2):
        boosted.optimizer.zero_grad()
        model(**inputs).backward()
        boosted.optimizer.step()
    hooks = model.register_forward_hook(lambda *_: pytest.fail("a hook was called"))

    def portrait() -> Any:
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        modules = [(len(m._forward_pre_hooks), len(m._forward_hooks), m.training) for m in model.modules()]
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), inputs))
        return [state, grads, modules, model.calls, torch.get_rng_state(), dict.fromkeys(boosted.attached, 0)]

    before = portrait()
    report = boosted.waste(**inputs)
    torch.testing.assert_close(portrait(), before, rtol=0, atol=0)
    assert report.step_seconds > 0
    hooks.remove()
    with pytest.raises(TypeError):  # what raises leaves everything too
        boosted.waste(1, 2, 3, 4, 5)
    torch.testing.assert_close(portrait()[:2], before[:2], rtol=0, atol=0)


class Dropped(Words):
    """A model without whose padding dropout draws other numbers."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        hidden = F.dropout(self.hidden(self.words(input_ids)), 0.5)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("make", [Everything, Dropped])
def test_the_next_steps_are_those_without_a_measurement(make: Any):
    def trained(measure: bool) -> list[float]:
        torch.manual_seed(1)
        model = make()
        boosted = torchboost.boost(model, sgd(model), level="O1", total_steps=2000, calibrate=False, verify=False)
        losses = []
        for step in range(4):
            inputs = padded(5)
            if measure and step == 2:
                boosted.waste(**inputs)
            loss = model(**inputs)
            loss.backward()
            boosted.optimizer.step()
            boosted.optimizer.zero_grad()
            losses.append(loss.item())
        live: Any = boosted.attached["unpad"]
        assert bool(live.calls) is (make is Dropped)
        return losses

    assert trained(True) == trained(False)


def boosted_words(**options: Any) -> torchboost.Boosted:
    model = Words()
    settings = {"level": "O0", "total_steps": 2000, "calibrate": False, "verify": False, **options}
    return torchboost.boost(model, sgd(model), **settings)


def test_explain_shows_what_stays():
    boosted, inputs = boosted_words(), padded(2)
    assert "waste" not in boosted.explain()
    planted = WasteReport(
        step_seconds=1.0,
        kinds=(
            Waste(kind="padding", seconds=0.8, share=0.8, found="measured", remedy="unpad_forward"),
            Waste(kind="unlabelled head", seconds=0.05, share=0.05, found="measured", remedy="sparse_head_forward"),
        ),
    )
    boosted.levers._waste = planted
    lines = [line for line in boosted.explain().splitlines() if line.startswith("waste")]
    assert lines == ["waste: padding: 800.0 ms, 80 %; measured; unpad_forward"]
    boosted = boosted_words(level="O1", config={"extra": {"unpad": {}}})
    boosted.model(**inputs).backward()
    boosted.levers._waste = planted
    assert "waste" not in boosted.explain()
    boosted.withdraw("unpad", "a test")
    assert "waste: padding: 800.0 ms" in boosted.explain()


def test_explain_shows_the_padding_of_the_first_call_if_unpad_is_off():
    for mode, shown in (("off", True), ("on", False)):
        config = {"extra": {"fused_optimizer": {}, **({"unpad": {}} if mode == "on" else {})}}
        boosted = boosted_words(config=config, verify=True)
        boosted.model(**padded()).backward()
        line = "waste: padding: 75 % of the positions of the first batch, and unpad is off"
        assert (line in boosted.explain().splitlines()) is shown, boosted.explain()


def test_before_the_first_step_the_trial_is_no_part_of_the_measured_steps():
    model = Words()
    boosted = torchboost.boost(model, sgd(model), total_steps=5000)
    boosted.waste(**padded())
    assert boosted.levers.due
    model(**padded()).backward()
    assert not boosted.levers.due


def test_calls_that_cannot_be_measured(monkeypatch):
    boosted, inputs = boosted_words(), padded()
    with torch.no_grad(), pytest.raises(IncompatibleError, match="another call than one of a training"):
        boosted.waste(**inputs)
    boosted.model.eval()
    with pytest.raises(IncompatibleError, match="another call than one of a training"):
        boosted.waste(**inputs)
    boosted.model.train()
    monkeypatch.setattr(calibration, "free_bytes", lambda device: 1)
    with pytest.raises(IncompatibleError, match="are free"):
        boosted.waste(**inputs)
    monkeypatch.undo()
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].compile(backend="eager")
    with pytest.raises(IncompatibleError, match=r"before torch\.compile"):
        waste_of(Target(compiled, sgd(compiled)), ((torch.ones(1, 2),), {}))


def test_a_model_that_moves_is_refused(caplog):
    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.next = nn.Linear(2, 2), iter(range(1000)).__next__

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (1 + self.next())

    model = Moving()
    with pytest.raises(IncompatibleError, match="two equal passes differ"):
        waste_of(Target(model, sgd(model)), ((torch.ones(1, 2),), {}))


def test_one_kind_that_fails_does_not_hide_the_others(monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(waste, "free_bytes", fail)
    found = measured(Checkpointed(), torch.randn(BATCH, WIDTH))
    assert str(found["activation checkpointing"]) == (
        "activation checkpointing: unknown; not measured: RuntimeError: planted"
    )
    assert found["padding"].share == 0.0


def test_a_loss_without_labels_is_measured():
    inputs = padded()
    inputs["labels"].fill_(-100)  # the loss is NaN
    found = measured(Words(), **inputs)
    assert found["padding"].share is not None


def test_waits_of_the_host_are_counted_by_place():
    x = torch.arange(4.0)

    def program() -> None:
        float(x[0].item())
        for _ in range(2):
            x[x > 1]
        x.nonzero()
        x + 1

    with removals.HostWaits("cpu") as mode:
        program()
    assert sorted(mode.places.values()) == [1, 1, 2]
    assert all(place.startswith("test_waste.py:") and place.endswith(" program") for place in mode.places)
    with removals.HostWaits("cuda") as mode:
        program()
    assert not mode.places
    assert "waits for nothing" in measured(Words(), padded()["input_ids"])["host synchronisations"].found


def test_unpad_that_the_loop_attached_by_hand_stays():
    boosted, inputs = boosted_words(), padded()
    live: Any = unpad_forward(boosted.model)
    boosted.model(**inputs)
    boosted.waste(**inputs)
    boosted.model(**inputs)
    assert live.calls == 1


def test_a_model_that_could_make_masks_inside_is_looked_at_once():
    class Encoded(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Linear(WIDTH, 2)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True), 1)

        def forward(self, ids: Tensor, absent: Tensor) -> Tensor:
            return self.head(self.encoder(self.words(ids), src_key_padding_mask=absent)[:, 0])

    model = Encoded().train()
    ids = padded()["input_ids"]
    boosted = torchboost.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O0")
    assert [each.kind for each in boosted.waste(ids, ids == 0).kinds] == KINDS


def test_an_iterator_that_the_model_holds_is_not_read():
    class Reading(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.items = iter(range(1000))

        def forward(self, x: Tensor) -> Tensor:
            self.last = next(self.items)
            return super().forward(x)

    model = Reading()
    boosted = torchboost.boost(model, sgd(model), total_steps=5000, calibrate=False)
    with pytest.raises(IncompatibleError, match="an iterator, which can be read only once"):
        boosted.waste(torch.randn(8, 4))
    model(torch.randn(8, 4))
    assert model.last == 0


@pytest.mark.parametrize("config", [{}, {"extra": {"dim_reduce": True}}])
def test_an_optimizer_whose_step_needs_a_closure_is_refused_with_what_to_do(config):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 4)
    optimizer = sgd(model) if config else torch.optim.LBFGS(model.parameters())
    boosted = torchboost.boost(model, optimizer, total_steps=5000, config=config)
    with pytest.raises(IncompatibleError, match=r"\.step needs a closure.*boost a copy of the model") as said:
        boosted.waste(x)
    assert "SGD(copied.parameters(), lr=0.1)" in str(said.value)
    copied = copy.deepcopy(model)
    report = torchboost.boost(copied, torch.optim.SGD(copied.parameters(), lr=0.1), level="O0").waste(x)
    assert [one.kind for one in report.kinds] == KINDS
