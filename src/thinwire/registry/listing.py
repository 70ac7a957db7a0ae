"""What `thinwire list` shows, read from the source without importing it, so without torch.

A thing's summary is the first line of its docstring. Its options are its parameters; what an option does is the comment
behind it, on its last line. A line of a reducer's docstring that begins with "Wire: " tells what it sends.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

from thinwire.registry.lookup import find
from thinwire.registry.table import TABLE

SOURCE = Path(__file__).parent.parent.parent  # the folder that holds the package


class Option(NamedTuple):
    """One option of a registered thing, as its source code states it."""

    name: str
    type: str
    default: str | None  # None: must be given
    about: str


class Entry(NamedTuple):
    """What `thinwire list` shows of a registered thing."""

    name: str
    about: str
    options: list[Option]
    wire: str  # of reducers: bits per element, and whether they sum on the wire


def describe(kind: str) -> list[Entry]:
    """Names, summaries and options of one kind."""
    return [_describe(name, *find(kind, name)) for name in TABLE[kind]]


def _describe(name: str, module: str, attribute: str) -> Entry:
    path = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == attribute)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    text = (ast.get_docstring(node) or "").split("\n")
    wire = next((line.removeprefix("Wire: ") for line in text if line.startswith("Wire: ")), "")
    if isinstance(node, ast.ClassDef):
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return Entry(name, text[0], _read_options(node.args, source.splitlines()), wire)


def _read_options(args: ast.arguments, lines: list[str]) -> list[Option]:
    """The parameters that are not positional-only, each with the comment behind it."""
    defaults: list[ast.expr | None] = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    pairs = [*zip(args.args, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [
        Option(
            name=arg.arg,
            type=ast.unparse(arg.annotation) if arg.annotation else "",
            default=ast.unparse(default) if default else None,
            about=lines[((default or arg).end_lineno or arg.lineno) - 1].partition("  # ")[2],
        )
        for arg, default in pairs
        if arg.arg != "self"
    ]
