"""PredSim: a head whose loss is that of a prediction and of the similarity of samples."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.surgery.heads.base import Boundary, Head, HeadModule, LossFunction, shape_error
from thinwire.surgery.heads.layers import classifier_layers


def predsim(
    beta: Annotated[float, Field(ge=0, le=1)] = 0.99,  # weight of the similarity loss; 0 = the prediction alone
) -> Head:
    """Two losses, of the prediction and of similarities between samples; for classifiers, fully connected or VGG.

    (1 − β)·loss(Wz, y) + β·‖S(h(z)) − S(onehot(y))‖²/n², of the cosine similarities S of a batch's n samples.

    Nøkland and Eidnes, "Training Neural Networks with Local Error Signals", 2019.
    """

    def build(boundary: Boundary) -> nn.Module:
        if boundary.output.ndim != 2 or boundary.z.ndim not in (2, 4):
            raise shape_error(boundary, "predsim", "is for the classification of vectors and images")
        width = boundary.z.shape[1]
        features = nn.Linear(width, width) if boundary.z.ndim == 2 else nn.Conv2d(width, width, 3, padding=1)
        return PredSim(nn.Sequential(*classifier_layers(boundary)), features, beta)

    return Head(build)


class PredSim(HeadModule):
    """A classifier Wz, and a layer h whose features h(z) are compared between samples."""

    def __init__(self, classifier: nn.Module, features: nn.Module, beta: float) -> None:
        super().__init__()
        self.classifier, self.features, self.beta = classifier, features, beta

    def forward(self, z: Tensor) -> Tensor:
        out: Tensor = self.classifier(z)
        return out

    def loss(self, z: Tensor, targets: Tensor, loss: LossFunction) -> Tensor:
        out = self(z)
        if targets.is_floating_point() or targets.ndim != 1:
            raise UsageError(
                f"predsim: targets are {tuple(targets.shape)} of {targets.dtype}; it needs class numbers, one integer "
                "per sample; try head=linear"
            )
        wanted = similarity(nn.functional.one_hot(targets, out.shape[-1]).float())
        found = similarity(self.features(z).float())
        return (1 - self.beta) * loss(out, targets) + self.beta * nn.functional.mse_loss(found, wanted)

    def training_forward(self, z: Tensor) -> Tensor:
        return super().training_forward(z) + similarity(self.features(z)).sum()


def similarity(features: Tensor) -> Tensor:
    """Cosine similarities of samples, after subtracting the mean of each; of images, from each channel's deviation.

    >>> import torch
    >>> similarity(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])).round()
    tensor([[ 1.,  1., -1.],
            [ 1.,  1., -1.],
            [-1., -1.,  1.]])
    """
    if features.ndim == 4:
        features = features.flatten(2).std(2) if features[0, 0].numel() > 1 else features.flatten(1)
    normalized = nn.functional.normalize(features - features.mean(1, keepdim=True), dim=1, eps=1e-8)
    return normalized @ normalized.T
