# A thin front over CMake and Ninja. `make help` lists what there is.
# Another torch than the one we build on has a virtual environment and a build folder of its own; see scripts/setup.
TORCH_VERSION ?= 2.13.0
export TORCH_VERSION
OTHER = $(if $(filter-out 2.13.0,$(TORCH_VERSION)),-torch-$(TORCH_VERSION))
VENV = .venv$(OTHER)
# Those that `make wheels` makes wheels for.
TORCH_VERSIONS ?= 2.13.0 2.15.0
BUILD ?= build$(OTHER)
PREFIX ?= /usr/local
CMAKE_ARGS ?=
# Python that is formatted by ruff, besides being linted.
PYTHON = . scripts/check_layers scripts/check_docs scripts/extract_examples scripts/check_public_headers
SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.h' '*.cpp')

.PHONY: help demo test python-test python-check validate op-db slices fuzz fuzz-values checkpoint-faults faults soak audit operators from-torch wheel wheels tarball bench build lint tidy format docs pictures install \
  asan ubsan tsan clang cross clean

SHELL_SCRIPTS = scripts/setup scripts/make_pictures scripts/make_tarball .ci/run tests/install/run tests/install/wheel

# Tests at once: each has ranks of its own, which wait for each other much of the time.
JOBS = $(shell jobs=$$(nproc); echo $$((jobs < 4 ? jobs : 4)))

# In tests, every local tensor is checked to lie in memory as its spec says, and new memory is filled with NaN.
CHECKS = TESSERA_CHECK_LAYOUT=1 TESSERA_FILL_MEMORY=1

help:
	@echo 'make demo      build, then train a small GPT on four ranks, and compare it with one device; others: DEMO="--parallel fsdp"'
	@echo 'make test      build, then run all tests, those of the Python package and of what is installed too'
	@echo 'make python-test  build, then run the tests of the Python package alone'
	@echo 'make validate  build, then try all sharding rules against the operators themselves'
	@echo 'make wheel     build the Python package for pip, with the C++ library, its headers and CMake files, into $(BUILD)/wheel'
	@echo 'make wheels    the same for each torch in TORCH_VERSIONS ($(TORCH_VERSIONS)), into folders of their own (long)'
	@echo 'make tarball   build the library and the commands, and pack them with headers and CMake files, into $(BUILD)/'
	@echo 'make op-db     build, then try the operator database of PyTorch against one device (minutes)'
	@echo 'make slices    build, then try which kernels of libtorch misread memory with gaps (minutes)'
	@echo 'make fuzz      try all that parses or takes sizes with a million bad inputs each: texts, bytes, messages, files (long; FUZZ=--help)'
	@echo 'make fuzz-values  build, then try random operators, errors, modules and models against one device (long; FUZZ=--help)'
	@echo 'make checkpoint-faults  build, then kill saves at every call that changes the disk, damage what they wrote (minutes)'
	@echo 'make faults    build, then let a rank fail in every way at every kind of step, on processes and threads (minutes)'
	@echo 'make soak      build, then mixed work with ranks killed for MINUTES=2: memory, files and threads must stay flat'
	@echo 'make audit     build, then write docs/replicas.md: which operators take the replicated fallback (minutes)'
	@echo 'make bench     build, then run the benchmarks'
	@echo 'make build     build everything into $(BUILD)/'
	@echo 'make operators build, then write docs/operators.md from the sharding rules'
	@echo 'make from-torch  build, then write docs/from_torch.md: what torch.distributed.tensor does otherwise'
	@echo 'make lint      check formatting, Python (ruff), scripts, the order of the layers, and the width and examples of the docs'
	@echo 'make tidy      check with clang-tidy (slow)'
	@echo 'make tsan      run the tests of what is concurrent under ThreadSanitizer'
	@echo 'make asan      run the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer (also: make ubsan)'
	@echo 'make clang     build everything with clang, for the oldest x86-64'
	@echo 'make cross     compile the library for aarch64'
	@echo 'make format    format all sources'
	@echo 'make docs      make the book from docs/ and the API reference from the headers, into $(BUILD)/docs'
	@echo 'make pictures  build, then draw the pictures of the book, into docs/pictures'
	@echo 'make install   install into PREFIX ($(PREFIX))'
	@echo 'make clean     remove what was built'
	@echo
	@echo 'Each of them first installs what is missing (scripts/setup). An existing libtorch is used if TORCH_PREFIX or'
	@echo 'CMAKE_PREFIX_PATH names its folder; others: BUILD, PREFIX, CMAKE_ARGS. TORCH_VERSION=2.15.0 takes another torch.'

