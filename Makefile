# Two commands: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Packages are compiled when they are first imported, even where the environment forbids to write bytecode: pip would
# compile all of them, and without bytecode a hundred processes would compile what they import again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow soak test-oldest check setup wheel clean bench docs results

demo: setup
	$(BIN)/fedcover demo

# One test process more than cores, since some tests only wait for other processes; one thread in each of them.
WORKERS ?= $(shell expr $$(nproc) + 1)
test: setup check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

# Tests that take minutes with real processes: faults of a deployment, and the deployment guide, command by command.
# With FEDCOVER_SLOW=1 `make test` runs them too, and more examples of every law.
test-slow: setup
	FEDCOVER_SLOW=1 $(BIN)/pytest -m slow

# A run of 200 rounds on eight nodes with a random fault every ten rounds, all of them real processes; up to an hour.
soak: setup
	$(BIN)/python -m tests.endtoend.deploy.soak

# Run tests with the oldest versions that pyproject.toml allows, in a separate environment.
test-oldest: .venv-oldest/.ready
	OMP_NUM_THREADS=1 .venv-oldest/bin/pytest $(OLDEST)

OLDEST ?= tests/golden tests/endtoend/test_cli.py tests/endtoend/test_policy_settings.py tests/unit/report

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[all,dev]'
	touch $@

check: setup
	$(BIN)/ruff check src tests examples benchmarks tools
	$(BIN)/ruff format --check src tests examples benchmarks tools
	$(BIN)/mypy

# Build the documentation as a site that works offline, site/index.html, after filling numbers and tables into the pages.
docs: setup
	$(BIN)/python tools/docs/fill_numbers.py
	$(BIN)/python tools/docs/fill_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# After new results in docs/study: write the reports on studies, the numbers collected from them, and the pages again.
STUDIES ?= $(basename $(notdir $(wildcard docs/study/*.json)))
results: setup
	for name in $(STUDIES); do \
		$(BIN)/fedcover study $$name --results docs/study/$$name.json --out docs/study -q || exit 1; done
	$(BIN)/python tools/docs/collect_numbers.py
	$(BIN)/python tools/docs/fill_numbers.py
	$(BIN)/python tools/docs/fill_tables.py

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedcover needs Python 3.11 or newer; set PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[all,dev,docs]'
	touch $@

# The source distribution, and the wheel built from it.
DIST ?= dist
wheel: setup
	$(BIN)/python -m build --no-isolation --outdir $(DIST)

clean:
	rm -rf $(VENV) .venv-oldest build dist .bench *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Peers get an environment of their own. `make bench BENCH=--quick` takes two minutes instead of twenty.
bench: setup .venv-bench/.ready
	$(BIN)/python -m benchmarks.run $(BENCH)

.venv-bench/.ready: benchmarks/requirements.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	echo '*' > .venv-bench/.gitignore
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	touch $@
