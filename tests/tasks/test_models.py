"""Models: shapes, sizes, and that each of them learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thinwire import registry
from thinwire.errors import UsageError

IMAGE_MODELS = sorted(set(registry.TABLE["models"]) - {"gpt"})
PUBLISHED = {
    "resnet18": 11_173_962, "resnet32": 466_906, "resnet50": 23_520_842, "vgg16": 14_724_042,
    "vgg16(classifier=4096, places=7)": 134_305_738,
}  # fmt: skip


def build(spec: str, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = registry.build("models", spec, shape, classes)
    return model


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_models_give_one_score_per_class(name: str) -> None:
    assert build(name).eval()(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_sizes_are_the_usual_ones(name: str, parameters: int) -> None:
    assert sum(p.numel() for p in build(name).parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "steps"),
    [("mlp", 40), ("cnn", 20), ("vgg8(width=8)", 40), ("vit(depth=2, width=32, heads=2)", 40), ("resnet32", 8)],
)
def test_models_learn_a_handful_of_images(name: str, steps: int) -> None:
    model = build(name)
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_the_gpt_cannot_see_the_future() -> None:
    model = build("gpt(width=32, depth=2)", (16,), 11).eval()
    tokens = torch.randint(0, 11, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 11
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (1, 16, 11)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_the_gpt_takes_shorter_sequences() -> None:
    assert build("gpt(width=32, depth=1)", (16,), 11)(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 11)


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        ("cnn", (64,), "cnn takes images"),
        ("vgg16", (1, 8, 8), "needs 32×32 pixels; this task has 8×8"),
        ("vit(patch=5)", (3, 32, 32), "patch=5 does not divide images of 32×32"),
        ("vit(heads=5)", (3, 32, 32), "heads=5 does not divide width=192"),
        ("gpt", (3, 32, 32), "gpt takes sequences of tokens"),
    ],
)
def test_misfits_are_explained(spec: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        build(spec, shape)
