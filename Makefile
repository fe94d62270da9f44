# Everything runs in .venv, which is made when it is missing or older than the lock file.
# `make help` lists the targets; ARGS="..." passes flags to the command behind a target.

# Found when the environment is made, and only then.
PYTHON ?= $(eval PYTHON := $(shell python3 deploy/choose_python.py || echo python3))$(PYTHON)
BIN := .venv/bin
READY := .venv/.ready
LOG := .venv/install.log
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input

# Where Python may not keep what it compiled, each worker and each of many processes compiles hundreds of modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test embedded check clients certify bench compare compare-gpu counts soak fuzz golden docs site engines scale ray inspector browser deploy judges lock wheel release clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 18

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "singletree needs Python 3.11 or newer and '$(PYTHON)' is not: try make PYTHON=python3.12"; exit 1; }
	@echo "Installing into .venv (about a minute) ..."
	@mkdir -p .venv
	@{ { test -x $(BIN)/python || $(PYTHON) -m venv .venv; } \
	  && $(PIP) --require-hashes -r requirements.lock \
	  && $(PIP) --no-deps --no-build-isolation --editable .; } >$(LOG) 2>&1 </dev/null || { \
	  grep -E '^(ERROR|error|Error)' $(LOG) | tail -n 5; \
	  echo "The installation failed: see $(LOG). \`$(BIN)/python -m pip config list\` shows the package index in use;" \
	    "start again with the same command."; exit 1; }
	@touch $@

serve: $(READY) ## serve the default model on 127.0.0.1:8000
	$(BIN)/singletree serve $(ARGS)

# Tests of the tree as text, not of what it does: `make check` runs them.
RULES := $(patsubst %,tests/test_%.py,layers sizes public_names docs_current words typed_values expressions links counts)

# Tests wait for processes, too: one worker more than cores. Files with few and long tests must not come last.
test: $(READY) ## the tests that need no network and no harness
	$(BIN)/python -m pytest -n $$(( $$(nproc 2>/dev/null || echo 2) + 1 )) --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(RULES)) $(ARGS)

embedded: $(READY) ## the embedded llama.cpp on its real model: grammars, restarts, saved and parked states, pictures
	$(BIN)/python -m pytest -m "embedded and not slow" -n auto --dist loadfile tests/engines $(ARGS)

check: $(READY) ## ruff, mypy, layers, sizes, public names, words, links, documents, counts of work
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto --dist loadfile $(RULES)
	$(BIN)/python -m benchmarks.counts --check

clients: $(READY) ## the real harnesses, from npm, against singletree
	$(BIN)/python tests/clients/install.py
	$(BIN)/python -m pytest -n auto tests/clients $(ARGS)

certify: $(READY) ## each harness with a model of each family; writes docs/certified.md unless ARGS choose cells
	$(BIN)/python tests/clients/install.py
	$(BIN)/python -m pytest -m certify -n auto --dist loadgroup tests/clients/test_certified.py \
	  -o junit_family=xunit1 --junitxml=build/certified.xml $(ARGS); \
	  status=$$?; $(if $(ARGS),,PYTHONPATH=tests:. $(BIN)/python docs/certified_page.py build/certified.xml &&) exit $$status

bench: $(READY) ## all figures beside Dynamo, which this installs; ten minutes (ARGS=--quick: 2 minutes)
	$(BIN)/python -m benchmarks.product $(ARGS)

compare: $(READY) ## one session of real harnesses behind several servers, on vLLM, llama.cpp and SGLang; two hours (ARGS=--quick: 10 minutes)
	$(BIN)/python -m benchmarks.compare $(ARGS)

compare-gpu: $(READY) ## one recorded session behind vLLM's own server and singletree, timed on the GPU of this machine
	$(BIN)/python -m benchmarks.compare_gpu $(ARGS)

counts: $(READY) ## what the hot paths cost in calls and instructions, compared with the last release
	$(BIN)/python -m benchmarks.counts $(ARGS)

MINUTES ?= 60

fuzz: $(READY) ## look for bytes that break what reads them, guided by coverage (MINUTES=60 for all targets together)
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) $(ARGS)

soak: $(READY) ## agents on a server whose engine dies and whose disk is full: what grows fails (ARGS="--seconds 3600")
	$(BIN)/python -m benchmarks.soak $(ARGS)

golden: $(READY) ## rewrite the golden files; review the difference
	$(BIN)/python -m pytest -q --golden $(patsubst %/golden,%,$(wildcard tests/*/golden)) $(ARGS)

docs: $(READY) ## rewrite the documents made from the code
	$(BIN)/python docs/make_docs.py

site: $(READY) ## build the site of the documents into build/site; a link that leads nowhere fails
	$(BIN)/python docs/make_site.py

engines: $(READY) ## the engine tests, on real vLLM and SGLang that this installs, the harnesses on vLLM, vLLM on Ray
	$(BIN)/python tests/clients/install.py
	$(BIN)/python -m pytest -m engines tests/engines tests/clients/test_on_vllm.py \
	  tests/ray_cluster/test_ray_kv_events.py $(ARGS)

scale: $(READY) ## servers in several processes, with real databases and harnesses, while engines are killed
	$(BIN)/python tests/clients/install.py
	$(BIN)/python -m pytest -m scale tests/scale $(ARGS)

ray: $(READY) ## the tests on a Ray cluster of this machine, with Ray in an environment of its own
	$(BIN)/python -m pytest -m ray tests/ray_cluster $(ARGS)

inspector: ## build the page of the inspector into the package, with npm
	cd inspector && npm install --no-save --ignore-scripts --no-audit --no-fund --loglevel=error && npm run --silent build

browser: $(READY) ## the inspector's page in a real Chromium, on sessions of the real harnesses
	$(BIN)/python tests/clients/install.py
	$(BIN)/python tests/inspector/install.py
	$(BIN)/python -m pytest -m browser tests/inspector tests/test_inspector_page.py $(ARGS)

deploy: $(READY) ## check chart, compose and container file, dashboard and alerts, with tools that this installs
	$(BIN)/python -m pytest -m deploy tests/deploy $(ARGS)

judges: $(READY) ## test suites and load generators of other projects, which this installs, on a real model
	$(BIN)/python -m pytest -m judges -s -v tests/judges $(ARGS)

lock: $(READY) ## renew requirements.lock; ARGS=--upgrade for the newest versions
	$(BIN)/uv pip compile pyproject.toml --universal --extra all --extra dev --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --custom-compile-command "make lock" --output-file requirements.lock --quiet $(ARGS)

wheel: $(READY) ## build the wheel into dist
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

release: $(READY) ## VERSION=x.y.z: set it, cut the changelog, commit, build; without: build wheel, sdist, SBOM, checksums
	$(BIN)/python deploy/release.py $(VERSION)

clean: ## remove .venv, caches and builds
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
