"""Specs: `name(option=value, …)` as text, for everything in the registry."""

from __future__ import annotations

import ast
import math
import threading
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import UsageError

Value = Any  # None, bool, int, float, str, a list of these, or another Spec


@dataclass(frozen=True)
class Spec:
    """A name with its arguments, as parsed from text; `str()` gives the text back."""

    name: str
    args: tuple[Value, ...] = ()
    options: dict[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = [_show(v) for v in self.args] + [f"{k}={_show(v)}" for k, v in self.options.items()]
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def __hash__(self) -> int:
        return hash(str(self))


MOST_BITS = 4096  # of whole numbers: Python does not write much larger ones as text
_PARSING = threading.Lock()  # Python 3.11's ast.parse may fail when several threads call it at once


def parse(text: str) -> Spec:
    """Read a spec. The text is parsed, never evaluated.

    >>> parse("daso(ranks_per_node=2, reducer=maxnorm(bits=4))").options["reducer"].name
    'maxnorm'
    >>> str(parse("error_feedback( global_randk(ratio = 0.01) )"))
    'error_feedback(global_randk(ratio=0.01))'
    """
    if not isinstance(text, str):
        raise UsageError(f"{text!r} is not a spec; expected text such as 'data_parallel' or 'maxnorm(bits=4)'")
    try:
        with _PARSING:
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _malformed(text) from None
    if isinstance(tree, ast.Tuple):
        raise UsageError(f"'{text}' is several; give them one by one, as thinwire compare data_parallel local_sgd")
    value = _value(tree, text)
    if not isinstance(value, Spec):
        raise _malformed(text)
    return value


def _value(node: ast.expr, text: str) -> Value:
    match node:
        case ast.Name(id=name):
            return Spec(name)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            options: dict[str, Value] = {}
            for keyword in keywords:
                if keyword.arg is None:
                    raise _malformed(text)
                if keyword.arg in options:
                    raise UsageError(f"'{text}': {keyword.arg} is given twice; leave one out")
                options[keyword.arg] = _value(keyword.value, text)
            return Spec(name, tuple(_value(a, text) for a in args), options)
        case ast.Constant(value=int() as number) if number.bit_length() > MOST_BITS:
            raise UsageError(f"'{text}': a whole number of more than {MOST_BITS} bits is not possible")
        case ast.Constant(value=float() as number) if math.isinf(number):
            raise UsageError(f"'{text}': a number is too large; possible: up to 1.7e308")
        case ast.Constant(value=None | bool() | int() | float() | str() as constant):
            return constant
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -_value(node.operand, text)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item, text) for item in items]
    raise _malformed(text)


def _show(value: Value) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    return str(value) if isinstance(value, Spec) else repr(value)


def _malformed(text: str) -> UsageError:
    name, bracket, rest = text.strip().partition("(")
    if "-" in name and name.replace("-", "_").isidentifier():
        return UsageError(f"cannot read '{text}'; names have no '-': try {name.replace('-', '_')}{bracket}{rest}")
    if ":" in name:
        return UsageError(
            f"cannot read '{text}'; expected a name or name(option=value, …) from 'thinwire list'. Only a task, an "
            "optimizer and a metric can be your own package.module:function; a model of your own is part of such a "
            "task: Task(…, model=make)"
        )
    return UsageError(
        f"cannot read '{text}'; expected a name or name(option=value, …), "
        "for example data_parallel, maxnorm(bits=4) or local_parallel(cut=['2.conv']); text that is not a name goes in "
        "quotes, a list in [ ]" + ("; a ) is missing" if text.count("(") > text.count(")") else "")
    )
