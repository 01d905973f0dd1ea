# Everything runs in .venv, made from requirements.lock. Python 3.11 or 3.12, make and a package index are enough; Python 3.13 needs a
# C compiler as well.

# The distribution's own first, where it can make an environment: it is built with profile-guided optimisation, which
# pyenv leaves out, and Python takes 1.4 times as long without.
PYTHON ?= $(shell for it in /usr/bin/python3.11 python3.11 python3; do \
	$$it -c 'import ensurepip' 2>/dev/null && command -v $$it && break; done || echo python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# Tests wait for servers, locks and time-outs as long as they compute: eight at a time, also on two cores.
TEST_PROCESSES ?= 8
# Who gets which test, and when: see tests/side_by_side.py.
TESTS := $(PYTEST) --numprocesses $(TEST_PROCESSES) -p tests.second_postgres -p tests.side_by_side --dist loadgroup
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO_ARGS ?=
BENCH_ARGS ?= stress
PYTEST_ARGS ?=
# PostgreSQL as Debian ships it, with its just-in-time compiler: the newest that its packages installed.
DEBIAN_POSTGRES := $(lastword $(sort $(wildcard /usr/lib/postgresql/*/bin)))
# What asks PostgreSQL most: schema and migrations, commits, what waits, hosts, reservations, the accounting, completions.
ON_DEBIAN := $(addprefix tests/integration/,store/test_*.py clients/test_postgres.py dispatch/test_commit_*.py \
	dispatch/test_caps_of_passes.py dispatch/test_what_may_run.py dispatch/test_backlog_faults.py dispatch/test_plan*.py \
	dispatch/test_reservations.py accounting/test_tables.py \
	accounting/test_managed.py accounting/test_caps.py accounting/test_sums_that_do_not_fit.py \
	reports/test_completion.py reports/test_dependencies.py reports/test_reports_together.py \
	reports/test_completions_together.py insight/test_*.py)
# Played there alone where both run.
SMALL_STRESS := tests/e2e/test_small_stress.py
# What tries a property with examples, more of them in make test-deep than in other runs (tests/kit/examples.py).
WITH_PROPERTIES = $(shell grep -rl --include='test_*.py' '^from hypothesis' tests/unit tests/integration)
# make compat: a directory of Cuebot's migration files; it needs a PostgreSQL with uuid-ossp, Debian's or the one named by
# OPENCUE_SCHED_COMPAT_DATABASE_URL.
MIGRATIONS ?=
COMPAT_ARGS ?=

# Tests and demo start hundreds of Python processes: where this is set, each would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install lint style types architecture format importable test test-all test-twice test-unit test-integration test-e2e test-chaos test-long test-debian test-deep test-versions image-test demo bench compat lock clean

help: ## What can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## The project and all it needs, in .venv

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; say make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing what requirements.lock names into $(VENV); the first time that takes a minute or two"
	@# Python compiles what is imported, once; pip would compile all that there is, and what waits for it is one core.
	@# And it computes on one core: two at a time install a quarter each. The lock file names whatever they need.
	@# pip itself comes first, alone: where a package is built, a pip whose files another one replaces meanwhile fails.
	@awk '/^[^ ]/ { part = /^(pip|setuptools|wheel)==/ ? "tools" : (number = (number + 1) % 4) } \
		{ print > ("$(VENV)/part" part ".lock") }' requirements.lock
	$(PIP) install --quiet --no-compile --no-deps --require-hashes --requirement $(VENV)/parttools.lock
	printf '%s\n' 0 1 2 3 | xargs -P 2 -I {} $(PIP) install --quiet --no-compile --no-deps --require-hashes \
		--requirement $(VENV)/part{}.lock
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

lint: style types architecture ## Ruff, formatting, strict mypy, the rules of architecture

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

architecture: $(INSTALLED)
	$(PYTEST) --quiet tests/unit/test_architecture.py

importable: $(INSTALLED) ## Every test can be imported
	@told=$$($(PYTEST) --quiet --quiet --collect-only tests/integration tests/unit tests/e2e tests/chaos 2>&1) || \
		{ echo "$$told"; exit 1; }

format: $(INSTALLED) ## Put every file in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(INSTALLED) ## Every test but the long ones, on PostgreSQL and Redis of its own; prints the time of each suite
	$(TESTS) -m 'not long' $(PYTEST_ARGS) tests/integration tests/unit tests/e2e tests/chaos

test-all: $(INSTALLED) ## Every test, the long ones among them: those wait while the others compute
	$(TESTS) $(PYTEST_ARGS) tests/integration tests/unit tests/e2e tests/chaos

test-twice: $(INSTALLED) ## What test-all and test-debian do, in one run, which costs less than two: the small stress on Debian's alone
ifeq ($(DEBIAN_POSTGRES),)
	@echo "Debian's PostgreSQL is not installed (apt-get install postgresql)"; exit 1
else
	$(TESTS) $(PYTEST_ARGS) --second-postgres=$(DEBIAN_POSTGRES) $(foreach file,$(ON_DEBIAN),--on-second='$(file)') \
		--on-second-only=$(SMALL_STRESS) tests/integration tests/unit tests/e2e tests/chaos
endif

test-long: $(INSTALLED) ## A minute of every fault, lost stores, time-outs, joint passes killed, the demo, decisions, reports, sizes (four minutes)
	$(TESTS) -m long $(PYTEST_ARGS) tests/integration tests/e2e tests/chaos

test-unit: $(INSTALLED) ## Tests without services
	$(TESTS) $(PYTEST_ARGS) tests/unit

test-integration: $(INSTALLED) ## Tests of packages on real PostgreSQL and Redis
	$(TESTS) $(PYTEST_ARGS) tests/integration

test-e2e: $(INSTALLED) ## Tests of whole processes
	$(TESTS) $(PYTEST_ARGS) tests/e2e

test-chaos: $(INSTALLED) ## Tests that kill and freeze things
	$(TESTS) $(PYTEST_ARGS) tests/chaos

test-debian: $(INSTALLED) ## Tests of what asks PostgreSQL most, and a small stress, on Debian's PostgreSQL
ifeq ($(DEBIAN_POSTGRES),)
	@echo "skipped: Debian's PostgreSQL is not installed (apt-get install postgresql)"; test -z "$$CI"
else
	OPENCUE_SCHED_EMBEDDED_POSTGRES=$(DEBIAN_POSTGRES) $(TESTS) $(PYTEST_ARGS) $(ON_DEBIAN) $(SMALL_STRESS)
endif

test-deep: $(INSTALLED) ## The accounting model searched farther, 50,000 random steps on the real ledger, properties with all examples (a quarter of an hour)
	OPENCUE_SCHED_TEST_DEEP=1 $(PYTEST) --capture=no $(PYTEST_ARGS) tests/unit/accounting/explorer/test_protocol.py \
		tests/integration/accounting/test_stateful.py $(WITH_PROPERTIES)

test-versions: $(INSTALLED) ## A worker of an older commit and one of this checkout on one farm (takes the older one out of git)
	$(PYTEST) $(PYTEST_ARGS) tests/by_hand/test_versions.py

image-test: $(INSTALLED) ## The image is built, and each role runs from it (docker, podman, or as root buildah)
	$(PYTEST) $(PYTEST_ARGS) tests/by_hand/test_image.py

demo: $(INSTALLED) ## A small farm on this machine renders an animation (DEMO_ARGS="--keep" leaves it up)
	$(BIN)/opencue-sched demo $(DEMO_ARGS)

bench: $(INSTALLED) ## The stress benchmark (BENCH_ARGS="stress --workers 2 --json FILE")
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

compat: $(INSTALLED) ## Integration tests on a schema made by Cuebot's own migrations (MIGRATIONS=DIR)
	@test -n "$(MIGRATIONS)" || { echo "say where Cuebot's migration files are: make compat MIGRATIONS=DIR"; exit 2; }
	$(BIN)/python -m tests.compat "$(MIGRATIONS)" $(COMPAT_ARGS)

lock: $(INSTALLED) ## Resolve requirements.lock anew from pyproject.toml
	$(BIN)/pip-compile --quiet --upgrade --extra embedded --extra dev --generate-hashes --allow-unsafe --strip-extras \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options --no-header --no-annotate \
		--output-file requirements.lock pyproject.toml
	@echo "installing what requirements.lock names into $(VENV); the first time that takes a minute or two"
	$(PIP) install --quiet --require-hashes --requirement requirements.lock
	for package in hatchling opencue-sched; do \
		$(BIN)/python deploy/image_requirements.py requirements.lock $$package > deploy/$$package.lock || exit 1; done

clean: ## Remove what was built, not the environments
	rm -rf build dist demo-output benchmark-output .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find opencue_sched tasks tests alembic benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
