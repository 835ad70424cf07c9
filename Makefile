# Everything is installed into .venv; outside this folder only caches grow: pip's own, and the model's (~/.cache/kvstore).
PYTHON ?= python3
VENV   := .venv
READY  := $(VENV)/.ready
VLLM_VENV  := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

.DELETE_ON_ERROR:
.PHONY: help demo test test-vllm test-vllm-next lint campaign bench bench-vllm venv clean

help:
	@echo "make demo      the whole way with a real model, on the CPU"
	@echo "make test      linters, types and tests"
	@echo "make test-vllm the connector and the tier in the real vLLM, on the CPU; 3.5 GB of its own in $(VLLM_VENV)"
	@echo "make test-vllm-next  the same with vLLM 0.33's Python over 0.32's compiled modules"
	@echo "make lint      linters and types alone"
	@echo "make campaign  fault campaigns: kills, power loss, damage, failing system calls; needs strace"
	@echo "make bench     put and get against this machine's limits"
	@echo "make bench-vllm  time to first token, and what the connector costs, in the real vLLM on the CPU"
	@echo "make venv      set .venv up (the others do it by themselves)"
	@echo "JOBS=N         tests and campaigns: so many processes at a time (default: all cores)"
	@echo "make clean     remove the environments and what was built"

# Rebuilt when pyproject.toml changes, so that a second run costs nothing.
$(READY): pyproject.toml tools/setup_venv.py
	$(PYTHON) tools/setup_venv.py $(VENV)
	@touch $@

$(VLLM_READY): pyproject.toml tools/setup_vllm.py tools/setup_venv.py
	$(PYTHON) tools/setup_vllm.py $(VLLM_VENV)
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

# vLLM pins what it needs, so it has an environment of its own; another numba would take the compiled loops of $(VENV) for
# stale, and put its own in their place. Engines of one file run one after another.
test-vllm test-vllm-next bench-vllm: export NUMBA_CACHE_DIR = $(CURDIR)/$(VLLM_VENV)/numba
VLLM_TESTS = OMP_WAIT_POLICY=PASSIVE $(VLLM_VENV)/bin/pytest --numprocesses $(JOBS) --maxprocesses 4 --dist loadfile \
	--no-loadscope-reorder tests/vllm $(PYTEST_ARGS)
test-vllm: $(VLLM_READY)
	$(VLLM_TESTS)

# The next vLLM's Python over this one's compiled modules.
test-vllm-next: $(VLLM_READY)
	$(PYTHON) tools/vllm_python.py $(VLLM_VENV)
	PYTHONPATH=$(CURDIR)/$(VLLM_VENV)/newer $(VLLM_TESTS)

campaign: $(READY)
	$(VENV)/bin/python -m tests.campaign --jobs $(JOBS) $(CAMPAIGN_ARGS)

bench: $(READY)
	$(VENV)/bin/kvstore bench $(BENCH_ARGS)

bench-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python tools/bench_vllm.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvstore kernels tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
