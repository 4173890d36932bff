# Two commands for a newcomer:   make run    (a language model trains on two processes)
#                                make test   (lint, types, the site of docs/ and the quick tests)
# Both make .venv first, from Python 3.11 or newer and pip; nothing here needs root.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
unexport PYTHONDONTWRITEBYTECODE # or each of the thousand processes of the tests compiles what it imports anew

# The first Python of these that starts and is new enough. Say PYTHON=/path/to/python to choose another one.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Another version of torch: make test TORCH=2.11.0. It has an environment of its own, and only the tests run there. (PyPI's
# builds for NVIDIA bring several GB of libraries along.)
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
OTHER_PINS = -e 's/^torch==.*/torch==$(TORCH)/' -e 's/^setuptools==.*/setuptools>=77.0.3,<82/'
PINS := build/constraints$(if $(TORCH),-torch-$(TORCH)).txt
PEERS := .venv-peers
SUPPLY := .venv-supply
DIST := .venv-dist
RANKS ?= 2
WORKERS ?= 4

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv with the pinned and hashed dependencies and the project in it

# --without-pip is for systems that ship Python without ensurepip (Debian without python3-venv): their own pip fills it.
# hashes.txt has the build back end, too, so that --no-build-isolation fetches nothing else. The last step may use no index:
# a dependency that hashes.txt lacks is an error. torch has many builds of one version (PyPI's, +cpu, +cu130, one on this
# machine's disk), and each has another hash. So it is checked against a hash only if one is given: TORCH_SHA256=...
# Another version of torch (TORCH=) has other pins, which are not hashed.
TORCH_PIN = $(shell sed -n 's/^torch==//p' constraints.txt)
$(STAMP): pyproject.toml constraints.txt hashes.txt
	@mkdir -p build
	@sed $(if $(TORCH),$(OTHER_PINS)) -e '' constraints.txt > $(PINS)
	@if [ -z "$(PYTHON)" ]; then echo "Unisono needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || true)." \
		"Next: install one, then type: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; exit 2; fi
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
		&& $(PYTHON) -m pip --python $(BIN)/python install pip; }
ifdef TORCH
	$(BIN)/python -m pip install -q -c $(PINS) setuptools
	$(BIN)/python -m pip install -q -c $(PINS) --no-build-isolation -e '.[dev,docs]'
else
	$(BIN)/python -m pip install -q --require-hashes --no-deps -r hashes.txt
ifdef TORCH_SHA256
	@echo "torch==$(TORCH_PIN) --hash=sha256:$(TORCH_SHA256)" > build/torch.txt
	$(BIN)/python -m pip install -q --require-hashes --no-deps -r build/torch.txt
else
	@echo "torch $(TORCH_PIN) is not checked against a hash, because each of its builds has another one." \
		"To check it: make $(or $(MAKECMDGOALS),setup) TORCH_SHA256=..." >&2
endif
	$(BIN)/python -m pip install -q -c $(PINS) torch
	$(BIN)/python -m pip install -q --no-index --no-build-isolation -e '.[dev,docs]'
endif
	@touch $@

run: setup  ## train the text recipe on two processes (RANKS=2)
	$(BIN)/unisono run text --ranks $(RANKS)

test: $(if $(TORCH),setup,lint types docs)  ## lint, types, the site, and the quick tests; TORCH=2.11.0: tests alone
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -m "not slow and not ci" --durations 40 --durations-min 4

ci: setup  ## the tests that CI runs after make test, of about ten seconds or more each
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -m "ci and not slow" --durations 20 --durations-min 10

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy
	$(BIN)/mypy

docs: setup  ## build the site of docs/ into build/site; a broken link is an error
	$(BIN)/python -m tools.reference_tables build/reference
	$(BIN)/python -m tools.module_tables build/reference/packages
	$(BIN)/zensical build --clean --strict

slow: setup  ## the slow tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadscope -m slow --durations 20

bench: setup $(PEERS)/.ready  ## measure, beside the peers too: writes benchmarks/RESULTS.md (about an hour)
	for bench in door overhead exchange shards buddy memory; do echo "== $$bench"; $(BIN)/python -m benchmarks.$$bench; done
	$(BIN)/python -m benchmarks.race --peers $(PEERS)/bin/python

correctness: setup $(PEERS)/.ready  ## measure the silent mistakes of others and of ours: writes docs/measured/correctness.md
	$(PEERS)/bin/python -m pytest tests/house/test_documentation.py
	$(BIN)/python -m benchmarks.mistakes --peers $(PEERS)/bin/python

