"""Claim: what O1 gains in a step of a fine-tuning arrives in the whole run, in the plain loop and in trainers.

A small BERT tells which package a docstring is from (``torchboost.workloads.docstrings``). It was trained for a short
time as a masked language model on the same texts. A run is three epochs. Texts are padded to 128 words, as
``padding="max_length"`` does. The hosts are a plain loop, ``transformers.Trainer`` and a loop with Accelerate, each
alone and with O1. The loop by hand pads to the longest text of the batch, with a fused optimizer, and with autocast in
bfloat16 if the processor is fast at it. Compilation by hand is left out, since so short a run does not repay it.

The runs of a seed in a host have the same weights at their start and the same batches. The time is that from the
beginning of the first step to the end of the last one, with the trial of O1.
The accuracy is that of the texts that are for tests. Each run is saved when it ends; ``--resume`` continues.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from options import Options, run_each
from saved_runs import Result, Run, SavedRuns, results
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, default_collate

import torchboost
from torchboost.bench.report import wording
from torchboost.bench.report.table import Table, plain
from torchboost.core.hardware import half_precision
from torchboost.measure.statistics import bootstrap_median, mean_of, paired_difference
from torchboost.workloads.data import Documents, to_longest
from torchboost.workloads.docstrings import docstrings

STOCK, LEVEL, HAND = "stock", "O1", "by hand"
RATE, WARM_UP = 5e-4, 0.1
HIDDEN = 0.15
"""Share of the words that the masked language model has to guess."""
SETTLED = 50
"""Steps of a run that do not count for the time of a step."""

HEADINGS = ("in", "way", "a run", "speed of a run", "speed of a step", "share that arrives", "accuracy")

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of the model and of its trainings."""

    width: int = 192
    layers: int = 2
    batch: int = 16
    steps: int = 936
    before: int = 300
    seeds: int = 5


TINY = Size(width=32, layers=1, batch=8, steps=6, before=2, seeds=2)


@dataclass
class Watch:
    """When each step began and ended."""

    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def begin(self) -> None:
        self.begun.append(time.perf_counter())

    def end(self) -> None:
        self.ended.append(time.perf_counter())

    @property
    def times(self) -> list[float]:
        """Seconds of each step, from its beginning to that of the next one."""
        edges = [*self.begun, self.ended[-1]]
        return [round(after - before, 6) for before, after in itertools.pairwise(edges)]


class Texts(Dataset[Batch]):
    """The training texts as rows, as the models of transformers take them."""

    def __init__(self, data: Documents) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.samples

    def __getitem__(self, index: int) -> Batch:
        ids = self._data.train_inputs[index]
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": self._data.train_labels[index]}


def shortened(rows: list[Batch]) -> Batch:
    """Collate rows, padded to the longest of them only."""
    batch = default_collate(rows)
    ids = to_longest(batch["input_ids"])
    return {**batch, "input_ids": ids, "attention_mask": batch["attention_mask"][:, : ids.shape[1]]}


@dataclass(frozen=True)
class Job:
    """What is fine-tuned: the texts, the sizes and the weights at the start."""

    data: Documents
    size: Size
    trunk: dict[str, Tensor]

    def model(self, seed: int) -> Any:
        import transformers

        torch.manual_seed(seed)
        model = transformers.BertForSequenceClassification(config(self.data, self.size))
        model.load_state_dict(self.trunk, strict=False)
        return model.train()

    def batches(self, seed: int, collate: Callable[..., Any] | None = None) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(seed)
        size = self.size.batch
        return DataLoader(Texts(self.data), size, shuffle=True, drop_last=True, generator=order, collate_fn=collate)

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        steps = self.size.steps
        rise = max(1, round(WARM_UP * steps))
        return LambdaLR(optimizer, lambda step: min((step + 1) / rise, (steps - step) / max(1, steps - rise)))


