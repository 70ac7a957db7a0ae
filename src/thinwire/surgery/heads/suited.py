"""The default head: chosen by the shapes of the model."""

from __future__ import annotations

from torch import nn

from thinwire.surgery.heads.auglocal import auglocal
from thinwire.surgery.heads.base import Boundary, Head
from thinwire.surgery.heads.linear import linear
from thinwire.surgery.heads.readout import readout


def suited() -> Head:
    """Chosen by shape: readout if the model returns sequences, linear if the block returns vectors, else auglocal."""

    def build(boundary: Boundary) -> nn.Module:
        if boundary.output.ndim == 3:
            return readout().build(boundary)
        if boundary.z.ndim == 2:
            return linear().build(boundary)
        return auglocal().build(boundary)

    return Head(build)
