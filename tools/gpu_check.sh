#!/usr/bin/env bash
# Runs the checks that need a GPU, in nine minutes: bash tools/gpu_check.sh --help
exec "${RLTRAIN_PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
