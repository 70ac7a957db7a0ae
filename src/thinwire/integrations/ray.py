"""Ray Train: workers that exchange gradients with a reducer, or parameters in rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import thinwire as tw
from thinwire.exchange.attach import Attached
from thinwire.integrations.extras import extra
from thinwire.integrations.own_steps import count_steps, separate_model
from thinwire.integrations.rank_files import RankState
from thinwire.strategies.own_loop import AttachedRounds

with extra("ray"):
    import ray.train


class _WithRankFiles:
    """A loop whose ranks keep a file each in Ray's checkpoints, and go on from it when Ray restores one."""

    def __init__(self, state: RankState, meet: Callable[[], None]) -> None:
        context = ray.train.get_context()
        self._state, self._meet = state, meet
        self._rank, self._ranks = context.get_world_rank(), context.get_world_size()
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                state.load(Path(folder, "thinwire"), self._rank, self._ranks)

    @contextmanager
    def checkpoint_folder(self) -> Iterator[str]:
        """A temporary folder with this rank's file, to add the model to, and to report on every rank. Collective."""
        self._meet()
        with TemporaryDirectory() as folder:
            self._state.save(Path(folder, "thinwire"), self._rank, self._ranks)
            yield folder


class AttachLoop(_WithRankFiles):
    """Gradients of the DDP that ray.train.torch.prepare_model made are exchanged with one of thinwire's reducers.

    loop = AttachLoop(model, "error_feedback(maxnorm(bits=4))")
    ...
    with loop.checkpoint_folder() as folder:
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(model.module.state_dict(), Path(folder, "model.pt"))
        ray.train.report({"loss": loss}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    Make the loop after you have restored the model from Ray's checkpoint.
    """

    exchange: Attached

    def __init__(self, model: nn.Module, spec: str, *, scaler: GradScaler | None = None) -> None:
        self.exchange = tw.attach(model, spec, scaler=scaler)
        super().__init__(RankState(model, self.exchange), lambda: None)


class RoundsLoop(_WithRankFiles):
    """Workers train separately and average their parameters in rounds: local_sgd, diloco or daso.

    loop = RoundsLoop(model, "diloco(every=16)", optimizer)

    The model is a plain one, or a DDP, which then exchanges no gradients. Each step of the optimizer counts. Ranks meet
    in `checkpoint_folder`, and whenever you call `loop.rounds.together()`, by which `daso` counts epochs. Make the loop
    after you have restored model and optimizer from Ray's checkpoint: it then loads this rank's own optimizer. If you
    use a loss scaler, give it.
    """

    rounds: AttachedRounds

    def __init__(
        self, model: nn.Module, spec: str, optimizer: Optimizer, *, epochs: int | None = None,
        scaler: GradScaler | None = None,
    ) -> None:  # fmt: skip
        self.rounds = tw.rounds(separate_model(model), spec, epochs=epochs)
        count_steps(optimizer, scaler, self.rounds)
        meet = partial(self.rounds.together, ends_epoch=False)
        super().__init__(RankState(model, self.rounds, [optimizer], scaler), meet)
