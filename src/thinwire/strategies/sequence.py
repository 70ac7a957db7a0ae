"""A sequence of strategies: a run that changes its method."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor, nn

from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.common.messages import quiet
from thinwire.data import Batch, Loader
from thinwire.errors import RunError, UsageError
from thinwire.spec import Spec
from thinwire.strategies.base import Artifact, Strategy, factored_artifact
from thinwire.strategies.groups import first_alike
from thinwire.strategies.prepare import make_strategy, rehearse
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.sequence_parts import Part, plan_parts, refuse_long_climb, refuse_order, with_starts
from thinwire.strategies.sequence_recipes import OptimizerWatch, Schedule, Seam, recipe_of, say_if_in_first_epoch
from thinwire.surgery.low_rank_model import LowRankLayers, give_low_rank_layers, merge_low_rank_layers
from thinwire.surgery.meta import structure_of
from thinwire.surgery.moments import OptimizerState


class Sequence(Strategy):
    """Train with one strategy after the other, each for some of the epochs.

    At a seam the next part begins with the model that the last one consolidated, on every rank: x⁽ᵏ⁺¹⁾ ← x̄⁽ᵏ⁾. After
    `ab`, that is its small model of low-rank layers. Between data_parallel, local_sgd, diloco and daso the optimizer's
    state is carried over, as its mean over ranks. Otherwise it begins anew, and the learning rate climbs to its
    schedule. Wire bytes: the sum of those of the parts; and at each seam what `consolidate` sends, a broadcast of the
    model (for `ist`, of its shards) and, if ranks have momenta of their own, an all-reduce of these.

    Post-local SGD is sequence([data_parallel, local_sgd]): Lin et al., "Don't Use Large Mini-Batches, Use Local SGD",
    ICLR 2020.
    """

    keeps_model = False
    has_phases = True

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        comm: Comm,
        /,
        *,
        parts: list[Spec],  # strategies in their order, as [data_parallel, local_sgd(every=4)]
        epochs: list[PositiveFloat] | None = None,  # of each part, or its share of the run; default: equal shares
        schedule: Schedule = "run",  # of learning rates: run = one for the run, part or restart = anew in each part
        hand_over: Literal["small", "whole"] = "small",  # after ab: small = its low-rank model, whole = full layers
        climb: NonNegativeFloat = 0.5,  # epochs in which the learning rate climbs where the optimizer begins anew
    ) -> None:
        self.comm, self.schedule, self.hand_over, self.climb = comm, schedule, hand_over, climb
        self.options = [schedule, hand_over, climb, epochs]  # that a saved state must agree with
        self._set_parts(plan_parts(parts, epochs, recipe.epochs))
        refuse_long_climb(self.parts, climb)
        if hand_over == "small":
            refuse_order(self.parts)
        kinds = [registry.load("strategies", part.strategy.name) for part in self.parts]
        self.allows_uneven = all(kind.allows_uneven for kind in kinds)
        self.checks_targets = any(kind.checks_targets for kind in kinds)
        self.series = {name: one for kind in kinds for name, one in kind.series.items()}  # type: ignore[misc]
        self.recipe, self.optimizers = recipe, OptimizerWatch(recipe.optimizer, may_have_scheduler=len(parts) == 1)
        self.epoch, self.num_steps = 0, 0  # epochs that ended, and steps
        self.epoch_steps, self.has_ended_epoch = 0, False  # steps of this epoch so far; of the last one if it has ended
        self.kinds_of_ranks: dict[int, list[int]] = {}  # representatives of later parts
        self.structure, self.is_on_meta = structure_of(model), next(model.parameters()).is_meta
        self._rehearse(None)
        self.groups: list[Comm] = []  # that the present part made
        self._begin_part(self.parts[0], model, Seam(), None)
        self.known_shard = self.shard  # that the caller reads

    def _set_parts(self, parts: list[Part]) -> None:
        self.parts, self.timeline_epochs = parts, [part.start for part in parts]

    @property
    def model(self) -> nn.Module:
        """What this rank trains now."""
        found: nn.Module = self.strategy.model  # type: ignore[attr-defined]
        return found

    # ---- training

    def begin_epoch(self, num_steps: int | None) -> None:
        if num_steps and not self.num_steps:
            self._rehearse(num_steps)  # again, now that the length of an epoch is known
        self._begin_due_part()
        with self._naming(self.part):
            self.strategy.begin_epoch(num_steps)

    def set_shard(self, loader: Loader) -> None:
        super().set_shard(loader)
        self.known_shard = self.shard

    def step(self, batch: Batch) -> Tensor:
        self._begin_due_part()
        if self.shard != self.known_shard:
            before, now = self.known_shard, self.shard
            raise UsageError(
                f"sequence: {self.part}, reads shard {now.index} of {now.count} of each batch, but the first part read "
                f"{before.index} of {before.count}; loop over tw.epoch(trainer, batches, comm) with a tw.loader, which "
                "then reads the other shard"
            )
        with self._naming(self.part):
            loss = self.strategy.step(batch)
        self._count_step()
        return loss

    def skip_step(self) -> None:
        self._begin_due_part()
        with self._naming(self.part):
            self.strategy.skip_step()
        self._count_step()

    def end_epoch(self) -> None:
        with self._naming(self.part):
            self.strategy.end_epoch()
        if self.epoch_steps and not self.has_ended_epoch:  # else no step was made since the last epoch ended
            self.epoch, self.has_ended_epoch = self.epoch + 1, True

    def _count_step(self) -> None:
        self.epoch_steps = 1 if self.has_ended_epoch else self.epoch_steps + 1
        self.num_steps, self.has_ended_epoch = self.num_steps + 1, False

    # ---- seams

    def _begin_due_part(self) -> bool:
        """Begin the next part if this is its first epoch; returns whether it did so. Collective.

        This is done when an epoch begins, not when the last one ends: what is tested and saved in between is the model
        of the part that ended.
        """
        following = next((part for part in self.parts if part.number == self.part.number + 1), None)
        if following is None or self.epoch < following.start:
            return False
        with self._naming(self.part):
            self.optimizers.refuse_changed_lr()
        self.comm.ledger.part = following.number  # what is sent now is for the part that begins
        with self.comm.ledger.purpose("sync"):
            model, layers = self._handed_over()
            keeps_model = registry.load("strategies", following.strategy.name).keeps_model
            state = self.strategy.optimizer_state() if keeps_model else None
            climb = round(self.climb * self.epoch_steps) if state is None else 0
            self._begin_part(following, model, Seam(self.num_steps, climb, layers), state)
        return True

    def _handed_over(self) -> tuple[nn.Module, LowRankLayers]:
        """The model for the next part, and its low-rank layers. Collective."""
        small = self.strategy.small_model() if self.hand_over == "small" else None
        return (small.model, small.layers) if small is not None else (self.strategy.consolidate(), self.seam.layers)

    def _begin_part(self, part: Part, model: nn.Module, seam: Seam, state: dict[str, OptimizerState] | None) -> None:
        """Make the strategy of a part, which trains this model from now on. Collective."""
        ended = weakref.ref(self.__dict__.pop("strategy", self))
        if ended() not in (None, self):
            gc.collect()  # torch's pipelines form cycles; memory is freed before the next strategy takes some
        self.comm.close_subgroups(self.groups)
        groups = self.comm.subgroups
        self.part, self.seam = part, seam
        self.comm.ledger.part = part.number
        recipe = self._recipe(part, seam, self.optimizers)
        with self._naming(part):
            self.strategy: Strategy = make_strategy(
                str(part.strategy), model, replace(recipe, optimizer_state=state or {}), self.comm
            )
        self.groups = [group for group in self.comm.subgroups if group not in groups]
        self.shard, self.sees_loss = self.strategy.shard, self.strategy.sees_loss

    def _recipe(self, part: Part, seam: Seam, optimizers: OptimizerWatch) -> Recipe:
        is_last = part.number == len(self.parts)
        return replace(recipe_of(part, seam, self.recipe, self.schedule, is_last), optimizer=optimizers)

    def _rehearse(self, num_steps: int | None) -> None:
        """Find out before the first step whether each later part can begin."""
        for part in self.parts[1:]:
            with self._naming(part):
                recipe = self._recipe(part, Seam(), OptimizerWatch(self.recipe.optimizer))
                tried = str(part.strategy), self.structure, self.is_on_meta, recipe, self.comm, num_steps
                self.kinds_of_ranks[part.number] = rehearse(*tried)

    @contextmanager
    def _naming(self, part: Part) -> Iterator[None]:
        """Errors inside name the part."""
        try:
            yield
        except (UsageError, RunError) as error:
            if len(self.parts) == 1 or type(error) not in (UsageError, RunError):
                raise
            raise type(error)(f"sequence: {part}: {error}") from error

    def representatives(self) -> list[int]:
        return first_alike(list(zip(self.strategy.representatives(), *self.kinds_of_ranks.values(), strict=True)))

    # ---- results and states

    def status(self) -> dict[str, Any]:
        """The part and its strategy, and the status of that."""
        return {"part": self.part.number, "part_strategy": str(self.part.strategy), **self.strategy.status()}

    def consolidate(self) -> nn.Module:
        """The whole model, with full layers. Collective."""
        if not self.epoch and len(self.parts) > 1:
            say_if_in_first_epoch(self.num_steps, self.comm.rank)
        return merge_low_rank_layers(self.strategy.consolidate(), self.seam.layers)

    def eval_model(self) -> nn.Module:
        return self.consolidate() if self.seam.layers.layer_ranks else self.strategy.eval_model()

    def artifacts(self) -> list[Artifact]:
        """Those of the current part; and the model with low-rank layers, if that is what it trains."""
        own = self.strategy.artifacts()
        if self.seam.layers.layer_ranks:
            own.append(factored_artifact(self.strategy.consolidate()))
        return own

    def state_dict(self) -> dict[str, Any]:
        return {
            "parts": [[str(part.strategy), part.start] for part in self.parts], "part": self.part.number,
            "options": self.options,
            "counts": [self.epoch, self.num_steps, self.epoch_steps, self.has_ended_epoch],
            "seam": [self.seam.steps_before, self.seam.climb, *self.seam.layers],
            "strategy": self.strategy.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue in the part that was saved: its strategy is made anew, on a model of the same structure."""
        saved = [strategy for strategy, _ in state["parts"]]
        if saved != [str(part.strategy) for part in self.parts]:
            raise RunError(f"the saved state is of a sequence of {', '.join(saved)}; use the same parts")
        if state["options"] != self.options:
            raise RunError(
                f"the saved state is of (schedule, hand_over, climb, epochs) {state['options']}, not {self.options}"
            )
        self._set_parts(with_starts(self.parts, [start for _, start in state["parts"]], self.recipe.epochs))
        steps_before, climb, *layers = state["seam"]
        seam = Seam(steps_before, climb, LowRankLayers(*layers))
        with quiet():
            model = give_low_rank_layers(self.consolidate(), seam.layers)
            self._begin_part(self.parts[state["part"] - 1], model, seam, None)
        self.strategy.load_state_dict(state["strategy"])
        self.optimizers.refuse_changed_lr()
        self.epoch, self.num_steps, self.epoch_steps, self.has_ended_epoch = state["counts"]
