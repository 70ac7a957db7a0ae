"""Fill the templates of the page. Autoescape is on: whatever a template does not mark as safe is text."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from thinwire.compare.report.words import join_with_and, pluralize, split_at_breaks


@functools.cache
def _environment(*folders: Path) -> Environment:
    loader = FileSystemLoader([*folders, Path(__file__).parent / "templates"])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = (join_with_and, pluralize, split_at_breaks)
    environment.filters |= {function.__name__: function for function in filters}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def render(template: str, **data: Any) -> str:
    """A template filled with data, as HTML."""
    return _environment().get_template(template).render(data)


def render_from(folder: Path, template: str, **data: Any) -> str:
    """A template of another folder, which may use those of this page."""
    return _environment(folder).get_template(template).render(data)
