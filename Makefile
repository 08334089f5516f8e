# Begin with `make demo` and `make test`; `make help` lists the rest. The virtual environment in .venv is made on the way.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ZOO := .venv-zoo
ZOO_READY := $(ZOO)/.ready
ZOO_OPTIONS ?=
CLUSTER := .venv-cluster
CLUSTER_READY := $(CLUSTER)/.ready
BROWSER := .venv-browser
BROWSER_READY := $(BROWSER)/.ready
DOCS := .venv-docs
DOCS_READY := $(DOCS)/.ready
NOTEBOOK := .venv-notebook
NOTEBOOK_READY := $(NOTEBOOK)/.ready
DIST := .venv-dist
DIST_READY := $(DIST)/.ready
INSTALL := --quiet --disable-pip-version-check --no-compile  # of large packages a few modules are imported

export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # processes of tests import the same files again and again

.DEFAULT_GOAL := help
.PHONY: chaos gpu help demo test contract contract-rest test-nccl test-acc test-acc-contract test-card test-dist test-cluster test-browser test-notebook zoo zoo-sweep zoo-contract zoo-page lint types size check docs notebooks plans strategy-pictures pictures bench bench-smallest tables format dist clean

help:           ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-14s %s\n", $$1, $$2}' Makefile

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "shardwright needs Python 3.11 or newer; given: $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY)  ## installs, verifies, trains, resumes under another layout, samples, writes a page (5 minutes)
	$(BIN)/python examples/demo.py --out runs/demo

test: $(READY)  ## unit, doctest and property tests, one size of each strategy (under 4 minutes on two quiet cores)
	$(BIN)/python -m pytest -q -n auto --dist worksteal --tier test

contract-rest: $(READY) ## what make contract runs and make test has not: .ci/run runs both
	$(BIN)/python -m pytest -q -n auto --dist worksteal --tier rest tests

contract: $(READY) ## the whole product: every strategy, size, pair, model, schedule, checkpoint
	$(BIN)/python -m pytest -q -n auto --dist worksteal --tier contract tests

test-nccl: $(READY)  ## the contract over NCCL's rules, in each of three variants (half an hour); `make contract` takes them in turn
	for variant in "strictest" "small sends complete alone" "communicators made beforehand"; do \
	  $(BIN)/python -m pytest -q -n auto --dist worksteal --nccl "$$variant" tests/contract || exit 1; done

test-acc: $(READY)  ## the contract's layouts on a pretend accelerator, and what would stop its host (6 minutes on one core)
	$(BIN)/python -m pytest -q -n auto --dist worksteal tests_acc

test-acc-contract: $(READY)  ## every line of the contract's strategies, pairs and schedules on the pretend accelerator (a quarter of an hour)
	PYTHONPATH=tests $(BIN)/python -m pytest -q -n auto --dist worksteal -p on_accelerator --nccl no \
	  tests/contract/test_every_strategy.py tests/contract/test_pairs.py tests/contract/test_every_schedule.py

test-card: $(READY)  ## the contract's layouts on the card of this machine, and where the host waits for it
	$(BIN)/python -m pytest -q -n auto --dist worksteal --card tests_acc

test-dist: $(READY)  ## the contract over processes: gloo on CPU, NCCL where there are GPUs
	$(BIN)/python -m pytest -q tests_dist

$(ZOO_READY): pyproject.toml constraints.txt constraints-zoo.txt
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install $(INSTALL) \
	  --constraint constraints.txt --constraint constraints-zoo.txt --editable '.[zoo]'
	@# vit-pytorch asks for torchvision, which the models that the zoo takes from it do not import
	$(ZOO)/bin/python -m pip install $(INSTALL) --no-deps --constraint constraints-zoo.txt vit-pytorch
	@touch $@

$(CLUSTER_READY): pyproject.toml constraints.txt constraints-cluster.txt
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER)/bin/python -m pip install $(INSTALL) \
	  --constraint constraints.txt --constraint constraints-cluster.txt --editable '.[cluster,dev]'
	@touch $@

$(BROWSER_READY): constraints-browser.txt
	$(PYTHON) -m venv $(BROWSER)
	$(BROWSER)/bin/python -m pip install $(INSTALL) \
	  --constraint constraints-browser.txt selenium pytest pytest-timeout
	@touch $@

test-browser: $(READY) $(BROWSER_READY)  ## the pages of runs in Chromium, and the site if it is built (3 minutes)
	SHARDWRIGHT_PYTHON=$(BIN)/python $(BROWSER)/bin/python -m pytest -q -rs tests_browser/test_pages.py tests_browser/test_site.py

test-cluster: $(CLUSTER_READY)  ## the driver on a real Ray, and real Slurm and Open MPI where they are installed (5 minutes)
	$(CLUSTER)/bin/python -m pytest -q -rs tests_dist/test_ray.py tests_dist/test_slurm.py tests_dist/test_mpi.py

