#!/usr/bin/env bash
# What only a GPU can show, in eight minutes: bash tools/gpu_check.sh --help
exec "${RLTRAIN_PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
