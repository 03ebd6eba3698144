# Sourced by the scripts of this repository. `prepare_environment` sets $python to an interpreter that can run rltrain:
#
#   prepare_environment         for runs
#   prepare_environment dev     for runs and tests
#
# It creates .venv with the versions of launch/constraints-cpu.txt, once. tests/versions.sh sets other folders, Pythons
# and versions ($environment, $base_python, $constraints). With RLTRAIN_PYTHON=/path/to/python, such as one with a CUDA
# build of torch, it uses that interpreter and installs nothing.
#
# `prepare_sglang` sets $sglang_python in the same way. It installs the SGLang of launch/constraints-sglang.txt into
# .venv-sglang, or uses RLTRAIN_SGLANG_PYTHON unchanged. A complete .venv-sglang made by hand is kept.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

SGLANG_DISK_GB=16 # 11 GB stay; the rest is for downloaded packages

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
  local venv=${environment:-$REPOSITORY/.venv} stamp
  python=$venv/bin/python
  stamp=$venv/.installed-${extra:-run}-$(_requirements_digest)
  if [[ -e $stamp && -x $python ]]; then return; fi
  if command -v nvidia-smi >/dev/null; then
    echo "note: .venv may get a CPU build of torch; to train on this machine's GPUs set RLTRAIN_PYTHON"
  fi
  if ! "$python" -m pip --version >/dev/null 2>&1; then _step "create .venv" _create_venv "$venv"; fi
  _refuse_foreign_torch "$venv"
  # torch first and alone: without its exact version pip may take a CUDA build of several gigabytes.
  _step "install $(_torch_pin)" _pip "$(_torch_pin)"
  _step "install rltrain${extra:+[$extra]} and its dependencies" _pip --editable "$REPOSITORY${extra:+[$extra]}"
  touch "$stamp"
}

_use_interpreter() {
  python=$1
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "RLTRAIN_PYTHON=$1 is not Python 3.11 or newer"
  "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
    fail "RLTRAIN_PYTHON=$1 has no torch: install torch and the dependencies in pyproject.toml there"
  export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
}

prepare_sglang() {
  if [[ -n ${RLTRAIN_SGLANG_PYTHON:-} ]]; then
    sglang_python=$RLTRAIN_SGLANG_PYTHON
    "$sglang_python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("sglang") is None)' ||
      fail "RLTRAIN_SGLANG_PYTHON=$sglang_python has no sglang: install $(_sglang_pin) there, or unset it"
    return
  fi
  local venv=$REPOSITORY/.venv-sglang stamp
  sglang_python=$venv/bin/python
  stamp=$venv/.installed-$(_sglang_pin)
  if [[ -e $stamp && -x $sglang_python ]]; then return; fi
  if ! _sglang_is_complete 2>/dev/null; then
    _require_disk "$SGLANG_DISK_GB" "$(_sglang_pin)"
    if ! "$sglang_python" -m pip --version >/dev/null 2>&1; then _step "create .venv-sglang" _create_venv "$venv"; fi
    # Compiling all installed modules would take minutes; Python compiles those that it imports.
    _step "install $(_sglang_pin) and its dependencies, about 5 minutes" \
      "$sglang_python" -m pip install -qq --no-compile --requirement "$REPOSITORY/launch/constraints-sglang.txt"
    _step "import SGLang" _sglang_is_complete
  fi
  touch "$stamp"
}

# Slurm's daemons and their dependencies, from the system's packages. The tests report if they are missing.
prepare_slurm() {
  if { command -v slurmctld && command -v munged && command -v ip; } >/dev/null || ! command -v apt-get >/dev/null; then return; fi
  _step "install slurm-wlm, munge, iproute2" _install_slurm
}

_install_slurm() {
  (apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge iproute2) >/dev/null 2>&1 ||
    echo "note: Slurm could not be installed; run as root: apt-get install slurm-wlm munge iproute2" >&2
}

_sglang_pin() { grep '^sglang==' "$REPOSITORY/launch/constraints-sglang.txt"; }

# pip writes a package's metadata last, and installs sglang after its dependencies.
_sglang_is_complete() {
  "$sglang_python" - "$(_sglang_pin)" <<'END'
import sys
from importlib.metadata import version

found = f"sglang=={version('sglang')}"
if found != sys.argv[1]:
    sys.exit(f"{sys.executable} has {found}, not {sys.argv[1]}")
import sglang.srt.server_args
END
}

# _require_disk GB WHAT: fails without this much free disk on the repository's file system.
_require_disk() {
  local free_gb
  free_gb=$(df -Pk "$REPOSITORY" | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
  if ((free_gb < $1)); then fail "installing $2 takes $1 GB of disk; $REPOSITORY has $free_gb GB free"; fi
}

# Includes the repository's path, because an editable installation does not survive a move.
_requirements_digest() {
  local digest
  digest=$(cat "$REPOSITORY"/{pyproject.toml,setup.py,csrc/*,launch/constraints-cpu.txt} - <<<"$REPOSITORY" | cksum)
  echo "${digest%% *}"
}

# The version of torch for the Python in $python.
_torch_pin() {
  local which=">="
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || which="<"
  sed -nE "s/^(torch==[^; ]*)(; python_version $which \"3\.12\")?$/\1/p" "$(_constraints)"
}

_constraints() { echo "${constraints:-$REPOSITORY/launch/constraints-cpu.txt}"; }

_pip() { "$python" -m pip install -qq --constraint "$(_constraints)" "$@"; }

_create_venv() {
  local candidate
  for candidate in ${base_python:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -m venv "$1" || fail "$candidate -m venv failed; on Debian and Ubuntu install the package python3-venv"
      return
    fi
  done
  fail "needs Python 3.11 or newer: put one on PATH as python3, or set RLTRAIN_PYTHON to one with torch"
}

_refuse_foreign_torch() {
  if compgen -G "$1/.installed-*" >/dev/null; then return; fi
  local found
  found=$("$python" -c 'from importlib.metadata import distributions as d
print(*(x.version for x in d() if x.name == "torch"))')
  if [[ -n $found && torch==${found%%+*} != "$(_torch_pin)" ]]; then
    fail "$1 holds torch $found, not $(_torch_pin): set RLTRAIN_PYTHON=$python to use it unchanged, or move $1 away"
  fi
}

_step() {
  local name=$1 start=$SECONDS
  shift
  echo "$name ..."
  "$@" || fail "stopped at: $name (see the output above). Run the same command again to continue"
  echo "$name: $((SECONDS - start)) s"
}
