"""A loop whose middle blocks compute some tokens: the same numbers as by hand, and gone without a trace."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.algorithms.token_drop.nets import (
    LENGTH,
    WIDTH,
    assert_equal,
    computed,
    gpt,
    gradients,
    kept_of,
    loss_of,
    start,
    tokens,
    train,
    watched,
    weights,
)
from tests.support.ranks import run_ranks
from torchboost import IncompatibleError, NoEffectWarning, boost
from torchboost.algorithms import TokenDrop, drop_tokens
from torchboost.core.torch_private import compiled_graphs
from torchboost.registry import LEVELS
from torchboost.tuning.training import looked_at, named_candidates

# Dynamo itself looks at .grad of intermediate tensors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def by_hand(model: Any, ids: Tensor, kept: list[Tensor]) -> Tensor:
    x = model.tokens(ids) + model.positions(torch.arange(ids.shape[1]))
    first, *middle, last = model.blocks
    x = first(x)
    for block, some in zip(middle, kept, strict=True):
        part = block(x[:, some])
        x = torch.stack([part[:, list(some).index(t)] if t in some else x[:, t] for t in range(x.shape[1])], 1)
    return model.head(model.norm(last(x)))


def test_loss_and_gradients_are_those_by_hand():
    model, ids = gpt(5), tokens()
    _, dropping = start(model)
    loss = loss_of(model, ids)
    assert dropping.calls == 3
    found = gradients(model, loss)
    kept = [kept_of(dropping, place) for place in range(3)]
    dropping.remove()
    scores = by_hand(model, ids, kept)[:, :-1].flatten(0, 1)
    wanted = gradients(model, torch.nn.functional.cross_entropy(scores, ids[:, 1:].flatten()))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def test_each_block_draws_its_own_tokens_at_each_update():
    model = gpt(5)
    optimizer, dropping = start(model)
    seen = []
    for step in range(3):
        calls = watched(model.blocks[1:-1], lambda step=step: train(model, optimizer, [step]))
        seen += [tuple(computed(call[1][0], call[3]).tolist()) for call in calls]
    assert len(seen) == 9
    assert len(set(seen)) == 9
    assert all(len(kept) == LENGTH // 2 and (kept[0], kept[-1]) == (0, LENGTH - 1) for kept in seen)
    assert all(list(kept) == sorted(kept) for kept in seen)
    assert dropping.step == 3
    assert dropping.calls == 9


def test_the_draws_are_even():
    _, dropping = start(gpt(), total_steps=2000, stages=1, until=1.0)
    counts = torch.zeros(LENGTH)
    for step in range(2000):
        dropping.load_state_dict({"step": step, "seed": 0, "share": 0.5})
        counts[kept_of(dropping, 0)] += 1
    assert counts[0] == counts[-1] == 2000
    assert float((counts[1:-1] / 2000 - 6 / 14).abs().max()) < 0.05


def test_the_share_grows_in_stages_and_ends_in_the_plain_code():
    model = gpt()
    optimizer, dropping = start(model, total_steps=20, keep=0.25, until=0.5, stages=2)
    shares = []
    for step in range(12):
        shares.append(dropping.share)
        assert all(("forward" in vars(block)) == (dropping.share < 1) for block in model.blocks[1:-1])
        train(model, optimizer, [step])
    assert shares == [0.25] * 5 + [0.625] * 5 + [1.0] * 2
    plain = copy.deepcopy(model)
    assert torch.equal(loss_of(model, tokens(5)), loss_of(plain, tokens(5)))
    assert dropping.calls == 20


def test_settings_of_the_schedule():
    settings = TokenDrop(total_steps=1000)
    shares = [settings.share(step) for step in range(1000)]
    assert shares == sorted(shares)
    assert len(set(shares)) == settings.stages + 1 == settings.graphs()
    assert (shares[0], shares[699], shares[700]) == (0.5, 0.875, 1.0)
    assert TokenDrop(total_steps=1, until=0.1).share(0) == 1.0
    for wrong in ({"keep": 0.0}, {"keep": 1.0}, {"until": 0.0}, {"until": 1.1}, {"stages": 0}, {"total_steps": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TokenDrop(**wrong)
    with pytest.raises(ValueError, match="total_steps"):
        TokenDrop(total_steps=2**60)


def test_a_share_that_rounds_to_all_tokens_is_the_plain_block():
    model, ids = gpt(), tokens()
    plain = gradients(model, loss_of(model, ids))
    _, dropping = start(model, keep=0.99)
    assert_equal(gradients(model, loss_of(model, ids)), plain)
    assert dropping.calls == 0


def test_evaluation_and_calls_without_gradients_are_plain():
    model, ids = gpt(), tokens()
    plain = model(ids).detach()
    _, dropping = start(model)
    with torch.no_grad():
        assert torch.equal(model(ids), plain)
    with torch.inference_mode():
        assert torch.equal(model(ids), plain)
    model.eval()
    assert torch.equal(model(ids), plain)
    assert dropping.calls == 0
    model.train()
    assert not torch.equal(model(ids), plain)


def test_short_sequences_are_plain_and_do_not_count():
    model, ids = gpt(), tokens(length=5)
    plain = model(ids).detach()
    _, dropping = start(model)
    assert torch.equal(model(ids), plain)
    model(tokens())
    assert torch.equal(model(ids), plain)
    assert dropping.calls == 2


def test_removing_leaves_nothing():
    model = gpt()
    before = [set(vars(module)) for module in model.modules()]
    optimizer, dropping = start(model)
    assert model.state_dict().keys() == gpt().state_dict().keys()
    train(model, optimizer, range(2))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all("forward" not in vars(block) for block in copied.blocks)
    dropping.remove()
    assert [set(vars(module)) for module in model.modules()] == before
    assert len(optimizer._optimizer_step_post_hooks) == 0


def test_a_resumed_run_has_the_same_numbers():
    model = gpt()
    optimizer, dropping = start(model, total_steps=12)
    train(model, optimizer, range(5))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), dropping.state_dict()))
    train(model, optimizer, range(5, 12))
    again = gpt(seed=1)
    optimizer, resumed = start(again, total_steps=12, seed=77)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    train(again, optimizer, range(5, 12))
    assert_equal(weights(again), weights(model))
    assert resumed.state_dict() == dropping.state_dict()
    resumed.load_state_dict(saved[2])  # back from the plain code
    assert "forward" in vars(again.blocks[1])
    _, other = start(gpt(), total_steps=12, keep=0.3)
    with pytest.raises(ValueError, match="computed 75 % of the tokens"):
        other.load_state_dict(saved[2])
    assert other.step == 0


def test_a_step_that_only_creates_the_state_is_not_an_update():
    model = gpt()
    optimizer, dropping = start(model)
    get_optimizer_state_dict(model, optimizer)
    assert dropping.step == 0
    train(model, optimizer, [0])
    assert dropping.step == 1


def test_accumulated_gradients_belong_to_one_update():
    model = gpt()
    optimizer, _ = start(model)

    def update() -> None:
        for part in tokens(batch=4).split(2):
            (loss_of(model, part) / 2).backward()
        optimizer.step()

    kept = [computed(call[1][0], call[3]).tolist() for call in watched([model.blocks[1]], update)]
    assert kept[0] == kept[1]


class Masked(nn.Module):
    """Attention by hand, in which a query that sees nothing gets NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.mix(x).chunk(3, -1)
        scores = (query @ key.transpose(1, 2)).masked_fill(~mask[:, None], -float("inf"))
        return x + self.out(scores.softmax(-1) @ value).relu()


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(10, WIDTH), nn.ModuleList([Masked() for _ in range(3)])

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, mask)
        return x[mask].square().mean()


