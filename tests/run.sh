#!/usr/bin/env bash
# The test suite, in the same .venv as the quickstart: bash tests/run.sh [--sglang] [pytest arguments]
# With --sglang only tests/sglang, against the real package: installs it once into .venv-sglang (11 GB, 5 minutes).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment dev
cd "$REPOSITORY"
if [[ ${1:-} == --sglang ]]; then
  shift
  prepare_sglang
  export RLTRAIN_SGLANG_PYTHON=$sglang_python
  if [[ " $*" != *" tests/sglang"* ]]; then set -- tests/sglang "$@"; fi
fi
export OMP_NUM_THREADS=1 # ranks share the cores
exec "$python" -m pytest "$@"