def config(data: Documents, size: Size) -> Any:
    import transformers

    return transformers.BertConfig(
        vocab_size=len(data.words) + 1,  # the last one hides a word
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=max(1, size.width // 32),
        intermediate_size=4 * size.width,
        max_position_embeddings=data.train_inputs.shape[1],
        num_labels=len(data.classes),
    )


@functools.cache
def job(size: Size) -> Job:
    """Train the trunk as a masked language model, with the exact levers and without a trial: always in the same way."""
    import transformers

    data = docstrings()
    torch.manual_seed(0)
    model: Any = transformers.BertForMaskedLM(config(data, size))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    exact = {"extra": {"autocast": False}}
    boosted = torchboost.boost(model, optimizer, total_steps=size.before, config=exact, calibrate=False)
    epochs = (data.train(2 * size.batch, seed=0, epoch=epoch) for epoch in itertools.count())
    for ids, _ in itertools.islice(itertools.chain.from_iterable(epochs), size.before):
        ids = to_longest(ids)
        hidden = (torch.rand(ids.shape) < HIDDEN) & (ids != 0)
        seen = ids.masked_fill(hidden, len(data.words))
        labels = ids.masked_fill(~hidden, -100)
        model(input_ids=seen, attention_mask=(ids != 0).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    boosted.remove()
    return Job(data, size, {name: each for name, each in model.state_dict().items() if name.startswith("bert.")})


def forever(batches: DataLoader[Any]) -> Iterator[Batch]:
    while True:
        yield from batches


def in_the_loop(way: str, work: Job, model: nn.Module, seed: int, watch: Watch) -> torchboost.Boosted | None:
    by_hand, steps = way == HAND, work.size.steps
    optimizer = AdamW(model.parameters(), lr=RATE, fused=by_hand or None)
    boosted = torchboost.boost(model, optimizer, level=way, total_steps=steps) if way == LEVEL else None
    schedule = work.schedule(optimizer)
    half = by_hand and half_precision("cpu", 0).fast
    precision = functools.partial(torch.autocast, "cpu", torch.bfloat16) if half else nullcontext
    batches = forever(work.batches(seed, shortened if by_hand else None))
    for batch in itertools.islice(batches, steps):
        watch.begin()
        with precision():
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        watch.end()
    if boosted is not None:
        boosted.remove()
    return boosted


def in_trainer(way: str, work: Job, model: nn.Module, seed: int, watch: Watch) -> torchboost.Boosted | None:
    import transformers

    from torchboost.integrations.transformers import BoostTrainer

    class Watching(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.end()

    size = work.size
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        args = transformers.TrainingArguments(
            folder,
            max_steps=size.steps,
            per_device_train_batch_size=size.batch,
            learning_rate=RATE,
            warmup_steps=round(WARM_UP * size.steps),
            seed=seed,
            use_cpu=True,
            **quiet,
        )
        given: dict[str, Any] = {"train_dataset": Texts(work.data), "callbacks": [Watching()]}
        if way == LEVEL:
            trainer: Any = BoostTrainer(model, args, boost=LEVEL, **given)
        else:
            trainer = transformers.Trainer(model, args, **given)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return trainer.boosted if way == LEVEL else None


def with_accelerate(way: str, work: Job, model: nn.Module, seed: int, watch: Watch) -> torchboost.Boosted | None:
    import accelerate

    from torchboost.integrations.accelerate import prepare

    accelerator, boosted = accelerate.Accelerator(cpu=True), None
    optimizer = AdamW(model.parameters(), lr=RATE)
    parts = (model, optimizer, work.batches(seed), work.schedule(optimizer))
    if way == LEVEL:
        *parts, boosted = prepare(accelerator, *parts, level=LEVEL, total_steps=work.size.steps)
    else:
        parts = accelerator.prepare(*parts)
    model, optimizer, batches, schedule = parts
    for batch in itertools.islice(forever(batches), work.size.steps):
        watch.begin()
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        watch.end()
    if boosted is not None:
        boosted.remove()
    return boosted


HOSTS: dict[str, tuple[Callable[..., torchboost.Boosted | None], Sequence[str]]] = {
    "loop": (in_the_loop, (STOCK, LEVEL, HAND)),
    "transformers": (in_trainer, (STOCK, LEVEL)),
    "accelerate": (with_accelerate, (STOCK, LEVEL)),
}
"""The hosts of a fine-tuning, and its ways in each."""


@torch.no_grad()
def accuracy(model: nn.Module, data: Documents) -> float:
    model.eval()
    right = 0
    for ids, labels in data.test(64):
        ids = to_longest(ids)
        right += int((model(input_ids=ids, attention_mask=(ids != 0).long()).logits.argmax(1) == labels).sum())
    return right / len(data.test_labels)


def trained(host: str, way: str, seed: int, work: Job) -> Run:
    model, watch = work.model(seed), Watch()
    boosted = HOSTS[host][0](way, work, model, seed, watch)
    told: Run = {"seconds": watch.ended[-1] - watch.begun[0]}
    if boosted is not None:
        told |= {"on": [a.name for a in boosted.plan.algorithms], "checks": dict(boosted.checks)}
        told |= {"trial": boosted.choice.seconds if boosted.choice is not None else None}
    return {**told, "accuracy": accuracy(model, work.data), "times": watch.times}


def measure(host: str, options: Options) -> Path:
    warnings.filterwarnings("ignore")
    size, file = TINY if options.smoke else Size(), options.file("fine_tunings", host)
    work, ways = job(size), HOSTS[host][1]
    about = {
        "title": f"Fine-tuning on docstrings, {host}: BERT, {size.layers} layers of width {size.width}",
        "steps": size.steps,
        "batch": size.batch,
        "padding": round(work.data.padding, 3),
    }
    runs = SavedRuns(file, about, resume=options.resume, same=tuple(about))
    runs.indent = None  # for the times of all steps
    in_the_loop(STOCK, replace(work, size=replace(size, steps=6)), work.model(0), 0, Watch())  # memory, kernels
    due = [(seed, way) for seed in range(size.seeds) for way in (*ways[seed % len(ways) :], *ways[: seed % len(ways)])]
    for number, (seed, way) in enumerate(due):
        options.progress(f"fine-tuning, {host}", number, len(due), f"{way}, seed {seed}")
        runs.get({"way": way, "seed": seed}, functools.partial(trained, host, way, seed, work))
    print(plain(Table(HEADINGS, tuple(lines_of(host, runs.result)))))
    return file


def table(folder: Path) -> tuple[Table, str]:
    """Return the time and the accuracy of whole runs, and the share of a step's gain that arrives in them; a note."""
    saved = results(folder, "fine_tunings", HOSTS)
    said = "; ".join(sorted({told(result) for result in saved.values()}))
    lines = tuple(line for host, result in saved.items() for line in lines_of(host, result))
    return Table(HEADINGS, lines), f"{said} All runs: `benchmarks/results/fine_tunings-*.json`."


def told(result: Result) -> str:
    machine, seeds = result["environment"], len({run["seed"] for run in result["runs"]})
    return (
        f"{result['steps']} steps with batches of {result['batch']} texts, {result['padding']:.0%} of their positions "
        f"padding, {seeds} seeds. A step is the mean after the first {SETTLED}. {machine['processor']}, "
        f"{machine['threads']} threads, torch {machine['torch']}."
    )


def lines_of(host: str, result: Result) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for way in HOSTS[host][1]:
        own = {run["seed"]: run for run in result["runs"] if run["way"] == way}
        pairs = [(run, own[run["seed"]]) for run in result["runs"] if run["way"] == STOCK and run["seed"] in own]
        if not pairs:
            continue
        whole = [stock["seconds"] / run["seconds"] for stock, run in pairs]
        steps = [settled(stock) / settled(run) for stock, run in pairs]
        mean = mean_of(run["accuracy"] for run in own.values())
        begins = (host if not lines else "", way, wording.seconds(mean_of(run["seconds"] for run in own.values())))
        if way == STOCK:
            lines.append((*begins, wording.ratio(1.0), wording.ratio(1.0), "", wording.measure(mean, share=True)))
            continue
        arrives = statistics.median(gain / step for gain, step in zip(whole, steps, strict=True))
        speeds = wording.ratio_interval(bootstrap_median(whole)), wording.ratio(statistics.median(steps))
        lines.append((*begins, *speeds, f"{arrives:.0%}", gap(pairs)))
    return lines


def settled(run: Run) -> float:
    """Return the mean step. Batches have texts of different lengths, so the median is that of another batch."""
    return mean_of(run["times"][SETTLED:] or run["times"])


def gap(pairs: Sequence[tuple[Run, Run]]) -> str:
    """Return the mean difference in accuracy, with bounds of 95 % on each side."""
    before, after = zip(*((stock["accuracy"], run["accuracy"]) for stock, run in pairs), strict=True)
    if len(pairs) < 2:
        return wording.difference(after[0] - before[0], share=True)
    found = paired_difference(before, after)
    low, mid, high = (wording.difference(value, share=True) for value in (found.low, found.mid, found.high))
    return f"{mid} ({low.removesuffix(' points')} to {high.removesuffix(' points')})"


if __name__ == "__main__":
    run_each(__doc__, "host", HOSTS, measure)