def test_a_sequence_between_padding_keeps_a_token():
    torch.manual_seed(0)
    model, ids = Padded(), torch.randint(0, 10, (2, LENGTH))
    _, dropping = start(model)
    for place in range(1, LENGTH - 1):  # some of these tokens are not drawn
        mask = torch.ones(2, LENGTH, dtype=torch.bool)
        mask[1] = torch.arange(LENGTH) == place
        assert all(bool(grad.isfinite().all()) for grad in gradients(model, model(ids, mask)).values())
    assert dropping.calls


class Checkpointed(nn.Module):
    """The blocks of a GPT run under checkpoints of several blocks each."""

    def __init__(self, *, several: int, reentrant: bool = False) -> None:
        super().__init__()
        self.net, self.several, self.reentrant = gpt(5), several, reentrant

    def forward(self, ids: Tensor) -> Tensor:
        net = self.net
        x = net.tokens(ids) + net.positions(torch.arange(ids.shape[1]))
        for at in range(0, len(net.blocks), self.several):
            some: Any = net.blocks[at : at + self.several]
            x = checkpoint(some, x, use_reentrant=self.reentrant)
        return net.head(net.norm(x))


@pytest.mark.parametrize("several", [1, 2, 5])
def test_checkpointing_computes_the_same_tokens_again(several: int):
    plain, model = gpt(5), Checkpointed(several=several)
    _, one = start(plain)
    _, other = start(model)
    for number in range(2):  # two passes wait for their backward pass
        losses = [loss_of(net, tokens(2 * number)) + loss_of(net, tokens(2 * number + 1)) for net in (plain, model)]
        wanted, found = (gradients(net, loss) for net, loss in zip((plain, model), losses, strict=True))
        assert_equal({name.removeprefix("net."): value for name, value in found.items()}, wanted)
    assert one.calls == other.calls == 12


