"""Whatever the trial does, the loop gets the loader's own batches, and random generators move as without it."""

from __future__ import annotations

import os
import random
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from torchboost.data.loader import Loader, loader
from torchboost.data.pipes import OWN
from torchboost.data.sameness import same

EPOCHS = 5
Pair = namedtuple("Pair", "image label")


class Images(Dataset):
    """Computes a sample from its index alone."""

    def __init__(self, count: int = 90) -> None:
        self.scale = torch.arange(1.0, 5.0)
        self.names = [f"name {i}" for i in range(count)]
        self.strength = 1.0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        image = self.scale * index * self.strength
        return {"image": image, "pair": (image.sum(), index), "name": self.names[index]}


def train(batches: Any, *, epochs: int = EPOCHS, between: Callable[[int], object] = bool) -> list[Any]:
    """Read some epochs as a loop does that also draws random numbers, and return all that it saw."""

    def draws() -> tuple[float, ...]:
        return torch.rand(1).item(), np.random.rand(), random.random()

    seen: list[Any] = []
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    for count in range(epochs):
        between(count)
        seen.extend((batch, draws()) for batch in batches)
        seen.append(draws())
    return seen


def assert_as_stock(build: Callable[[], DataLoader], **options: Any) -> Loader:
    """Compare with the loader itself, and return the loader that tried workers."""
    boosted = loader(build(), **options)
    expected, found = train(build()), train(boosted)
    assert len(found) == len(expected)
    assert all(same(one, two) for one, two in zip(found, expected, strict=True))
    return boosted


def collate_pairs(samples: list[Any]) -> Pair:
    return Pair(
        torch.stack([sample["image"] for sample in samples]), np.array([sample["pair"][1] for sample in samples])
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def weighted(_: Any) -> Sampler:
    return WeightedRandomSampler(torch.arange(1.0, 91.0), 80, generator=generator())


def by_batches(data: Any) -> dict[str, Any]:
    return {"sampler": BatchSampler(SequentialSampler(data), 4, drop_last=True), "batch_size": None}


class Shuffled(Sampler):
    """Draws its order at the beginning, as the samplers of transformers do."""

    def __len__(self) -> int:
        return 90

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(90).tolist())


LOADERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "in order": lambda data: {"batch_size": 2},
    "shuffled": lambda data: {"batch_size": 2, "shuffle": True},
    "shuffled, generator": lambda data: {"batch_size": 4, "shuffle": True, "generator": generator()},
    "incomplete batch, generator": lambda data: {"batch_size": 7, "shuffle": True, "generator": generator()},
    "dropped batch, generator": lambda data: {
        "batch_size": 7,
        "shuffle": True,
        "generator": generator(),
        "drop_last": True,
    },
    "with replacement": lambda data: {"batch_size": 2, "sampler": RandomSampler(data, replacement=True)},
    "subset": lambda data: {"batch_size": 2, "sampler": SubsetRandomSampler(range(60), generator=generator())},
    "weighted": lambda data: {"batch_size": 2, "sampler": weighted(data)},
    "ranks": lambda data: {"batch_size": 2, "sampler": DistributedSampler(data, num_replicas=2, rank=1)},
    "a list of batches": lambda data: {"batch_sampler": [[i, i + 1, 0] for i in range(0, 60)]},
    "a sampler of its own": lambda data: {"batch_size": 2, "sampler": Shuffled()},
    "batches by a sampler of its own": lambda data: {"batch_sampler": BatchSampler(Shuffled(), 3, drop_last=True)},
    "single samples": lambda data: {"batch_size": None},
    "collate": lambda data: {"batch_size": 2, "collate_fn": collate_pairs},
    "collate by a closure": lambda data: {"batch_size": 2, "collate_fn": lambda samples: collate_pairs(samples)},
}


@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_batches_and_generators_are_those_of_the_loader(eager, options):
    def build() -> DataLoader:
        data = Images()
        return DataLoader(data, **options(data))

    boosted = assert_as_stock(build)
    assert boosted.choice.workers, boosted.explain()
    assert "all equal" in boosted.explain()


def test_samples_that_are_read_together(eager):
    class Together(Images):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in reversed(indices)]

    assert assert_as_stock(lambda: DataLoader(Together(), batch_size=3)).choice.workers


def test_what_a_generator_of_the_loop_draws_after_the_last_batch(eager):
    """The sampler draws once more when it is exhausted, from a generator that the loop uses too."""

    def run(wrap: Callable[[DataLoader], Any], batch: int) -> list[Any]:
        shared = generator()
        batches = wrap(DataLoader(Images(), batch_size=batch, shuffle=True, generator=shared))
        return [[(x["name"], torch.rand(1, generator=shared).item()) for x in batches] for _ in range(EPOCHS)]

    for batch in (2, 7):
        boosted = loader(DataLoader(Images(), batch_size=batch, shuffle=True))
        assert run(loader, batch) == run(lambda plain: plain, batch)
        train(boosted)
        assert boosted.choice.workers


