"""Prints completion for a shell: `source <(rltrain completion bash)`, the same for zsh, or `rltrain completion fish |
source`."""

import argparse
import re
import sys

from rltrain.cli.main import SUBCOMMANDS, parser_of
from rltrain.config.explain import all_keys

WITH_KEYS = tuple(name for name, subcommand in SUBCOMMANDS.items() if subcommand.takes_keys)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the description and the arguments of the command to the parser."""
    parser.description = __doc__
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: argparse.Namespace) -> int:
    """Prints the script. Returns the exit status, always 0."""
    sys.stdout.write(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """Returns the completion script for `shell`."""
    keys = [f"{key}=" for key in all_keys()]
    usages = "".join(parser_of(name).format_usage() for name in WITH_KEYS)
    options = [*dict.fromkeys(re.findall(r"--[\w-]+", usages))]
    if shell == "fish":
        lines = [
            f"complete -c rltrain -n __fish_use_subcommand -a {name} -d '{subcommand.help}'"
            for name, subcommand in SUBCOMMANDS.items()
        ]
        condition = f"__fish_seen_subcommand_from {' '.join(WITH_KEYS)}"
        return "\n".join([*lines, f"complete -c rltrain -n '{condition}' -a '{' '.join([*options, *keys])}'"]) + "\n"
    text = BASH.format(
        commands=" ".join(SUBCOMMANDS), with_keys=" | ".join(WITH_KEYS), options=" ".join(options), keys=" ".join(keys)
    )
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + text
