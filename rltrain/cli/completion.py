"""Completion of the command line: `source <(rltrain completion bash)`, or zsh; `rltrain completion fish | source`."""

import argparse
import sys
from collections.abc import Sequence

from rltrain.cli.main import SUBCOMMANDS
from rltrain.config.explain import all_keys
from rltrain.errors import command_name

WITH_KEYS = ("train", "dry-run", "evaluate")
"""Commands that take config keys."""
BASH = """\
_rltrain() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    return
  fi
  COMPREPLY=($(compgen -f -- "$word"))
  case "$command" in
    {with_keys})
      COMPREPLY+=($(compgen -W "{options} {keys}" -- "$word"))
      [[ "${{COMPREPLY[0]}}" == *= ]] && compopt -o nospace
      ;;
  esac
}}
complete -F _rltrain rltrain
"""
OPTIONS = (
    "--config",
    "--nproc-per-node",
    "--nnodes",
    "--world-size",
    "--ranks-per-node",
    "--gpu",
    "--ranks",
    "--search",
    "--calibrate",
    "--prompt-tokens",
    "--response-tokens",
    "--checkpoint",
    "--output",
)


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 done."""
    parser = argparse.ArgumentParser(prog=command_name(), description=__doc__)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    sys.stdout.write(script(parser.parse_args(argv).shell))
    return 0


def script(shell: str) -> str:
    """What the shell is to read."""
    keys = [f"{key}=" for key in all_keys()]
    if shell == "fish":
        lines = [
            f"complete -c rltrain -n __fish_use_subcommand -a {name} -d '{subcommand.help}'"
            for name, subcommand in SUBCOMMANDS.items()
        ]
        condition = f"__fish_seen_subcommand_from {' '.join(WITH_KEYS)}"
        return "\n".join([*lines, f"complete -c rltrain -n '{condition}' -a '{' '.join([*OPTIONS, *keys])}'"]) + "\n"
    text = BASH.format(
        commands=" ".join(SUBCOMMANDS), with_keys=" | ".join(WITH_KEYS), options=" ".join(OPTIONS), keys=" ".join(keys)
    )
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + text
