# Needs: make, Python >= 3.11 with venv, and a package index.
PYTHON ?= python3
ARGS ?=
DEVICE ?=

DEVICES := cuda12 cuda13 tpu
ifneq ($(filter-out $(DEVICES),$(DEVICE)),)
$(error DEVICE is "$(DEVICE)", but must be one of: $(DEVICES), or nothing for a CPU)
endif

BIN := .venv/bin
NEWEST := .venv-newest
REPORTS := .cache/reports
# As many workers as a small machine has cores: two engines at once take 6 GiB.
WORKERS ?= 2
# In the order of folders: the files that take long come before the tests that any worker may run.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder --durations=15

.PHONY: help install install-dev serve test test-long test-mutations test-main test-newest lint format bench clean

help:
	@echo "make install      the jpaged command, in .venv; DEVICE=cuda12, cuda13 or tpu for such a device"
	@echo "make serve        install, and start the server; ARGS='--port 9000' passes options on"
	@echo "make install-dev  what working on jpaged needs"
	@echo "make test         all checks and tests, then a smoke set with the newest Python"
	@echo "make test-long    the tests that take minutes each; SLICE=1/3 runs a third of them"
	@echo "make test-mutations  show that the tests notice each listed breakage of the code"
	@echo "make lint         ruff, pyright and import rules only"
	@echo "make format       let ruff format the code"
	@echo "make bench        compare with transformers on this machine"
	@echo "make clean        remove what these commands made"

INSTALLED := .venv/installed$(DEVICE:%=-%)

install: $(INSTALLED)
install-dev: .venv/installed-dev

.venv/created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("jpaged needs \
	Python 3.11 or newer, and $(PYTHON) is %d.%d; try: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/installed: .venv/created pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(DEVICES:%=.venv/installed-%): .venv/installed-%: .venv/created pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch .venv/installed $@

.venv/installed-dev: .venv/created pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,gpu-test,tpu-test,torch-test]'
	@touch .venv/installed $@

serve: $(INSTALLED)
	$(BIN)/jpaged serve $(ARGS)

test: lint test-main test-newest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-main: .venv/installed-dev
	@$(BIN)/python -c 'import importlib.util as u; u.find_spec("torch") or print("No torch for this \
	Python: the tests that compare with it are skipped. Python 3.11 has it.")'
	$(PYTEST) --junitxml=$(REPORTS)/main.xml -m "not long" $(ARGS)

# SLICE=2/3 runs the second of three slices.
test-long: .venv/installed-dev
	$(PYTEST) --junitxml=$(REPORTS)/long.xml -m long $(if $(SLICE),--slice $(SLICE)) $(ARGS)

# Breaks a copy of the code in many ways, one after the other; see tests/mutations/.
test-mutations: .venv/installed-dev
	$(BIN)/python -m tests.mutations.run $(ARGS)

# The smoke tests that need no torch, with the newest JAX. Python 3.11 has an older one.
test-newest: .venv/installed-dev
	@.ci/test-newest-python $(BIN)/python $(NEWEST) pyproject.toml -n $(WORKERS) \
	--junitxml=$(REPORTS)/newest.xml

bench: .venv/installed-dev
	$(BIN)/jpaged bench transformers $(ARGS)

clean:
	rm -rf .venv $(NEWEST) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
