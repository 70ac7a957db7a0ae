"""The schedule of DASO: in which epochs nodes wait for each other, and how often they exchange in the others.

warm-up     the first epochs: nodes exchange after every batch and wait for the result
cycling     nodes begin an exchange every B batches and merge its result W batches later
cool-down   the last epochs: as the warm-up
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.common.messages import say
from thinwire.errors import UsageError

PATIENCE = 3  # epochs in a row without improvement, until the loss counts as stable


@dataclass(frozen=True)
class Cycle:
    """How often ranks communicate while nodes are cycling: B, W and l of the paper, in batches."""

    global_every: int = 4  # B: from the start of one exchange between nodes to the start of the next
    delay: int = 1  # W: from the start of an exchange to the merge of its result; ranks train meanwhile
    local_every: int = 1  # l: gradients are averaged inside a node every so many batches

    def after_plateau(self, longest: int) -> Cycle:
        """Communicate twice as often; after B = 1, as seldom as possible: B = longest."""
        if self.global_every > 1:
            halved = self.global_every // 2
            return Cycle(halved, min(halved, max(1, self.delay - 1)), max(1, self.local_every // 2))
        return Cycle(longest, max(1, longest // 4), max(1, longest // 4))


@dataclass(frozen=True)
class Plateau:
    """Detects that a loss has stopped improving: three epochs in a row not below (1 − stability)·best."""

    best: float = float("inf")
    failures: int = 0  # epochs in a row without improvement

    def after(self, loss: float, stability: float) -> Plateau:
        """The state after one more epoch."""
        if loss < self.best - stability * abs(self.best) or self.best == float("inf"):
            return Plateau(loss)
        return Plateau(self.best, self.failures % PATIENCE + 1)

    @property
    def is_stable(self) -> bool:
        """Whether the loss has stopped improving."""
        return self.failures == PATIENCE


def cycling_epochs(epochs: int | None, warmup: int, cooldown: int) -> range:
    """The epochs between warm-up and cool-down."""
    if epochs is None:
        raise UsageError(
            "daso has phases, so it must know how many epochs there will be: prepare(…, epochs=90), and at the end of "
            "each trainer.end_epoch(), which tw.epoch(trainer, batches, comm) does for you; for thinwire train, give a "
            "stream a __len__"
        )
    if warmup + cooldown > epochs:
        raise UsageError(
            f"daso: warmup_epochs={warmup} and cooldown_epochs={cooldown} are longer than the run of {epochs} epochs; "
            f"try {warmup + cooldown + 1} epochs or more, or daso(warmup_epochs={epochs // 4}, "
            f"cooldown_epochs={epochs // 4})"
        )
    return range(warmup, epochs - cooldown)


def say_if_mostly_waiting(epochs: int, cycling: range) -> None:
    """Tell the user if most epochs are warm-up or cool-down: then more may be sent than by data_parallel."""
    if 2 * len(cycling) >= epochs:
        return
    few = min(max(1, epochs // 8), epochs // 4)
    say(
        f"daso: {epochs - len(cycling)} of {epochs} epochs are warm-up or cool-down, in which nodes wait for each "
        f"other after every batch; to save bytes try daso(warmup_epochs={few}, cooldown_epochs={few}), or more epochs"
    )
