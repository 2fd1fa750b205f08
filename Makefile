# Every target makes its own environment: .venv, with torch first and then the rest, which must not change it.
PYTHON ?= python3
BIN := .venv/bin
TORCH := 2.13.0

.PHONY: help demo test test-all quick browser compat lint sanitize bench docs figures scratch clean
.DEFAULT_GOAL := help

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	printf 'torch==$(TORCH)\n' > .venv/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e '.[dev]'
	touch $@

DEMO := gpt:layers=4,width=256,context=128,vocabulary=2048,batch=8

demo: .venv/ready  ## Train a model on real text, in eager and then with a quarter of what eager adds; show both peaks
	$(BIN)/lowtide profile $(DEMO)
	$(BIN)/lowtide train $(DEMO) --data austen --steps 60 --eager
	$(BIN)/lowtide train $(DEMO) --data austen --steps 60 --budget 25%

PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal -rs

# The pages are tested in Chromium. A continuous integration machine gets it here; elsewhere the tests say what to do.
ifdef CI
BROWSER := browser
endif

test: .venv/ready lint $(BROWSER)  ## Run the linter, the type checker and all tests but the long ones, one on each core
	$(PYTEST) -m "not long"

test-all: .venv/ready lint  ## Run all tests, the long ones and the sanitizers too, and a part of them with other versions of torch
	$(PYTEST)
	$(MAKE) compat

browser:  ## Install the browser in which the pages are tested, where there is none (Debian, as root)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ timeout 300 sh -c 'apt-get update -qq && apt-get install -qq -y chromium >/dev/null'; } || \
		echo "no browser could be installed: the tests of the pages will be skipped" >&2

QUICK := $(patsubst %,tests/pure/test_%.py,house simulate native tape loops) tests/cpu/test_private.py \
	tests/cpu/test_fit.py::test_schedulers_and_learning_rates \
	tests/cpu/test_wrap.py::test_two_forwards_before_their_backwards

quick: .venv/ready lint  ## Lint and run a few tests of each kind: an answer in less than a minute
	$(PYTEST) -x -m "not long" $(QUICK)

compat:  ## Run a part of the tests with other versions of torch (VERSIONS="2.12.1 2.15.0"), gigabytes each
	PYTHON=$(PYTHON) $(PYTHON) tests/compat.py $(VERSIONS)

lint: .venv/ready  ## Check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

sanitize: .venv/ready  ## Run all C++ under the address, undefined behaviour and thread sanitizers
	$(BIN)/pytest -m long tests/sanitize

bench: .venv/ready  ## Make every table that we publish
	$(BIN)/lowtide bench predict
	$(BIN)/lowtide bench execute
	$(BIN)/lowtide bench batch
	$(BIN)/lowtide bench capture
	$(BIN)/lowtide bench plan
	$(BIN)/lowtide bench fit
	$(BIN)/lowtide bench pace
	$(BIN)/lowtide bench offload
	$(BIN)/lowtide bench offload --models
	$(BIN)/lowtide bench offload --run
	$(BIN)/lowtide bench limited
	$(BIN)/lowtide bench steady
	$(BIN)/lowtide bench classics
	$(BIN)/lowtide bench trust
	$(BIN)/lowtide bench guards

docs: .venv/ready  ## Build the docs as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

figures: .venv/ready  ## Draw the figures of the docs anew
	$(BIN)/python docs/figures/draw.py

scratch: .venv/ready  ## Run the idea from scratch, in one file
	$(BIN)/python docs/from_scratch.py

clean:  ## Remove the environments
	rm -rf .venv .compat
