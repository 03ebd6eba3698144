#!/usr/bin/env bash
# The test suite, in the same .venv as the quickstart: bash tests/run.sh [--ENGINE | --slurm | --lint] [pytest arguments]
# --sglang, --vllm: only tests/sglang or tests/vllm, against the real package. It is installed once: 11 GB or 3 GB.
# --slurm: only tests/slurm, as root, on a Slurm of two nodes. --lint: ruff, mypy, codespell. Three files run at a time.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment dev
cd "$REPOSITORY" && unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1 RES_OPTIONS="timeout:1 attempts:1" # ranks share cores; some resolvers never answer
case ${1:-} in
  --lint) exec "$python" tests/lint.py ;;
  --sglang) prepare_sglang ;;
  --vllm) prepare_vllm ;;
  --slurm) prepare_slurm ;;
esac
export SSL_CERT_FILE="" SSL_CERT_DIR=/nonexistent # tests need no certificates, and reading them takes 50 ms
if [[ ${1:-} =~ ^--(sglang|vllm|slurm)$ ]]; then # these tests need both cores
  folder=tests/${1#--} && shift
  set -- -n 0 $([[ " $*" == *" $folder"* ]] || echo "$folder") "$@"
fi
exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" # in the order of tests/conftest.py
