"""The lowest versions that pyproject.toml allows, as constraints for pip.

`make lowest` runs the quick tests with them: python tools/lowest.py > constraints-lowest.txt
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lowest(dependencies: list[str]) -> list[str]:
    """Each dependency at its lower bound.

    >>> lowest(["numpy>=1.26", "rich>=13.7"])
    ['numpy==1.26', 'rich==13.7']
    """
    bounds = [re.fullmatch(r"([\w-]+)>=([\d.]+)", dependency) for dependency in dependencies]
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = (ROOT / "constraints.txt").read_text()  # torch and triton, as the other tests have them
    print(tested + "\n".join(line for line in lowest(project["dependencies"]) if not line.startswith("torch==")))
