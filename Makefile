# `make` lists the targets. Every target that needs the virtual environment makes it first.
PYTHON ?= python3
BIN := .venv/bin
# Compiled modules are kept: else each worker, and each command that a test starts, compiles all of them.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow coverage mutants lint fuzz frozen benchmarks check-install docs docs-serve notebooks format clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16

demo: .venv/.installed  ## compare two halves of the bundled digits, one of them rotated
	$(BIN)/python -m otdd_flash.distance

test: .venv/.installed  ## run the quick tests, one worker per core; before every commit
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup -m "not slow"

test-slow: .venv/.installed  ## run the others: whole solves in the interpreter, commands, thousands of problems
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup -m slow

coverage: .venv/.installed  ## run both and say which lines no test executes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup --cov --cov-context=test \
		--cov-report=term:skip-covered --junitxml=.coverage.xml

mutants: .venv/.installed  ## after `make coverage`: break the listed expressions one at a time, and say which no test sees
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutation $(OPTIONS)

lint: .venv/.installed  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: .venv/.installed  ## thousands of random commands, calls, damaged files, images and kills
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.fuzz

frozen: .venv/.installed  ## after a pure move: the bits of every frozen number of AGAINST=COMMIT, by default the last
	$(BIN)/python -m tests.frozen --against $(or $(AGAINST),HEAD)

benchmarks: .venv/.installed  ## say which measured files are older than the code they measure (OPTIONS=--older: only those)
	$(BIN)/python -m experiments.freshness $(OPTIONS)

check-install: .venv/.installed  ## build the package and run the demonstration from what was built
	.ci/check-install

docs: .venv/.docs  ## build the documentation into site/, and look at its pages in a browser if there is one
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/docs/test_site.py tests/docs/test_browser.py

docs-serve: .venv/.docs  ## show the documentation at a local address, built again at every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

notebooks: .venv/.docs  ## execute the notebooks and write their outputs
	$(BIN)/python notebooks/execute.py

format: .venv/.installed  ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment, caches and outputs
	rm -rf .venv build dist site outputs multirun .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	# Compiles the package and the tests once, as pip does with what it copies: else each worker does.
	-$(BIN)/python -m pytest --collect-only --quiet > /dev/null
	touch $@

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@
