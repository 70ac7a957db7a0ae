"""The optimizer state with which each phase of AB-training begins: option `moments` of `ab`.

    reset     none
    rotate    the state of W, projected on its factors
    slice     the state that the factors had in the last ab phase, cut or padded to their new layer rank

With `rotate` and `slice`, everything else keeps its state, and a full-rank phase begins with the state at the end of
the last full-rank phase. That state is equal on all ranks, so it costs no bytes. The joint phase takes everything from
it too; with `slice` factors begin it with none, because groups have trained different ones. States are kept by the
names that parameters have at full rank, or, for factors, by their own names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import nn

from thinwire.surgery.lowrank import Factored
from thinwire.surgery.moments import OptimizerState, copy_state, resize_state, rotate_state

States = dict[str, OptimizerState]  # by name of the parameter


class PhaseMoments:
    """Keeps the optimizer state of the phase before the present one, and makes that of the next phase."""

    def __init__(self, rule: Literal["rotate", "slice", "reset"]) -> None:
        self.rule = rule
        self.previous: States = {}  # at the end of the phase before the present one

    def for_full_rank(self, ended: States) -> States:
        """The state for a full-rank phase. `ended` is the state at the end of the present phase."""
        return self._replace_previous(ended)

    def for_factors(self, ended: States, layers: Mapping[str, Factored]) -> States:
        """The state for an ab phase in which these layers are factored."""
        return self._of_factors(ended, self._replace_previous(ended), layers)

    def for_joint(self, full_rank: States, layers: Mapping[str, Factored]) -> States:
        """The state for the joint phase. `full_rank` is that of the last full-rank phase, equal on all ranks."""
        self.previous = {}  # no other phase follows
        return self._of_factors(full_rank, {}, layers)

    def _of_factors(self, ended: States, last_ab_phase: States, layers: Mapping[str, Factored]) -> States:
        if self.rule == "reset":
            return {}
        states = dict(ended)
        for name, layer in layers.items():
            up, down = f"{name}.up.weight", f"{name}.down.weight"
            if self.rule == "rotate":
                states[up], states[down] = rotate_state(ended.get(f"{name}.weight", {}), layer)
            else:
                states[up] = resize_state(last_ab_phase.get(up, {}), layer.up.weight)
                states[down] = resize_state(last_ab_phase.get(down, {}), layer.down.weight)
        return states

    def _replace_previous(self, ended: States) -> States:
        """Keep the state of the phase that ends; returns that of the phase before it. Phases alternate."""
        if self.rule == "reset":
            return {}
        before, self.previous = self.previous, {name: copy_state(state) for name, state in ended.items()}
        return before


def optimizer_states(model: nn.Module, optimizer: torch.optim.Optimizer, factored: Collection[str]) -> States:
    """The optimizer's state, by the names that parameters have at full rank."""
    state = optimizer.state
    return {full_rank_name(name, factored): state[p] for name, p in model.named_parameters() if p in state}


def full_rank_name(name: str, factored: Collection[str]) -> str:
    """The name of a parameter while none of these layers is factored; factors keep their own names.

    >>> full_rank_name("3.up.bias", ["3"]), full_rank_name("3.up.weight", ["3"])
    ('3.bias', '3.up.weight')
    """
    layer, _, last = name.rpartition(".up.")
    return f"{layer}.bias" if layer in factored and last == "bias" else name
