# Sourced by the scripts of this repository. `prepare_environment` sets $python, an interpreter that can run rltrain:
#
#   prepare_environment         what a run needs
#   prepare_environment dev     what the tests need as well
#
# It makes .venv and installs into it the versions of launch/constraints-cpu.txt; when that is done already it takes
# no time. With RLTRAIN_PYTHON=/path/to/python (one with a CUDA build of torch, say) that interpreter is used as it is
# and nothing is installed.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

fail() {
  echo "rltrain: $*" >&2
  exit 1
}

prepare_environment() {
  local extra=${1:-}
  if [[ -n ${RLTRAIN_PYTHON:-} ]]; then
    _use_interpreter "$RLTRAIN_PYTHON"
    return
  fi
  local venv=$REPOSITORY/.venv stamp
  python=$venv/bin/python
  stamp=$venv/.installed-${extra:-run}-$(_requirements_digest)
  if [[ -e $stamp && -x $python ]]; then return; fi
  if command -v nvidia-smi >/dev/null; then
    echo "note: .venv gets the CPU build of torch; to train on this machine's GPUs set RLTRAIN_PYTHON"
  fi
  if ! "$python" -m pip --version >/dev/null 2>&1; then _step "create .venv" _create_venv "$venv"; fi
  _refuse_foreign_torch "$venv"
  # torch goes first and alone: without its exact version pip may take a CUDA build, gigabytes of it.
  _step "install $(_torch_pin)" _pip "$(_torch_pin)"
  _step "install rltrain${extra:+[$extra]} and what it needs" _pip --editable "$REPOSITORY${extra:+[$extra]}"
  touch "$stamp"
}

_use_interpreter() {
  python=$1
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "RLTRAIN_PYTHON=$1 is not Python 3.11 or newer"
  "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
    fail "RLTRAIN_PYTHON=$1 has no torch: install torch and the dependencies in pyproject.toml there"
  export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
}

# The repository's path belongs to it because an editable installation does not survive a move.
_requirements_digest() {
  local digest
  digest=$(cat "$REPOSITORY"/{pyproject.toml,setup.py,csrc/*,launch/constraints-cpu.txt} - <<<"$REPOSITORY" | cksum)
  echo "${digest%% *}"
}

_torch_pin() { grep '^torch==' "$REPOSITORY/launch/constraints-cpu.txt"; }

_pip() { "$python" -m pip install -qq --constraint "$REPOSITORY/launch/constraints-cpu.txt" "$@"; }

_create_venv() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -m venv "$1" || fail "$candidate -m venv failed; on Debian and Ubuntu install the package python3-venv"
      return
    fi
  done
  fail "needs Python 3.11 or newer: put one on PATH as python3, or set RLTRAIN_PYTHON to one that has torch"
}

_refuse_foreign_torch() {
  if compgen -G "$1/.installed-*" >/dev/null; then return; fi
  local found
  found=$("$python" -c 'from importlib.metadata import distributions as d
print(*(x.version for x in d() if x.name == "torch"))')
  if [[ -n $found && torch==${found%%+*} != "$(_torch_pin)" ]]; then
    fail ".venv holds torch $found, not $(_torch_pin): set RLTRAIN_PYTHON=$python to use it as it is, or move .venv away"
  fi
}

_step() {
  local name=$1 start=$SECONDS
  shift
  echo "$name ..."
  "$@" || fail "stopped at: $name (see the output above); running the same command again continues"
  echo "$name: $((SECONDS - start)) s"
}
