# Each target is one command from a fresh clone: it makes .venv and installs what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEWEST := build/newest
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)

DEMO_ARGS ?= --world-size 5 --num-episode 40 --num-steps 200 --seed 0 --picture build/demo.png
TEST_ARGS ?=
# Test files run side by side in so many processes, each of which imports torch and collects all tests: the long ones
# wait more than they work.
TEST_JOBS ?= 3
LONG_JOBS ?= 3
ARGS ?=
SECONDS ?= 60
SEED ?=
ROUNDS ?= 100
KINDS ?=
MINUTES ?= 60
BENCH_ARGS ?=
TAG ?=

# Tests start many interpreters: without the files that Python keeps, each compiles everything once more.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test testlong testmetrics testcluster test-newest testpage live-shots fuzz chaos soak conformance lint format types check bench wheel \
	docs docs-shots neighbours release-check hooks clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.installed-examples ## train CartPole with an agent and several observers (DEMO_ARGS)
	$(BIN)/python -m aiorpc.examples.batch_rl $(DEMO_ARGS)

test: $(VENV)/.installed-test ## run the quick tests: all there is, once (TEST_ARGS)
	$(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist loadfile -m "not long and not prometheus and not page and not cluster" $(TEST_ARGS)

testlong: $(VENV)/.installed-test ## run the rest: the other loop, mutants, storms, more random cases (TEST_ARGS)
	$(BIN)/python -m pytest -q -n $(LONG_JOBS) --dist loadfile -m "(long or random) and not prometheus and not page and not cluster" $(TEST_ARGS)

# Debian's package is installed where that can be done without a question.
testmetrics: $(VENV)/.installed-test ## scrape workers with Prometheus, and try the Grafana board's queries (TEST_ARGS)
	@command -v prometheus >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus; } || \
		{ echo "these tests need Prometheus: sudo apt-get install prometheus" >&2; exit 1; }
	$(BIN)/python -m pytest -q -m prometheus tests/observability $(TEST_ARGS)

# Debian's packages are installed where that can be done without a question. Hosts are namespaces, which root can make.
CLUSTER_TOOLS := slurmctld slurmd srun munged mpirun ip
testcluster: $(VENV)/.installed-cluster ## run programs by torchrun on several hosts, Slurm, mpirun and Ray, as root (TEST_ARGS)
	@command -v $(CLUSTER_TOOLS) | wc -l | grep -qx $(words $(CLUSTER_TOOLS)) || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
		slurmctld slurmd slurm-client munge openmpi-bin openssh-client iproute2; } || \
		{ echo "these tests need root, and slurmctld slurmd slurm-client munge openmpi-bin iproute2 of Debian" >&2; exit 1; }
	$(BIN)/python -m pytest -q -m cluster tests $(TEST_ARGS)

# Without constraints.txt, in an environment of its own. pip says first which releases that came to.
test-newest: ## run the quick tests with the newest release of every dependency (PYTHON; TEST_ARGS)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[test]'
	$(NEWEST)/bin/python -m pip list
	$(NEWEST)/bin/python -m pytest -q -n $(TEST_JOBS) --dist loadfile -m "not long and not prometheus and not page and not cluster" $(TEST_ARGS)

testpage: $(VENV)/.installed-page /usr/bin/chromium ## test the page of the dashboard in a real browser (TEST_ARGS)
	$(BIN)/python -m pytest -q -m page tests/observability $(TEST_ARGS)

neighbours: $(VENV)/.installed-neighbours ## test with torchrl and starlette themselves (TEST_ARGS)
	$(BIN)/python -m pytest -q tests/neighbours $(TEST_ARGS)

fuzz: $(VENV)/.installed-fuzz ## feed broken input to every decoder and to live workers (SECONDS; ARGS)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(ARGS)

chaos: $(VENV)/.installed-test ## kill, stop, cut off and restart members under load (SEED; ROUNDS; KINDS; ARGS)
	$(BIN)/python -m tests.chaos --rounds $(ROUNDS) $(if $(SEED),--seed $(SEED)) $(if $(KINDS),--kinds $(KINDS)) $(ARGS)

soak: $(VENV)/.installed-test ## load a cluster for MINUTES (60), and say what of it grows (ARGS)
	$(BIN)/python -m bench.soak --minutes $(MINUTES) $(ARGS)

conformance: $(VENV)/.installed-test ## run PyTorch's own RPC tests on aiorpc (ARGS; see tests/conformance/README.md)
	$(BIN)/python -m tests.conformance $(ARGS)

lint: $(VENV)/.installed-dev ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## repair what can be repaired by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev ## check types, strictly, and that the public surface has them
	$(BIN)/mypy
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pyright --verifytypes aiorpc --ignoreexternal

check: lint types test ## lint, types, quick tests

bench: $(VENV)/.installed-test ## measure against torch.distributed.rpc (BENCH_ARGS)
	$(BIN)/python -m bench $(BENCH_ARGS)

wheel: $(VENV)/.installed-dev ## build dist/*.whl
	$(BIN)/python -m build --wheel

docs: $(VENV)/.installed-docs ## build the site into build/docs; warnings, dead links and missing docstrings are errors
	$(BIN)/sphinx-build -W --keep-going -n -q -b html -d build/doctrees docs build/docs

live-shots: $(VENV)/.installed-page /usr/bin/chromium ## take pictures of the dashboard and of top while a group runs
	$(BIN)/python docs/_live_shots.py $(ARGS)

docs-shots: docs ## take pictures of the site into build/shots, wide and narrow, light and dark (ARGS: pages)
	$(BIN)/python docs/_screenshots.py $(ARGS)

release-check: $(VENV)/.installed-dev docs ## all of a release but the upload: version, changelog, dist/, docs (TAG)
	$(BIN)/python -m tools.release $(TAG)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m pytest -q tests/test_package.py

hooks: $(VENV)/.installed-dev ## run the checks before each commit
	$(BIN)/pre-commit install

clean: ## remove what was built, except .venv
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf $(VENV)

/usr/bin/chromium:
	@test "$$(id -u)" = 0 || { echo "testpage wants Debian's Chromium; as root: apt-get install chromium" >&2; exit 1; }
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium

# A .venv that somebody else made is used as it is; what it lacks is installed.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "aiorpc needs Python 3.11 or later: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch by itself first: the pinned release decides which build is taken, not the range in pyproject.toml.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing torch and the rest into $(VENV): the first time takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@
