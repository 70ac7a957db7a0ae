"""A model whose layers become low-rank products, found by all ranks together and equal on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.errors import RunError, UsageError
from thinwire.surgery.lowrank import (
    Decomposition,
    Factored,
    Layer,
    decompose,
    factor,
    factorable_layers,
    layer_rank_above,
    merge,
    saves_parameters,
    set_factors,
)


class Factoring:
    """The layers of a model that can be factored, and the ways there and back. Works on copies of the model too."""

    def __init__(self, model: nn.Module, comm: Comm, cutoff: float, owner: str) -> None:
        self.comm = comm
        self.cutoff = cutoff
        self.owner = owner  # the strategy, for its messages
        self.layers = factorable_layers(model)
        if not self.layers:
            raise UsageError(
                f"{owner}: no layer of this model can be factored (linear ones and convolutions can, unless grouped, "
                "shared, frozen, the first or the last one); try local_sgd or daso"
            )
        self.read: set[str] = set()  # whose weights the model has been seen to read instead of calling them
        self.largest_ranks = {name: min(len(w), w[0].numel()) for name, w in self._weights(model).items()}

    def factored(self, model: nn.Module) -> dict[str, Factored]:
        """Those layers that are two thin ones now."""
        layers = {name: model.get_submodule(name) for name in self.layers}
        return {name: layer for name, layer in layers.items() if isinstance(layer, Factored)}

    def factor(self, model: nn.Module, ranks: Mapping[str, int]) -> None:
        """Two thin layers in place of some layers; their weights are yet to be filled in."""
        for name, rank in ranks.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, Layer)
            model.set_submodule(name, factor(layer, rank))

    def merge(self, model: nn.Module) -> None:
        """Full layers again: W ← A·B."""
        self.look(model)
        for name, layer in self.factored(model).items():
            model.set_submodule(name, merge(layer))

    def look(self, model: nn.Module) -> None:
        """Remember which layers were read."""
        self.read |= {name for name, layer in self.factored(model).items() if layer.was_read}

    def read_anywhere(self) -> set[str]:
        """Layers that were read on some rank. Collective."""
        mine = torch.tensor([name in self.read for name in self.layers], dtype=torch.uint8)
        with self.comm.ledger.purpose("sync", instead_of="train"):
            flags = self.comm.max(mine)
        return {name for name, flag in zip(self.layers, flags.tolist(), strict=True) if flag}

    @torch.no_grad()
    def decompose(self, model: nn.Module) -> dict[str, int]:
        """W = A·B without small singular values, for layers that become smaller by it; returns their ranks. Collective.

        Each layer is decomposed by one rank: it takes a while, and signs of singular vectors are anyone's choice.
        """
        weights = self._weights(model)
        owner = _shared_out(weights, self.comm.size)
        splits = {name: _split(w) for name, w in weights.items() if owner[name] == self.comm.rank}
        ranks = self._low_ranks(weights, splits)
        self.factor(model, ranks)
        for root in range(self.comm.size):
            layers = {name: layer for name, layer in self.factored(model).items() if owner[name] == root}
            for name in layers.keys() & splits.keys():
                set_factors(layers[name], splits[name])
            with self.comm.ledger.purpose("sync", instead_of="train"):
                coalesced([w for x in layers.values() for w in (x.A, x.B)], partial(self.comm.broadcast, root=root))
        return ranks

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: model.get_submodule(name).get_parameter("weight") for name in self.layers}

    def _low_ranks(self, weights: dict[str, Tensor], splits: dict[str, Decomposition]) -> dict[str, int]:
        mine = [layer_rank_above(splits[name].sigma, self.cutoff) if name in splits else 0 for name in self.layers]
        with self.comm.ledger.purpose("sync", instead_of="train"):
            found = dict(zip(self.layers, self.comm.sum(torch.tensor(mine)).tolist(), strict=True))
        for name, rank in found.items():
            if rank < 1:
                raise RunError(
                    f"{self.owner}: the weight of layer {name} is not finite, or its singular values cannot be found, "
                    "so it cannot be factored; try a lower --lr or --clip-norm 1"
                )
        return {name: rank for name, rank in found.items() if saves_parameters(weights[name], rank)}


def _shared_out(weights: Mapping[str, Tensor], num_ranks: int) -> dict[str, int]:
    """The rank that decomposes each layer: the largest first, each to who has least to do."""
    load = [0] * num_ranks
    owner = {}
    for name, weight in sorted(weights.items(), key=lambda item: -item[1].numel()):
        owner[name] = load.index(min(load))
        load[owner[name]] += weight.numel() * min(len(weight), weight[0].numel())
    return owner


def _split(weight: Tensor) -> Decomposition:
    """A decomposition; where there is none, one of rank 0, so that all ranks can be told."""
    try:
        return decompose(weight)
    except (ValueError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return Decomposition(weight, weight.new_zeros(0), weight)
