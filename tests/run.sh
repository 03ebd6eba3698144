#!/usr/bin/env bash
# The test suite, in the same .venv as the quickstart: bash tests/run.sh [pytest arguments]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"
prepare_environment dev
cd "$REPOSITORY"
export OMP_NUM_THREADS=1 # ranks share the cores
exec "$python" -m pytest "$@"
