# make demo: the pictures with and without the cache. make test: lint, types, tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: demo test lint nightly coverage bench wheel-test clean

demo: $(VENV)/.installed
	$(BIN)/magcache demo

test: lint
	$(BIN)/pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A smaller set with older releases of diffusers, each in an environment of its own.
nightly:
	PYTHON=$(PYTHON) tests/old_diffusers.sh 0.36.0 600
	PYTHON=$(PYTHON) tests/old_diffusers.sh 0.39.0 600

# docs/models.md, from runs of every transformer and pipeline.
coverage: $(VENV)/.installed-dev
	$(BIN)/python tests/coverage.py

# The figures and tables of README and docs; results go to benchmarks/results. Half a day on two
# cores; `pip install --no-deps cache-dit` before adds that to the peers.
bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/quality.py
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/drift.py
	$(BIN)/python benchmarks/oracle.py
	$(BIN)/python benchmarks/residual_storage.py
	$(BIN)/magcache demo --out docs/images
	$(BIN)/python benchmarks/figures.py
	$(BIN)/python benchmarks/tables.py

# A wheel in an environment of its own, as a user gets it.
wheel-test: $(VENV)/.installed-dev
	rm -rf dist build/wheel-venv
	$(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/pip --disable-pip-version-check --quiet install dist/*.whl -c constraints.txt
	cd build && wheel-venv/bin/magcache demo --prompt "$$(wheel-venv/bin/magcache demo --list-prompts | head -1)" --out wheel-demo

clean:
	rm -rf $(VENV) dist build

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo 'Installing into $(VENV): about a minute'
	@$(PIP) install -e . -c constraints.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo 'Installing into $(VENV), with the tools: about two minutes'
	@$(PIP) install -e ".[dev]" -c constraints.txt
	@touch $@ $(VENV)/.installed
