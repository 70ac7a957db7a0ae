"""Models that torch.fx cannot follow: their blocks, run one after the other, are the model bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.errors import UsageError
from thinwire.surgery.blocks import check_ties
from thinwire.surgery.costs import activations, flops
from thinwire.surgery.segments import follow, segments_of

WIDTH = 6


class Block(nn.Module):
    """x + branch(x), given by name, with others beside it, and returned in a tuple if so asked."""

    def __init__(self, kind: str = "full", in_tuple: bool = False) -> None:
        super().__init__()
        self.kind, self.in_tuple = kind, in_tuple
        self.layer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, *, hidden: Tensor, mask: Tensor, **others: Any) -> Any:
        out = hidden + self.dropout(torch.tanh(self.layer(hidden * mask)))
        return (out, None, None) if self.in_tuple else out


class Own(nn.Module):
    """Its forward uses what torch.fx cannot follow; it has parameters of its own, in front of the blocks and behind."""

    def __init__(self, in_tuple: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, in_tuple) for kind in ("full", "half", "full"))
        self.embed = nn.Embedding(9, WIDTH)
        self.places = nn.Parameter(torch.randn(1, WIDTH))
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("halves", torch.tensor([1.0, 0.5]))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        if x.shape[1] > 100:
            raise ValueError("too long")
        z = self.dropout(self.embed(x) + self.places)
        for block in self.blocks:
            z = block(hidden=z, mask=self.mask(x, block), **options)
            z = z[0] if isinstance(z, tuple) else z
        out: Tensor = self.head(z * self.frozen)
        return out

    def mask(self, x: Tensor, block: Block) -> Tensor:
        return self.halves[int(block.kind == "half")] * torch.ones(x.shape[1], 1)


def inputs(size: int = 3, length: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(0, 9, (size, length), generator=torch.Generator().manual_seed(seed))


def parts_of(model: nn.Module, example: Tensor) -> list[nn.Module]:
    return [segment.module for segment in follow(model, segments_of(model), example)]


def assert_same(model: nn.Module, parts: list[nn.Module], x: Tensor) -> None:
    """Forward pass and gradients of the model and of its parts are equal bit for bit, dropout included."""
    runs = []
    for modules in ([model], parts):
        model.zero_grad()
        torch.manual_seed(3)
        z = x
        for module in modules:
            z = module(z)
        z.square().sum().backward()
        runs.append((z, {name: p.grad for name, p in model.named_parameters()}, torch.get_rng_state()))
    (out, gradients, state), (out_of_parts, gradients_of_parts, state_of_parts) = runs
    assert torch.equal(out, out_of_parts)
    assert any(g is not None and g.any() for g in gradients.values())
    for name, gradient in gradients.items():
        other = gradients_of_parts[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or torch.equal(gradient, other), name
    assert torch.equal(state, state_of_parts), "as many random numbers"


@pytest.mark.parametrize("in_tuple", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_blocks_one_after_the_other_are_the_model(in_tuple: bool, training: bool) -> None:
    torch.manual_seed(0)
    model = Own(in_tuple).train(training)
    parts = parts_of(model, inputs())
    assert_same(model, parts, inputs(4, 7, seed=1))
    assert [module.training for part in parts for module in part.modules()] == [
        training for part in parts for _ in part.modules()
    ]


def test_each_tensor_is_in_the_part_that_uses_it() -> None:
    model = Own()
    assert [segment.name for segment in segments_of(model)] == ["blocks.0", "blocks.1", "blocks.2", "embed"]
    names = {id(p): name for name, p in [*model.named_parameters(), *model.named_buffers()]}
    parts = parts_of(model, inputs())
    owned = [{names[id(t)] for t in part.parameters()} for part in parts]
    assert owned == [
        {"embed.weight", "places", "blocks.0.layer.weight", "blocks.0.layer.bias"},
        {"blocks.1.layer.weight", "blocks.1.layer.bias"},
        {"blocks.2.layer.weight", "blocks.2.layer.bias"},
        {"frozen", "head.weight", "head.bias"},
    ], "embed is registered behind the blocks and yet used in front of them"
    assert [len(part.state_dict()) for part in parts] == [5 + 1, 3, 3, 3], "and the buffers of each"
    elements = sum(t.untyped_storage().nbytes() for t in parts[2].buffers())
    assert elements < 100, "what others train takes no memory"


def test_parts_can_be_copied_and_counted() -> None:
    model = Own().eval()
    parts = parts_of(model, inputs())
    passed = activations(parts, inputs())
    counted = [flops(part, z, input_gradient=i > 0) for i, (part, z) in enumerate(zip(parts, passed, strict=False))]
    assert counted == [15 * 2 * 3 * size for size in (36, 36, 36, 24)], "the embedding needs a gradient, too"
    copies = copy.deepcopy(parts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(activations(copies, inputs())[-1], passed[-1])


def test_cuts_are_named_by_blocks() -> None:
    assert [segment.name for segment in segments_of(Own(), ["blocks.1"])][1] == "blocks.1"
    with pytest.raises(UsageError, match=r"can begin with layer 'blocks.7'; possible: blocks.1, blocks.2, embed"):
        segments_of(Own(), ["blocks.7"])


# ---- what is no chain


class Biased(Own):
    """The mask of the blocks is learned."""

    def mask(self, x: Tensor, block: Block) -> Tensor:
        return torch.ones(x.shape[1], 1) + 0 * self.places.sum()


class Padded(Own):
    """The mask of the blocks depends on the values of the input."""

    def mask(self, x: Tensor, block: Block) -> Tensor:
        mask = torch.ones(x.shape[1], 1)
        mask[x[0] == 1] = 0
        return mask


class Skipping(Own):
    """The embedding is used again behind the blocks."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        first, out = self.embed(x), super().forward(x, **options)
        return out + 0 * first.sum()


