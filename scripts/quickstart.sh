#!/usr/bin/env bash
# From prompts to a served draft on this machine; `make quickstart` does the set-up first.
#   SEED      seed of the run (0)
#   RUN_DIR   where it goes (runs/quickstart); the previous run there is moved aside
set -euo pipefail
cd "$(dirname "$0")/.."
run_dir=${RUN_DIR:-runs/quickstart}
seed=${SEED:-0}
if [ -e "$run_dir" ]; then mv "$run_dir" "$run_dir.$(date -r "$run_dir" +%Y%m%d-%H%M%S)"; fi

.venv/bin/python scripts/make_prompts.py --out .cache/prompts
# One core makes hidden states (data.engine.cpu_threads is 1) while the other trains on them: the fit gives torch the rest.
.venv/bin/eagle3 fit --config configs/quickstart.yaml --run_dir "$run_dir" --seed_everything "$seed"
status=0
.venv/bin/eagle3 bench --draft "$run_dir/export" --prompts .cache/prompts/heldout.jsonl \
    --num-speculative-tokens 3 --summary "$run_dir/summary.json" || status=$?
.venv/bin/eagle3 report "$run_dir"
exit $status
