"""Hugging Face: a Trainer whose ranks exchange gradients with a reducer, or parameters in rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import thinwire as tw
from thinwire.exchange.attach import Attached
from thinwire.integrations.rank_files import load_rank, save_rank
from thinwire.strategies.own_loop import AttachedRounds


class _WithRankFiles(TrainerCallback, ABC):
    """A callback whose ranks keep a file each in the Trainer's checkpoints, which have rank 0's optimizer alone."""

    def __init__(self, trainer: Trainer, spec: str) -> None:
        self.trainer, self.spec = trainer, spec

    @abstractmethod
    def begin(self) -> None:
        """Attach to the model, which the Trainer has prepared."""

    @abstractmethod
    def rank_state(self) -> dict[str, Any]:
        """What this rank needs to go on exactly, besides the Trainer's checkpoint."""

    @abstractmethod
    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Go on from what this rank kept."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.begin()
        if state.global_step:  # the Trainer resumes
            self.load_rank_state(load_rank(self._folder(args, state), args.process_index, args.world_size))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        save_rank(self._folder(args, state), args.process_index, args.world_size, self.rank_state())

    def _folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir or ".", f"checkpoint-{state.global_step}", "thinwire")


class AttachCallback(_WithRankFiles):
    """Gradients are exchanged with one of thinwire's reducers.

    `trainer.add_callback(AttachCallback(trainer, "error_feedback(maxnorm(bits=4))"))`
    """

    exchange: Attached

    def begin(self) -> None:
        model: Any = self.trainer.model_wrapped
        self.exchange = tw.attach(model, self.spec, scaler=self.trainer.accelerator.scaler)

    def rank_state(self) -> dict[str, Any]:
        return {"exchange": self.exchange.state_dict()}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        self.exchange.load_state_dict(state["exchange"])


class RoundsCallback(_WithRankFiles):
    """Ranks train separately and average their parameters in rounds: local_sgd, diloco or daso.

    `trainer.add_callback(RoundsCallback(trainer, "diloco(every=16)"))`

    Ranks also meet at the end of each epoch, and before an evaluation or a checkpoint.
    """

    rounds: AttachedRounds

    def begin(self) -> None:
        wrapped: Any = self.trainer.model_wrapped
        plain = self.trainer.accelerator.unwrap_model(wrapped)
        if wrapped is not plain:
            wrapped.require_backward_grad_sync = False  # the DDP exchanges no gradients
        epochs = self.trainer.args.num_train_epochs
        self.rounds = tw.rounds(plain, self.spec, epochs=int(epochs) if epochs == int(epochs) else None)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.rounds.after_step()
        if control.should_save or control.should_evaluate:
            self.rounds.together()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.rounds.together()

    def rank_state(self) -> dict[str, Any]:
        assert self.trainer.optimizer is not None
        return {"rounds": self.rounds.state_dict(), "optimizer": self.trainer.optimizer.state_dict()}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        assert self.trainer.optimizer is not None
        self.trainer.optimizer.load_state_dict(state["optimizer"])
        self.rounds.load_state_dict(state["rounds"])
