"""``run_bench``: every contestant gets the same batches, the same start and the same process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.bench.test_bench import BATCHES, accuracy, benched, network, planner_of, sgd, tiny
from tests.bench.test_bench import planted as planted
from torchboost.bench import bench
from torchboost.bench.bench import run_bench
from torchboost.bench.factory import Factory, Parts
from torchboost.core.algorithm import Algorithm, Attachment, Target


class Seeing(nn.Module):
    """Notes the first entry of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 4), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(int(x[0, 0]))
        return self.layer(x)


class DrawnAtOnce(DataLoader[Any]):
    """Draws its order when it is iterated, before the first batch is asked for, as with workers."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


SAMPLES: Any = [(torch.full((2,), float(k)), k % 4) for k in range(12)]


@pytest.mark.parametrize(
    "batches",
    [DrawnAtOnce(SAMPLES, 4, shuffle=True), DataLoader(SAMPLES, 4, shuffle=True, generator=torch.Generator())],
    ids=["drawn at once", "from a generator of its own"],
)
def test_all_contestants_train_on_the_same_batches_whatever_was_drawn_before(batches: Any):
    models: list[Seeing] = []

    def make(seed: int) -> Parts:
        model = Seeing()
        models.append(model)
        return Parts(model, sgd(model), F.cross_entropy, batches, lambda _: float(model.layer.bias[0]))

    benched(Factory(make=make, name="drawn", title="drawn"), "stock", "O1", epochs=2, seeds=1)
    first, second = (model.seen for model in models[-2:])
    assert len(first) == 6
    assert first == second
    assert first[:3] != first[3:]


def test_a_pass_with_fewer_batches_than_the_first_one_is_noted():
    counts = itertools.chain([3, 3], itertools.cycle([3, 2]))  # the data and the size of an epoch are read before

    class Varying(list[Any]):
        def __iter__(self) -> Any:
            return itertools.islice(super().__iter__(), next(counts))

    def make(seed: int) -> Parts:
        model = network()
        return Parts(model, sgd(model), F.cross_entropy, Varying(BATCHES), accuracy)

    report = benched(Factory(make=make, name="varying", title="varying"), "stock", epochs=4, seeds=1)
    assert report.notes[1:] == [bench.SHORT]
    assert bench.SHORT not in benched(None, "stock", epochs=2, seeds=1).notes


def test_a_factory_that_gives_something_else_for_the_same_seed_is_noted():
    sizes = itertools.count(1)

    def make(seed: int) -> Parts:
        model = network()
        with torch.no_grad():
            model[0].weight.mul_(next(sizes))  # pyright: ignore[reportIndexIssue]
        return Parts(model, sgd(model), F.cross_entropy, BATCHES, accuracy)

    report = benched(Factory(make=make, name="growing", title="growing"), "stock", seeds=1, pairs=6)
    (note,) = report.notes
    assert note.startswith("make returned other start weights or optimizers when it was called again for the same seed")


def test_layers_that_are_taken_out_of_evaluation_mode_are_noted() -> None:
    def make(seed: int) -> Parts:
        model = network()
        model[1].eval()  # pyright: ignore[reportIndexIssue]
        return Parts(model, sgd(model), F.cross_entropy, BATCHES, accuracy)

    report = benched(Factory(make=make, name="kept", title="kept"), "stock", seeds=1, pairs=6)
    (note,) = report.notes
    assert "with layers in evaluation mode (BatchNorm2d)" in note
    assert benched(tiny(train=False), "stock", seeds=1, pairs=6).notes == []  # a whole model, as of from_pretrained


def test_steps_are_timed_on_the_same_batches_that_no_contestant_has_seen_before():
    """Batches of other lengths need other kernels. On eight batches in a circle their cost would not be seen."""
    models: list[Seeing] = []
    batches = [(torch.full((4, 2), float(k)), torch.tensor([0, 1, 2, 3])) for k in range(30)]

    def make(seed: int) -> Parts:
        models.append(Seeing())
        return Parts(models[-1], sgd(models[-1]), F.cross_entropy, batches)

    run_bench(Factory(make=make, name="seeing", title="seeing", epochs=0), contestants=["stock", "hand"], pairs=6)
    stepped = [model.seen for model in models if len(model.seen) > 6]
    assert len(stepped) == 2
    timed = [seen[-6:] for seen in stepped]
    assert timed[0] == timed[1]
    assert len(set(timed[0])) == 6
    assert not any(set(timed[0]) & set(seen[:-6]) for seen in stepped)


class Noting(nn.Linear):
    """Notes the settings of the process in each pass, and whether the algorithm is on."""

    seen: ClassVar[set[tuple[bool, int, str]]] = set()

    def forward(self, input: Tensor) -> Tensor:
        on = hasattr(self, "on")
        Noting.seen.add((on, torch.get_num_threads(), torch.get_float32_matmul_precision()))
        return super().forward(input)


@dataclass(frozen=True, kw_only=True)
class OfTheProcess(Algorithm):
    """Changes settings of the whole process, as ``threads`` and ``matmul_precision`` do."""

    name: ClassVar[str] = "of_the_process"

    def attach(self, target: Target) -> Attachment:
        target.model.on = True  # pyright: ignore[reportArgumentType]
        torch.set_num_threads(2)
        torch.set_float32_matmul_precision("high")
        return Attachment()


def test_a_contestant_that_changes_the_whole_process_changes_nothing_for_the_others():
    Noting.seen.clear()

    def make(seed: int) -> Parts:
        model = Noting(2, 4)
        batches = [(torch.randn(4, 2), torch.arange(4))] * 2
        return Parts(model, sgd(model), F.cross_entropy, batches, lambda model: float(model(batches[0][0])[0, 0]))

    factory = Factory(make=make, name="noting", title="noting")
    benched(factory, "O1", "stock", pairs=4, seeds=2, planner=planner_of(OfTheProcess()))
    assert Noting.seen == {(False, 1, "highest"), (True, 2, "high")}
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (1, "highest")


def test_what_a_loss_does_to_a_batch_does_not_reach_the_next_timed_contestant() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            return self.layer(x)

    seen: list[float] = []

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        seen.append(float(batch["x"].sum()))
        batch["x"].zero_()
        return F.cross_entropy(outputs, batch.pop("labels"))

    def make(seed: int) -> Parts:
        model = Named()
        batch = {"x": torch.ones(4, 2), "labels": torch.tensor([0, 1, 0, 1])}
        return Parts(model, sgd(model), loss, [batch])

    benched(Factory(make=make, name="tiny", title="tiny"), "stock", "O0", pairs=3, epochs=0)
    assert set(seen) == {8.0}
