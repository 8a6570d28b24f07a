"""Claim: Muon ends better if it orthogonalises each of several matrices in one parameter; what NorMuon adds to that.

A GRU and a GPT on text by characters: the gates of the one and the fused projections of the other are one parameter.
As in ``fewer_steps.py``, each optimizer gets five learning rates on validation data, with up to two more beyond the
best if that is the lowest or the highest, then seeds of their own at the chosen rate on test data, all with the same
number of steps. The other weights have AdamW's best rate. NorMuon is written here: the package does not have it. Each
run is saved when it ends; with ``--resume`` they are kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from fewer_steps import ADAM_RATES, Runs, Way, adamw
from fewer_steps_workloads import Workload, gpt_characters, in_order, windows
from options import Options, run_each
from saved_runs import results
from torch import Tensor, nn

from torchboost.bench.report.table import Table
from torchboost.optim import Batch, MixedOptimizer, Muon, UpdateRule, muon_groups
from torchboost.optim.rules.muon import QUINTIC, orthogonalized
from torchboost.workloads.data import text
from torchboost.workloads.models import GPT

SEEDS = 3
CONTEXT, BATCH = 64, 16
MUON_RATES = (0.01, 0.02, 0.04, 0.08, 0.16)


class Recurrent(nn.Module):
    """A language model: a table of characters, two GRU layers, a linear layer."""

    def __init__(self, characters: int, width: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(characters, width)
        self.layers = nn.GRU(width, hidden, 2, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.table(tokens))[0])


class NorMuon(Muon):
    """Muon whose rows are divided by the root of their mean square over the steps, at an unchanged norm.

    Source: Z. Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv 2510.05491, with the norm of Muon's
    update instead of a fixed one. Matrices whose rows are the outputs, split into equal parts or not.
    """

    decay, eps = 0.95, 1e-8

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer", "rows")

    def init_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(param), "rows": param.new_zeros(group["split"], 1, 1)}

    def update(self, group: dict[str, Any], batch: Batch) -> None:
        for param, grad, state in zip(batch.params, batch.grads, batch.states, strict=True):
            buffer = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
            matrices = grad.lerp(buffer, group["momentum"]).unflatten(0, (group["split"], -1))
            update = orthogonalized(matrices, [QUINTIC] * 5)
            square = update.square().mean(-1, keepdim=True)
            state["rows"] = state["rows"].expand_as(square).lerp(square, 1 - self.decay)
            normed = update / (state["rows"].sqrt() + self.eps)
            normed *= update.norm(dim=(-2, -1), keepdim=True) / normed.norm(dim=(-2, -1), keepdim=True)
            scale = max(1.0, matrices.shape[-2] / matrices.shape[-1]) ** 0.5
            param.mul_(1 - group["lr"] * group["weight_decay"]).add_(normed.flatten(0, 1), alpha=-group["lr"] * scale)


class MixedNorMuon(MixedOptimizer):
    """NorMuon for the groups of Muon."""

    kept = (*MixedOptimizer.kept, "_rows_rule")

    def __init__(self, groups: Any) -> None:
        self._rows_rule = NorMuon([{"params": []}])
        super().__init__(groups)

    def rule_for(self, group: Mapping[str, Any]) -> UpdateRule:
        return self._rows_rule if group.get("rule") == "muon" else super().rule_for(group)


def muon(build: Callable[[Any], MixedOptimizer], *, split: bool) -> Way:
    """Return Muon as in ``fewer_steps.py``, with matrices split or whole."""

    def made(model: nn.Module, work: Workload, rate: float, sample: Any) -> MixedOptimizer:
        own = {"lr": rate, "momentum": 0.9, "weight_decay": 0.01, "ns_dtype": torch.float32}
        rest = {"lr": work.rest_rate, "betas": (0.9, 0.95), "weight_decay": work.weight_decay}
        return build(muon_groups(model, muon=own, adamw=rest, sample=sample, split=split))

    return Way(made, MUON_RATES)


WAYS = {
    "AdamW": Way(adamw, ADAM_RATES),
    "Muon, whole": muon(MixedOptimizer, split=False),
    "Muon, split": muon(MixedOptimizer, split=True),
    "NorMuon, split": muon(MixedNorMuon, split=True),
}


def characters(options: Options, name: str, title: str, build: Callable[[int], nn.Module]) -> Workload:
    data = text(options.text, context=CONTEXT)
    border = len(data.train_tokens) * 19 // 20
    training = data.train_tokens[:border]
    held = {"validation": data.train_tokens[border:], "test": data.test_tokens}
    return replace(
        gpt_characters(options),
        name=name,
        title=title,
        build=lambda: build(len(data.characters)),
        stream=lambda seed: windows(training, CONTEXT, BATCH, seed),
        splits={part: in_order(tokens, CONTEXT, 64, 512) for part, tokens in held.items()},
        steps=8 if options.smoke else 300,
        batch=BATCH,
    )


def gru(options: Options) -> Workload:
    return characters(options, "gru", "GRU on English text by characters, 2 layers, width 128", Recurrent)


def gpt(options: Options) -> Workload:
    title = "GPT on English text by characters, 2 layers, width 96"
    return characters(options, "gpt", title, lambda n: GPT(n, context=CONTEXT, layers=2, heads=4, width=96))


WORKLOADS = {"gru": gru, "gpt": gpt}


def measure(name: str, options: Options) -> Path:
    work = WORKLOADS[name](options)
    runs = Runs(work, options.file("muon_split", name), WAYS, resume=options.resume)
    of_adamw = runs.best("AdamW")
    rates: dict[str, dict[str, float]] = {}
    for way in WAYS:
        fixed = {} if way == "AdamW" else {"rest_rate": of_adamw}
        rates[way] = {"rate": runs.best(way, **fixed), **fixed}
        runs.choose(way, rates[way])
    for seed in range(1 if options.smoke else SEEDS):
        for way, chosen in rates.items():
            runs.run(way=way, seed=seed, steps=work.steps, split="test", **chosen)
    return runs.file


def table(folder: Path) -> tuple[Table, str]:
    """Return the final loss of each optimizer at its best rate, and a sentence about the runs."""
    found, lines = list(results(folder, "muon_split", WORKLOADS).values()), []
    for result in found:
        cells = []
        for way in WAYS:
            chosen = result["chosen"][way]["rate"]
            own = [one for one in result["runs"] if (one["way"], one["rate"], one["split"]) == (way, chosen, "test")]
            losses = [one["loss"] for one in own]
            cells.append(f"{statistics.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f}) at {chosen:g}")
        lines.append((f"{result['title']}, {result['steps']} steps", *cells))
    about = found[0]["environment"]
    said = (
        f"The loss on test data: the mean of {SEEDS} seeds, with the smallest and the largest, at the best rate on "
        f"validation data. {about['processor']}, torch {about['torch']}. All runs: "
        "`benchmarks/results/muon_split-*.json`."
    )
    return Table(headings=("workload", *WAYS), rows=tuple(lines)), said


if __name__ == "__main__":
    run_each(__doc__, "workload", WORKLOADS, measure)