class Backwards(Own):
    """The blocks run in another order."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        z = self.embed(x)
        for block in reversed(list(self.blocks)):
            z = block(hidden=z, mask=self.mask(x, block), **options)
        out: Tensor = self.head(z)
        return out


class Between(Own):
    """Something is done between the blocks."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        z = self.embed(x)
        for block in self.blocks:
            z = 2 * block(hidden=z, mask=self.mask(x, block), **options)
        out: Tensor = self.head(z)
        return out


class Remembering(Own):
    """A block needs what another one left behind."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x, notes=[], **options)

    def mask(self, x: Tensor, block: Block) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return torch.full((x.shape[1], 1), float(self.calls))


class Reading(Own):
    """It makes a mask only if there is padding, and the example has none."""

    def mask(self, x: Tensor, block: Block) -> Tensor:
        return torch.full((x.shape[1], 1), 0.5 if (x == 9).any() else 1.0)


class TwoResults(Own):
    """Not a tensor."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        return {"out": super().forward(x, **options)}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Biased, "block 0 is given a second tensor that depends on the input or on parameters"),
        (Padded, "block 0 is given a second tensor that depends on the input or on parameters"),
        (Skipping, "what follows the blocks needs something that was computed before them"),
        (Backwards, "its blocks do not run once each, in their order"),
        (Between, "block 1 is not given what the block before it returned"),
        (Remembering, "run one after the other, they compute something else"),
        (Reading, r"the forward reads values that depend on the input or on parameters \(__bool__\)"),
        (TwoResults, "the model returns a dict"),
    ],
)
def test_what_is_no_chain_is_refused_with_the_reason(kind: type[Own], reason: str) -> None:
    model = kind()
    segments = segments_of(model)
    with pytest.raises(UsageError, match=rf"{kind.__name__} cannot be cut .* blocks is no chain .*{reason}.*nn.Seq"):
        follow(model, segments, inputs())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training


# ---- what only shows in training


class Dropping(Own):
    """In training, blocks are left out."""

    def __init__(self, left_out: int) -> None:
        super().__init__()
        self.left_out = left_out

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        z = self.embed(x + 0 * len(options))
        for number, block in enumerate(self.blocks):
            if not self.training or number != self.left_out:
                z = block(hidden=z, mask=self.mask(x, block), **options)
        out: Tensor = self.head(z)
        return out


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_block_that_is_left_out_in_training_is_an_error(left_out: int) -> None:
    parts = parts_of(Dropping(left_out).train(), inputs())
    with pytest.raises(UsageError, match=r"was left out in this pass, as layerdrop does.*try layerdrop=0"):
        parts[left_out](inputs() if left_out == 0 else torch.randn(3, 5, WIDTH))


class Checkpointing(nn.Module):
    """Activations are computed twice, by a call around each block."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.embed, self.head, self.use_reentrant = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 4), use_reentrant
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        z = self.embed(x + 0 * len(options))
        for block in self.blocks:
            z = checkpoint(block, z, use_reentrant=self.use_reentrant) if self.training else block(z)
        out: Tensor = self.head(z)
        return out


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_blocks_is_an_error(use_reentrant: bool) -> None:
    """With use_reentrant=True, blocks would not be trained at all."""
    z: Tensor = inputs()
    with pytest.raises(UsageError, match=r"torch.utils.checkpoint around blocks; call it inside the blocks"):  # noqa: PT012
        for part in parts_of(Checkpointing(use_reentrant).train(), z):
            z = part(z)
        z.sum().backward()


def test_tied_weights_are_refused() -> None:
    model = Own()
    model.head = nn.Linear(WIDTH, 9, bias=False)
    model.head.weight = model.embed.weight
    with pytest.raises(UsageError, match=r"embed.weight and head.weight are one tensor.*tie_word_embeddings=False"):
        check_ties(parts_of(model, inputs()), model)


# ---- models of Hugging Face


@pytest.mark.parametrize(
    "options",
    [{}, {"attn_implementation": "eager"}, {"checkpointing": True}, {"use_cache": False}, {"pad_token_id": 1}],
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_hugging_face_are_chains(name: str, options: dict[str, Any]) -> None:
    hf = pytest.importorskip("tests.surgery.hf_models")
    options = dict(options)
    checkpointing = options.pop("checkpointing", False)
    model = hf.with_larger_weights(hf.MODELS[name](dropout=0.1, tie_word_embeddings=False, **options))
    if checkpointing:
        model.activation_checkpointing_enable()
    wrapped = hf.Logits(model).train()
    segments = segments_of(wrapped)
    at = {"gpt2": ("transformer.wte", "transformer.h"), "llama": ("model.embed_tokens", "model.layers")}[name]
    assert [segment.name for segment in segments] == [
        f"model.{path}" for path in (at[0], *(f"{at[1]}.{i}" for i in range(4)), "lm_head")
    ]
    parts = [segment.module for segment in follow(wrapped, segments, hf.tokens(2))]
    assert_same(wrapped, parts, hf.tokens(5, seed=1)[:, :7])
    assert sum(p.numel() for part in parts for p in part.parameters()) == sum(p.numel() for p in model.parameters())
