"""Heads: small networks that tell a block how far it has got, and serve as early exits of the trained model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from thinwire import registry
from thinwire.errors import UsageError

LARGEST_FEATURES = 2048  # that a linear head looks at
LossFunction = Callable[[Tensor, Tensor], Tensor]


class Joint(NamedTuple):
    """Where a head is put: between two blocks, with an example of what passes there."""

    z: Tensor  # what the block passes on
    out: Tensor  # what the model returns
    behind: Sequence[nn.Module]  # units of the model behind the cut; the last one makes the output
    inputs: Sequence[Tensor]  # what goes into each of them
    block: int  # number of the block, from 0
    num_blocks: int


class Head(NamedTuple):
    """A kind of head: makes the module for a joint."""

    fit: Callable[[Joint], nn.Module]


class Exit(nn.Module):
    """A head as a module: z ↦ an output like the model's, and the loss that its block is trained with."""

    def loss(self, z: Tensor, targets: Tensor, loss: LossFunction) -> Tensor:
        """What the block and the head are trained to make small."""
        return loss(self(z), targets)

    def computed(self, z: Tensor) -> Tensor:
        """A number for which everything must be computed that training needs."""
        out: Tensor = self(z)
        return out.sum()


def suited() -> Head:
    """Chosen by shape: readout if the model returns sequences, linear if the block returns vectors, else auglocal."""

    def fit(joint: Joint) -> nn.Module:
        if joint.out.ndim == 3:
            return readout().fit(joint)
        if joint.z.ndim == 2:
            return linear().fit(joint)
        return auglocal().fit(joint)

    return Head(fit)


def linear() -> Head:
    """One linear layer; before it, images are pooled and sequences are normalised.

    Belilovsky et al., "Greedy Layerwise Learning Can Scale to ImageNet", 2019.
    """
    return Head(lambda joint: _Stack(*_classifier(joint)))


def conv(
    width: PositiveInt = 128,  # hidden units between the two linear layers
) -> Head:
    """A 3×3 convolution of stride 2, pooling and two linear layers; for images.

    Laskin et al., "Parallel Training of Deep Networks with Local Updates", 2020.
    """

    def fit(joint: Joint) -> nn.Module:
        channels = _image(joint, "conv").shape[1]
        return _Stack(
            nn.Conv2d(channels, channels, 3, 2, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, width), nn.ReLU(),
            nn.Linear(width, joint.out.shape[-1]),
        )  # fmt: skip

    return Head(fit)


def predsim(
    beta: Annotated[float, Field(ge=0, le=1)] = 0.99,  # weight of the similarity loss; 0 = the prediction alone
) -> Head:
    """Two losses, of the prediction and of similarities between samples; for classifiers, fully connected or VGG.

    (1 − β)·loss(Wz, y) + β·‖S(h(z)) − S(onehot(y))‖²/n², of the cosine similarities S of a batch's n samples.

    Nøkland and Eidnes, "Training Neural Networks with Local Error Signals", 2019.
    """

    def fit(joint: Joint) -> nn.Module:
        if joint.out.ndim != 2 or joint.z.ndim not in (2, 4):
            raise _unfit(joint, "predsim", "is for vectors and images that are put into classes")
        width = joint.z.shape[1]
        compared = nn.Linear(width, width) if joint.z.ndim == 2 else nn.Conv2d(width, width, 3, padding=1)
        return _PredSim(nn.Sequential(*_classifier(joint)), compared, beta)

    return Head(fit)


