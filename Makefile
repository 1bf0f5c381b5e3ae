# Trirank. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
HOME_DIR ?= .trirank
DATA ?= movielens-100k
RELEASE ?= $(HOME_DIR)/releases/$(notdir $(DATA))
BIN := $(VENV)/bin
CONSTRAINTS := infra/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help serve train test bench check clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Trirank needs Python 3.11 or newer; name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@ $(VENV)/.base

$(RELEASE)/manifest.json: | $(VENV)/.base
	$(BIN)/trirank train --data $(DATA) --out $(RELEASE)

train: $(RELEASE)/manifest.json ## Train a release on DATA (default movielens-100k), once

serve: $(VENV)/.base $(RELEASE)/manifest.json ## Train once, then serve on http://localhost:8000 until Ctrl-C
	$(BIN)/trirank up --release $(RELEASE) $(ARGS)

# Tests that start a whole stack mostly wait, so the others run beside them, in two processes.
KILLS := tests/chaos/test_shard_killed.py
STACK_TESTS := tests/e2e tests/chaos --ignore=$(KILLS)
PART_TESTS := tests/integration $(KILLS)
OTHER_TESTS := tests/unit tests/golden tests/contract tests/bench

test: $(VENV)/.dev ## Run every test; part of it: make test ARGS=tests/unit
ifdef ARGS
	$(BIN)/python -m pytest $(ARGS)
else
	@mkdir -p $(HOME_DIR)
	@$(BIN)/python -m pytest -p no:cacheprovider $(OTHER_TESTS) > $(HOME_DIR)/other-tests.log 2>&1 & other=$$!; \
	$(BIN)/python -m pytest -p no:cacheprovider $(PART_TESTS) > $(HOME_DIR)/part-tests.log 2>&1 & part=$$!; \
	$(BIN)/python -m pytest $(STACK_TESTS); stack=$$?; \
	wait $$other; other=$$?; wait $$part; part=$$?; \
	cat $(HOME_DIR)/other-tests.log $(HOME_DIR)/part-tests.log; exit $$((stack + other + part))
endif

bench: $(VENV)/.dev $(RELEASE)/manifest.json ## Measure the stack beside its peers
	$(BIN)/python -m tests.bench --release $(RELEASE) $(ARGS)

check: $(VENV)/.dev ## Lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## Remove the virtual environment, caches and the state of stopped stacks
	rm -rf $(VENV) $(HOME_DIR) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
