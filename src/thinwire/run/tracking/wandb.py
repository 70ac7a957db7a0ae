"""Weights & Biases, offline in the run's folder `wandb` unless WANDB_MODE says otherwise: wandb sync uploads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from thinwire.run.tracking.base import PROJECT, About, unless_set


class WeightsAndBiases:
    """Each row is a step of a run; what a run that goes on adds is a second folder with the same id."""

    def __init__(self, about: About) -> None:
        with unless_set(WANDB_MODE="offline", WANDB_ERROR_REPORTING="false", WANDB_SILENT="true"):
            import wandb

            self.end_service = wandb.teardown
            own = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True)
            self.run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT), id=about.id, name=about.folder.name,
                dir=str(about.folder), config=dict(about.settings), resume="allow", settings=own,
            )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self, is_complete: bool) -> None:
        with unless_set(WANDB_MODE="offline", WANDB_SILENT="true"):
            self.run.finish(exit_code=0 if is_complete else 1)
            self.end_service()  # a process of its own


open_run = WeightsAndBiases
