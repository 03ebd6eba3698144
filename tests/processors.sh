#!/usr/bin/env bash
# Runs tests of floats as on other processors: bash tests/processors.sh [--slow] [pytest arguments]
# Each setting limits the instructions of torch, oneDNN and MKL. One line reports the seconds and the result of each.
# --slow adds the slow tests. Arguments select other tests: bash tests/processors.sh tests/distributed/test_fsdp.py
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
marked="not slow"
[[ ${1:-} != --slow ]] || { marked="not alone" && shift; }
if (($# == 0)); then
  compared='approx\(|near\(|allclose|assert_close|torch\.equal|[0-9]e-[0-9]'
  mapfile -t files < <(grep -lE "$compared" tests/distributed/test_*.py tests/unit/test_*.py)
  mapfile -t files < <(grep -lE '^ *(import|from) torch|tests\.(distributed|rollout_models)' "${files[@]}")
  set -- "${files[@]}"
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
failed=0

try() { # NAME FLAG VARIABLE=VALUE ...: the setting needs a processor with FLAG in /proc/cpuinfo
  local name=$1 flag=$2 start=$SECONDS
  if [[ -n $flag ]] && ! grep -qsw "$flag" /proc/cpuinfo; then
    echo "$name: skipped, because this processor has no $flag"
    return
  fi
  env "${@:3}" bash tests/run.sh -q -m "$marked" "${tests[@]}" >"$log" 2>&1
  local status=$?
  ((status == 0)) || { failed=1 && cat "$log" >&2; }
  echo "$name: $((SECONDS - start)) s, $([[ $status == 0 ]] && echo passed || echo FAILED): $(tail -n 1 "$log")"
}

tests=("$@")
avx2=(ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2)
try default "" ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
try avx2 avx2 "${avx2[@]}"
try avx512 avx512bw ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512
try compatible avx2 "${avx2[@]}" MKL_CBWR=COMPATIBLE
exit "$failed"
