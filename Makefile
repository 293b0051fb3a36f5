# enginebay: `make demo` answers a question on a real model, `make test` proves the tree.
PYTHON ?= python3
# A CPU build first, so that no dependency pulls CUDA's gigabytes; on a GPU machine: make demo TORCH=torch
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q

.PHONY: demo test check test-full bench clean

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) -U pip
	$(PIP) "$(TORCH)"
	touch $@

$(VENV)/install.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) -e .
	touch $@

$(VENV)/dev.stamp: $(VENV)/install.stamp pyproject.toml
	$(PIP) -e ".[dev]"
	touch $@

demo: $(VENV)/install.stamp
	$(BIN)/enginebay models fetch smollm2-135m-instruct
	$(BIN)/enginebay run examples/quickstart.yaml --chat --temperature 0 --max-tokens 64 \
	  --prompt "What is the capital of France?"

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/dev.stamp check
	$(BIN)/enginebay models fetch smollm2-135m-instruct
	$(BIN)/python -m pytest -q -m "not full and not gpu"

test-full: $(VENV)/dev.stamp check
	$(BIN)/enginebay models fetch smollm2-135m-instruct
	$(BIN)/python -m pytest -q -m "not gpu"

bench: $(VENV)/install.stamp
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
