"""Shell scripts are read as the shell would expand them, and nothing of them is run."""

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.errors import ConfigError
from rltrain.import_config.shell_script import read_text
from rltrain.import_config.shell_values import UNKNOWN

BASH = shutil.which("bash")


def started(text: str, *arguments: str, **environment: str) -> list[tuple[str, ...]]:
    return [one.arguments for one in read_text(text, "script", arguments, environment).started]


SCRIPTS = [
    "A=1\nrun $A \"$A b\" '$A' \\$A",
    'A=(--x 1 "two words" --y)\nA+=(--z)\nrun "${A[@]}" ${A[2]} ${#A[@]} last',
    "A=(\n  --x 1  # a comment\n  # --y 2\n  --z\n)\nrun ${A[@]} \\\n  --end",
    'A=()\nrun "${A[@]}" ${NOTHING} "${NOTHING}" end',
    "run ${A:-fallback} ${B:=set} $B ${B:+there} ${C:+there} end",
    "P=/a/b/model.tar.gz\nrun ${P##*/} ${P%.gz} ${P#/a} ${P/model/other} ${P//a/A} ${P%%.*} ${P:1:3} ${#P}",
    "N=$((1024 * 2 + 3))\nrun $N $((N / 2)) $(( N % 10 )) $((N > 5 ? 1 : 2)) $((2 ** 10))",
    'for i in 1 2 3; do X="$X$i"; done\nrun $X',
    "for ((i=0; i<4; i++)); do\n  if (( i < 2 )); then a+=(0); else a+=(1); fi\ndone\nrun ${a[@]}",
    'arr=(0 1 1)\nprintf -v F "[%s]" "$(IFS=\', \'; echo "${arr[*]}")"\nrun "$F"',
    'if [ "$X" = "" ] && [[ -z $Y || 3 -gt 5 ]]; then run yes; else run no; fi',
    'case "gpu" in\n  npu) run npu ;;\n  gpu | cuda)\n    run "gpu"\n    ;;\n  *) run other ;;\nesac',
    'f() { local n=$1; run "$n" "$2"; }\nf a "b c"',
    'run $(seq 16 8 40) "$(echo one; echo two)" $(basename /a/b.sh .sh)',
    "run before; { run inside; }; (run sub) ; run a && run b",
    'T="a b"\nrun $T "$T"x y"$T"',
    "run a <<EOF\nnot this\nEOF\nrun after 2>&1",
    'shift\nset -- a "b c"\nrun "$@" $# $2',
    "A=x\nA+=y\nrun $A ${A^^} ${A,,}",
    'KEYS=(a b)\nfor k in "${!KEYS[@]}"; do run $k ${KEYS[$k]}; done',
]


@pytest.mark.skipif(BASH is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_read_is_what_bash_would_start(script: str) -> None:
    printing = "run() { printf '%s\\0' \"$@\"; printf '\\1'; }\n"
    done = subprocess.run(["bash", "-c", printing + script], capture_output=True, text=True, check=False, env={})
    expected = [tuple(one.split("\0")[:-1]) for one in done.stdout.split("\1")[:-1]]
    assert [one[1:] for one in started(script) if one[0] == "run"] == expected


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0\r\n"), max_size=8), max_size=4))
def test_quoted_words_stay_as_they_are(words: list[str]) -> None:
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    assert started(f"run {quoted}") == [("run", *words)]


def test_programs_are_not_run_and_their_output_is_marked(tmp_path: Path) -> None:
    made = tmp_path / "made"
    ((_, value, known),) = started(f"touch_ $(touch {made}; nvidia-smi | wc -l) $(date +%Y)x")
    assert UNKNOWN in value and UNKNOWN in known and known.endswith("x")
    assert not made.exists()


def test_hardware_that_is_looked_for_is_not_there() -> None:
    script = 'D=$(python3 -c "import torch_npu" 2>/dev/null && echo npu || echo gpu)\nrun $D'
    assert started(script) == [("run", "gpu")]
    assert started("if nvidia-smi; then run a; else run b; fi")[-1] == ("run", "b")


def test_sourced_files_lie_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.sh").write_text("MODEL=(--layers 4)")
    script = tmp_path / "run.sh"
    script.write_text('D="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "$D/models/m.sh"\n')
    reading = read_text(script.read_text() + "run ${MODEL[@]}", str(script), (), {})
    assert [one.arguments for one in reading.started] == [("run", "--layers", "4")]


@pytest.mark.parametrize(
    "script", ["run 'open", 'run "open', "if true; then", "a=(1 2", "done", "while true; do x=1; done"]
)
def test_what_is_no_script_is_refused(script: str) -> None:
    with pytest.raises(ConfigError, match="script"):
        read_text(script, "script", (), {})


@settings(max_examples=50, deadline=None)
@given(st.text("ab$(){}[]\"'`;&|<>#\\ \n=!", max_size=30))
def test_nothing_but_a_message_comes_of_nonsense(text: str) -> None:
    with contextlib.suppress(ConfigError):
        read_text(text, "script", (), {})
