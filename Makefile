# On a fresh machine with Python ≥ 3.11, pip and make, every target sets itself up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PYTEST ?=

.PHONY: demo test lint docs bench clean

$(VENV)/.installed: pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e papers
	touch $@

demo: $(VENV)/.installed
	$(BIN)/credo demo

# One thread per worker: two workers on two cores would otherwise fight over them. The order is
# shuffled: `make test PYTEST=--randomly-seed=SEED` repeats the one whose seed the first lines say.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --durations=10 $(PYTEST)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Strict: a link or a cross-reference that leads nowhere is an error, and so is a page that loads
# anything from elsewhere. The pages are in build/site.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	! grep -rE --include='*.html' '<(script|link|img)[^>]+(src|href)="https?:' build/site

# The rivals are installed without their dependencies, so that they can't touch torch; what does
# not install or import is reported and left out.
bench: $(VENV)/.installed
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r bench/rivals.txt
	$(BIN)/python -W ignore -m bench

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
