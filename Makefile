# make install, make demo and make test need nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DELETE_ON_ERROR:
.PHONY: install install-plan demo test test-slow lint golden quality reference notebooks docs bench gpu stress results clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[metis,joblib,train,dev]'
	find hexiopt solvers -name "*.nb[ic]" -delete  # what was compiled for older sources
	$(BIN)/python -m experiments.app.compile  # once, and kept on disk
	touch $(STAMP)

# Planning alone: no torch, no transformers, no tools of developers.
install-plan:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[metis,joblib]'
	$(BIN)/python -m experiments.app.compile

# Two real plans: a small lab with a config.json on disk, and HexiScale's second mixed cluster with Llama-2 7B, which ends
# with what the mix gives. Between them a small model is trained on this machine's CPU, with two pipelines of unlike
# stages: six processes, which are profiled first, so that the measured step stands beside one predicted for this machine.
demo: install
	$(BIN)/hexiopt plan cluster=small_mixed model=experiments/data/config.json \
	  workload.seq_len=2048 solver.time_limit_s=5 hydra.run.dir=outputs/demo/small_mixed
	rm -rf outputs/demo/trained  # of a demo before: training never writes over another run's checkpoints
	CUDA_VISIBLE_DEVICES= $(BIN)/hexiopt profile profile.processes=6 profile.seconds=0.1 hydra.run.dir=outputs/demo/profiled
	$(BIN)/hexiopt train cluster=small_mixed model=tiny constraints.num_pipelines=2 constraints.num_stages=3 \
	  solver.time_limit_s=5 train.device=cpu train.profile=outputs/demo/profiled/cluster.yaml \
	  hydra.run.dir=outputs/demo/trained
	$(BIN)/hexiopt plan cluster=hexiscale_setting_2 model=llama2_7b solver.time_limit_s=20 alone=true \
	  hydra.run.dir=outputs/demo/hexiscale_setting_2

# Tests start some hundred processes, so Python keeps what it compiled, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE
# Neighbours share what takes long to compute, so a process has a run of them; at the end stands who was skipped, and why.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal --durations=10 -rs

test: install lint
	$(PYTEST) -m "not slow"

# What make test has no time for: every other case of a sweep, proofs against proofs, searches in real time.
test-slow: install
	$(PYTEST) -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/lint-imports

# Prices, plans and error lines as they are now: commit what changed, and say why it did.
golden: install
	$(BIN)/python -m tests.golden.make

# Whether the default's plans became worse on some forty problems: about ten minutes on two cores. QUALITY="--store"
# stores them; python -m tests.quality --help says how two checkouts are compared at equal CPU time.
quality: install
	$(BIN)/python -m tests.quality $(QUALITY)

# docs/api.md from docstrings and docs/models.md from the types that are read, as their tests ask.
reference: install
	$(BIN)/python -m tests.api_reference
	$(BIN)/python -m tests.model_types

# Every notebook again, with its outputs: about ten minutes on two cores. NOTEBOOKS="01 05" executes only those.
notebooks: install
	$(BIN)/python -m tests.notebooks $(NOTEBOOKS)

# The site, in site/: guides, notebooks, reference, results. A link that leads nowhere ends it.
docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: install
	$(BIN)/python -m experiments.measure.bench

# What this machine's GPUs make of plans, beside what they were priced at: at most ten minutes. It writes outputs/gpu/.
gpu: install
	$(BIN)/python -m experiments.measure.gpu

# Random problems against every solver; then all tests on whole sweeps, property tests on new and more examples.
stress: install
	$(BIN)/python -m experiments.stress
	HEXIOPT_STRESS=1 HYPOTHESIS_PROFILE=new $(PYTEST)

# About four hours on two cores; after an interruption it goes on where it was.
results: install
	$(BIN)/python -m experiments.studies all --publish

clean:
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis outputs multirun site
