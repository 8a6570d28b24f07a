"""Claim: on padded batches O1 is faster than the best loop by hand, and where nothing is padded it costs nothing.

Five tasks of fine-tuning and pretraining, each at three sizes, on models of transformers with random weights. Batches
have 128 tokens, padded to this width; lengths are log-normal. Each contestant trains a copy of the model on the same
batches, each of which is new to it, since a kernel takes longer at a new shape. The loops by hand are: batches padded
to the longest sequence, autocast in bfloat16 and a fused optimizer; the same in float32, since some processors are slow
in bfloat16; and the compiled model with autocast. ``longest`` stands for O1 on batches padded to the longest sequence.
``grouped`` stands for the same sequences in batches of similar lengths, padded to the longest, as ``group_by_length``
of the Trainer of transformers makes them: less padding, but other batches and so another training.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import transformers
from options import Options, parameters_of, parser, run, save_steps, timed_contestants
from torch import Tensor, nn

import torchboost
from torchboost.measure.stopwatch import compare

WIDTH, WORDS, CLASSES = 128, 16_000, 4
WARM, CALLS, PAIRS = 8, 4, 12
"""Batches of the warm-up, steps of a sample, and samples."""
SIZES = {"small": (128, 2, 32), "middle": (256, 4, 16), "large": (512, 6, 8)}
"""Width of the model, layers, and sequences of a batch."""
STEPS = 20_000
"""Length of the run that O1 is told."""

Batch = dict[str, Tensor]
Change = Callable[[list[Batch]], list[Batch]]
Way = Callable[[list[Batch]], Callable[[], None]]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        model: Makes it from its width and layers.
        labels: Makes the labels of a batch.
        padded: Whether sequences are shorter than the width.
    """

    model: Callable[[int, int], Any]
    labels: Callable[[Batch, torch.Generator], Tensor]
    padded: bool = True


def body(width: int, layers: int) -> dict[str, int]:
    return {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 32, "vocab_size": WORDS}


def decoder(width: int, layers: int) -> Any:
    config = transformers.LlamaConfig(**body(width, layers), intermediate_size=int(2.7 * width))
    return transformers.LlamaForCausalLM(config)


def encoder(kind: str, width: int, layers: int) -> Any:
    config = transformers.BertConfig(**body(width, layers), intermediate_size=4 * width, num_labels=CLASSES)
    return getattr(transformers, kind)(config)


