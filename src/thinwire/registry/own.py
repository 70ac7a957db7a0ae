"""Something of the user's own, named as package.module:function(option=value)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from thinwire.errors import UsageError
from thinwire.registry.building import bind_options
from thinwire.registry.lookup import import_attribute
from thinwire.spec import parse

FORM = "package.module:function"


class Own(NamedTuple):
    """A function or class of the user's, and its options, checked against its signature."""

    function: Any
    options: dict[str, Any]


def is_own(text: str) -> bool:
    """Whether a name is that of something of the user's own.

    >>> is_own("my.optimizers:lion(beta=0.9)"), is_own("sgd(momentum=0.9)")
    (True, False)
    """
    return ":" in text.partition("(")[0]


def check_own_name(kind: str, text: str) -> None:
    """Raise UsageError unless the text has the form package.module:function; nothing is imported."""
    module, _, rest = text.partition(":")
    if not rest or module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"{kind} '{text}' cannot be read; expected {FORM}, importable from this folder")
    parse(rest)


def load_own(kind: str, text: str, arguments: Sequence[str], returns: str) -> Own:
    """Import what a text names; raise UsageError unless it takes these arguments first, and its options are valid."""
    check_own_name(kind, text)
    module, _, rest = text.partition(":")
    parsed = parse(rest)
    function = import_attribute(module, parsed.name, f"{kind} '{text}'")
    try:
        if not callable(function):
            raise TypeError
        inspect.signature(function).bind_partial(*arguments)
    except (TypeError, ValueError):
        shape = f"({', '.join(arguments)}, /, *, options…)"
        raise UsageError(f"{kind} '{text}' must be a function of {shape} that returns {returns}") from None
    num_leading = len(arguments) + inspect.isclass(function)  # the first argument of a class's __init__ is self
    return Own(function, bind_options(function, parsed, num_leading))
