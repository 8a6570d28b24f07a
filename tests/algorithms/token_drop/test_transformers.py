"""Models of transformers: blocks compute for the tokens that are left what they compute with all others masked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.algorithms.token_drop.nets import assert_equal, computed, gradients, start, watched
from torchboost import IncompatibleError, NoEffectWarning
from torchboost.algorithms import sparse_head_forward, unpad_forward

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, WORDS = 4, 14, 100
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama(**settings: Any) -> Any:
    config = transformers.LlamaConfig(
        **{**SIZES, "num_key_value_heads": 2, "vocab_size": WORDS, "use_cache": False, **settings}
    )
    return _sharp(transformers.LlamaForCausalLM(config))


def gpt2(**settings: Any) -> Any:
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": WORDS, "use_cache": False, **settings}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return _sharp(transformers.GPT2LMHeadModel(config))


def bert(**settings: Any) -> Any:
    config = transformers.BertConfig(**{**SIZES, **NO_DROPOUT, "vocab_size": WORDS, **settings})
    return _sharp(transformers.BertForMaskedLM(config))


def _sharp(model: nn.Module) -> nn.Module:
    """Make attention depend on masks and positions. New models hardly do."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model.train()


def blocks_of(model: Any) -> Any:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 4]
    assert len(lists) == 1
    return lists[0]


