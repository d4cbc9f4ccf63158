# Everything from a bare checkout with Python >= 3.11, make and a package index.
#   make test PYTHON=python3.12 VENV=.venv-312      another interpreter, its own environment
#   make test ARGS="-k device"                      arguments for pytest, the demo or the benchmarks

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq

# Stamps: the package with its test tools; the compilers for absent GPUs and TPUs; linters and build tools.
BASE := $(VENV)/.base
COMPILERS := $(VENV)/.compilers
DEV := $(VENV)/.dev

.DEFAULT_GOAL := help
.PHONY: help test demo bench soak lint types docs wheel clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: $(COMPILERS) ## the test suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

demo: $(COMPILERS) ## the demonstration: a training step before and after, and a plan for a GPU that is not here
	$(BIN)/python examples/demo.py $(ARGS)

bench: $(COMPILERS) ## the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

soak: $(COMPILERS) ## the long sweeps, hours: every peer of every workload, many budgets; goes on where it stopped
	JAXTENSILE_SOAK=1 $(BIN)/python -m pytest -n 2 --dist loadgroup
	$(BIN)/python -m benchmarks dominance promise $(ARGS)

lint: $(DEV) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BASE) $(DEV) ## pyright: strict for passes and runtime
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(BASE) ## build/docs/index.html: the pages of docs/ as a site
	$(PIP) -e '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs

wheel: $(DEV) ## dist/: a source distribution, and the wheel built from it
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

clean: ## remove environments, builds and caches
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BASE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jaxtensile needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "installing jaxtensile and its test tools into $(VENV) (about a minute) ..."
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) -e '.[test]'
	@touch $@

# Optional on purpose: without them the tests that need them are skipped and the demo says so.
$(COMPILERS): $(BASE)
	@echo "installing the compilers for GPUs and TPUs that are not here (1.5 GB) ..."
	@if $(PIP) -e '.[cuda-aot,tpu-aot]'; then touch $@; \
	else echo "NOTE: jaxtensile[cuda-aot,tpu-aot] could not be installed; going on without GPU and TPU targets." >&2; fi

$(DEV): $(BASE)
	@echo "installing linters and build tools ..."
	$(PIP) -e '.[dev]'
	@touch $@
