"""Specs: text to objects and back, and nothing is ever evaluated."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import UsageError
from thinwire.spec import Spec, parse

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
specs = st.recursive(
    names.map(Spec),
    lambda inner: st.builds(
        Spec,
        names,
        st.lists(plain | inner | st.lists(plain, max_size=2), max_size=2).map(tuple),
        st.dictionaries(names, plain | inner, max_size=3),
    ),
    max_leaves=6,
)


@given(specs)
def test_text_and_spec_say_the_same(spec: Spec) -> None:
    assert parse(str(spec)) == spec


def test_brackets_without_options_are_the_bare_name() -> None:
    assert parse("mean()") == parse(" mean ") == Spec("mean")


def test_negative_and_nested_values() -> None:
    spec = parse("f(-3, [1, -2.5, 'a'], inner=g(x=None))")
    assert spec.args == (-3, [1, -2.5, "a"])
    assert spec.options == {"inner": Spec("g", (), {"x": None})}


@pytest.mark.parametrize(
    "text",
    ["", "3", "f(", "f(x=)", "f(**k)", "f(*a)", "f()()", "a.b", "f(x=1+1)", "f(lambda: 0)", "[f]", "f(x={})",
     "__import__('os').system('true')", "f(open('x').read())", "f; g", "f(x=b'1')", "f(x=1j)", "(" * 500 + ")" * 500],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        parse(text)
