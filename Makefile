# A thin front over CMake and Ninja. `make help` lists what there is.
BUILD ?= build
PREFIX ?= /usr/local
CMAKE_ARGS ?=
SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.h' '*.cpp')

.PHONY: help demo test python-test python-check validate op-db audit operators wheel bench build lint tidy format install tsan clean

help:
	@echo 'make demo      build, then train a small GPT on four ranks, and compare it with one device'
	@echo 'make test      build, then run all tests, those of the Python package and of what is installed too'
	@echo 'make python-test  build, then run the tests of the Python package alone'
	@echo 'make validate  build, then try all sharding rules against the operators themselves'
	@echo 'make wheel     build the Python package for pip, into $(BUILD)/wheel'
	@echo 'make op-db     build, then try the operator database of PyTorch against one device (minutes)'
	@echo 'make audit     build, then write docs/replicas.md: which operators are computed on replicas (minutes)'
	@echo 'make bench     build, then run the benchmarks'
	@echo 'make build     build everything into $(BUILD)/'
	@echo 'make operators build, then write docs/operators.md from the sharding rules'
	@echo 'make lint      check formatting, scripts and the order of the layers'
	@echo 'make tidy      check with clang-tidy (slow)'
	@echo 'make tsan      run the tests of what is concurrent under ThreadSanitizer'
	@echo 'make format    format all sources'
	@echo 'make install   install into PREFIX ($(PREFIX))'
	@echo 'make clean     remove what was built'
	@echo
	@echo 'Each of them first installs what is missing (scripts/setup). An existing libtorch is used if TORCH_PREFIX or'
	@echo 'CMAKE_PREFIX_PATH names its folder; others: BUILD, PREFIX, CMAKE_ARGS.'

# The Python package is built for the virtual environment that scripts/setup makes; with a libtorch of one's own there is none.
define configure
@torch=$$(scripts/setup | tail -n 1) && test -n "$$torch" && mkdir -p $(1) && python= && \
  case "$$torch" in $(CURDIR)/.venv/*) python="-DTESSERA_BUILD_PYTHON=ON -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python";; esac && \
  { cmake -S . -B $(1) -G Ninja -DCMAKE_PREFIX_PATH="$$torch" $$python $(2) $(CMAKE_ARGS) >$(1)/configure.log 2>&1 || \
    { cat $(1)/configure.log; exit 1; }; }
endef

build:
	$(call configure,$(BUILD),)
	@cmake --build $(BUILD)

demo: build
	@$(BUILD)/examples/train_gpt/train_gpt

test: build
	@cd $(BUILD) && ctest --output-on-failure
	@if [ -e $(BUILD)/python/tessera ]; then $(MAKE) --no-print-directory python-check; \
	  else echo 'The Python package was not built, so its tests are left out.'; fi

python-test: build python-check

python-check:
	@tests/install/wheel $(BUILD)
	@PYTHONPATH=$(BUILD)/python .venv/bin/python -m pytest
	@.venv/bin/python -m mypy
	@MYPYPATH=python PYTHONPATH=$(BUILD)/python .venv/bin/python -m mypy.stubtest tessera._C --allowlist python/tests/stubtest.allow

validate: build
	@PYTHONPATH=$(BUILD)/python .venv/bin/python python/validate/validate.py --output $(BUILD)/validate.md
	@echo 'The table is in $(BUILD)/validate.md.'

wheel:
	@scripts/setup >/dev/null
	@.venv/bin/pip wheel --no-build-isolation --no-deps --wheel-dir $(BUILD)/wheel .

op-db: build
	@PYTHONPATH=$(BUILD)/python .venv/bin/python python/op_db/run.py --output $(BUILD)/op_db

audit: build
	@PYTHONPATH=$(BUILD)/python .venv/bin/python python/op_db/audit.py --output docs/replicas.md

bench: build
	@$(BUILD)/bench/bench_placement
	@$(BUILD)/bench/bench_random
	@$(BUILD)/bench/bench_sharded
	@if [ -e $(BUILD)/python/tessera ]; then \
	  PYTHONPATH=$(BUILD)/python .venv/bin/python bench/dispatch.py --torch $(BUILD)/dispatch_torch.txt; \
	  PYTHONPATH=$(BUILD)/python .venv/bin/python bench/optimizer.py; \
	  PYTHONPATH=$(BUILD)/python .venv/bin/python bench/train.py --torch $(BUILD)/train_torch.txt; \
	  $(BUILD)/bench/bench_dispatch --torch $(BUILD)/dispatch_torch.txt; else $(BUILD)/bench/bench_dispatch; fi
	@if [ -e $(BUILD)/train_torch.txt ]; then $(BUILD)/bench/bench_train --torch $(BUILD)/train_torch.txt; \
	  else $(BUILD)/bench/bench_train; fi
	@$(BUILD)/bench/bench_collectives

operators: build
	@$(BUILD)/tests/list_operators >docs/operators.md

lint:
	@scripts/setup >/dev/null
	@clang-format --dry-run -Werror $(SOURCES)
	@shellcheck scripts/setup .ci/run tests/install/run tests/install/wheel
	@python3 scripts/check_layers

tidy: build
	@command -v clang-tidy >/dev/null || { echo 'clang-tidy is missing: apt-get install clang-tidy'; exit 1; }
	@clang-tidy --quiet -p $(BUILD) $(filter %.cpp,$(SOURCES))

format:
	@scripts/setup >/dev/null
	@clang-format -i $(SOURCES)

install: build
	@cmake --install $(BUILD) --prefix $(PREFIX)

tsan:
	$(call configure,build-tsan,-DTESSERA_SANITIZE=thread -DTESSERA_BUILD_BENCH=OFF -DTESSERA_BUILD_EXAMPLES=OFF)
	@cmake --build build-tsan
	@cd build-tsan && GTEST_FILTER="-Gloo*" TSAN_OPTIONS="suppressions=$(CURDIR)/tests/tsan.supp" ctest --output-on-failure -L concurrent --timeout 1800

clean:
	@rm -rf $(BUILD) build-tsan build-wheel
