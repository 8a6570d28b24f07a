"""Loops over calls that leave positions out: they get the plain numbers, or an error that says why not."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.algorithms.test_partial_calls import BATCH, LENGTH, WORDS, batch, decoder, encoder, gradients
from torchboost import boost
from torchboost.algorithms import sparse_head_forward, unpad_forward

Loop = Callable[[Any, dict[str, Tensor]], Tensor]
"""Takes the model and a batch, returns the loss."""


class Reversal(torch.autograd.Function):
    """Returns its argument as it is, as many do that change the gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -2 * grads[0]


class OwnCrossEntropy(torch.autograd.Function):
    """Has a backward pass of its own, as fused losses have."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows, kept = logits.flatten(0, 1), labels.flatten() != -100
        weights = rows.softmax(-1)
        loss = -weights[kept].gather(1, labels.flatten()[kept][:, None]).log().mean()
        weights[kept, labels.flatten()[kept]] -= 1
        weights[~kept] = 0
        ctx.save_for_backward(weights / kept.sum())
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0] * ctx.saved_tensors[0]).view(BATCH, LENGTH, WORDS), None


def logits_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return model(**{name: value for name, value in inputs.items() if name != "labels"}).logits


def cross_entropy(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


def auxiliary_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    outputs, mask = model(**inputs), inputs["attention_mask"]
    return outputs.loss + 1e-2 * (outputs.logits.logsumexp(-1).square() * mask).sum() / mask.sum()


def auxiliary_loss_on_padding(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    outputs = model(**inputs, output_hidden_states=True)
    return outputs.loss + 1e-2 * sum(hidden.square().mean() for hidden in outputs.hidden_states)


def metric_before_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    logits = logits_of(model, inputs)
    with torch.no_grad():
        int((logits.argmax(-1) == inputs["labels"]).sum())
    return cross_entropy(logits, inputs)


def metric_on_padding_before_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    logits = logits_of(model, inputs)
    with torch.no_grad():
        logits.cumsum(1)
    return cross_entropy(logits, inputs)


def without_gradient_and_used_later(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    outputs = model(**inputs)
    with torch.no_grad():
        logits = outputs.logits.float().view(BATCH, LENGTH, WORDS)
    return outputs.loss + cross_entropy(logits, inputs)


def distillation_from_itself(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    outputs = model(**inputs)
    target = outputs.logits.detach().log_softmax(-1)
    return outputs.loss + F.kl_div(target, outputs.logits.softmax(-1), reduction="none").sum(-1)[:, 0].mean()


def written_to(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    logits = logits_of(model, inputs)
    before, view = logits.softmax(-1), logits.view(-1, WORDS)
    logits[:, :, 3] = -5.0
    view.mul_(2.0)
    return cross_entropy(logits, inputs) + before.square().mean() + view.mean()


def labels_smoothed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    from transformers.trainer_pt_utils import LabelSmoother

    outputs = {"logits": logits_of(model, inputs)}
    return LabelSmoother(epsilon=0.1)(outputs, inputs["labels"])


def a_loss_for_each_sample(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(logits_of(model, inputs).transpose(1, 2), inputs["labels"], reduction="none")
    return (losses.sum(1) / (inputs["labels"] != -100).sum(1)).mean()


def sample_by_sample(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    pairs = zip(logits_of(model, inputs), inputs["labels"], strict=True)
    return torch.stack([F.cross_entropy(logits, labels, reduction="sum") for logits, labels in pairs]).mean()


def two_calls(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    one, two = model(**inputs), model(**batch(seed=5))
    return one.loss + two.loss + F.mse_loss(one.logits[:, :4].softmax(-1), two.logits[:, :4].softmax(-1))


def loaded_and_printed(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    outputs, file = model(**inputs), io.BytesIO()
    assert f"{outputs.logits}".startswith("tensor(")
    assert outputs.logits.detach().numpy().shape == (BATCH, LENGTH, WORDS)
    torch.save(outputs.logits, file)
    file.seek(0)
    assert type(torch.load(file)) is Tensor
    return outputs.loss


def with_parameters_given(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    weights = {name: parameter * 1.01 for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, weights, (), inputs).loss


def inside_a_checkpoint(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return checkpoint(lambda: model(**inputs).loss, use_reentrant=False)


def loss_in_a_checkpoint(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return checkpoint(lambda logits: cross_entropy(logits, inputs), logits_of(model, inputs), use_reentrant=False)


def compiled_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # the compiler reads it
        return torch.compile(cross_entropy, backend="eager")(logits_of(model, inputs), inputs)


def backward_of_logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    outputs = model(**inputs)
    seed = torch.linspace(-1, 1, outputs.logits.numel()).view(outputs.logits.shape)
    outputs.loss.backward(retain_graph=True)
    outputs.logits.backward(seed)
    gradients_so_far = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return torch.stack([(p * g).sum() for p, g in zip(model.parameters(), gradients_so_far, strict=True)]).sum()


def function_of_autograd(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return OwnCrossEntropy.apply(logits_of(model, inputs), inputs["labels"])


def reversed_gradient(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    outputs = model(**inputs)
    return outputs.loss + cross_entropy(Reversal.apply(outputs.logits), inputs)


def loss_in_a_reentrant_checkpoint(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    return checkpoint(lambda logits: cross_entropy(logits, inputs), logits_of(model, inputs), use_reentrant=True)


def hook_on_a_hidden_state(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    outputs = model(**inputs, output_hidden_states=True)
    outputs.hidden_states[-1].register_hook(lambda gradient: 2 * gradient)
    return outputs.loss


def gradient_of_a_hidden_state(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    outputs = model(**inputs, output_hidden_states=True)
    (gradient,) = torch.autograd.grad(outputs.loss, [outputs.hidden_states[-1]], retain_graph=True)
    return outputs.loss * (1 + gradient.square().sum())


ANY_TIME: list[Loop] = [
    auxiliary_loss,
    auxiliary_loss_on_padding,
    metric_before_loss,
    metric_on_padding_before_loss,
    without_gradient_and_used_later,
    distillation_from_itself,
    written_to,
    labels_smoothed,
    a_loss_for_each_sample,
    sample_by_sample,
    two_calls,
    loaded_and_printed,
    with_parameters_given,
    inside_a_checkpoint,
    loss_in_a_checkpoint,
    compiled_loss,
    backward_of_logits,
]
FIRST_ONLY: list[Loop] = [
    function_of_autograd,
    reversed_gradient,
    loss_in_a_reentrant_checkpoint,
    hook_on_a_hidden_state,
    gradient_of_a_hidden_state,
]
LEVERS = [(unpad_forward, sparse_head_forward), (unpad_forward,), (sparse_head_forward,)]


@pytest.mark.parametrize("make", [decoder, encoder])
@pytest.mark.parametrize("loop", [*ANY_TIME, *FIRST_ONLY], ids=lambda loop: loop.__name__)
def test_a_loop_gets_the_plain_numbers_at_its_first_calls(loop: Loop, make: Callable[[], Any]):
    torch.manual_seed(0)
    model, inputs = make(), batch()
    plain = loop(model, inputs)
    expected = gradients(model, plain)
    for levers in LEVERS:
        live = [lever(model) for lever in levers]
        for _ in range(2):
            assert_equal(model, loop(model, inputs), plain, expected)
        for one in live:
            one.remove()


@pytest.mark.parametrize("make", [decoder, encoder])
@pytest.mark.parametrize("loop", [*ANY_TIME, *FIRST_ONLY], ids=lambda loop: loop.__name__)
def test_what_a_loop_does_for_the_first_time_later_is_plain_or_refused(loop: Loop, make: Callable[[], Any]):
    torch.manual_seed(0)
    model, inputs = make(), batch()
    plain = loop(model, inputs)
    expected = gradients(model, plain)
    for levers in LEVERS:
        live = [lever(model) for lever in levers]
        model(**inputs).loss.backward()
        model.zero_grad()
        refusal, loss = "", plain
        try:
            loss = loop(model, inputs)
            found = gradients(model, loss)
        except RuntimeError as error:
            refusal, found = str(error), expected
            model.zero_grad()
        assert not refusal or (loop in FIRST_ONLY and "from the first training call on" in refusal)
        assert_same_numbers(loss, found, plain, expected)
        for one in live:
            one.remove()


def assert_equal(model: nn.Module, loss: Tensor, plain: Tensor, expected: Tensor) -> None:
    assert_same_numbers(loss, gradients(model, loss), plain, expected)


def assert_same_numbers(loss: Tensor, found: Tensor, plain: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(loss.detach(), plain.detach(), rtol=1e-5, atol=1e-5)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_a_call_that_is_repeated_leaves_buffers_as_one_call_does():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mix = nn.Embedding(WORDS, 8), nn.Conv1d(8, 8, 3, padding=1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            self.count += 1
            return self.mix(self.words(input_ids).transpose(1, 2)).square().mean()

    model, inputs = Counting().train(), batch()
    del inputs["labels"]
    live: Any = unpad_forward(model)
    with live:
        for _ in range(3):
            model(**inputs)
        assert "conv1d" in live.remark
    assert int(model.count) == 3


def test_a_checkpoint_of_the_whole_model_computes_everything_twice():
    torch.manual_seed(0)
    model, inputs = encoder(), batch()
    live: Any = unpad_forward(model)
    with live:
        model(**inputs)
        for reentrant in (False, True):
            wanted = torch.ones(1, requires_grad=True)
            loss = checkpoint(lambda one: model(**inputs).loss * one, wanted, use_reentrant=reentrant)
            loss.sum().backward()
        assert live.calls == 0


def test_what_is_read_outside_of_autocast_was_computed_inside():
    torch.manual_seed(0)
    model, inputs = encoder(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(**inputs).logits
    with unpad_forward(model):
        model(**inputs)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs).logits
        whole = torch.cumsum(logits, 1)
    assert logits.dtype is torch.bfloat16
    torch.testing.assert_close(whole, torch.cumsum(plain, 1))


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_losses_that_autocast_raises_are_computed_as_where_they_stand():
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

        def forward(self, input_ids: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.head(self.words(input_ids))
                return F.mse_loss(logits, torch.linspace(0, 1, WORDS).to(logits.dtype), reduction="none")

    torch.manual_seed(0)
    model, inputs = Squares().train(), batch()
    kept = inputs["attention_mask"].bool()
    expected = model(inputs["input_ids"])[kept]
    with sparse_head_forward(model):
        model(inputs["input_ids"])[kept]
        found = model(inputs["input_ids"])[kept]
    assert found.dtype is expected.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_a_run_resumes_with_the_same_numbers_as_it_draws_others_without_padding():
    asked = {"extra": {"unpad": True, "sparse_head": True, "compile": False, "grad_freeze": False}}
    for reading in (-1, 0, 1):
        for verify in (False, True):
            torch.manual_seed(0)
            pairs: list[Any] = []
            for _ in range(2):
                model = encoder(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.1)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
                pairs.append((model, optimizer, boost(model, optimizer, config=asked, calibrate=False, verify=verify)))
            first, second = pairs
            model, optimizer = first[:2]
            resumed, stepped = second[:2]
            train(model, optimizer, range(3), reading)
            file = io.BytesIO()
            torch.save([part.state_dict() for part in first] + [torch.get_rng_state()], file)
            expected = train(model, optimizer, range(3, 6))
            file.seek(0)
            *states, stream = torch.load(file, weights_only=True)
            for part, state in zip(second, states, strict=True):
                part.load_state_dict(state)
            torch.set_rng_state(stream)
            assert train(resumed, stepped, range(3, 6)) == expected
            assert bool(second[2].attached["unpad"].remark) is (reading >= 0)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, reading: int = -1) -> list[float]:
    losses = []
    for step in steps:
        outputs = model(**batch(seed=step))
        if step == reading:
            outputs.logits.mean().item()
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
    return losses


def test_a_state_that_comes_before_its_lever_is_loaded_with_it():
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    boosted = boost(model, optimizer, total_steps=10_000, calibrate=0.5)
    state = boosted.state_dict()
    seen = {"watched": True, "reason": "seen", "refused": {}}
    boosted.load_state_dict({**state, "attached": {"unpad": seen}, "levers": {"unpad": True, "sparse_head": False}})
    assert boosted.attached["unpad"].remark == "seen"
    assert boosted.state_dict()["attached"]["unpad"] == seen


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor is imported
def test_what_does_nothing_in_compiled_code_is_off_next_to_it_as_an_earlier_version_had_both():
    model = encoder()
    boosted = boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3), total_steps=10_000, calibrate=0.5)
    timed = {"kept": True, "reason": "faster", "ratio": {"low": 1.1, "mid": 1.2, "high": 1.3}, "pairs": 8}
    kept = [{"lever": name, **timed} for name in ("unpad", "compile")]
    choice = json.dumps({"verdicts": kept, "source": "trial"})
    boosted.load_state_dict({"attached": {"unpad": {"watched": True}, "compile": {}}, "choice": choice})
    assert list(boosted.attached) == ["compile"]
    row = next(row for row in boosted.levers.explanation().rows if row.name == "unpad")
    assert (row.state, row.did) == ("off", "compile is on, and compiled code takes whole tensors only")
