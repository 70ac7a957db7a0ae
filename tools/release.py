"""Check wheel and sdist: they hold every file, and the wheel works in a fresh environment outside the checkout.

`make release` runs it: python tools/release.py dist
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
IN_SDIST = ("src", "tests", "docs", "examples", "benchmarks", "tools")
BESIDE = ("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt",
          "mkdocs.yml")  # fmt: skip
COMMANDS = (
    "thinwire --version",
    "thinwire list strategies",
    "thinwire train --ranks 2 --epochs 1 --out runs/one",
    "thinwire compare data_parallel diloco --ranks 2 --epochs 1 --seeds 1 --out runs/both",
    "thinwire report runs/both",
    "thinwire plan data_parallel diloco --ranks 4 --link 100mbit --out runs/plan",
)


def files_below(folder: Path) -> set[str]:
    """Files of a folder by their path in it, without what Python and its tools write."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if path.suffix != ".pyc" and not path.parts[0].endswith(".egg-info")}


def version() -> str:
    """The version in the source."""
    text = (SOURCE / "thinwire" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.M)
    assert found, "src/thinwire/__init__.py has no __version__"
    return found[1]


def check_files(wheel: Path, sdist: Path) -> None:
    """Every file of the source is in the wheel, and every file of the project in the sdist; nothing else is."""
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    _check_equal(wheel.name, inside, files_below(SOURCE))
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {f"{folder}/{file}" for folder in IN_SDIST for file in files_below(ROOT / folder)} | set(BESIDE)
    _check_equal(sdist.name, packed - {"PKG-INFO", ".gitignore"}, wanted)


def _check_equal(name: str, inside: set[str], wanted: set[str]) -> None:
    if inside != wanted:
        sys.exit(f"{name}: lacks {sorted(wanted - inside)}, and should not have {sorted(inside - wanted)}")


def check_installed(wheel: Path) -> None:
    """Install the wheel in a new environment, and run commands there in an empty folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = folder / "environment" / "bin"
        venv.create(programs.parent, with_pip=True)
        pip = [str(programs / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)], check=True)
        for command in COMMANDS:
            print(f"$ {command}", flush=True)
            done = subprocess.run(
                [programs / "thinwire", *command.split()[1:]], cwd=folder, env=_plain(), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
            )  # fmt: skip
            if done.returncode:
                sys.exit(f"{done.stdout}\n{command}: exit code {done.returncode}")
            if command == "thinwire --version" and done.stdout.strip() != version():
                sys.exit(f"the wheel says it is {done.stdout.strip()}, and the source {version()}")
        for page in ("runs/both/report.html", "runs/plan/plan.html"):
            if "plotly" not in (folder / page).read_text():
                sys.exit(f"{page} has no figures")


def _plain() -> dict[str, str]:
    """An environment in which no checkout is on Python's path."""
    return {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def main(dist: Path) -> None:
    """Check the wheel and the sdist in a folder that holds nothing else."""
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert version() in wheel.name, f"{wheel.name} is not of version {version()}"
    check_files(wheel, sdist)
    check_installed(wheel)
    for path in (wheel, sdist):
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
