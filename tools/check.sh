#!/usr/bin/env bash
# Everything of `make check`, one line a step. All steps run, so that one look shows all that is wrong.
set -u
cd "$(dirname "$0")/.." || exit 2

failed=0
step() { # name, command...
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then
        printf '  ok      %s\n' "$name"
    else
        printf '  FAILED  %s\n%s\n' "$name" "$output"
        failed=1
    fi
}

step 'format (ruff format; make format mends it)' .venv/bin/ruff format --check .
step 'lint (ruff check)' .venv/bin/ruff check .
step 'types (mypy --strict)' .venv/bin/mypy
step 'layers (import-linter)' env PYTHONPATH=.typecheck .venv/bin/lint-imports --no-cache --no-logo
step 'names (tools/check_names.py)' .venv/bin/python tools/check_names.py
step 'file sizes (tools/check_sizes.py)' .venv/bin/python tools/check_sizes.py
exit "$failed"
