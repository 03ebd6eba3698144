"""Server arguments by name, as the installed SGLang defines them. As a program it checks some of them:

    python rltrain_arguments.py '{"attention_backend": "fa3"}'

It prints one JSON object. `missing` is the reason if SGLang cannot be imported. Otherwise `version` is SGLang's,
`names` lists its arguments, `fields` maps the given names to fields of ServerArgs, and `problem` describes a wrong
value. Imports only the standard library and SGLang.
"""

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn


class Refused(Exception):  # noqa: N818 - becomes a line of text
    """SGLang does not accept an argument. The message has the reason."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises Refused for wrong arguments and does not end the program."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def make_parser() -> Parser:
    """Returns a parser with all arguments of SGLang's server."""
    from sglang.srt.server_args import ServerArgs

    parser = Parser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    return parser


def actions_by_name(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns all long options, with underscores for hyphens, and all fields of ServerArgs that an option sets."""
    found: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.dest not in ("help", "config"):
            found.setdefault(action.dest, action)
            for option in action.option_strings:
                if not option.startswith("--no-"):
                    found[option.lstrip("-").replace("-", "_")] = action
    return found


def command_line(parser: argparse.ArgumentParser, *layers: Mapping[str, Any]) -> list[str]:
    """Returns command-line options for all `layers`. Later layers win. Raises Refused for an unknown name."""
    actions = actions_by_name(parser)
    chosen: dict[str, tuple[argparse.Action, str, Any]] = {}
    for layer in layers:
        for name, value in layer.items():
            if name not in actions:
                raise Refused(f"unknown argument {name}")
            chosen[actions[name].dest] = actions[name], name, value
    return [token for action, name, value in chosen.values() for token in _options(action, name, value)]


def _options(action: argparse.Action, name: str, value: Any) -> list[str]:
    if value is None:
        return []
    wanted = "--" + name.replace("_", "-")
    flag = wanted if wanted in action.option_strings else action.option_strings[0]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise Refused(f"argument {name}: got {json.dumps(value)}; expected true or false")
        if value:
            return [flag]
        off = [option for option in action.option_strings if option.startswith("--no-")]
        if action.default and not off:
            raise Refused(f"argument {name}: SGLang cannot switch it off")
        return off[:1]
    if action.nargs in ("*", "+"):
        return [flag, *map(_text, value if isinstance(value, list) else [value])]
    return [f"{flag}={_text(value)}"]  # one word: a value may begin with a hyphen


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON object described at the top, for the given arguments."""
    try:
        import sglang.version

        parser = make_parser()
    except ImportError as error:
        return {"missing": f"{type(error).__name__}: {error}"}
    actions = actions_by_name(parser)
    fields = {name: actions[name].dest for name in arguments if name in actions}
    problem = None
    try:
        parser.parse_args(command_line(parser, {"model_path": "-"}, {name: arguments[name] for name in fields}))
    except Refused as refused:
        problem = str(refused)
    return {"version": sglang.version.__version__, "names": sorted(actions), "fields": fields, "problem": problem}


def main() -> None:
    gc.disable()  # imports leave no garbage, and the program ends soon
    with contextlib.redirect_stdout(sys.stderr):  # imports may print
        reply = check(json.loads(sys.argv[1]))
    print(json.dumps(reply))


if __name__ == "__main__":
    main()
