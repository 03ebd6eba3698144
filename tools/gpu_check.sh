#!/usr/bin/env bash
# What only a GPU can show, in ten minutes, what is likeliest to fail first: builds the native libraries, runs the GPU
# tests, a training step and a colocated run of real dimensions, and the benchmarks, and packs what they found.
#
#   bash tools/gpu_check.sh [FOLDER]        default: docs/benchmarks/<name of the GPU>
#   bash tools/gpu_check.sh --list          the steps in their order, with their limits, and what to carry along
#
# FOLDER/summary.json has the date, the versions, what became of every step and the benchmarks' results; NAME.log beside
# it is a step's output, and FOLDER.tar.gz has all of it. Needs no network. Python is RLTRAIN_PYTHON, or else python3:
# one with a CUDA build of torch, numpy and setuptools, and what --list says. Where RLTRAIN_SGLANG_PYTHON names a Python
# that has SGLang, its tests run too and may take seven minutes more. RLTRAIN_CUDA_ARCHITECTURES, by default this GPU's,
# is what the kernels are compiled for.
#
# After a step that crashes or hangs nothing else is run: it may have left the GPU in any state. Tests that fail hold up
# nobody. Exit status: 0 every step passed; 1 a step failed; 2 no GPU, or no such Python.
set -uo pipefail

TOTAL_S=590
SGLANG_S=420
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${RLTRAIN_PYTHON:-python3}
listing=
[[ ${1:-} == --list ]] && listing=yes

# By the names under which they are imported, and installed: for jobs, for tests.
PACKAGES=(megatron:megatron-core einops:einops pydantic:pydantic yaml:pyyaml safetensors:safetensors
  transformers:transformers math_verify:math-verify rich:rich httpx:httpx
  pytest:pytest pytest_timeout:pytest-timeout hypothesis:hypothesis)

refuse() {
  echo "gpu_check: $*" >&2
  exit 2
}

carry() {
  echo "carry, for a machine without a network, what its Python lacks of:"
  echo "  pip install --target gpu_packages --no-deps ${PACKAGES[*]#*:} and what these need"
  echo "  PYTHONPATH=\$PWD/gpu_packages bash tools/gpu_check.sh"
}

# step NAME LIMIT_S COMMAND...: no longer than its limit and what is left of the total.
step() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  if [[ $listing ]]; then
    echo "$name ($limit s): $*"
    return
  fi
  if [[ $crashed ]]; then return; fi
  if ((limit > TOTAL_S - SECONDS)); then limit=$((TOTAL_S - SECONDS)); fi
  echo "$name ..."
  if ((limit > 0)); then
    timeout --kill-after=10 "$limit" "$@" >"$folder/$name.log" 2>&1 || status=$?
  else
    status=124
    echo "the steps before it took all of $TOTAL_S s" >"$folder/$name.log"
  fi
  steps+=("$name:$status:$((SECONDS - start))")
  if ((status == 0)); then
    echo "$name: passed in $((SECONDS - start)) s"
    return
  fi
  failed+=("$name")
  if ((status == 124 || status == 137)); then echo "not done after $limit s" >>"$folder/$name.log"; fi
  if ((status >= 124)) || grep -qE 'CUDA error|INTERNAL ASSERT|illegal memory access' "$folder/$name.log"; then
    crashed=$name
  fi
  echo "$name: FAILED (status $status); $folder/$name.log ends with"
  tail -n 15 "$folder/$name.log"
}

gpu_tests() {
  local options=()
  "$python" -c "import pytest_timeout" 2>/dev/null || options=(-o addopts=--strict-markers)
  "$python" -m pytest -m gpu -q "${options[@]}" "$@"
}
export -f gpu_tests

