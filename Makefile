# Two commands do everything on a fresh machine with Python >= 3.11 and git:
#
#   make train    make the environment, then train the pocket policy (configs/pocket.yaml)
#   make test     make the environment, then lint, type-check and test
#
# Nothing is activated and nothing outside this folder is touched, but for one optional system
# package (bubblewrap) that is installed only where that needs no password.

PYTHON  ?= python3
VENV    ?= .venv
CONFIG  ?= configs/pocket.yaml
ARGS    ?=

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
RUN     := $(VENV)/.installed
CHECK   := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.PHONY: help env train smoke test lint format types doctor hooks bubblewrap clean

help:  ## say what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "gagar needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Making the environment in $(VENV); the first time this takes a few minutes ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(CHECK): $(RUN)
	$(PIP) -e '.[test]'
	@touch $@

env: $(CHECK)  ## make the environment (.venv) with pinned versions, tests' tools included

# Never fails: without bubblewrap the run falls back to Linux namespaces, and `gagar doctor` says so.
bubblewrap:
	@command -v bwrap >/dev/null 2>&1 && exit 0; \
	command -v apt-get >/dev/null 2>&1 || exit 0; \
	if [ "$$(id -u)" = 0 ]; then as_root=; \
	elif sudo -n true >/dev/null 2>&1; then as_root="sudo -n"; else exit 0; fi; \
	echo "Installing bubblewrap, which confines the code that the agent runs ..."; \
	export DEBIAN_FRONTEND=noninteractive; \
	timeout 120 $$as_root apt-get install -y -qq bubblewrap >/dev/null 2>&1 \
	  || { timeout 120 $$as_root apt-get update -qq >/dev/null 2>&1; \
	       timeout 120 $$as_root apt-get install -y -qq bubblewrap >/dev/null 2>&1; } \
	  || echo "bubblewrap could not be installed; going on without it."

train: $(RUN) bubblewrap  ## environment, then the main job: CONFIG=configs/pocket.yaml ARGS='--seed 1'
	$(BIN)/gagar train $(CONFIG) $(ARGS)

smoke: $(RUN) bubblewrap  ## environment, then the whole pipeline in about two minutes
	$(BIN)/gagar train configs/smoke.yaml $(ARGS)

test: $(CHECK) bubblewrap lint types  ## environment, then lint, type-check and every test
	$(BIN)/pytest $(ARGS)

lint: $(CHECK)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(CHECK)  ## rewrite files the way `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(CHECK)  ## mypy on the packages
	$(BIN)/mypy

doctor: $(RUN)  ## what this machine has and lacks
	$(BIN)/gagar doctor

hooks: $(CHECK)  ## run lint, types and the project's promises before each commit
	$(PIP) -e '.[dev]'
	$(BIN)/pre-commit install

clean:  ## remove the environment and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
