#!/usr/bin/env bash
# From a fresh clone to a model that has learned to add, on a machine without a GPU:
#
#   bash launch/quickstart.sh [--out DIR] [--short] [key=value ...]
#
# Makes a tiny checkpoint and its data, warms it up with supervised steps, then trains it by GRPO. key=value overrides
# configs/quickstart.yaml. seed=N applies to all phases. --short takes a few steps only, as a test of all phases.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

out=$REPOSITORY/runs/quickstart seed=0 warm_up_steps=() grpo_steps=() overrides=()
while (($#)); do
  case $1 in
    --out) out=${2:?--out needs a folder} && shift ;;
    --short) warm_up_steps=(steps=20) grpo_steps=(steps=2) ;;
    output_dir=*) fail "$1: give the folder as --out DIR" ;;
    seed=*) seed=${1#seed=} ;;
    *=*) overrides+=("$1") ;;
    *) fail "unknown argument $1; usage: bash launch/quickstart.sh [--out DIR] [--short] [key=value ...]" ;;
  esac
  shift
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
export OMP_NUM_THREADS=1 # ranks share the cores

phase() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@" || fail "the quickstart stopped at: $name (exit status $?). See the reason above"
  seconds+=("$name $((SECONDS - start)) s")
}

train() {
  "$python" -m torch.distributed.run --standalone --nproc-per-node 4 launch/train.py "$@"
}

seconds=()
phase "environment" prepare_environment
cd "$REPOSITORY"
phase "checkpoint and data" "$python" tools/make_quickstart.py --output "$out/start" --seed "$seed"
data=(data.train.path="$out/start/train.jsonl" data.eval.path="$out/start/eval.jsonl")
phase "warm-up" train --config configs/quickstart_sft.yaml model.path="$out/start/model" output_dir="$out/sft" \
  "${data[@]}" seed="$seed" "${warm_up_steps[@]}"
phase "GRPO" train --config configs/quickstart.yaml model.path="$out/sft/hf" output_dir="$out/grpo" \
  "${data[@]}" seed="$seed" "${grpo_steps[@]}" "${overrides[@]}"

summary=$(printf ', %s' "${seconds[@]}")
echo "== seconds by phase: ${summary:2}"
echo "== the trained checkpoint is in $out/grpo/hf, its metrics are in $out/grpo/metrics.jsonl"
"$python" - "$out/grpo/metrics.jsonl" <<'EOF'
import json, sys
records = map(json.loads, open(sys.argv[1]))
scores = [record["eval/score"] for record in records if "eval/score" in record]
print(f"held-out exact match: {scores[0]:.2f} -> {scores[-1]:.2f}")
EOF
