"""Trackio, in a database in the run's folder `trackio` unless TRACKIO_DIR says otherwise.

To look at it: TRACKIO_DIR=DIR/trackio trackio show
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from thinwire.run.tracking.base import PROJECT, About, unless_set


class Trackio:
    """Each row is a step of a run."""

    def __init__(self, about: About) -> None:
        folder = str(about.folder.absolute() / "trackio")
        quiet = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}
        with unless_set(TRACKIO_DIR=folder, **quiet), redirect_stdout(StringIO()):
            import trackio

            self.module: Any = trackio
            trackio.init(
                project=PROJECT, name=f"{about.folder.name}-{about.id}", config=dict(about.settings), resume="allow",
                embed=False,
            )  # fmt: skip

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.module.log(dict(values), step=step)

    def close(self, is_complete: bool) -> None:
        with redirect_stdout(StringIO()):
            self.module.finish()


open_run = Trackio
