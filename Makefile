# Everything runs in .venv, which is made on first use. `make demo` and `make test` need nothing but Python 3.10+.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint format clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed  ## the main job: one picture with and without merging
	$(BIN)/tomadiff demo

test: $(VENV)/.installed  ## all fast tests, with coverage
	$(BIN)/pytest -n 2 --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

test-slow: $(VENV)/.installed  ## full-size models and long runs
	$(BIN)/pytest -m slow

lint: $(VENV)/.installed
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

clean:
	rm -rf $(VENV) build dist .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
