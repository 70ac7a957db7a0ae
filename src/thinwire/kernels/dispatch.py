"""Which version of the kernels runs: THINWIRE_KERNELS=eager, compiled or triton.

`eager` is the reference and works everywhere; it is the default on a CPU. `compiled` is two to three times as fast
there. `triton` is for CUDA tensors, and the default for them. A version is a module with the functions of `eager`, with
the same arguments and, to the bit, the same results (of `compiled`, on a CPU alone). To add one, write the module and
add it to VERSIONS.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch

from thinwire.common.messages import say
from thinwire.errors import UsageError
from thinwire.kernels import eager

VERSIONS = {
    "eager": "thinwire.kernels.eager",
    "compiled": "thinwire.kernels.compiled",
    "triton": "thinwire.kernels.triton",
}
_broken_devices: list[str] = []  # on which the chosen version has failed


def check_choice() -> None:
    """Raise UsageError for an unknown THINWIRE_KERNELS, before any work."""
    choice_for("cpu")


def call_kernel(name: str, device: torch.device, *args: Any) -> None:
    """Call one kernel, of the version that is chosen for the device; of the eager one if the other fails.

    Kernels write into tensors that they are given. Those on the meta device have no memory, so there is nothing to do.
    """
    if device.type == "meta":
        return
    version = _chosen_version(device.type)
    if version is not eager:
        try:
            getattr(version, name)(*args)
            return
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # the eager one would fail too
            raise
        except Exception as error:  # whatever a compiler may fail with
            _give_up(device.type, error)
    getattr(eager, name)(*args)


@functools.cache
def _chosen_version(device: str) -> ModuleType:
    choice = choice_for(device)
    if choice == "eager" or device in _broken_devices:
        return eager
    if choice == "compiled":
        say("compiling kernels: the first steps take some seconds, up to half a minute", once=True)
    try:
        return importlib.import_module(VERSIONS[choice])
    except ImportError as error:
        _give_up(device, error)
        return eager


def choice_for(device: str) -> str:
    """The name of the version for a kind of device."""
    choice = os.environ.get("THINWIRE_KERNELS")
    if choice is None:
        return "triton" if device == "cuda" and importlib.util.find_spec("triton") else "eager"
    if choice not in VERSIONS:
        raise UsageError(f"THINWIRE_KERNELS={choice}; possible: {', '.join(VERSIONS)}")
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    return "eager" if choice == "triton" and device == "cpu" and not interprets else choice


def _give_up(device: str, error: Exception) -> None:
    _chosen_version.cache_clear()
    _broken_devices.append(device)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    say(f"kernels cannot be compiled here ({reason}); going on with the eager ones", once=True)
