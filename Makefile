# Everything is installed into .venv; outside this folder only caches grow: pip's own, and the model's (~/.cache/kvstore).
PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/.ready
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

.DELETE_ON_ERROR:
.PHONY: help demo test lint campaign bench venv clean

help:
	@echo "make demo      the whole way with a real model, on the CPU"
	@echo "make test      linters, types and tests"
	@echo "make lint      linters and types alone"
	@echo "make campaign  fault campaigns: kills, power loss, damage, failing system calls; needs strace"
	@echo "make bench     put and get against this machine's limits"
	@echo "make venv      set .venv up (the others do it by themselves)"
	@echo "JOBS=N         tests and campaigns: so many processes at a time (default: all cores)"
	@echo "make clean     remove .venv and what was built"

# Rebuilt when pyproject.toml changes, so that a second run costs nothing.
$(READY): pyproject.toml tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py $(VENV)
	@touch $@

venv: $(READY)

demo: $(READY)
	$(VENV)/bin/python -m kvstore.tools.demo

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# A file's tests run in one process, in order: some share what a module makes. Waiting threads of OpenMP that spin would
# take the other processes' cores. Status 5: PYTEST_ARGS chose no test of this step.
test: lint
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/pytest -m "not alone" --numprocesses $(JOBS) --maxprocesses 8 \
		--dist loadfile --no-loadscope-reorder $(PYTEST_ARGS) || [ $$? = 5 ]
	$(VENV)/bin/pytest -m alone $(PYTEST_ARGS) || [ $$? = 5 ]

campaign: $(READY)
	$(VENV)/bin/python -m tests.campaign --jobs $(JOBS) $(CAMPAIGN_ARGS)

bench: $(READY)
	$(VENV)/bin/kvstore bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvstore kernels tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
