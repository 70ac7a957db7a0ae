"""A linear classifier as a head."""

from __future__ import annotations

from thinwire.surgery.heads.base import Head, LayerStack
from thinwire.surgery.heads.layers import classifier_layers


def linear() -> Head:
    """One linear layer; before it, images are pooled and sequences are normalised.

    Belilovsky et al., "Greedy Layerwise Learning Can Scale to ImageNet", 2019.
    """
    return Head(lambda boundary: LayerStack(*classifier_layers(boundary)))
