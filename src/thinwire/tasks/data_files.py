"""Find the files of a data set below the folder that --data names."""

from __future__ import annotations

import re
from pathlib import Path

from thinwire.errors import UsageError


def find_file(data: Path | None, task: str, *names: str) -> Path:
    """The first of these files in the folder that --data names, or in a subfolder with the task in its name."""
    if data is None:
        raise UsageError(f"{task} needs its data; give the folder that holds {names[0]} as --data DIR")
    if not data.is_dir():
        raise UsageError(f"--data {data} is not a folder; give the one that holds {names[0]}")
    for folder in (data, *sorted(p for p in data.iterdir() if p.is_dir() and re.search(task, p.name.replace("-", "")))):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise UsageError(f"{task}: none of {', '.join(names)} is in {data}; give the folder that holds them as --data DIR")
