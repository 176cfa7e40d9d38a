# Everything a machine without a GPU needs. `make demo` and `make test` work on a fresh clone with no environment:
# the first of them builds .venv, and later ones reuse it until pyproject.toml or this file changes.
#
#   make demo                      replay the bundled request trace on one cache of PyTorch and JAX
#   make demo TRACE=trace.csv      replay another; more options with ARGS='--model gpt-oss --steps 50'
#   make test                      lint, then every test; those that need a GPU skip where there is none
#   make test-jax                  the tests that need no PyTorch, with the JAX versions that need Python 3.12
#   make lint | docs | clean

# The interpreter that .venv is made from.
PYTHON ?= python3
# A bare `torch` may bring gigabytes of CUDA libraries. Override to use another build.
TORCH ?= torch==2.13.0
# Its interpreter is the first that works with NumPy >= 2.4. A CUDA build of torch asks for a version of its own:
# then give the same one here, or nothing (TRITON=).
TRITON ?= triton==3.9.0
# The newest for Python 3.11.
JAX ?= jax==0.10.2
# JAX 0.11 needs Python 3.12: the first interpreter that runs (a pyenv shim may be there and not run). PYTHON312= leaves
# the environments and tests of those versions out.
PYTHON312 ?= $(shell for python in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python; do \
  "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1 && echo "$$python" && break; done)
# Their environments, .venv-jax-NAME for each, and what is installed.
JAX_ONLY := 0.11 0.12
JAX_0.11 := jax==0.11.2
JAX_0.12 := jax==0.12.0.1
# Test processes at a time.
JOBS ?= 2
# What also runs over Triton's interpreter.
INTERPRETED_TESTS := tests/contract tests/failures $(addprefix tests/torch/test_,append.py edges.py invariance.py merge.py strides.py)
# What runs with the newer JAX versions, without PyTorch: each case of the contract, and what differs between versions.
# `make test-jax JAX_TESTS='tests/contract tests/failures tests/jax' JAX_CASES=` runs the rest too (10 minutes each).
JAX_TESTS ?= tests/contract $(addprefix tests/jax/test_,hlo.py export.py backends.py) tests/packaging/test_imports.py
JAX_CASES ?= -k 'not test_decode.py or case_is_right'
# The tests compile hundreds of small decode steps with XLA to run each once or twice: its code generator need not
# optimise them (what it is given stays the same), and processes share what they compiled. `QUICKLY=` compiles as users
# do.
QUICKLY ?= JAX_DISABLE_MOST_OPTIMIZATIONS=1 JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.jax_cache \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# Left out to stay within 25 minutes: known failures over Pallas's interpreter, whose kernels the contract suite runs.
# `make test CASES=` runs them too.
CASES ?= -k 'not (failures and jax-interpret)'
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

.PHONY: help demo test test-jax lint docs clean $(JAX_ONLY:%=test-jax-%)
.DELETE_ON_ERROR:
# The test processes already fill the cores.
.NOTPARALLEL:

help:
	@sed -n 's/^#   //p' Makefile

# Set-up writes to stderr, so that `make -s demo ARGS=--json` leaves one object on stdout.
$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is not Python 3.11 or newer: install one (Debian 12: apt-get install python3 python3-venv) or give PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV) with $(TORCH) $(TRITON) $(JAX)" >&2
	$(PYTHON) -m venv $(VENV) >&2
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(if $(TRITON),"$(TRITON)") $(if $(JAX),"$(JAX)") --editable '.[cpu]' >&2
	@touch $@

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet "$(TORCH)" $(if $(TRITON),"$(TRITON)") $(if $(JAX),"$(JAX)") --editable '.[docs]' >&2
	@touch $@

$(VENV)-jax-%/.ready: pyproject.toml Makefile
	@echo "Setting up $(@D) with $(JAX_$*), without PyTorch" >&2
	$(PYTHON312) -m venv $(@D) >&2
	$(@D)/bin/python -m pip install --quiet "$(JAX_$*)" --editable '.[jax,test]' >&2
	@touch $@

demo: $(READY)
	@$(BIN)/swa replay --backend $(if $(JAX),crossed,auto) $(if $(TRACE),"$(TRACE)") $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# One thread a process: the test processes already fill the cores.
test test-jax: export OMP_NUM_THREADS := 1
# Triton's interpreter is chosen when Triton is imported, so it needs a process of its own.
test: lint
	$(QUICKLY) $(BIN)/python -m pytest -n $(JOBS) $(CASES) $(PYTEST_ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS) $(INTERPRETED_TESTS)
	@$(MAKE) --no-print-directory test-jax

ifeq ($(PYTHON312),)
test-jax:
	@echo "Not tested with $(foreach name,$(JAX_ONLY),$(JAX_$(name))): they need Python 3.12, and none was found; give PYTHON312=..." >&2
else
test-jax: $(JAX_ONLY:%=test-jax-%)

$(JAX_ONLY:%=test-jax-%): test-jax-%: $(VENV)-jax-%/.ready
	$(QUICKLY) $(<D)/bin/python -m pytest -n $(JOBS) $(JAX_CASES) $(PYTEST_ARGS) $(JAX_TESTS)
endif

docs: $(DOCS_READY)
	$(BIN)/mkdocs build --strict

# Leaves .venv and .venv-jax-* alone: they are expensive, and `rm -r .venv*` says the same.
clean:
	rm -rf build dist site .pytest_cache .ruff_cache .import_linter_cache .hypothesis .jax_cache
	find . -path "./$(VENV)*" -prune -o -name __pycache__ -type d -exec rm -rf {} +
