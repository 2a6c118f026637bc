PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
export PYTHONPATH := $(CURDIR)
.PHONY: help install demo test test-fast test-faults fuzz soak coverage mutants lint docs wheel lock clean
.PHONY: bench bench-gpu bench-layers bench-pretrained bench-export bench-posterior bench-uci record-finetune record-gpt

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make the environment .venv

demo: $(INSTALLED) ## a loop of your own against a dense network, then a small posterior with its report
	$(BIN)/python docs/tutorials/own_loop.py
	$(BIN)/bayestrain train --particles 5 --overwrite --out runs/demo

test: lint ## everything CI runs: lint, all tests, and the kits once more without perf
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
	BAYESTRAIN_PERF=0 $(BIN)/pytest -q -n 2 --dist loadfile -m "not slow" tests/formats tests/nn tests/prior tests/compact tests/posterior

test-fast: $(INSTALLED) ## the tests that take seconds
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-faults: $(INSTALLED) ## kill, starve and damage training, saving, exporting, fetching and serving 600 times
	$(BIN)/python tests/trust/faults.py

fuzz: $(INSTALLED) ## feed a million damaged inputs to everything that reads
	$(BIN)/python tests/trust/fuzz.py

soak: $(INSTALLED) ## predict from 8 threads for two hours: serial answers, and memory and handles stay
	$(BIN)/python tests/trust/soak.py --seconds 7200

coverage: $(INSTALLED) ## run all tests and record which lines and branches they reach
	$(BIN)/python tools/cover.py

mutants: $(INSTALLED) ## change the code of formats, prior and compact 900 times, and see whether the tests notice
	$(BIN)/python tools/mutate.py

lint: $(INSTALLED) ## style, format, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(INSTALLED) ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(INSTALLED) ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build --no-isolation

bench: $(INSTALLED) ## speed on a CPU, next to the last commit before the rewrite and to dense layers
	$(BIN)/python benchmarks/old_and_new.py

bench-gpu: $(INSTALLED) ## the same on a GPU, with captured steps; layers and transformers beside dense ones
	$(BIN)/python benchmarks/old_and_new.py --device cuda
	$(BIN)/python benchmarks/gpu.py

bench-layers: $(INSTALLED) ## embeddings and encoders on a CPU, next to dense ones
	$(BIN)/python benchmarks/layers.py

bench-pretrained: $(INSTALLED) ## pretrained networks in the folder DATA, smaller without training: accuracy against size
	$(BIN)/python benchmarks/pretrained.py $(DATA)

bench-export: $(INSTALLED) ## exported files beside dense ones: size, agreement, latency; TEXT: Tiny Shakespeare, for a GPT
	$(BIN)/python benchmarks/export.py $(if $(TEXT),--text $(TEXT))

bench-posterior: $(INSTALLED) ## how wide and how right posteriors are: linear models, Gaussians, a network against HMC
	$(BIN)/python benchmarks/posteriors.py

bench-uci: $(INSTALLED) ## regression on the nine UCI sets in the folder DATA under Gal's splits, resumable
	$(BIN)/python benchmarks/uci.py $(DATA)

record-finetune: $(INSTALLED) ## ResNets in the folder DATA, compressed and fine-tuned on a GPU, into runs/
	$(BIN)/python -m records.finetune --folder $(DATA) --depth 56 --ratio 2 --out runs/resnet56-2x --device cuda
	$(BIN)/python -m records.finetune --folder $(DATA) --depth 56 --ratio 4 --out runs/resnet56-4x --device cuda
	$(BIN)/python -m records.finetune --folder $(DATA) --depth 20 --ratio 4 --out runs/resnet20-4x --device cuda

record-gpt: $(INSTALLED) ## a character GPT on a GPU, dense, 8 and 20 times smaller, into runs/; TEXT: Tiny Shakespeare
	$(BIN)/python -m records.gpt --text $(TEXT) --out runs/gpt-dense --dense --steps 3000 --device cuda
	$(BIN)/python -m records.gpt --text $(TEXT) --out runs/gpt-8x --ratio 8 --dropout 0.1 --device cuda
	$(BIN)/python -m records.gpt --text $(TEXT) --out runs/gpt-20x --ratio 20 --rank 64 --dropout 0.05 --steps 8000 --device cuda

-include paper/Makefile

clean: ## remove environments, caches and build output; runs/ stays
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

lock: $(INSTALLED) ## write requirements.lock again, after a change of constraints.txt; INDEX: address of a package index
	$(BIN)/python tools/lock.py $(INDEX)

# Installs again only when the dependencies or their pins changed. Every package is checked against its hash, except for
# torch: its build depends on the machine.
$(INSTALLED): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	$(BIN)/pip check
	@touch $@