all_steps() {
  local real="--hidden 1024 --layers 28 --heads 16 --kv-heads 8 --ffn 3072 --vocab 151936" others
  step versions 60 "$python" tools/gpu_probe.py versions
  step build 150 "$python" setup.py build_ext --inplace
  step graphs 60 "$python" tools/gpu_probe.py graphs
  step kernels 120 bash -c 'gpu_tests tests/gpu/test_kernels.py tests/gpu/test_attention.py tests/gpu/test_staging.py \
    tests/gpu/test_decode_graph.py'
  step residency 120 bash -c 'gpu_tests tests/gpu/test_residency.py'
  step one_gpu 120 bash -c 'gpu_tests tests/gpu/test_one_gpu.py'
  # shellcheck disable=SC2086 # words of their own
  step train_step 90 "$python" -m torch.distributed.run --standalone --nproc-per-node 1 tools/benchmarks/train_step.py \
    --tp 1 $real --sequences 32 --min-tokens 128 --max-tokens 1024 --micro-batch-tokens 8192 --repeats 5 --dtype bfloat16
  step grpo 180 "$python" tools/benchmarks/real_size.py --size 0.6b --cases colocated --steps 3 --dtype bfloat16 \
    --logs "$folder/grpo" logging.trace=true rollout.sampling.max_response_tokens=1024 rollout.max_context_tokens=1088 \
    rollout.max_running_requests=64 actor.micro_batch_tokens=8192 \
    "batch={prompts_per_step: 8, samples_per_prompt: 8, mini_batches: 1}"
  step two_ranks 90 bash -c 'gpu_tests tests/gpu/test_two_ranks.py'
  others=$(cd "$REPOSITORY" && for file in tests/gpu/test_*.py; do
    [[ $file =~ _(kernels|attention|staging|decode_graph|residency|one_gpu|two_ranks|sglang)\.py$ ]] || printf ' %s' "$file"
  done)
  if [[ $others ]]; then step more_tests 120 bash -c "gpu_tests$others"; fi
  step reshard_kernel 90 "$python" tools/benchmarks/reshard_kernel.py --device cuda
  step weight_sync 110 "$python" tools/benchmarks/weight_sync.py --device cuda --params 1b --dtype bfloat16
  step plan 60 "$python" tools/benchmarks/plan.py
  if [[ -n ${RLTRAIN_SGLANG_PYTHON:-} ]]; then
    TOTAL_S=$((SECONDS + SGLANG_S))
    step sglang "$SGLANG_S" bash -c 'gpu_tests tests/gpu/test_sglang.py'
  else
    echo "sglang: not run; set RLTRAIN_SGLANG_PYTHON to a Python that has it"
  fi
}

if [[ $listing ]]; then
  folder=FOLDER
  all_steps
  carry
  exit 0
fi

probe=$("$python" - <<'END'
import re, sys
try:
    import numpy, setuptools, torch
except ImportError as error:
    sys.exit(f"gpu_check: {sys.executable} has no {error.name}")
if not torch.cuda.is_available():
    built = "with" if torch.version.cuda else "without"
    sys.exit(f"gpu_check: torch {torch.__version__} of {sys.executable}, built {built} CUDA, finds no GPU")
major, minor = torch.cuda.get_device_capability()
name = re.sub("[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
print(name, f"{major}{minor}{'a' if major >= 9 else ''}", sys.executable)
END
) || refuse "nothing was run: needs an NVIDIA GPU, and in RLTRAIN_PYTHON (now $python) a Python whose torch can use it"

read -r gpu architecture python <<<"$probe" # from here on with its whole path
export python RLTRAIN_CUDA_ARCHITECTURES=${RLTRAIN_CUDA_ARCHITECTURES:-$architecture}
folder=${1:-$REPOSITORY/docs/benchmarks/$gpu}
mkdir -p "$folder" || refuse "cannot make the folder $folder"
folder=$(cd "$folder" && pwd)
cd "$REPOSITORY" || refuse "there is no $REPOSITORY"
export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH} RLTRAIN_NATIVE=require OMP_NUM_THREADS=1
steps=()
failed=()
crashed=

missing=()
for package in "${PACKAGES[@]}"; do
  "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('${package%:*}') is None)" ||
    missing+=("${package#*:}")
done
if ((${#missing[@]})); then
  echo "$python lacks ${missing[*]}: what needs them fails"
  carry
fi

all_steps
"$python" tools/gpu_summary.py "$folder" "${steps[@]}" || failed+=(summary)
tar -czf "$folder.tar.gz" -C "$(dirname "$folder")" "$(basename "$folder")" || failed+=(archive)

if [[ $crashed ]]; then echo "gpu_check: $crashed crashed, so nothing after it was run"; fi
if ((${#failed[@]})); then
  echo "gpu_check: failed: ${failed[*]}; all results are in $folder.tar.gz"
  exit 1
fi
echo "gpu_check: all passed in $SECONDS s; results are in $folder.tar.gz"
