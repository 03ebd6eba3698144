#!/usr/bin/env bash
# The test suite, in the same .venv as the quickstart: bash tests/run.sh [--sglang | --slurm | --lint] [pytest arguments]
# --sglang: only tests/sglang, against the real package, which is installed once into .venv-sglang (11 GB, 5 minutes).
# --slurm: only tests/slurm, as root, on a Slurm of two nodes that is set up for them. --lint: ruff, mypy, codespell.
# Three files are tested at a time, or as many as -n says, for many tests wait. What Python compiles is kept.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment dev
cd "$REPOSITORY" && unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1 RES_OPTIONS="timeout:1 attempts:1" # ranks share cores; stores ask resolvers that may be silent
case ${1:-} in
  --lint) exec "$python" tests/lint.py ;;
  --sglang) prepare_sglang; export RLTRAIN_SGLANG_PYTHON=$sglang_python ;;
  --slurm) prepare_slurm ;;
esac
export SSL_CERT_FILE="" SSL_CERT_DIR=/nonexistent # tests need no certificates, and a client takes 50 ms to read them
if [[ ${1:-} == --s* ]]; then # what these start takes both cores
  folder=tests/${1#--} && shift
  set -- -n 0 $([[ " $*" == *" $folder"* ]] || echo "$folder") "$@"
fi
exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" # in the order of tests/conftest.py
