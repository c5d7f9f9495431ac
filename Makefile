PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPILERS := $(VENV)/compilers
WITH_COMPILERS := PYTHONPATH=$(COMPILERS) JAX_PLATFORMS=cpu
PYTEST := $(BIN)/python -m pytest
# The tests that compile for chips that are not here.
# Eight virtual devices, and other processes.
SCALE_OUT_TESTS := tests/scale_out
COMPILED_TESTS := tests/pallas_kernels tests/engine/test_compiled.py tests/engine/test_compiled_quantized.py \
    tests/engine/test_compiled_mesh.py tests/planning/test_plan_compiled.py
# The compilers are native code, and one of them has crashed a test process where it starts, once: a test is run once more
# after a crash, and only then; one that crashes twice fails.
ONCE_MORE := --reruns 1 --only-rerun 'crashed while running'
# As many test processes as cores; each keeps its own JAX, and all share one compilation cache.
WORKERS ?= auto

.PHONY: help demo test test-faults test-speculation test-scale-out test-newest test-oracle lint format report bench bench-ratios bench-batching bench-speculative bench-quantization bench-loading golden docs notebooks readme clean

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
	$(PYTEST) -n $(WORKERS) --dist worksteal -q -m 'not alone' $(addprefix --ignore=,$(COMPILED_TESTS) $(SCALE_OUT_TESTS))
	$(WITH_COMPILERS) $(PYTEST) -n $(WORKERS) --dist worksteal -q -m 'not alone' $(ONCE_MORE) $(COMPILED_TESTS)
	$(PYTEST) -q -m alone
	JAX_NUM_CPU_DEVICES=8 $(PYTEST) -q $(SCALE_OUT_TESTS)

test-faults: $(VENV)/stamp-test $(VENV)/stamp-compilers  ## Plant each fault of tests/faults and see that the tests notice it
	$(BIN)/python -m tests.faults --jobs 2

test-kernels: $(VENV)/stamp-test $(VENV)/stamp-compilers  ## Run the long tests of kernels and compiled programs: all shapes, whole models
	$(WITH_COMPILERS) $(PYTEST) -n $(WORKERS) --dist worksteal -q --slow -m slow $(ONCE_MORE) $(COMPILED_TESTS)

test-speculation: $(VENV)/stamp-test  ## Run the long tests of speculation: every draft with every length
	$(PYTEST) -n $(WORKERS) --dist worksteal -q --slow -m slow tests/engine/test_speculation.py \
	    tests/engine/test_speculation_quantized.py tests/engine/test_kv_dtype.py

test-scale-out: $(VENV)/stamp-test $(VENV)/stamp-ray  ## Run the long tests of meshes and fleets: every mesh with every model; Ray
	JAX_NUM_CPU_DEVICES=8 $(PYTEST) -q --slow $(SCALE_OUT_TESTS)

# JAX's newest releases need Python 3.12; the kernels, which its changes touch most, are tested on both.
test-newest:  ## Run the kernels' tests on a newer Python and JAX, if one is found
	@python="$$(sh tests/find_newest_python.sh)" || { echo "skipped: no Python 3.12 or newer found"; exit 0; }; \
	$(MAKE) VENV=.venv-newest PYTHON="$$python" test-kernels-short

.PHONY: test-kernels test-kernels-short
test-kernels-short: $(VENV)/stamp-test $(VENV)/stamp-compilers
	$(BIN)/python -c 'import sys, jax; print("Python", sys.version.split()[0], "JAX", jax.__version__)'
	$(WITH_COMPILERS) $(PYTEST) -n $(WORKERS) --dist worksteal -q -m 'not alone' $(ONCE_MORE) $(COMPILED_TESTS)

test-oracle: $(VENV)/stamp-test $(VENV)/stamp-oracle  ## Compare with Hugging Face Transformers, live
	$(PYTEST) -n $(WORKERS) --dist worksteal -q --oracle --slow tests/oracle

golden: $(VENV)/stamp-test $(VENV)/stamp-oracle  ## Write the golden files again, with Transformers
	$(BIN)/python tests/oracle/make_golden.py
	$(BIN)/python tests/oracle/make_format_golden.py
	$(BIN)/python tests/oracle/make_gguf_golden.py

lint: $(VENV)/stamp-lint  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/stamp-lint  ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

report: $(VENV)/stamp-base $(VENV)/stamp-compilers  ## Compile every kernel for chips that are not here; a table
	$(WITH_COMPILERS) $(BIN)/python -m pallas_kernels.report --json benchmarks/results/kernels_compiled.json

bench: $(VENV)/stamp-test $(VENV)/stamp-oracle  ## jaxinfer next to Transformers and llama.cpp, in one run; the README's table
	@$(MAKE) $(VENV)/stamp-peers || echo "llama.cpp is left out: it could not be built here"
	$(BIN)/python -m benchmarks.peers --json benchmarks/results/peers.json $(if $(EASYDEL_PYTHON),--easydel-python $(EASYDEL_PYTHON))
	$(BIN)/python docs/update_readme.py bench

bench-ratios: $(VENV)/stamp-base  ## Print the README's other ratios again: batching, prefixes, drafts, int8
	$(BIN)/python -m benchmarks.ratios --json benchmarks/results/ratios.json
	$(BIN)/python docs/update_readme.py ratios

bench-batching: $(VENV)/stamp-base  ## Continuous batching next to static batches, prefix reuse, host time
	$(BIN)/python -m benchmarks.continuous_batching --json benchmarks/results/continuous_batching.json

bench-speculative: $(VENV)/stamp-base  ## Speculative next to plain decoding: the embedded pair, n-grams, loads
	$(BIN)/python -m benchmarks.speculative --json benchmarks/results/speculative.json

bench-quantization: $(VENV)/stamp-base  ## What few bits cost the embedded model, by method; and 8-bit caches
	$(BIN)/python -m benchmarks.quantization_quality --json benchmarks/results/quantization_quality.json
	$(BIN)/python -m benchmarks.kv_cache_quality --json benchmarks/results/kv_cache_quality.json

bench-loading: $(VENV)/stamp-base  ## Loading 2.3 GiB from a cold disk next to reading it; host memory
	$(BIN)/python -m benchmarks.loading --json benchmarks/results/loading.json

docs: $(VENV)/stamp-docs  ## Build the documentation site into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/stamp-notebooks  ## Run the notebooks and keep their pictures
	$(BIN)/python docs/update_notebooks.py

readme: $(VENV)/stamp-base  ## Print the README's examples again
	$(BIN)/python docs/update_readme.py

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .venv-newest build site *.egg-info .pytest_cache .ruff_cache
