"""Where the functions and programs stand that a config names, found without running a line of them."""

import ast
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from rltrain.config.schema import Config
from rltrain.dry_run.sizes import WIDTH
from rltrain.errors import ConfigError
from rltrain.rewards.functions import BUILT_IN
from rltrain.rewards.judge import is_url
from rltrain.rewards.locating import found_command, unknown_function


def refuse_missing_functions(config: Config) -> None:
    """Raises ConfigError where the file of a placed reward or environment is not there or lacks its function."""
    if "reward" in config.placed_roles:
        describe_reward(config)
    if "env" in config.placed_roles:
        describe_environment(config)


def describe_reward(config: Config) -> list[str]:
    """Returns a line for each function. Raises ConfigError where its file is not there or has no such function."""
    rewards = {"reward": config.reward}
    rewards |= {
        f"evaluation.sets.{number}.reward": own.reward
        for number, own in enumerate(config.evaluation.sets)
        if own.reward
    }
    lines = []
    for section, reward in rewards.items():
        for number, part in enumerate(reward.parts):
            key = f"{section}.function" if reward.functions is None else f"{section}.functions.{number}.function"
            lines.append(f"{key}: {part.function}{_where(part.function, key)}")
    return [part for line in lines for part in wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)]


def describe_environment(config: Config) -> list[str]:
    """Returns what answers the model. Raises ConfigError where its file is not there or has no such function."""
    env, agent = config.env, config.env.agent
    if agent is not None and agent.command:
        return [f"env.agent.command: {shlex.join(found_command(agent.command, 'env.agent.command'))}"]
    key, name = ("env.function", env.function) if agent is None else ("env.agent.function", agent.function)
    if name is None:
        return []
    place, _, function = name.rpartition(":")
    return [f"{key}: {name}{_in_file(place, function, name, key) if place.endswith('.py') else ''}"]


def _where(name: str, config_key: str) -> str:
    if name in BUILT_IN:
        return ", built in"
    if is_url(name):
        return ", asked over HTTP"
    place, _, function = name.rpartition(":")
    if name.endswith(".py"):
        raise ConfigError(f"{config_key}: {name!r} names no function of the file; expected {name}:FUNCTION")
    if not place.endswith(".py"):
        if not place and "." not in name:
            raise unknown_function(name, config_key, [*BUILT_IN, "an URL"])
        return ", imported when the job starts"
    return _in_file(place, function, name, config_key)


def _in_file(place: str, function: str, name: str, config_key: str) -> str:
    path = Path(place).expanduser()
    if not path.is_file():
        raise ConfigError(f"{config_key}: {name!r}: there is no file {place!r} (relative paths start at {Path.cwd()})")
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{config_key}: {name!r}: {path} is no Python that can be read: {error}") from error
    lines = dict(_bound(tree))
    if function not in lines and "*" not in lines:
        raise ConfigError(f"{config_key}: {name!r}: {path} has no function {function!r}")
    return f", line {lines[function]}" if function in lines else ""


def _bound(scope: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that a module gives a value, with their lines; * for all of another module's."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        yield from _bound(node)
