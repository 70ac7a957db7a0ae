"""The pipeline baseline: backpropagation over ranks, with torch's schedules."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire as tw
from tests import training
from tests.strategies.test_local_parallel import MODELS, batches, loss_of, sgd
from tests.training import Data, steps, weights
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm
from thinwire.strategies.pipeline import Pipeline


def trainer(comm: Comm, spec: str, kind: str, **options: Any) -> Pipeline:
    made = training.trainer(comm, spec, MODELS[kind, 0.0], sgd, loss=loss_of, **options)
    assert isinstance(made, Pipeline)
    return made


def uneven(kind: str) -> Data:
    """Batches of 12, 12, 7 and 12 samples."""
    full, short = batches(kind, 4), batches(kind, 1, size=7)
    return [*full[:2], *short, full[3]]


def piped(comm: Comm, spec: str, kind: str, clip: float | None) -> tuple[dict[str, Tensor], list[float], bool]:
    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("objects are unpickled")

    kept = {name: getattr(dist, name) for name in ("send_object_list", "recv_object_list", "broadcast_object_list")}
    for name in kept:
        setattr(dist, name, forbidden)
    try:
        strategy = trainer(comm, spec, kind, clip_norm=clip)
        losses = steps(strategy, uneven(kind) if strategy.shard.count == 1 else batches(kind, 4))
        return weights(strategy.consolidate()), losses, strategy.sees_loss
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def backprop(kind: str, data: Data, clip: float | None) -> tuple[dict[str, Tensor], list[float]]:
    model = copy.deepcopy(MODELS[kind, 0.0])
    optimizer = sgd(model.parameters())
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return weights(model), losses


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ""), (2, ""), (4, ""), (4, "microbatches=6"), (4, "schedule=gpipe, microbatches=3"), (2, "microbatches=1"),
        (4, "blocks=2"), (3, "cut=['3', '6']"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("clip", [None, 0.05])
def test_it_computes_what_one_rank_would(
    process_world: ProcessWorlds, ranks: int, options: str, clip: float | None
) -> None:
    """On the small GPT, in which samples do not meet; with a batch that microbatches do not divide."""
    data = batches("gpt", 4) if "blocks=2" in options else uneven("gpt")
    wanted, wanted_losses = backprop("gpt", data, clip)
    results = process_world.run(piped, ranks, f"pipeline({options})", "gpt", clip)
    for found, losses, sees in results:
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
        if sees and "blocks=2" not in options:
            assert losses == pytest.approx(wanted_losses, rel=1e-4)
    assert sum(sees for _, _, sees in results) == (2 if "blocks=2" in options else 1)


def sent(comm: Comm) -> tuple[int, int]:
    strategy = trainer(comm, "pipeline", "deep")
    for batch in batches("deep", 5, size=12):
        strategy.step(batch)
    return strategy.layout.stage_index, sum(
        row["wire_bytes"] for row in comm.ledger.rows() if row["purpose"] == "train"
    )


def test_activations_go_forward_and_their_gradients_back(process_world: ProcessWorlds) -> None:
    for number, wire_bytes in process_world.run(sent, 4):
        neighbours = (number > 0) + (number < 3)
        fingerprints = (number < 3) * 5 * 8  # of targets, to the next stage
        assert wire_bytes == neighbours * (5 * 12 * 16 * 4 + 4) + fingerprints


def waiting(comm: Comm) -> float:
    strategy = trainer(comm, "pipeline", "deep")
    strategy.step(batches("deep", 1)[0])
    with comm.ledger.timeline.step(1):
        strategy.step(batches("deep", 1)[0])
    return comm.ledger.timeline.waiting_seconds


def test_standing_still_between_passes_is_waiting(process_world: ProcessWorlds) -> None:
    assert all(seconds > 0 for seconds in process_world.run(waiting, 2))


def what_is_said_of_unequal_blocks(comm: Comm) -> str:
    wide = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 90), nn.Linear(90, 90))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        training.trainer(comm, "pipeline", wide, sgd, loss=loss_of).begin(batches("deep", 1)[0][0])
    return said.getvalue()


def test_a_block_that_makes_the_others_wait_is_named_without_a_head(process_world: ProcessWorlds) -> None:
    said, *others = process_world.run(what_is_said_of_unequal_blocks, 2)
    assert said.startswith("thinwire: note: pipeline: block 2 of 2, from layer 1 on, has 100 % of the ")
    assert " % of the operations and the other ranks wait for it; to balance them, try fewer blocks, or" in said
    assert "head" not in said
    assert others == [""]


def another_shape(comm: Comm) -> str:
    strategy = trainer(comm, "pipeline", "gpt")
    strategy.step(batches("gpt", 1)[0])
    x, y = batches("gpt", 1)[0]
    try:
        strategy.step((x[:, :3], y[:, :3]))
    except tw.RunError as error:
        return str(error)
    except Exception as error:
        return type(error).__name__
    return ""


def test_samples_of_another_shape_are_refused_by_the_first_stage(process_world: ProcessWorlds) -> None:
    assert "a block passes on (3, 11)" in process_world.run(another_shape, 1)[0]
