"""Check the name of a task without importing it: a registered one, or the user's own."""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path

from thinwire.errors import UsageError
from thinwire.registry import TABLE, find

OWN_TASK_FORM = "package.module:function"


def check_task_name(text: str) -> None:
    """Raise UsageError unless the name is that of a registered task, or of the form package.module:function."""
    head, colon, rest = text.partition(":")
    name = head.partition("(")[0].strip()
    if colon and rest and not name.endswith(".py") and all(part.isidentifier() for part in name.split(".")):
        return  # whether it exists shows when it is loaded
    if not colon and any(name in names for names in TABLE.values()):
        find("tasks", name)
        return
    similar = [*_own_tasks(name), *difflib.get_close_matches(name, TABLE["tasks"], n=1)]
    same_function = [task for task in similar if task.partition(":")[2] == rest.partition("(")[0]]
    suggestion = next(iter([*same_function, *similar]), "")
    hint = f"did you mean '{suggestion}'? Possible" if suggestion else "possible"
    registered = ", ".join(sorted(TABLE["tasks"]))
    raise UsageError(
        f"unknown task '{text}'; {hint}: {registered}, or your own as {OWN_TASK_FORM}, importable from this folder"
    )


MOST_LETTERS = 200  # of the name of a module: the name of a file cannot have many more


def _own_tasks(name: str) -> list[str]:
    """Tasks, as package.module:function, that may be meant by a module, its file, or module.function."""
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
            if module and len(module) < MOST_LETTERS and file.is_file():
                found = [node for node in _parse(file).body if isinstance(node, ast.FunctionDef)]
                return [function.name for function in found if _takes_data_and_seed(function)]
    return []


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.Module([], [])


def _takes_data_and_seed(function: ast.FunctionDef) -> bool:
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    takes_two = len(positional) - len(args.defaults) <= 2 <= len(positional) and None not in args.kw_defaults
    return takes_two and not function.name.startswith("_")