class _PredSim(Exit):
    def __init__(self, predicted: nn.Module, compared: nn.Module, beta: float) -> None:
        super().__init__()
        self.predicted, self.compared, self.beta = predicted, compared, beta

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.predicted(z)
        return out

    def loss(self, z: Tensor, targets: Tensor, loss: LossFunction) -> Tensor:
        out = self(z)
        if targets.is_floating_point() or targets.ndim != 1:
            raise UsageError(f"predsim: targets are {tuple(targets.shape)} of {targets.dtype}; it needs class numbers")
        wanted = similarity(nn.functional.one_hot(targets, out.shape[-1]).float())
        found = similarity(self.compared(z).float())
        return (1 - self.beta) * loss(out, targets) + self.beta * nn.functional.mse_loss(found, wanted)

    def computed(self, z: Tensor) -> Tensor:
        return super().computed(z) + similarity(self.compared(z)).sum()


def similarity(features: Tensor) -> Tensor:
    """Cosines of the angles between samples' features, after their mean is taken off; images by channels' deviations.

    >>> similarity(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])).round()
    tensor([[ 1.,  1., -1.],
            [ 1.,  1., -1.],
            [-1., -1.,  1.]])
    """
    if features.ndim == 4:
        features = features.flatten(2).std(2) if features[0, 0].numel() > 1 else features.flatten(1)
    unit = nn.functional.normalize(features - features.mean(1, keepdim=True), dim=1, eps=1e-8)
    return unit @ unit.T


