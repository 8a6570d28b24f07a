"""Every network of the zoo trains."""

from __future__ import annotations

import importlib

import pytest
import torch

zoo_networks = importlib.import_module("zoo_networks")


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo_networks.ZOO)
def test_a_step_changes_the_weights_and_is_the_same_each_time(name: str):
    network = zoo_networks.ZOO[name]
    if network.missing():
        pytest.skip(f"needs {network.needs}")

    def losses() -> list[float]:
        model, optimizer, batches, loss = network.training()
        found = []
        for batch in batches[:2] + batches[:1]:
            optimizer.zero_grad()
            value = loss(model(*batch.args, **batch.kwargs), batch)
            value.backward()
            optimizer.step()
            found.append(float(value.detach()))
        return found

    first = losses()
    assert first == pytest.approx(losses(), rel=1e-4)
    assert all(map(torch.isfinite, torch.tensor(first)))
    assert first[0] != first[2]


def test_there_are_at_least_twelve_networks_of_different_titles():
    assert len({network.title for network in zoo_networks.ZOO.values()}) == len(zoo_networks.ZOO) >= 14
