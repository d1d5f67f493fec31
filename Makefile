# `make quickstart` shows what this is; `make lint lint-page test test-slow` is what CI runs. Most targets make the environment first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# An index with other builds of torch, for example https://download.pytorch.org/whl/cpu (smaller) or .../whl/cu130.
TORCH_INDEX ?=
COMPOSE ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)
BIN := .venv/bin
# Three workers, because tests spend a third of their time waiting for processes, leases and servers.
PYTEST := $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

# The published gsm8k files, where they lie beside the checkout.
ifneq ($(wildcard ../shared/data/gsm8k),)
export AGENTRL_GSM8K_DIR ?= $(abspath ../shared/data/gsm8k)
endif

# Bytecode is kept, also where a container says otherwise: a command and its workers compile what they import once, not each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env generated quickstart test test-explore test-slow test-models test-ends faults disturbed disturbed-agents killed-sampler hosts learn learn-agent learn-code learn-real learn-examples learn-prompts demo pictures bench trackers clients gpu-check gpu-wheels lint lint-page format address wheel-test release compose-test vllm-test docs clean

env: .venv/.stamp

# A comma inside the arguments of a call.
comma := ,

# $(call pip,PYTHON'S FOLDER,ARGUMENTS): one line of progress; what pip says is in build/pip.log, whose end is shown on failure.
# Not compiled: most of these modules are never imported, and compiling them takes as long as the rest of the installation.
define pip
@mkdir -p build
@echo 'Installing into $(1) (a few minutes; pip writes build/pip.log)'
@$(1)/bin/pip install --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(2) >build/pip.log 2>&1 \
	|| { tail -n 20 build/pip.log; echo 'The installation failed. The whole log: $(CURDIR)/build/pip.log'; exit 1; }
endef

.venv/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call pip,.venv,-c constraints.txt -e '.[dev]')
	@touch $@

# `make -n` runs each line of a recipe that has $(MAKE) in it, so the recipe has none.
quickstart: export MAKE := $(MAKE)
quickstart:
	./quickstart.sh

test: env
	$(PYTEST) -m 'not slow' --durations=20

# The property tests on fresh examples; a failing one is printed with the line that repeats it.
test-explore: env
	$(PYTEST) -m hypothesis --hypothesis-profile explore

# What takes some seconds or more: whole runs; kills, exceptions and stalls, each at most once per fault point.
test-slow: env build/clients/litellm/.stamp
	$(PYTEST) -m 'slow and not models' --durations=40

# Every class of causal language models in transformers, small and random: some minutes. When the sampler or transformers changes.
test-models: env
	$(PYTEST) -m models

