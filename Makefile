# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check install clean

demo: install  ## train the default task on four ranks and show what it sent
	$(BIN)/thinwire train --task digits --ranks 4

test: install check  ## everything that must hold
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: install  ## style, types, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

install: .venv/installed  ## a virtual environment in this checkout; quick when nothing changed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "thinwire needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:  ## remove the virtual environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
