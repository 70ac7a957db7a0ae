"""Independent subnet training: every rank trains a narrow network of its own, made of units that it was dealt."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from thinwire.comm.base import Comm
from thinwire.common.messages import say
from thinwire.common.tensors import named_tensors
from thinwire.data import Batch, Shard
from thinwire.errors import RunError, UsageError
from thinwire.exchange.assembly import assemble, free_bytes
from thinwire.exchange.calibration import calibrate_batchnorm
from thinwire.exchange.export import export_model
from thinwire.exchange.gradients import NoExchange
from thinwire.exchange.sharded import Contribution, ShardedTensors
from thinwire.exchange.streamed import StreamedModel
from thinwire.strategies.base import Series, Strategy
from thinwire.strategies.learner import Learner, Recipe
from thinwire.strategies.replicas import say_if_changed
from thinwire.surgery.attention import unpack_attention
from thinwire.surgery.axes.axis import Axis
from thinwire.surgery.axes.find import axes_of
from thinwire.surgery.axes.residual import residual_blocks_of
from thinwire.surgery.meta import copy_non_persistent_buffers, initial_tensors, to_meta
from thinwire.surgery.moments import Moment, OptimizerState, copy_state, probe_optimizer
from thinwire.surgery.narrow import eval_scales, narrow_network
from thinwire.surgery.slices import Slices, UnitIndices
from thinwire.surgery.standard import to_standard_modules
from thinwire.surgery.unit_assignment import assign_units

Tensors = dict[str, Tensor]
Cut = Literal["units", "blocks"]
Scale = Literal["train", "eval", "norm"]
Shares = Literal["equal", "measured"] | list[PositiveFloat]


class IST(Strategy):
    """Each rank trains a narrow network of random units; after each round they are merged and drawn anew.

    Each round the units of every hidden layer are dealt out: W_l^w = W_l[I_l^w, I_{l−1}^w], of the same depth on every
    rank w. For `local_steps` steps each rank trains its own on its own data, and nothing is sent. Then slices go home,
    and new ones are dealt. Elements whose two ends went to different ranks stay home as they are; what all have is
    averaged. Wire bytes per rank and round, of n ranks: 2(n−1)/n·4·P_sub, of P_sub elements of a narrow network (of an
    MLP with layers h: h₀h₁/n + Σ h_l·h_{l+1}/n² + h_L·C/n), and as much again for each moment that is carried. Memory
    per rank: P_sub·(2 + s) + P/n·(1 + s if carried), of s moments per parameter. The model that you give is emptied.

    Yuan et al., "Distributed Learning of Fully Connected Neural Networks using Independent Subnet Training", VLDB 2022.
    Blocks: Dun et al., "ResIST: Layer-Wise Decomposition of ResNets for Distributed Training", 2022.
    """

    allows_uneven = True

    series: ClassVar = {
        "shares": Series(
            "Shares of the units", "lines", "The part of the units that each rank was dealt, after each epoch."
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
        scale: Scale = "eval",  # train = units ×n in training; eval = units ×1/n in the whole; norm = by norm layers
        optimizer_state: Literal["carry", "reset"] = "carry",  # carry = moments move with units; reset = begin at 0
        shares: Shares = "equal",  # units per rank: equal, measured (by speed), or a list of weights, as [2, 1]
        calibration: NonNegativeInt = 8,  # batches that each rank keeps to measure BatchNorm's statistics; 0 = none
        whole_gb: PositiveFloat | None = None,  # largest model, in GB, that a rank puts together; default: what is free
        seed: Annotated[int, Field(ge=0)] = 0,  # random seed for drawing units
    ) -> None:
        self.shard = Shard(comm.rank, comm.size)
        self.comm, self.recipe = comm, recipe
        self.local_steps, self.scale, self.seed, self.whole_gb = local_steps, scale, seed, whole_gb
        self.options = [local_steps, cut, scale]
        self.is_measured = shares == "measured"
        self.shares = [1.0] * comm.size if isinstance(shares, str) else [float(share) for share in shares]
        if len(self.shares) != comm.size:
            raise UsageError(
                f"ist: shares={self.shares} for {comm.size} ranks; give one number for each rank, as [2, 1] for two"
            )
        self.skeleton, self.slices = model, _sliced(model, comm.size, cut, scale)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        carried = optimizer_state == "carry" or comm.size == 1
        device = _device(model)
        kinds, self.counts = _kinds(recipe, trained, device) if carried else ({}, {})
        self.homes = self._moved_in(model, device)
        self.moments = {
            kind: ShardedTensors(
                self.slices, comm, device, {name: k.dtype for name, k in of.items()}, next(iter(of.values())).initial
            )
            for kind, of in kinds.items()
        }
        self.counters: dict[str, OptimizerState] = {}  # what else the optimizer remembers: it has no shape to cut
        self.uncalibrated = calibration == 0  # statistics are then those of narrow networks
        self.recent: deque[Tensor] = deque(maxlen=calibration if _has_statistics(model) else 0)

        self.round = 0
        self.num_here = 0  # steps of this round, with those that this rank had no batch for
        self.num_trained = 0  # steps of this round
        self.seconds = 0.0  # that they took
        self.hands = self._dealt()
        for name, factor in self._factors().items():
            self.homes.shards[name] /= factor  # the whole network is the one that was given
        with comm.ledger.purpose("start"):
            self.model = self._narrow(self.homes.deal(self.hands))
        self.learner = Learner(self.model, recipe, optimizer_replaced_by="ist")
        self.exchange = NoExchange(self.model)

    # ---- training

    def begin_epoch(self, num_steps: int | None) -> None:
        pass

    def step(self, batch: Batch) -> Tensor:
        self._turn_if_due()
        begin = time.perf_counter()
        loss = self.learner.backward(batch, self.exchange)
        self.learner.update()
        self.seconds += time.perf_counter() - begin
        if self.recent.maxlen:
            self.recent.append(batch[0].detach().to(self.homes.device, copy=True))
        self.num_here += 1
        self.num_trained += 1
        return loss

    def skip_step(self) -> None:
        """Take part in rounds of others: this rank's units go home as they came."""
        self._turn_if_due()
        self.num_here += 1
        self.learner.num_steps += 1

    def end_epoch(self) -> None:
        """Nothing: rounds go on over the ends of epochs."""

    def _turn_if_due(self) -> None:
        if self.num_here >= self.local_steps:
            self._send_home()
            self._begin_round()

    def _send_home(self) -> None:
        tensors, moments = self._tensors(), {kind: self._remembered(kind) for kind in self.moments}
        if self.moments:
            self.counters |= {name: self._counts_of(p) for name, p in self.model.named_parameters() if p.requires_grad}
        report = self._report()
        copy_non_persistent_buffers(self.model, self.skeleton)
        self.model = nn.Module()  # so that nothing else holds what leaves
        self.exchange = NoExchange(self.model)
        self.learner.release_model()
        reports = self.homes.collect(tensors, self.hands, report)
        for kind, homes in self.moments.items():
            homes.collect(moments.pop(kind), self.hands, report)
        if self.is_measured:
            self.shares = _balanced(self.shares, reports)
        self.round += 1

    def _begin_round(self) -> None:
        self.hands = self._dealt()
        self.model = self.learner.model = self._narrow(self.homes.deal(self.hands))
        self.exchange = NoExchange(self.model)
        moments = {kind: homes.deal(self.hands) for kind, homes in self.moments.items()}
        other_counts = next(iter(self.counters.values()), self.counts)
        self.learner.new_optimizer(
            {
                name: copy_state(self.counters.get(name, other_counts))
                | {kind: moments[kind][name] for kind in moments}
                for name, p in self.model.named_parameters()
                if moments and p.requires_grad
            }
        )
        self.num_here, self.num_trained, self.seconds = 0, 0, 0.0

    def _dealt(self) -> list[UnitIndices]:
        return assign_units([axis.size for axis in self.slices.axes], self.shares, self.seed, self.round)

    def _narrow(self, tensors: Tensors) -> nn.Module:
        return narrow_network(
            self.skeleton, self.slices, self.hands[self.comm.rank], tensors, scaled=self.scale == "train"
        )

    def _tensors(self) -> Tensors:
        """Those of this rank's network."""
        return {name: t.detach() for name, t in named_tensors(self.model).items()}

    def _remembered(self, kind: str) -> Tensors:
        """What this rank's optimizer remembers of them; what it has not seen is as at the start."""
        state, homes = self.learner.optimizer.state, self.moments[kind]
        return {
            name: state[p][kind]
            if p in state
            else torch.full_like(p, homes.fill_value, dtype=homes.layout.dtypes[name])
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def _counts_of(self, parameter: Tensor) -> OptimizerState:
        state = self.learner.optimizer.state.get(parameter) or self.counts
        return {key: value for key, value in state.items() if key not in self.moments}

    def _report(self) -> Contribution:
        if self.is_measured and self.homes.device.type == "cuda":
            begin = time.perf_counter()
            torch.cuda.synchronize(self.homes.device)
            self.seconds += time.perf_counter() - begin
        return Contribution(self.num_trained, self.seconds)

    # ---- the whole network

    def status(self) -> dict[str, Any]:
        """The round, each rank's share of the units, and the size of this rank's network."""
        shares = [share / sum(self.shares) for share in self.shares]
        return {"round": self.round, "shares": shares, "subnet": self.slices.num_elements(self.hands[self.comm.rank])}

    def consolidate(self) -> nn.Module:
        """The whole network on every rank; refused where it does not fit: see `eval_model` and `export`."""
        if not self._fits():
            raise RunError(
                f"the whole network takes {self.homes.num_bytes / 1e9:.3g} GB, more than {self._limit()}; "
                "trainer.eval_model() runs it layer by layer, trainer.export(folder) writes it to files, and "
                "ist(whole_gb=…) sets the limit"
            )
        return self._whole()

    def eval_model(self) -> nn.Module:
        """The whole network or, where that does not fit, one that fetches each layer when it runs."""
        if self._fits():
            return self._whole()
        say(
            f"ist: the whole network takes {self.homes.num_bytes / 1e9:.3g} GB, more than {self._limit()}, so it is "
            "tested layer by layer", self.comm.rank, once=True,
        )  # fmt: skip
        return self._streamed()

    def export(self, folder: Path | str, max_gb: float | None = None) -> None:
        """Write the whole network as safetensors files, of the size of a home or of so many GB. Collective."""
        with self.comm.ledger.purpose("sync", instead_of="train"):
            export_model(Path(folder), self._streamed(), max_gb and int(1e9 * max_gb))

    def _whole(self) -> nn.Module:
        with self.comm.ledger.purpose("sync", instead_of="train"):
            whole = assemble(self.skeleton, self._collected(), self._factors(self.uncalibrated))
            calibrate_batchnorm(whole, self.recent, self.comm, self.recipe.autocast)
        return whole

    def _streamed(self) -> StreamedModel:
        with self.comm.ledger.purpose("sync", instead_of="train"):
            model = StreamedModel(self.skeleton, self._collected(), self._factors(self.uncalibrated))
            calibrate_batchnorm(model, self.recent, self.comm, self.recipe.autocast)
        return model

    def _collected(self) -> ShardedTensors:
        """Homes as they were if the round ended now."""
        homes = self.homes.copy()
        homes.collect(self._tensors(), self.hands, self._report())
        return homes

    def _factors(self, all_axes: bool = False) -> dict[str, float]:
        return eval_scales(self.slices, self.hands, all_axes) if self.scale == "eval" and self.comm.size > 1 else {}

    def _limit(self) -> str:
        return f"whole_gb={self.whole_gb:g}" if self.whole_gb else "some rank has room for"

    def _fits(self) -> bool:
        limit = 1e9 * self.whole_gb if self.whole_gb else free_bytes(self.homes.device, self.comm)
        with self.comm.ledger.purpose("sync", instead_of="train"):
            return bool(self.comm.min(torch.tensor([self.homes.num_bytes <= limit], dtype=torch.uint8)))

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(), "homes": self.homes.shards,
            "moments": {kind: homes.shards for kind, homes in self.moments.items()}, "counters": self.counters,
            "recent": list(self.recent), "shares": self.shares, "round": self.round, "seed": self.seed,
            "options": self.options,
            "num_here": self.num_here, "num_trained": self.num_trained, "seconds": self.seconds,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["shares"]) != self.comm.size or state["moments"].keys() != self.moments.keys():
            raise RunError("the saved state is of another number of ranks or another optimizer; use the same ones")
        if state["options"] != self.options:
            raise RunError(f"the saved state is of (local_steps, cut, scale) {state['options']}, not {self.options}")
        self.round, self.shares, self.seed = state["round"], list(state["shares"]), state["seed"]
        self.num_here, self.num_trained, self.seconds = state["num_here"], state["num_trained"], state["seconds"]
        self.counters = {name: copy_state(counts) for name, counts in state["counters"].items()}
        self.recent.clear()
        self.recent.extend(x.to(self.homes.device) for x in state["recent"])
        self.homes.load_shards(state["homes"])
        for kind, homes in self.moments.items():
            homes.load_shards(state["moments"][kind])
        self.hands = self._dealt()
        trained = {
            name: t.to(self.homes.device, copy=True)
            for name, t in state["learner"]["model"].items()
            if isinstance(t, Tensor)
        }
        self.model = self.learner.model = self._narrow(trained)
        self.exchange = NoExchange(self.model)
        self.learner.new_optimizer()
        self.learner.load_state_dict(state["learner"])

    # ---- how it begins

    def _moved_in(self, model: nn.Module, device: torch.device) -> ShardedTensors:
        """The model's tensors in their homes, rank 0's of each; the model is left empty."""
        homes = ShardedTensors(
            self.slices, self.comm, device, {name: t.dtype for name, t in self.slices.tensors.items()}
        )
        given = {name: t for name, t in to_meta(model).items() if not t.is_meta}
        if self.comm.rank == 0 and len(given) < len(self.slices.tensors):
            given = initial_tensors(model, device) | given
        with self.comm.ledger.purpose("start"):
            homes.scatter(given)
            own = [homes.shard_of(name, tensor) for name, tensor in given.items()]
            say_if_changed(own, [homes.shards[name] for name in given], self.comm)
        return homes


