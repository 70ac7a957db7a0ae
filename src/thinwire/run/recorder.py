"""Writes the results of a run: a row of metrics after each epoch; summary and models at the end."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import nn

from thinwire.comm.base import Comm
from thinwire.comm.ledger import TRAINING, bytes_of
from thinwire.common.tensor_files import save_model
from thinwire.config import RunConfig
from thinwire.errors import UsageError
from thinwire.exchange.export import save_whole_model
from thinwire.run.evaluation import evaluate
from thinwire.run.meters import Meters
from thinwire.run.position import Position
from thinwire.run.records import RunFolder, read_rows
from thinwire.run.schema import MetricsRow
from thinwire.run.summary import sent_by_purpose, summarise
from thinwire.run.tables import result_table
from thinwire.strategies.base import Strategy
from thinwire.tasks.base import Task


class Recorder:
    """Tests the model and writes the run's folder. Every method is collective; rank 0 writes."""

    def __init__(
        self, config: RunConfig, task: Task, comm: Comm, strategy: Strategy, meters: Meters, folder: RunFolder,
        num_parameters: int,
    ) -> None:  # fmt: skip
        self.config, self.task, self.comm, self.strategy = config, task, comm, strategy
        self.meters, self.folder, self.num_parameters = meters, folder, num_parameters
        self.device = meters.device

    def after_epoch(
        self, at: Position, seconds: Callable[[], float], samples_per_second: float
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Test the model if that is due, and add a row of metrics; returns the row, and what each rank measured."""
        tested: dict[str, float] = {}
        if self.config.test_every and (at.epoch + 1) % self.config.test_every == 0:
            with self.comm.ledger.purpose("eval"):
                model = self.strategy.eval_model()
            tested = self._evaluate(model)
        with self.comm.ledger.purpose("eval"):
            own_loss = torch.tensor([at.loss_sum / at.batch, 1.0], dtype=torch.float64) * self.strategy.sees_loss
            loss_sum, num_losses = self.comm.sum(own_loss).tolist()
        by_rank = self.meters.gather(at.train_seconds, self._mean_parts(at))
        timeline = self.meters.gather_timeline() if at.epoch in self.strategy.timeline_epochs else []
        sent = sent_by_purpose(by_rank)
        where = {"step": at.step, "epoch": at.epoch + 1}
        extra: dict[str, Any] = tested | _mean_over_ranks(by_rank) | self._status()
        row = MetricsRow(
            step=at.step, epoch=at.epoch + 1, seconds=seconds(), train_seconds=at.train_seconds,
            train_loss=loss_sum / num_losses, samples_per_second=samples_per_second,
            wire_bytes=round(bytes_of(sent) / self.comm.size),
            training_bytes=round(bytes_of(sent, TRAINING) / self.comm.size),
            training_bytes_between=bytes_of(sent, TRAINING, ("between",)),
            waiting_seconds=sum(one["waiting_seconds"] for one in by_rank) / self.comm.size,
            **extra,
        ).model_dump()  # fmt: skip
        if self.comm.rank == 0:
            self.folder.append(self.folder.metrics, [row])
            self.folder.append_ledger(where, [one["ledger"] for one in by_rank])
            if timeline:
                self.folder.append(self.folder.timeline, timeline)
        return row, by_rank

    def at_end(self, at: Position, seconds: Callable[[], float], show: bool) -> dict[str, Any]:
        """Write models and summary; returns the summary. `show` prints it as a table too."""
        with self.comm.ledger.purpose("eval"):
            model = self.strategy.eval_model()
            metric = f"test_{self.task.metric}"
            artifacts = [(one, self._evaluate(one.model)[metric]) for one in self.strategy.artifacts()]
        if at.value is None:
            tested = self._evaluate(model)
            if self.comm.rank == 0:  # which writes the summary
                for row in read_rows(self.folder.metrics):  # a run that was resumed may have been tested at its old end
                    at = at.tested(row.get(metric), self.task.metric)
                self.folder.add_to_last_row(tested)
            at = at.tested(tested[metric], self.task.metric)
        by_rank = self.meters.gather(at.train_seconds)
        summary = summarise(
            self.config, self.task.metric, at, seconds(), by_rank,
            link=self.meters.link, nodes=len(set(self.comm.nodes)), parameters=self.num_parameters, model=model,
            artifacts=artifacts, strategy=self.strategy, device=self.device,
        ).model_dump()  # fmt: skip
        save_whole_model(model, self.folder.path, self.comm)
        if self.comm.rank == 0:
            for artifact, _ in artifacts:
                save_model(artifact.model, self.folder.path / artifact.file)
            ledgers = [one["ledger"] for one in by_rank]
            self.folder.append_ledger({"step": at.step, "epoch": at.epoch}, ledgers, final=True)
            self.folder.save_summary(summary)
            if show:
                console = Console()
                console.print(result_table(summary, ledgers))
                console.print(f"results in {self.folder.path}", highlight=False, markup=False, soft_wrap=True)
        with self.comm.ledger.purpose("checkpoint"):
            self.comm.barrier()  # no rank ends before the results are written
        return summary

    def _mean_parts(self, at: Position) -> dict[str, float]:
        """Means over this epoch's steps of what the loss returned beside the total, as a row of metrics names them."""
        means = {f"train_{name}": total / at.batch for name, total in at.part_sums.items()}
        taken = sorted(means.keys() & MetricsRow.model_fields.keys())
        if taken:
            raise UsageError(
                f"the loss returns {taken[0].removeprefix('train_')}, but every row of metrics has {taken[0]}"
            )
        return means if self.strategy.sees_loss else {}

    def _status(self) -> dict[str, Any]:
        """The strategy's status, whose names must not be those of other values in a row of metrics."""
        status = self.strategy.status()
        taken = [name for name in status if name in MetricsRow.model_fields or name.startswith("test_")]
        if taken:
            raise UsageError(
                f"{self.config.strategy}: status() has {', '.join(taken)}, as every row of metrics has; use other names"
            )
        return status

    def _evaluate(self, model: nn.Module) -> dict[str, float]:
        """The results as a row of metrics names them."""
        assert self.config.batch_size is not None
        with self.comm.ledger.purpose("eval"):
            results = evaluate(
                model, self.task, self.comm, self.device,
                batch_size=4 * self.config.batch_size, autocast=self.config.autocast,
            )  # fmt: skip
        return {f"test_{name}": value for name, value in results.items()}


def _mean_over_ranks(by_rank: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of each part of the loss over the ranks that have it."""
    parts = [one["loss_parts"] for one in by_rank if "loss_parts" in one]
    names = dict.fromkeys(name for one in parts for name in one)
    return {name: statistics.fmean(one[name] for one in parts if name in one) for name in names}
