# Every target makes the virtual environment it needs; a new machine needs only Python 3.10+, make and git.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help chromium demo test fuzz faults test-slow test-all lint types format commands docs tour bench bench-full tables clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch is installed first and by its exact version: anything looser may fetch gigabytes of GPU libraries.
$(VENV)/installed-user: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing vitkit into $(VENV) (the first time takes a few minutes)"
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -e '.[all]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed-user
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/installed-user ## install, then train on digits, evaluate and explain
	$(BIN)/vitkit demo

# The page is tested in a real browser where there is one or apt-get can bring one.
chromium:
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	{ timeout 300 apt-get update && timeout 600 apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 \
		|| echo "no Chromium, and apt-get cannot install it: the tests of the page are skipped"

test: $(VENV)/installed-dev chromium ## install, then run the tests (under 10 minutes on 2 cores)
	$(BIN)/python -m pytest -n auto --maxprocesses 8 -m "not slow" $(ARGS)

test-slow: $(VENV)/installed-dev ## run only the slow tests
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

fuzz: $(VENV)/installed-dev ## open random hostile files for MINUTES (5); findings go to fuzz-findings/
	$(BIN)/python tests/fuzz/hunt.py $(or $(MINUTES),5)

faults: $(VENV)/installed-dev ## let every file operation of every command fail once (about an hour)
	VITKIT_ALL_FAULTS=1 $(BIN)/python -m pytest -m slow tests/test_faults.py $(ARGS)

test-all: test test-slow ## run every test

lint: $(VENV)/installed-dev ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

STRICT := $(addprefix src/vitkit/,model data tasks world.py io.py progress.py)
types: $(VENV)/installed-dev ## check types, strictly where everything else builds on it
	$(BIN)/mypy
	$(BIN)/mypy --strict $(STRICT)

format: $(VENV)/installed-dev ## bring the code into the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

commands: $(VENV)/installed-dev ## write docs/commands.md from --help, docs/api/index.md from the public names
	$(BIN)/python docs/make_commands_page.py
	$(BIN)/python docs/make_api_page.py

$(VENV)/installed-docs: $(VENV)/installed-dev
	$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/installed-docs ## build the site into site/; needs no network once installed
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs site

tour: $(VENV)/installed-docs ## run docs/tour.ipynb and keep its outputs
	$(BIN)/python docs/make_tour.py

bench: $(VENV)/installed-dev ## measure vitkit beside its peers (under 45 minutes, resumable), then write the README's tables
	$(BIN)/python benchmarks/all.py $(ARGS); ended=$$?; $(BIN)/python benchmarks/tables.py && exit $$ended

bench-full: ARGS += --long
bench-full: bench ## the same, everything whole: some hours, resumable

tables: $(VENV)/installed-dev ## write the README's tables from benchmarks/results/
	$(BIN)/python benchmarks/tables.py

clean: ## remove what was built
	rm -rf $(VENV) build dist site fuzz-findings .pytest_cache .mypy_cache .ruff_cache .hypothesis
