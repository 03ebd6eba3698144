#!/usr/bin/env bash
# Runs the default suite and the quickstart with other versions of Python and of the dependencies:
#
#   bash tests/versions.sh lowest|newest|py313 [--prepare | --numeric] [pytest arguments]
#
# lowest is Python 3.11 with the lower bound of every dependency in pyproject.toml; newest is Python 3.12 and py313 is
# Python 3.13, with the versions of launch/constraints-cpu.txt. The environment is made once in $RLTRAIN_VERSIONS
# (~/.cache/rltrain-versions) and takes up to 8 GB. --prepare only makes it; --numeric runs only tests/distributed.
# The exit status is 3 if this machine lacks that Python or the space.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/environment.sh"

NEEDED_GB=10 # 8 GB stay; the rest is for downloads

lack() {
  echo "versions: $*" >&2
  exit 3
}

find_python() { # VERSION: on PATH, or among those of pyenv
  local candidate
  for candidate in "python$1" "$(pyenv root 2>/dev/null || true)/versions/$1".*/bin/python; do
    if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  lack "no Python $1 on PATH or in pyenv; install one"
}

kind=${1:-}
case $kind in
  lowest) version=3.11 ;;
  newest) version=3.12 ;;
  py313) version=3.13 ;;
  *) fail "expected lowest, newest or py313, not '$kind'" ;;
esac
shift
unset RLTRAIN_PYTHON PYTHONPATH
base_python=$(find_python "$version")
folder=${RLTRAIN_VERSIONS:-$HOME/.cache/rltrain-versions}
environment=$folder/$kind
mkdir -p "$folder"
if [[ ! -d $environment ]]; then
  free_gb=$(df -Pk "$folder" | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
  ((free_gb >= NEEDED_GB)) || lack "$environment takes $NEEDED_GB GB while it is made; $folder has $free_gb GB free"
fi
if [[ $kind == lowest ]]; then
  constraints=$folder/lowest.txt
  bounds=$(sed -nE '/^dependencies = /,/^\]/ s/^ *"([a-z-]+)>=([0-9.]+).*/\1==\2/p' "$REPOSITORY/pyproject.toml")
  bounded=$(sed -E 's/==.*//; s/-/[-_]/g' <<<"$bounds" | paste -sd '|')
  # Every other package keeps its usual version, except the one that pydantic pins itself.
  { echo "$bounds" && grep -viE "^($bounded|pydantic_core)==" "$REPOSITORY/launch/constraints-cpu.txt"; } >"$constraints"
fi
prepare_environment dev
export RLTRAIN_PYTHON=$python
"$python" -c 'import sys, importlib.metadata as m
print("versions: Python %d.%d.%d," % sys.version_info[:3],
      *(f"{name} {m.version(name)}" for name in ("torch", "megatron-core", "transformers")))'
case ${1:-} in
  --prepare) exit ;;
  --numeric) exec bash tests/run.sh tests/distributed "${@:2}" ;;
esac
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
bash launch/quickstart.sh --out "$out"
bash tests/run.sh "$@"
