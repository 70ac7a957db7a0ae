"""AB-training: weights as products of two factors, and groups that each train one of them on their own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from thinwire.comm.base import Comm
from thinwire.comm.collectives import coalesced
from thinwire.common.messages import say
from thinwire.data import Batch, Shard
from thinwire.errors import RunError, UsageError
from thinwire.exchange.factoring import Factoring
from thinwire.exchange.gradients import GradientExchange, make_exchange
from thinwire.reducers.base import Reducer
from thinwire.reducers.mean import mean
from thinwire.reducers.states import carry_over, load_states
from thinwire.strategies.base import Artifact, Series, Strategy
from thinwire.strategies.groups import groups_of, nodes_of
from thinwire.strategies.learner import Learner, Recipe
from thinwire.strategies.phases import Lengths, Phase, Phases
from thinwire.strategies.replicas import average_buffers, replicate
from thinwire.surgery.attention import unpack_attention
from thinwire.surgery.moments import OptimizerState, copy_state, resize_state, rotate_state
from thinwire.surgery.standard import to_standard_modules

Length = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LengthOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class AB(Strategy):
    """Train low-rank factors of the weights, in groups that communicate only inside themselves.

    After a warm-up of plain data parallelism each weight becomes W = A·B, without its σᵢ ≤ cutoff·σ₁. Half of the
    groups train A, half B, each on its own data. Every S steps all meet, W ← Ā·B̄, train W together for a while
    (rebound), and factor it anew. Wire bytes per rank and step, of P parameters on n ranks in groups of g: 2(n−1)/n·4P
    in warm-up and rebound; else 2(g−1)/g·4(N_A + N_o), or with N_B, inside groups and none between them;
    2(n−1)/n·4(N_A + N_B + N_o) at a meeting (4P with sync=full), and a broadcast of 4(N_A + N_B) for new factors. N_o
    is what is not factored: vectors, embeddings, first and last layer.

    Coquelin et al., "AB-Training: A Communication-Efficient Approach for Distributed Low-Rank Learning", 2024.
    """

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
        cutoff: Annotated[float, Field(gt=0, lt=1)] = 0.15,  # drops singular values up to this share of the largest
        sync: Literal[
            "learned", "stale", "full"
        ] = "learned",  # what groups average: learned = factors that they trained, stale = all factors, full = products
        sync_every: Length | None = None,  # S: steps between two averages over groups; default: 0.105 of the run
        warmup: LengthOrZero | None = None,  # Wu: steps at full rank in the beginning; default: 2·S
        rebound: Length | None = None,  # D: steps at full rank after each average over groups; default: S·60/759
        climb: LengthOrZero | None = None,  # R: learning-rate warm-up after each change of phase; default: S·267/759
        unit: Literal["steps", "epochs"] = "steps",  # of sync_every, warmup, rebound and climb: steps or epochs
        moments: Literal["rotate", "slice", "reset"] = "reset",  # optimizer state of a new phase: rotate, slice, reset
        reducer: Reducer = mean(),  # how gradients are averaged
    ) -> None:
        self.shard = Shard(comm.rank, comm.size)
        self.comm = comm
        self.model = model
        self.sync, self.moments, self.reducer = sync, moments, reducer
        self.lengths, self.epochs = Lengths(sync_every, warmup, rebound, climb, unit), recipe.epochs
        if not self.lengths.in_steps and recipe.epochs is None:
            raise UsageError(
                "ab has phases, so it must know how long the run is: prepare(…, epochs=90), and tw.epoch(trainer, "
                "batches, comm) for each of them; or give ab(sync_every=…) in steps"
            )
        self.phases: Phases | None = self.lengths.phases(None, 0) if self.lengths.in_steps else None

        self.factoring = _opened(model, comm, cutoff)
        replicate(model, comm)
        self.groups = groups = _groups(comm, group_size)
        self.group = comm.split(groups, "group")
        roles = ["A" if i % 2 == 0 else "B" for i in range(len(groups))] if len(groups) > 1 else ["AB"]
        self.role = next(role for role, group in zip(roles, groups, strict=True) if comm.rank in group)
        self.num_training = {x: sum(len(g) for g, role in zip(groups, roles, strict=True) if x in role) for x in "AB"}

        self.phase: Phase = "warmup"
        self.began = 0  # the first step of this phase
        self.num_epoch_steps = 0  # done of this epoch
        self.ranks: dict[str, int] = {}  # that layers got when they were last factored; full ones are not in it
        self.kept: dict[str, OptimizerState] = {}  # moments at the end of the phase before
        self.learner = Learner(model, recipe, renewed_by="ab")
        self.exchange: GradientExchange = make_exchange(model, reducer, comm)

    def begin_epoch(self, num_steps: int | None) -> None:
        if num_steps:
            self._plan(num_steps)

    def step(self, batch: Batch) -> Tensor:
        step = self.learner.num_steps
        phase = self.phases.at(step) if self.phases else "warmup"
        if phase != self.phase:
            self._enter(phase)
        loss = self.learner.backward(batch, self.exchange)
        self.learner.update(self.phases.ease(step, self.began) if self.phases else 1.0)
        self.num_epoch_steps += 1
        return loss

    def end_epoch(self) -> None:
        if not self.phases and self.num_epoch_steps:
            self._plan(self.num_epoch_steps)
        self.num_epoch_steps = 0

    def _plan(self, epoch_steps: int) -> None:
        """Before the run begins: a later epoch of another length, or more epochs after a resume, change nothing."""
        if self.phases and (self.learner.num_steps or not self.epochs):
            return
        self.phases = self.lengths.phases(self.epochs, epoch_steps)
        total = (self.epochs or 0) * epoch_steps
        if total and self.phases.first_meeting >= total:
            say(
                f"ab: groups meet every {self.phases.every} steps, so only at the end of the run of {total}",
                self.comm.rank,
                once=True,
            )

    # ---- from one phase to the next

    def _enter(self, phase: Phase) -> None:
        before = self._moments()
        if phase == "ab":
            self.ranks = self.factoring.decompose(self.model)
            if not self.ranks:
                say(
                    f"ab: with cutoff={self.factoring.cutoff} no layer's rank is low enough to make it smaller, so all "
                    "stay full and groups only train apart; try a higher cutoff, more weight decay or a longer run",
                    self.comm.rank,
                    once=True,
                )
        else:
            self._average(self.model)
            self.factoring.merge(self.model)
        self.phase, self.began = phase, self.learner.num_steps
        self._begin(self._followed(before))

    def _begin(self, states: Mapping[str, OptimizerState]) -> None:
        """Train what this phase trains: all of W with all ranks, or this group's factors inside the group."""
        for layer in self.factoring.factored_layers(self.model).values():
            layer.A.requires_grad_("A" in self.role)
            layer.B.requires_grad_("B" in self.role)
        full_names = {name: self._full_name(name) for name, _ in self.model.named_parameters()}
        self.learner.renew({name: states[full] for name, full in full_names.items() if full in states})
        remembered = self.exchange.states
        del self.exchange  # before the next one is made: it watches the same parameters
        self.exchange = make_exchange(self.model, self.reducer, self.group if self.phase == "ab" else self.comm)
        self.exchange.states = carry_over(self.exchange.states, remembered)

    @torch.no_grad()
    def _average(self, model: nn.Module) -> None:
        """The mean over all ranks, of factors by the rule of `sync`."""
        if self.sync == "full":
            self.factoring.merge(model)  # (1/n)·Σ AᵢBᵢ
        if self.sync == "learned":  # (1/n_A)·Σ Aᵢ over those that trained A, and B likewise
            for layer in self.factoring.factored_layers(model).values():
                for x, weight in (("A", layer.A), ("B", layer.B)):
                    weight.mul_(self.comm.size / self.num_training[x] if x in self.role else 0.0)
        factors = {id(w) for layer in self.factoring.factored_layers(model).values() for w in (layer.A, layer.B)}
        with self.comm.ledger.purpose("sync", instead_of="train"):
            coalesced([p for p in model.parameters() if p.requires_grad or id(p) in factors], self.comm.mean)

    # ---- what the optimizer remembers

    def _moments(self) -> dict[str, OptimizerState]:
        """The optimizer's state, by the names that parameters have while nothing is factored."""
        state = self.learner.optimizer.state
        return {self._full_name(name): state[p] for name, p in self.model.named_parameters() if p in state}

    def _full_name(self, name: str) -> str:
        layer, _, last = name.rpartition(".up.")
        return f"{layer}.bias" if layer in self.ranks and last == "bias" else name

    def _followed(self, before: dict[str, OptimizerState]) -> dict[str, OptimizerState]:
        """What to remember in the phase that begins.

        Full-rank phases go on from where the last one ended: that is the same on every rank, and costs no bytes.
        """
        if self.moments == "reset":
            return {}
        last, self.kept = self.kept, {name: copy_state(state) for name, state in before.items()}
        if self.phase != "ab":
            return last
        followed = dict(before)
        for name, layer in self.factoring.factored_layers(self.model).items():
            up, down = f"{name}.up.weight", f"{name}.down.weight"
            if self.moments == "rotate":
                followed[up], followed[down] = rotate_state(before.get(f"{name}.weight", {}), layer)
            else:
                followed[up] = resize_state(last.get(up, {}), layer.up.weight)
                followed[down] = resize_state(last.get(down, {}), layer.down.weight)
        return followed

    # ---- results and states

    def status(self) -> dict[str, Any]:
        """The phase, and of each layer the rank that it was last given and the largest that it could have."""
        ranks = {
            name: [self.ranks.get(name, largest), largest] for name, largest in self.factoring.largest_ranks.items()
        }
        return {"phase": self.phase, "layer_ranks": ranks}

    def artifacts(self) -> list[Artifact]:
        """The model with low-rank layers as two thin ones, if any layer has a low rank."""
        if not self.ranks:
            return []
        about = "the trained model with low-rank layers as two thin ones"
        model, file = self.consolidate(factored=True), "model-factored.safetensors"
        return [Artifact("factored", about, model, file, column="Factored model", computes_the_same=True)]

    def consolidate(self, factored: bool = False) -> nn.Module:
        """What a meeting now would give; with `factored`, as two thin layers for each weight that has a low rank."""
        if self.phases is None and self.learner.num_steps:
            say(
                f"ab trains at full rank until it knows how long an epoch is, and after {self.learner.num_steps} steps "
                "does not; write `for batch in tw.epoch(trainer, batches, comm)`, or give ab(sync_every=…) in steps",
                self.comm.rank,
                once=True,
            )
        self.factoring.note_read_layers(self.model)
        whole = copy.deepcopy(self.model)
        if self.phase == "ab":
            self._average(whole)
        average_buffers(whole, self.comm)
        if not factored:
            self.factoring.merge(whole)
        elif self.phase != "ab" or self.sync == "full":
            self.factoring.decompose(whole)
        for layer in self.factoring.factored_layers(whole).values():
            layer.A.requires_grad_(True)
            layer.B.requires_grad_(True)
        return to_standard_modules(whole, self.factoring.layers_read_on_any_rank() if factored else ())

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(), "reducer": self.exchange.states, "kept": self.kept,
            "phases": None if self.phases is None else asdict(self.phases), "groups": self.groups, "ranks": self.ranks,
            "phase": self.phase, "began": self.began, "num_epoch_steps": self.num_epoch_steps,
            "read": sorted(self.factoring.read_layers),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["groups"] != self.groups or not state["ranks"].keys() <= set(self.factoring.layers):
            raise RunError("the saved state is of another model or of other groups; use the same ones")
        self.phases = None if state["phases"] is None else Phases(**state["phases"])
        self.phase, self.began, self.num_epoch_steps = state["phase"], state["began"], state["num_epoch_steps"]
        device = next(self.model.parameters()).device
        self.ranks = dict(state["ranks"])
        self.kept = {name: copy_state(moments, device) for name, moments in state["kept"].items()}
        self.factoring.read_layers |= set(state["read"])
        self.factoring.merge(self.model)
        if self.phase == "ab":
            self.factoring.factor(self.model, self.ranks)
        self._begin({})
        self.learner.load_state_dict(state["learner"])
        self.exchange.states = load_states(self.exchange.states, state["reducer"])


def _opened(model: nn.Module, comm: Comm, cutoff: float) -> Factoring:
    """The model made ready, or left as it was."""
    unpack_attention(model)
    try:
        return Factoring(model, comm, cutoff, "ab")
    except UsageError:
        to_standard_modules(model)
        raise


def _groups(comm: Comm, size: int | None) -> list[list[int]]:
    """Those that train together: as many ranks as asked for, or a node's, or half of them."""
    ranks, nodes = list(range(comm.size)), nodes_of(comm)
    halves = [half for half in (ranks[: comm.size // 2], ranks[comm.size // 2 :]) if half]
    groups = (nodes if len(nodes) > 1 else halves) if size is None else groups_of(comm, size, "ab: group_size")
    if len(groups) == 1:
        more = "group_size=… makes several" if comm.size > 1 else "it takes more ranks to save anything"
        say(f"ab: one group alone trains both factors; {more}", comm.rank)
    return groups
