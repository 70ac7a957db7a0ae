"""Blocks: where models are cut, and that their parts compute what they computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import thinwire as tw
from thinwire import registry
from thinwire.errors import UsageError
from thinwire.strategies.stages.cutting import find_starts
from thinwire.surgery.blocks import balanced_starts, check_ties
from thinwire.surgery.costs import activations, flops, seconds
from thinwire.surgery.segments import segments_of
from thinwire.tasks.models.transformer import Block

INPUTS = {
    "gpt": ((12,), torch.randint(0, 7, (3, 12), generator=torch.Generator().manual_seed(0))),
    "vit": ((3, 8, 8), torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))),
}
IMAGES = ((3, 32, 32), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
NUM_SEGMENTS = {
    "mlp": 3,
    "cnn": 4,
    "vgg8": 8,
    "vgg16": 14,
    "resnet18": 10,
    "resnet32": 17,
    "resnet50": 18,
    "gpt": 7,
    "vit": 9,
}


@pytest.mark.parametrize("name", registry.TABLE["models"])
def test_the_segments_of_every_model_compute_what_it_does(name: str) -> None:
    shape, inputs = INPUTS.get(name, IMAGES)
    torch.manual_seed(0)
    model = registry.build("models", name, shape, 7).eval()
    segments = segments_of(model)
    assert len(segments) == NUM_SEGMENTS[name]
    seen = activations([segment.module for segment in segments], inputs)
    assert torch.equal(seen[-1], model(inputs))
    assert sum(p.numel() for s in segments for p in s.module.parameters()) == sum(p.numel() for p in model.parameters())


class Written(nn.Module):
    """A transformer as people write it: not a sequence, with weights of its own and a loop over a list."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.places = nn.Parameter(torch.randn(12, 8))
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(8, 2, causal=True) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(8, 7, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.words(x) + self.places[: x.shape[1]])
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x) * self.scale)
        return out


class Skipping(nn.Module):
    """The first layer's output is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        out: Tensor = self.last(self.third(self.second(first)) + first)
        return out


class Choosing(nn.Module):
    """What it does depends on the numbers that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) if x.sum() > 0 else x
        return out


def test_a_model_that_is_not_a_sequence_is_cut_where_one_tensor_passes() -> None:
    model, inputs = Written().eval(), INPUTS["gpt"][1]
    segments = segments_of(model)
    assert [segment.name for segment in segments] == ["words", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert torch.equal(activations([segment.module for segment in segments], inputs)[-1], model(inputs))
    owned = {id(p) for segment in segments for p in segment.module.parameters()}
    assert owned == {id(p) for p in model.parameters()}


def test_a_cut_inside_a_module_is_found_by_its_name() -> None:
    model = Written().eval()
    with pytest.raises(UsageError, match=r"cannot be cut at blocks.1.mlp.0: 2 tensors cross there, .*passes on one"):
        segments_of(model, ["blocks.1.mlp"])
    segments = segments_of(model, ["norm"])
    assert [segment.name for segment in segments][-2:] == ["norm", "head"]
    inputs = INPUTS["gpt"][1]
    assert torch.equal(activations([segment.module for segment in segments], inputs)[-1], model(inputs))


def test_no_cut_crosses_a_skip_connection() -> None:
    assert [segment.name for segment in segments_of(Skipping())] == ["first", "second", "last"]
    with pytest.raises(
        UsageError,
        match=r"cut at third: 2 tensors cross there, first \(for add\), second \(for third\); .* possible: second, la",
    ):
        segments_of(Skipping(), ["third"])


def test_names_in_a_sequence_may_be_anywhere_in_it() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert [segment.name for segment in segments_of(net)] == ["0.0", "1.0"]
    assert [segment.name for segment in segments_of(net, ["0.1"])] == ["0.0", "0.1", "1.0"]
    assert [segment.name for segment in segments_of(net, ["1"])] == ["0.0", "1.0"]
    with pytest.raises(UsageError, match=r"can begin with layer '2'; possible: 0.1, 1.0, 1.1"):
        segments_of(net, ["2"])
    with pytest.raises(
        UsageError, match=r"layer '1.linear1', which is inside 1, and that is run as a whole; possible: 1"
    ):
        segments_of(nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 1)), ["1.linear1"])


def test_a_model_that_cannot_be_followed_says_so() -> None:
    with pytest.raises(UsageError, match=r"Choosing cannot be cut .*write it as an nn.Sequential"):
        segments_of(Choosing())


def test_a_compiled_model_is_asked_for_as_it_was() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"OptimizedModule cannot be cut .*give the model without torch.compile"):
        segments_of(model)


