"""Of steps that are alike few are recorded: the run made longer is the run that would have been recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.golden import runs
from thinwire.comm.world import place
from thinwire.data import Batch, Shard
from thinwire.plan.lengthening import ENOUGH_STEPS, lengthened
from thinwire.plan.recorded_run import RecordedRun, Training, record_run
from thinwire.strategies.recipe import Recipe

STEPS, EPOCHS = 11, 2
STRATEGIES = [spec for specs in runs.strategies().values() for spec in specs]
WITHOUT_ROUNDS = ("data_parallel", "local_parallel", "pipeline")
ALIKE = [spec for spec in STRATEGIES if spec.startswith(WITHOUT_ROUNDS) and "readout" not in spec]
REDUCERS = [f"data_parallel(reducer={spec}, bucket_mb=0.02)" for specs in runs.reducers().values() for spec in specs]
WITH_PHASES = [spec for spec in REDUCERS if "warmup" in spec]


def run_of(spec: str, steps: int) -> RecordedRun:
    """A recorded run whose last batch of an epoch is smaller."""
    recipe = Recipe(nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), clip_norm=5.0)

    def batches(shard: Shard) -> list[Batch]:
        inputs, targets = runs.batches(0, shard)[0]
        return [(inputs, targets)] * (steps - 1) + [(inputs[: len(inputs) // 2], targets[: len(inputs) // 2])]

    return record_run(spec, Training(runs.MODEL, recipe, batches, EPOCHS), place(4, 2))


@pytest.mark.parametrize("spec", [spec for spec in ALIKE + REDUCERS if spec not in WITH_PHASES])
def test_a_run_made_longer_is_the_longer_run(spec: str) -> None:
    short, long = run_of(spec, ENOUGH_STEPS), run_of(spec, STEPS)
    made = lengthened(short, STEPS)
    assert made is not None
    assert made.steps_per_epoch == long.steps_per_epoch == STEPS
    assert made.traces.keys() == long.traces.keys()
    for rank, trace in long.traces.items():
        assert made.traces[rank].events == trace.events
        assert made.traces[rank].tasks == trace.tasks
        assert made.traces[rank].num_operations == trace.num_operations


@pytest.mark.parametrize(
    "spec",
    [
        "local_sgd(every=1)",
        "diloco(every=4, fragments=2)",
        "local_parallel(blocks=2, head=readout(every=2))",
        *WITH_PHASES,
    ],
)
def test_a_run_whose_steps_differ_is_not_made_longer(spec: str) -> None:
    assert lengthened(run_of(spec, ENOUGH_STEPS), STEPS) is None
