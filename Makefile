# camera-ready: `make demo` shows the main job on a fresh machine, `make test` runs everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
METHOD ?= oddshap
TIER ?= desk

.PHONY: help venv demo test check models study clean

help:  ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("camera-ready needs Python 3.11 or newer; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.user: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[study,attribution,tables]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.user

venv: $(VENV)/.dev  ## .venv with everything, for development

demo: $(VENV)/.user  ## the main job: OddSHAP against shap and shapiq, three minutes, verdicts
	$(BIN)/cameraready run oddshap --max-minutes 3 --out build/demo

test: $(VENV)/.dev  ## the whole suite on two cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup -q

check: $(VENV)/.dev  ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

models: $(VENV)/.dev  ## packaged real models for development (none is needed by the methods that exist so far)
	@echo "no method needs a packaged model yet"

study: $(VENV)/.dev  ## run METHOD's study (TIER=desk) and put its results beside its code
	$(BIN)/cameraready run $(METHOD) --tier $(TIER) --out build/study/$(METHOD)
	$(BIN)/python -c "import sys, cameraready.catalog as c, pathlib, shutil; \
	  card = c.resolve('$(METHOD)'); folder = pathlib.Path('src', *card.module.split('.')); \
	  [shutil.copy(pathlib.Path('build/study/$(METHOD)') / n, folder / n) for n in ('results.json', 'results.parquet')]; \
	  print('results written to', folder)"

clean:  ## remove what was built
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
