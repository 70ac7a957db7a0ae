"""What an adapter says where its framework is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Inside, imports that fail name the extra of thinwire to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; thinwire.integrations.{name} needs it: pip install 'thinwire[{name}]'", name=error.name
        ) from error
