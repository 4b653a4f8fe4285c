#!/usr/bin/env bash
# A real draft on a real GPU, beside speculators 0.9.0's own trainer on the same samples.
#
#   scripts/real_draft.sh ours PROMPTS.jsonl     one run of `eagle3 fit`: writes its prompts, makes its samples, trains
#   scripts/real_draft.sh peer [SECONDS]         `speculators train` on the samples that it left on disk, for as long as
#                                                the whole run of ours took (its start-up and generation counted for it)
#   scripts/real_draft.sh bench ours|peer EVAL.jsonl ...   either draft in vLLM, 5 tokens, temperature 0
#   scripts/real_draft.sh simulate EVAL.jsonl ...          tau of ours on the answers to the same prompts, without serving
#
# OUT (runs/smollm2_real), SAMPLES (.cache/samples/smollm2_real) and TARGET (.cache/target/smollm2-135m) can be set.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-runs/smollm2_real}
samples=${SAMPLES:-.cache/samples/smollm2_real}
target=${TARGET:-.cache/target/smollm2-135m}
python=${PYTHON:-python3}

ours() {
    local started=$SECONDS
    "$python" -m eagle3_lightning fit --config configs/smollm2_real.yaml --target.path "$target" --run_dir "$out" \
        --data.cache.dir "$samples" --data.prompts.train "[$1, self]" ${FIT_ARGS:-}
    echo $((SECONDS - started)) >"$out/wall_s"
    echo "ours: $(cat "$out/wall_s") s, start-up and generation included"
}

peer() {
    local seconds=${1:-$(cat "$out/wall_s")}
    # The same draft vocabulary: ours, in the form that it reads.
    "$python" - "$out/export/model.safetensors" "$out" <<'PYTHON'
import sys
import numpy as np
from safetensors import safe_open
with safe_open(sys.argv[1], "numpy") as tensors:
    for name in ("d2t", "t2d"):
        np.save(f"{sys.argv[2]}/{name}.npy", tensors.get_tensor(name))
PYTHON
    # Its defaults but for what must agree: auxiliary layers (vLLM's numbers), draft vocabulary, tokens that are drafted.
    # On SIGTERM it saves and ends; its schedule wants to know in how many steps (PEER_STEPS).
    timeout --signal TERM --kill-after 60 "$seconds" "$python" -m speculators.train --speculator-type eagle3 \
        --verifier-name-or-path "$(realpath "$target")" --data-path "$samples/train" --on-missing skip \
        --target-layer-ids 2 15 27 --ttt-steps 5 --d2t-path "$out/d2t.npy" --t2d-path "$out/t2d.npy" \
        --train-data-ratio 0.99 --epochs 10000 --checkpoint-freq 100000 --log-freq 100 --save-path "$out/peer" \
        ${PEER_STEPS:+--scheduler-total-steps "$PEER_STEPS"} ${PEER_ARGS:-} || [ $? -eq 124 ]
}

bench() {
    local side=$1 draft
    shift
    if [ "$side" = ours ]; then draft=$out/export; else draft=$(ls -dt "$out"/peer/*/ | head -1); fi
    "$python" -m eagle3_lightning bench --draft "$draft" --target "$target" --prompts "$@" --num-speculative-tokens 5 \
        --concurrency ${CONCURRENCY:-32} --max-new-tokens 256 --json >"$out/bench_$side.json"
}

simulate() {
    local file jobs=()
    for file in "$@"; do # at once: each has a small engine of its own
        "$python" -m eagle3_lightning validate --config "$out/config.yaml" --ckpt_path "$out/checkpoints/last.ckpt" \
            --run_dir "$out/simulated/$(basename "$file" .jsonl)" --trainer.logger null --data.cache.dir null \
            --data.prompts.val "[$file]" --data.prompts.max_val_samples 1000 --data.sampling.max_new_tokens 256 \
            ${SIMULATE_ARGS:---data.engine.gpu_memory_utilization 0.1} &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job"; done
}

command=${1:?ours, peer, bench or simulate}
shift
"$command" "$@"
