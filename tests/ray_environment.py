"""A Ray for one test: on loopback alone, in a temporary folder, and without a word to anybody."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.programs import ROOT


@contextmanager
def ray_environment() -> Iterator[dict[str, str]]:
    """The variables for a program that starts Ray."""
    with tempfile.TemporaryDirectory(prefix="tw-ray-") as folder:  # short: Ray's sockets lie in it
        yield {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the address of this node is 127.0.0.1
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the user's home
        }
