"""The whole network from its shards: put together if every rank has room for it, else run layer by layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thinwire.errors import RunError
from thinwire.exchange.assembly import assemble, free_bytes
from thinwire.exchange.calibration import RecentInputs, Run, calibrate_batchnorm
from thinwire.exchange.sharded import ShardedTensors
from thinwire.exchange.streamed import Factors, StreamedModel


class WholeNetwork:
    """Makes the whole network, with BatchNorm's statistics measured on the last inputs of each rank.

    `model` is on the meta device. `max_gb` is the largest network that a rank puts together; without it, the network
    must fit into the free memory of each rank. `num_inputs` is the number of last batches that are kept, and
    run(model, inputs) runs the network on one of them.
    """

    def __init__(
        self, model: nn.Module, sharded: ShardedTensors, max_gb: float | None, num_inputs: int, run: Run, autocast: bool
    ) -> None:
        self.model, self.sharded, self.comm = model, sharded, sharded.comm
        self.max_gb, self.run, self.autocast = max_gb, run, autocast
        self.is_calibrated = num_inputs > 0  # else BatchNorm's statistics are those of narrow networks
        self.inputs = RecentInputs(model, num_inputs, sharded.device)

    def keep_inputs(self, inputs: Any) -> None:
        """Keep a copy of a batch of inputs, to measure BatchNorm's statistics on it."""
        self.inputs.keep(inputs)

    def load_inputs(self, saved: list[Any]) -> None:
        """Keep the inputs of a saved state instead."""
        self.inputs.load(saved)

    def fits(self) -> bool:
        """Whether every rank has room for the whole network. Collective."""
        limit = 1e9 * self.max_gb if self.max_gb else free_bytes(self.sharded.device, self.comm)
        with self.comm.ledger.purpose("sync", instead_of="train"):
            return bool(self.comm.min(torch.tensor([self.sharded.num_bytes <= limit], dtype=torch.uint8)))

    def check_fits(self) -> None:
        """Raise RunError if some rank has no room for the whole network. Collective."""
        if not self.fits():
            raise RunError(
                f"{self.size_message()}; trainer.eval_model() runs it layer by layer, trainer.export(folder) writes it "
                "to files, and ist(whole_gb=…) sets the limit"
            )

    def size_message(self) -> str:
        """How large a network is that does not fit, and the limit."""
        limit = f"whole_gb={self.max_gb:g}" if self.max_gb else "some rank has room for"
        return f"the whole network takes {self.sharded.num_bytes / 1e9:.3g} GB, more than {limit}"

    def assemble(self, sharded: ShardedTensors, factors: Factors) -> nn.Module:
        """The whole network of these shards on every rank. Collective."""
        whole = assemble(self.model, sharded, factors)
        self._calibrate(whole)
        return whole

    def stream(self, sharded: ShardedTensors, factors: Factors) -> StreamedModel:
        """The whole network of these shards, of which a rank holds one layer at a time. Collective."""
        streamed = StreamedModel(self.model, sharded, factors)
        self._calibrate(streamed)
        return streamed

    def _calibrate(self, whole: nn.Module) -> None:
        """Measure BatchNorm's statistics, whose sums have more terms than those of narrow networks."""
        if self.comm.size > 1:
            calibrate_batchnorm(whole, self.inputs, self.comm, self.run, self.autocast)
