"""Heads: what they make of what a block passes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire import registry
from thinwire.errors import UsageError
from thinwire.surgery.costs import activations
from thinwire.surgery.heads.base import Boundary
from thinwire.surgery.heads.predsim import PredSim, similarity
from thinwire.surgery.heads.readout import Readout
from thinwire.surgery.segments import segments_of
from thinwire.tasks.models.gpt import gpt
from thinwire.tasks.models.mlp import mlp
from thinwire.tasks.models.resnet import resnet32
from thinwire.tasks.models.vgg import vgg8
from thinwire.tasks.models.vit import vit

MODELS: dict[str, Any] = {
    "mlp": (mlp((1, 8, 8), 10, depth=4), torch.randn(2, 1, 8, 8)),
    "vgg": (vgg8((1, 8, 8), 10, width=8), torch.randn(2, 1, 8, 8)),
    "resnet": (resnet32((3, 8, 8), 10), torch.randn(2, 3, 8, 8)),
    "gpt": (gpt((6,), 11, width=8, heads=2), torch.randint(0, 11, (2, 6))),
    "vit": (vit((3, 8, 8), 10, width=8, heads=2), torch.randn(2, 3, 8, 8)),
}
FITTING = {
    "linear": ["mlp", "vgg", "resnet", "gpt", "vit"],
    "auglocal": ["mlp", "vgg", "resnet", "gpt", "vit"],
    "suited": ["mlp", "vgg", "resnet", "gpt", "vit"],
    "readout": ["gpt", "vit"],
    "predsim": ["mlp", "vgg", "resnet"],
    "conv": ["vgg", "resnet"],
}


def boundary(kind: str, end: int, block: int = 0, num_blocks: int = 2) -> Boundary:
    model, inputs = MODELS[kind]
    modules = [segment.module for segment in segments_of(model)]
    seen = activations(modules, inputs)
    return Boundary(seen[end], seen[-1], modules[end:], seen[end:-1], block, num_blocks)


@pytest.mark.parametrize(("head", "kind"), [(head, kind) for head, kinds in FITTING.items() for kind in kinds])
def test_a_head_fits_at_every_boundary_and_ends_like_the_model(head: str, kind: str) -> None:
    for end in range(1, len(segments_of(MODELS[kind][0]))):
        place = boundary(kind, end)
        if head == "conv" and place.z.ndim != 4:
            continue
        made = registry.build("heads", head).build(place)
        z = place.z.clone().requires_grad_()
        out = made(z)
        assert out.shape == place.output.shape
        made.training_forward(z).backward()
        assert z.grad is not None
        trained = [p for p in made.parameters() if p.requires_grad]
        assert all(p.grad is not None for p in trained)
        shared = {id(p) for p in MODELS[kind][0].parameters()}
        assert not shared & {id(p) for p in made.parameters()}


@pytest.mark.parametrize(("head", "kind"), [("conv", "mlp"), ("conv", "gpt"), ("predsim", "gpt"), ("predsim", "vit")])
def test_a_head_that_does_not_fit_says_what_would(head: str, kind: str) -> None:
    with pytest.raises(UsageError, match=rf"head={head} is for .*passes on .*list heads.*own\("):
        registry.build("heads", head).build(boundary(kind, 3))


def test_predsim_adds_how_similar_samples_are() -> None:
    torch.manual_seed(0)
    place = boundary("mlp", 2)
    head = registry.build("heads", "predsim(beta=0.75)").build(place)
    assert isinstance(head, PredSim)
    z, y = torch.randn(5, 256), torch.tensor([1, 2, 2, 9, 1])
    h = head.features(z)
    wanted = torch.zeros(5, 5)
    for i in range(5):
        for j in range(5):
            one, other = (torch.eye(10)[y[k]] - 0.1 for k in (i, j))
            mine, its = (h[k] - h[k].mean() for k in (i, j))
            found = torch.dot(mine, its) / (mine.norm() * its.norm())
            wanted[i, j] = (found - torch.dot(one, other) / (one.norm() * other.norm())) ** 2
    loss = 0.25 * nn.functional.cross_entropy(head(z), y) + 0.75 * wanted.mean()
    torch.testing.assert_close(head.loss(z, y, nn.functional.cross_entropy), loss)
    with pytest.raises(UsageError, match="needs class numbers"):
        head.loss(z, torch.randn(5), nn.functional.mse_loss)


def test_images_are_compared_by_the_deviations_of_channels() -> None:
    images = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(similarity(images), similarity(images.flatten(2).std(2)))


def test_auglocal_has_fewer_layers_in_later_blocks() -> None:
    def num_residual(block: int) -> int:
        head = registry.build("heads", "auglocal(depth=4)").build(boundary("resnet", 2 + block, block, 5))
        return sum(type(m).__name__ == "Residual" for m in head.modules())

    assert [num_residual(block) for block in range(4)] == [4, 3, 2, 1]


def test_auglocal_does_not_disturb_the_model() -> None:
    before = copy.deepcopy(MODELS["resnet"][0].state_dict())
    registry.build("heads", "auglocal").build(boundary("resnet", 4))
    assert all(torch.equal(t, before[n]) for n, t in MODELS["resnet"][0].state_dict().items())


def test_readout_reads_with_the_last_segment_and_trains_a_private_one() -> None:
    head = registry.build("heads", "readout(every=7)").build(boundary("gpt", 4))
    assert isinstance(head, Readout)
    assert head.every == 7
    assert not any(p.requires_grad for p in head.last_segment.parameters())
    last = segments_of(MODELS["gpt"][0])[-1].module
    assert torch.equal(next(head.last_segment.parameters()), next(last.parameters()))
    assert sum(p.numel() for p in head.private.parameters()) > 0


def own_head(z: Tensor, out: Tensor) -> nn.Module:
    return nn.Linear(z.shape[1], out.shape[1])


def no_head(z: Tensor, out: Tensor) -> int:
    return 3


def test_a_head_of_ones_own() -> None:
    made = registry.build("heads", "own('tests.surgery.test_heads:own_head')").build(boundary("mlp", 1))
    assert made.weight.shape == (10, 256)
    with pytest.raises(UsageError, match=r"returned int; expected an nn.Module"):
        registry.build("heads", "own('tests.surgery.test_heads:no_head')").build(boundary("mlp", 1))
    with pytest.raises(UsageError, match=r"cannot load head 'nowhere:it'.*package.module:function"):
        registry.build("heads", "own('nowhere:it')")


def too_wide(z: Tensor, out: Tensor) -> nn.Module:
    return nn.Identity()


def for_others(z: Tensor, out: Tensor) -> nn.Module:
    return nn.Linear(7, out.shape[1])


def test_a_head_of_ones_own_that_does_not_fit_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"too_wide' turns \(2, 256\) into \(2, 256\); expected .* model's output, \(2, 10\)"
    ):
        registry.build("heads", "own('tests.surgery.test_heads:too_wide')").build(boundary("mlp", 1))
    with pytest.raises(UsageError, match=r"for_others' cannot take an input of \(2, 256\): "):
        registry.build("heads", "own('tests.surgery.test_heads:for_others')").build(boundary("mlp", 1))