class Drawing(Images):
    """Draws from one of the generators."""

    def __init__(self, draw: Callable[[], float], chance: Callable[[int], bool] = lambda index: True) -> None:
        super().__init__()
        self.draw, self.chance = draw, chance

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index + (self.draw() if self.chance(index) else 0.0))


DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "numpy": np.random.rand,
    "python": random.random,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_data_set_that_draws_gets_no_workers(eager, draw):
    boosted = assert_as_stock(lambda: DataLoader(Drawing(draw), batch_size=2, shuffle=True))
    assert boosted.choice == OWN
    assert "draws from" in boosted.explain()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_sample_that_draws_late_is_loaded_again_in_this_process(eager, draw):
    """Only one sample draws, long after the looks of the trial."""
    boosted = assert_as_stock(lambda: DataLoader(Drawing(draw, lambda index: index == 85), batch_size=1))
    assert boosted.choice == OWN
    assert "draws from" in boosted.explain()


OWN_GENERATORS = {
    "torch": lambda: (lambda g: lambda: torch.rand(1, generator=g).item())(generator()),
    "numpy": lambda: np.random.default_rng(3).random,
    "old numpy": lambda: np.random.RandomState(3).rand,
    "python": lambda: random.Random(3).random,
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("make", OWN_GENERATORS.values(), ids=OWN_GENERATORS)
def test_a_data_set_with_a_generator_of_its_own(eager, make, late):
    class Held(Drawing):
        def __init__(self) -> None:
            super().__init__(make(), (lambda index: index == 85) if late else (lambda index: True))

    boosted = loader(DataLoader(Held(), batch_size=1, shuffle=False))
    expected, found = train(DataLoader(Held(), batch_size=1)), train(boosted)
    assert all(same(one, two) for one, two in zip(found, expected, strict=True))
    assert boosted.choice == OWN
    assert loader(DataLoader(Held(), batch_size=1), allow_other_draws=True).choice == OWN


GENERATOR = np.random.default_rng(3)


def drawn_late(index: int) -> float:
    return GENERATOR.random() if index == 85 else 0.0


def test_a_global_generator_that_one_sample_draws_from(eager):
    class Reaching(Images):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index + drawn_late(index))

    def run(batches: Any) -> list[Any]:
        GENERATOR.bit_generator.state = np.random.default_rng(3).bit_generator.state
        return train(batches)

    boosted = loader(DataLoader(Reaching(), batch_size=1))
    assert same(run(boosted), run(DataLoader(Reaching(), batch_size=1)))
    assert "draws from a generator" in boosted.explain()


def test_other_draws_may_be_allowed(eager):
    boosted = loader(DataLoader(Drawing(np.random.rand), batch_size=2), allow_other_draws=True)
    batches = [batch for _ in range(EPOCHS) for batch in boosted]
    assert boosted.choice.workers, boosted.explain()
    whole = torch.cat(batches[-45:])
    assert torch.equal(whole.floor(), torch.arange(90.0, dtype=whole.dtype))
    assert len(set((whole - whole.floor()).tolist())) > 80, "the workers draw different numbers"


def test_a_data_set_that_counts_its_reads(eager):
    class Counting(Images):
        reads = 0

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return torch.tensor([index, self.reads])

    boosted = assert_as_stock(lambda: DataLoader(Counting(), batch_size=2))
    assert "if a sample is read twice" in boosted.explain()


def test_a_data_set_that_reads_the_system(eager):
    class Fresh(Images):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(list(os.urandom(4)))

    boosted = loader(DataLoader(Fresh(), batch_size=2))
    train(boosted, epochs=4)
    assert "if a sample is read twice" in boosted.explain()


def test_a_data_set_that_answers_otherwise_in_a_worker(eager):
    class Aware(Images):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index + (0.0 if get_worker_info() is None else 0.5))

    boosted = assert_as_stock(lambda: DataLoader(Aware(), batch_size=2))
    assert "differs from the same one loaded in this process" in boosted.explain()


def test_a_data_set_that_hands_out_its_own_memory(eager):
    """The loop of this test writes in its batches, which is a change of the data set."""
    expected, found = [], []
    for seen, wrap in ((expected, lambda plain: plain), (found, loader)):
        data = torch.arange(90.0).view(90, 1)
        batches = wrap(DataLoader([*data], batch_size=None))
        for _ in range(EPOCHS):
            for row in batches:
                row += 1
                seen.append(row.item())
    assert found == expected


