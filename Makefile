# A thin front over CMake and Ninja. `make help` lists what there is.
BUILD ?= build
PREFIX ?= /usr/local
CMAKE_ARGS ?=
SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.h' '*.cpp')

.PHONY: help demo test bench build operators lint tidy format install tsan clean

help:
	@echo 'make demo      build, then show ranks, a mesh, a sharded tensor and the collectives at work'
	@echo 'make test      build, then run all tests, and a program against the installed package'
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

define configure
@torch=$$(scripts/setup | tail -n 1) && test -n "$$torch" && mkdir -p $(1) && \
  { cmake -S . -B $(1) -G Ninja -DCMAKE_PREFIX_PATH="$$torch" $(2) $(CMAKE_ARGS) >$(1)/configure.log 2>&1 || \
    { cat $(1)/configure.log; exit 1; }; }
endef

build:
	$(call configure,$(BUILD),)
	@cmake --build $(BUILD)

demo: build
	@$(BUILD)/examples/demo/demo

test: build
	@cd $(BUILD) && ctest --output-on-failure

bench: build
	@$(BUILD)/bench/bench_placement
	@if [ -x .venv/bin/python ]; then .venv/bin/python bench/dispatch_torch.py >$(BUILD)/dispatch_torch.txt; \
	  $(BUILD)/bench/bench_dispatch --torch $(BUILD)/dispatch_torch.txt; else $(BUILD)/bench/bench_dispatch; fi
	@$(BUILD)/bench/bench_collectives

operators: build
	@$(BUILD)/tests/list_operators >docs/operators.md

lint:
	@scripts/setup >/dev/null
	@clang-format --dry-run -Werror $(SOURCES)
	@shellcheck scripts/setup .ci/run tests/install/run
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
	@cd build-tsan && GTEST_FILTER="-GlooThreads.*" TSAN_OPTIONS="suppressions=$(CURDIR)/tests/tsan.supp" ctest --output-on-failure -L concurrent --timeout 1800

clean:
	@rm -rf $(BUILD) build-tsan
