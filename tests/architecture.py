"""The layers of the source, and its import graph by folder.

`python -m tests.architecture` draws the graph: docs/imports.svg, and the list in docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.import_picture import picture

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "thinwire"
PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "imports.svg"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {str(path.relative_to(SOURCE).with_suffix("")) for path in FILES}

# Folders, and the modules beside them, lowest first. Each may import from those before it and from itself.
LAYERS = [
    "errors", "common", "spec", "registry", "losses", "data", "optim", "netlab", "kernels", "codecs", "comm",
    "reducers", "surgery", "exchange", "strategies", "tasks", "config", "plan", "run", "elastic", "launch", "compare",
    "advice", "integrations", "cli", "__main__", "__init__",
]  # fmt: skip


def name(path: Path) -> str:
    """A module as the tests call it: folder/module."""
    return str(path.relative_to(SOURCE).with_suffix(""))


def layer(module: str) -> str:
    """The folder of a module, or the module itself where it lies in none."""
    return module.split("/")[0]


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Modules that a file imports; with everywhere=False, only those that importing it imports."""
    tree = parsed(path)
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def own(path: Path) -> set[str]:
    """Modules of this project that a file imports."""
    wanted = {m.removeprefix("thinwire.").replace(".", "/") for m in imports(path) if m.startswith("thinwire.")}
    return {m for m in wanted if m in MODULES or f"{m}/__init__" in MODULES}


def graph() -> dict[str, set[str]]:
    """The layers that each layer imports from, read from the source."""
    found: dict[str, set[str]] = {one: set() for one in LAYERS}
    for path in FILES:
        here = layer(name(path))
        found[here] |= {layer(module) for module in own(path)} - {here}
    return found


def _whole() -> dict[str, set[str]]:
    """The graph without the two modules that begin with everything."""
    return {one: below for one, below in graph().items() if one not in ("__init__", "__main__")}


def drawn() -> str:
    """The graph as a picture; arrows that follow from others are left out of it, and are in the list."""
    whole = _whole()
    implied = {one: {far for near in others for far in _below(near, whole)} for one, others in whole.items()}
    return picture({one: _ordered(others - implied[one]) for one, others in whole.items()})


def listed() -> str:
    """The whole graph as text."""
    lines = [f"{one:<12} → {', '.join(_ordered(others)) or '–'}" for one, others in reversed(_whole().items())]
    return "\n".join(["```text", *lines, "```"])


def _below(one: str, whole: dict[str, set[str]]) -> set[str]:
    """Everything that a layer imports, by itself or by others."""
    return whole[one] | {far for near in whole[one] for far in _below(near, whole)}


def _ordered(layers: set[str]) -> list[str]:
    return sorted(layers, key=LAYERS.index, reverse=True)


def written(page: str) -> str:
    """The page with the list of today."""
    return re.sub(
        r"(<!-- import graph: .*? -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{listed()}\n\n{m[2]}", page, flags=re.S
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    PICTURE.write_text(drawn())