def test_a_data_set_that_the_loop_changes_between_batches(eager):
    def run(wrap: Callable[[DataLoader], Any]) -> list[Any]:
        data = Images()
        seen = []
        batches = wrap(DataLoader(data, batch_size=2))
        for _ in range(EPOCHS):
            for batch in batches:
                seen.append(batch["image"])
                data.strength *= 1.001
        return seen

    assert same(run(loader), run(lambda plain: plain))


def test_a_data_set_that_the_loop_changes_between_epochs(eager):
    def run(wrap: Callable[[DataLoader], Any], change: Callable[[Images, int], None]) -> tuple[list[Any], Any]:
        data = Images()
        batches = wrap(DataLoader(data, batch_size=2))
        return train(batches, epochs=8, between=lambda count: change(data, count)), batches

    def strength(data: Images, count: int) -> None:
        data.strength = float(count)

    def values(data: Images, count: int) -> None:
        data.scale[-1] = count

    def names(data: Images, count: int) -> None:
        data.names[70] = str(count)

    for change in (strength, values, names):
        found, boosted = run(loader, change)
        assert same(found, run(lambda plain: plain, change)[0])
        assert boosted.choice.workers, boosted.explain()


FACTOR = [1.0]


def test_a_global_that_changes_between_epochs_is_seen_at_the_first_batch(eager):
    class Global(Images):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index * FACTOR[0])

    def change(count: int) -> None:
        FACTOR[0] = 1.0 + (count > 9)

    boosted = loader(DataLoader(Global(), batch_size=2))
    found = train(boosted, epochs=13, between=change)
    assert same(found, train(DataLoader(Global(), batch_size=2), epochs=13, between=change))
    assert boosted.choice == OWN
    assert "differs from the same one loaded in this process" in boosted.explain()


def test_epochs_of_a_distributed_sampler(eager):
    def run(wrap: Callable[[DataLoader], Any]) -> tuple[list[Any], Any]:
        sampler = DistributedSampler(Images(), num_replicas=2, rank=0)
        batches = wrap(DataLoader(Images(), batch_size=1, sampler=sampler))
        return train(batches, between=lambda count: batches.sampler.set_epoch(count)), batches

    found, boosted = run(loader)
    assert same(found, run(lambda plain: plain)[0])
    assert boosted.choice.workers


class Lazy(Sampler):
    """Computes each index when it is asked, from what the loop has set."""

    def __init__(self) -> None:
        self.offset = 0

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        for count in range(60):
            yield (count + self.offset) % 90


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lazy": lambda data: {"sampler": Lazy()},
    "lazy batches": lambda data: {"batch_sampler": BatchSampler(Lazy(), 2, drop_last=False)},
    "lazy batches, last one dropped": lambda data: {"batch_sampler": BatchSampler(Lazy(), 2, drop_last=True)},
    "draws as it goes": lambda data: {"sampler": RandomSampler(data, replacement=True, generator=generator())},
    "several rounds": lambda data: {"sampler": RandomSampler(data, num_samples=200, generator=generator())},
}


@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_that_may_depend_on_the_loop_is_not_read_ahead(eager, options):
    def run(wrap: Callable[[DataLoader], Any]) -> tuple[list[Any], Any]:
        data = Images()
        plain = DataLoader(data, **options(data))
        inner: Any = getattr(plain.sampler, "sampler", plain.sampler)
        inner = inner if plain.batch_sampler is None else getattr(plain.batch_sampler, "sampler", inner)
        seen, batches = [], wrap(plain)
        for _ in range(EPOCHS):
            for batch in batches:
                seen.append(batch["name"])
                if isinstance(inner, Lazy):
                    inner.offset += 1
        return seen, batches

    found, boosted = run(loader)
    assert found == run(lambda plain: plain)[0]
    assert boosted.choice == OWN
    assert "read_ahead=True" in boosted.explain()


def test_a_sampler_may_be_read_ahead_on_demand(eager):
    boosted = assert_as_stock(lambda: DataLoader(Images(), batch_size=2, sampler=Lazy()), read_ahead=True)
    assert boosted.choice.workers


def test_a_sampler_with_a_state(eager):
    class Resumable(SequentialSampler):
        def state_dict(self) -> dict[str, int]:
            return {}

    boosted = assert_as_stock(lambda: DataLoader(Images(), batch_size=2, sampler=Resumable(Images())))
    assert "has a state" in boosted.explain()


def holding(make: Callable[[], Any]) -> Callable[[], DataLoader]:
    def build() -> DataLoader:
        data: Any = Images()
        data.held = make()
        return DataLoader(data, batch_size=2)

    return build


