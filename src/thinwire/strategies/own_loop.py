"""rounds: local SGD, DiLoCo and DASO in a loop that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire import registry
from thinwire.comm.base import Comm
from thinwire.comm.collectives import all_gather_json
from thinwire.comm.join import is_single_process
from thinwire.comm.ledger import Ledger
from thinwire.comm.sharding import between_replicas, device_of, is_sharded, replica_group, replica_ranks, reshard
from thinwire.comm.user_groups import UserGroup, close_after, comm_like, process_group
from thinwire.common.dtypes import refuse_unfit
from thinwire.common.messages import say
from thinwire.errors import UsageError
from thinwire.exchange.alone import Alone
from thinwire.spec import parse
from thinwire.strategies.recipe import Recipe
from thinwire.strategies.replicas import average_buffers
from thinwire.strategies.rounds import InRounds


class AttachedRounds:
    """The rounds of a model that a loop of yours trains.

    Save its `state_dict` of every rank, with the model and the optimizer of every rank: between two rounds they differ.
    """

    has_phases: bool  # whether it matters when epochs end, as to `daso`

    def __init__(self, model: nn.Module, strategy: InRounds, spec: str, world: Comm, close: Callable[[], None]) -> None:
        self._model, self._is_sharded, self._trained = model, is_sharded(model), _trained(model)
        self._strategy, self._spec, self._world, self._close = strategy, spec, world, close
        self.has_phases = strategy.has_phases

    @property
    def ledger(self) -> Ledger:
        """What was sent."""
        return self._world.ledger

    def after_step(self, loss: Tensor | float | None = None) -> None:
        """Call it after each step of your optimizer: it averages parameters if a round ends. Collective.

        `daso` exchanges more often when the loss stops improving; without the loss it does not change its period.
        """
        self._prepare_exchange()
        self._strategy.after_step(None if loss is None else torch.as_tensor(loss).detach())

    def together(self, *, ends_epoch: bool = True) -> None:
        """Make all ranks equal, for a test, a checkpoint to share, or the end of an epoch. Collective.

        A new round begins. `daso` counts epochs by these calls: in the middle of an epoch give `ends_epoch=False`.
        """
        self._prepare_exchange()
        self._strategy.end_epoch() if ends_epoch else self._strategy.meet()
        if self._is_sharded:  # a rail has averaged its own statistics alone
            average_buffers(self._model, self._world)

    def _prepare_exchange(self) -> None:
        if self._is_sharded:
            reshard(self._model)
        now = _trained(self._model)
        if len(now) != len(self._trained) or any(
            one is not other for one, other in zip(now, self._trained, strict=True)
        ):
            raise UsageError(
                "rounds: the parameters to train are others than in the beginning (some were frozen or unfrozen, or "
                "replaced, as load_state_dict(assign=True) does); close these rounds and call tw.rounds again"
            )

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; every rank has its own."""
        return {**self._identity(), "rounds": self._strategy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; load the model and the optimizer of the same rank and step, too."""
        for what, here in self._identity().items():
            if state.get(what) != here:
                raise UsageError(
                    f"the state is of {what} {state.get(what)}, and this is {what} {here}; load the one that fits"
                )
        self._strategy.load_state_dict(state["rounds"])

    def _identity(self) -> dict[str, Any]:
        return {"strategy": self._spec, "rank": f"{self._world.rank} of {self._world.size}"}

    def close(self) -> None:
        """End the communication threads and groups, as the end of the process does."""
        self._close()


class NoRounds(Alone, AttachedRounds):
    """The rounds of a single process: there is nobody to meet."""

    has_phases = False

    def after_step(self, loss: Tensor | float | None = None) -> None:
        pass

    def together(self, *, ends_epoch: bool = True) -> None:
        pass


def rounds(  # long: an example
    model: nn.Module, spec: str, *, comm: Comm | None = None, group: UserGroup = "world", epochs: int | None = None
) -> AttachedRounds:
    """Average the parameters of ranks that train separately, now and then; your loop stays as it is.

    Call it on every rank that takes part, after the model is on its device and before the first step. Then
    `after_step()` follows each step of your optimizer, and `together()` comes before everything for which ranks must be
    equal. It never sees the loss, so scalers, schedulers, parameter groups, several optimizers and torch.compile work
    as before. The model is

    - a plain module: every rank is a replica;
    - a DistributedDataParallel over the ranks of a node: one rank of each node exchanges, the others get the result;
    - sharded by fully_shard over the ranks of a node: each rank exchanges its own rows.

    By default all ranks take part. `group` is a process group or a device mesh of one dimension with those that do: it
    has one rank of each replica, or all ranks of all of them. Instead of it, `comm` may be the world of `tw.join()`, or
    what was split from it. `epochs` is for `daso`. In a single process there is nothing to average, and it says so.

    >>> import torch, thinwire as tw
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with tw.join() as comm:
    ...     rounds = tw.rounds(model, "diloco(every=2)", comm=comm)
    ...     for _ in range(4):
    ...         model(torch.ones(3, 4)).sum().backward()
    ...         optimizer.step()
    ...         rounds.after_step()
    ...     rounds.together()

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Douillard et al., "DiLoCo", 2023; Coquelin et
    al., "DASO", 2022.
    """
    _refuse_others(spec)
    model = getattr(model, "_orig_mod", model)  # torch.compile(model) holds it
    plain = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if is_sharded(plain):
        reshard(plain)
    refuse_unfit(plain, "rounds")
    if comm is not None and group != "world":
        raise UsageError("rounds: comm and group are given; give one of them")
    if _is_alone(comm, group):
        registry.check("strategies", spec)
        say("rounds: one rank alone, so there is nothing to average", 0, once=True)
        return NoRounds()
    world = comm or comm_like(process_group(group, "rounds"), device_of(plain), replica_group(model))
    recipe = Recipe(_no_loss, _no_optimizer, epochs=epochs, own_loop=True)
    attached = _attach_rounds(model, plain, spec, recipe, world, is_ours=comm is None)
    if comm is None:
        close_after(attached, world)
    return attached


def _is_alone(comm: Comm | None, group: UserGroup) -> bool:
    if comm is not None:
        return comm.size == 1
    return is_single_process() or process_group(group, "rounds").size() == 1


def _refuse_others(spec: str) -> None:
    """Raise UsageError for a strategy that does not work in rounds."""
    named = parse(spec)
    if not issubclass(registry.load("strategies", named.name), InRounds):
        possible = [
            name for name in registry.TABLE["strategies"] if issubclass(registry.load("strategies", name), InRounds)
        ]
        raise UsageError(
            f"rounds: {named.name} does not work in rounds; possible: {', '.join(possible)}. Other strategies are for "
            "tw.prepare, and reducers of gradients for tw.attach"
        )


def _attach_rounds(
    model: nn.Module, plain: nn.Module, spec: str, recipe: Recipe, world: Comm, is_ours: bool
) -> AttachedRounds:
    """The rounds of a model on several ranks; what they made is closed again if they are refused."""
    before = world.subgroups

    def close(groups: Sequence[Comm]) -> None:
        world.close_subgroups(groups)
        if is_ours:
            world.close()

    try:
        strategy = _on_replicas(model, plain, spec, recipe, world)
    except UsageError:
        close(_others(world.subgroups, before))
        raise
    made = _others(world.subgroups, before)
    return AttachedRounds(plain, strategy, str(parse(spec)), world, lambda: close(made))


def _others(groups: Sequence[Comm], known: Sequence[Comm]) -> list[Comm]:
    return [group for group in groups if group not in known]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _on_replicas(model: nn.Module, plain: nn.Module, spec: str, recipe: Recipe, world: Comm) -> InRounds:
    """The strategy for a model whose replicas are ranks, or groups of ranks that a DDP or fully_shard made."""
    if is_sharded(model):
        return _agreed(spec, plain, recipe, between_replicas(model, world), world)
    mine = replica_ranks(model, world)
    with world.ledger.purpose("start"):
        replicas = [list(ranks) for ranks in sorted({tuple(ranks) for ranks in all_gather_json(world, mine)})]
    if len(replicas) == 1 and len(mine) > 1:
        raise UsageError(
            f"rounds: this DDP averages the gradients of all {world.size} ranks already. Remove the DDP and give "
            "tw.rounds the plain module; or, with several ranks on each node, make DDP(model, process_group=…) of the "
            "ranks of one node"
        )
    made = _agreed(spec, plain, recipe, world.split([range(world.size)], world.link), world)
    if any(len(ranks) > 1 for ranks in replicas):
        made.use_replicas(replicas)
    return made


def _agreed(spec: str, model: nn.Module, recipe: Recipe, comm: Comm, world: Comm) -> InRounds:
    """Make the strategy; UsageError on all ranks if it is one on some, whose shards may be too small."""
    error = ""
    try:
        made: InRounds = registry.build("strategies", spec, model, recipe, comm)
    except UsageError as refused:
        error = str(refused)
    with world.ledger.purpose("start"):
        errors = [text for text in all_gather_json(world, error) if text]
    if errors:
        raise UsageError(errors[0])
    return made


def _no_loss(output: Any, targets: Tensor) -> Tensor:
    raise AssertionError("the caller computes losses")


def _no_optimizer(parameters: Any) -> torch.optim.Optimizer:
    raise AssertionError("the caller has an optimizer")
