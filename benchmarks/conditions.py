"""The conditions of a measurement: when, with which code, on which machine; for results files."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from thinwire import __version__
from thinwire.common.files import write_text

REVISION = "THINWIRE_REVISION"  # names the revision on a machine that has a copy of the code without git
Found = dict[str, Any]


def conditions(device: str) -> Found:
    """Everything that a results file says about its measurements. `device` is cpu or cuda."""
    return {
        "date": today(), "revision": revision(), "hardware": hardware(device), "versions": versions(),
        "command": command(), **chosen_kernels(),
    }  # fmt: skip


def today() -> str:
    """The date, as 2026-01-31."""
    return datetime.date.today().isoformat()


@functools.cache
def revision() -> str:
    """The commit that is checked out, with -dirty if files differ from it; "unknown" without git."""
    if REVISION in os.environ:
        return os.environ[REVISION]
    git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware(device: str) -> Found:
    """The GPU if it is used, the CPU's model, and the number of cores."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {"gpu": gpu, "cpu": cpu_model(), "cpus": os.cpu_count()}


def cpu_model() -> str:
    """The model's name as Linux says it; where it says none, the kind of processor."""
    file = Path("/proc/cpuinfo")
    entries = (text.partition(":") for text in file.read_text().splitlines()) if file.exists() else ()
    return next((value.strip() for name, _, value in entries if name.strip() == "model name"), platform.machine())


def versions() -> Found:
    """The versions of Python, torch and thinwire."""
    import torch

    return {"python": platform.python_version(), "torch": str(torch.__version__), "thinwire": __version__}


def chosen_kernels() -> Found:
    """THINWIRE_KERNELS as "kernels", if it is set."""
    return {"kernels": os.environ["THINWIRE_KERNELS"]} if "THINWIRE_KERNELS" in os.environ else {}


def command() -> str:
    """The command of this process. Of paths it has the name alone: folders of a machine mean nothing elsewhere."""
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def where(hardware: Found) -> str:
    """The hardware in words."""
    gpu = f"one {hardware['gpu']}, " if hardware["gpu"] else ""
    return f"{gpu}{hardware['cpus']} cores ({hardware['cpu']})"


def write_json(path: Path, content: Found) -> None:
    """Write a results file: to a new file, which then replaces the old one."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
