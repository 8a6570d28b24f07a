"""The record of nanoGPT's run: its data, its schedule, and what it needs, with a small stand-in for nanoGPT's model."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import torch

record = importlib.import_module("record_nanogpt")

MODEL = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scores = nn.Embedding(config.vocab_size, config.vocab_size)
        nn.init.zeros_(self.scores.weight)

    def forward(self, idx, targets=None):
        scores = self.scores(idx)
        return scores, F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
"""


@pytest.fixture
def job(tmp_path: Path):
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    text = tmp_path / "input.txt"
    text.write_text("abcd" * 1_000, encoding="utf-8")
    return record.loaded(tmp_path, text, smoke=True)


def test_the_run_is_made_of_the_models_own_code(job):
    parts = job.factory().build(0)
    assert parts.optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    inputs, targets = next(iter(parts.batches))
    assert inputs["idx"].shape == targets.shape == (record.BATCH, record.CONTEXT)
    assert torch.equal(inputs["idx"][:, 1:], targets[:, :-1])
    again = next(iter(job.factory().build(0).batches))[1]
    other = next(iter(job.factory().build(1).batches))[1]
    assert torch.equal(again, targets)
    assert not torch.equal(other, targets)
    assert parts.evaluate(parts.model) == pytest.approx(-math.log(4), rel=1e-5)


def test_the_schedule_is_that_of_the_run_at_every_length():
    for steps in (2_000, 500):
        rates = [record.share_of_rate(step, steps) for step in range(steps + 1)]
        assert max(rates) == rates[steps // 20] == pytest.approx(1.0)
        assert rates[-1] == pytest.approx(record.LEAST)


def test_what_is_missing_is_named(job, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="folder of a checkout of nanoGPT"):
        record.loaded(tmp_path / "absent", tmp_path / "input.txt", smoke=True)
    with pytest.raises(FileNotFoundError, match=r"input\.txt of tiny Shakespeare"):
        record.loaded(tmp_path, None, smoke=True)
