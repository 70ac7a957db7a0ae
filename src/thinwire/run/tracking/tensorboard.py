"""TensorBoard's event files, in the run's folder `tensorboard`: tensorboard --logdir DIR shows them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from thinwire.run.tracking.base import About


class TensorBoard:
    """Each number is a scalar; the settings are a text."""

    def __init__(self, about: About) -> None:
        from tensorboardX import SummaryWriter

        own = f".{uuid.uuid4().hex[:8]}"  # a second file of the same second would overwrite the first
        self.writer: Any = SummaryWriter(logdir=str(about.folder / "tensorboard"), filename_suffix=own)
        if about.is_new:
            lines = ["| setting | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in about.settings.items())]
            self.writer.add_text("settings", "\n".join(lines), 0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


open_run = TensorBoard
