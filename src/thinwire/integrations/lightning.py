"""Lightning: a Trainer whose ranks exchange gradients with a reducer, or parameters in rounds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.exchange.attach import Attached
from thinwire.integrations.extras import extra
from thinwire.integrations.rank_files import RankState, rank_folder, rank_folder_of, remove_rank
from thinwire.strategies.own_loop import AttachedRounds

with extra("lightning"):
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DDPStrategy


class _WithRankFiles(DDPStrategy):
    """A DDPStrategy whose ranks keep a file each beside Lightning's checkpoint, which has rank 0's optimizer alone."""

    def __init__(self, spec: str, **options: Any) -> None:
        super().__init__(**options)
        self.spec = spec
        self._loaded_from: Path | None = None

    @abstractmethod
    def rank_state(self) -> RankState:
        """What this rank keeps."""

    @property
    def _module(self) -> nn.Module:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _scaler(self) -> GradScaler | None:
        return getattr(self.precision_plugin, "scaler", None)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint:  # else it has the model alone
            self.rank_state().save(rank_folder(filepath), self.global_rank, self.world_size)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded_from = Path(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._loaded_from is not None:
            self.rank_state().load(rank_folder_of(self._loaded_from), self.global_rank, self.world_size)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        remove_rank(rank_folder(filepath), self.global_rank)


class AttachStrategy(_WithRankFiles):
    """DDP whose gradients are exchanged with one of thinwire's reducers, on CPUs and GPUs.

    `trainer = lightning.Trainer(strategy=AttachStrategy("error_feedback(maxnorm(bits=4))"), devices=2)`

    Other options are those of Lightning's DDPStrategy.
    """

    exchange: Attached

    def configure_ddp(self) -> None:
        """Wrap the model in DDP, and attach to that."""
        super().configure_ddp()
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        self.exchange = tw.attach(self.model, self.spec, scaler=self._scaler)

    def rank_state(self) -> RankState:
        return RankState(self._module, self.exchange)


class RoundsStrategy(_WithRankFiles):
    """Ranks train separately and average their parameters in rounds: local_sgd, diloco or daso.

    `trainer = lightning.Trainer(strategy=RoundsStrategy("diloco(every=16)"), devices=2)`

    Ranks also meet before a validation, before a checkpoint and when training ends, so what is tested and saved is the
    whole model. A step counts when the last of the module's optimizers has made it. `epochs` is for `daso`: without it,
    they are the Trainer's `max_epochs`.
    """

    rounds: AttachedRounds

    def __init__(self, spec: str, epochs: int | None = None, **options: Any) -> None:
        super().__init__(spec, **options)
        self.epochs = epochs

    def configure_ddp(self) -> None:
        """Wrap nothing: gradients are not exchanged."""
        assert isinstance(self.model, LightningModule)
        if self._ddp_kwargs:
            raise UsageError(
                f"RoundsStrategy: {', '.join(self._ddp_kwargs)} given, but there is no DDP; leave them out"
            )
        longest = self.model.trainer.max_epochs
        epochs = longest if self.epochs is None and longest is not None and longest > 0 else self.epochs
        self.rounds = tw.rounds(self.model, self.spec, epochs=epochs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """With the first batch of an epoch, the one before has ended."""
        if batch_idx == 0 and self.rounds.has_phases:
            self.rounds.together()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if optimizer is self.optimizers[-1]:
            self.rounds.after_step()
        return output

    def on_validation_start(self) -> None:
        self._meet()

    def on_train_end(self) -> None:
        self._meet()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model that all ranks agree on. Collective, as Lightning's saving of checkpoints is."""
        self._meet()
        return super().lightning_module_state_dict()

    def _meet(self) -> None:
        if hasattr(self, "rounds"):  # not in trainer.validate
            self.rounds.together(ends_epoch=False)

    def rank_state(self) -> RankState:
        return RankState(self._module, self.rounds, self.optimizers, self._scaler)
