# `make` alone lists the verbs. Every verb that needs the environment makes it first, so `make test` works on a new clone.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Added to the end of the command that a verb runs.
ARGS ?=
# A package index to take torch from, as well as the ordinary one: where only CUDA builds are offered, name one with CPU builds.
PENSTOCK_TORCH_INDEX ?=

# Tests and checks never reach a model hub.
export HF_HUB_OFFLINE := 1

ENVIRONMENT := $(VENV)/.made
NATIVE := $(VENV)/.native
LINKS := .dev/.made
NODE := node_modules/.made

.PHONY: help
help: ## list the verbs
	@echo "usage: make VERB [VENV=.venv] [PYTHON=python3] [ARGS='...']"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' \
	  | while IFS=$$'\t' read -r verb text; do printf '  %-12s %s\n' "$$verb" "$$text"; done

# ----------------------------------------------------------------------------------------------------------- environment

.PHONY: setup native lock
setup: $(ENVIRONMENT) $(LINKS) $(NATIVE) ## make the environment, .venv, with every dependency; the second time it does nothing

# Everything is checked by its hash but torch, and what CUDA builds of it bring along: a CPU build of the same version comes
# from another index, or from this machine, and has another hash. It is fixed by its version. The first call resolves
# nothing: requirements.lock has it all.
$(ENVIRONMENT): pyproject.toml setup.py constraints.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "penstock needs Python 3.11 to 3.13; name one: make setup PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --require-hashes --no-deps -r requirements.lock
	$(BIN)/pip install -c constraints.txt $(if $(PENSTOCK_TORCH_INDEX),--extra-index-url "$(PENSTOCK_TORCH_INDEX)") torch
	$(BIN)/pip install --no-deps --no-build-isolation -e .
	@touch $@

