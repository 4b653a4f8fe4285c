# Every target does its own set-up; none needs an account or a hub.
SHELL := /bin/bash
PYTHON_BIN := .venv/bin/python
TARGET_DIR := .cache/target/smollm2-135m
# What the machine must not try at run time, in the quickstart and in the tests.
export HF_HUB_OFFLINE = 1
export WANDB_MODE ?= offline

.PHONY: help setup target quickstart test lint test-tap test-faults test-data bench-train bench-ddp bench-extract clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 18

setup:           ## .venv with pinned packages (CPU)
	@scripts/setup.sh

target: setup    ## the quickstart's target, SmolLM2-135M-Instruct, as a checkpoint directory
	@[ -f $(TARGET_DIR)/config.json ] || $(PYTHON_BIN) scripts/prepare_target.py --out $(TARGET_DIR)

quickstart: target ## prompts to a served draft on this machine: trains, exports, serves, prints its table
	@scripts/quickstart.sh

test: target     ## the tests, with a real vLLM on the CPU; without test-data, test-tap and test-faults
	@$(PYTHON_BIN) -m pytest -m "not gpu and not faults and not tap and not data" tests

test-data: target ## prompts, chat templates, supervision masks and caches
	@$(PYTHON_BIN) -m pytest -m data tests/data

test-tap: target ## the tap in depth: every target family, batches, preemption, mutants
	@$(PYTHON_BIN) -m pytest -m "(tap or vllm) and not faults" tests/integration

test-faults: target ## kills every process at every stage and prints the outcomes as a table
	@$(PYTHON_BIN) -m pytest -s -m faults tests/integration

bench-train:     ## one training step against speculators 0.9.0, on a CUDA host (its own Python)
	@python3 scripts/bench_train.py

bench-ddp:       ## training on two GPUs against one, on a CUDA host (its own Python)
	@python3 scripts/bench_ddp.py

bench-extract:   ## plain vLLM, the tap and vLLM's own extraction, on a CUDA host (its own Python)
	@python3 scripts/bench_extract.py --shared

lint: setup      ## ruff and mypy
	@$(PYTHON_BIN) -m ruff check .
	@$(PYTHON_BIN) -m mypy

clean:           ## remove what the targets above made (not the runs)
	rm -rf .venv .cache/target
