#!/usr/bin/env bash
# A real draft on a real GPU, beside speculators 0.9.0's own trainer on the same samples.
#
#   scripts/real_draft.sh ours PROMPTS.jsonl     one run of `eagle3 fit`: writes its prompts, makes its samples, trains
#   scripts/real_draft.sh trial                  compiles `speculators train`, then finds out how fast it is
#   scripts/real_draft.sh peer [SECONDS]         `speculators train` on the samples that ours left on disk, for as long as
#                                                the whole run of ours took (its start-up and generation counted for it)
#   scripts/real_draft.sh bench ours|peer EVAL.jsonl ...   either draft in vLLM, 5 tokens, temperature 0
#   scripts/real_draft.sh simulate ours|peer EVAL.jsonl ...  its tau on the answers to the same prompts, without serving
#   scripts/real_draft.sh shape NAME [--OPTION VALUE ...]  a draft of other options (--model.draft.num_layers 2) on the same
#                                                          samples, without vLLM, for STEPS steps (1000)
#   scripts/real_draft.sh table                            what the stages above have left, as Markdown
#
# TRIAL: seconds of the second part of trial (90; the first ends by itself, or after 300). PEER_LOSS: forms of its loss to
# try (fused eager). The first is its default and does not compile everywhere (torch 2.11); the second computes the same.
# PEER_ARGS: more of its options.
# CONCURRENCY (32; several with a space between), MAX_PROMPTS (all; one for each of them) and BENCH_ARGS are for bench.
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
    rm -f "$out/peer_speed"
    echo "ours: $(cat "$out/wall_s") s, start-up and generation included"
}

trial() {
    local loss works=
    # The same draft vocabulary: ours, in the form that it reads.
    "$python" - "$out/export/model.safetensors" "$out" <<'PYTHON'
import sys
import numpy as np
from safetensors import safe_open
with safe_open(sys.argv[1], "numpy") as tensors:
    for name in ("d2t", "t2d"):
        np.save(f"{sys.argv[2]}/{name}.npy", tensors.get_tensor(name))
PYTHON
    # Three steps and a validation, which compile what the later runs then find in the caches.
    for loss in ${PEER_LOSS:-fused eager}; do
        if train_peer 300 peer_compile --loss-implementation "$loss" --epochs 1 --max-steps 3; then
            works=$loss
            break
        fi
        peer_failed peer_compile "it does not train with the $loss loss"
    done
    [ -n "$works" ] || exit 1
    train_peer "${TRIAL:-90}" peer_trial --loss-implementation "$works" --log-freq 10 || true
    if ! peer_speed "$works" "$out/peer_trial.log" >"$out/peer_speed"; then
        rm "$out/peer_speed"
        peer_failed peer_trial "the trial came to nothing"
        exit 1
    fi
    echo "trial: $(cat "$out/peer_speed") (loss, steps/s, seconds until the first step)"
}

