# enginebay: `make demo` answers a question on a real model, `make test` proves the tree.
PYTHON ?= python3
# torch goes in first and by version: where the package index has a CPU build of it, pip takes that one, and what follows
# finds torch present. Left to the dependencies, pip takes the newest, which on Linux may bring gigabytes of CUDA.
# Another build: make demo TORCH=torch
TORCH ?= torch==2.13.0
MODEL := smollm2-135m-instruct

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q

.PHONY: demo test check test-full bench soak clean

$(VENV)/torch.stamp:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	touch $@

$(VENV)/install.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) -e .
	touch $@

$(VENV)/dev.stamp: $(VENV)/install.stamp pyproject.toml
	$(PIP) -e ".[dev]"
	touch $@

demo: $(VENV)/install.stamp
	$(BIN)/enginebay models fetch $(MODEL)
	$(BIN)/enginebay run examples/quickstart.yaml --chat --prompt "What is the capital of France?" \
	  --temperature 0 --max-tokens 64

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: check
	$(BIN)/enginebay models fetch $(MODEL)
	$(BIN)/python -m pytest -q -m "not full and not gpu"

test-full: check
	$(BIN)/enginebay models fetch $(MODEL)
	$(BIN)/python -m pytest -q -m "not gpu"

bench: $(VENV)/install.stamp
	$(BIN)/enginebay models fetch $(MODEL)
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/cpu.py

# Half an hour of random work; outside `make test`.
soak: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/soak.py --minutes 30

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
