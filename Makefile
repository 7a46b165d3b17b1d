# `make demo` and `make test` do all their set-up; a second run skips it.

PYTHON   ?= python3
SESSIONS ?= 36
SEED     ?= 0
OUT      ?= runs/demo-$(SESSIONS)-seed$(SEED)
BIN      := .venv/bin

.PHONY: demo test check clean

demo: .venv/.installed-demo
	$(BIN)/reef demo --sessions $(SESSIONS) --seed $(SEED) --out $(OUT)

test: .venv/.installed-dev
	$(BIN)/python -m pytest

check: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

.venv/.installed-%: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Reef needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv runs
