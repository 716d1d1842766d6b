# Two commands for a bare clone: `make demo` and `make test`. Everything is installed into .venv, nothing elsewhere.

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
READY := .venv/.ready
TOOLS := build/tools

# Tests and mutants start dozens of processes that import the package: without its bytecode each compiles it again.
unexport PYTHONDONTWRITEBYTECODE

# A part of every layer, for the time between two edits.
QUICK := tests/unit/test_imports.py tests/unit/test_cache_kinds.py tests/unit/test_cache_manager.py \
	tests/unit/test_scheduler.py tests/unit/test_draft_counts.py tests/unit/test_sample_accept.py tests/unit/test_text.py \
	tests/engine/test_generate.py tests/compat/test_examples.py

.PHONY: help setup hooks quick test test-long test-ray test-trl test-verl test-browser test-gpu lint types site dist lock try-dist try-docs mutants demo
.PHONY: bench bench-track clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       answer a few prompts with a small model (fetched once, 93 MB)"
	@echo "make quick      lint and a part of the tests, in about a minute"
	@echo "make test       quick tests          make test-long  all tests"
	@echo "make test-browser  the server's page in a headless Chromium"
	@echo "make test-verl  verl's rollout on a Ray cluster of this machine; installs verl"
	@echo "make test-trl   steps of TRL's GRPO trainer with the engine in its process; installs TRL"
	@echo "make test-ray   replicas on a Ray cluster of this machine"
	@echo "make test-gpu   the tests of kernels and engines on an NVIDIA card"
	@echo "make lint       ruff                 make types      mypy"
	@echo "make site       the site from docs/, into build/site; warnings are errors"
	@echo "make dist       wheel and sdist      make try-dist   installs both in empty environments"
	@echo "make try-docs   runs the commands of README.md and docs/ from the wheel"
	@echo "make mutants    break each rule on purpose and see its tests fail"
	@echo "make bench      throughput and latency of the small model"
	@echo "make bench-track  the main speeds of this commit; fails if one is worse than the last by more than noise"
	@echo "make clean      remove .venv and caches"

setup: $(READY)

# torch comes first and alone: what is installed after it finds the pinned build in place and pulls no other.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "outrider needs Python 3.11 or newer, and $(PYTHON) is older (or missing): make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,test]'
	@$(MAKE) --no-print-directory hooks
	@touch $@

# Git's hooks of this project, unless the clone has others. A folder that is no clone has none.
hooks:
	@if test -e .git && ! git config --get core.hooksPath >/dev/null; then git config core.hooksPath .githooks; fi

quick: $(READY)
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not long" $(QUICK)

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not long" tests

test-long: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=long tests

test-ray: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,test,ray]'
	$(BIN)/python -m pytest -n 0 tests/ray

test-trl: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,test,trl]'
	$(BIN)/python -m pytest -n 0 tests/training/test_trl.py

test-verl: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,test,ray]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/verl.txt
	$(BIN)/python -m pytest -n 0 tests/training/test_verl.py

test-browser: $(READY)
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		echo "the browser tests need Chromium and its driver: apt-get install -y chromium chromium-driver" >&2; exit 1; }
	OUTRIDER_BROWSER=1 $(BIN)/python -m pytest -n 0 tests/browser

# GPU_TESTS: a file or folder instead of all of them.
test-gpu: export GPU_TESTS ?= tests/gpu
test-gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
		echo "the tests on a GPU need an NVIDIA card, and torch for its CUDA" >&2; exit 1; }
	$(BIN)/python -m pytest -n 0 "$$GPU_TESTS"

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

site: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,test,docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

# A release is made by tools whose files have the hashes of requirements/release.txt, and by nothing else.
$(TOOLS)/.ready: requirements/release.txt
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/release.txt
	@touch $@

dist: $(TOOLS)/.ready
	rm -rf dist build/lib build/bdist.*
	$(TOOLS)/bin/python -m build --no-isolation --outdir dist .

lock: $(TOOLS)/.ready
	$(TOOLS)/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
		--custom-compile-command "make lock" -c constraints.txt requirements/release.in -o requirements/release.txt

try-dist: $(TOOLS)/.ready
	$(TOOLS)/bin/python -m tests.compat.packages dist

# Every command of README.md and docs/ that needs no GPU, from the wheel in an empty environment: half an hour.
try-docs: $(READY)
	$(BIN)/python -m tests.compat.doc_commands dist

mutants: $(READY)
	$(BIN)/python tests/mutants/run.py

demo: $(READY)
	$(BIN)/outrider demo

bench: $(READY)
	$(BIN)/outrider bench throughput
	$(BIN)/outrider bench latency

# Run it on an idle machine, before a change and after it. TRACK=--accept takes figures that are worse.
bench-track: $(READY)
	$(BIN)/python bench/track.py $(TRACK)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
