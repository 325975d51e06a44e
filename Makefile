# The two commands of a newcomer are `make demo` and `make test`. Each target does its own set-up (tools/set_up.py):
# a virtual environment in .venv with what constraints.txt pins. The second time that takes well under a second.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format clean
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

# What a user may set: the Python to build .venv with, an extra package index for torch, and pytest's arguments.
export PYTHON TORCH_INDEX
# Containers often set it. Tests start Python many times, and pytest would prepare every file anew each time.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=

set_up = python=$$(tools/find_python.sh) && "$$python" tools/set_up.py

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  PYTHON=python3.12       the Python to use (3.11 or newer; looked for when it is not named)"
	@echo "  TORCH_INDEX=URL         an extra package index for torch, see README.md"
	@echo "  ARGS='-k cancel'        more arguments for pytest"

demo: ## four chats at once through a real queue and a real model, streamed live; one is cancelled
	@$(set_up) demo
	@exec .venv/bin/python examples/demo.py

test: ## the tests, with a seeded sample of the slow suites; under 10 minutes
	@$(set_up) dev
	@exec .venv/bin/python -m pytest -n auto $(ARGS)

test-all: ## every test, at full size
	@$(set_up) dev
	@exec .venv/bin/python -m pytest -n auto --full $(ARGS)

check: ## format, lint, types, layers, names, file sizes
	@$(set_up) dev
	@exec tools/check.sh

format: ## put the code into the project's format
	@$(set_up) dev
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

clean: ## remove .venv and everything else that was made here (not the models in your cache folder)
	@rm -rf .venv build dist inferq.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
