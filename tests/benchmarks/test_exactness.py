"""What is left out of a step of a model of transformers changes no gradient: an independent plain step says so."""

import warnings

import pytest

pytest.importorskip("transformers")

import exactness

FAST = ("Llama", "GPT-2", "Mistral", "Gemma 3", "BERT", "DistilBERT", "ModernBERT", "T5", "BART", "Mamba", "LayoutLM")
NEVER = {"Mamba", "RWKV", "FNet"}
"""They mix positions by other means than attention."""


def check(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers about its own arguments
        rows = list(exactness.rows([name]))
    assert rows
    for row in rows:
        assert row.gradient < 1e-5, row
        assert row.left_out or row.reason or row.padding == "none", row
        assert not (name in NEVER and "padding" in row.left_out), row


@pytest.mark.parametrize("name", FAST)
def test_the_gradient_is_that_of_the_plain_step(name: str):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in exactness.CONFIGS if name not in FAST])
def test_the_gradient_is_that_of_the_plain_step_on_all_architectures(name: str):
    check(name)


def test_padding_is_left_out_where_positions_meet_in_attention_only():
    left_out = {row.padding: row.left_out for row in exactness.rows(["Llama"]) if row.task == "LM"}
    assert left_out == {"right": ["padding", "head"], "left": ["padding", "head"], "none": ["head"]}
