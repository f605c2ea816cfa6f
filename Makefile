# Each target makes what it needs; a second call is quick. `make help` lists them.
# Only Python 3.11+ and a network to PyPI are needed. Another interpreter: make PYTHON=python3.13
# The very versions of requirements/lock.txt, hashes checked: make venv LOCKED=1

# The first interpreter that is new enough and can make virtual environments.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
  $$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
  done)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Two processes keep two cores busy with compilations; a file's tests stay together.
PYTEST := JAX_PLATFORMS=cpu OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest
WORKERS ?= 2
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-parity test-slow aot-venv aot plan-table bench lint lock clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# --- environments: a stamp says which extras of the present pyproject.toml are installed

$(VENV)/.base: pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or later found. Run make PYTHON=/path/to/python3"; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(if $(LOCKED),$(PIP) install --quiet --require-hashes -r requirements/lock.txt)
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) install --quiet --editable ".[dev]"
	@touch $@

$(VENV)/.parity: $(VENV)/.dev
	$(PIP) install --quiet --editable ".[dev,parity]"
	@touch $@

venv: $(VENV)/.dev  ## .venv with the package and the tools

# --- what it is for

demo: $(VENV)/.base  ## RL-tunes the packaged model at 4 bits, into runs/demo
	$(PY) -m launch.rl --gin_file=configs/demo/qerl.gin --workdir=runs/demo

bench: $(VENV)/.parity  ## decode and update beside transformers and torch, into runs/bench
	OMP_WAIT_POLICY=PASSIVE $(PY) -m launch.bench --gin_file=configs/bench/decode.gin --workdir=runs/bench

# --- tests

test: $(VENV)/.dev  ## the default suite: no torch, no accelerator
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(PYTEST) -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-parity: $(VENV)/.parity  ## live against transformers, torch, peft, compressed-tensors
	$(PYTEST) -m "parity and not slow" -rs $(PYTEST_ARGS)

test-slow: $(VENV)/.parity  ## real models and the long forms of the fault tests
	$(PYTEST) -m "slow or soak" -rs $(PYTEST_ARGS)

lint: $(VENV)/.dev  ## style, format, direction of imports, spelling
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell

lock: $(VENV)/.base  ## renews requirements/lock.txt: newest versions, for every Python and platform
	$(PIP) install --quiet uv
	mkdir -p requirements
	$(VENV)/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --upgrade \
	  --generate-hashes --quiet --custom-compile-command "make lock" -o requirements/lock.txt

# --- compiling for hardware that is not there: one environment for each compiler (5 GB together)

.venv-aot-tpu/.made: $(VENV)/.dev
	test -x .venv-aot-tpu/bin/python || $(PYTHON) -m venv .venv-aot-tpu
	.venv-aot-tpu/bin/python -m pip --disable-pip-version-check install --quiet --editable ".[dev]" \
	  "jax[tpu]==$$($(PY) -c 'import jax; print(jax.__version__)')"
	@touch $@

.venv-aot-cuda/.made: $(VENV)/.dev
	test -x .venv-aot-cuda/bin/python || $(PYTHON) -m venv .venv-aot-cuda
	.venv-aot-cuda/bin/python -m pip --disable-pip-version-check install --quiet --editable ".[dev]" \
	  "jax[cuda13]==$$($(PY) -c 'import jax; print(jax.__version__)')"
	@touch $@

aot-venv: .venv-aot-tpu/.made .venv-aot-cuda/.made  ## both environments

# libtpu asks a metadata server for these unless they are set. No process can read back from JAX's
# cache what was compiled for a device that it does not have.
NO_CACHE := JAX_ENABLE_COMPILATION_CACHE=false
NO_TPU := TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v6e-4 TPU_WORKER_HOSTNAMES=localhost \
  ALLOW_MULTIPLE_LIBTPU_LOAD=1

aot: aot-venv  ## compiles every kernel for v5e, v6e, 7x, then for H100, H200, B200
	JAXLAB_AOT=tpu JAX_PLATFORMS=cpu $(NO_CACHE) $(NO_TPU) \
	  .venv-aot-tpu/bin/python -m pytest -m aot -rs $(PYTEST_ARGS)
	JAXLAB_AOT=cuda JAX_PLATFORMS=cpu $(NO_CACHE) JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 \
	  .venv-aot-cuda/bin/python -m pytest -m aot -rs $(PYTEST_ARGS)

plan-table: aot-venv  ## plans the recipes of docs/plan.md, into docs/plan_table.md
	$(PY) docs/make_plan_table.py

clean:  ## environments, builds and caches; results in runs/ stay
	rm -rf .venv .venv-aot-tpu .venv-aot-cuda .cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
