"""All axes of a model: those that its modules declare, and those found in its nn.Sequentials."""

from __future__ import annotations

from torch import nn

from thinwire.surgery.axes.axis import Axis
from thinwire.surgery.axes.declared import check_declared, declared_axes
from thinwire.surgery.axes.sequential import sequential_axes
from thinwire.surgery.axes.suggestions import no_axes_error


def axes_of(model: nn.Module) -> list[Axis]:
    """The axes of a model: those that its modules declare, and those found in each nn.Sequential.

    Inside an nn.Sequential of linear layers, convolutions, norms and modules that treat every unit alike, all but the
    first input and the last output is an axis.
    """
    declared = list(declared_axes(model))
    for axis in declared:
        check_declared(model, axis)
    taken = {(name, dim) for axis in declared for name, dim, _ in axis.unit_dims()}
    found = [axis for axis in sequential_axes(model) if not taken & {(name, dim) for name, dim, _ in axis.unit_dims()}]
    if not declared and not found:
        raise no_axes_error(model)
    return [*declared, *found]
