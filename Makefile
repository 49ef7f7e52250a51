# Two commands: `make run` and `make test`. Each does all its set-up.
PYTHON ?= python3.11
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# It would compile every import anew in every process.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

BENCHMARKS := imports flow write read memory scale transfer audit_log step loader checkpoint scaling communication synchronization recovery hot hang supervision

SEED ?= 1
RUNS ?= 3
WORLD ?= restored

.PHONY: help run up test lint repro bench parity tamper chaos clean

help: ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

run: .venv/run.done ## Run the main job here: raw places to a registered model
	convoy run
	convoy report

up: .venv/run.done ## Start Prefect, MLflow and the served deployment; Ctrl-C stops them
	convoy up

repro: .venv/run.done ## Run the same stages by DVC
	dvc repro

test: .venv/dev.done ## Run all tests
	pytest -n 2 --no-loadscope-reorder

lint: .venv/dev.done ## ruff, ruff format, mypy --strict
	ruff check .
	ruff format --check .
	mypy

bench: .venv/bench.done ## Run all benchmarks, see docs/benchmarks.md
	for name in $(BENCHMARKS); do python -m benchmarks.$$name || exit 1; done

parity: .venv/dev.done ## Compare every way to distribute with one process, see docs/parity.md
	python -m tests.parity

tamper: .venv/dev.done ## Damage what is stored in 100,000 random ways: all must be refused
	python -m tests.tamper

chaos: .venv/dev.done ## Run whole flows while their processes die: SEED=n RUNS=m WORLD=hot, see docs/chaos.md
	python -m tests.chaos --seed $(SEED) --runs $(RUNS) --world $(WORLD)

clean: ## Remove what runs left here, keys included; keeps .venv
	rm -rf .convoy artifacts datasets dvc.lock .dvc/cache .dvc/tmp

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/run.done: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing into .venv: minutes without a word, the first time"
	$(PIP_INSTALL) -e .
	touch $@

.venv/dev.done: pyproject.toml constraints.txt .venv/run.done | .venv/bin/python
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

.venv/bench.done: pyproject.toml constraints.txt .venv/dev.done | .venv/bin/python
	$(PIP_INSTALL) -e '.[bench]'
	touch $@
