"""Which version of the kernels runs: THINWIRE_KERNELS=eager (the default) or compiled.

`eager` is the reference and works everywhere. `compiled` is two to three times as fast on a CPU. A version is a module
with the functions of `eager`, with the same arguments and, to the bit, the same results. To add one, in Triton say,
write the module and add it to VERSIONS.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

from torch import Tensor

from thinwire.common.messages import say
from thinwire.errors import UsageError
from thinwire.kernels import eager

VERSIONS = {"eager": "thinwire.kernels.eager", "compiled": "thinwire.kernels.compiled"}
_broken_devices: list[str] = []  # on which the chosen version has failed


def check_choice() -> None:
    """Raise UsageError for an unknown THINWIRE_KERNELS, before any work."""
    _chosen_version("cpu")


def call_kernel(name: str, x: Tensor, *args: Tensor | int, out: Tensor) -> None:
    """Call one kernel on a matrix with a scale block per row. A single row is not worth more than the eager version."""
    version = _chosen_version(x.device.type) if x.shape[0] > 1 else eager
    if version is not eager:
        try:
            getattr(version, name)(x, *args, out)
            return
        except Exception as error:  # whatever a compiler may fail with
            _chosen_version.cache_clear()
            _broken_devices.append(x.device.type)
            say(
                f"kernels cannot be compiled here ({str(error).splitlines()[0]}); going on with the eager ones",
                once=True,
            )
    getattr(eager, name)(x, *args, out)


@functools.cache
def _chosen_version(device: str) -> ModuleType:
    choice = os.environ.get("THINWIRE_KERNELS", "eager")
    if choice not in VERSIONS:
        raise UsageError(f"THINWIRE_KERNELS={choice}; possible: {', '.join(VERSIONS)}")
    if choice == "eager" or device in _broken_devices:
        return eager
    say("compiling kernels: the first steps take some seconds, up to half a minute", once=True)
    return importlib.import_module(VERSIONS[choice])