# On a machine with a GPU whose Python has torch already: make gpu GPU_PYTHON=python3 (nothing is installed). Packages that
# it lacks may be in a folder: PYTHONPATH=/path/to/packages make gpu GPU_PYTHON=python3
gpu: $(if $(GPU_PYTHON),,setup)  ## tests and benchmarks on a GPU: writes benchmarks/GPU.md (eight minutes); GPU=--dry tries them
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu $(GPU)

agreement: setup  ## every placement of three recipes beside one process: writes docs/measured/agreement.md (minutes)
	$(BIN)/python -m benchmarks.placements

# Needs root: the hosts are network namespaces, with an SSH server each.
faults: setup  ## 50 random faults on a run over three hosts: writes docs/measured/host-faults.md (half an hour, root)
	$(BIN)/python -m benchmarks.host_faults

# Tools for the supply chain, in an environment of their own: the project does not depend on them.
$(SUPPLY)/.ready:
	$(PYTHON) -m venv $(SUPPLY) || { $(PYTHON) -m venv --clear --without-pip $(SUPPLY) \
		&& $(PYTHON) -m pip --python $(SUPPLY)/bin/python install pip; }
	$(SUPPLY)/bin/python -m pip install -q uv==0.13.8 cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

lock: $(SUPPLY)/.ready  ## write hashes.txt: the hashes of all files that PyPI has of the versions in constraints.txt
	@mkdir -p build
	grep -v '^torch==' constraints.txt > build/locked.txt
	$(SUPPLY)/bin/uv pip compile -q --no-deps --generate-hashes --no-annotate --no-header build/locked.txt -o hashes.txt

sbom: setup $(SUPPLY)/.ready  ## a software bill of materials of .venv (CycloneDX): writes build/sbom.cdx.json
	@mkdir -p build
	$(SUPPLY)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --mc-type library --output-format JSON \
		--output-file build/sbom.cdx.json

audit: $(SUPPLY)/.ready  ## look for known vulnerabilities of the pinned versions (PyPI's advisories)
	@mkdir -p build; rm -f build/audit.json
	@$(SUPPLY)/bin/pip-audit --strict --disable-pip --require-hashes -r hashes.txt --format json --output build/audit.json || { \
		[ -s build/audit.json ] && exit 1; \
		echo "Nothing was audited: the database of PyPI could not be reached, or lacks a package. Next: make audit, elsewhere." >&2; \
		exit 3; }

# Tools that build and check packages, in an environment of their own. setuptools, which builds, has the version of the pins;
# with trove-classifiers it refuses a classifier that PyPI does not know. tests/package finds pyright on the path.
$(DIST)/.ready: constraints.txt
	$(PYTHON) -m venv $(DIST) || { $(PYTHON) -m venv --clear --without-pip $(DIST) \
		&& $(PYTHON) -m pip --python $(DIST)/bin/python install pip; }
	$(DIST)/bin/python -m pip install -q -c constraints.txt setuptools build==1.6.1 twine==7.0.0 check-wheel-contents==0.6.3 \
		trove-classifiers==2026.9.21.13 pyright==1.1.414
	@touch $@

dist: $(DIST)/.ready  ## build a wheel and an sdist into dist/, and check them
	rm -rf dist build/lib
	$(DIST)/bin/python -m build --no-isolation --outdir dist .
	$(DIST)/bin/twine check --strict dist/*
	$(DIST)/bin/check-wheel-contents dist/*.whl
	$(DIST)/bin/python -m tools.distributions dist

package: setup $(DIST)/.ready  ## install the wheel into new environments, run it there, and check its types with pyright and mypy
	PATH=$(CURDIR)/$(DIST)/bin:$$PATH $(BIN)/python -m pytest tests/package

# DRY=1 makes no tag. Nothing is pushed or uploaded.
release: setup  ## check that a release can be made, build it, write notes, bill of materials and hashes, tag it (DRY=1: no tag)
	$(BIN)/python -m tools.release check
	$(MAKE) dist sbom
	$(BIN)/python -m tools.release finish $(if $(DRY),--dry-run)

# Others' libraries, in an environment of their own: they measure there, and the papers' scripts for them run there.
$(PEERS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS) || { $(PYTHON) -m venv --clear --without-pip $(PEERS) \
		&& $(PYTHON) -m pip --python $(PEERS)/bin/python install pip; }
	$(PEERS)/bin/python -m pip install -q -c constraints.txt setuptools
	$(PEERS)/bin/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[dev]' \
		accelerate==1.15.0 lightning==2.6.6 pytorch-ignite==0.5.5 greenlet
	@touch $@

clean:  ## remove .venv, caches and builds; runs/ stays
	rm -rf .venv .venv-torch-* $(PEERS) $(SUPPLY) $(DIST) build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help setup run test ci lint types docs slow bench correctness gpu agreement faults lock sbom audit dist package release clean
