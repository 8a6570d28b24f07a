import torch
import transformers
from torch import nn

from torchboost import WithLoss
from torchboost.graph.blocks import blocks_of, group_starts
from torchboost.workloads.models import GPT, VGG, Bottleneck, ResNet


def names(model: nn.Module) -> list[str]:
    """The name of the first module of each block."""
    named = {module: name for name, module in model.named_modules()}
    return [named[block.modules[0]] for block in blocks_of(model)]


def resnet(block=Bottleneck) -> ResNet:
    return ResNet(block, [2, 1], width=4)


def test_a_residual_network_is_cut_at_its_residual_blocks():
    assert names(resnet()) == ["stem.0", "stages.0.0", "stages.0.1", "stages.1.0", "fc"]


def test_a_plain_stack_is_cut_at_its_layers_and_norms_join_the_layer_before():
    model = VGG((1, 2), width=4)
    blocks = blocks_of(model)
    assert names(model) == ["features.0", "features.4", "features.7", "fc"]
    assert blocks[0].parameters == (model.features[0].weight, model.features[1].weight, model.features[1].bias)


def test_a_loss_around_the_network_changes_only_the_names():
    inner = names(resnet())
    assert names(WithLoss(resnet(), nn.functional.cross_entropy)) == [f"backbone.{name}" for name in inner]


class Reversed(nn.Module):
    """Runs its layers in the opposite of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.late = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.early = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x):
        return self.head(self.late(self.early(x)))


def test_blocks_come_in_execution_order_not_in_that_of_registration():
    assert names(Reversed()) == ["early.0", "early.2", "late.0", "late.2", "head"]


class Branching(Reversed):
    """Cannot be traced symbolically, only run."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def test_execution_order_is_found_by_a_run_where_a_symbolic_trace_fails():
    assert names(Branching()) == ["early.0", "early.2", "late.0", "late.2", "head"]


def test_tied_weights_belong_to_their_last_use_and_the_earlier_one_is_cut():
    model = GPT(16, context=8, layers=2, heads=2, width=8)
    first, *_, last = blocks_of(model)
    assert last.parameters == (model.head.weight,)
    assert first.parameters == (model.positions.weight,)
    assert first.cut == (model.tokens,)


def test_a_module_that_runs_twice_counts_as_its_last_call():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.shared(self.middle(self.shared(x))))

    assert names(Twice()) == ["middle", "shared", "head"]


def test_networks_nobody_here_wrote():
    for config, network, count in [
        (transformers.ResNetConfig(depths=[2, 2, 2, 2]), transformers.ResNetForImageClassification, 10),
        (transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2), transformers.GPT2LMHeadModel, 5),
        (
            transformers.BertConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=2),
            transformers.BertForSequenceClassification,
            6,
        ),
        (
            transformers.ViTConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=2),
            transformers.ViTForImageClassification,
            5,
        ),
        (transformers.MobileNetV2Config(), transformers.MobileNetV2ForImageClassification, 19),
    ]:
        model = network(config)
        blocks = blocks_of(model)
        assert len(blocks) == count
        owned = [p for block in blocks for p in block.parameters]
        assert len(owned) == len(set(owned))
        assert set(owned) == set(model.parameters())


def test_every_parameter_belongs_to_one_block_with_direct_parameters_in_the_first():
    class WithToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 4))
            self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(4, 1, 8) for _ in range(2)))

        def forward(self, x):
            return self.layers(x + self.token)

    model = WithToken()
    first, second = blocks_of(model)
    assert first.parameters[0] is model.token
    assert {*first.parameters, *second.parameters} == set(model.parameters())


def test_a_model_without_parameters_has_no_blocks():
    assert blocks_of(nn.ReLU()) == ()


def test_groups_are_even_and_never_more_than_blocks():
    assert group_starts(18, 10) == (0, 1, 3, 5, 7, 9, 10, 12, 14, 16)
    assert group_starts(3, 10) == (0, 1, 2)
    assert group_starts(1, 10) == (0,)
