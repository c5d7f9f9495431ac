PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPILERS := $(VENV)/compilers
WITH_COMPILERS := PYTHONPATH=$(COMPILERS) JAX_PLATFORMS=cpu
PYTEST := $(BIN)/python -m pytest
# The tests that compile for chips that are not here.
COMPILED_TESTS := tests/pallas_kernels tests/engine/test_compiled.py tests/engine/test_compiled_quantized.py
# As many test processes as cores; each keeps its own JAX, and all share one compilation cache.
WORKERS ?= auto

.PHONY: help demo test test-speculation test-newest test-oracle lint format report bench bench-batching bench-speculative bench-quantization golden readme clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp per extra: an install is repeated only when pyproject.toml or the constraints change.
$(VENV)/stamp-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@

# The TPU and GPU compilers lie apart from the environment: beside them JAX would look for chips in every program.
$(VENV)/stamp-compilers: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --constraint constraints.txt --target $(COMPILERS) \
	    libtpu jax-cuda12-plugin jax-cuda12-pjrt
	@touch $@

$(VENV)/stamp-base: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

demo: $(VENV)/stamp-base  ## Install into .venv and generate text with the embedded model
	$(BIN)/jaxinfer demo

test: $(VENV)/stamp-test $(VENV)/stamp-compilers  ## Run the test suite (CPU, no torch, no network; compiles for TPU and GPU)
	$(PYTEST) -n $(WORKERS) --dist worksteal -q -m 'not alone' $(addprefix --ignore=,$(COMPILED_TESTS))
	$(WITH_COMPILERS) $(PYTEST) -n $(WORKERS) --dist worksteal -q -m 'not alone' $(COMPILED_TESTS)
	$(PYTEST) -q -m alone

test-kernels: $(VENV)/stamp-test $(VENV)/stamp-compilers  ## Run the long tests of kernels and compiled programs: all shapes, whole models
	$(WITH_COMPILERS) $(PYTEST) -n $(WORKERS) --dist worksteal -q --slow -m slow $(COMPILED_TESTS)

test-speculation: $(VENV)/stamp-test  ## Run the long tests of speculation: every draft with every length
	$(PYTEST) -n $(WORKERS) --dist worksteal -q --slow -m slow tests/engine/test_speculation.py \
	    tests/engine/test_speculation_quantized.py tests/engine/test_kv_dtype.py

# JAX's newest releases need Python 3.12; the kernels, which its changes touch most, are tested on both.
test-newest:  ## Run the kernels' tests on a newer Python and JAX, if one is found
	@python="$$(sh tests/find_newest_python.sh)" || { echo "skipped: no Python 3.12 or newer found"; exit 0; }; \
	$(MAKE) VENV=.venv-newest PYTHON="$$python" test-kernels-short

.PHONY: test-kernels test-kernels-short
test-kernels-short: $(VENV)/stamp-test $(VENV)/stamp-compilers
	$(BIN)/python -c 'import sys, jax; print("Python", sys.version.split()[0], "JAX", jax.__version__)'
	$(WITH_COMPILERS) $(PYTEST) -n $(WORKERS) --dist worksteal -q -m 'not alone' $(COMPILED_TESTS)

test-oracle: $(VENV)/stamp-test $(VENV)/stamp-oracle  ## Compare with Hugging Face Transformers, live
	$(PYTEST) -n $(WORKERS) --dist worksteal -q --oracle --slow tests/oracle

golden: $(VENV)/stamp-test $(VENV)/stamp-oracle  ## Write the golden files again, with Transformers
	$(BIN)/python tests/oracle/make_golden.py
	$(BIN)/python tests/oracle/make_format_golden.py

lint: $(VENV)/stamp-lint  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/stamp-lint  ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

report: $(VENV)/stamp-base $(VENV)/stamp-compilers  ## Compile every kernel for chips that are not here; a table
	$(WITH_COMPILERS) $(BIN)/python -m pallas_kernels.report --json benchmarks/results/kernels_compiled.json

bench: $(VENV)/stamp-test $(VENV)/stamp-oracle  ## Decode speed next to Transformers, in one run
	$(BIN)/python -m benchmarks.decode_vs_transformers --json benchmarks/results/decode_vs_transformers.json

bench-batching: $(VENV)/stamp-base  ## Continuous batching next to static batches, prefix reuse, host time
	$(BIN)/python -m benchmarks.continuous_batching --json benchmarks/results/continuous_batching.json

bench-speculative: $(VENV)/stamp-base  ## Speculative next to plain decoding: the embedded pair, n-grams, loads
	$(BIN)/python -m benchmarks.speculative --json benchmarks/results/speculative.json

bench-quantization: $(VENV)/stamp-base  ## What few bits cost the embedded model, by method; and 8-bit caches
	$(BIN)/python -m benchmarks.quantization_quality --json benchmarks/results/quantization_quality.json
	$(BIN)/python -m benchmarks.kv_cache_quality --json benchmarks/results/kv_cache_quality.json

readme: $(VENV)/stamp-base  ## Print the README's examples again
	$(BIN)/python docs/update_readme.py

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .venv-newest build *.egg-info .pytest_cache .ruff_cache
