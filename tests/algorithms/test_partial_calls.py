"""Calls that leave padding and unlabelled positions out: the same numbers, and the way back to all positions."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchboost.algorithms import sparse_head_forward, unpad_forward
from torchboost.core.torch_private import has_saved_tensor_hooks

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, WORDS = 4, 14, 100
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def decoder(**settings: Any) -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=WORDS, **settings)
    return transformers.LlamaForCausalLM(config).train()


def encoder(kind: str = "BertForMaskedLM", **settings: Any) -> Any:
    config = transformers.BertConfig(**{**SIZES, **NO_DROPOUT, "vocab_size": WORDS, **settings})
    return getattr(transformers, kind)(config).train()


def batch(side: str = "right", *, first_label: bool = False, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 7, 9, LENGTH])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    mask = mask.flip(1) if side == "left" else mask
    ids = torch.randint(5, WORDS, (BATCH, LENGTH), generator=generator) * mask
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=generator) < 0.5), -100)
    if side == "left" and not first_label:
        labels[torch.arange(BATCH), LENGTH - lengths] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([part.flatten() for part in parts]).double()


def assert_same(model: nn.Module, run: Callable[[], Tensor], *attach: Any, warm: bool = True) -> list[Any]:
    """Compare loss and gradients of plain calls with those of calls that leave positions out."""
    plain = run()
    expected = gradients(model, plain)
    with ExitStack() as stack:
        live = [stack.enter_context(one(model)) for one in attach]
        if warm:
            run()  # the first call computes everything
        loss = run()
        found = gradients(model, loss)
        torch.testing.assert_close(loss.detach(), plain.detach(), rtol=1e-5, atol=1e-6)
        assert float((found - expected).norm() / expected.norm()) < 1e-5
    return live


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [decoder, encoder])
def test_loss_and_gradients_are_those_of_the_padded_batch(make: Any, side: str):
    torch.manual_seed(0)
    model, inputs = make(), batch(side)
    for attach in ((unpad_forward,), (sparse_head_forward,), (unpad_forward, sparse_head_forward)):
        live = assert_same(model, lambda: model(**inputs).loss, *attach)
        assert all(one.calls and not one.remark for one in live)


def test_positions_are_really_left_out():
    model, inputs, shapes = decoder(), batch(), []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        shapes.append((output.shape, getattr(output, "rows", output).shape))

    watch = model.model.layers[0].mlp.gate_proj.register_forward_hook(look)
    with unpad_forward(model) as live:
        model(**inputs)
        model(**inputs)
    watch.remove()
    assert live.calls == 1
    assert shapes[0][0] == shapes[1][0] == (BATCH, LENGTH, 64)  # it looks like the padded one
    assert shapes[1][1] == (4 + 7 + 9 + LENGTH, 64)


def test_a_model_that_needs_the_padding_gets_it():
    class Convolving(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mix = nn.Embedding(WORDS, 8), nn.Conv1d(8, 8, 3, padding=1)
            self.out, self.drop = nn.Linear(8, WORDS), nn.Dropout(0.5)

        def forward(self, input_ids, attention_mask, labels):
            hidden = self.drop(self.mix(self.words(input_ids).transpose(1, 2)).transpose(1, 2))
            return F.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten())

    model, inputs = Convolving().train(), batch()
    torch.manual_seed(1)
    plain = model(**inputs)
    with unpad_forward(model) as live:
        model(**inputs)
        torch.manual_seed(1)
        assert torch.equal(model(**inputs), plain)  # repeated from the same state of the random generator
        assert "conv1d" in live.remark
        torch.manual_seed(1)
        assert torch.equal(model(**inputs), plain)
        assert live.calls == 0


def test_pooling_over_padding_is_the_padded_one():
    class Pooling(nn.Module):
        def __init__(self, masked):
            super().__init__()
            self.words, self.out, self.masked = nn.Embedding(WORDS, 8), nn.Linear(8, 3), masked

        def forward(self, input_ids, attention_mask):
            hidden = self.words(input_ids).tanh()
            if self.masked:
                return self.out((hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True))
            return self.out(hidden.mean(1))

    inputs = batch()
    del inputs["labels"]
    for masked in (True, False):
        torch.manual_seed(0)
        model = Pooling(masked).train()
        (live,) = assert_same(model, lambda model=model: model(**inputs).square().sum(), unpad_forward)
        assert bool(live.calls) is masked
        assert ("mean" in live.remark) is not masked


def test_attention_that_sees_padding_is_the_padded_one():
    class Attending(nn.Module):
        def __init__(self, masked):
            super().__init__()
            self.words, self.masked = nn.Embedding(WORDS, 8), masked

        def forward(self, input_ids, attention_mask):
            hidden = self.words(input_ids)[:, None]
            mask = attention_mask[:, None, None, :].bool() if self.masked else None
            return F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)[:, 0, 0]

    inputs = batch()
    del inputs["labels"]
    for masked in (True, False):
        torch.manual_seed(0)
        model = Attending(masked).train()
        (live,) = assert_same(model, lambda model=model: model(**inputs).square().sum(), unpad_forward)
        assert bool(live.calls) is masked
        assert ("attention sees the padding" in live.remark) is not masked


@pytest.mark.parametrize("kind", ["float", "bool", "all ones", "soft", "4-d", "empty row", "none"])
def test_masks_of_every_kind(kind: str):
    torch.manual_seed(0)
    model, inputs = encoder(), batch()
    mask = inputs["attention_mask"]
    changed: dict[str, Any] = {
        "float": mask.float(),
        "bool": mask.bool(),
        "all ones": torch.ones_like(mask),
        "soft": mask * 0.5,
        "4-d": mask[:, None, None, :].bool().expand(BATCH, 1, LENGTH, LENGTH),
        "empty row": mask * torch.tensor([1, 1, 0, 1])[:, None],
        "none": None,
    }
    inputs["attention_mask"] = changed[kind]
    if kind == "empty row":
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    (live,) = assert_same(model, lambda: model(**inputs).loss, unpad_forward)
    assert bool(live.calls) is (kind in ("float", "bool", "soft", "4-d"))  # the ids of padding tell as well


def test_a_batch_without_labels_gives_what_it_gives():
    model, inputs = decoder(), batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    with unpad_forward(model), sparse_head_forward(model):
        model(**inputs)
        loss = model(**inputs).loss
        found = gradients(model, loss)
    assert loss.isnan()
    torch.testing.assert_close(found, gradients(model, model(**inputs).loss), equal_nan=True)


def test_labels_on_padding_count():
    model, inputs = decoder(), batch("left", first_label=True)
    inputs["labels"] = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)
    (live,) = assert_same(model, lambda: model(**inputs).loss, unpad_forward)
    assert live.calls == 0
    assert "padded positions have labels" in live.remark


def test_losses_of_every_kind():
    torch.manual_seed(0)
    model, inputs = decoder(), batch()
    labels, weight = inputs.pop("labels"), torch.rand(WORDS)
    for options in (
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"weight": weight, "label_smoothing": 0.2},
    ):

        def run(options: dict[str, Any] = options) -> Tensor:
            logits = model(**inputs).logits[:, :-1]
            return F.cross_entropy(logits.reshape(-1, WORDS), labels[:, 1:].reshape(-1), **options).sum()

        live = assert_same(model, run, unpad_forward, sparse_head_forward)
        assert [one.remark for one in live] == ["", ""]


def test_what_the_loop_reads_at_tokens_is_there():
    torch.manual_seed(0)
    model, inputs = encoder(), batch()
    plain = model(**inputs, output_hidden_states=True)
    with unpad_forward(model) as live:
        model(**inputs, output_hidden_states=True)
        outputs = model(**inputs, output_hidden_states=True)
        tokens = inputs["attention_mask"].bool()
        for found, expected in zip(outputs.hidden_states, plain.hidden_states, strict=True):
            torch.testing.assert_close(found[tokens], expected[tokens], rtol=1e-4, atol=1e-5)
        hits = (outputs.logits.argmax(-1) == inputs["labels"]) & tokens
        assert int(hits.sum()) == int(((plain.logits.argmax(-1) == inputs["labels"]) & tokens).sum())
        assert live.calls == 1
        assert not live.remark


def test_what_the_loop_reads_at_padding_is_there_too():
    torch.manual_seed(0)
    model, inputs = encoder(hidden_dropout_prob=0.0), batch()
    plain = model(**inputs).logits
    with unpad_forward(model) as live:
        model(**inputs)
        outputs = model(**inputs)
        before = torch.get_rng_state()
        torch.testing.assert_close(torch.cumsum(outputs.logits, 1), torch.cumsum(plain, 1))
        assert torch.equal(torch.get_rng_state(), before)
        assert "outputs are read" in live.remark
        assert type(model(**inputs).logits) is Tensor


def test_a_loop_that_reads_padding_is_seen_at_its_first_call():
    model, inputs = encoder(), batch()
    with unpad_forward(model) as live, sparse_head_forward(model) as head:
        outputs = model(**inputs)
        outputs.logits.mean().backward()
        assert live.remark
        assert head.remark
        assert type(model(**inputs).logits) is Tensor
        assert live.calls == head.calls == 0


def test_reading_after_the_update_is_refused_rather_than_wrong():
    model, inputs = decoder(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sparse_head_forward(model), unpad_forward(model):
        model(**inputs)
        outputs = model(**inputs)
        outputs.loss.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"before optimizer\.step"):
            outputs.logits.sum()


def test_evaluation_and_calls_without_gradients_are_plain():
    model, inputs = decoder(), batch()
    with unpad_forward(model) as live, sparse_head_forward(model):
        model(**inputs)
        with torch.no_grad():
            assert type(model(**inputs).logits) is Tensor
        model.eval()
        assert type(model(**inputs).logits) is Tensor
        assert live.calls == 0


def test_removal_and_copies_are_plain():
    model, inputs = encoder(), batch()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    live = unpad_forward(model)
    assert "forward" not in vars(copy.deepcopy(model))
    assert "forward" not in vars(pickle.loads(pickle.dumps(model)))
    live.remove()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert type(model(**inputs).logits) is Tensor


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, frozen: bool):
    torch.manual_seed(0)
    model, inputs = decoder(), batch()
    if frozen:  # as PEFT leaves a model whose layers are checkpointed
        model.get_input_embeddings().requires_grad_(False)
        model.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its name changes in transformers 6
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    (live,) = assert_same(model, lambda: model(**inputs).loss, unpad_forward)
    assert bool(live.calls) is not reentrant


class Suspended(nn.Module):
    """Saves tensors by hooks of a generator that nothing ends if its part of the forward raises.

    ``torch.utils.checkpoint`` before torch 2.13 does this.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(WORDS, 8), nn.BatchNorm1d(8), nn.Linear(8, WORDS)
        self.saved: list[bool] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        self.saved.append(has_saved_tensor_hooks())
        hidden = self.words(input_ids)

        def hooks() -> Iterator[None]:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                yield

        held = hooks()
        next(held)
        normed = self.norm(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        next(held, None)
        return F.cross_entropy(self.out(normed).flatten(0, 1), labels.flatten())


def test_hooks_of_a_pass_that_is_given_up_do_not_see_the_next_one():
    torch.manual_seed(0)
    model, inputs = Suspended(), batch()
    (live,) = assert_same(model, lambda: model(**inputs), unpad_forward)
    assert not live.calls
    assert not any(model.saved)
    assert not has_saved_tensor_hooks()


def test_the_cache_of_keys_can_be_read():
    torch.manual_seed(0)
    model, inputs = decoder(), batch()
    plain = model(**inputs).past_key_values.layers[1].keys
    with unpad_forward(model):
        model(**inputs)
        found = model(**inputs).past_key_values.layers[1].keys
        assert found.shape == plain.shape
        torch.testing.assert_close(found.flatten(), plain.flatten())


def test_compiled_calls_are_plain():
    torch.manual_seed(0)
    model, inputs = encoder(num_hidden_layers=1), batch()
    plain = model(**inputs).loss
    with unpad_forward(model), sparse_head_forward(model):
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(compiled(**inputs).loss, plain)


def test_autocast_of_the_loop():
    torch.manual_seed(0)
    model, inputs = decoder(), batch()

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**inputs).loss

    expected = gradients(model, run())
    with unpad_forward(model) as live, sparse_head_forward(model):
        run()
        found = gradients(model, run())
    assert live.calls == 1
    assert float((found - expected).norm() / expected.norm()) < 0.02
