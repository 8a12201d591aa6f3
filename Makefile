# On a fresh machine `make demo` and `make test` set everything up by themselves, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow browser lint clean

demo: $(READY)
	$(BIN)/tenure demo

test: $(READY)
	$(BIN)/python -m pytest -m "not slow and not browser"

slow: $(READY)
	$(BIN)/python -m pytest -m slow

# Needs Debian's package chromium, or another Chromium in $TENURE_CHROMIUM.
browser: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	$(BIN)/python -m pytest -m browser

lint: $(READY)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch is named here so that its release is the pinned one whatever the rest asks for.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Tenure needs Python 3.11 or later: make PYTHON=python3.11")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt "torch==2.13.0" -e ".[dev]"
	@touch $(READY)