# The environment's own installation has built it already, unless a source is newer by now, or there is no compiler.
$(NATIVE): kernels/cpu/build.py $(wildcard kernels/cpu/csrc/*/*) | $(ENVIRONMENT)
	@$(BIN)/python -P kernels/cpu/build.py --if-possible
	@touch $@

native: $(ENVIRONMENT) ## build the CPU library, with all that the C++ compiler has to say; CXX=clang++ names one
	$(BIN)/python -P kernels/cpu/build.py
	@touch $(NATIVE)

# For every Python and platform at once, with the versions of constraints.txt.
lock: ## write requirements.lock anew, after a change of pyproject.toml or constraints.txt; needs uv
	@command -v uv >/dev/null || { echo "uv resolves for all platforms at once: pip install uv" >&2; exit 1; }
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  --constraints constraints.txt --extra server --extra dev pyproject.toml \
	  | awk '/^[A-Za-z0-9]/ { keeps = !/^(torch|nvidia-[a-z0-9-]*|cuda-[a-z]*)==/ } keeps' > requirements.lock

# What tools need to see and git need not: the namespace `penstock` as a folder of links, and types of google.rpc, for
# mypy and pyright; the files of google.rpc that the contract imports, for buf, which would fetch them otherwise.
$(LINKS): $(ENVIRONMENT)
	@rm -rf .dev && mkdir -p .dev/protos/google/rpc .dev/types
	@$(link-rooms)
	@cp $(SITE)/google/rpc/{status,error_details}.proto .dev/protos/google/rpc/
	@$(BIN)/python -P -m grpc_tools.protoc -I .dev/protos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	  --mypy_out=quiet:.dev/types google/rpc/status.proto google/rpc/error_details.proto
	@touch $@

link-rooms = mkdir -p .dev/penstock; ln -sfn ../../protos/penstock/v1 .dev/penstock/v1; \
  for room in clients kernels kv models scheduler service; do ln -sfn ../../$$room .dev/penstock/$$room; done

# A machine with a GPU may have no package index. Where its Python has torch it is run as it is, on the checkout, and
# what needs packages that it lacks is left out.
define on-gpu
@test -x $(BIN)/python || $(PYTHON) -c 'import torch, triton' 2>/dev/null || $(MAKE) setup
@$(link-rooms)
python=$(BIN)/python; test -x $$python || python=$(PYTHON); \
  PYTHONPATH="$(CURDIR)/.dev:$(CURDIR)/tests/support:$(CURDIR)/tests/peers$${PYTHONPATH:+:$$PYTHONPATH}" $$python -P
endef

SITE = $(shell $(BIN)/python -P -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

$(NODE): package.json package-lock.json
	@command -v npm >/dev/null || { echo "buf comes from npm: install node, or run: make lint types imports" >&2; exit 1; }
	npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

# ------------------------------------------------------------------------------------------------------------------- run

.PHONY: serve bench bench-peers bench-cpu bench-spec bench-gpu
serve: setup ## serve the demo model on 127.0.0.1:50051; PORT=... and ARGS='MODEL' change that
	$(BIN)/penstock serve $(if $(PORT),--port $(PORT)) $(ARGS)

# -P keeps tests/ off sys.path, where tests/kernels would answer to `import kernels`.
bench: setup ## print the benchmark figures of the documentation, each with its command
	PYTHONPATH=tests/peers $(BIN)/python -P tests/bench.py $(ARGS)

# Where other engines' environments, and the models, go.
PEERS ?= .peers

bench-peers: setup ## install the other engines, each in an environment of its own below PEERS=.peers
	PYTHONPATH=tests/peers $(BIN)/python -P -m cpu_bench.install --peers $(PEERS) $(ARGS)

bench-cpu: setup ## compare ours with the other engines on CPUs, by turns; two hours
	PYTHONPATH=tests/peers $(BIN)/python -P -m cpu_bench --peers $(PEERS) $(ARGS)

bench-spec: setup ## measure what speculative decoding gains, on the CPU; half an hour
	PYTHONPATH=tests/peers $(BIN)/python -P -m spec_bench --peers $(PEERS) $(ARGS)

bench-gpu: ## measure kernels, steps and service on a GPU, beside transformers; 8 minutes. TINY=1: without one, tiny
	$(on-gpu) -m gpu_bench $(if $(TINY),--tiny) --json build/bench-gpu.json $(ARGS)

# ------------------------------------------------------------------------------------------------------------------ test

.PHONY: test test-gpu soak nocompiler sanitize emulate
# Some processes take tests from each other. Of more than four each would mostly load what the others have loaded too.
BY_TURNS := -n logical --maxprocesses 4 --dist worksteal
test: setup ## run the tests; ARGS='-k name' runs some, ARGS='-n 0' all in one process, as a debugger wants it
	$(BIN)/pytest $(BY_TURNS) $(ARGS)

# Where plugins are missing that the configuration names, the kernels' tests run without it, those at least that need no
# more than torch.
WITHOUT_PLUGINS := --config-file=/dev/null --rootdir=. --import-mode=importlib --continue-on-collection-errors
test-gpu: ## run the tests that need a GPU
	$(on-gpu) -m pytest $$($$python -c 'import msgspec, pytest_asyncio, pytest_timeout' 2>/dev/null \
	  || echo $(WITHOUT_PLUGINS) tests/kernels/cuda) -m gpu $(ARGS)

soak: setup ## run the long tests at their full numbers, then sanitize and emulate; with ARGS, the long tests alone
	PENSTOCK_SOAK=1 $(BIN)/pytest -m soak --timeout=0 $(ARGS)
	$(if $(ARGS),,$(MAKE) sanitize emulate)

nocompiler: setup ## run the tests as on a machine without a C++ compiler, so without the CPU library
	CXX=/none PENSTOCK_CPU_LIBRARY=/none $(BIN)/pytest $(BY_TURNS) $(ARGS)

KERNEL_TESTS := tests/kernels/test_cpu_*.py

# The sanitizer's library comes first, then libstdc++, whose exceptions it watches: torch throws some. Python gets memory
# from malloc, so that what lies beyond a bytes object is guarded as well. Python itself leaks at its end. A sanitizer ends
# the process: captured as a file, what it prints would be lost. It doesn't see what AMX's instructions read and write, so
# their registers are software here.
SANITIZED := build/sanitized
sanitize: setup ## run the kernels' tests with AddressSanitizer and UBSan
	CXX=g++ $(BIN)/python -P kernels/cpu/build.py --sanitize --software-tiles --out $(SANITIZED)
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	  PENSTOCK_CPU_LIBRARY=$(SANITIZED)/libpenstock_cpu.so $(BIN)/python -P -m pytest --timeout=0 --capture=sys \
	  $(KERNEL_TESTS) $(ARGS)

# Of two machines, one has AVX2 and no AVX512, the other neither. numpy's BLAS asks the real machine and must be told.
EMULATED := emulate-Haswell emulate-Nehalem
.PHONY: $(EMULATED)
emulate: $(EMULATED) ## run the kernels' tests on older processors; needs qemu-x86_64 (Debian: qemu-user)
emulate-Haswell: LEVELS := avx2 generic
emulate-Nehalem: LEVELS := generic
$(EMULATED): emulate-%: setup
	@command -v qemu-x86_64 >/dev/null || { echo "qemu-x86_64 is missing (Debian: apt-get install qemu-user)" >&2; exit 1; }
	OPENBLAS_CORETYPE=$* OPENBLAS_NUM_THREADS=1 PENSTOCK_EMULATED_LEVELS="$(LEVELS)" \
	  qemu-x86_64 -cpu $* $(BIN)/python -P -m pytest --timeout=0 $(KERNEL_TESTS) $(ARGS)

# ----------------------------------------------------------------------------------------------------------------- check

.PHONY: check check-fast lint types imports contract format
check: lint types imports contract ## all that follows; `make -k check` goes on after a failure

# What .pre-commit-config.yaml runs on the files of a commit, here on all of them.
check-fast: lint ## the part of check that takes seconds, and the wording of comments and docs
	$(BIN)/python -P tests/english.py

lint: setup ## ruff: rules and format
	$(BIN)/ruff check $(ARGS)
	$(BIN)/ruff format --check

TYPES := types-3.11 types-3.12 types-3.13
.PHONY: $(TYPES)
types: $(TYPES) ## mypy, strictly, for every Python that penstock runs on
$(TYPES): types-%: setup
	$(BIN)/mypy --python-version $*

imports: setup ## import-linter: who may import whom
	$(BIN)/lint-imports

# The contract may change freely until the first release; from then on, never in a way that breaks a caller. Compared are
# the descriptor sets, since a release has no .dev/protos to build from; a test proves that the new one is up to date.
contract: setup $(NODE) ## buf: the protos' style, comments, and nothing broken since the last release
	node_modules/.bin/buf lint
	@release=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true); \
	if [ -z "$$release" ]; then echo "buf breaking: no release to compare with"; exit 0; fi; \
	old=$$(mktemp --suffix=.binpb); trap 'rm -f "$$old"' EXIT; \
	git show "$$release:protos/penstock/v1/descriptor.binpb" > "$$old"; \
	echo "buf breaking against $$release"; \
	node_modules/.bin/buf breaking protos/penstock/v1/descriptor.binpb --against "$$old"

format: setup ## rewrite the code as ruff wants it
	$(BIN)/ruff check --fix $(ARGS)
	$(BIN)/ruff format

# ------------------------------------------------------------------------------------------------------------------ docs

.PHONY: docs docs-serve
# The variable silences a notice that MkDocs' theme prints about another generator.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
docs: setup ## build the site of docs/ in build/site; a broken link or anchor fails
	$(MKDOCS) build $(ARGS)

docs-serve: setup ## serve that site on 127.0.0.1:8001, and build it again after each change; PORT=... changes that
	$(MKDOCS) serve --dev-addr 127.0.0.1:$(or $(PORT),8001) $(ARGS)

# -------------------------------------------------------------------------------------------------------------- generate

# Where the generated files go; a test generates them elsewhere and compares.
PROTO_OUT ?= protos
# The descriptor set is for callers without the sources: grpcurl, gateways that transcode. With what a Status may carry.
PROTOC = $(BIN)/python -P -m grpc_tools.protoc -I protos -I $(SITE)

.PHONY: protos stubs
protos: setup stubs ## write the stubs and the descriptor set from protos/**/*.proto

stubs:
	@new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; \
	$(PROTOC) --python_out="$$new" --grpc_python_out="$$new" \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --mypy_out=quiet:"$$new" \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:"$$new" \
	  $(sort $(shell find protos -name '*.proto')); \
	$(PROTOC) --include_imports --descriptor_set_out="$$new/penstock/v1/descriptor.binpb" \
	  $(sort $(wildcard protos/penstock/v1/*.proto)) google/rpc/error_details.proto; \
	mkdir -p $(PROTO_OUT); \
	find $(PROTO_OUT) -name '*_pb2*.py*' -not -path '*/__pycache__/*' -delete; \
	cp -R "$$new/." $(PROTO_OUT)/

# ----------------------------------------------------------------------------------------------------------------- clean

.PHONY: clean
clean: ## remove what the verbs made, except the environments
	rm -rf .dev .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	rm -f kernels/cpu/*.so $(NATIVE)
	find clients kernels kv models protos scheduler service tests -name __pycache__ -prune -exec rm -rf {} +
