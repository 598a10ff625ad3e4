# `make demo`: the whole loop on the embedded target.  `make test`: every test.  `make check`: ruff, mypy, import-linter.
# All three install first, once. Another Python: `make demo PY=python3.12`. An environment that is already there, where nothing
# must be installed: `make test PYTHON=/path/to/python`.
PY ?= python3
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
STAMP := $(VENV)/.installed
# One worker per core, a test file at a time: tests are small and use one thread each (tests/conftest.py).
PYTEST_ARGS ?= -n auto --dist loadfile

ifeq ($(PYTHON),$(VENV)/bin/python)
NEEDS := $(STAMP)
endif

.PHONY: install demo test check help
help:
	@sed -n '1,3s/^# //p' Makefile

install: $(STAMP)

# torch first and alone: it is large, and the packages after it must find it instead of choosing their own.
$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PY) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(NEEDS)
	$(PYTHON) -m scripts.cli loop experiment=demo

test: $(NEEDS)
	$(PYTHON) -m pytest -q $(PYTEST_ARGS)

check: $(NEEDS)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-cache
