"""From a name to the function or class that it names, with an error for a wrong name."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any

from thinwire.errors import UsageError, unknown
from thinwire.registry.table import SINGULAR, TABLE


def find(kind: str, name: str) -> tuple[str, str]:
    """The module and attribute registered under a name; nothing is imported.

    >>> find("reducers", "fp16")
    ('thinwire.reducers.half', 'fp16')
    """
    if name not in TABLE[kind]:
        other = kind_of(name)
        raise _wrong_kind(name, other, kind) if other else unknown(SINGULAR[kind], name, TABLE[kind])
    module, attribute = TABLE[kind][name].split(":")
    return module, attribute


def load(kind: str, name: str) -> Any:
    """The function or class registered under a name."""
    module, attribute = find(kind, name)
    return getattr(importlib.import_module(module), attribute)


def kind_of(name: str) -> str | None:
    """The kind of thing that is registered under a name.

    >>> kind_of("fp16"), kind_of("fp17")
    ('reducers', None)
    """
    return next((kind for kind, names in TABLE.items() if name in names), None)


def import_attribute(module: str, name: str, what: str) -> Any:
    """Something of the user's own: an attribute of a module, which may also lie in the current folder."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    loaded = None
    try:
        loaded = importlib.import_module(module)
        return getattr(loaded, name)
    except (ImportError, AttributeError, ValueError) as error:
        near = difflib.get_close_matches(name, vars(loaded), n=1) if loaded else []
        hint = f"did you mean '{module}:{near[0]}'? Expected" if near else "expected"
        raise UsageError(
            f"cannot load {what}: {error}; {hint} package.module:function, importable from this folder"
        ) from error


def _wrong_kind(name: str, actual: str, wanted: str) -> UsageError:
    """The error for a registered name of another kind, such as a reducer where a strategy is wanted."""
    as_option = {"reducers": f"try data_parallel(reducer={name})", "heads": f"try local_parallel(head={name})"}
    hint = as_option.get(actual, f"give it as --{SINGULAR[actual]} {name}")
    possible = ", ".join(sorted(TABLE[wanted]))
    return UsageError(f"{name} is a {SINGULAR[actual]}, not a {SINGULAR[wanted]}; {hint}. Possible: {possible}")
