# make setup | demo | test | docs | bench | help        Nothing but Python 3.11+ and make has to be there.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo smollm2 test tests-runs tests-models tests-others test-gpu tests-again test-core test-report test-gateway test-servers test-cluster test-foresight test-verbs test-verify test-workflows test-kernels core-learning core-answering core-rest test-long tinker-environment test-tinker test-numerics agent-environments engine-environments test-engines test-engine-clients test-clusters test-agents test-outlets test-browser test-lowest web format format-check lint types types-darwin tests coverage docs bench bench-quick bench-virtual bench-sandbox bench-generation bench-serving bench-soak bench-loop bench-smollm2 bench-training bench-trl gpu clean

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One torch thread per process: several processes with several threads each spin against each other.
export OMP_NUM_THREADS ?= 1
# Where it is set, each process that starts compiles stretto anew: almost a second.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?=#                 an interpreter of your choice; otherwise the first suitable one on the PATH
TORCH ?= 2.13.0#           the version of torch; without an NVIDIA GPU its CPU build
EXTRAS ?= data#            extras of stretto that setup installs too, by comma
BIN := .venv/bin
RUN := $(BIN)/python -m

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

setup: .venv/ready-run  ## .venv with the pinned packages and stretto itself

demo: .venv/ready-run  ## train recipes/arithmetic.toml until 0.95 holds: a small model learns to reason, in minutes
	$(BIN)/stretto train recipes/arithmetic.toml evaluation.goal=0.95

smollm2: .venv/ready-run  ## train recipes/smollm2.toml: fetches a pretrained chat model, which learns a task in a quarter of an hour
	$(BIN)/stretto train recipes/smollm2.toml "model.path=$$($(BIN)/python recipes/smollm2.py)"

# Tests wait now and then, and leave the types as much of two cores as they need.
test: format-check lint  ## every check: format, lint, types, tests
	@$(MAKE) --no-print-directory --jobs=4 --output-sync=target types $(PARTS)

format-check: .venv/ready-test
	$(RUN) ruff format --check .

lint: .venv/ready-test
	$(RUN) ruff check .

types: .venv/ready-test
	nice $(RUN) mypy

types-darwin: .venv/ready-test  ## the types of core, verify and report, as they are on a Mac
	$(RUN) mypy --platform darwin --cache-dir .cache/mypy-darwin $(addprefix packages/,core verify report)

# Three processes: two cores are what has to be there, a run of its own has several processes already, and tests wait now
# and then. Each has rooms of its own, about as long as those of the others: workers of xdist would each collect all.
RUNS := launch faults complaints cli canary study watch workflows cluster
MODELS := trainer engine model verbs tinker planner servers api rewards outlets
PARTS := tests-runs tests-models tests-others
ifneq ($(wildcard /dev/nvidiactl),)
PARTS += test-gpu
endif
below = $(addprefix tests/,$(1))

tests: .venv/ready-test  ## the tests alone
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target $(PARTS)

tests-runs tests-models tests-others: tests-%: .venv/ready-test
	$(RUN) pytest -o cache_dir=.cache/pytest/$* $(IN_$*)

IN_runs = $(call below,$(RUNS))
IN_models = $(call below,$(MODELS))
IN_others = $(addprefix --ignore=,$(call below,$(RUNS) $(MODELS)))

ON_GPU := $(addprefix tests/model/test_,triton_*.py cuda_graphs.py slot_tables.py)
test-gpu: .venv/ready-test  ## the tests that need a GPU, which all others do not see
	STRETTO_TEST_GPU=1 $(RUN) pytest -o cache_dir=.cache/pytest/gpu $(ON_GPU)