def auglocal(
    depth: PositiveInt = 2,  # layers in the head of the first block; heads of later blocks have fewer, down to one
) -> Head:
    """Untrained copies of evenly spaced later layers, fewer of them for later blocks; for deep convolutional nets.

    Ma et al., "Scaling Supervised Local Learning with Augmented Auxiliary Networks", 2024.
    """

    def fit(joint: Joint) -> nn.Module:
        between = len(joint.behind) - 1
        here = round(depth * (1 - joint.block / max(1, joint.num_blocks - 1)))
        count = min(max(1, here), between)
        chosen = [-(-between * (i + 1) // count) - 1 for i in range(count)]
        return _Stack(*_chain(joint, [*chosen, between]))

    return Head(fit)


def readout(
    every: PositiveInt = 10,  # steps between two copies of the last layer; lower = fresher, more bytes
) -> Head:
    """A trained copy of the model's last layer but one, then a frozen copy of its last layer, renewed now and then.

    For language models: blocks aim at the same words as the last one does, and none has an unembedding to train.
    """

    def fit(joint: Joint) -> nn.Module:
        last = len(joint.behind) - 1
        return Readout(nn.Sequential(*_chain(joint, range(max(0, last - 1), last))), joint, every)

    return Head(fit)


class Readout(Exit):
    """private(z), read out by a copy of the model's last unit that the last block sends every so many steps."""

    def __init__(self, private: nn.Sequential, joint: Joint, every: int) -> None:
        super().__init__()
        self.private = private
        have = _after(private, joint.z)
        self.fitted = nn.Sequential(*_adapter(have, joint.inputs[-1]))
        self.lagged = copy.deepcopy(joint.behind[-1]).requires_grad_(False)
        self.every = every

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.lagged(self.fitted(self.private(z)))
        return out


def own(
    function: str,  # "package.module:function", called with (z, output) of two samples; returns an nn.Module
) -> Head:
    """Your own function, which makes an nn.Module from examples of the block's output and of the model's."""
    module, _, name = function.partition(":")
    made = registry.import_attribute(module, name, f"head '{function}'")

    def fit(joint: Joint) -> nn.Module:
        try:
            inspect.signature(made).bind(joint.z, joint.out)
        except TypeError as error:
            raise UsageError(f"head '{function}' must be a function of (z, output): {error}") from None
        head = made(joint.z, joint.out)
        if not isinstance(head, nn.Module):
            raise UsageError(f"head '{function}' returned {type(head).__name__}; expected an nn.Module")
        try:
            out = _after(head, joint.z)
        except RuntimeError as error:
            raise UsageError(f"head '{function}' cannot take {tuple(joint.z.shape)}: {error}") from None
        if out.shape != joint.out.shape:
            raise UsageError(
                f"head '{function}' makes {tuple(out.shape)} of {tuple(joint.z.shape)}; the model's output, and so a "
                f"head's, is {tuple(joint.out.shape)}"
            )
        return head

    return Head(fit)


class _Stack(Exit):
    """Layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.layers(z)
        return out


class OverPlaces(nn.Module):
    """(batch, places, features) → (batch, features), their mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _classifier(joint: Joint) -> list[nn.Module]:
    z, out = joint.z, joint.out
    if out.ndim == 3 and z.ndim == 3 and z.shape[1] == out.shape[1]:
        return [nn.LayerNorm(z.shape[2]), nn.Linear(z.shape[2], out.shape[2])]
    if out.ndim != 2 or z.ndim not in (2, 3, 4):
        raise _unfit(joint, "linear", "goes from vectors, sequences or images to as many numbers for each sample")
    layers, features = _flat(z)
    return [*layers, nn.Linear(features, out.shape[1])]


def _flat(z: Tensor) -> tuple[list[nn.Module], int]:
    """Layers that make one vector of each sample, and its length."""
    if z.ndim == 4:
        places = next(p for p in (4, 2, 1) if z.shape[1] * p * p <= LARGEST_FEATURES or p == 1)
        places = min(places, *z.shape[2:])
        return [nn.AdaptiveAvgPool2d(places), nn.Flatten()], z.shape[1] * places**2
    if z.ndim == 3:
        return [nn.LayerNorm(z.shape[2]), OverPlaces()], z.shape[2]
    return [], z.shape[1]


def _chain(joint: Joint, chosen: Sequence[int]) -> list[nn.Module]:
    """Copies of some of the units behind a cut, as they are before training, with thin layers where they do not fit."""
    layers: list[nn.Module] = []
    x = joint.z
    for i in chosen:
        fitting = nn.Sequential(*_adapter(x, joint.inputs[i]))
        unit = copy.deepcopy(joint.behind[i]).requires_grad_()
        layers += [*fitting, unit]
        x = _after(nn.Sequential(fitting, unit), x)
    return layers


def _adapter(have: Tensor, want: Tensor) -> list[nn.Module]:
    """Layers from one shape of features to another; none where they are the same."""
    if have.shape == want.shape:
        return []
    if have.ndim == want.ndim == 4:
        pooled = [nn.AdaptiveAvgPool2d(tuple(want.shape[2:]))] if have.shape[2:] != want.shape[2:] else []
        width = want.shape[1]
        mixed = (
            [nn.Conv2d(have.shape[1], width, 1, bias=False), nn.GroupNorm(1, width)] if have.shape[1] != width else []
        )
        return [*pooled, *mixed]
    if have.ndim == want.ndim == 3 and have.shape[1] == want.shape[1]:
        return [nn.Linear(have.shape[2], want.shape[2])]
    if want.ndim == 2 and have.ndim in (2, 3, 4):
        layers, features = _flat(have)
        return [*layers, nn.Linear(features, want.shape[1], bias=False), nn.LayerNorm(want.shape[1])]
    raise UsageError(
        f"no head can be made from the model's own layers: {tuple(have.shape[1:])} would have to become "
        f"{tuple(want.shape[1:])}; try head=linear, or your own: head=own('package.module:function')"
    )


@torch.no_grad()
def _after(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = copy.deepcopy(module).to(x.device).eval()(x)
    return out


def _image(joint: Joint, name: str) -> Tensor:
    if joint.z.ndim != 4 or joint.out.ndim != 2:
        raise _unfit(joint, name, "is for images that are put into classes")
    return joint.z


def _unfit(joint: Joint, name: str, what: str) -> UsageError:
    return UsageError(
        f"head={name} {what}; block {joint.block + 1} passes on {tuple(joint.z.shape[1:])} and the model's output is "
        f"{tuple(joint.out.shape[1:])}; try another of `thinwire list heads`, or your own: "
        "head=own('package.module:function')"
    )
