# One word for each thing that a contributor does. `make help` lists them.

SHELL := /bin/bash
BIN := .venv/bin
MODEL ?=
SPEC ?=
ARGS ?=
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup serve test check format soak arm bench-load bench-peers bench-peers-http docs clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.complete ## Make .venv with everything in it

NATIVE := CMakeLists.txt $(wildcard src/tokenpath/engine/kernels/native/*)

.venv/.complete: pyproject.toml constraints.txt scripts/setup.sh $(NATIVE)
	@scripts/setup.sh

serve: .venv/.complete ## Serve a real model: MODEL=gemma-3-270m SPEC=file.yaml ARGS='--port 9000'
	@$(BIN)/tokenpath serve $(SPEC) $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: .venv/.complete check ## Everything that must hold before a commit
	@$(BIN)/tokenpath models pull gemma-3-270m
	@$(BIN)/tokenpath models pull all-minilm-l6-v2
	$(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

check: .venv/.complete ## Lint, types and the rooms' import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/.complete ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: .venv/.complete ## Property tests with 10,000 examples, and every equality of real models
	@$(BIN)/tokenpath models pull gemma-3-270m
	@$(BIN)/tokenpath models pull qwen2.5-coder-1.5b
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest tests/policy tests/engine/test_gemma_equality.py \
		tests/engine/test_invariance.py --timeout 3600

arm: ## Compile the native kernels for Arm, with a compiler in an environment of its own
	@scripts/arm.sh

bench-load: .venv/.complete ## Latency and throughput of both models at 1, 8 and 32 callers (15 minutes)
	@$(BIN)/python bench/levels.py $(ARGS)

bench-disaggregation: .venv/.complete ## The longest pauses of streams while long prompts arrive, with and without roles (2 minutes)
	@$(BIN)/python -m bench.disaggregation $(ARGS)

bench-peers: .venv/.complete ## tokenpath beside other engines (hours): ARGS='--rounds 1 --only decode_8_64'
	@$(BIN)/tokenpath models pull $(or $(MODEL),qwen2.5-coder-1.5b)
	@$(BIN)/python -m bench.peers.compare $(if $(MODEL),--model $(MODEL)) $(ARGS)

bench-peers-http: .venv/.complete ## Servers under one load over HTTP (hours): ARGS='--trace FILE.csv --rounds 3'
	@$(BIN)/tokenpath models pull $(or $(MODEL),qwen2.5-coder-1.5b)
	@$(BIN)/python -m bench.peers.http.compare $(if $(MODEL),--model $(MODEL)) $(ARGS)

docs: .venv/.complete ## Rewrite docs/reference/{spec,cli,errors}.md from the code
	$(BIN)/python -m tokenpath.cli.reference docs/reference

clean: ## Remove the environment and the tools' caches; pulled models stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -prune -exec rm -rf {} +
