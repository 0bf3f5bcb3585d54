# Two commands: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow check setup clean bench docs

demo: setup
	$(BIN)/fedcover demo

# Tests run on all cores already: more threads in each of them only wait for one another.
test: setup check
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

# What takes minutes of real processes: faults of every kind in a deployment, and the guide followed to the letter.
# With FEDCOVER_SLOW=1 `make test` has them too, and more examples of every law.
test-slow: setup
	FEDCOVER_SLOW=1 $(BIN)/pytest -m slow

check: setup
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

# The documentation as a site in site/, which works offline: open site/index.html. Numbers are written into the pages first.
docs: setup $(VENV)/.docs
	$(BIN)/python tools/docs/fill_numbers.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[docs]'
	touch $@

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedcover needs Python 3.11 or newer; set PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[dev,flower]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Peers get an environment of their own. `make bench BENCH=--quick` takes two minutes instead of twenty.
bench: setup .venv-bench/.ready
	$(BIN)/python -m benchmarks.run $(BENCH)

.venv-bench/.ready: benchmarks/requirements.txt
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	echo '*' > .venv-bench/.gitignore
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/requirements.txt
	touch $@