tests-again: .venv/ready-test  ## those that failed in `make tests`, alone; an error if none has
	@failed=$$(grep -ls '"' .cache/pytest/*/v/cache/lastfailed) || { echo "no test has failed"; exit 1; }; \
	for cache in $$failed; do $(RUN) pytest -o cache_dir=$${cache%/v/cache/lastfailed} --last-failed || exit 1; done

# In the order of the folders, which leaves the lightest for the end.
PYTEST := $(RUN) pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# The rooms of each package; tests/ mirrors them.
core := core doors engine loop model processes rewards rollout store trainer weights
report := audit dashboard outlets watch
foresight := planner simulator
# Of the room `model`, what is about the package of loops alone; the rest of it, about models that use them.
kernels := $(addprefix model/test_,chunks.py cuda_graphs.py decode_attention.py fused.py panels.py program.py tiles.py \
	trace.py triton_attention.py triton_draw.py triton_fused.py triton_layer.py)

test-report test-gateway test-servers test-cluster test-foresight test-verbs test-verify test-workflows test-kernels: test-%: .venv/ready-test  ## the tests of packages/% alone
	$(PYTEST) $(addprefix tests/,$(or $($*),$*)) packages/$*

# Of the core, which takes as long as all others, in three processes, as `tests`: a worker of xdist collects all.
test-core: .venv/ready-test  ## the tests of packages/core alone
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target core-learning core-answering core-rest

learning := trainer rewards
answering := engine processes weights
core-learning core-answering core-rest: core-%:
	$(RUN) pytest -o cache_dir=.cache/pytest/core-$* $(CORE_$*)

CORE_learning = $(call below,$(learning))
CORE_answering = $(call below,$(answering))
CORE_rest = $(call below,$(filter-out $(learning) $(answering),$(core))) packages/core $(addprefix --ignore=tests/,$(kernels))

test-long: .venv/ready-test  ## what takes long and breaks rarely
	$(RUN) pytest -m long tests

coverage: .venv/ready-test  ## the tests, slower, and which lines they have run
	$(PYTEST) --cov --cov-report=term

# Each setting is an older processor to torch, oneDNN, MKL and numba alike; `tests` has run on this one.
HASWELL := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c,+bmi,+bmi2
NEHALEM := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 NUMBA_CPU_NAME=generic

# Where tests are numeric (tests/conftest.py): to collect all others takes longer than some of these. What a processor
# computes is in tests/model, which both run; the engine and the trainer stand on it, and each runs on one of them. Ranks
# are compared with one process on the same processor, Triton's interpreter computes with numpy, whatever is set here, and
# each recipe's objective is the same few operations as those of the other files.

NUMERIC := $(RUN) pytest -m 'numeric and not long' --numprocesses 2 --dist loadfile --ignore-glob='*/test_rank*.py' \
	--ignore-glob='*/test_slot_tables.py' --ignore-glob='*/test_triton_attention.py' --ignore-glob='*/test_objectives.py'

test-numerics: .venv/ready-test  ## the tests that compare a model's numbers, on the instruction sets of older processors
ifeq ($(shell uname -m),x86_64)
	$(HASWELL) $(NUMERIC) tests/engine tests/model
	$(NEHALEM) $(NUMERIC) tests/model tests/trainer
endif

engine-environments: .venv/ready-test  ## the environments of vLLM, SGLang and verifiers, once, in the user's cache
	-$(RUN) benchmarks.peers.environment vllm
	-$(RUN) benchmarks.peers.environment sglang
	-$(RUN) benchmarks.peers.environment verifiers

agent-environments: .venv/ready-test  ## the environments of agents and of verifiers, once, in the user's cache
	-$(RUN) benchmarks.peers.environment agents
	-$(RUN) benchmarks.peers.environment verifiers
	-$(RUN) benchmarks.peers.environment worlds

test-engines: engine-environments  ## the tests with real servers of vLLM and SGLang
	$(RUN) pytest tests/real_engines --ignore tests/real_engines/clients

test-engine-clients: engine-environments  ## the gateway and reward models in front of such servers, and what is rarer or longer
	$(RUN) pytest tests/real_engines/clients

test-agents: agent-environments  ## the tests with real agents and environments of other makes
	$(RUN) pytest tests/real_agents

test-outlets: .venv/ready-test  ## the tests with the real W&B, MLflow and trackio, offline, in an environment of their own
	$(RUN) pytest tests/real_outlets

tinker-environment: .venv/ready-test  ## the environment of Tinker's SDK and cookbook, once, in the user's cache
	-$(RUN) benchmarks.peers.environment tinker

test-tinker: tinker-environment  ## the tests of packages/tinker, with Tinker's SDK and cookbook as published
	$(RUN) pytest -m '' tests/tinker tests/real_tinker packages/tinker

test-clusters: .venv/ready-test  ## the tests on a real Ray cluster of three nodes, on this machine
	$(RUN) pytest tests/real_clusters

test-browser: .venv/ready-browser web/node_modules/.package-lock.json  ## the pages of stretto watch in Debian's Chromium
	$(RUN) pytest tests/real_browser

test-lowest: .venv/ready-run  ## imports and a small run with the lowest versions that pyproject.toml allows
	$(RUN) tests.lowest

web: web/node_modules/.package-lock.json  ## build the pages of stretto watch from web/ into packages/report/stretto_report/watch/static (needs Node 20)
	cd web && npm run build

web/node_modules/.package-lock.json: web/package-lock.json
	cd web && npm ci

docs: .venv/ready-docs  ## the site of docs/, in build/site; a warning or a dead link fails
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

format: .venv/ready-test  ## put the sources in form
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

bench: bench-virtual bench-sandbox bench-loop  ## virtual clock, sandbox, loop; tables on the screen, JSON in benchmarks/results

bench-quick: .venv/ready-test  ## the ratios of the ten goals in five minutes, beside those on record; AGAINST=REVISION: beside that commit; RECORD=1: and on record
	$(RUN) benchmarks.quick $(if $(AGAINST),--against $(AGAINST)) $(if $(RECORD),--record)

bench-virtual: .venv/ready-run  ## on the virtual clock: staleness policies, decisions per second
	$(RUN) benchmarks.staleness
	$(RUN) benchmarks.decisions

bench-generation: .venv/ready-run  ## the engine beside transformers and vLLM, and what an update costs
	$(RUN) benchmarks.generation all
	$(RUN) benchmarks.decode_step

bench-serving: .venv/ready-run  ## the server under 1, 16 and 64 streams, against the engine alone
	$(RUN) benchmarks.serving

bench-soak: .venv/ready-run  ## two hours with a kill a minute: laws, memory and descriptors of every role
	$(RUN) benchmarks.soak

bench-sandbox: .venv/ready-run  ## milliseconds per sandboxed program, warm and cold, beside a plain subprocess
	$(RUN) benchmarks.sandbox

bench-loop: .venv/ready-run  ## asynchronous against synchronous, the policies, and trl (makes trl's environment)
	$(RUN) benchmarks.loop all

bench-training: .venv/ready-run  ## the training step beside padded rows and trl's, micro-batches, share of the machine's peak
	$(RUN) benchmarks.training all

bench-smollm2: .venv/ready-run  ## recipes/smollm2.toml: five evaluations before and after, and what the run took
	$(RUN) benchmarks.smollm2

gpu: .venv/ready-test  ## on a machine with a GPU: everything that only a GPU can show, within 25 minutes
	$(RUN) benchmarks.gpu

bench-trl: .venv/ready-run  ## trl's environment alone; prints its interpreter
	$(BIN)/python benchmarks/peers/environment.py trl

clean:  ## remove caches; keeps .venv and runs
	rm -rf .cache .hypothesis build *.egg-info

.venv/ready-run: requirements/run.txt requirements/setup.sh pyproject.toml $(wildcard packages/*/pyproject.toml)
	@EXTRAS='$(strip $(EXTRAS))' PYTHON='$(strip $(PYTHON))' TORCH='$(strip $(TORCH))' sh requirements/setup.sh run

.venv/ready-test: requirements/test.txt .venv/ready-run
	@PYTHON='$(strip $(PYTHON))' TORCH='$(strip $(TORCH))' sh requirements/setup.sh test

.venv/ready-docs: requirements/docs.txt .venv/ready-run
	@PYTHON='$(strip $(PYTHON))' TORCH='$(strip $(TORCH))' sh requirements/setup.sh docs

.venv/ready-browser: requirements/browser.txt .venv/ready-test
	@PYTHON='$(strip $(PYTHON))' TORCH='$(strip $(TORCH))' sh requirements/setup.sh browser