def test_tied_weights_stay_together() -> None:
    model = Written(tied=True)
    segments = [segment.module for segment in segments_of(model)]
    check_ties([nn.Sequential(*segments)], model)
    with pytest.raises(UsageError, match=r"words.weight and head.weight are one tensor, of which blocks 1 and 2 would"):
        check_ties([nn.Sequential(*segments[:3]), nn.Sequential(*segments[3:])], model)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_the_dearest_block_is_as_cheap_as_can_be(costs: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))

    def dearest(starts: list[int]) -> int:
        ends = [*starts[1:], len(costs)]
        return max(sum(costs[a:b]) for a, b in zip(starts, ends, strict=True))

    found = balanced_starts(costs, count)
    assert len(found) == count
    assert found == sorted(set(found))
    assert found[0] == 0
    assert dearest(found) == min(dearest([0, *cut]) for cut in combinations(range(1, len(costs)), count - 1))


COSTS_AND_SIZES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=8)


@given(COSTS_AND_SIZES, st.data())
def test_the_least_is_sent_among_ways_that_cost_a_tenth_more(
    segments: list[tuple[int, int]], data: st.DataObject
) -> None:
    costs, sizes = [cost for cost, _ in segments], [size for _, size in segments]
    count = data.draw(st.integers(1, len(costs)))

    def measured(starts: Sequence[int]) -> tuple[int, float, float]:
        """What is sent, the cost of the dearest block, and the sum of squared costs."""
        ends = [*starts[1:], len(costs)]
        blocks = [sum(costs[a:b]) for a, b in zip(starts, ends, strict=True)]
        return sum(sizes[i] for i in starts[1:]), max(blocks), sum(cost**2 for cost in blocks)

    _, dearest, squares = measured(balanced_starts(costs, count))
    ways = [measured([0, *cut]) for cut in combinations(range(1, len(costs)), count - 1)]
    allowed = [way for way in ways if way[1] <= 1.1 * dearest and way[2] <= 1.1 * squares]
    found = balanced_starts(costs, count, sizes)
    assert len(found) == count
    assert found == sorted(set(found))
    assert measured(found) in allowed
    assert measured(found)[0] == min(sent for sent, _, _ in allowed)
    assert balanced_starts(costs, count, [1] * len(costs)) == balanced_starts(costs, count), "sizes say nothing"


@pytest.mark.parametrize(
    ("name", "blocks", "expected"), [("vgg16", 4, ["14", "24", "34"]), ("resnet18", 3, ["6", "9"])]
)
def test_convolutional_models_are_cut_where_images_are_small(name: str, blocks: int, expected: list[str]) -> None:
    torch.manual_seed(0)
    shape, inputs = IMAGES
    model = registry.build("models", name, shape, 10)
    passed = activations([segment.module for segment in segments_of(model)], inputs)[:-1]
    comm = tw.simulate(lambda comm: comm, ranks=1)[0]
    segments = segments_of(model)
    starts = find_starts("flops", blocks, segments, passed, comm)
    assert [segments[i].name for i in starts[1:]] == expected


def test_operations_are_counted_forward_and_backward() -> None:
    layer, x = nn.Linear(8, 4), torch.ones(2, 8)
    assert flops(layer, x, input_gradient=False) == 2 * (2 * 2 * 8 * 4)
    assert flops(layer, x, input_gradient=True) == 3 * (2 * 2 * 8 * 4)
    assert flops(layer, x, input_gradient=True, weights=False) == 2 * (2 * 2 * 8 * 4)
    attention = Block(8, 2, causal=True)
    linear = 3 * 2 * 5 * 8 * (24 + 8 + 32 + 32)
    assert flops(attention, torch.ones(1, 5, 8), input_gradient=True) == linear + 3 * 2 * (2 * 5 * 5 * 8)
    assert layer.weight.grad is None
    assert seconds(layer, x, input_gradient=True) > 0


class Dropping(nn.Module):
    """Dropout by a function, as many write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.first(x), 0.5, self.training)
        out: Tensor = nn.functional.dropout(self.last(x), p=0.5, training=self.training)
        return out


@pytest.mark.parametrize("traced_in_training", [True, False])
def test_dropout_follows_the_mode_of_its_block(traced_in_training: bool) -> None:
    model, x = Dropping().train(traced_in_training), torch.ones(3, 4)
    for segment in segments_of(model):
        for training in (True, False):
            segment.module.train(training)
            assert torch.equal(segment.module(x), segment.module(x)) is not training
        x = segment.module(x)


def test_a_constant_may_be_shared_but_not_what_is_saved() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mask, kept = torch.ones(4), torch.ones(4)
    for layer in net:
        layer.register_buffer("mask", mask, persistent=False)
    check_ties([net[:1], net[1:]], net)
    for layer in net:
        layer.register_buffer("kept", kept)
    with pytest.raises(UsageError, match=r"0.kept and 1.kept are one tensor"):
        check_ties([net[:1], net[1:]], net)


def test_frozen_weights_cost_no_gradient() -> None:
    layer = nn.Linear(8, 4).requires_grad_(False)
    assert flops(layer, torch.ones(2, 8), input_gradient=True) == 2 * (2 * 2 * 8 * 4)
