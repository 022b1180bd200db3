# Everything below sets up .venv by itself; a second call does not reinstall.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q
PEERS  := .venv-peers
TORCH  := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test test-portable test-browser lint bench bench-tables bench-coverage docs clean

demo: $(READY)
	$(BIN)/dpbnn demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# The numeric tests as other CPUs compute them; SETTINGS=few is quick, and part of .ci/run.
SETTINGS ?= all
test-portable: $(READY)
	PYTHON=$(BIN)/python scripts/portable.sh $(SETTINGS) $(ARGS)

# Opens the report in headless Chromium, which it installs where that is allowed.
test-browser: $(READY)
	PYTHON=$(BIN)/python scripts/browser.sh $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.clipping $(ARGS)

# All learners on all tables, with the peers in an environment of their own; hours on two cores.
bench-tables: $(READY) $(PEERS)/.ready
	$(BIN)/python -m benchmarks.tables --peers $(PEERS)/bin/python $(ARGS)

bench-coverage: $(READY)
	$(BIN)/python -m benchmarks.coverage $(ARGS)

docs: $(READY)
	$(BIN)/python scripts/site.py site

clean:
	rm -rf $(VENV) $(PEERS) site demo .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(PEERS)/.ready: benchmarks/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install -q -r benchmarks/peers.txt
	@touch $@

# torch goes first and alone: its pin keeps the CPU build where one is installed from.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dpbnn needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) (a few minutes the first time)"
	$(PIP) '$(TORCH)'
	$(PIP) --editable '.[dev]'
	@touch $@