HELD: dict[str, Callable[[], Any]] = {
    "a lock": threading.Lock,
    "an open file": lambda: open(__file__, encoding="utf-8"),  # noqa: SIM115
    "a lock in a closure": lambda: (lambda lock: lambda: lock)(threading.Lock()),
    "a generator": lambda: (i for i in range(3)),
    "a tensor elsewhere": lambda: torch.ones(1, device="meta"),
}


@pytest.mark.parametrize("make", HELD.values(), ids=HELD)
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_a_data_set_that_cannot_be_sent(eager, make):
    boosted = assert_as_stock(holding(make))
    assert boosted.choice == OWN
    assert "nothing changed: the data set" in boosted.explain()


@pytest.mark.filterwarnings("ignore:.*unclosed file", "ignore:Exception ignored in:")
def test_an_open_file_that_a_pickle_leaves_out_is_not_shared(eager, tmp_path):
    (tmp_path / "data").write_bytes(bytes(range(90)) * 10)

    class Reader(Dataset):
        def __init__(self) -> None:
            self.file: Any = None

        def __getstate__(self) -> dict[str, Any]:
            return {"file": None}

        def __len__(self) -> int:
            return 90

        def __getitem__(self, index: int) -> Tensor:
            if self.file is None:
                self.file = open(tmp_path / "data", "rb", buffering=0)  # noqa: SIM115
                self.owner = os.getpid()
            assert self.owner == os.getpid()
            self.file.seek(10 * index)
            return torch.tensor(list(self.file.read(10)))

    boosted = assert_as_stock(lambda: DataLoader(Reader(), batch_size=2))
    assert boosted.choice.workers, boosted.explain()


BATCHES: dict[str, Callable[[Any], Any]] = {
    "part of a graph": lambda batch: torch.ones(1, requires_grad=True) * 2,
    "sparse": lambda batch: torch.eye(3).to_sparse(),
    "a function": lambda batch: lambda: None,
}


@pytest.mark.parametrize("collate", BATCHES.values(), ids=BATCHES)
def test_batches_that_workers_cannot_send(eager, collate):
    boosted = loader(DataLoader(Images(), batch_size=2, collate_fn=collate))
    for _ in range(4):
        assert len(list(boosted)) == 45
    assert boosted.choice == OWN
    assert "nothing changed" in boosted.explain()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(90))


def initialize(worker: int) -> None:
    pass


PLAIN: dict[str, Callable[[], DataLoader]] = {
    "iterable": lambda: DataLoader(Stream(), batch_size=2),
    "worker_init_fn": lambda: DataLoader(Images(), worker_init_fn=initialize),
    "own iterator": lambda: type("Own", (DataLoader,), {"__iter__": lambda self: iter([1, 2, 3] * 20)})(Images()),
}


@pytest.mark.parametrize("build", PLAIN.values(), ids=PLAIN)
def test_what_is_only_measured(eager, build):
    boosted = assert_as_stock(build)
    assert boosted.choice == OWN
    assert "nothing changed: " in boosted.explain()


def test_a_loader_that_has_workers(eager):
    boosted = assert_as_stock(lambda: DataLoader(Images(), batch_size=4, num_workers=1))
    assert "has 1 workers already" in boosted.explain()


@pytest.mark.parametrize("leave", [1, 7, 20])
def test_a_loop_that_leaves_early(eager, leave):
    def run(wrap: Callable[[DataLoader], Any]) -> list[Any]:
        torch.manual_seed(0)
        batches = wrap(DataLoader(Images(), batch_size=2, shuffle=True))
        seen = []
        for _ in range(30):
            for count, batch in enumerate(batches):
                seen.append((batch["name"], torch.rand(1).item()))
                if count == leave:
                    break
        return seen

    assert run(loader) == run(lambda plain: plain)


def test_iterators_at_the_same_time(eager):
    def run(batches: Any) -> list[Any]:
        torch.manual_seed(0)
        seen = [(one["name"], two["name"]) for _ in range(EPOCHS) for one, two in zip(batches, batches, strict=True)]
        iterator = iter(batches)
        seen += [next(iterator)["name"] for _ in range(3)]
        seen += [batch["name"] for batch in batches]
        return seen + [batch["name"] for batch in iterator]

    build = lambda: DataLoader(Images(), batch_size=2, shuffle=True)  # noqa: E731
    assert run(loader(build())) == run(build())


@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_short_epochs(eager, count):
    """A window may extend over several of them."""
    boosted = loader(DataLoader(Images(count), batch_size=1, shuffle=True))
    found = train(boosted, epochs=60)
    assert same(found, train(DataLoader(Images(count), batch_size=1, shuffle=True), epochs=60))
    assert boosted.choice.workers, boosted.explain()


def test_an_empty_loader(eager):
    boosted = loader(DataLoader(TensorDataset(torch.ones(0)), batch_size=2))
    assert [list(boosted) for _ in range(4)] == [[]] * 4
