# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test quick check fuzz golden docs release lowest browser cluster launchers tunnel ray trackers install clean

demo: install  ## compare strategies on two nodes with a real link of 100 Mbit/s between them
	$(BIN)/thinwire compare data_parallel "data_parallel(reducer=maxnorm(bits=4))" "data_parallel(reducer=powersgd(rank=4))" local_sgd diloco "daso(warmup_epochs=1, cooldown_epochs=1)" "ab(cutoff=0.3)" "ist(local_steps=32)" "local_parallel(blocks=2)" "pipeline(blocks=2)" "sequence([ab(cutoff=0.3), data_parallel(reducer=maxnorm(bits=4))])" auto --task digits --epochs 10 --ranks 4 --nodes 2 --link 100mbit --seeds 2 --target 95 --baseline alone

test: install check browser  ## everything that must hold
	$(BIN)/python -m pytest -n 3 --dist worksteal

quick: install  ## tests that start no process, and a fifth of the cases of each: for while you work
	$(BIN)/python -m pytest -n 2 --dist worksteal -m quick

check: install  ## style, types, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

fuzz: install  ## 100,000 seeded cases of wrong text, files and messages; a table of what they ended in
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz

golden: install  ## run every method for a few steps; show what differs from tests/golden/files, and rewrite those
	$(BIN)/python -m tests.golden

docs: install browser  ## the documentation as a site in site/, with links checked, and looked at in a browser
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m tests.site_in_browser site

release: install  ## wheel and sdist in dist/, checked, and the wheel tried in a fresh environment outside this folder
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tools/release.py dist

lowest:  ## the quick tests with the lowest versions that pyproject.toml allows, in an environment of their own
	$(PYTHON) -m venv --clear .venv-lowest
	$(PYTHON) tools/lowest.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/pip install --quiet -c .venv-lowest/constraints.txt -e ".[dev]"
	.venv-lowest/bin/python -m pytest -n 2 --dist worksteal -m quick

browser:  ## Debian's chromium, which looks at report.html and at the site; without it, that is skipped
	@command -v chromium > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo "installing chromium" \
	&& apt-get update -qq > /dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium > /dev/null; } \
	|| echo "chromium cannot be installed here: report.html and the site will not be looked at"

cluster: install launchers tunnel  ## thinwire under mpirun and a real Slurm of two nodes, started here, and through WireGuard
	$(BIN)/python -m pytest tests/cluster

launchers:  ## Debian's Slurm and Open MPI; tests of what is not there are skipped
	@{ command -v slurmctld && command -v slurmd && command -v munged && command -v srun && command -v mpirun; } > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo "installing Slurm and Open MPI" \
	&& apt-get update -qq > /dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge openmpi-bin > /dev/null; } \
	|| echo "Slurm and Open MPI cannot be installed here: tests of what is missing will be skipped"

tunnel:  ## Debian's WireGuard, which works without the Linux kernel's module; without it, its test is skipped
	@{ command -v wg && command -v wireguard-go && command -v ip; } > /dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && echo "installing WireGuard" \
	&& apt-get update -qq > /dev/null && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends wireguard-tools wireguard-go iproute2 > /dev/null; } \
	|| echo "WireGuard cannot be installed here: its test will be skipped"

ray: install  ## the tests with Ray Train, which is 500 MB and so is not installed for the others
	$(BIN)/pip install --quiet -c constraints.txt -e ".[ray]"
	$(BIN)/python -m pytest tests/integrations/test_ray.py tests/test_examples.py -k ray

trackers: install  ## the tests with MLflow and trackio, which are 600 MB
	$(BIN)/pip install --quiet -c constraints.txt -e ".[mlflow,trackio]"
	$(BIN)/python -m pytest tests/run/test_tracking.py

install: .venv/installed  ## a virtual environment in this checkout; quick when nothing changed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "thinwire needs Python 3.11 or newer; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:  ## remove the virtual environment and caches
	rm -rf .venv .venv-lowest site .mypy_cache .ruff_cache .pytest_cache .hypothesis
