"""TensorBoard's event files, in the run's folder `tensorboard`: tensorboard --logdir DIR shows them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from thinwire.run.tracking.base import About


class TensorBoard:
    """Each number is a scalar; the settings are a text.

    The file is written by the calling thread. tensorboardX's SummaryWriter has a thread of its own; if that fails, as
    on a full disk, the caller would wait for it for ever.
    """

    def __init__(self, about: About) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter

        self.summary: Any = summary
        folder = about.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        own = f".{uuid.uuid4().hex[:8]}"  # a second file of the same second would overwrite the first
        self.file: Any = EventsWriter(str(folder / "events"), own)
        if about.is_new:
            lines = ["| setting | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in about.settings.items())]
            self._add(0, summary.text("settings", "\n".join(lines)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._add(step, self.summary.scalar(name, value))
        self.file.flush()

    def _add(self, step: int, summary: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self.file.write_event(Event(summary=summary, step=step, wall_time=time.time()))

    def close(self, is_complete: bool) -> None:
        self.file.close()


open_run = TensorBoard
