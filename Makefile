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
EXTRAS  ?= test

comma   := ,
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

.DEFAULT_GOAL := help
.PHONY: help env train smoke test lint format types doctor bubblewrap clean

help:  ## say what each target does
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "gagar needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $@

env: $(STAMP)  ## make the environment (.venv) with pinned versions

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

train: $(STAMP) bubblewrap  ## environment, then the main job: CONFIG=configs/pocket.yaml ARGS='--seed 1'
	$(BIN)/gagar train $(CONFIG) $(ARGS)

smoke: $(STAMP) bubblewrap  ## environment, then the whole pipeline in about a minute
	$(BIN)/gagar train configs/smoke.yaml $(ARGS)

test: $(STAMP) bubblewrap lint types  ## environment, then lint, type-check and every test
	$(BIN)/pytest $(ARGS)

lint: $(STAMP)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## rewrite files the way `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## mypy on the packages
	$(BIN)/mypy

doctor: $(STAMP)  ## what this machine has and lacks
	$(BIN)/gagar doctor

clean:  ## remove the environment and caches; runs stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
