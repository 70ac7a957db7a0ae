"""Names of tasks, told apart without importing anything: registered ones, and the user's own."""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.registry import TABLE, find

OWN = "package.module:function"


def check_name(text: str) -> None:
    """Raise UsageError unless a task is registered under a name, or it is written package.module:function."""
    head, colon, rest = text.partition(":")
    name = head.partition("(")[0].strip()
    if colon and rest and not name.endswith(".py") and all(part.isidentifier() for part in name.split(".")):
        return  # loading it tells the rest
    if not colon and any(name in names for names in TABLE.values()):
        find("tasks", name)
        return
    near = [*_own_tasks(name), *difflib.get_close_matches(name, TABLE["tasks"], n=1)]
    meant = next((own for own in near if own.partition(":")[2] == rest.partition("(")[0]), near[0]) if near else ""
    hint = f"did you mean '{meant}'? Possible" if meant else "possible"
    registered = ", ".join(sorted(TABLE["tasks"]))
    raise UsageError(f"unknown task '{text}'; {hint}: {registered}, or your own as {OWN}, importable from this folder")


def _own_tasks(name: str) -> list[str]:
    """What may be meant by the name of a module, its file, or a function behind a dot: as package.module:function."""
    module = name.removeprefix("./").removesuffix(".py").replace("/", ".")
    parent, _, function = module.rpartition(".")
    return [f"{module}:{f}" for f in _functions(module)] or [
        f"{parent}:{f}" for f in _functions(parent) if f == function
    ]


def _functions(module: str) -> list[str]:
    """The public functions of (data, seed) that the file of a module defines; none if there is no such file."""
    path = module.replace(".", "/")
    for folder in ("", *sys.path):
        for file in (Path(folder, f"{path}.py"), Path(folder, path, "__init__.py")):
            if module and file.is_file():
                found = [node for node in _parsed(file).body if isinstance(node, ast.FunctionDef)]
                return [function.name for function in found if _takes_data_and_seed(function)]
    return []


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _takes_data_and_seed(function: ast.FunctionDef) -> bool:
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    needs_two = len(positional) - len(args.defaults) <= 2 <= len(positional) and None not in args.kw_defaults
    return needs_two and not function.name.startswith("_")