FRAMEWORKS := $(patsubst tests/clients/frameworks/run_%.py,build/clients/%/.stamp,$(shell grep -l 'dependencies = \[' tests/clients/frameworks/*.py))
requirements = sed -n 's/.*dependencies = \["\(.*\)"\]$$/\1/p' $< | sed 's/", "/ /g'

# Clients of agents and of frameworks, in the versions that docs/agents.md names, against the endpoint. With SMOLLM=FOLDER, which has
# SmolLM2-135M-Instruct, Codex and Claude Code also train a model that has its tokenizer.
clients: env build/clients/.stamp $(FRAMEWORKS)
	PATH="$(CURDIR)/build/clients/node_modules/.bin:$$PATH" $(BIN)/pytest tests/clients tests/workers/test_dialects.py

build/clients/.stamp: Makefile
	npm install --prefix build/clients --no-audit --no-fund @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197 \
		ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/anthropic@3.0.140 @ai-sdk/openai-compatible@2.0.92 zod@4.6.7 \
		opencode-ai@1.18.33 @qwen-code/qwen-code@0.15.10
	@touch $@

# A framework whose packages are not ours has an environment of its own. Its program names them.
build/clients/%/.stamp: tests/clients/frameworks/run_%.py
	@$(PYTHON) -m venv build/clients/$*
	$(call pip,build/clients/$*,$$($(requirements)))
	@touch $@

# A core of the tests on the lowest and the newest versions that pyproject.toml allows, and on Python 3.13 (PYTHON313, else the one
# on the PATH): an environment each in build/ends/, 8 minutes of tests each at most. When a dependency changes, and before a
# release. `make test-ends only=lowest`.
test-ends:
	$(PYTHON) .ci/ends.py $(only)

# Every fault at every hit of every fault point, three experiments at a time: two hours or so, into build/faults.json.
faults: env
	$(BIN)/python -m bench.faults

# The same run left alone and struck some 30 times, in four modes: about half an hour, into build/disturbed.json.
disturbed: env
	$(BIN)/python -m bench.faults.disturbed

# The same of a run whose agents call the endpoint: some minutes, into build/disturbed_agents.json.
disturbed-agents: env
	$(BIN)/python -m bench.faults.agent_kills

# What a kill -9 of the sampling process costs, beside TRL: some 20 minutes, into build/killed_sampler.json.
killed-sampler: .venv/.bench
	$(BIN)/python -m bench.faults.killed_sampler

# The same run on five hosts with TLS, left alone and disturbed (as root: network namespaces): some minutes, into build/hosts.json.
# `make hosts train_hosts=2` disturbs a run that trains on two hosts.
hosts: env
	$(BIN)/python -m bench.faults.hosts $(if $(train_hosts),--train-hosts $(train_hosts))

# Every algorithm on arithmetic, 96 iterations with 3 seeds each: an hour or two, into build/learn.json, .md and .svg; what is
# there already is not run again. `make learn only=grpo,ppo seeds=0 jobs=1` runs those.
learn: .venv/.learn
	$(BIN)/python -m bench.learning.learn_algorithms $(if $(only),--only $(only)) $(if $(seeds),--seeds $(seeds)) $(if $(jobs),--jobs $(jobs))

.venv/.learn: .venv/.stamp
	$(call pip,.venv,-c constraints.txt -e '.[dev$(comma)learn]')
	@touch $@

# The built-in loop and the openai SDK's agent on arithmetic with 3 seeds each, agents on other libraries with one: an hour or
# two, into build/learn_agent.json and .md; what is there already is not run again. `make learn-agent only=openai seeds=0`.
learn-agent: env
	$(BIN)/python -m bench.learning.learn_agents $(if $(only),--only $(only)) $(if $(seeds),--seeds $(seeds)) $(if $(jobs),--jobs $(jobs))

# The tiny model learns to program, through the tools queue, the sandbox and a kill -9 of the tools worker: a warm start, 48
# iterations, held-out tasks before and after: five to ten minutes, into build/learn_code.json.
learn-code: env
	$(BIN)/python -m bench.learning.learn_code

# Real pretrained models learn: hours, which Ctrl-C may cut into parts; results are in docs/results/ and docs/results.md.
# `make learn-real smollm=FOLDER qwen=FOLDER only=sums seeds=0`.
learn-real: .venv/.learn
	$(BIN)/python -m bench.learning.learn_real $(if $(smollm),--smollm $(smollm)) $(if $(qwen),--qwen $(qwen)) $(if $(only),--only $(only)) $(if $(seeds),--seeds $(seeds))

# The five examples that the tiny model can learn, by the commands of their pages: an hour, into docs/results/examples/ and examples/README.md.
# `make learn-examples only=own_env,notebook`; an example that has a result is not run again.
learn-examples: .venv/.learn
	$(BIN)/python -m bench.learning.learn_examples $(if $(only),--only $(only))

# Prompts learn by a critic that reads, and not by one that is blind: apo and gepa, five seeds each: some minutes, into
# build/learn_prompts.json and .md.
learn-prompts: env
	$(BIN)/python -m bench.learning.learn_prompts

# What `agentrl ui --demo` shows: real runs of a tiny model, packed into workers/page/demo_data: three minutes or so.
demo: env
	$(BIN)/python -m tests.support.demo_store

# The pictures of docs/page.md: the demo in a real Chromium, photographed by its test; then the README's GIF, of a real run whose
# worker is killed: five minutes or so.
pictures: env
	$(PYTEST) -m slow tests/page/test_browser.py -k pictures && cp build/page/page-*.png docs/
	$(BIN)/python -m tests.support.readme_gif

# The four trackers for real, in an environment of their own: a run written by processes that are killed, read back, and the cost
# of a live run: five minutes, into build/trackers.json. `make trackers only=wandb`.
trackers: build/trackers/.stamp
	build/trackers/bin/python -m bench.trackers $(only)

build/trackers/.stamp: .venv/.stamp
	@$(PYTHON) -m venv build/trackers
	@purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		$(BIN)/python -c "$$purelib" >"$$(build/trackers/bin/python -c "$$purelib")/base.pth" # what .venv has is not installed again
	$(call pip,build/trackers,-e '.[tensorboard$(comma)wandb$(comma)mlflow$(comma)trackio]')
	@touch $@

# What is measured, with its spread, into build/bench.json; `make bench only=decode,update` measures those.
bench: .venv/.bench
	$(BIN)/python -m bench.performance $(only)

.venv/.bench: .venv/.stamp
	$(call pip,.venv,-c constraints.txt -e '.[dev$(comma)bench]')
	@touch $@

# Measure what only a GPU can tell, in three calls of at most eight minutes: `make gpu-check call=1 python=python3.12 out=found`.
# Call 1: memory, decoding, logprobs, faults. Call 2: tests, a lost device. Call 3: runs that learn. `only=memory,decode`: these
# parts. It needs no environment of ours. Without a GPU the same parts run small on the CPU.
out ?= build/gpu
gpu-check:
	$(or $(python),python3) -m bench.gpu $(or $(only),$(call),$(error Name a call: make gpu-check call=1)) --out $(out)

# Prepare what a machine without a network needs for these calls: build/gpu-1, build/gpu-2 and build/gpu-3, with wheels for its
# Python and the two pieces of the model file that call 3 trains: `make gpu-wheels gguf=FILE target=3.12`.
gpu-wheels: env
	$(BIN)/python -m bench.gpu.prepare $(if $(target),--target $(target)) $(if $(limit),--limit $(limit)) $(if $(gguf),--gguf $(gguf))

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for file in examples/*/*.py; do $(BIN)/mypy --strict $$file || exit 1; done
	$(BIN)/lint-imports
	$(BIN)/python -m bench.generated --check

# The types of the page's own scripts, by the compiler of TypeScript, which npx fetches. Without npx nothing is checked.
lint-page:
	@if command -v npx >/dev/null; then \
		npx --yes -p typescript@5.9.3 tsc --noEmit --allowJs --target esnext --module esnext --moduleResolution node \
			agentrl/workers/page/static/*.js; \
	else echo 'npx is missing, so the scripts of the page are not checked.'; fi

# The Trainer's typed keywords, the tables of options and views, the types of columns.
generated: env
	$(BIN)/python -m bench.generated

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What depends on the repository's address, [tool.agentrl] in pyproject.toml: the badge, the install lines, CITATION.cff.
address: env
	$(BIN)/python hatch_build.py

# The docs site with a live demo, into build/site; fails on a broken link.
docs: env
	$(BIN)/python .ci/docs_site.py
	$(BIN)/zensical build --strict

# The wheel in an empty environment, run from a folder that is not this one.
wheel-test: env
	rm -rf build/wheel
	$(BIN)/python -m build --wheel --no-isolation --outdir build/wheel/dist
	$(PYTHON) -m venv build/wheel
	$(call pip,build/wheel,-c constraints.txt build/wheel/dist/*.whl)
	cd / && export AGENTRL_HOME=$(CURDIR)/build/wheel/home && $(CURDIR)/build/wheel/bin/agentrl --help >/dev/null \
		&& $(CURDIR)/build/wheel/bin/agentrl db upgrade && $(CURDIR)/build/wheel/bin/agentrl runs \
		&& $(CURDIR)/build/wheel/bin/python -c 'from agentrl.workflow.trajectory import Episode; print(Episode.__module__)'

# What a tag is released with, in dist/: sdist, wheel and notes from CHANGELOG.md. Nothing is published.
release: .venv/.twine
	.ci/release $(TAG)

.venv/.twine: .venv/.stamp
	@$(PYTHON) -m venv build/twine
	$(call pip,build/twine,twine)
	@touch $@

# Settings of the compose stack, with passwords that are made up; a file that is there stays.
.env:
	@umask 077; while IFS= read -r line; do case $$line in \
		*_PASSWORD=) echo "$$line$$(od -An -N18 -tx1 /dev/urandom | tr -d ' \n')";; \
		*) echo "$$line";; esac; done <.env.example >.env.new && mv .env.new .env
	@mkdir -p work
	@echo 'Wrote .env. Next: $(COMPOSE) up -d --build'

# The engine vllm with a real vLLM (3 GB, once), without a GPU too.
vllm-test: env
	test -f build/vllm/engines/vllm/installed || AGENTRL_HOME=build/vllm $(BIN)/agentrl engine install vllm
	AGENTRL_VLLM_HOME=build/vllm $(BIN)/pytest tests/inference/test_real_vllm.py

# The whole stack in a project of its own (another stack of this folder keeps its volumes): runs with a reward of one's own, with
# math_answer, with agents (a function, a program), with programs in the tools service's sandbox; two rollout workers; a lost Redis.
compose-test: .env
	COMPOSE='$(COMPOSE)' .ci/compose

clean:
	rm -rf build dist .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
