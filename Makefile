PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint results clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## your own loop against a dense network, then a full run with its report
	$(BIN)/python examples/own_loop.py
	$(BIN)/bayestrain train --overwrite --out runs/demo

test: lint ## everything CI runs: lint, then the tests
	$(BIN)/pytest

lint: $(INSTALLED) ## style, format, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

results: $(INSTALLED) ## run again what is under results/: an hour or less on two cores
	$(BIN)/python tools/run_seeds.py mnist --seeds 0 1 2 3 4 --jobs 2
	$(BIN)/python benchmarks/compaction.py mnist

clean: ## remove .venv, caches and build output; runs/ stays
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installs again only when the dependencies or their pins changed.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
