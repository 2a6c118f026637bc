PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PEERS := .venv-peers/bin
PEERS_INSTALLED := .venv-peers/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint results posteriors experiments table bench bench-peers bench-gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## your own loop against a dense network, then a small posterior with its report
	$(BIN)/python examples/own_loop.py
	$(BIN)/bayestrain train --particles 5 --overwrite --out runs/demo

test: lint ## everything CI runs: lint, then the tests
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED) ## style, format, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

results: $(INSTALLED) ## run again the MNIST lines under results/: minutes on a GPU, one or two hours on two cores
	$(BIN)/python tools/run_seeds.py mnist --seeds 0 1 2 3 4 --jobs 2
	$(BIN)/python tools/run_seeds.py mnist --label x300 --seeds 0 1 2 --jobs 2 --target-ratio 300 \
	  --set prior.weight=1.0 --set 'tensorize.modes.3=[[25,5,5],[1,2,5]]' --set fit.finetune_epochs=25
	$(BIN)/python tools/run_seeds.py mnist --label dense --seeds 0 1 2 --jobs 2 --kind dense --set fit.lr=3e-4
	$(BIN)/python tools/run_seeds.py mnist --label tensorized --seeds 0 1 2 --jobs 2 --kind tensorized
	$(BIN)/python tools/run_seeds.py mnist --label w0.3 --seeds 0 1 2 --jobs 2 --set prior.weight=0.3
	$(BIN)/python tools/run_seeds.py mnist --label w3 --seeds 0 1 2 --jobs 2 --set prior.weight=3
	$(BIN)/python tools/run_seeds.py mnist --label paper --seeds 0 1 2 --jobs 2 --preset paper
	$(BIN)/python benchmarks/compaction.py mnist
	$(BIN)/python benchmarks/particles.py

posteriors: $(INSTALLED) ## run again the posteriors under results/: some minutes on a large GPU, hours without
	$(BIN)/python tools/run_seeds.py mnist --label svgd-20 --seeds 0 1 2 --particles 20
	$(BIN)/python tools/run_seeds.py mnist --label svgd-50 --seeds 0 1 2 --particles 50 --set fit.batch_size=1024 \
	  --set fit.epochs=76 --set fit.finetune_epochs=14 --set fit.lr=2e-2 --set fit.compact_from=8 --set prior.warmup_epochs=6
	$(BIN)/python tools/run_seeds.py mnist --label tensorized-svgd-50 --seeds 0 1 2 --kind tensorized --particles 50 \
	  --set fit.batch_size=1024 --set fit.epochs=76 --set fit.finetune_epochs=14 --set fit.lr=2e-2
	$(BIN)/python tools/run_seeds.py mnist --label dense-svgd-50 --seeds 0 1 2 --kind dense --particles 50 \
	  --set fit.batch_size=1024 --set fit.epochs=76 --set fit.finetune_epochs=14 --set fit.lr=1e-2
	$(BIN)/python benchmarks/particles.py --device cuda