comma := ,
# $(call configure,<folder>,<options>[,<what scripts/setup installs>])
# The Python package is built for the virtual environment that scripts/setup makes; with a libtorch of one's own there is none.
define configure
@torch=$$(scripts/setup $(3) | tail -n 1) && test -n "$$torch" && mkdir -p $(1) && python= && \
  case "$$torch" in $(CURDIR)/$(VENV)/*) python="-DTESSERA_BUILD_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/$(VENV)/bin/python";; esac && \
  { cmake -S . -B $(1) -G Ninja -DCMAKE_PREFIX_PATH="$$torch" $$python $(2) $(CMAKE_ARGS) >$(1)/configure.log 2>&1 || \
    { cat $(1)/configure.log; exit 1; }; }
endef

build:
	$(call configure,$(BUILD),)
	@cmake --build $(BUILD)

# The library and the demo alone.
demo:
	$(call configure,$(BUILD),,library)
	@cmake --build $(BUILD) --target train_gpt
	@$(BUILD)/examples/train_gpt/train_gpt $(DEMO)

test: build
	@cd $(BUILD) && $(CHECKS) ctest --output-on-failure -j $(JOBS)
	@if [ -e $(BUILD)/python/tessera ]; then $(MAKE) --no-print-directory python-check; \
	  else echo 'The Python package was not built, so its tests are left out.'; fi

# A save is killed on each of two processes at every call that changes the disk, in each format.
checkpoint-faults: build
	@$(CHECKS) TESSERA_CHECKPOINT_FAULTS=all $(BUILD)/tests/checkpoint_fault_tests

faults:
	$(call configure,$(BUILD),)
	@cmake --build $(BUILD) --target faults_tests
	@$(CHECKS) TESSERA_FAULTS=all $(BUILD)/tests/faults_tests

MINUTES ?= 2
soak:
	$(call configure,$(BUILD),)
	@cmake --build $(BUILD) --target soak
	@$(BUILD)/tests/soak --minutes $(MINUTES)

python-test: build python-check

python-check:
	@tests/install/wheel $(BUILD) $(VENV)
	@$(CHECKS) PYTHONPATH=$(BUILD)/python $(VENV)/bin/python -m pytest -n $(JOBS)
	@$(VENV)/bin/python -m mypy
	@MYPYPATH=python PYTHONPATH=$(BUILD)/python $(VENV)/bin/python -m mypy.stubtest tessera._C --allowlist python/tests/stubtest.allow

validate: build
	@$(CHECKS) PYTHONPATH=$(BUILD)/python $(VENV)/bin/python python/validate/validate.py --output $(BUILD)/validate.md
	@echo 'The table is in $(BUILD)/validate.md.'
	@PYTHONPATH=$(BUILD)/python $(VENV)/bin/python python/validate/against_torch.py

# By pip, but of the libraries that are built already. What is in an archive has the time of the commit, so that the same source gives
# the same bytes.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
wheel:
	$(call configure,$(BUILD),)
	@cmake --build $(BUILD) --target tessera_package
	@rm -rf $(BUILD)/wheel
	@SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) $(VENV)/bin/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(BUILD)/wheel \
	  -C build-dir=$(BUILD)/wheel-build -C cmake.define.TESSERA_BUILT=$(abspath $(BUILD)) .
	@cd $(BUILD)/wheel && stat --format='$(BUILD)/wheel/%n: %s bytes' *.whl

wheels:
	@for version in $(TORCH_VERSIONS); do $(MAKE) --no-print-directory wheel TORCH_VERSION=$$version || exit 1; done

# For those without Python: what `make install` installs, without the tests and benchmarks, to unpack anywhere.
tarball:
	$(call configure,$(BUILD),)
	@SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) cmake --build $(BUILD) --target tarball

op-db: build
	@$(CHECKS) PYTHONPATH=$(BUILD)/python $(VENV)/bin/python python/op_db/run.py --output $(BUILD)/op_db

slices: build
	@PYTHONPATH=$(BUILD)/python $(VENV)/bin/python python/op_db/slices.py

fuzz:
	$(call configure,$(BUILD),)
	@cmake --build $(BUILD) --target checkpoint_fuzz parser_fuzz
	@if [ -e $(BUILD)/python ]; then cmake --build $(BUILD) --target tessera_package; fi
	@$(BUILD)/tests/checkpoint_fuzz $(FUZZ)
	@$(BUILD)/tests/parser_fuzz $(FUZZ)
	@if [ -e $(BUILD)/python/tessera ]; then PYTHONPATH=$(BUILD)/python $(VENV)/bin/python python/tests/test_pickle_fuzz.py $(FUZZ); \
	  else echo 'The Python package was not built, so pickles are left out.'; fi

fuzz-values: build
	@$(CHECKS) PYTHONPATH=$(BUILD)/python $(VENV)/bin/python python/fuzz/run.py --output $(BUILD)/fuzz $(FUZZ)

audit: build
	@PYTHONPATH=$(BUILD)/python $(VENV)/bin/python python/op_db/audit.py --output docs/replicas.md

bench: build
	@$(BUILD)/bench/bench_placement
	@$(BUILD)/bench/bench_random
	@$(BUILD)/bench/bench_sharded
	@$(BUILD)/bench/bench_attention
	@$(BUILD)/bench/bench_trace
	@if [ -e $(BUILD)/python/tessera ]; then \
	  PYTHONPATH=$(BUILD)/python $(VENV)/bin/python bench/dispatch.py --torch $(BUILD)/dispatch_torch.txt; \
	  PYTHONPATH=$(BUILD)/python $(VENV)/bin/python bench/optimizer.py; \
	  PYTHONPATH=$(BUILD)/python $(VENV)/bin/python bench/train.py --torch $(BUILD)/train_torch.txt; \
	  $(BUILD)/bench/bench_dispatch --torch $(BUILD)/dispatch_torch.txt; else $(BUILD)/bench/bench_dispatch; fi
	@python3 bench/instructions.py $(BUILD)/bench/bench_dispatch
	@if [ -e $(BUILD)/train_torch.txt ]; then $(BUILD)/bench/bench_train --torch $(BUILD)/train_torch.txt; \
	  else $(BUILD)/bench/bench_train; fi
	@if [ -e $(BUILD)/python/tessera ]; then \
	  $(VENV)/bin/python bench/checkpoint.py --directory $(BUILD)/bench/checkpoint --torch $(BUILD)/checkpoint_torch.txt; fi
	@$(BUILD)/bench/bench_checkpoint --directory $(BUILD)/bench/checkpoint --torch $(BUILD)/checkpoint_torch.txt
	@$(BUILD)/bench/bench_collectives

from-torch: build
	@PYTHONPATH=$(BUILD)/python $(VENV)/bin/python python/validate/from_torch.py --output docs/from_torch.md

operators: build
	@$(BUILD)/tests/list_operators >docs/operators.md

lint:
	@scripts/setup >/dev/null
	@clang-format --dry-run -Werror $(SOURCES)
	@shellcheck $(SHELL_SCRIPTS)
	@python3 scripts/check_layers
	@python3 scripts/check_docs
	@if [ -x $(VENV)/bin/ruff ]; then $(VENV)/bin/ruff check --quiet $(PYTHON) && $(VENV)/bin/ruff check --quiet --select I $(PYTHON) && \
	  $(VENV)/bin/ruff format --quiet --check $(PYTHON); else echo 'There is no $(VENV), so Python is not linted.'; fi

# clang-tidy looks at each source alone, and cannot read gcc's precompiled headers.
tidy:
	$(call configure,build-tidy,-DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DTESSERA_UNITY_BUILD=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DCCACHE=OFF)
	@command -v clang-tidy >/dev/null || { echo 'clang-tidy is missing: apt-get install clang-tidy'; exit 1; }
	@clang-tidy --quiet -p build-tidy $(filter %.cpp,$(SOURCES))

# Other compilers and processors. clang is asked for the oldest x86-64; for aarch64, the library is compiled, and nothing is linked.
COMPILED_ALONE = -DTESSERA_BUILD_TESTS=OFF -DTESSERA_BUILD_BENCH=OFF -DTESSERA_BUILD_EXAMPLES=OFF -DTESSERA_BUILD_PYTHON=OFF
clang:
	@command -v clang++ >/dev/null || { echo 'clang is missing: apt-get install clang'; exit 1; }
	$(call configure,build-clang,-DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_FLAGS=-march=x86-64)
	@cmake --build build-clang

cross:
	@command -v aarch64-linux-gnu-g++ >/dev/null || { echo 'The cross compiler is missing: apt-get install g++-aarch64-linux-gnu'; exit 1; }
	$(call configure,build-aarch64,--toolchain cmake/aarch64.cmake $(COMPILED_ALONE),library)
	@cmake --build build-aarch64 --target tessera

format:
	@scripts/setup >/dev/null
	@clang-format -i $(SOURCES)
	@if [ -x $(VENV)/bin/ruff ]; then $(VENV)/bin/ruff check --quiet --select I --fix $(PYTHON) && $(VENV)/bin/ruff format --quiet $(PYTHON); fi

# The pictures of the book, by our own visualiser.
pictures:
	$(call configure,$(BUILD),)
	@cmake --build $(BUILD) --target tessera-command
	@scripts/make_pictures $(BUILD)/tools/tessera docs/pictures

docs:
	@scripts/setup >/dev/null
	@mkdir -p $(BUILD)/docs/site
	@if [ -x $(VENV)/bin/python ]; then NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --quiet --strict --site-dir $(abspath $(BUILD))/docs/site; \
	  else echo 'There is no $(VENV), so the book is left out.'; fi
	@{ cat docs/Doxyfile; echo 'OUTPUT_DIRECTORY = $(BUILD)/docs/site'; echo 'HTML_OUTPUT = api'; } | doxygen -
	@echo 'The book is in $(BUILD)/docs/site/index.html, the reference of the C++ API in its folder api.'

install: build
	@cmake --install $(BUILD) --prefix $(PREFIX)

# What sanitizers look at is compiled for speed of the build. Python is left out: its interpreter would have to be built with them too.
SANITIZED = -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DTESSERA_BUILD_BENCH=OFF -DTESSERA_BUILD_EXAMPLES=OFF -DTESSERA_BUILD_PYTHON=OFF

# Both look at the same run. Left out are a test that measures memory, which AddressSanitizer does not give back at once, and lists_test,
# which counts allocations by an operator new of its own. What is fuzzed has signal stacks of its own, which AddressSanitizer would free. Tests
# ask for more memory than there is: that is an exception, as without AddressSanitizer.
asan ubsan:
	$(call configure,build-asan,-DTESSERA_SANITIZE=address$(comma)undefined $(SANITIZED))
	@cmake --build build-asan
	@cd build-asan && $(CHECKS) GTEST_FILTER=-DTensorCache.DoesNotGrow ASAN_OPTIONS=use_sigaltstack=0:allocator_may_return_null=1 LSAN_OPTIONS="suppressions=$(CURDIR)/tests/lsan.supp" UBSAN_OPTIONS=print_stacktrace=1 \
	  ctest --output-on-failure -j $(JOBS) --timeout 3600 -E 'installed_package|compare_with_torch|lists_test|soak'

tsan:
	$(call configure,build-tsan,-DTESSERA_SANITIZE=thread $(SANITIZED))
	@cmake --build build-tsan --target concurrent_tests
	@cd build-tsan && $(CHECKS) GTEST_FILTER="-Gloo*:*OverGloo:*Processes*" TSAN_OPTIONS="suppressions=$(CURDIR)/tests/tsan.supp" ctest --output-on-failure -j $(JOBS) -L concurrent --timeout 1800

clean:
	@rm -rf $(BUILD) build-asan build-tsan build-tidy build-wheel build-clang build-aarch64
