# Everything a machine without a GPU needs. `make demo` and `make test` work on a fresh clone with no environment:
# the first of them builds .venv, and later ones reuse it until pyproject.toml or this file changes.
#
#   make demo                      replay the bundled request trace
#   make demo TRACE=trace.csv      replay another; more options with ARGS='--model gpt-oss --steps 50'
#   make test                      lint, then every test; those that need a GPU skip where there is none
#   make lint | docs | clean

# The interpreter that .venv is made from.
PYTHON ?= python3
# A bare `torch` may bring gigabytes of CUDA libraries. Override to use another build.
TORCH ?= torch==2.13.0
# Its interpreter is the first that works with NumPy >= 2.4. A CUDA build of torch asks for a version of its own:
# then give the same one here, or nothing (TRITON=).
TRITON ?= triton==3.9.0
# Test processes at a time.
JOBS ?= 2
# What also runs over Triton's interpreter.
INTERPRETED_TESTS := tests/contract tests/failures $(addprefix tests/torch/test_,append.py edges.py invariance.py merge.py strides.py)
# More pytest options, for example PYTEST_ARGS='-x -k sinks'.
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs
# Quiet: pyright's wrapper otherwise looks for a newer release of itself and says so.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Likewise mkdocs-material, about a release of MkDocs that `docs` excludes.
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test lint docs clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

# Set-up writes to stderr, so that `make -s demo ARGS=--json` leaves one object on stdout.
$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is not Python 3.11 or newer: install one (Debian 12: apt-get install python3 python3-venv) or give PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(TORCH) $(TRITON)" >&2
	$(PYTHON) -m venv $(VENV) >&2
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(if $(TRITON),"$(TRITON)") --editable '.[cpu]' >&2
	@touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(if $(TRITON),"$(TRITON)") --editable '.[docs]' >&2
	@touch $@

demo: $(READY)
	@$(BIN)/swa replay $(if $(TRACE),"$(TRACE)") $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# One thread a process: the test processes already fill the cores.
test: export OMP_NUM_THREADS := 1
# Triton's interpreter is chosen when Triton is imported, so it needs a process of its own.
test: lint
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS) $(INTERPRETED_TESTS)

docs: $(DOCS_READY)
	$(BIN)/mkdocs build --strict

# Leaves .venv alone: it is expensive, and `rm -r .venv` says the same.
clean:
	rm -rf build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
