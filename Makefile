# `make demo` and `make test` work from a fresh clone: the first call installs what
# constraints.txt pins into .venv, later calls find it there.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
STAMP := .venv/.installed
PYTHON_VERSION = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

TORCH ?=
TRITON ?=
OTHER := .venv-torch-$(TORCH)

.PHONY: demo test test-torch lint

demo: $(STAMP)
	$(BIN)/fp8kv demo $(ARGS)

test: lint
	$(BIN)/python -m pytest $(ARGS)

# The suite on another torch, in a venv of its own: make test-torch TORCH=2.15.0. A GPU build brings
# its triton; for a CPU build name it: TRITON=3.7.1.
test-torch: $(OTHER)/.installed
	$(OTHER)/bin/fp8kv doctor --device cpu
	$(OTHER)/bin/python -m pytest $(ARGS)

$(OTHER)/.installed: pyproject.toml constraints.txt
	@test -n "$(TORCH)" || { echo "which torch? make test-torch TORCH=2.15.0"; exit 1; }
	$(PYTHON) -m venv $(OTHER)
	grep -Ev '^(torch|triton|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	printf '%s\n' torch==$(TORCH) $(if $(TRITON),triton==$(TRITON)) >> $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --constraint $(OTHER)/constraints.txt 'setuptools>=77' torch
	$(OTHER)/bin/python -m pip install --constraint $(OTHER)/constraints.txt \
		--no-build-isolation --editable '.[test]'
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Inductor's C++ backend compiles with g++ against Python.h, so both are needed before torch is.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || \
		{ echo "no $(PYTHON) found: apt-get install python3, or make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python $(PYTHON_VERSION) is too old, needed: 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make a venv: apt-get install python$(PYTHON_VERSION)-venv"; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
		{ echo "$(PYTHON) has no Python.h: apt-get install python$(PYTHON_VERSION)-dev"; exit 1; }
	@command -v g++ >/dev/null || { echo "no g++ found: apt-get install g++"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation --editable '.[test]'
	@touch $@
