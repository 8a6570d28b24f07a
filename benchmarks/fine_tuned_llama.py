"""A workload without a name on the command line: a language model that knows some texts is fine-tuned on others.

A small Llama of ``transformers`` first learns the docstrings of Python's standard library, scikit-learn and torch, with
AdamW. Then it learns those of SymPy. Texts are padded to 128 words, and padding has no label.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import torchboost
from torchboost.bench.factory import Factory, Parts
from torchboost.workloads.data import Documents, to_longest
from torchboost.workloads.docstrings import docstrings
from torchboost.workloads.named import one_cycle

BEFORE, AFTER = (0, 1, 3), 2
"""Classes of the first training, and the one of the fine-tuning."""

EPOCHS, RATE = 6, 1e-3
"""Of the first training."""

NO_LABEL = -100


class Llama(nn.Module):
    """Maps numbers of words to the scores of the next words."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=words,
            hidden_size=192,
            num_hidden_layers=3,
            num_attention_heads=6,
            intermediate_size=512,
            max_position_embeddings=width,
            pad_token_id=0,
            use_cache=False,
        )
        self.llama: Any = transformers.LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.llama(input_ids=ids, attention_mask=(ids != 0).long()).logits


def next_words(ids: Tensor) -> Tensor:
    """Return the label of each position: the word after it."""
    following = F.pad(ids[:, 1:], (0, 1))
    return following.masked_fill(following == 0, NO_LABEL)


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Of scores whose texts may be cut after their longest."""
    cut = labels[:, : scores.shape[1]]
    return F.cross_entropy(scores.flatten(0, 1), cut.flatten(), ignore_index=NO_LABEL)


@torch.no_grad()
def bits_per_word(model: Callable[[Tensor], Tensor], texts: Tensor) -> float:
    total, count = 0.0, 0
    for ids in texts.split(50):
        scores, labels = model(to_longest(ids)).float(), next_words(ids)
        words = int((labels != NO_LABEL).sum())
        total, count = total + words * float(loss(scores, labels)), count + words
    return total / count / math.log(2)


def new(data: Documents) -> Llama:
    return Llama(len(data.words), data.train_inputs.shape[1])


def epoch(texts: Tensor, batch: int, *, seed: int, number: int) -> Iterator[Tensor]:
    """Yield whole batches in an order of their own."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1_000 * seed + number))
    yield from (texts[one] for one in order.split(batch) if len(one) == batch)


@functools.cache
def weights() -> tuple[Documents, Mapping[str, Tensor]]:
    """Return all texts, and the weights of the first training. It takes some minutes on one core."""
    data = docstrings()
    texts = data.train_inputs[torch.isin(data.train_labels, torch.tensor(BEFORE))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch = new(data), FineTunedLlama.batch
        steps = EPOCHS * (len(texts) // batch)
        optimizer = AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
        boosted = torchboost.boost(model, optimizer, total_steps=steps, calibrate=False)
        schedule = LambdaLR(optimizer, functools.partial(one_cycle, total=steps))
        batches = (epoch(texts, batch, seed=0, number=number) for number in range(EPOCHS))
        for ids in itertools.chain.from_iterable(batches):
            loss(model(ids), next_words(ids)).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        boosted.remove()
    return data, model.state_dict()


@dataclass
class Epochs:
    """The batches of a seed; each iteration is the next epoch."""

    texts: Tensor
    batch: int
    seed: int
    number: int = -1

    def __len__(self) -> int:
        return len(self.texts) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.number += 1
        for ids in epoch(self.texts, self.batch, seed=self.seed, number=self.number):
            yield ids, next_words(ids)


@dataclass(frozen=True)
class FineTunedLlama:
    """The fine-tuning, with what ``half_time`` asks of a workload. The last tenth of the texts is for validation."""

    name = "fine-tuned-llama"
    title = "fine-tuning on docstrings, padded to 128 words"
    model_name = "Llama, 3 layers, width 192"
    batch = 15
    metric = "bits per word"
    drops = (0.02, 0.1)
    epochs: int = 3

    def load(self, path: str | Path | None, limit: int | None) -> Documents:
        data, _ = weights()
        of_train, of_test = data.train_labels == AFTER, data.test_labels == AFTER
        return Documents(
            train_inputs=data.train_inputs[of_train][:limit],
            train_labels=data.train_labels[of_train][:limit],
            test_inputs=data.test_inputs[of_test],
            test_labels=data.test_labels[of_test],
            words=data.words,
            classes=(data.classes[AFTER],),
        ).held_out()

    def factory(self, data: Documents) -> Factory:
        def make(seed: int) -> Parts:
            torch.manual_seed(seed)
            model = new(data)
            model.load_state_dict(weights()[1])
            assert data.validation is not None
            return Parts(
                model=model,
                optimizer=AdamW(model.parameters(), lr=3e-4, weight_decay=0.1),
                loss=loss,
                batches=Epochs(data.train_inputs, self.batch, seed),
                evaluate=functools.partial(self.evaluate, texts=data.test_inputs),
                schedule=self.schedule,
                validate=functools.partial(self.evaluate, texts=data.validation.test_inputs),
            )

        return Factory(
            make=make,
            name=self.name,
            title=self.title,
            model_name=self.model_name,
            epochs=self.epochs,
            higher_is_better=False,
            drops=self.drops,
            shorten=to_longest,
        )

    def evaluate(self, model: nn.Module, texts: Tensor) -> float:
        return -bits_per_word(model, texts)

    def schedule(self, optimizer: Optimizer, steps: int) -> LambdaLR:
        return LambdaLR(optimizer, functools.partial(one_cycle, total=steps))
