"""AB-training: weights as products of two factors, and groups of ranks that each train one factor separately.

A run goes through the phases of the paper; `ab_phases` has their lengths:

    warmup    all ranks train W together: data parallelism at full rank
    ab        W is factored into A·B, and each group trains A or B: gradients are averaged inside groups only
    rebound   the groups sync, W ← Ā·B̄, and all ranks train W together again, before it is factored anew
    joint     the end of the run, not in the paper: W is factored once more, and all ranks train A and B together
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.data import Batch, Shard, to_device
from thinwire.errors import RunError
from thinwire.exchange.calibration import RecentInputs, calibrate_batchnorm, steps_to_forget
from thinwire.exchange.factoring import make_factoring
from thinwire.exchange.gradients import GradientExchange, make_exchange
from thinwire.reducers.base import Reducer
from thinwire.reducers.mean import mean
from thinwire.reducers.states import carry_over, load_states, without_residuals
from thinwire.strategies.ab_groups import make_groups
from thinwire.strategies.ab_moments import PhaseMoments, full_rank_name, optimizer_states
from thinwire.strategies.ab_phases import Length, LengthOrZero, Phase, PhaseLengths, Phases, say_if_unplanned
from thinwire.strategies.ab_sync import Sync, average_groups
from thinwire.strategies.base import Artifact, SmallModel, Strategy, factored_artifact
from thinwire.strategies.groups import first_alike
from thinwire.strategies.learner import Learner
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.replicas import average_buffers, replicate
from thinwire.strategies.series import Series
from thinwire.surgery.low_rank_model import find_low_rank_layers
from thinwire.surgery.lowrank import factor_layers
from thinwire.surgery.memory_format import usual_copy
from thinwire.surgery.moments import OptimizerState, copy_state
from thinwire.surgery.rank_rule import RankRule
from thinwire.surgery.standard import to_standard_modules

Share = Annotated[float, Field(gt=0, lt=1)]
FACTORED = ("ab", "joint")  # phases in which weights are products


class AB(Strategy):
    """Train low-rank factors of the weights, in groups that communicate only inside themselves.

    After a warm-up of data parallelism each weight becomes W = A·B; singular values σᵢ ≤ cutoff·σ₁ are dropped.
    Half of the groups train A, half B, each on its own data. Every S steps the groups sync, W ← Ā·B̄. Then all ranks
    train W for D steps (rebound), and factor it anew. At the end of the run, all ranks train A and B together. Wire
    bytes per rank and step, of P parameters on n ranks in groups of g: 2(n−1)/n·4P in warm-up and rebound. Between them
    2(g−1)/g·4(N_A + N_o), or N_B instead of N_A, and none between groups. A sync, and each step of the joint phase,
    sends 2(n−1)/n·4(N_A + N_B + N_o); a sync with sync=full sends 4P instead. New factors are a broadcast of
    4(N_A + N_B). N_o is what is not factored: vectors, embeddings, first and last layer.

    Coquelin et al., "AB-Training: A Communication-Efficient Approach for Distributed Low-Rank Learning", 2024.
    """

    keeps_model, makes_small_model, has_phases = False, True, True

    series: ClassVar = {
        "layer_ranks": Series(
            "Rank of each layer",
            "heatmap",
            "Each row is a layer, the first one on top, and each column an epoch: the lighter a cell, the lower the "
            "rank that the layer was last given, and the smaller its two factors.",
            row="layer",
            cell="rank",
        )
    }

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        group_size: PositiveInt | None = None,  # ranks of a group; default: those of a node, or half of all ranks
        cutoff: Share = 0.15,  # drops singular values up to this share of the largest one
        min_rank: PositiveInt = 1,  # smallest rank that a layer may get
        sync: Sync = "learned",  # what groups average: learned = trained factors, stale = all factors, full = products
        sync_every: Length | None = None,  # S: steps between two averages over groups; default: 0.105 of the run
        warmup: LengthOrZero | None = None,  # Wu: steps at full rank in the beginning; default: 2·S
        rebound: Length | None = None,  # D: steps at full rank after each average over groups; default: S·60/759
        climb: LengthOrZero | None = None,  # R: learning-rate warm-up after each change of phase; default: S·267/759
        joint: LengthOrZero | None = None,  # steps in which all train both factors, at the end; default: ½·(run − Wu)
        unit: Literal["steps", "epochs"] = "steps",  # of all lengths of phases: steps or epochs
        moments: Literal["rotate", "slice", "reset"] = "reset",  # optimizer state of a new phase: rotate, slice, reset
        calibration: NonNegativeInt = 8,  # batches that each rank keeps to measure BatchNorm's statistics; 0 = none
        reducer: Reducer = mean(),  # how gradients are averaged
    ) -> None:
        self.model, self.recipe, self.comm, self.shard = model, recipe, comm, Shard(comm.rank, comm.size)
        self.sync, self.reducer, self.epochs, self.steps = sync, reducer, recipe.epochs, recipe.steps
        self.lengths = PhaseLengths(sync_every, warmup, rebound, climb, joint, unit)
        self.phases = self.lengths.phases_before_first_epoch(recipe.epochs, recipe.steps)
        self.phase: Phase = "warmup"
        self.phase_start = 0  # the first step of this phase
        self.num_epoch_steps = 0  # steps done in this epoch
        self.factoring = make_factoring(model, comm, RankRule(cutoff, min_rank), "ab")
        self.layer_ranks: dict[str, int] = {}  # of the layers that were factored last
        replicate(model, comm)
        self.groups = make_groups(comm, group_size)
        self.group = comm.split(self.groups.ranks, "group")
        self.role, self.moments = self.groups.role_of(comm.rank), PhaseMoments(moments)
        self.learner = Learner(model, recipe, optimizer_replaced_by="ab")
        self.inputs = RecentInputs(model, calibration, self.learner.device)
        self.exchange: GradientExchange = make_exchange(model, reducer, comm)

    def begin_epoch(self, num_steps: int | None) -> None:
        if num_steps:
            self._plan_phases(num_steps)

    def step(self, batch: Batch) -> Tensor:
        step = self.learner.num_steps
        phase = self.phases.at(step) if self.phases else "warmup"
        if phase != self.phase:
            self._enter_phase(phase)
        batch = to_device(batch, self.learner.device)  # once, for the step and for what is kept of it
        loss = self.learner.backward(batch, self.exchange)
        self.learner.update(self.phases.lr_warmup(step, self.phase_start) if self.phases else 1.0)
        self.inputs.keep(self.recipe.batch_loss.inputs(batch))
        self.num_epoch_steps += 1
        return loss

    def end_epoch(self) -> None:
        if self.num_epoch_steps and self.lengths.is_unplanned(self.phases, self.epochs):
            self.phases = self.lengths.phases(self.epochs, self.num_epoch_steps, self.steps)
        self.num_epoch_steps = 0

    # ---- phases

    def _plan_phases(self, epoch_steps: int) -> None:
        """Plan once: a later epoch of another length, or more epochs after a resume, change nothing."""
        if self.phases and (self.learner.num_steps or not self.epochs):
            return
        self.phases = self.lengths.phases(self.epochs, epoch_steps, self.steps)
        self.phases.say_if_no_sync(self.steps or (self.epochs or 0) * epoch_steps, self.comm.rank)

    def _enter_phase(self, phase: Phase) -> None:
        """Sync the groups and merge the factors after an ab phase; factor W before an ab phase or the joint one."""
        states = optimizer_states(self.model, self.learner.optimizer, self.layer_ranks)
        if self.phase == "ab":
            self._sync_groups(self.model)
            self.factoring.merge(self.model)
            states = self.moments.for_full_rank(states)
        if phase in FACTORED:
            self.layer_ranks = self.factoring.decompose(self.model)
            self.factoring.say_if_none(self.layer_ranks)
            new_states = self.moments.for_joint if phase == "joint" else self.moments.for_factors
            states = new_states(states, self.factoring.factored_layers(self.model))
            old_factors = {f"{name}.{factor}.weight" for name in self.layer_ranks for factor in ("up", "down")}
            self.exchange.states = without_residuals(self.exchange.states, old_factors)
        self.phase, self.phase_start = phase, self.learner.num_steps
        self._begin_phase(states)

    def _begin_phase(self, states: Mapping[str, OptimizerState]) -> None:
        """Train everything with all ranks or, in an ab phase, this group's factor and the rest inside the group."""
        factors = self.role if self.phase == "ab" else "AB"
        for layer in self.factoring.factored_layers(self.model).values():
            layer.A.requires_grad_("A" in factors)
            layer.B.requires_grad_("B" in factors)
        full_names = {name: full_rank_name(name, self.layer_ranks) for name, _ in self.model.named_parameters()}
        self.learner.new_optimizer({name: states[full] for name, full in full_names.items() if full in states})
        reducer_states = self.exchange.states
        del self.exchange  # before the next one is made: both hook the same parameters
        self.exchange = make_exchange(self.model, self.reducer, self.group if self.phase == "ab" else self.comm)
        self.exchange.states = carry_over(self.exchange.states, reducer_states)

    def _sync_groups(self, model: nn.Module) -> None:
        average_groups(model, self.sync, self.factoring, self.groups, self.comm)

    def representatives(self) -> list[int]:
        return first_alike([self.groups.role_of(rank) for rank in range(self.comm.size)])

    # ---- results and states

    def status(self) -> dict[str, Any]:
        """The phase, and of each layer the layer rank that it was last given and the largest possible one."""
        largest = self.factoring.largest_ranks.items()
        return {"phase": self.phase, "layer_ranks": {n: [self.layer_ranks.get(n, most), most] for n, most in largest}}

    def artifacts(self) -> list[Artifact]:
        """The model with low-rank layers as two thin ones, if any layer has a low rank."""
        small = self.small_model()
        return [] if small is None else [factored_artifact(small.model)]

    def small_model(self) -> SmallModel | None:
        if not self.layer_ranks:
            return None
        model = self.consolidate(factored=True)
        return SmallModel(model, find_low_rank_layers(model, self.factoring.layers))

    def consolidate(self, factored: bool = False) -> nn.Module:
        """The model that a sync now would give; with `factored`, low-rank layers as two thin ones."""
        if self.phases is None:
            say_if_unplanned(self.learner.num_steps, self.comm.rank)
        self.factoring.note_read_layers(self.model)
        whole = usual_copy(self.model)
        statistics_fit = self._statistics_fit()
        if self.phase == "ab":
            self._sync_groups(whole)
        average_buffers(whole, self.comm)
        if not factored:
            self.factoring.merge(whole)
        elif self.phase not in FACTORED or (self.phase == "ab" and self.sync == "full"):
            statistics_fit &= not self.factoring.decompose(whole)
        if not statistics_fit:
            with self.comm.ledger.purpose("sync", instead_of="train"):
                calibrate_batchnorm(whole, self.inputs, self.comm, self.recipe.batch_loss.run, self.recipe.autocast)
        for layer in self.factoring.factored_layers(whole).values():
            layer.A.requires_grad_(True)
            layer.B.requires_grad_(True)
        return to_standard_modules(whole, self.factoring.layers_read_on_any_rank() if factored else ())

    def _statistics_fit(self) -> bool:
        """Whether BatchNorm's running statistics are of the model that ranks have now, together: see `calibration`."""
        is_new = self.phase_start > 0 and self.learner.num_steps < self.phase_start + steps_to_forget(self.model)
        return not is_new and (self.phase != "ab" or len(self.groups.ranks) == 1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(), "reducer": self.exchange.states, "kept": self.moments.previous,
            "phases": None if self.phases is None else asdict(self.phases), "groups": self.groups.ranks,
            "ranks": self.layer_ranks, "phase": self.phase, "began": self.phase_start,
            "num_epoch_steps": self.num_epoch_steps, "read": sorted(self.factoring.read_layers),
            "inputs": self.inputs.state(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["groups"] != self.groups.ranks or not state["ranks"].keys() <= set(self.factoring.layers):
            raise RunError("the saved state is of another model or of other groups; use the same ones")
        self.phases = None if state["phases"] is None else Phases(**state["phases"])
        self.phase, self.phase_start, self.num_epoch_steps = state["phase"], state["began"], state["num_epoch_steps"]
        self.layer_ranks = dict(state["ranks"])
        device = next(self.model.parameters()).device
        self.moments.previous = {name: copy_state(moments, device) for name, moments in state["kept"].items()}
        self.factoring.read_layers |= set(state["read"])
        self.inputs.load(state.get("inputs", []))  # earlier versions kept none
        self.factoring.merge(self.model)
        if self.phase in FACTORED:
            factor_layers(self.model, self.layer_ranks)
        self._begin_phase({})
        self.learner.load_state_dict(state["learner"])
        self.exchange.states = load_states(self.exchange.states, state["reducer"])