# From the trial's log: the speed of its second half, epochs' ends and validations included.
peer_speed() {
    "$python" - "$@" <<'PYTHON'
import re
import sys
loss, log = sys.argv[1], open(sys.argv[2]).read()
seen = [(int(m[1]), int(m[2])) for m in re.finditer(r"^(\d+) .*\bglobal_step=(\d+)", log, re.M)]
(middle_s, before), (end_s, last) = (seen[len(seen) // 2], seen[-1]) if seen else ((0, 0), (0, 0))
if end_s == middle_s:
    sys.exit(f"peer: {len(seen)} lines of the trial's log name a step: too few (TRIAL, in seconds, makes it longer)")
print(loss, f"{(last - before) / (end_s - middle_s):.3f}", seen[0][0] - int(log.split()[0]))
PYTHON
}

peer() {
    local seconds=${1:-$(cat "$out/wall_s")} loss speed start steps
    [ -e "$out/peer_speed" ] || trial
    read -r loss speed start <"$out/peer_speed"
    # Its schedule wants to know in how many steps it ends.
    steps=$(awk "BEGIN { print int($speed * ($seconds - $start)) }")
    if [ "$steps" -lt 1 ]; then
        echo "peer: $seconds s are over before its first step, which takes it $start s" >&2
        exit 1
    fi
    echo "peer: $steps steps are expected of $seconds s, $loss loss"
    train_peer "$seconds" peer --loss-implementation "$loss" --log-freq 100 --scheduler-total-steps "$steps" || true
    # The last file that it writes. Without it only the first epoch's draft is there.
    if [ ! -e "$out/peer/interrupted/scheduler_state_dict.pt" ]; then
        peer_failed peer "no draft was saved at the end"
        exit 1
    fi
    echo "peer: last logged $(grep -o 'global_step=[0-9]*' "$out/peer.log" | tail -n 1) of $steps; $out/peer/interrupted"
}

peer_failed() {
    echo "peer: $2; the end of $out/$1.log:" >&2
    tail -n 15 "$out/$1.log" | cut -c -300 >&2
}

# Its defaults but for what must agree: auxiliary layers (vLLM's numbers), draft vocabulary, tokens that are drafted. And
# full attention: no sample is as long as its window. On SIGTERM it saves and ends; its loaders' workers must not get the
# signal (--foreground): their death would end the saving.
train_peer() {
    local seconds=$1 where=$2
    shift 2
    rm -rf "${out:?}/$where" # or it goes on from there
    {
        echo start
        COLUMNS=2000 timeout --foreground --signal TERM --kill-after 60 "$seconds" "$python" -m speculators.train \
            --speculator-type eagle3 --verifier-name-or-path "$(realpath "$target")" --data-path "$samples/train" \
            --on-missing skip --full-attention-indices 0 --target-layer-ids 2 15 27 --ttt-steps 5 --d2t-path "$out/d2t.npy" \
            --t2d-path "$out/t2d.npy" --train-data-ratio 0.99 --epochs 10000 --checkpoint-freq 100000 \
            --save-path "$out/$where" "$@" ${PEER_ARGS:-} 2>&1
    } | while IFS= read -r line; do echo "$EPOCHSECONDS $line"; done >"$out/$where.log"
}

bench() {
    local side=$1 draft
    shift
    local summary=()
    if [ "$side" = ours ]; then draft=$out/export summary=(--summary "$out/summary.json"); else draft=$out/peer/interrupted; fi
    "$python" -m eagle3_lightning bench --draft "$draft" --target "$target" --prompts "$@" --num-speculative-tokens 5 \
        --concurrency ${CONCURRENCY:-32} ${MAX_PROMPTS:+--max-prompts $MAX_PROMPTS} --max-new-tokens 256 ${BENCH_ARGS:-} \
        "${summary[@]}" --json >"$out/bench_$side.json"
}

simulate() {
    local side=${1:-} file jobs=() draft
    case $side in
        ours) draft=(--ckpt_path "$out/checkpoints/last.ckpt") ;;
        peer) # its default shape: the target's own width, and the state that it feeds back is normed
            draft=(--model.init_from "$out/peer/interrupted" --model.draft.intermediate_size null
                --model.draft.norm_output true) ;;
        *) echo "simulate: '$side' is neither ours nor peer" >&2 && exit 2 ;;
    esac
    shift
    [ $# -gt 0 ] || { echo "simulate $side: name files of prompts" >&2 && exit 2; }
    # At once: each has a small engine of its own. The KV cache's size is given, since vLLM's own measurement of what it may
    # take fails where another process frees memory meanwhile.
    local engine='--data.engine.gpu_memory_utilization 0.1 --data.engine.extra {"kv_cache_memory_bytes":4000000000}'
    for file in "$@"; do
        "$python" -m eagle3_lightning validate --config "$out/config.yaml" "${draft[@]}" \
            --run_dir "$out/simulated/$side/$(basename "$file" .jsonl)" --trainer.logger null --data.cache.dir null \
            --data.prompts.val "[$file]" --data.prompts.max_val_samples 1000 --data.sampling.max_new_tokens 256 \
            ${SIMULATE_ARGS:-$engine} &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job"; done
}

shape() {
    local name=$1
    shift
    "$python" -m eagle3_lightning fit --config configs/smollm2_real.yaml --target.path "$target" \
        --run_dir "$out/shapes/$name" --data.prompts.train "[$samples]" --data.cache.dir null --data.cache.max_gib 100 \
        --data.sampling.max_new_tokens 512 --trainer.max_time null --trainer.max_steps "${STEPS:-1000}" "$@"
}