def batch(side: str = "right", seed: int = 0, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 7, 9, length])
    mask = (torch.arange(length) < lengths[:, None]).long()
    mask = mask.flip(1) if side == "left" else torch.ones_like(mask) if side == "none" else mask
    ids = torch.randint(5, WORDS, (BATCH, length), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def alone(mask: Tensor | None, kept: Tensor, causal: bool, additive: bool, length: int = LENGTH) -> Tensor:
    """Return a mask in which queries see those keys only that are kept, in the form of ``mask``."""
    if mask is None:
        mask = torch.ones(1, 1, length, length, dtype=torch.bool)
        mask = mask.tril() if causal else mask
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if additive else mask
    mask = mask.expand(-1, -1, length, -1).clone()
    gone = torch.ones(length, dtype=torch.bool)
    gone[kept] = False
    mask[..., gone] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return mask


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left", "none"])
@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_blocks_compute_what_they_compute_with_the_other_tokens_masked(
    make: Callable[..., Any], side: str, attention: str
):
    torch.manual_seed(0)
    model, inputs = make(attn_implementation=attention), batch(side)
    _, dropping = start(model)
    blocks = blocks_of(model)
    calls = watched(blocks, lambda: model(**inputs))
    assert dropping.calls == 2
    dropping.remove()
    for place, (block, args, kwargs, output) in enumerate(calls):
        hidden, *others = args
        kept = computed(hidden, output)
        if place in (0, 3):
            assert len(kept) == LENGTH
            continue
        assert len(kept) == LENGTH // 2
        at = next((at for at, one in enumerate(others) if isinstance(one, Tensor)), 0)
        if "attention_mask" in kwargs:
            kwargs = {
                **kwargs,
                "attention_mask": alone(kwargs["attention_mask"], kept, make is not bert, attention == "eager"),
            }
        else:  # the masks of BERT and GPT-2 are positional
            at = 0 if make is bert else 1
            others[at] = alone(others[at], kept, make is not bert, attention == "eager")
        wanted = block(hidden, *others, **kwargs)
        seen = inputs["attention_mask"][:, kept].bool()  # what padding computes is not read
        torch.testing.assert_close(output[:, kept][seen], wanted[:, kept][seen], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_lengths_equal_to_other_sizes(make: Callable[..., Any]):
    """Of four sequences with eight tokens, and heads of eight features; and as many sequences as tokens."""
    torch.manual_seed(0)
    for size in (4, 8):
        model = make()
        _, dropping = start(model)
        ids = torch.randint(5, WORDS, (size, 8))
        mask = torch.ones(size, 8).long()
        mask[0, 5:] = 0
        for each in (None, mask):
            calls = watched(blocks_of(model), partial(model, input_ids=ids, attention_mask=each))
            assert [len(computed(call[1][0], call[3])) for call in calls] == [8, 4, 4, 8]
        assert dropping.calls == 4
        dropping.remove()


def test_positions_of_packed_sequences():
    model = llama()
    _, dropping = start(model)
    ids = torch.randint(5, WORDS, (1, LENGTH))
    places = torch.cat([torch.arange(6), torch.arange(LENGTH - 6)])[None]
    loss = model(input_ids=ids, position_ids=places, labels=ids).loss
    loss.backward()
    assert dropping.calls == 2


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_checkpointing_of_layers(make: Callable[..., Any], reentrant: bool):
    torch.manual_seed(0)
    model, inputs = make(), batch()
    _, dropping = start(model)
    wanted = gradients(model, model(**inputs).loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_equal(gradients(model, model(**inputs).loss), wanted)
    assert dropping.calls == 4


def test_a_cache_is_refused_with_a_word_on_what_to_do():
    model = llama(use_cache=True)
    start(model)
    with pytest.raises(IncompatibleError, match="use_cache=False"):
        model(**batch())
    model.eval()
    model.generate(batch("left")["input_ids"], max_new_tokens=3, do_sample=False)


def test_generation_is_not_changed():
    model = gpt2()
    ids = batch("none")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.train()
    start(model)
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0), wanted)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_in_windows_is_refused(attention: str):
    config = transformers.MistralConfig(
        **SIZES, num_key_value_heads=2, vocab_size=WORDS, sliding_window=4, attn_implementation=attention
    )
    model = transformers.MistralForCausalLM(config).train()
    start(model)
    with pytest.raises(IncompatibleError, match="in windows"):
        model(**batch("none"), use_cache=False)


def test_what_is_read_inside_of_blocks_is_refused():
    """The hooks of transformers that read attention and states of blocks stay once an output has been asked for."""
    model, inputs = llama(attn_implementation="eager"), batch()
    optimizer, dropping = start(model)
    for wanted in ("output_attentions", "output_hidden_states"):
        with pytest.raises(IncompatibleError, match="reads what is inside of a block"):
            model(**inputs, **{wanted: True})
    dropping.remove()
    model = llama(attn_implementation="eager")
    optimizer, dropping = start(model)
    model(**inputs).loss.backward()
    optimizer.step()
    with pytest.warns(NoEffectWarning, match="reads what is inside of a block"):
        outputs = model(**inputs, output_attentions=True, output_hidden_states=True)
    assert [each.shape for each in outputs.attentions] == [(BATCH, 4, LENGTH, LENGTH)] * 4
    assert [state.shape for state in outputs.hidden_states] == [(BATCH, LENGTH, 32)] * 5


def test_routers_with_a_loss_of_their_own():
    """It is a mean over the tokens of all layers, under a mask of padding that has all tokens."""
    sizes = {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": WORDS, "use_cache": False}
    for with_loss in (True, False):
        config = transformers.MixtralConfig(**sizes, output_router_logits=with_loss, sliding_window=None)
        model = transformers.MixtralForCausalLM(config).train()
        _, dropping = start(model)
        if with_loss:
            with pytest.raises(IncompatibleError, match="reads what is inside of a block"):
                model(**batch())
        else:
            model(**batch()).loss.backward()
            assert dropping.calls == 2


@pytest.mark.parametrize("make", [llama, bert])
def test_padding_is_computed_where_tokens_are_dropped(make: Callable[..., Any]):
    """Both leave out rows of the same blocks, so unpad says that it does not."""
    torch.manual_seed(0)
    model, inputs = make(), batch()
    _, dropping = start(model)
    wanted = gradients(model, model(**inputs).loss)
    for first in (True, False):
        if first:
            live = unpad_forward(model)
        else:
            dropping.remove()
            live = unpad_forward(model)
            _, dropping = start(model)
        for _ in range(3):
            found = gradients(model, model(**inputs).loss)
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        assert "token_drop" in live.remark
        live.remove()


@pytest.mark.parametrize("make", [llama, bert])
def test_a_head_of_labelled_positions_and_dropped_tokens(make: Callable[..., Any]):
    torch.manual_seed(0)
    model, inputs = make(), batch()
    _, dropping = start(model)
    wanted = gradients(model, model(**inputs).loss)
    with sparse_head_forward(model) as live:
        for _ in range(3):
            found = gradients(model, model(**inputs).loss)
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        assert live.calls
        assert not live.remark
    assert dropping.calls == 8
