# Everything runs in .venv, which is made when it is missing or older than the lock file.
# `make help` lists the targets; ARGS="..." passes flags to the command behind a target.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help serve test check clients bench golden docs engines lock clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 18

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "singletree needs Python 3.11 or newer and '$(PYTHON)' is not: try make PYTHON=python3.12"; exit 1; }
	@echo "Installing into .venv ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

serve: $(READY) ## serve the default model on 127.0.0.1:8000
	$(BIN)/singletree serve $(ARGS)

test: $(READY) ## the tests that need no network and no harness
	$(BIN)/python -m pytest $(ARGS)

check: $(READY) ## ruff, mypy, layers, sizes, public names, documents
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_sizes.py tests/test_public_names.py \
	  tests/test_docs_current.py

clients: $(READY) ## the real harnesses, from npm, against singletree
	$(BIN)/python tests/clients/install.py
	$(BIN)/python -m pytest tests/clients $(ARGS)

bench: $(READY) ## the benchmarks
	$(BIN)/python -m benchmarks $(ARGS)

golden: $(READY) ## rewrite the golden files; review the difference
	$(BIN)/python -m pytest -q --golden $(patsubst %/golden,%,$(wildcard tests/*/golden)) $(ARGS)

docs: $(READY) ## rewrite the documents made from the code
	$(BIN)/python docs/make_docs.py

engines: $(READY) ## the engine tests, on a real vLLM server that this installs
	$(BIN)/python -m pytest -m engines tests/engines $(ARGS)

lock: $(READY) ## renew requirements.lock; ARGS=--upgrade for the newest versions
	$(BIN)/uv pip compile pyproject.toml --universal --all-extras --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --custom-compile-command "make lock" --output-file requirements.lock --quiet $(ARGS)

clean: ## remove .venv, caches and builds
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