table() {
    "$python" - "$out" <<'PYTHON'
import csv
import json
import math
import sys
from pathlib import Path

out = Path(sys.argv[1])
files = {side: out / f"bench_{side}.json" for side in ("ours", "peer")}
sides = {side: json.loads(file.read_text()) for side, file in files.items() if file.exists()}
if "ours" not in sides:
    sys.exit(f"table: {files['ours']} is missing: bench ours writes it")
figures = {
    (side, Path(f["prompts"]).stem, f["concurrency"]): f for side, report in sides.items() for f in report["figures"]
}
sets = sorted({name for _, name, _ in figures})
most = {side: max(concurrency for of, _, concurrency in figures if of == side) for side in sides}


def simulated(side, name):
    files = sorted((out / "simulated" / side / name).glob("validation/logs/version_*/metrics.csv"), key=lambda f: f.stat().st_mtime)
    found = [row for file in files[-1:] for row in validations(file)]
    return float(found[-1]["val/tau"]) if found else float("nan")


def validations(file):
    return [row for row in csv.DictReader(file.open()) if row.get("val/tau")]


def accuracy(row):
    return " ".join(f"{float(row[f'val/cond_acc_{k}']):.3f}" for k in range(1, 6))


def shown(value):
    return "not run" if math.isnan(value) else f"{value:.3f}"


print("| prompts | ours, served | 95 % | simulated | served / simulated | speculators, served | simulated | ours / speculators, served "
      "| simulated | accepted at 1 to 5 |")
print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
rows = {}
for name in sets:
    ours, tau, peer_tau = figures["ours", name, most["ours"]], simulated("ours", name), simulated("peer", name)
    peer = figures.get(("peer", name, most["peer"])) if "peer" in sides else None
    other = float("nan") if peer is None else peer["acceptance_length"]
    served, (low, high) = ours["acceptance_length"], ours["acceptance_length_ci95"]
    positions = " ".join(f"{share:.2f}" for share in ours["acceptance_per_position"])
    rows[name] = (served, tau, other, peer_tau, f"{low:.2f} to {high:.2f}", positions)
rows["mean"] = (*(sum(column) / len(column) for column in list(zip(*rows.values()))[:4]), "", "")
for name, (served, tau, other, peer_tau, interval, positions) in rows.items():
    ratios = [shown(ratio) for ratio in (served / tau, served / other, tau / peer_tau)]
    print(f"| {name} | {shown(served)} | {interval} | {shown(tau)} | {ratios[0]} | {shown(other)} | {shown(peer_tau)} "
          f"| {ratios[1]} | {ratios[2]} | {positions} |")
print("\n| prompts | requests at once | tokens/s with the draft | without | speed-up | identical outputs | real differences |")
print("| --- | --- | --- | --- | --- | --- | --- |")
for (side, name, concurrency), f in sorted(figures.items(), key=lambda item: (item[0][2], item[0][1])):
    if side == "ours":
        print(f"| {name} | {concurrency} | {f['tokens_per_s']:,.0f} | {f['plain_tokens_per_s']:,.0f} | {f['speedup']:.2f} "
              f"| {f['identical']} of {f['num_prompts']} | {f['real_differences']} |")
logs = sorted(out.glob("logs/version_*/metrics.csv"), key=lambda file: file.stat().st_mtime)
validated = [row for file in logs[-1:] for row in validations(file)]
if validated:
    trained = [row for row in csv.DictReader(logs[-1].open()) if row.get("train/tau")]
    print("\n| steps | slots seen | held-out tau | of the training | held-out accuracy at 1 to 5, given all before it |")
    print("| --- | --- | --- | --- | --- |")
# Ten of them at most, the last among them.
for row in validated[:: -max(-(-len(validated) // 10), 1)][::-1]:
    step = int(row["step"])
    before = [(float(r["train/tokens"]), float(r["train/tau"])) for r in trained if int(r["step"]) <= step]
    seen, tau = before[-1] if before else (float("nan"), float("nan"))
    print(f"| {step + 1:,} | {seen:,.0f} | {float(row['val/tau']):.3f} | {tau:.3f} | {accuracy(row)} |")
shapes = sorted((out / "shapes").glob("*/logs/version_*/metrics.csv"))
if shapes:
    print("\n| shape, on the same samples | steps | held-out tau | accuracy at 1 to 5, given all before it |")
    print("| --- | --- | --- | --- |")
for file in shapes:
    if not (found := validations(file)):
        sys.exit(f"table: {file} has no validation: nothing is held out of the samples, or the run ended before one")
    row = found[-1]
    print(f"| {file.parts[-4]} | {int(row['step']) + 1:,} | {float(row['val/tau']):.3f} | {accuracy(row)} |")
for side, report in sides.items():
    print(f"\n{side}: {report['device']}, vLLM {report['vllm_version']}, {report['dtype']}, outputs of at most "
          f"{report['max_new_tokens']} tokens, lossless: {report['lossless']}")
PYTHON
}

command=${1:?ours, trial, peer, bench, simulate, shape or table}
shift
"$command" "$@"
