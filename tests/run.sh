#!/usr/bin/env bash
# The test suite, in the same .venv as the quickstart: bash tests/run.sh [--sglang | --lint] [pytest arguments]
# With --sglang only tests/sglang, against the real package: installs it once into .venv-sglang (11 GB, 5 minutes).
# With --lint what reads the code and runs none of it: ruff, mypy, codespell. Two files are tested at a time, or as
# many as -n says.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment dev
cd "$REPOSITORY"
export OMP_NUM_THREADS=1 RES_OPTIONS="timeout:1 attempts:1" # ranks share cores; stores ask resolvers that may be silent
case ${1:-} in
  --lint) exec "$python" tests/lint.py ;;
  --sglang)
    shift
    prepare_sglang
    export RLTRAIN_SGLANG_PYTHON=$sglang_python
    if [[ " $*" != *" tests/sglang"* ]]; then set -- tests/sglang "$@"; fi
    set -- -n 0 "$@" ;; # a server takes both cores
esac
exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@" # in the order of tests/conftest.py
