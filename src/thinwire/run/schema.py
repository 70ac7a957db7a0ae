"""The fields of the files of a run: the rows of metrics.jsonl, and summary.json at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from thinwire.common.json_text import parse_json
from thinwire.errors import UsageError, invalid
from thinwire.run.network import LinkState
from thinwire.strategies.series import Draw

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


def _of_links(sent: dict[str, int]) -> dict[str, int]:
    if not sent.keys() <= {"inside", "between"}:
        raise ValueError(f"{list(sent)} is not possible: bytes are those inside nodes and between them")
    return sent


def _with_links(sent: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    if any(len(by_link) < 2 for by_link in sent.values()):
        raise ValueError("it needs inside and between for each purpose")
    return sent


def _with_rate(measured: dict[str, float]) -> dict[str, float]:
    if not measured.keys() >= {"rate_mbit", "latency_ms"}:
        raise ValueError("it needs rate_mbit and latency_ms")
    return measured


BytesByLink = Annotated[dict[str, Count], AfterValidator(_of_links)]
BytesByPurpose = Annotated[dict[str, BytesByLink], AfterValidator(_with_links)]
LinkRate = Annotated[dict[str, Seconds], AfterValidator(_with_rate)]


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
    parameters: Count
    bytes: Count
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
    ranks: Annotated[int, Field(ge=1, lt=2**31)]
    nodes: Annotated[int, Field(ge=1, lt=2**31)]
    link: str | None
    link_state: LinkState | None
    link_measured: LinkRate | None
    seed: Annotated[int, Field(ge=0)]
    epochs: Count
    steps: Count
    samples: Count
    seconds: Seconds
    train_seconds: Seconds
    metric: str
    value: float
    best: float
    higher_is_better: bool | None = None  # of the metric; None in older summaries: only accuracy was
    samples_per_second: Seconds
    waiting_share: Seconds
    wire_bytes_per_rank: Count
    wire_bytes_by_link: BytesByLink
    wire_bytes_by_purpose: BytesByPurpose
    kernel_bytes_per_rank: Count | None = None
    kernel_bytes_by_link: BytesByLink | None
    parameters: Count = 0
    parameters_consolidated: Count = 0
    model_bytes: Count = 0
    artifacts: list[ArtifactSummary] = []
    status: dict[str, Any] = {}
    series: dict[str, SeriesSummary] = {}
    peak_memory_bytes: Count
    versions: dict[str, str]


NEEDED = [name for name, field in Summary.model_fields.items() if field.is_required()]  # fields of every summary


# ---- what is read: files may be damaged, of other versions, or of strangers


class ReadRow(BaseModel):
    """What is needed of a row of metrics or of the ledger. Rows of older versions may have less than `InnerRow`."""

    model_config = ConfigDict(extra="allow")

    step: Count
    epoch: Annotated[float, Field(ge=0, le=1e9)] | None = None
    seconds: Seconds | None = None
    train_seconds: Seconds | None = None
    train_loss: float | None = None
    samples_per_second: Seconds | None = None
    wire_bytes: Count | None = None
    training_bytes: Count | None = None
    training_bytes_between: Count | None = None
    waiting_seconds: Seconds | None = None
    part: Count | None = None
    part_strategy: str | None = None
    phase: str | None = None

    @model_validator(mode="after")
    def _refuse_what_is_no_metric(self) -> ReadRow:
        for name, value in (self.model_extra or {}).items():
            if name.startswith("test_") and not isinstance(value, int | float | None):
                raise ValueError(f"{name} is no number")
            if name.startswith("test_") and self.epoch is None:
                raise ValueError(f"{name} without an epoch")
        part = (self.epoch, self.train_seconds, self.part_strategy, self.training_bytes, self.training_bytes_between)
        if self.part and self.part_strategy is not None and None in part:
            raise ValueError("a part of a sequence without its epoch, seconds or bytes")
        return self


class ReadSpan(BaseModel):
    """A row of timeline.jsonl."""

    step: Count
    rank: Count
    part: Count = 0
    kind: Literal["step", "waiting", "communication"]
    name: str
    begin: Annotated[float, Field(ge=0, le=1e9)]
    seconds: Annotated[float, Field(ge=0, le=1e9)]
    bytes: Count


Model = TypeVar("Model", bound=BaseModel)


def parsed(model: type[Model], text: str, where: Path | str) -> dict[str, Any]:
    """The JSON object in a text, as it is, once its fields are those of a model; UsageError if they are not."""
    try:
        value = parse_json(text)
        if not isinstance(value, dict):
            raise ValueError(f"it is no object, but {type(value).__name__}")
        model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise UsageError(f"{where} is damaged, or not thinwire's: {invalid(error, model.__name__)}") from None
    except ValueError as error:
        raise UsageError(f"cannot read {where}: {error}; it is damaged, or not thinwire's") from None
    return value