def translator(width: int, layers: int) -> Any:
    config = transformers.BartConfig(
        **{"d_model": width, "vocab_size": WORDS, "encoder_layers": layers, "decoder_layers": layers},
        **{"encoder_attention_heads": width // 32, "decoder_attention_heads": width // 32},
        **{"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width},
    )
    return transformers.BartForConditionalGeneration(config)


def classes(batch: Batch, generator: torch.Generator) -> Tensor:
    return torch.randint(0, CLASSES, (len(batch["input_ids"]),), generator=generator)


def answers(batch: Batch, generator: torch.Generator) -> Tensor:
    """Label the second half of each sequence, as if the first one were the prompt."""
    lengths = batch["attention_mask"].sum(1, keepdim=True)
    prompt = torch.arange(WIDTH) < lengths // 2
    return batch["input_ids"].masked_fill(prompt | (batch["attention_mask"] == 0), -100)


def masked(batch: Batch, generator: torch.Generator) -> Tensor:
    kept = torch.rand(batch["input_ids"].shape, generator=generator) < 0.15
    return batch["input_ids"].masked_fill(~kept | (batch["attention_mask"] == 0), -100)


def summaries(batch: Batch, generator: torch.Generator) -> Tensor:
    lengths = (batch["attention_mask"].sum(1, keepdim=True) // 3).clamp(min=4)
    words = torch.randint(5, WORDS, (len(lengths), 48), generator=generator)
    return words.masked_fill(torch.arange(48) >= lengths, -100)


def everything(batch: Batch, generator: torch.Generator) -> Tensor:
    return batch["input_ids"]


TASKS = {
    "classification": Task(functools.partial(encoder, "BertForSequenceClassification"), classes),
    "instructions": Task(decoder, answers),
    "masked words": Task(functools.partial(encoder, "BertForMaskedLM"), masked),
    "summaries": Task(translator, summaries),
    "packed pretraining": Task(decoder, everything, padded=False),
}


def batches(task: Task, count: int, number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(number):
        lengths = torch.full((count,), WIDTH)
        if task.padded:
            lengths = (torch.randn(count, generator=generator) * 0.5 + 3.6).exp().long().clamp(8, WIDTH)
        mask = (torch.arange(WIDTH) < lengths[:, None]).long()
        ids = torch.randint(5, WORDS, mask.shape, generator=generator) * mask
        batch = {"input_ids": ids, "attention_mask": mask}
        made.append({**batch, "labels": task.labels(batch, generator)})
    return made


def shortened(batch: Batch) -> Batch:
    width = int(batch["attention_mask"].sum(1).max())
    return {name: rows[:, :width].contiguous() if rows.shape[1:] == (WIDTH,) else rows for name, rows in batch.items()}


def to_the_longest(data: list[Batch]) -> list[Batch]:
    return list(map(shortened, data))


def grouped(data: list[Batch]) -> list[Batch]:
    """Return the same sequences in batches of similar lengths, ordered so that each sample has batches of all lengths.

    ``group_by_length`` sorts 50 batches at a time, here 48; as there, the longest comes first.
    """
    every = {name: torch.cat([batch[name] for batch in data]) for name in data[0]}
    order = every["attention_mask"].sum(1).argsort(descending=True).chunk(len(data))
    samples = len(data) // CALLS
    spread = [order[first + samples * call] for first in range(samples) for call in range(CALLS)]
    return to_the_longest([{name: rows[chosen] for name, rows in every.items()} for chosen in spread])


def by_hand(model: nn.Module, *, half: bool, fused: bool) -> tuple[Callable[..., Any], torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
    return model, optimizer, functools.partial(torch.autocast, "cpu", torch.bfloat16) if half else nullcontext


def stepper(
    call: Callable[..., Any], optimizer: torch.optim.Optimizer, context: Any, change: Change | None = None
) -> Way:
    """Return what makes a step on the next of some batches, which are changed beforehand."""

    def on(data: list[Batch]) -> Callable[[], None]:
        turns: Iterator[Batch] = cycle(data if change is None else change(data))

        def step() -> None:
            with context():
                loss = call(**next(turns)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return on


def contestants(model: nn.Module, *, compiles: bool) -> tuple[dict[str, Way], dict[str, Any]]:
    """Return each contestant, and what levels have boosted."""
    ways: dict[str, Way] = {"stock": stepper(*by_hand(copy.deepcopy(model), half=False, fused=False))}
    for name, half in (("by hand", True), ("by hand, float32", False)):
        for suffix, change in (("", to_the_longest), (", grouped", grouped)):
            ways[name + suffix] = stepper(*by_hand(copy.deepcopy(model), half=half, fused=True), change)
    if compiles:
        compiled, optimizer, context = by_hand(copy.deepcopy(model), half=True, fused=True)
        ways["by hand, compiled"] = stepper(torch.compile(compiled), optimizer, context)
    levels: dict[str, Any] = {}
    for name, change in (("O1", None), ("O1, longest", to_the_longest), ("O1, grouped", grouped)):
        network, optimizer, context = by_hand(copy.deepcopy(model), half=False, fused=False)
        levels[name] = boosted = torchboost.boost(network, optimizer, level="O1", total_steps=STEPS)
        ways[name] = stepper(boosted.model, boosted.optimizer, context, change)
    return ways, levels


def measure(options: Options, task_name: str, size: str) -> Path:
    task, (width, layers, count) = TASKS[task_name], SIZES[size]
    torch.manual_seed(0)
    model = task.model(width, layers).train()
    pairs = 2 if options.smoke else PAIRS
    data = batches(task, 4 if options.smoke else count, WARM + pairs * CALLS)
    ways, levels = contestants(model, compiles=not options.smoke)
    warm, timed = ({name: way(part) for name, way in ways.items()} for part in (data[:WARM], data[WARM:]))
    found = compare(warm, timed=timed, baselines=["stock"], pairs=pairs, calls=CALLS, progress=options.progress)
    empty = 1 - sum(float(batch["attention_mask"].float().mean()) for batch in data) / len(data)
    contestants_found = timed_contestants(found, ways, "stock")
    for one in contestants_found:
        if one.name in levels:
            one.notes.append("on: " + ", ".join(levels[one.name].attached))
    return save_steps(
        _file(options, task_name, size),
        contestants_found,
        title=f"{task_name}, {width} x {layers}, {empty:.0%} padding",
        model=type(model).__name__,
        parameters=parameters_of(model),
        batch=count,
    )


def _file(options: Options, task: str, size: str) -> Path:
    return options.file("padding", f"{task}-{size}".replace(" ", "-"))


def measure_all(options: Options) -> list[Path]:
    warnings.filterwarnings("ignore")
    sizes = ["small"] if options.smoke else SIZES
    files = {(task, size): _file(options, task, size) for task in TASKS for size in sizes}
    return [path if options.resume and path.exists() else measure(options, *which) for which, path in files.items()]


if __name__ == "__main__":
    run([measure_all], parser(__doc__).parse_args())
