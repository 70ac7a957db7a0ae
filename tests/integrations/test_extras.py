"""Adapters whose framework is not installed say which extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest

FRAMEWORKS = {"lightning": "lightning", "huggingface": "transformers", "accelerate": "accelerate", "ray": "ray"}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_without_its_framework_an_adapter_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    framework = FRAMEWORKS[name]
    for module in [m for m in sys.modules if m == framework or m.startswith(f"{framework}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, f"thinwire.integrations.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"{framework}.*pip install 'thinwire\[{name}\]'"):
        importlib.import_module(f"thinwire.integrations.{name}")
