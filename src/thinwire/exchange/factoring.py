"""Layers of a model as low-rank products: computed by all ranks together, and equal on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.messages import say
from thinwire.common.packing import assign_to_least_loaded
from thinwire.errors import RunError, UsageError
from thinwire.surgery.attention import unpack_attention
from thinwire.surgery.huggingface import is_transposed_linear
from thinwire.surgery.lowrank import (
    Decomposition,
    Factored,
    decompose,
    factor_layers,
    factorable_layers,
    merge,
    saves_parameters,
    set_factors,
)
from thinwire.surgery.rank_rule import RankRule
from thinwire.surgery.standard import to_standard_modules


class Factoring:
    """Factors the layers of a model that can be factored, and merges them again. Works on copies of the model too."""

    def __init__(self, model: nn.Module, comm: Comm, rule: RankRule, owner: str) -> None:
        self.comm = comm
        self.rule = rule
        self.owner = owner  # the strategy, for its messages
        self.layers = factorable_layers(model)
        if not self.layers:
            raise UsageError(
                f"{owner}: no layer of this model can be factored (linear ones and convolutions can, unless grouped, "
                "shared, frozen, the first or the last one); try local_sgd or daso"
            )
        self.read_layers: set[str] = set()  # layers whose weight the model reads, instead of calling the layer
        self._first_ranks: dict[str, int] = {}  # by the first weights, where there are no other ranks
        self.largest_ranks = {name: min(len(w), w[0].numel()) for name, w in self._weights(model).items()}

    def factored_layers(self, model: nn.Module) -> dict[str, Factored]:
        """The layers of a model that are factored now."""
        layers = {name: model.get_submodule(name) for name in self.layers}
        return {name: layer for name, layer in layers.items() if isinstance(layer, Factored)}

    def merge(self, model: nn.Module) -> None:
        """Full layers again: W ← A·B."""
        self.note_read_layers(model)
        for name, layer in self.factored_layers(model).items():
            model.set_submodule(name, merge(layer))

    def note_read_layers(self, model: nn.Module) -> None:
        """Remember the layers whose weight was read since they were factored."""
        self.read_layers |= {name for name, layer in self.factored_layers(model).items() if layer.was_read}

    def layers_read_on_any_rank(self) -> set[str]:
        """Layers whose weight was read on some rank. Collective."""
        mine = torch.tensor([name in self.read_layers for name in self.layers], dtype=torch.uint8)
        with self.comm.ledger.purpose("sync", instead_of="train"):
            flags = self.comm.max(mine)
        return {name for name, flag in zip(self.layers, flags.tolist(), strict=True) if flag}

    @torch.no_grad()
    def decompose(self, model: nn.Module) -> dict[str, int]:
        """W = A·B without small singular values, for layers that become smaller by it; returns their layer ranks.

        Each layer is decomposed by one rank, its owner, which broadcasts the result: decomposing takes a while, and the
        signs of singular vectors may differ between ranks. Collective.
        """
        weights = self._weights(model)
        owner = self._owners(weights)
        if self.comm.is_dry:
            splits, layer_ranks = {}, self._layer_ranks_of_first(weights)
        else:
            splits = {name: _split(w) for name, w in weights.items() if owner[name] == self.comm.rank}
            layer_ranks = self._agree_on_layer_ranks(weights, splits)
        factor_layers(model, layer_ranks)
        for root in range(self.comm.size):
            layers = {name: layer for name, layer in self.factored_layers(model).items() if owner[name] == root}
            for name in layers.keys() & splits.keys():
                set_factors(layers[name], splits[name])
            with self.comm.ledger.purpose("sync", instead_of="train"):
                coalesced([w for x in layers.values() for w in (x.A, x.B)], partial(self.comm.broadcast, root=root))
        return layer_ranks

    def _layer_ranks_of_first(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        """Layer ranks without other ranks, and so without training: those of the weights that were seen first."""
        with self.comm.ledger.purpose("sync", instead_of="train"):
            self.comm.sum(torch.zeros(len(self.layers), dtype=torch.int64))
        for name in self.layers:
            if name not in self._first_ranks and weights[name].is_meta:
                raise UsageError(
                    f"{self.owner}: how thin its layers get follows from their weights, and those of {name} are on the "
                    "meta device; try a model that fits in memory"
                )
            if name not in self._first_ranks:
                matrix = weights[name].detach().flatten(1)
                self._first_ranks[name] = self.rule.layer_rank(torch.linalg.svdvals(matrix.float()))
        return {name: r for name, r in self._first_ranks.items() if saves_parameters(weights[name], r)}

    def say_if_none(self, layer_ranks: Mapping[str, int]) -> None:
        """Tell the user if the rule has left all layers full."""
        if not layer_ranks:
            say(
                f"{self.owner}: with {self.rule} no layer's rank is low enough to make it smaller, so all layers stay "
                "full; try a higher cutoff, more weight decay or a longer run",
                self.comm.rank,
                once=True,
            )

    def _owners(self, weights: Mapping[str, Tensor]) -> dict[str, int]:
        """The rank that decomposes each layer: the largest layer first, each to the rank that has least to do."""
        largest_first = sorted(weights.items(), key=lambda item: -item[1].numel())
        costs = {name: weight.numel() * min(len(weight), weight[0].numel()) for name, weight in largest_first}
        return assign_to_least_loaded(costs, self.comm.size)

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights of the layers that can be factored, as (outputs, everything else)."""
        layers: dict[str, Any] = {name: model.get_submodule(name) for name in self.layers}
        return {name: x.weight.T if is_transposed_linear(x) else x.weight for name, x in layers.items()}

    def _agree_on_layer_ranks(self, weights: dict[str, Tensor], splits: dict[str, Decomposition]) -> dict[str, int]:
        mine = [self.rule.layer_rank(splits[name].sigma) if name in splits else 0 for name in self.layers]
        with self.comm.ledger.purpose("sync", instead_of="train"):
            found = dict(zip(self.layers, self.comm.sum(torch.tensor(mine)).tolist(), strict=True))
        for name, layer_rank in found.items():
            if layer_rank < 1:
                raise RunError(
                    f"{self.owner}: the weight of layer {name} is not finite, or its singular values cannot be found, "
                    "so it cannot be factored; try a lower --lr or --clip-norm 1"
                )
        return {name: layer_rank for name, layer_rank in found.items() if saves_parameters(weights[name], layer_rank)}


def _split(weight: Tensor) -> Decomposition:
    """A decomposition; where there is none, one of layer rank 0, so that all ranks learn of it."""
    try:
        return decompose(weight)
    except (ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return Decomposition(weight, weight.new_zeros(0), weight)


def make_factoring(model: nn.Module, comm: Comm, rule: RankRule, owner: str) -> Factoring:
    """Unpack attention, so that its projections can be factored; a model that is refused is left as it was."""
    unpack_attention(model)
    try:
        return Factoring(model, comm, rule, owner)
    except UsageError:
        to_standard_modules(model)
        raise
