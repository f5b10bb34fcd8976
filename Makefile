# `make test` and `make demo` do all of their own set-up: they need python3 (3.10 or newer, with venv) and make, and
# an index to install from. The second run finds the environment ready and starts at once.
#   CLIENTS=clients-oldest  another set of transformers, accelerate and so on (the extras of pyproject.toml), in an
#                       environment of its own: `make demo CLIENTS=clients-oldest`
#   PYTHON=python3.12   another interpreter for the environment
#   PYTEST_ARGS='-k x'  further arguments for pytest
#   TIER='slow'         other tests than the quick ones; `make test-all` runs both tiers
#   TORCH='torch>=2.11' another torch than the one chosen below

PYTHON ?= python3
CLIENTS ?= clients
VENV := .venv$(patsubst clients%,%,$(CLIENTS))
comma := ,
DEMO := demo$(if $(filter-out clients,$(CLIENTS)),$(comma)$(CLIENTS))
BIN := $(VENV)/bin
PYTEST_ARGS ?=
TIER ?= not slow

# A GPU machine takes the build of torch that its index gives, or keeps one that its python already has.
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c '^GPU')
HAS_GPU := $(filter-out 0,$(GPU))
TORCH ?= $(if $(HAS_GPU),torch>=2.11,torch==2.13.0)
VENV_FLAGS := $(if $(HAS_GPU),$(shell $(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages))

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONDONTWRITEBYTECODE := 1

.PHONY: test test-all test-oldest test-newest demo lint types unit multihost-tools clean

test: lint types unit

lint: $(VENV)/ready
	$(BIN)/ruff check .

types: $(VENV)/ready
	$(BIN)/mypy

unit: $(VENV)/ready
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -m "$(TIER)" $(PYTEST_ARGS)

# Everything, slow tests too: soak runs, every client with and without hpZ, every backend of the launcher.
test-all:
	$(MAKE) test TIER="slow or not slow"

# The tests that run clients, with the oldest set of them that is promised; `make test` has the newest of the range.
test-oldest:
	$(MAKE) integration CLIENTS=clients-oldest

# The same with whatever is newest today, torch included; it prints the versions.
test-newest:
	rm -rf .venv-newest
	$(MAKE) integration CLIENTS=clients-newest TORCH=torch

.PHONY: integration
integration: $(VENV)/ready
	@$(BIN)/python -m pip list | grep -Ei '^(torch|transformers|accelerate|peft|trl|lightning) '
	$(MAKE) unit PYTEST_ARGS="tests/clients tests/integration $(PYTEST_ARGS)"

demo: $(VENV)/ready-demo
	$(BIN)/python examples/finetune_demo.py

# What the tests on several hosts use (Debian, root). Without it they are skipped and say so.
multihost-tools:
	@(for tool in sshd pdsh mpirun.openmpi mpirun.mpich ip; do command -v $$tool >/dev/null || exit 1; done) || \
	  { apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	  openssh-server openssh-client pdsh iproute2 openmpi-bin mpich; }

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "$(PYTHON) is older than 3.10: name a newer one, as in 'make PYTHON=python3.12 $(MAKECMDGOALS)'"; exit 1; }
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

# torch first: what is already there satisfies the package's own requirement, so that nothing chooses another build.
$(VENV)/torch: $(BIN)/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	@touch $@

$(VENV)/ready: $(VENV)/torch pyproject.toml setup.py deepspeed/version.py
	$(BIN)/python -m pip install --quiet --editable ".[tools,$(CLIENTS)]"
	@touch $@

$(VENV)/ready-demo: $(VENV)/torch pyproject.toml setup.py deepspeed/version.py
	$(BIN)/python -m pip install --quiet --editable ".[$(DEMO)]"
	@touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info .mypy_cache .ruff_cache .pytest_cache
