# Every target works from a fresh clone that has python3 (3.10 or later, with venv), a C++ compiler and make.
PYTHON ?= python3
DEMO_ARGS ?=
EXAMPLES ?= 200
SEED ?= $(shell date +%s)
RELEASE_ARGS ?=
# Processes that share the tests, each with files of its own; 0 runs them in one.
WORKERS ?= 2
# Of make gpu. A Python that is named takes its packages as they are, and what it lacks from a folder of wheels:
# make gpu PYTHON=python3 WHEELS=folder
GPU_RESULTS ?= gpu-results
GPU_MINUTES ?= 9
GPU_ARGS ?=
WHEELS ?=
OWN_PYTHON := $(filter command,$(origin PYTHON))
# Another version of torch than the pinned one, in an environment of its own: make test TORCH=2.15.0
# Each torch chooses its setuptools and its triton.
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints-dev.txt)
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 60

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-card test-properties test-random nets weight gpu gpu-rehearsal docs check format release clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 17

venv: $(STAMP)  ## make .venv and install the package with all it needs

# One call, so that the constraints decide which torch comes: a second one could replace it by another build.
$(STAMP): pyproject.toml constraints-dev.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	test -z "$(TORCH)" || sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^setuptools==/d' -e '/^triton==/d' constraints-dev.txt > $(CONSTRAINTS)
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

demo: venv  ## train a language model under several budgets; options in DEMO_ARGS, e.g. DEMO_ARGS=--quick
	$(BIN)/python examples/train_llm.py $(DEMO_ARGS)

test: venv  ## the tests that take seconds
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow"

# Each worker has threads for all cores. One that waits lets the other workers run, and many wait for a compiler or for ranks.
test-slow: WORKERS = 3
test-slow: venv  ## the tests that compile with Inductor or build whole models
	OMP_WAIT_POLICY=passive $(PYTEST) -m "slow and not card"

test-card: venv  ## all tests on the emulated CUDA device, of which `make test-slow` runs a few
	OMP_WAIT_POLICY=passive $(PYTEST) -m card

test-properties: venv  ## the properties with all their examples, of which `make test` draws an eighth
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow" --examples 1 --fixed-seed

test-random: venv  ## the properties on random graphs drawn afresh; EXAMPLES=1000 draws more, SEED=1 the same again
	$(BIN)/python -m pytest --examples $(EXAMPLES) --max-ops 16 --hypothesis-seed $(SEED)

nets: venv  ## what a change of the code must not move: plans, least peaks, gradients, budgets
	$(BIN)/python benchmarks/nets.py

weight: venv  ## lines of each package, bytes of pages, the way of an option to the search
	$(BIN)/python tests/weight.py

gpu: $(if $(OWN_PYTHON),,venv)  ## tests, peaks and step times on a CUDA device; goes on where the last call ended
	$(if $(OWN_PYTHON),$(PYTHON),$(BIN)/python) benchmarks/gpu.py --results $(GPU_RESULTS) --minutes $(GPU_MINUTES) $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_ARGS)

gpu-rehearsal: $(if $(OWN_PYTHON),,venv)  ## the same in tiny sizes on an emulated card, which is a test of the target alone
	$(if $(OWN_PYTHON),$(PYTHON),$(BIN)/python) benchmarks/gpu.py --rehearse --minutes 30 $(if $(WHEELS),--wheels $(WHEELS)) $(GPU_ARGS)

docs: venv  ## build the documentation into site/; a warning is an error
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: venv  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv  ## format and sort imports in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

release: venv  ## build sdist and wheel into dist/ and check them; everything but the upload
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e ".[release]"
	$(BIN)/python .ci/release.py $(RELEASE_ARGS)

clean:  ## remove .venv, caches and build outputs
	rm -rf .venv .venv-* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
