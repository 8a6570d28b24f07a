"""The first look at pruned data: what is left out, what the rest counts, and that it ends with all samples."""

from __future__ import annotations

import importlib

import pytest
import torch

prune_data = importlib.import_module("prune_data")


@pytest.mark.parametrize("prunes", [True, False])
def test_half_of_the_well_learned_samples_are_left_out_and_the_rest_counts_twice(prunes: bool):
    samples = prune_data.Samples(1_000, 10, 400, torch.Generator().manual_seed(0), prunes)
    learned = torch.arange(1_000) < 600
    seen, weight = [], []
    for picked, weights in samples:
        samples.losses[picked] = torch.where(learned[picked], 0.1, 2.0)
        seen.append(picked)
        weight.append(weights)
    assert len(seen) == 400
    late = slice(100, 170)  # an epoch of 700 samples, after the first one of 1,000
    chosen, counts = torch.cat(seen[late]), torch.cat(weight[late])
    if prunes:
        assert counts[learned[chosen]].unique().tolist() == [2.0]
        assert counts[~learned[chosen]].unique().tolist() == [1.0]
        assert float(counts.sum()) == pytest.approx(1_000, rel=0.06)  # the expected gradient is that of all samples
    else:
        assert torch.cat(weight).unique().tolist() == [1.0]
    end = torch.cat(seen[-30:])
    assert len(end.unique()) == len(end)
    assert torch.cat(weight[-30:]).unique().tolist() == [1.0]
