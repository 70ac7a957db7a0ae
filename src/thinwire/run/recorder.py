"""Writes the results of a run: rows of metrics after each epoch and within; summary and models at the end."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.console import Console
from torch import nn

from thinwire.comm.base import Comm
from thinwire.comm.ledger import TRAINING, bytes_of
from thinwire.common.messages import quiet
from thinwire.common.tensor_files import save_model
from thinwire.config import RunConfig
from thinwire.errors import UsageError
from thinwire.exchange.export import save_whole_model
from thinwire.run.evaluation import evaluate
from thinwire.run.length import Due, Length
from thinwire.run.meters import Meters
from thinwire.run.position import Position
from thinwire.run.records import RunFolder, read_rows
from thinwire.run.schema import InnerRow, MetricsRow
from thinwire.run.setup import tracked_settings
from thinwire.run.states import random_state, set_random_state
from thinwire.run.summary import sent_by_purpose, summarise
from thinwire.run.tables import result_table
from thinwire.run.tracking.rows import TrackedRows
from thinwire.strategies.base import Strategy
from thinwire.tasks.base import Task
from thinwire.tasks.metrics import as_metric


class Recorder:
    """Tests the model and writes the run's folder. Every method is collective; rank 0 writes."""

    def __init__(
        self, config: RunConfig, task: Task, comm: Comm, strategy: Strategy, meters: Meters, folder: RunFolder,
        num_parameters: int, length: Length,
    ) -> None:  # fmt: skip
        self.config, self.task, self.comm, self.strategy, self.length = config, task, comm, strategy, length
        self.metric = as_metric(task.metric)
        self.meters, self.folder, self.num_parameters = meters, folder, num_parameters
        self.device = meters.device
        self.tracked: TrackedRows | None = None  # on rank 0, with --track

    def begin(self) -> None:
        """Called once the position of the run is known."""
        if self.comm.rank == 0 and self.config.track is not None:
            settings = tracked_settings(self.config, self.comm, self.meters.link)
            self.tracked = TrackedRows(self.config.track, self.folder, settings)

    def after_checkpoint(self) -> None:
        """Called after each checkpoint: from now on the run leaves something behind."""
        if self.tracked is not None:
            self.tracked.hand_over()

    def close(self) -> None:
        """End what is left of the tracker."""
        if self.tracked is not None:
            self.tracked.close()

    def _append(self, row: dict[str, Any]) -> None:
        self.folder.append(self.folder.metrics, [row])
        if self.tracked is not None:
            self.tracked.add(row)

    def in_epoch(
        self, at: Position, seconds: float, samples_per_second: float, due: Due, logged: dict[str, float | None]
    ) -> dict[str, Any]:
        """Test the model if that is due, and add a row of metrics in mid-epoch; returns the row."""
        tested = self._test() if due.test else {}
        sent = sent_by_purpose([{"ledger": self.comm.ledger.rows()}])
        own = [
            bytes_of(sent), bytes_of(sent, TRAINING), bytes_of(sent, TRAINING, ("between",)),
            self.meters.timeline.waiting_seconds,
        ]  # fmt: skip
        with self.comm.ledger.purpose("eval"):
            total, training, between, waiting = self.comm.sum(torch.tensor(own, dtype=torch.float64)).tolist()
        epoch_steps = self.length.epoch_steps
        row = InnerRow(
            step=at.step, epoch=at.epoch + at.batch / epoch_steps if epoch_steps else at.epoch, seconds=seconds,
            train_seconds=at.train_seconds, samples_per_second=samples_per_second,
            wire_bytes=round(total / self.comm.size), training_bytes=round(training / self.comm.size),
            training_bytes_between=round(between), waiting_seconds=waiting / self.comm.size, **logged, **tested,
        ).model_dump()  # fmt: skip
        if self.comm.rank == 0:
            self._append(row)
        return row

    def mean_loss(self, own_sum: float, num_steps: int) -> float:
        """The mean of a sum of losses over so many steps, over the ranks that see the whole model's loss."""
        with self.comm.ledger.purpose("eval"):
            own = torch.tensor([own_sum / num_steps, 1.0], dtype=torch.float64) * self.strategy.sees_loss
            loss_sum, num_losses = self.comm.sum(own).tolist()
        return float(loss_sum / num_losses)

    def after_epoch(
        self, at: Position, seconds: Callable[[], float], samples_per_second: float, due: Due,
        logged: dict[str, float | None],
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
        """Test the model if that is due, and add a row of metrics; returns the row, and what each rank measured."""
        tested = self._test() if due.test else {}
        train_loss = self.mean_loss(at.loss_sum, at.batch)
        by_rank = self.meters.gather(at.train_seconds, self._mean_parts(at))
        timeline = self.meters.gather_timeline() if at.epoch in self.strategy.timeline_epochs else []
        sent = sent_by_purpose(by_rank)
        where = {"step": at.step, "epoch": at.epoch + 1}
        extra: dict[str, Any] = logged | tested | _mean_over_ranks(by_rank) | self._status()
        row = MetricsRow(
            step=at.step, epoch=at.epoch + 1, seconds=seconds(), train_seconds=at.train_seconds,
            train_loss=train_loss, samples_per_second=samples_per_second,
            wire_bytes=round(bytes_of(sent) / self.comm.size),
            training_bytes=round(bytes_of(sent, TRAINING) / self.comm.size),
            training_bytes_between=bytes_of(sent, TRAINING, ("between",)),
            waiting_seconds=sum(one["waiting_seconds"] for one in by_rank) / self.comm.size,
            **extra,
        ).model_dump()  # fmt: skip
        if self.comm.rank == 0:
            self._append(row)
            self.folder.append_ledger(where, [one["ledger"] for one in by_rank])
            if timeline:
                self.folder.append(self.folder.timeline, timeline)
        return row, by_rank

    def at_end(self, at: Position, seconds: Callable[[], float], show: bool) -> dict[str, Any]:
        """Write models and summary; returns the summary. `show` prints it as a table too."""
        with self.comm.ledger.purpose("eval"):
            model = self.strategy.eval_model()
            metric = f"test_{self.metric.name}"
            artifacts = [(one, self._evaluate(one.model)[metric]) for one in self.strategy.artifacts()]
        if at.value is None:
            tested = self._evaluate(model)
            if self.comm.rank == 0:  # which writes the summary
                for row in read_rows(self.folder.metrics):  # a run that was resumed may have been tested at its old end
                    at = at.tested(row.get(metric), self.metric)
                self.folder.add_to_last_row(tested)
            at = at.tested(tested[metric], self.metric)
        by_rank = self.meters.gather(at.train_seconds)
        summary = summarise(
            self.config, self.metric, at, seconds(), by_rank,
            link=self.meters.link, nodes=len(set(self.comm.nodes)), parameters=self.num_parameters, model=model,
            artifacts=artifacts, strategy=self.strategy, device=self.device,
        ).model_dump()  # fmt: skip
        save_whole_model(model, self.folder.path, self.comm)
        if self.comm.rank == 0:
            for artifact, _ in artifacts:
                save_model(artifact.model, self.folder.path / artifact.file)
            ledgers = [one["ledger"] for one in by_rank]
            self.folder.append_ledger({"step": at.step, "epoch": at.begun_epochs}, ledgers, final=True)
            self.folder.save_summary(summary)
            if self.tracked is not None:
                self.tracked.finish()
            if show:
                console = Console()
                console.print(result_table(summary, ledgers))
                console.print(f"results in {self.folder.path}", highlight=False, markup=False, soft_wrap=True)
        with self.comm.ledger.purpose("checkpoint"):
            self.comm.barrier()  # no rank ends before the results are written
        return summary

    def _mean_parts(self, at: Position) -> dict[str, float]:
        """Means of what the loss returned beside the total, over the steps of this epoch in which it did."""
        means = {f"train_{name}": total / at.part_steps.get(name, at.batch) for name, total in at.part_sums.items()}
        return means if self.strategy.sees_loss else {}

    def _status(self) -> dict[str, Any]:
        """The strategy's status, whose names must not be those of other values in a row of metrics."""
        status = self.strategy.status()
        names = {*MetricsRow.model_fields, "loss", "lr"}
        taken = [name for name in status if name in names or name.startswith("test_")]
        if taken:
            raise UsageError(
                f"{self.config.strategy}: status() has {', '.join(taken)}, as every row of metrics has; use other names"
            )
        return status

    def _test(self) -> dict[str, float]:
        """The results of the model as it is now. Training goes on as if there had been no test."""
        self.comm.note("testing")
        before = random_state()
        with self.comm.ledger.purpose("eval"), quiet():  # else some would say in mid-epoch that no epoch has ended
            model = self.strategy.eval_model()
        tested = self._evaluate(model)
        set_random_state(before)
        return tested

    def _evaluate(self, model: nn.Module) -> dict[str, float]:
        """The results as a row of metrics names them."""
        assert self.config.batch_size is not None
        with self.comm.ledger.purpose("eval"):
            results = evaluate(
                model, self.task, self.comm, self.device,
                batch_size=4 * self.config.batch_size, autocast=self.config.autocast,
                num_workers=self.config.num_workers,
            )  # fmt: skip
        return {f"test_{name}": value for name, value in results.items()}


def refuse_taken(parts: Iterable[str]) -> None:
    """Raise UsageError if the loss returns a part whose mean would have the name of another value in a row."""
    for name in parts:
        if f"train_{name}" in MetricsRow.model_fields:
            raise UsageError(
                f"the loss returns {name!r}, but every row of metrics has train_{name}; give it another name"
            )


def _mean_over_ranks(by_rank: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of each part of the loss over the ranks that have it."""
    parts = [one["loss_parts"] for one in by_rank if "loss_parts" in one]
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: statistics.fmean(one[name] for one in parts if name in one) for name in names}
