"""Independent subnet training: each round, every rank trains a narrow network of the units that it was assigned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.common.tensors import named_tensors
from thinwire.data import Batch, Shard, to_device
from thinwire.errors import RunError
from thinwire.exchange.export import export_model
from thinwire.exchange.gradients import NoExchange
from thinwire.exchange.sharded import ShardedTensors
from thinwire.exchange.sharded_moments import ShardedMoments, probe_moments
from thinwire.exchange.streamed import Factors
from thinwire.exchange.whole_network import WholeNetwork
from thinwire.strategies.base import Strategy
from thinwire.strategies.ist_setup import Branches, Cut, Scale, device_of, find_slices, shard_model
from thinwire.strategies.ist_shares import Shares, UnitShares, count_subnets
from thinwire.strategies.learner import Learner
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.series import Series
from thinwire.surgery.meta import copy_non_persistent_buffers
from thinwire.surgery.narrow import eval_scales, narrow_network, start_scales
from thinwire.surgery.slices import UnitIndices
from thinwire.surgery.unit_assignment import assign_units

M = TypeVar("M", bound=nn.Module)


class IST(Strategy):
    """Each rank trains a narrow network of random units; after each round, units are assigned anew.

    Each round, the units I_l of every hidden layer l are assigned to the ranks at random. Rank w makes a network of its
    slices W_l[I_l^w, I_{l−1}^w], as deep as the whole one, and trains it for `local_steps` steps on its own data. Then
    the slices are collected into shards, of which every rank keeps one. Elements whose two units are on different ranks
    stay in their shard as they are; tensors that all ranks have are averaged. With fewer `subnets` than ranks, several
    ranks train the same narrow network, and average it; with one subnet for all, this is local SGD. Wire bytes per rank
    and round, of n ranks: 2(n−1)/n·4·P_sub, of P_sub elements of a narrow network (of an MLP with layers h: h₀h₁/n +
    Σ h_l·h_{l+1}/n² + h_L·C/n), and as much again for each moment that is carried. Memory per rank: P_sub·(2 + s) +
    P/n·(1 + s if carried), of s moments per parameter. The tensors of the model that you give are taken out of it.

    Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training", VLDB 2022.
    Blocks: Dun et al., "ResIST: Layer-Wise Decomposition of ResNets for Distributed Training", 2022.
    """

    allows_uneven = True
    keeps_model = False

    series: ClassVar = {
        "shares": Series(
            "Shares of the units", "lines", "The part of the units of each narrow network, after each epoch."
        )
    }

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        local_steps: PositiveInt = 16,  # τ: steps of a round; higher = fewer bytes, units mix less often
        cut: Cut = "units",  # units = hidden units, channels and attention heads; blocks = whole residual blocks
        subnets: PositiveInt | None = None,  # different narrow networks; default: one a rank; fewer = ranks share them
        branches: Branches = "small",  # residual ones begin small (1/n), for new networks; or given, for trained ones
        scale: Scale = "eval",  # train = units ×n in training; eval = units ×1/n in the whole network; norm = by norms
        optimizer_state: Literal["carry", "reset"] = "carry",  # carry = moments move with units; reset = begin at 0
        shares: Shares = "equal",  # units per network: equal, measured (by speed), or a list of weights, as [2, 1]
        calibration: NonNegativeInt = 8,  # batches that each rank keeps to measure BatchNorm's statistics; 0 = none
        whole_gb: PositiveFloat | None = None,  # largest model, in GB, that a rank puts together; default: what is free
        seed: Annotated[int, Field(ge=0)] = 0,  # random seed for the assignment of units
    ) -> None:
        self.comm, self.shard = comm, Shard(comm.rank, comm.size)
        self.local_steps, self.scale, self.seed = local_steps, scale, seed
        num_subnets = count_subnets(subnets, comm.size)
        self.options = [local_steps, cut, scale, num_subnets]  # that a saved state must agree with
        self.shares = UnitShares(shares, num_subnets, comm.size)
        self.skeleton, self.slices = model, find_slices(model, num_subnets, cut, scale)
        device, carries = device_of(model, comm), optimizer_state == "carry" or comm.size == 1
        carried = {name: p for name, p in model.named_parameters() if p.requires_grad} if carries else {}
        moments = probe_moments(recipe.optimizer, carried, device)  # may raise, so before the model is emptied
        self.sharded = shard_model(model, self.slices, comm, device)
        self.moments = ShardedMoments(self.slices, comm, device, *moments)
        self.whole = WholeNetwork(
            model, self.sharded, whole_gb, calibration, recipe.batch_loss.run, recipe.autocast
        )  # fmt: skip
        self.round, self.steps_in_round = 0, 0  # steps that this rank trained or skipped
        self.units = self._assign_units()
        if self._is_scaled:
            for name, factor in start_scales(model, self.slices, self.units, branches == "small").items():
                self.sharded.shards[name] /= factor
        with comm.ledger.purpose("start", instead_of="train"):
            self.model = self._narrow_network(self.sharded.deal(self.units))
        self.learner, self.exchange = Learner(self.model, recipe, optimizer_replaced_by="ist"), NoExchange(self.model)

    # ---- a round: assign units, train a narrow network, collect its slices

    def step(self, batch: Batch) -> Tensor:
        """Train the narrow network on one batch; begin a new round first if this one has had its `local_steps`.

        Rounds continue across the ends of epochs.
        """
        self._end_round_if_due()
        batch = to_device(batch, self.sharded.device)  # once, for the step and for what is kept of it
        with self.shares.counted_step():
            loss = self.learner.backward(batch, self.exchange)
            self.learner.update()
        self.whole.keep_inputs(self.learner.recipe.batch_loss.inputs(batch))
        self.steps_in_round += 1
        return loss

    def skip_step(self) -> None:
        """Take part in the rounds of others: this rank's slices are collected unchanged."""
        self._end_round_if_due()
        self.steps_in_round += 1
        self.learner.num_steps += 1

    def _end_round_if_due(self) -> None:
        if self.steps_in_round >= self.local_steps:
            self._collect_slices()
            self.round += 1
            self._begin_round()

    def _begin_round(self) -> None:
        """Assign units anew, and make the narrow network of this rank's slices. Collective."""
        self.units = self._assign_units()
        self._set_model(self._narrow_network(self.sharded.deal(self.units)))
        self.learner.new_optimizer(self.moments.deal(self.units))
        self.steps_in_round = 0
        self.shares.begin_round()

    def _collect_slices(self) -> None:
        """Send this rank's slices, and the moments of the optimizer, back into the shards. Collective."""
        slice_, moments = self._slice(), self.moments.take(self.model, self.learner.optimizer)
        contribution = self.shares.contribution(self.sharded.device)
        copy_non_persistent_buffers(self.model, self.skeleton)
        self.learner.release_model()
        self._set_model(nn.Module())  # so that nothing else keeps the tensors that are sent
        self.shares.update(self.sharded.collect(slice_, self.units, contribution))
        self.moments.collect(moments, self.units, contribution)

    def _assign_units(self) -> list[UnitIndices]:
        """I_l^w: the units of each axis l that each rank w has in this round; one list for all ranks of a subnet."""
        sizes = [axis.size for axis in self.slices.axes]
        of_subnets = assign_units(sizes, self.shares.weights, self.seed, self.round)
        return [of_subnets[rank % len(of_subnets)] for rank in range(self.comm.size)]

    def _narrow_network(self, slice_: dict[str, Tensor]) -> nn.Module:
        own_units = self.units[self.comm.rank]
        return narrow_network(self.skeleton, self.slices, own_units, slice_, scaled=self.scale == "train")

    def _set_model(self, model: nn.Module) -> None:
        self.model = self.learner.model = model
        self.exchange = NoExchange(model)

    def _slice(self) -> dict[str, Tensor]:
        """The tensors of this rank's narrow network."""
        return {name: t.detach() for name, t in named_tensors(self.model).items()}

    # ---- the whole network

    def status(self) -> dict[str, Any]:
        """The round, each narrow network's share of the units, and the size of this rank's."""
        size = self.slices.num_elements(self.units[self.comm.rank])
        return {"round": self.round, "shares": self.shares.fractions, "narrow_elements": size}

    def consolidate(self) -> nn.Module:
        """The whole network on every rank; RunError if it does not fit: see `eval_model` and `export`."""
        self.whole.check_fits()
        return self._make_whole(self.whole.assemble)

    def eval_model(self) -> nn.Module:
        """The whole network or, if that does not fit, one that fetches each layer when it runs."""
        if self.whole.fits():
            return self._make_whole(self.whole.assemble)
        say(f"ist: {self.whole.size_message()}, so it is tested layer by layer", self.comm.rank, once=True)
        return self._make_whole(self.whole.stream)

    def export(self, folder: Path | str, max_gb: float | None = None) -> None:
        """Write the whole network as safetensors files, of the size of a shard or of so many GB. Collective."""
        with self.comm.ledger.purpose("sync", instead_of="train"):
            export_model(Path(folder), self._make_whole(self.whole.stream), max_gb and int(1e9 * max_gb))

    def _make_whole(self, make: Callable[[ShardedTensors, Factors], M]) -> M:
        """The whole network as if the round ended now, from a copy of the shards. Collective."""
        with self.comm.ledger.purpose("sync", instead_of="train"):
            sharded = self.sharded.copy()
            sharded.collect(self._slice(), self.units, self.shares.contribution(self.sharded.device))
            return make(sharded, self._eval_scales(all_axes=not self.whole.is_calibrated))

    def _eval_scales(self, all_axes: bool = False) -> Factors:
        """1/n for tensors that sum over units, with scale=eval: their sums have n times as many terms in the whole."""
        return eval_scales(self.slices, self.units, all_axes) if self._is_scaled else {}

    @property
    def _is_scaled(self) -> bool:
        return self.scale == "eval" and self.comm.size > 1

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(), "shards": self.sharded.shards, "moments": self.moments.state_dict(),
            "inputs": self.whole.inputs.state(), "shares": self.shares.state_dict(), "round": self.round,
            "steps_in_round": self.steps_in_round, "seed": self.seed, "options": self.options, "ranks": self.comm.size,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("ranks") != self.comm.size or state["moments"]["shards"].keys() != self.moments.by_kind.keys():
            raise RunError("the saved state is of another number of ranks or another optimizer; use the same ones")
        if state["options"] != self.options:
            names = "(local_steps, cut, scale, subnets)"
            raise RunError(f"the saved state is of {names} {state['options']}, not {self.options}")
        self.round, self.steps_in_round, self.seed = state["round"], state["steps_in_round"], state["seed"]
        self.shares.load_state_dict(state["shares"])
        self.sharded.load_shards(state["shards"])
        self.moments.load_state_dict(state["moments"])
        self.whole.load_inputs(state["inputs"])
        self.units = self._assign_units()
        slice_ = {n: t for n, t in state["learner"]["model"].items() if isinstance(t, Tensor)}
        self._set_model(self._narrow_network({n: t.to(self.sharded.device, copy=True) for n, t in slice_.items()}))
        self.learner.new_optimizer()
        self.learner.load_state_dict(state["learner"])
