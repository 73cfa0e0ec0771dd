# Hurtle's verbs. Each sets up .venv when it is missing; CI calls the same ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
CORE := $(VENV)/.core
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.bench-ready
CLIENTS := .venv-clients
CLIENTS_READY := $(CLIENTS)/.ready
JOBS ?= 2
TEST_JOBS ?= 3  # one more than the cores we count on: some tests wait for others
unexport PYTHONDONTWRITEBYTECODE  # every process would compile what it imports, torch alone for 3 s

.PHONY: help setup clients demo test test-slow test-gpu check bench bench-learning clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing hurtle into $(VENV) (once; a minute or two)"
	@$(INSTALL) -c constraints.txt -e .
	@touch $@

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing hurtle and its development tools into $(VENV) (once; a few minutes)"
	@$(INSTALL) -c constraints.txt -e ".[dev]"
	@touch $(CORE) $@

$(BENCH_READY): $(READY)
	@echo "installing the peers that the benchmarks run against"
	@$(INSTALL) -c constraints.txt -e ".[dev,bench]"
	@touch $@

$(CLIENTS_READY): tests/serving/clients/requirements.txt
	@test -x $(CLIENTS)/bin/python || { echo "creating $(CLIENTS)"; $(PYTHON) -m venv $(CLIENTS); }
	@echo "installing the foreign clients that the server is tested with into $(CLIENTS)"
	@$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

setup: $(READY)  ## Create .venv with everything in it

clients: $(CLIENTS_READY)  ## Create .venv-clients with tritonclient and others, for the tests of the server

demo: $(CORE)  ## See it work: train CartPole until it is solved
	@$(BIN)/python examples/demo.py

test: setup clients  ## Run the tests (about 5 minutes on two cores; 8 the first time, when everything is compiled)
	@$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile -m "not slow and not gpu"

test-slow: setup clients  ## Run the long tests too
	@$(BIN)/python -m pytest -m "not gpu"

test-gpu:  ## Run the GPU tests with the python3 of a GPU machine
	@$(PYTHON) -m pytest -m gpu tests/gpu tests/serving/backends

check: setup  ## Lint, format check, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(BENCH_READY)  ## Benchmarks beside the peers; results go to benchmarks/results/
	@$(BIN)/python benchmarks/envs.py
	@$(BIN)/python benchmarks/vector.py
	@$(BIN)/python benchmarks/mujoco_vector.py
	@$(BIN)/python benchmarks/compile.py
	@$(BIN)/python benchmarks/collect.py
	@$(BIN)/python benchmarks/buffers.py
	@$(BIN)/python benchmarks/off_policy.py
	@$(BIN)/python benchmarks/train.py
	@$(BIN)/python benchmarks/train.py --time-to-solve
	@$(BIN)/python benchmarks/advantages.py
	@$(BIN)/python benchmarks/gemm.py
	@$(BIN)/python benchmarks/where.py
	@$(BIN)/python benchmarks/cores.py
	@$(BIN)/python benchmarks/data_parallel.py
	@$(BIN)/python benchmarks/contention.py
	@$(BIN)/python benchmarks/gears.py
	@$(BIN)/python benchmarks/inference.py
	@$(BIN)/python benchmarks/serve.py

bench-learning: setup  ## The learning grid, hours: what is not finished yet, JOBS=2 at a time, then docs/learning.md
	@$(BIN)/python benchmarks/learning.py --jobs $(JOBS)

clean:  ## Remove .venv, .venv-clients and caches
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache dist
