#!/usr/bin/env bash
# What only a GPU can show, in less than eight minutes: builds the native libraries, runs the GPU tests and the
# benchmarks, and writes what they found as JSON.
#
#   bash tools/gpu_check.sh [FOLDER]        default: docs/benchmarks/<name of the GPU>
#
# FOLDER/summary.json has the date, the versions, what became of every step and the benchmarks' results; NAME.log beside
# it is a step's output. Needs no network. Python is RLTRAIN_PYTHON, or else python3: one with a CUDA build of torch,
# numpy and setuptools, and for the tests pytest and what rltrain depends on. Where RLTRAIN_SGLANG_PYTHON names a Python
# that has SGLang, its tests run too and may take seven minutes more.
#
# Exit status: 0 every step passed; 1 a step failed, the others ran all the same; 2 no GPU, or no such Python.
set -uo pipefail

TOTAL_S=470
SGLANG_S=420
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${RLTRAIN_PYTHON:-python3}

refuse() {
  echo "gpu_check: $*" >&2
  exit 2
}

# step NAME LIMIT_S COMMAND...: no longer than its limit and what is left of the total.
step() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
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
  echo "$name: FAILED (status $status); $folder/$name.log ends with"
  tail -n 15 "$folder/$name.log"
}

gpu_tests() {
  local package missing=() options=()
  for package in pytest hypothesis pytest_timeout megatron transformers pydantic; do
    "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$package') is None)" || missing+=("$package")
  done
  if ((${#missing[@]})); then
    echo "$python lacks ${missing[*]}: tests that need them fail. Where pip can be used: pip install -e '.[dev]'"
  fi
  if [[ " ${missing[*]} " == *" pytest_timeout "* ]]; then options=(-o addopts=--strict-markers); fi
  "$python" -m pytest -m gpu -q "${options[@]}" "$@"
}
export -f gpu_tests

probe=$("$python" - <<'END'
import re, sys
try:
    import numpy, setuptools, torch
except ImportError as error:
    sys.exit(f"gpu_check: {sys.executable} has no {error.name}")
if not torch.cuda.is_available():
    built = "with" if torch.version.cuda else "without"
    sys.exit(f"gpu_check: torch {torch.__version__} of {sys.executable}, built {built} CUDA, finds no GPU")
print(re.sub("[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_"), sys.executable)
END
) || refuse "nothing was run: needs an NVIDIA GPU, and in RLTRAIN_PYTHON (now $python) a Python whose torch can use it"

export python=${probe#* } # from here on with its whole path
folder=${1:-$REPOSITORY/docs/benchmarks/${probe%% *}}
mkdir -p "$folder" || refuse "cannot make the folder $folder"
folder=$(cd "$folder" && pwd)
cd "$REPOSITORY" || refuse "there is no $REPOSITORY"
export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH} RLTRAIN_NATIVE=require OMP_NUM_THREADS=1
steps=()
failed=()

step build 150 "$python" setup.py build_ext --inplace
step tests 150 bash -c 'gpu_tests tests/gpu --ignore tests/gpu/test_sglang.py'
step reshard_kernel 90 "$python" tools/benchmarks/reshard_kernel.py --device cuda
step weight_sync 110 "$python" tools/benchmarks/weight_sync.py --device cuda --params 1b --dtype bfloat16
step plan 60 "$python" tools/benchmarks/plan.py
if [[ -n ${RLTRAIN_SGLANG_PYTHON:-} ]]; then
  TOTAL_S=$((SECONDS + SGLANG_S))
  step sglang "$SGLANG_S" bash -c 'gpu_tests tests/gpu/test_sglang.py'
else
  echo "sglang: not run; set RLTRAIN_SGLANG_PYTHON to a Python that has it"
fi
"$python" tools/gpu_summary.py "$folder" "${steps[@]}" || failed+=(summary)

if ((${#failed[@]})); then
  echo "gpu_check: failed: ${failed[*]}; all results are in $folder/summary.json"
  exit 1
fi
echo "gpu_check: all passed in $SECONDS s; results are in $folder/summary.json"
