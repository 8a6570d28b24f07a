"""What is left out of padded batches, on the device: the gradient of the CPU, and as many waits in any depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.pretend_device.waits import Waits
from torchboost.algorithms import sparse_head_forward, unpad_forward

transformers = pytest.importorskip("transformers")
LENGTHS = torch.tensor([4, 9, 6, 12])


def batch(device: str, words: int = 50) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(12) < LENGTHS[:, None]).long()
    ids = torch.randint(1, words, mask.shape, generator=generator) * mask
    labels = ids.masked_fill((mask == 0) | (torch.arange(12) < 3), -100)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


def network(layers: int, device: str) -> Any:
    torch.manual_seed(0)
    body = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(**body, num_hidden_layers=layers, pad_token_id=0)
    with torch.device("cpu"):  # torch 2.9 has no default device after the tests of one
        return transformers.LlamaForCausalLM(config).to(device)


def gradient(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    model(**inputs).loss.backward()
    found = torch.cat([parameter.grad.flatten().cpu() for parameter in model.parameters()])
    model.zero_grad()
    return found


def test_the_gradient_is_that_of_the_cpu():
    wanted = gradient(network(2, "cpu"), batch("cpu"))
    model, inputs = network(2, "cuda"), batch("cuda")
    with unpad_forward(model) as padding, sparse_head_forward(model) as head:
        gradient(model, inputs)  # the first call computes everything
        found = gradient(model, inputs)
    assert padding.calls
    assert head.calls
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_a_deeper_model_does_not_wait_more_often():
    seen = []
    for layers in (1, 3):
        model, inputs = network(layers, "cuda"), batch("cuda")
        with unpad_forward(model), sparse_head_forward(model), Waits() as waits:
            for _ in range(2):
                model(**inputs).loss.backward()
            waits.seen.clear()
            model(**inputs).loss.backward()
        seen.append(waits.total)
    assert seen[0] == seen[1]
