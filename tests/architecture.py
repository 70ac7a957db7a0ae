"""The layers of the source, and its import graph by folder.

`python -m tests.architecture` draws the graph into docs/architecture.md.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "thinwire"
PAGE = ROOT / "docs" / "architecture.md"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {str(path.relative_to(SOURCE).with_suffix("")) for path in FILES}

# Folders, and the modules beside them, lowest first. Each may import from those before it and from itself.
LAYERS = [
    "errors", "common", "spec", "registry", "data", "loaders", "optim", "netlab", "kernels", "codecs", "comm",
    "reducers", "surgery", "exchange", "strategies", "tasks", "config", "plan", "run", "launch", "compare", "advice",
    "integrations", "cli", "__main__", "__init__",
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


def drawn() -> str:
    """The graph as text: arrows that follow from others are left out of the picture, and are in the list."""
    whole = {one: above for one, above in graph().items() if one not in ("__init__", "__main__")}
    shown = []
    for one, others in whole.items():
        reached = {far for near in others for far in _below(near, whole)}
        shown += [f"  {one} --> {other}" for other in _ordered(others - reached)]
    listed = [f"{one:<11}→ {', '.join(_ordered(others)) or '–'}" for one, others in reversed(whole.items())]
    return "\n".join(["```mermaid", "flowchart TD", *reversed(shown), "```", "", "```text", *listed, "```"])


def _below(one: str, whole: dict[str, set[str]]) -> set[str]:
    """Everything that a layer imports, by itself or by others."""
    return whole[one] | {far for near in whole[one] for far in _below(near, whole)}


def _ordered(layers: set[str]) -> list[str]:
    return sorted(layers, key=LAYERS.index, reverse=True)


def written(page: str) -> str:
    """The page with the graph of today."""
    return re.sub(
        r"(<!-- import graph: .*? -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{drawn()}\n\n{m[2]}", page, flags=re.S
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