def test_a_whole_model_in_a_checkpoint():
    model, ids = gpt(5), tokens()
    start(model)
    wanted = gradients(model, loss_of(model, ids))
    scores: Any = checkpoint(model, ids, use_reentrant=False)
    loss = torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_equal(gradients(model, loss), wanted)


def test_reentrant_checkpointing_is_refused():
    """Its forward pass has no gradients, so it would compute all tokens, and its backward pass others."""
    model = Checkpointed(several=1, reentrant=True)
    start(model)
    x = loss_of(model, tokens())
    with pytest.raises(IncompatibleError, match="use_reentrant=False"):
        x.backward()


def test_an_update_inside_of_a_backward_pass_changes_no_tokens_of_this_pass():
    model, wanted = Checkpointed(several=1), Checkpointed(several=1)
    _, plain = start(wanted)
    optimizer, dropping = start(model)
    expected = gradients(wanted, loss_of(wanted, tokens()))
    norm = model.net.norm.weight
    norm.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # an early one
    saved = norm.detach().clone()
    loss_of(model, tokens()).backward()
    assert not torch.equal(norm, saved)
    assert dropping.step == 0
    name = "net.blocks.1.qkv.weight"
    torch.testing.assert_close(dict(model.named_parameters())[name].grad, expected[name])
    loss_of(model, tokens())
    assert dropping.step == 1
    assert plain.step == 0


@pytest.mark.parametrize("when", ["before", "after", "blocks"])
def test_a_compiled_model_trains_the_same(when: str):
    eager, model = gpt(), gpt()
    optimizer, _ = start(eager, total_steps=10, stages=2)
    train(eager, optimizer, range(10))
    torch.compiler.reset()
    graphs = compiled_graphs()
    if when == "before":
        model.compile(backend="aot_eager")
    optimizer, dropping = start(model, total_steps=10, stages=2)
    if when == "after":
        model.compile(backend="aot_eager")
    elif when == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    train(model, optimizer, range(10))
    assert dropping.calls == 14
    assert compiled_graphs() > graphs
    for name, value in weights(eager).items():
        torch.testing.assert_close(weights(model)[name], value, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


def test_a_model_that_must_be_one_graph_says_that_it_is_not():
    torch.compiler.reset()
    model = gpt()
    start(model)
    model.compile(backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="disable"):
        model(tokens())
    torch.compiler.reset()


def _on_a_rank() -> tuple[list[list[int]], dict[str, Tensor]]:
    model: Any = gpt()
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    settings = TokenDrop(total_steps=40)
    drop_tokens(wrapped, optimizer, settings, rank=rank)
    calls = watched([model.blocks[1]], lambda: [_step(wrapped, optimizer, 2 * step + rank) for step in range(3)])
    return [computed(call[1][0], call[3]).tolist() for call in calls], weights(model)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    loss_of(model, tokens(seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.dist
def test_each_rank_has_its_own_tokens_and_all_have_the_same_weights():
    (kept, first), (others, second) = run_ranks(_on_a_rank, 2)
    assert_equal(first, second)
    assert all(one != other for one, other in zip(kept, others, strict=True))


def test_autocast():
    model, ids = gpt(), tokens()
    _, dropping = start(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, ids)
    found = gradients(model, loss)
    assert dropping.calls == 2
    wanted = gradients(model, loss_of(model, ids))
    for name, value in wanted.items():
        assert float((found[name] - value).norm() / value.norm().clamp(min=1e-3)) < 0.1, name


class Post(nn.Module):
    """A block that returns bfloat16 for float32."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.attention(x, x, x)[0])


def test_skipped_tokens_have_the_precision_of_computed_ones():
    model = nn.Sequential(*(Post() for _ in range(3)))
    start(model)
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model[0](x)
        assert model[1](x).dtype == torch.bfloat16
        assert model(x).dtype == torch.bfloat16


def test_a_loop_that_calls_no_block_is_told():
    model = gpt()
    optimizer, _ = start(model)
    model.head(torch.randn(2, WIDTH)).sum().backward()
    with pytest.warns(NoEffectWarning, match="no block of the middle was called"):
        optimizer.step()
    optimizer.step()  # once


class Windowed(nn.Module):
    """A block whose attention sees the last twenty tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-20)
        return x + self.out(self.attention(x, x, x, attn_mask=~mask, need_weights=False)[0])


def test_what_is_not_shown_is_refused_at_the_first_call_and_left_out_later():
    model = nn.Sequential(*(Windowed() for _ in range(3)))
    short, long = torch.randn(2, 12, WIDTH), torch.randn(2, 40, WIDTH)
    optimizer, dropping = start(model)
    with pytest.raises(IncompatibleError, match="of its tokens, as with positions"):
        model(long)
    dropping.remove()
    optimizer, dropping = start(model)
    model(short).square().mean().backward()  # shorter than a window
    optimizer.step()
    assert dropping.calls == 1
    with pytest.warns(NoEffectWarning, match="compute all tokens"):
        found = model(long)
    assert "order of its tokens" in dropping.remark
    assert dropping.calls == 1
    dropping.remove()
    assert torch.equal(found, model(long))


@pytest.mark.parametrize("place", range(1, 3))
def test_each_block_is_looked_at(place: int):
    """Networks that alternate windows with full attention have equal blocks."""

    class Block(Windowed):
        window = 100

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-self.window)
            return x + self.out(self.attention(x, x, x, attn_mask=~mask, need_weights=False)[0])

    model = nn.Sequential(*(Block() for _ in range(4)))
    model.get_submodule(str(place)).window = 4  # pyright: ignore
    start(model)
    with pytest.raises(IncompatibleError, match="order of its tokens"):
        model(torch.randn(2, LENGTH, WIDTH))


def test_targets_that_are_refused():
    settings, model = TokenDrop(total_steps=10), gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(IncompatibleError, match="DataParallel"):
        drop_tokens(DataParallel(model), optimizer, settings)
    with pytest.raises(ValueError, match="total_steps: found none"):
        drop_tokens(model, optimizer, TokenDrop())
    with pytest.warns(NoEffectWarning, match="no list of 3 or more equal blocks"):
        drop_tokens(nn.Sequential(model.head), optimizer, settings)


def _no_stack() -> list[tuple[nn.Module, str]]:
    convolutions = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(2, 2)) for _ in range(4)))
    recurrent = nn.ModuleList(nn.Sequential(nn.GRU(2, 2), nn.Linear(2, 2)) for _ in range(4))
    unequal = nn.Sequential(*(nn.Sequential(nn.Linear(2, n), nn.Linear(n, 2)) for n in (2, 3, 4)))
    same = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shared = nn.ModuleList([same] * 4)
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    none = "no list of 3 or more"
    two = nn.ModuleList([gpt(), gpt()])
    cases = [(model, none) for model in (convolutions, recurrent, unequal, shared, layers, gpt(2))]
    return [*cases, (two, "2 lists of equal blocks")]


