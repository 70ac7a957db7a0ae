"""The table and the checks of what it names."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Literal

import pytest

from thinwire import registry
from thinwire.errors import UsageError
from thinwire.reducers.base import Reducer
from thinwire.spec import parse

EVERYTHING = [(kind, name) for kind, table in registry.TABLE.items() for name in table]


@pytest.mark.parametrize(("kind", "name"), EVERYTHING)
def test_every_line_of_the_table_leads_somewhere_documented(kind: str, name: str) -> None:
    target = registry.load(kind, name)
    assert inspect.getdoc(target), "has a docstring"
    (entry,) = (entry for entry in registry.describe(kind) if entry.name == name)
    needed = [option.name for option in entry.options if option.default is None]
    if not needed:
        registry.check(kind, name)
    else:
        with pytest.raises(UsageError, match=f"{name}: {needed[0]} is missing"):
            registry.check(kind, name)


@pytest.mark.parametrize("kind", registry.TABLE)
def test_what_the_source_says_is_what_python_sees(kind: str) -> None:
    for entry in registry.describe(kind):
        target = registry.load(kind, entry.name)
        assert entry.about == inspect.getdoc(target).split("\n")[0]  # type: ignore[union-attr]
        function = target.__init__ if inspect.isclass(target) else target
        parameters = [
            p for p in inspect.signature(function).parameters.values()
            if p.kind is not p.POSITIONAL_ONLY and p.name != "self"
        ]  # fmt: skip
        assert [o.name for o in entry.options] == [p.name for p in parameters]
        assert [o.default is None for o in entry.options] == [p.default is p.empty for p in parameters]


@pytest.mark.parametrize("kind", registry.TABLE)
def test_every_option_says_what_it_does(kind: str) -> None:
    silent = [
        f"{entry.name}.{option.name}"
        for entry in registry.describe(kind)
        for option in entry.options
        if not option.about
    ]
    assert silent == []


def example(leading: str, /, first: int, *, reducer: Reducer, mode: Literal["a", "b"] = "a") -> tuple[object, ...]:
    return leading, first, reducer, mode


def test_options_are_bound_checked_and_built() -> None:
    leading, first, reducer, mode = example(
        "given", **registry.bind_options(example, parse("example(3, reducer=mean, mode=b)"))
    )
    assert (leading, first, mode) == ("given", 3, "b")
    assert isinstance(reducer, Reducer)
    assert isinstance(registry.bind_options(example, parse("example(1, reducer='mean()')"))["reducer"], Reducer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("example(1)", "reducer is missing"),
        ("example('x', reducer=mean)", "first='x' is not possible: should be a valid integer"),
        ("example(1, reducer=mean, mode=c)", "mode='c' is not possible: should be 'a' or 'b'"),
        ("example(1, reducer=meen)", "unknown reducer 'meen'; did you mean 'mean'?"),
        ("example(1, reducer=4)", "example: reducer=4 is not a reducer; possible: mean, fp16"),
        ("example(1, reducer=mean(x=1))", "unknown option of mean 'x'"),
        (
            "example(1, mode=f(x=1), reducer=mean)",
            "example: mode=f(x=1) is not possible: should be a number, a word or a list",
        ),
        ("example(1, 2, 3, 4)", "4 values given, takes at most 3: first, reducer, mode"),
        ("example(1, first=2)", "first is given twice, by its place and by its name; leave one out"),
        ("example(1, redcer=mean)", "did you mean 'reducer'?"),
        ("example(1, leading=2)", "unknown option of example 'leading'"),
    ],
)
def test_mistakes_say_what_is_possible(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        registry.bind_options(example, parse(text))
    assert message in str(caught.value)


@dataclass
class Unhashable:
    """Something of the user's that can be called, but is no key of a dictionary."""

    depth: int = 3

    def __call__(self, depth: int = 3) -> int:
        return depth


def test_options_of_what_cannot_be_a_key() -> None:
    assert registry.bind_options(Unhashable(), parse("example(5)")) == {"depth": 5}


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="unknown strategy 'dataparallel'; did you mean 'data_parallel'"):
        registry.build("strategies", "dataparallel")


def test_every_module_of_the_table_is_ours() -> None:
    for kind, name in EVERYTHING:
        module, _ = registry.find(kind, name)
        assert importlib.import_module(module).__name__.startswith("thinwire.")


def test_a_name_of_another_kind_is_recognised() -> None:
    with pytest.raises(UsageError, match=r"maxnorm is a reducer, not a strategy; try data_parallel\(reducer=maxnorm\)"):
        registry.check("strategies", "maxnorm")
    with pytest.raises(UsageError, match="data_parallel is a strategy, not a reducer"):
        registry.check("reducers", "data_parallel")
