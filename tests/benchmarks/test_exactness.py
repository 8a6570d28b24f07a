"""What is left out of a step of a model of transformers changes no gradient: an independent plain step says so."""

import warnings

import pytest

pytest.importorskip("transformers")

import exactness
import torch

FAST = ("GPT-2", "Mistral", "BERT", "ModernBERT", "T5", "Mamba")
NEVER = {"Mamba", "RWKV", "FNet"}
"""They mix positions by other means than attention."""


def check(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers about its own arguments
        rows = list(exactness.rows([name], exactness.Place(torch.device("cpu"))))
    assert rows
    for row in rows:
        assert row.gradient < 1e-5, row
        assert row.left_out or row.reason or row.padding == "none", row
        assert not (name in NEVER and "padding" in row.left_out), row
        if name in ("Llama", "Mistral") and row.task == "LM":
            assert row.left_out == (["head"] if row.padding == "none" else ["padding", "head"]), row


@pytest.mark.parametrize("name", FAST)
def test_the_gradient_is_that_of_the_plain_step(name: str):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in exactness.CONFIGS if name not in FAST])
def test_the_gradient_is_that_of_the_plain_step_on_all_architectures(name: str):
    check(name)
