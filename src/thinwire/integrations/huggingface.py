"""Hugging Face: a Trainer whose ranks exchange gradients with a reducer, or parameters in rounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch import nn

import thinwire as tw
from thinwire.comm.world import find_world
from thinwire.errors import UsageError
from thinwire.exchange.attach import Attached
from thinwire.integrations.extras import extra
from thinwire.integrations.own_steps import separate_model
from thinwire.integrations.rank_files import RankState
from thinwire.strategies.own_loop import AttachedRounds

with extra("huggingface"):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.training_args import ParallelMode


class _WithRankFiles(TrainerCallback, ABC):
    """A callback whose ranks keep a file each in the Trainer's checkpoints, which have rank 0's optimizer alone."""

    def __init__(self, trainer: Trainer, spec: str) -> None:
        self.trainer, self.spec = trainer, spec
        self._resumed_from: Path | None = None  # the checkpoint that is named; None: the newest in the output folder
        train = trainer.train

        def note_and_train(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            named = resume_from_checkpoint
            self._resumed_from = None if named is None or isinstance(named, bool) else Path(named)
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.train = note_and_train  # type: ignore[method-assign]

    @abstractmethod
    def begin(self) -> None:
        """Attach to the model, which the Trainer has prepared."""

    @abstractmethod
    def rank_state(self) -> RankState:
        """What this rank keeps."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        launched = find_world()
        if launched is not None and launched.size > 1 and args.parallel_mode != ParallelMode.DISTRIBUTED:
            raise UsageError(
                f"{launched.launcher} started {launched.size} ranks, but the Trainer trains each of them alone "
                f"({args.parallel_mode}); on CPUs use TrainingArguments(use_cpu=True)"
            )
        self.begin()
        if state.global_step:  # the Trainer resumes
            named = self._resumed_from
            folder = named / "thinwire" if named else self._folder(args, state)
            self.rank_state().load(folder, args.process_index, args.world_size)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.rank_state().save(self._folder(args, state), args.process_index, args.world_size)

    @property
    def _model(self) -> nn.Module:
        assert isinstance(self.trainer.model, nn.Module)
        return self.trainer.model

    def _folder(self, args: TrainingArguments, state: TrainerState) -> Path:
        return Path(args.output_dir or ".", f"checkpoint-{state.global_step}", "thinwire")


class AttachCallback(_WithRankFiles):
    """Gradients are exchanged with one of thinwire's reducers.

    `trainer.add_callback(AttachCallback(trainer, "error_feedback(maxnorm(bits=4))"))`
    """

    exchange: Attached
    _attached_to: nn.Module | None = None

    def begin(self) -> None:
        model: Any = self.trainer.model_wrapped
        if model is not self._attached_to:  # else the Trainer trains again
            self.exchange = tw.attach(model, self.spec, scaler=self.trainer.accelerator.scaler)
            self._attached_to = model

    def rank_state(self) -> RankState:
        return RankState(self._model, self.exchange)


class RoundsCallback(_WithRankFiles):
    """Ranks train separately and average their parameters in rounds: local_sgd, diloco or daso.

    `trainer.add_callback(RoundsCallback(trainer, "diloco(every=16)"))`

    Ranks also meet at the end of each epoch, and before an evaluation or a checkpoint. Each divides its losses by its
    own number of tokens (average_tokens_across_devices=False), as tw.prepare does.
    """

    rounds: AttachedRounds

    def begin(self) -> None:
        if hasattr(self, "rounds"):  # the Trainer trains again
            self.rounds.close()
        wrapped: Any = self.trainer.model_wrapped
        epochs = self.trainer.args.num_train_epochs
        self.trainer.args.average_tokens_across_devices = False  # else ranks tell each other numbers in every step
        self.rounds = tw.rounds(
            separate_model(wrapped), self.spec, epochs=int(epochs) if epochs == int(epochs) else None
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.rounds.after_step()
        if control.should_save or control.should_evaluate:
            self.rounds.together(ends_epoch=False)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.rounds.together()

    def rank_state(self) -> RankState:
        assert self.trainer.optimizer is not None
        return RankState(self._model, self.rounds, [self.trainer.optimizer], self.trainer.accelerator.scaler)
