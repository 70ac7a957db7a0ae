"""A head that the user's own function makes."""

from __future__ import annotations

import inspect

from torch import nn

from thinwire import registry
from thinwire.errors import UsageError
from thinwire.surgery.heads.base import Boundary, Head
from thinwire.surgery.heads.layers import example_output


def own(
    function: str,  # "package.module:function", called with (z, output) of two samples; returns an nn.Module
) -> Head:
    """Your own function, which makes an nn.Module from examples of the block's output and of the model's."""
    module, _, name = function.partition(":")
    make_head = registry.import_attribute(module, name, f"head '{function}'")

    def build(boundary: Boundary) -> nn.Module:
        z, output = boundary.z, boundary.output
        try:
            inspect.signature(make_head).bind(z, output)
        except TypeError as error:
            raise UsageError(f"head '{function}' must be a function of (z, output): {error}") from None
        head = make_head(z, output)
        if not isinstance(head, nn.Module):
            raise UsageError(f"head '{function}' returned {type(head).__name__}; expected an nn.Module")
        try:
            out = example_output(head, z)
        except RuntimeError as error:
            raise UsageError(f"head '{function}' cannot take an input of {tuple(z.shape)}: {error}") from None
        if out.shape != output.shape:
            raise UsageError(
                f"head '{function}' turns {tuple(z.shape)} into {tuple(out.shape)}; expected the shape of the model's "
                f"output, {tuple(output.shape)}"
            )
        return head

    return Head(build)
