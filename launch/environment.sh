# Sourced by the scripts of this repository. `prepare_environment` sets $python, an interpreter that can run rltrain:
#
#   prepare_environment         what a run needs
#   prepare_environment dev     what the tests need as well
#
# It makes .venv and installs into it the versions of launch/constraints-cpu.txt; when that is done already it takes
# no time. tests/versions.sh sets other folders, Pythons and versions ($environment, $base_python, $constraints).
# With RLTRAIN_PYTHON=/path/to/python (one with a CUDA build of torch, say) that interpreter is used as it is
# and nothing is installed.
#
# `prepare_sglang` sets $sglang_python in the same way: the SGLang of launch/constraints-sglang.txt in .venv-sglang, or
# RLTRAIN_SGLANG_PYTHON as it is. A .venv-sglang that was made by hand is kept where it is complete.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

SGLANG_DISK_GB=16 # 11 stay; packages are downloaded before they are unpacked

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
    # Python compiles what it imports; all that is installed would take minutes.
    _step "install $(_sglang_pin) and what it needs, about 5 minutes" \
      "$sglang_python" -m pip install -qq --no-compile --requirement "$REPOSITORY/launch/constraints-sglang.txt"
    _step "import SGLang" _sglang_is_complete
  fi
  touch "$stamp"
}

# Slurm's daemons and what they need, of the system's packages; where they cannot be installed the tests say so.
prepare_slurm() {
  if { command -v slurmctld && command -v munged && command -v ip; } >/dev/null || ! command -v apt-get >/dev/null; then return; fi
  _step "install slurm-wlm, munge, iproute2" _install_slurm
}

_install_slurm() {
  (apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge iproute2) >/dev/null 2>&1 ||
    echo "note: they could not be installed: as root, apt-get install slurm-wlm munge iproute2" >&2
}

_sglang_pin() { grep '^sglang==' "$REPOSITORY/launch/constraints-sglang.txt"; }

# pip puts a package's metadata in place last, and sglang after what it needs.
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

# _require_disk GB WHAT: free where the repository is.
_require_disk() {
  local free_gb
  free_gb=$(df -Pk "$REPOSITORY" | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
  if ((free_gb < $1)); then fail "$2 takes $1 GB of disk while it is installed; $REPOSITORY has $free_gb GB free"; fi
}

# The repository's path belongs to it because an editable installation does not survive a move.
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
  fail "needs Python 3.11 or newer: put one on PATH as python3, or set RLTRAIN_PYTHON to one that has torch"
}

_refuse_foreign_torch() {
  if compgen -G "$1/.installed-*" >/dev/null; then return; fi
  local found
  found=$("$python" -c 'from importlib.metadata import distributions as d
print(*(x.version for x in d() if x.name == "torch"))')
  if [[ -n $found && torch==${found%%+*} != "$(_torch_pin)" ]]; then
    fail "$1 holds torch $found, not $(_torch_pin): set RLTRAIN_PYTHON=$python to use it as it is, or move $1 away"
  fi
}

_step() {
  local name=$1 start=$SECONDS
  shift
  echo "$name ..."
  "$@" || fail "stopped at: $name (see the output above); running the same command again continues"
  echo "$name: $((SECONDS - start)) s"
}