experiments: $(INSTALLED) ## run again the CIFAR-10 lines under results/: they want a large GPU, for up to half an hour each
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label x32 --seeds 0 1 2 --target-ratio 32
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label x16 --seeds 0 1 2 --target-ratio 15.8 --set fit.lr=3e-3 \
	  --set prior.weight=0.5
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label svgd-20 --seeds 0 1 2 --particles 20 --target-ratio 32 \
	  --map 'runs/cifar10-cnn-x32-seed{seed}' --set posterior.start=jitter --set posterior.jitter=0.2 \
	  --set posterior.jitter_epochs=6 --set fit.checkpoint_every=1
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label dense --seeds 0 1 2 --kind dense --set fit.lr=5e-4
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label dense-svgd-20 --seeds 0 1 2 --particles 20 --kind dense \
	  --set fit.lr=5e-4 --map 'runs/cifar10-cnn-dense-seed{seed}' --set posterior.start=jitter \
	  --set posterior.jitter=0.2 --set posterior.jitter_epochs=6 --set fit.checkpoint_every=1
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label tensorized --seeds 0 1 2 --kind tensorized
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label tensorized-svgd-20 --seeds 0 1 2 --particles 20 \
	  --kind tensorized --map 'runs/cifar10-cnn-tensorized-seed{seed}' --set posterior.start=jitter \
	  --set posterior.jitter=0.2 --set posterior.jitter_epochs=6
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label paper --seeds 0 1 2 --preset paper
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label w0.1-12 --seeds 0 1 --set prior.weight=0.1 --set fit.epochs=8 \
	  --set fit.finetune_epochs=4 --set prior.warmup_epochs=8 --set fit.compact_from=1
	$(BIN)/python tools/run_seeds.py cifar10-cnn --label w0.4-12 --seeds 0 1 --set prior.weight=0.4 --set fit.epochs=8 \
	  --set fit.finetune_epochs=4 --set prior.warmup_epochs=8 --set fit.compact_from=1
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label paper-12 --seeds 0 1 --preset paper --set fit.epochs=12 \
	  --set fit.precision=bf16
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label x7 --seeds 0 1 2 3 --target-ratio 7.4
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label x11 --seeds 0 1 --target-ratio 11
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label x15 --seeds 2 3 --target-ratio 15 \
	  --from 'results/cifar10-resnet110/x7/seed-{seed}' --set fit.epochs=4 --set fit.finetune_epochs=4 \
	  --set fit.lr=2e-3 --set fit.lr_warmup_epochs=0.25 --set fit.compact_from=0 --set fit.compact_every=1 \
	  --set prior.warmup_epochs=4 --set fit.checkpoint_every=1
	for weight in 0.5 2; do \
	  $(BIN)/python tools/run_seeds.py cifar10-resnet110 --label w$$weight-from-x7 --seeds 2 3 \
	    --from 'results/cifar10-resnet110/x7/seed-{seed}' --set prior.weight=$$weight --set fit.epochs=4 \
	    --set fit.finetune_epochs=4 --set fit.lr=2e-3 --set fit.lr_warmup_epochs=0.25 --set fit.compact_from=0 \
	    --set fit.compact_every=1 --set prior.warmup_epochs=1 --set fit.checkpoint_every=1 || exit 1; \
	done
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label x25 --seeds 2 3 --target-ratio 25 \
	  --from 'results/cifar10-resnet110/x15/seed-{seed}' --set fit.epochs=3 --set fit.finetune_epochs=4 \
	  --set fit.lr=2e-3 --set fit.lr_warmup_epochs=0.25 --set fit.compact_from=0 --set fit.compact_every=1 \
	  --set prior.warmup_epochs=3 --set fit.checkpoint_every=1
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label svgd-20 --seeds 2 3 --particles 20 --target-ratio 7.4 \
	  --map 'runs/cifar10-resnet110-x7-seed{seed}' --set posterior.start=jitter --set posterior.jitter=0.2 \
	  --set posterior.jitter_epochs=2 --set fit.checkpoint_every=1
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label dense --seeds 0 1 --kind dense --set fit.lr=16e-3
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label dense-svgd-20 --seeds 0 1 --particles 20 --kind dense \
	  --set fit.lr=16e-3 --map 'runs/cifar10-resnet110-dense-seed{seed}' --set posterior.start=jitter \
	  --set posterior.jitter=0.2 --set posterior.jitter_epochs=2
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label tensorized --seeds 0 1 --kind tensorized
	$(BIN)/python tools/run_seeds.py cifar10-resnet110 --label tensorized-svgd-20 --seeds 0 1 --particles 20 \
	  --kind tensorized --map 'runs/cifar10-resnet110-tensorized-seed{seed}' --set posterior.start=jitter \
	  --set posterior.jitter=0.2 --set posterior.jitter_epochs=2

table: $(INSTALLED) ## write results/TABLE.md and its figures from what is under results/
	$(BIN)/bayestrain table

bench: $(INSTALLED) ## speed on a CPU: layers, planner, scaling, whole networks; half an hour on an idle machine
	$(BIN)/python benchmarks/layers.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/inference.py
	$(BIN)/python benchmarks/tables.py

bench-peers: $(PEERS_INSTALLED) ## speed against tensorly-torch and torchTT, in an environment of their own
	$(PEERS)/python benchmarks/peers.py
	$(PEERS)/python benchmarks/tables.py

bench-gpu: $(INSTALLED) ## speed on a GPU: layers, memory, scaling, planner, training steps; peers where they are found
	$(BIN)/python benchmarks/layers.py --device cuda
	$(BIN)/python benchmarks/steps.py --device cuda $(if $(MNIST),--mnist $(MNIST))
	$(BIN)/python benchmarks/peers.py --device cuda
	$(BIN)/python benchmarks/planner.py --device cuda
	$(BIN)/python benchmarks/scaling.py --device cuda
	$(BIN)/python benchmarks/tables.py

clean: ## remove .venv, caches and build output; runs/ stays
	rm -rf .venv .venv-peers build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installs again only when the dependencies or their pins changed.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# tensorly-torch does not ask for tensorly by itself; torchTT compiles an extension, and runs without it too.
$(PEERS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-peers
	$(PEERS)/pip install --quiet -c constraints.txt -e . tensorly==0.10.0 tensorly-torch==0.5.0 torchTT==0.5.0
	@touch $@