def _device(model: nn.Module) -> torch.device:
    """Where a model's tensors are; one without any goes where torch makes new ones."""
    real = [t.device for t in named_tensors(model).values() if not t.is_meta]
    return real[0] if real else torch.get_default_device()


def _kinds(
    recipe: Recipe, trained: dict[str, nn.Parameter], device: torch.device
) -> tuple[dict[str, dict[str, Moment]], OptimizerState]:
    """By kind of moment, what it is of each parameter; and the optimizer's counters."""
    asked = {
        dtype: probe_optimizer(recipe.optimizer, torch.empty(0, dtype=dtype, device=device))
        for dtype in {p.dtype: None for p in trained.values()}
    }
    kinds: dict[str, dict[str, Moment]] = {}
    for name, parameter in trained.items():
        for kind, about in asked[parameter.dtype][0].items():
            kinds.setdefault(kind, {})[name] = about
    return kinds, next(iter(asked.values()))[1] if asked else {}


def _sliced(model: nn.Module, ranks: int, cut: str, scale: str) -> Slices:
    """What can be dealt of a model, or an error that leaves it as it was."""
    unpack_attention(model)
    try:
        slices = Slices(model, residual_blocks_of(model) if cut == "blocks" else axes_of(model))
        slices.check(model, ranks, scale == "train")
        if scale == "norm":
            bare = [next(iter(axis.used_by)) for axis in slices.axes if isinstance(axis, Axis) and not axis.normed]
            if bare or cut == "blocks":
                raise UsageError(f"scale=norm, but no norm follows {(bare or ['a block'])[0]}; try scale=eval")
    except UsageError as error:
        to_standard_modules(model)
        raise UsageError(f"ist: {error}") from None
    return slices


def _has_statistics(model: nn.Module) -> bool:
    return any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules())


def _balanced(shares: list[float], reports: list[Contribution]) -> list[float]:
    """Shares with which a step takes about equally long everywhere, half of the way there.

    Pulled towards 1 and held between ¼ and 4, because time may not depend on units at all.
    """
    if not all(report.steps and report.seconds for report in reports):
        return shares
    moved = [
        share**0.9 * (report.seconds / report.steps) ** -0.5 for share, report in zip(shares, reports, strict=True)
    ]
    mean = sum(moved) / len(moved)
    return [min(4.0, max(0.25, share / mean)) for share in moved]