$(NOTEBOOK_READY): pyproject.toml constraints.txt constraints-zoo.txt constraints-notebook.txt
	$(PYTHON) -m venv $(NOTEBOOK)
	$(NOTEBOOK)/bin/python -m pip install $(INSTALL) \
	  --constraint constraints.txt --constraint constraints-zoo.txt --constraint constraints-notebook.txt \
	  --editable '.[dev]' nbclient nbformat ipykernel transformers peft wandb mlflow-skinny \
	  kubeflow-training kubeflow-trainer-api
	@touch $@

test-notebook: $(NOTEBOOK_READY)  ## every tutorial in a real Jupyter kernel; loggers and manifests beside the packages of others (3 minutes)
	HF_HUB_OFFLINE=1 $(NOTEBOOK)/bin/python -m pytest -q -rs tests_dist/test_notebook.py tests/train/test_loggers.py \
	  tests/cluster/test_manifest_types.py

gpu: $(READY)    ## results, memory and times on one card, a JSON line a part (10 minutes; without a card it ends with code 2)
	$(BIN)/python benchmarks/gpu/run.py --write

chaos: $(READY)  ## kills ranks, launchers, fork servers and whole groups of a run, and checks what is left (3 minutes)
	$(BIN)/python benchmarks/trust/kills.py --seconds 180

zoo: $(ZOO_READY) ## models of others under every layout, and docs/models.md; ZOO_OPTIONS="--only llama --layouts tp2" for a part
	PYTHONPATH=src:tests HF_HUB_OFFLINE=1 $(ZOO)/bin/python -m zoo $(ZOO_OPTIONS)

zoo-sweep: $(ZOO_READY) ## every class of transformers of four kinds under three layouts, and docs/models.md (an hour)
	PYTHONPATH=src:tests HF_HUB_OFFLINE=1 $(ZOO)/bin/python -m zoo.sweep $(ZOO_OPTIONS)

zoo-contract: $(ZOO_READY) ## the models of others that make contract leaves out where their packages are missing
	HF_HUB_OFFLINE=1 $(ZOO)/bin/python -m pytest -q tests/contract/test_the_zoo.py tests/contract/test_the_llama_example.py \
	  tests/contract/test_caches_of_others.py \
	  tests/weights/test_transformers.py tests/zoo/test_loops.py tests/zoo/test_sweep.py tests/site/test_tutorials.py \
	  tests/site/test_moving.py tests/site/test_transformers_page.py

zoo-page: $(READY) ## docs/models.md, rebuilt from the rows that were measured
	PYTHONPATH=src:tests $(BIN)/python -m zoo.page

lint: $(READY)  ## ruff, the layers of imports, no table out of date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/tables.py --check
	PYTHONPATH=src:tests $(BIN)/python -m zoo.page --check

types: $(READY) ## mypy --strict on src
	$(BIN)/mypy

size: $(READY)  ## lines per file and function, longest first
	$(BIN)/python tools/size.py

check: lint types test size ## what every commit passes

$(DOCS_READY): constraints-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install $(INSTALL) --requirement constraints-docs.txt
	@touch $@

$(DIST_READY): constraints-dist.txt
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install $(INSTALL) --constraint constraints-dist.txt build twine
	@touch $@

dist: $(DIST_READY) ## a wheel and an sdist in build/dist, checked by twine (a minute)
	$(DIST)/bin/python -m build --outdir build/dist
	$(DIST)/bin/python -m twine check --strict build/dist/*

docs: $(DOCS_READY) ## the documentation site, into build/site; look at it with python -m http.server -d build/site (half a minute)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict

notebooks: $(ZOO_READY) ## the notebooks of examples/tutorials, with what their scripts print
	HF_HUB_OFFLINE=1 $(ZOO)/bin/python tools/notebooks.py

plans: $(READY) ## docs/plans.json: the prices that docs/which_layout.md shows (a minute)
	$(BIN)/python tools/plans.py

strategy-pictures: $(READY) ## docs/pictures/strategies, of runs that are compared with one device first (a minute)
	$(BIN)/python tools/strategy_pictures.py

pictures: $(READY) ## the README's three pictures, of runs that are made for them (3 minutes, with nothing else to do)
	$(BIN)/python examples/demo.py --out build/demo
	cp build/demo/demo.png docs/pictures/demo.png
	$(BIN)/shardwright show --layout "pp2/zb-h1 mb4" --measured --timeline docs/pictures/pipeline.png
	$(BIN)/shardwright show --layout "pp2 mb4 recompute:selective" --memory --measured --memory-png docs/pictures/memory.png

bench: $(READY) ## the committed benchmarks, measured again
	$(BIN)/python -m benchmarks

bench-smallest: $(READY) ## every benchmark in tiny sizes: whether it runs (2 minutes)
	$(BIN)/python -m benchmarks --smallest

tables: $(READY) ## tables in the README files, rebuilt from the raw rows and the code
	$(BIN)/python tools/tables.py

format: $(READY) ## ruff's fixes
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:          ## removes the virtual environment and caches
	rm -rf $(VENV) $(ZOO) $(CLUSTER) $(BROWSER) $(DOCS) $(NOTEBOOK) $(DIST) build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
