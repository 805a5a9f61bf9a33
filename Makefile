# Everything runs in .venv, which is made on first use. `make demo` and `make test` need nothing but Python 3.10+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint format clean

# The extra `demo`, or `dev`, of pyproject.toml.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$*]'
	touch $@

demo: $(VENV)/.installed-demo  ## the main job: one picture with and without merging
	$(BIN)/tomadiff demo

test: $(VENV)/.installed-dev  ## all fast tests, with coverage
	$(BIN)/pytest -n 2 --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

test-slow: $(VENV)/.installed-dev  ## full-size models and long runs
	$(BIN)/pytest -m slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

clean:
	rm -rf $(VENV) build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
