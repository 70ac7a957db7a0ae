"""The fields of the files of a run: the rows of metrics.jsonl, and summary.json at the end."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from thinwire.run.network import LinkState
from thinwire.strategies.series import Draw


class InnerRow(BaseModel):
    """A line of metrics.jsonl within an epoch, with test_loss and others if tested, and `loss` and `lr` if logged.

    Those two are the mean loss of the steps since the last that was logged, and the learning rate of the last step.
    """

    model_config = ConfigDict(extra="allow")

    step: int
    epoch: int | float  # epochs done; of a stream without a length, whole ones
    seconds: float
    train_seconds: float
    samples_per_second: float
    wire_bytes: int  # so far, of a rank on average
    training_bytes: int  # the same without start, evaluation and checkpoints
    training_bytes_between: int  # what all ranks sent between nodes in training
    waiting_seconds: float  # so far, of a rank on average


class MetricsRow(InnerRow):
    """A line of metrics.jsonl after an epoch. It also has the strategy's status."""

    epoch: int
    train_loss: float  # mean over the epoch's steps and the ranks that see the whole model's loss


class ArtifactSummary(BaseModel):
    """A further model that the strategy made: its size and its metric."""

    name: str
    about: str
    file: str
    column: str  # heading of its column in the report; empty for none
    parameters: int
    bytes: int
    ratio: float  # parameters of the consolidated model over its own
    value: float  # its metric on the test set


class SeriesSummary(BaseModel):
    """How the report shows one value of the strategy's status."""

    title: str
    draw: Draw
    about: str
    row: str
    cell: str


class Summary(BaseModel):
    """summary.json. Fields with a default were added later, so a summary without them can still be read."""

    model_config = ConfigDict(protected_namespaces=())

    task: str
    strategy: str
    model: str = ""
    ranks: int
    nodes: int
    link: str | None
    link_state: LinkState | None
    link_measured: dict[str, float] | None
    seed: int
    epochs: int
    steps: int
    samples: int
    seconds: float
    train_seconds: float
    metric: str
    value: float
    best: float
    higher_is_better: bool | None = None  # of the metric; None in older summaries: only accuracy was
    samples_per_second: float
    waiting_share: float
    wire_bytes_per_rank: int
    wire_bytes_by_link: dict[str, int]
    wire_bytes_by_purpose: dict[str, dict[str, int]]
    kernel_bytes_per_rank: int | None = None
    kernel_bytes_by_link: dict[str, int] | None
    parameters: int = 0
    parameters_consolidated: int = 0
    model_bytes: int = 0
    artifacts: list[ArtifactSummary] = []
    status: dict[str, Any] = {}
    series: dict[str, SeriesSummary] = {}
    peak_memory_bytes: int
    versions: dict[str, str]


NEEDED = [name for name, field in Summary.model_fields.items() if field.is_required()]  # fields of every summary
