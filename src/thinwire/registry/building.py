"""From a spec to the thing that it names: look it up, check its options, call it.

Options are the parameters of the function or class. Positional-only parameters (before the `/`) are filled in by
thinwire and are not options.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, NamedTuple, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from thinwire.errors import UsageError, invalid, unknown
from thinwire.registry.lookup import load
from thinwire.registry.table import SINGULAR, TABLE
from thinwire.spec import Spec, parse

KIND_OF_TYPE = {"Reducer": "reducers", "Head": "heads"}  # an option of this type is itself a spec, of this kind
STRATEGIES = list[Spec]  # an option of this type is a list of strategies, which are checked and built later
Parameters = dict[str, inspect.Parameter]


def build(kind: str, spec: Spec | str, *leading: Any) -> Any:
    """Make the thing that a spec names; `leading` are its positional-only arguments.

    >>> build("schedules", "cosine(warmup_epochs=1)")(0.5, 10)
    0.5
    """
    spec = spec if isinstance(spec, Spec) else parse(spec)
    target = load(kind, spec.name)
    return target(*leading, **bind_options(target, spec))


def check(kind: str, spec: Spec | str) -> None:
    """Raise UsageError unless the spec names a registered thing and all its options are valid."""
    spec = spec if isinstance(spec, Spec) else parse(spec)
    bind_options(load(kind, spec.name), spec)


def strategies_in(spec: Spec | str) -> list[Spec]:
    """The strategies that a strategy is made of; the strategy itself, if it is not made of others.

    >>> [str(one) for one in strategies_in("sequence([alone, local_sgd(every=2)])")]
    ['alone', 'local_sgd(every=2)']
    """
    spec = spec if isinstance(spec, Spec) else parse(spec)
    target = load("strategies", spec.name)
    names = [name for name, hint in get_type_hints(target.__init__).items() if hint == STRATEGIES]
    return [one for name in names for one in bind_options(target, spec)[name]] or [spec]


def bind_options(target: Any, spec: Spec, num_leading: int = 0) -> dict[str, Any]:
    """The keyword arguments that a spec gives to a function or class, checked against its signature.

    The first `num_leading` parameters, and all positional-only ones, are not options.
    """
    options_of = _options_of if type(target).__hash__ is not None else _options_of.__wrapped__
    parameters, hints, model = options_of(target, spec.name, num_leading)
    given = _name_values(spec, parameters)
    for name, p in parameters.items():
        is_missing = p.default is p.empty and name not in given
        kind = KIND_OF_TYPE.get(_type_name(hints.get(name)))
        if kind and is_missing:
            raise UsageError(
                f"{spec.name}: {name} is missing; give a {SINGULAR[kind]}, for example {spec.name}(maxnorm)"
            )
        if hints.get(name) == STRATEGIES and is_missing:
            raise UsageError(
                f"{spec.name}: {name} is missing; give a list of strategies, as {spec.name}([data_parallel, local_sgd])"
            )
    given = {name: _build_nested(f"{spec.name}: {name}", value, hints.get(name)) for name, value in given.items()}
    try:
        checked = model(**given)
    except ValidationError as error:
        raise invalid(error, spec.name) from None
    return {name: getattr(checked, name) for name in parameters}


class _Options(NamedTuple):
    """What a function or class takes, and what checks it."""

    parameters: Parameters
    hints: dict[str, Any]
    model: type[BaseModel]


@functools.lru_cache(maxsize=256)
def _options_of(target: Any, owner: str, num_leading: int) -> _Options:
    """Made once: to read the types and to make a model of them takes milliseconds, to check values almost nothing."""
    function = target.__init__ if inspect.isclass(target) else target
    hints = get_type_hints(function, include_extras=True)
    parameters = {
        p.name: p
        for p in list(inspect.signature(function).parameters.values())[num_leading:]
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
    }
    fields: dict[str, Any] = {}
    for name, p in parameters.items():
        hint = hints.get(name, Any)
        is_built = _type_name(hint) in KIND_OF_TYPE
        fields[name] = (Any if is_built else hint, ... if p.default is p.empty else p.default)
    config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)
    return _Options(parameters, hints, create_model(owner, __config__=config, **fields))


def _name_values(spec: Spec, parameters: Parameters) -> dict[str, Any]:
    """The values of a spec by the names of their parameters: those without a name fill parameters in order."""
    if len(spec.args) > len(parameters):
        raise UsageError(
            f"{spec.name}: {len(spec.args)} values given, takes at most {len(parameters)}: "
            f"{', '.join(parameters) or 'it has no options'}"
        )
    given = dict(zip(parameters, spec.args, strict=False))
    for name, value in spec.options.items():
        if name not in parameters:
            raise unknown(f"option of {spec.name}", name, parameters)
        if name in given:
            raise UsageError(f"{spec.name}: {name} is given twice, by its place and by its name; leave one out")
        given[name] = value
    return given


def _build_nested(option: str, value: Any, hint: Any) -> Any:
    """For an option that is a reducer or a head, what its spec names; for others, a bare word as text."""
    if hint == STRATEGIES:
        return _checked_strategies(option, value)
    kind = KIND_OF_TYPE.get(_type_name(hint))
    if kind and isinstance(value, str):
        value = parse(value)
    if kind and not isinstance(value, Spec):
        raise UsageError(f"{option}={value!r} is not a {SINGULAR[kind]}; possible: {', '.join(TABLE[kind])}")
    if not isinstance(value, Spec):
        return value
    if kind:
        return build(kind, value)
    if value.args or value.options:
        raise UsageError(f"{option}={value} is not possible: should be a number, a word or a list, without brackets")
    return value.name


def _checked_strategies(option: str, value: Any) -> list[Spec]:
    if not isinstance(value, list):
        shown = f"[{value}]" if isinstance(value, Spec) else "[data_parallel, local_sgd]"
        raise UsageError(f"{option}={value} is not a list of strategies; write it in brackets, as {shown}")
    specs = [parse(item) if isinstance(item, str) else item for item in value]
    for number, spec in enumerate(specs, 1):
        if not isinstance(spec, Spec):
            raise UsageError(f"{option}: {spec!r} is not a strategy; possible: {', '.join(TABLE['strategies'])}")
        try:
            check("strategies", spec)
        except UsageError as error:
            raise UsageError(f"{option}, part {number}: {error}") from None
    return specs


def _type_name(hint: Any) -> str:
    return str(getattr(hint, "__name__", ""))