@pytest.mark.parametrize(("model", "match"), _no_stack())
def test_models_without_one_list_of_equal_blocks_are_idle(model: nn.Module, match: str):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert match in str(TokenDrop(total_steps=10).idle(model, optimizer))


def test_the_outermost_list_counts():
    """Experts in a block are a list of equal parts, too."""

    class Mixture(Post):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + sum(expert(x) for expert in self.experts)

    model = nn.Sequential(*(Mixture() for _ in range(3)))
    optimizer, dropping = start(model)
    assert TokenDrop(total_steps=10).idle(model, optimizer) is None
    model(torch.randn(2, LENGTH, WIDTH))
    assert dropping.calls == 1
    assert "total_steps" in str(TokenDrop().idle(model, optimizer))


def test_boost_with_the_length_of_the_run():
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    boosted = boost(model, optimizer, level="O0", config={"extra": {"token_drop": {}}}, total_steps=40)
    assert boosted.plan.algorithms == (TokenDrop(total_steps=40),)
    train(boosted.model, boosted.optimizer, range(2))
    assert boosted.attached["token_drop"].figures() == {"tokens": 0.5}
    alone = gpt()
    optimizer, _ = start(alone)
    train(alone, optimizer, range(2))
    assert_equal(weights(alone), weights(model))
    for level, row in LEVELS.items():
        assert "token_drop" not in row, level
    other = gpt()
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.warns(NoEffectWarning, match="token_drop, which must know the length of the run"):
        without = boost(other, sgd, level="O0", config={"extra": {"token_drop": {}}})
    assert "pass total_steps" in dict(without.plan.dropped)["token_drop"]


def test_tune_tries_it_on_transformers():
    def make(build: Any) -> Any:
        model = build()
        return lambda seed: (model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, [], None)

    candidates = named_candidates({"token_drop": {"token_drop": {}}})
    (finding,) = looked_at(candidates, make(gpt), 100)
    assert finding.outcome is None
    (finding,) = looked_at(candidates, make(lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(4, 4))), 100)
    assert finding.outcome == "not usable"
    assert "no list of 3 or more equal blocks" in finding.reason
