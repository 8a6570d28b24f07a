"""Claim: nanoGPT's run for a laptop reaches its loss in less time, with what one ``tune`` finds.

The run is that of nanoGPT's README: a GPT of 4 layers and width 128 on the characters of Shakespeare, context 64, 12
texts a step, 2,000 steps. Its README states a loss of 1.88 after about three minutes on a notebook::

    python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 \
        --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 \
        --dropout=0.0

The model is built by its ``model.py``, so a checkout of https://github.com/karpathy/nanoGPT is needed. Optimizer,
schedule and data are those of its ``train.py``, but for the clipping of gradients. The loss is
that of the second half of its validation text. Choices are made by the first half. Contestants and seconds are those of
``half_time.py``: ``OMP_NUM_THREADS=1 taskset -c 0 python record_nanogpt.py --nanogpt PATH --text input.txt``.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from half_time import HEADINGS, SEEDS, line, measured, said_of
from options import options_of, parser
from saved_runs import results
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from torchboost.bench.factory import Factory, Parts
from torchboost.bench.report.table import Table

CONTEXT, BATCH, STEPS, WARMUP = 64, 12, 2_000, 100
RATE, LEAST = 1e-3, 0.1
"""The learning rate, and the share of it that is left at the end."""
HELD_OUT = 0.1
"""Share of the text for validation."""

Batch = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class NanoGPT:
    """The run of nanoGPT's README for a laptop.

    Args:
        code: nanoGPT's ``model.py``.
        text: Shakespeare's works as numbers of characters. Shape (characters,).
        characters: How many different ones there are.
        steps: Of a run.
    """

    code: ModuleType
    text: Tensor
    characters: int
    steps: int = STEPS
    name: str = "nanogpt"
    title: str = "nanoGPT's README run for a laptop"
    model_name: str = "nanoGPT, 4 layers, width 128, context 64"
    metric: str = "loss"
    drops: tuple[float, float] = (0.01, 0.05)
    epochs: int = 1

    def factory(self) -> Factory:
        kept = round((1 - HELD_OUT) * len(self.text))
        train, (validation, test) = self.text[:kept], self.text[kept:].chunk(2)

        def make(seed: int) -> Parts:
            torch.manual_seed(seed)
            model = self._model()
            optimizer = model.configure_optimizers(0.1, RATE, (0.9, 0.99), "cpu")
            return Parts(
                model=model,
                optimizer=optimizer,
                loss=lambda outputs, targets: outputs[1],
                batches=Blocks(train, self.steps, seed),
                evaluate=functools.partial(negative_loss, text=test),
                schedule=lambda optimizer, steps: LambdaLR(optimizer, functools.partial(share_of_rate, steps=steps)),
                validate=functools.partial(negative_loss, text=validation),
            )

        about = {"name": self.name, "title": self.title, "model_name": self.model_name, "drops": self.drops}
        return Factory(make=make, higher_is_better=False, **about)

    def _model(self) -> Any:
        sizes = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": CONTEXT, "dropout": 0.0, "bias": False}
        return self.code.GPT(self.code.GPTConfig(vocab_size=self.characters, **sizes))


@dataclass(eq=False)
class Blocks:
    """Batches at random places of a text, the same ones for a seed. Each iteration continues."""

    text: Tensor
    steps: int
    seed: int
    epoch: int = 0

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        draws = torch.Generator().manual_seed(1_000 * self.seed + self.epoch)
        self.epoch += 1
        for _ in range(self.steps):
            starts = torch.randint(len(self.text) - CONTEXT, (BATCH,), generator=draws)
            yield batch_at(self.text, starts)


def batch_at(text: Tensor, starts: Tensor) -> Batch:
    """Return the characters at some places of a text, and those after each of them."""
    blocks = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    inputs, targets = blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()
    return {"idx": inputs, "targets": targets}, targets


def share_of_rate(step: int, steps: int) -> float:
    """Return the share of the learning rate: a warm-up, as long a part of the run as there, and a cosine."""
    warmup = max(1, round(steps * WARMUP / STEPS))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return LEAST + 0.5 * (1 + math.cos(math.pi * done)) * (1 - LEAST)


@torch.no_grad()
def negative_loss(model: nn.Module, text: Tensor) -> float:
    """Return minus the mean cross-entropy of a text, in nats per character, each character in one block."""
    starts = torch.arange(0, len(text) - CONTEXT - 1, CONTEXT)
    losses: list[Tensor] = []
    for some in starts.split(64):
        inputs, _ = batch_at(text, some)
        losses.append(model(**inputs)[1] * len(some))
    return -float(torch.stack(losses).sum()) / len(starts)


def loaded(nanogpt: Path, text: Path | None, *, smoke: bool) -> NanoGPT:
    """Read the model's code and the text.

    Raises:
        FileNotFoundError: One of them is missing.
    """
    file = nanogpt / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"found no {file}; give --nanogpt the folder of a checkout of nanoGPT.")
    if text is None or not text.is_file():
        raise FileNotFoundError(f"found no text {text}; give --text the file input.txt of tiny Shakespeare.")
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    letters = text.read_text(encoding="utf-8")
    numbers = {letter: number for number, letter in enumerate(sorted(set(letters)))}
    ids = torch.tensor([numbers[letter] for letter in letters])
    return NanoGPT(code=code, text=ids, characters=len(numbers), steps=40 if smoke else STEPS)


def table(folder: Path) -> tuple[Table, str]:
    """Return the line of the record, once it was measured, and a note."""
    found = list(results(folder, "record", (NanoGPT.name,)).values())
    lines = [line(result, NanoGPT) for result in found]
    return Table(headings=HEADINGS, rows=tuple(lines)), said_of(found, claim="record", units="")


def main(argv: list[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--nanogpt", type=Path, required=True, help="folder of a checkout of nanoGPT")
    made.add_argument("--budget", default="45m", help="time of the tuning (default: %(default)s)")
    made.add_argument("--no-hand", dest="hand", action="store_false", help="leave out the loops by hand")
    made.add_argument("--seeds", type=int, default=SEEDS, help="seeds of the confirmation (default: %(default)s)")
    given = made.parse_args(argv)
    options = options_of(given)
    job = loaded(given.nanogpt, options.text, smoke=options.smoke)
    seeds = 2 if options.smoke else given.seeds
    file = options.file("record", job.name)
    written = measured(job, job.factory(), job.steps, options, file, budget=given.budget, seeds=seeds, hand=given.hand)
    print(f"wrote {written}")


if __name__ == "__main__":
    main()
